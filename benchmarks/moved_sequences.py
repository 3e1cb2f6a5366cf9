"""A thousand sequences that move to another replica in mid-stream, under load: every answer as if none had moved.

    python benchmarks/moved_sequences.py                 # to benchmarks/results/moved-sequences.json
    python benchmarks/moved_sequences.py --moves 100     # a short run; writes nothing

Starts a fleet's front and two replicas, each in a process of its own. Clients keep sequences with names, WebSockets,
and WebSockets of many sequences; each sends a chunk every 0.4 seconds, answered or not, and begins anew after 40.
Replicas are replaced one after the other until enough sequences have moved. Each answer is compared with the network
computed over the whole sequence. A pause is the longest time that a chunk of a sequence took in the hand-overs of one
round; in a round each sequence that stays open moves once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import torch
import uvloop
from torch import nn

from batchmaker.client import Client
from batchmaker.fleet.server import FleetServer
from batchmaker.lab.zoo.recurrent import LstmModel
from batchmaker.server.config import Config, FleetConfig, ModelEntry
from batchmaker.server.limits import Limits
from batchmaker.server.thread import ServerThread
from provenance import ROOT, made_by

MEASURES = ("src/batchmaker/fleet", "src/batchmaker/server", "benchmarks/moved_sequences.py")
SIZES = {"hidden": 32, "vocabulary_size": 100, "seed": 1}
NUM_NAMED, NUM_SOCKETS, NUM_CONNECTIONS, NUM_CARRIED = 24, 24, 4, 16
NUM_STREAMS = NUM_NAMED + NUM_SOCKETS + NUM_CONNECTIONS * NUM_CARRIED
NUM_CHUNKS, CHUNK, PERIOD_S = 40, 4, 0.4
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
Submit = Callable[[np.ndarray, bool], Awaitable[Any]]
"""Sends a chunk of a sequence, the last one or not, and returns its answer: a list of numbers."""


# --- replicas --------------------------------------------------------------------------------------------------------


def replica(config: Config, keys: dict[str, str], pipe: Connection) -> None:
    """A replica's process."""
    server = ServerThread(config, keys)
    pipe.send(server.start())
    with contextlib.suppress(EOFError):
        pipe.recv()
    server.stop()
    server.join()


class ReplicaProcess:
    """A replica that runs; see fleet.Running."""

    def __init__(self, config: Config, keys: dict[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=replica, args=(config, keys, there), daemon=True)
        self._process.start()
        there.close()
        self.http = ("", 0)
        self.grpc = None

    async def start(self) -> None:
        host, _, port = (await asyncio.to_thread(self._pipe.recv))[0].removeprefix("http://").rpartition(":")
        self.http = host, int(port)

    async def ended(self) -> None:
        await asyncio.to_thread(self._process.join)

    async def stop(self) -> None:
        self._pipe.send("stop")
        await self.ended()

    def kill(self) -> None:
        self._process.kill()


class Processes:
    """Starts replicas; see fleet.FleetLauncher."""

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}

    async def launch(self, number: int, config: Config) -> ReplicaProcess:
        started = ReplicaProcess(config, self.keys)
        await started.start()
        return started

    async def room(self, config: Config) -> int:
        return 2


# --- load ------------------------------------------------------------------------------------------------------------


class Seen:
    """What the streams have seen. chunks: of each stream, when each was sent and answered."""

    def __init__(self) -> None:
        network = LstmModel(**SIZES)
        cell = network.step.module.layers[0]
        self.embedding = network.step.module.embedding
        self.lstm = nn.LSTM(cell.input_size, cell.hidden_size, batch_first=True)
        with torch.no_grad():
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                getattr(self.lstm, f"{name}_l0").copy_(getattr(cell, name))
        self.chunks: list[list[tuple[float, float]]] = [[] for _ in range(NUM_STREAMS)]
        self.num_begun = self.num_answered = self.num_wrong = 0
        self.missing: list[str] = []
        self.over = asyncio.Event()

    def whole(self, tokens: np.ndarray) -> np.ndarray:
        """Return the state after each token, in one piece."""
        with torch.no_grad():
            return self.lstm(self.embedding(torch.from_numpy(tokens))[None])[0][0].numpy()


async def stream(seen: Seen, place: int, begin: Callable[[], Any]) -> None:
    """Keep a sequence going, and begin another after it, until all is over."""
    random = np.random.default_rng(place)
    await asyncio.sleep(PERIOD_S * place / NUM_STREAMS)
    while not seen.over.is_set():
        tokens = random.integers(0, SIZES["vocabulary_size"], NUM_CHUNKS * CHUNK)
        wanted = seen.whole(tokens)[CHUNK - 1 :: CHUNK]
        seen.num_begun += 1
        try:
            async with begin() as submit:
                await sequence(seen, place, submit, np.split(tokens, NUM_CHUNKS), wanted)
        except* Exception as errors:
            seen.missing += [f"{type(error).__name__}: {error}" for error in errors.exceptions]


async def sequence(seen: Seen, place: int, submit: Submit, chunks: list[np.ndarray], wanted: np.ndarray) -> None:
    """Send the chunks when they are due, at most 8 ahead of the answers, and compare each answer."""
    room, begun_s = asyncio.Semaphore(8), time.perf_counter()

    async def one(number: int, last: bool) -> None:
        sent_s = time.perf_counter()
        try:
            right = np.allclose(await submit(chunks[number], last), wanted[number], **CLOSE)
        finally:
            room.release()
        seen.num_answered += 1
        seen.num_wrong += not right
        seen.chunks[place].append((sent_s, time.perf_counter()))

    async with asyncio.TaskGroup() as sending:
        for number in range(len(chunks)):
            last = number == len(chunks) - 1 or seen.over.is_set()
            await asyncio.sleep(begun_s + number * PERIOD_S - time.perf_counter())
            await room.acquire()
            sending.create_task(one(number, last))
            if last:
                return


@asynccontextmanager
async def named(http: httpx.AsyncClient, name: str) -> AsyncIterator[Submit]:
    """A sequence with a name. Its requests reach the front in order over one connection: each waits for the last."""
    start, order = True, asyncio.Lock()

    async def submit(chunk: np.ndarray, last: bool) -> Any:
        nonlocal start
        async with order:
            marks = {"sequence_id": name, "sequence_start": start, "sequence_end": last}
            start = False
            answer = await http.post("/v2/models/lstm/generate", json={"input_0": chunk.tolist(), "parameters": marks})
        if answer.status_code != httpx.codes.OK:
            raise RuntimeError(answer.text)
        return answer.json()["output_0"]

    yield submit


@asynccontextmanager
async def carried(opened: Any) -> AsyncIterator[Submit]:
    """A sequence of a WebSocket, of its own or of many."""
    async with opened as there:

        async def submit(chunk: np.ndarray, last: bool) -> Any:
            given = {"input_0": chunk.tolist()} if last else chunk
            return (await (there.finish(given) if last else there.submit(given)))["output_0"]

        yield submit


@asynccontextmanager
async def talking(address: str, seen: Seen) -> AsyncIterator[None]:
    """Keep all streams going for as long as the block takes, then let them end."""
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(address))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=address, timeout=None, limits=limits))
        begins = [lambda place=place: named(http, f"stream {place}") for place in range(NUM_NAMED)]
        begins += [lambda: carried(client.open_sequence("lstm"))] * NUM_SOCKETS
        for _ in range(NUM_CONNECTIONS):
            connection = await stack.enter_async_context(client.open_sequences("lstm"))
            begins += [lambda connection=connection: carried(connection.open())] * NUM_CARRIED
        async with asyncio.TaskGroup() as tasks:
            for place, begin in enumerate(begins):
                tasks.create_task(stream(seen, place, begin))
            try:
                yield
            finally:
                seen.over.set()


# --- moves -----------------------------------------------------------------------------------------------------------


async def handing_over(server: FleetServer, windows: list[tuple[float, float]]) -> None:
    """Note from when to when a replica hands over what it has."""
    while True:
        leaving = [one for one in server.balancer.replicas.values() if one.state == "draining" and one.num_sequences]
        if leaving:
            begin_s = time.perf_counter()
            while any(one.num_sequences for one in leaving):
                await asyncio.sleep(0.001)
            windows.append((begin_s, time.perf_counter()))
        await asyncio.sleep(0.001)


def pauses_ms(seen: Seen, windows: list[tuple[float, float]]) -> list[float]:
    """Return, for each stream, the longest time of its chunks that were unanswered in one of the windows."""
    found = []
    for chunks in seen.chunks:
        times = [1e3 * (end - begin) for begin, end in chunks if any(begin < b and a < end for a, b in windows)]
        found += [max(times)] if times else []
    return found


async def measure(num_moves: int) -> dict[str, Any]:
    """Return what became of so many moves."""
    sizes = ",".join(f"{name}={value}" for name, value in SIZES.items())
    limits = Limits(drain_seconds=60.0, sequence_idle_seconds=600.0, max_sequences=2 * NUM_STREAMS)
    model = ModelEntry(source=f"lstm:{sizes}", threads=1)
    server = FleetServer(Config(port=0, models=[model], limits=limits, fleet=FleetConfig(replicas=2)), Processes())
    address, seen, balancer = (await server.start())[0], Seen(), server.balancer
    pauses: list[float] = []
    num_rounds, longest_s, begin_s = 0, 0.0, time.perf_counter()
    async with talking(address, seen):
        await asyncio.sleep(5 * PERIOD_S)
        while balancer.num_moved_sequences < num_moves:
            windows: list[tuple[float, float]] = []
            watching = asyncio.create_task(handing_over(server, windows))
            await server.update(msgspec.structs.replace(server.fleet.config, trace_steps=num_rounds % 2))
            await asyncio.sleep(PERIOD_S)
            watching.cancel()
            num_rounds += 1
            pauses += pauses_ms(seen, windows)
            longest_s = max(longest_s, *(end - begin for begin, end in windows))
            print(
                f"round {num_rounds}: {balancer.num_moved_sequences} moved, {seen.num_answered} answers, "
                f"{seen.num_wrong} wrong, {len(seen.missing)} missing, {balancer.num_lost_sequences} lost, pauses "
                f"{statistics.median(pauses):.0f} and {max(pauses):.0f} ms",
                flush=True,
            )
            if seen.missing:
                print(seen.missing[-1], flush=True)
    seconds = time.perf_counter() - begin_s
    await server.stop()
    times = [1e3 * (end - begin) for chunks in seen.chunks for begin, end in chunks]
    return {
        "moves": balancer.num_moved_sequences,
        "replicas_replaced": 2 * num_rounds,
        "streams": {
            "named": NUM_NAMED,
            "sockets": NUM_SOCKETS,
            "connections_of_many": NUM_CONNECTIONS,
            "over_them": NUM_CONNECTIONS * NUM_CARRIED,
        },
        "sequences": seen.num_begun,
        "answers": seen.num_answered,
        "answers_per_s": round(seen.num_answered / seconds),
        "wrong": seen.num_wrong,
        "missing": len(seen.missing),
        "lost": balancer.num_lost_sequences,
        "errors": sorted(set(seen.missing))[:10],
        "pause_ms": {"median": round(statistics.median(pauses), 1), "worst": round(max(pauses), 1)},
        "longest_hand_over_ms": round(1e3 * longest_s, 1),
        "any_chunk_ms": {
            "median": round(statistics.median(times), 1),
            "p99": round(float(np.percentile(times, 99)), 1),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=1000, help="write the result file only for 1000 or more")
    settings = parser.parse_args()
    torch.set_num_threads(1)
    result = {**made_by(MEASURES), **uvloop.run(measure(settings.moves)), "load_average_after": os.getloadavg()[0]}
    print(json.dumps(result, indent=1))
    if settings.moves >= 1000:
        path = Path(ROOT) / "benchmarks" / "results" / "moved-sequences.json"
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
