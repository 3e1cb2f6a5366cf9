"""What serving adds to a request, and how many trivial requests a second a server takes, beside LitServe and Ray Serve.

    python benchmarks/serving/overhead.py [--peers PYTHON] [--seconds 8]

A trivial cell, n -> n + 1, one call per request. First 100 requests/s as a Poisson process: in process, by
`await engine.submit`, from an event loop of its own; over HTTP with tensors as bytes and as JSON; over gRPC. What is
added is the difference of the medians, from sending a request to having its answer, so the client's own work is in it.
Then as many as each server takes: a closed loop of 64 and of 256 connections, the better of the two.
PYTHON: the interpreter of an environment with LitServe and Ray Serve; without it they are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import processes
import uvloop
import wire
from generator import Plan, PreciseTimer, offer
from report import figures, percentile_ms, write
from trivial import Trivial

import batchmaker as bm

RATE = 100.0
CONNECTIONS = (64, 256)


async def in_process(seconds: float) -> dict[str, Any]:
    """Return the time from submitting to the result, in this process, at RATE."""
    loop = asyncio.get_running_loop()
    due = np.cumsum(np.random.default_rng(0).exponential(1 / RATE, int(RATE * seconds))).tolist()
    taken: list[float] = []
    async with bm.Engine(Trivial(), threads=1) as engine:
        begin_s = time.monotonic()

        async def ask() -> None:
            sent_s = time.perf_counter()
            await engine.submit([1])
            taken.append(time.perf_counter() - sent_s)

        running: set[asyncio.Task[None]] = set()

        def fire() -> None:
            while due and due[0] <= time.monotonic() - begin_s:
                due.pop(0)
                running.add(task := loop.create_task(ask()))
                task.add_done_callback(running.discard)
            if due:
                timer.at(begin_s + due[0])

        timer = PreciseTimer(loop, fire)
        fire()
        while due or running:
            await asyncio.sleep(0.05)
    counted = np.array(taken[len(taken) // 6 :])
    return {f"sent_p{p}_ms": percentile_ms(counted, p) for p in (50, 90, 99)}


def over_grpc(server: processes.Server, seconds: float) -> dict[str, Any]:
    """Return the time of a call over gRPC from one thread, at RATE or as near to it as one call at a time allows."""
    import grpc
    from tritonclient.grpc import InferInput, service_pb2

    tensor = InferInput("input_0", [1], "INT64")
    tensor.set_data_from_numpy(np.array([1]))
    message = service_pb2.ModelInferRequest(model_name="trivial", inputs=[tensor._get_tensor()])
    message.raw_input_contents.append(tensor._get_content())
    taken: list[float] = []
    with grpc.insecure_channel(f"{server.host}:{server.grpc_port}") as channel:
        ask = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        due_s = time.monotonic()
        for gap in np.random.default_rng(0).exponential(1 / RATE, int(RATE * seconds)):
            due_s += gap
            time.sleep(max(0.0, due_s - time.monotonic()))
            sent_s = time.perf_counter()
            ask(message.SerializeToString())
            taken.append(time.perf_counter() - sent_s)
    counted = np.array(taken[len(taken) // 6 :])
    return {f"sent_p{p}_ms": percentile_ms(counted, p) for p in (50, 90, 99)}


def at_rate(server: processes.Server, request: bytes, seconds: float) -> dict[str, Any]:
    """Return latencies at RATE."""
    return figures(offer(Plan(server.host, server.port, [request], RATE, seconds, 16)), seconds)


def peak(server: processes.Server, request: bytes, seconds: float) -> dict[str, Any]:
    """Return the best of closed loops."""
    runs = [
        {"connections": count}
        | figures(offer(Plan(server.host, server.port, [request], None, seconds, count)), seconds)
        for count in CONNECTIONS
    ]
    return max(runs, key=lambda run: run["served_rps"])


def save(latency: dict[str, Any], peaks: dict[str, Any], seconds: float) -> None:
    """Write what has been measured so far, and how it compares."""
    inside = latency["in process"]["sent_p50_ms"]
    added = {name: round(line["sent_p50_ms"] - inside, 3) for name, line in latency.items() if name != "in process"}
    best = max(peaks["batchmaker, binary"]["served_rps"], peaks["batchmaker, JSON"]["served_rps"])
    over = {name: round(best / peaks[name]["served_rps"], 2) for name in peaks if not name.startswith("batchmaker")}
    results = {"latency": latency, "added_p50_ms": added, "peak": peaks, "peak_over": over}
    write("overhead", {"rate": RATE, "seconds": seconds, "threads": 1}, results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--no-grpc", action="store_true")
    given = parser.parse_args()
    seconds = given.seconds
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        latency: dict[str, Any] = {"in process": runner.run(in_process(seconds))}
    peaks: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        bm.save(Trivial(), Path(folder) / "trivial")
        binary = wire.infer_binary("trivial", {"input_0": [1]})
        as_json = wire.infer_json("trivial", {"input_0": [1]})
        with processes.batchmaker(folder, grpc=not given.no_grpc) as server:
            at_rate(server, binary, 1.0)
            latency["HTTP binary"] = at_rate(server, binary, seconds)
            latency["HTTP JSON"] = at_rate(server, as_json, seconds)
            if server.grpc_port is not None:
                latency["gRPC"] = over_grpc(server, seconds)
            peaks["batchmaker, binary"] = peak(server, binary, seconds / 2)
            peaks["batchmaker, JSON"] = peak(server, as_json, seconds / 2)
    save(latency, peaks, seconds)
    for name in () if given.peers is None else ("litserve", "ray"):
        with processes.peer(given.peers, f"{name}_app.py", "trivial") as server:
            request = wire.peer_json("/predict", [1])
            processes.warm_up(server, request)
            latency[name] = at_rate(server, request, seconds)
            peaks[name] = peak(server, request, seconds / 2)
        save(latency, peaks, seconds)


if __name__ == "__main__":
    main()
