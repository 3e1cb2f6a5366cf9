"""Whether a night goes by: requests of every kind, each answered once and as it is alone; and memory that stays flat.

    python benchmarks/soak.py requests [--requests 100000]     # in process: three models, six policies, 1 and 2 workers
    python benchmarks/soak.py memory [--minutes 10]            # a server: requests, sequences, reloads, cancellations

Deadlines, priorities, cancellations, failures, loops with a stop test and without, decisions that are waited for, and
sequences in chunks are mixed. What is computed is compared with plain PyTorch, one request at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import matplotlib
import numpy as np
import torch

matplotlib.use("agg")
import matplotlib.pyplot as plt
from rich.progress import Progress

import batchmaker as bm
import soak_models
from batchmaker.client import Client, ServerError
from batchmaker.engine import Answer
from provenance import made_by
from soak_models import Case

HERE: Final = Path(__file__).resolve().parent
RESULTS: Final = HERE / "results"
MEASURES: Final = (
    *(f"src/batchmaker/{room}" for room in ("engine", "core", "executor", "model", "server")),
    "benchmarks/soak.py",
    "benchmarks/soak_models.py",
)
POLICIES: Final = ("auto", "cellular", "lazy", "agenda", "depth", "sufficient")
IN_FLIGHT: Final = 512
ANSWER_S: Final = 120.0


def is_right(got: Any, wanted: torch.Tensor) -> bool:
    """Return whether an answer is the one of plain PyTorch, within rounding of float32."""
    found = torch.as_tensor(got)
    return found.shape == wanted.shape and torch.allclose(found.float(), wanted.float(), atol=1e-4)


# --- requests: in process --------------------------------------------------------------------------------------------


class Tally:
    """Counts what became of requests. Threads: callers, and the engine's, which calls `ended`."""

    def __init__(self) -> None:
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self._lock = threading.Condition()
        self._ended: collections.Counter[int] = collections.Counter()

    def ended(self, answer: Answer) -> None:
        """Count that an answer was given: for each it has to be called once."""
        with self._lock:
            self._ended[id(answer)] += 1
            self._lock.notify_all()

    def add(self, outcome: str, wrong: str = "") -> None:
        """Count an outcome; `wrong` says what was not as it has to be."""
        with self._lock:
            self.outcomes[outcome] += 1
            if wrong:
                self.wrong.append(wrong)

    def once(self, answer: Answer) -> bool:
        """Return whether an answer was given once until now; forgets it. It is done a moment before `ended` is told."""
        with self._lock:
            self._lock.wait_for(lambda: id(answer) in self._ended, ANSWER_S)
            return self._ended.pop(id(answer), 0) == 1

    def close(self) -> None:
        """Count what was answered again after it had been answered."""
        if self._ended:
            self.wrong.append(f"{len(self._ended)} requests were answered again")


def check(case: Case, answer: Answer, cancelled: bool | None, has_deadline: bool, tally: Tally) -> None:
    """Wait for an answer and count it. cancelled: what `cancel` returned; None if it was not called."""
    error = answer.exception(ANSWER_S)
    name = "answered" if error is None else type(error).__name__
    if not tally.once(answer):
        tally.add(name, f"{case.model}: answered more or less than once")
    elif cancelled:
        tally.add(name, "" if isinstance(error, bm.errors.CancelledError) else f"{case.model}: cancelled, and {name}")
    elif error is None:
        right = case.answer is not None and is_right(answer.result(), case.answer)
        tally.add(name, "" if right else f"{case.model}: {str(case.request)[:80]} was answered {answer.result()}")
    elif isinstance(error, bm.errors.DeadlineError):
        tally.add(name, "" if has_deadline else f"{case.model}: {error}, without a deadline")
    else:
        tally.add(name, "" if name in case.error.split() else f"{case.model}: {error}, expected {case.error or 'none'}")


def send(engine: bm.Engine, cases: list[Case], tally: Tally, seed: int, advance: Any) -> None:
    """Send all cases, at most IN_FLIGHT at once; some with deadlines, priorities, or cancelled at a random moment."""
    rng = random.Random(seed)
    waiting: collections.deque[tuple[Case, Answer, bool | None, bool]] = collections.deque()
    for case in cases:
        deadline_ms = rng.choice((None, None, None, None, 2.0, 20.0, 10_000.0))
        answer = engine.submit(case.request, model=case.model, deadline_ms=deadline_ms, priority=rng.randrange(3))
        answer.add_done_callback(tally.ended)
        waiting.append((case, answer, None, deadline_ms is not None))
        if rng.randrange(15) == 0:
            at = rng.randrange(len(waiting))
            one, its_answer, was_cancelled, has_deadline = waiting[at]
            waiting[at] = (one, its_answer, its_answer.cancel() or bool(was_cancelled), has_deadline)
        while len(waiting) >= IN_FLIGHT:
            check(*waiting.popleft(), tally)
            advance()
    while waiting:
        check(*waiting.popleft(), tally)
        advance()


def converse(engine: bm.Engine, listener: Any, count: int, tally: Tally, seed: int, advance: Any) -> None:
    """Send chunks of sequences, each after the one before; cancel some and resume; compare each answer."""
    rng, frames = random.Random(seed), np.random.default_rng(seed)
    sent = 0
    while sent < count:
        with engine.open_sequence(model="listener", priority=rng.randrange(3)) as sequence:
            before = torch.zeros(1, soak_models.HIDDEN)
            for _ in range(min(rng.randint(1, 12), count - sent)):
                chunk = torch.from_numpy(
                    frames.standard_normal((rng.randint(1, 6), soak_models.FRAME)).astype(np.float32)
                )
                wanted = listener.after(chunk, before)
                answer = sequence.submit(chunk)
                answer.add_done_callback(tally.ended)
                cancelled = None
                if rng.randrange(6) == 0:
                    time.sleep(rng.random() * 2e-3)
                    cancelled = answer.cancel()
                check(Case("listener", "a chunk", wanted), answer, cancelled, False, tally)
                if answer.exception() is None:
                    before = wanted[-1:]
                else:
                    sequence.resume()
                sent += 1
                advance()


def run_mix(
    policy: str, workers: int, count: int, seed: int, advance: Any = lambda: None, device: str = "cpu"
) -> Tally:
    """Return what became of `count` requests under a policy, a sixth of them chunks of sequences."""
    made = soak_models.models(seed)
    pool = soak_models.cases(made, min(count, 400), seed)
    picks = random.Random(seed)
    tally = Tally()
    with bm.Engine(made, policy=policy, workers=workers, threads=1, device=device) as engine:
        talking = [
            threading.Thread(target=converse, args=(engine, made["listener"], count // 24, tally, seed + k, advance))
            for k in range(4)
        ]
        for thread in talking:
            thread.start()
        send(engine, picks.choices(pool, k=count - 4 * (count // 24)), tally, seed, advance)
        for thread in talking:
            thread.join()
        if not engine.heartbeat.alive:
            tally.add("engine ended", f"{policy}, {workers} workers: the engine has ended")
    tally.close()
    return tally


def run_requests(count: int, device: str) -> dict[str, Any]:
    """Return outcomes of all mixes together, and everything that was wrong. On GPUs, one worker each."""
    mixes = [(policy, workers) for policy in POLICIES for workers in ((1, 2) if device == "cpu" else (1,))]
    each, rows, wrong = -(-count // len(mixes)), [], []
    with Progress() as progress:
        bar = progress.add_task("requests", total=each * len(mixes))
        for seed, (policy, workers) in enumerate(mixes):
            began_s = time.monotonic()
            tally = run_mix(policy, workers, each, seed, lambda: progress.advance(bar), device)
            took_s = round(time.monotonic() - began_s, 1)
            rows.append({"policy": policy, "workers": workers, "seconds": took_s, **dict(tally.outcomes)})
            wrong += [f"{policy}, {workers} workers: {said}" for said in tally.wrong]
            print(rows[-1], *tally.wrong[:3], sep="\n  ", flush=True)
    return {
        "device": device,
        "requests": each * len(mixes),
        "mixes": rows,
        "wrong": len(wrong),
        "first wrong": wrong[:20],
    }


# --- memory: a server ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(log: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Serve the listener and the built-in translator in another process, with what says where."""
    command = [sys.executable, "-m", "batchmaker", "serve", f"listener={HERE / 'soak_models.py'}",
               "seq2seq:hidden=32,vocabulary_size=100", "--port", "0"]  # fmt: skip
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline().split()
        if len(ready) < 2:
            raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
        yield process, ready[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def resident_mb(pid: int) -> float:
    """Return the memory that a process has in use."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Traffic:
    """Clients of one server, until a time: what they saw is counted by outcome."""

    def __init__(self, process: subprocess.Popen[str], address: str, until_s: float) -> None:
        self.process, self.address, self.until_s = process, address, until_s
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.listener = soak_models.build()

    def goes_on(self) -> bool:
        """Whether there is time left, and somebody to answer."""
        return time.monotonic() < self.until_s and self.process.poll() is None

    async def ask(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Send requests one after the other: right, wrong, too late, and given up."""
        while self.goes_on():
            source = [rng.randrange(3, 100) for _ in range(rng.randint(1, 30))]
            body: dict[str, Any] = {"source": source}
            if rng.randrange(2):
                body["words"] = rng.randint(1, 60)
            what = rng.randrange(10)
            if what == 0:
                body = rng.choice(({"sauce": source}, {"source": [10**6]}, {"source": "words"}, {"source": []}, {}))
            elif what == 1:
                body["parameters"] = {"deadline_ms": rng.choice((1, 5, 10_000)), "priority": rng.randrange(3)}
            patience_s = 0.002 if what == 2 else 60.0
            try:
                answer = await http.post("/v2/models/seq2seq/generate", json=body, timeout=patience_s)
            except httpx.TimeoutException:
                self.outcomes["given up" if what == 2 else "no answer in 60 s"] += 1
                continue
            except httpx.TransportError as error:
                self.outcomes[type(error).__name__] += 1
                continue
            self.outcomes[f"HTTP {answer.status_code}"] += 1
            if answer.status_code == 200 and len(answer.json()["output_0"]) != body.get(
                "words", len(answer.json()["output_0"])
            ):
                self.wrong.append(f"{body}: {answer.text[:80]}")
            if answer.status_code >= 500 and answer.status_code not in (503, 504):
                self.wrong.append(f"{body}: {answer.status_code} {answer.text[:200]}")

    async def talk(self, client: Client, rng: random.Random) -> None:
        """Open sequences over WebSockets, compare every answer, and leave some in the middle."""
        frames = np.random.default_rng(rng.randrange(2**32))
        while self.goes_on():
            try:
                async with client.open_sequence("listener") as sequence:
                    before = torch.zeros(1, soak_models.HIDDEN)
                    for _ in range(rng.randint(1, 20)):
                        chunk = frames.standard_normal((rng.randint(1, 6), soak_models.FRAME)).astype(np.float32)
                        wanted = self.listener.after(chunk, before)
                        answer = await sequence.submit(chunk)
                        got = np.asarray(answer["output_0"], np.float32)
                        self.outcomes["chunks"] += 1
                        if not is_right(got.reshape(-1, soak_models.HIDDEN), wanted):
                            self.wrong.append("a chunk was answered wrongly")
                        before = wanted[-1:]
                        if rng.randrange(30) == 0:
                            break
            except ServerError as error:  # reloads end the sequences of the model that goes
                self.outcomes[f"sequence ended: {str(error)[:60]}"] += 1

    async def reload(self, http: httpx.AsyncClient, every_s: float) -> None:
        """Load both models again and again, while they serve."""
        while self.goes_on():
            await asyncio.sleep(every_s)
            for name in ("seq2seq", "listener"):
                with contextlib.suppress(httpx.TransportError):  # what the server has not survived is seen by `watch`
                    answer = await http.post(f"/v2/repository/models/{name}/load", timeout=120.0)
                    self.outcomes[f"reload: {answer.status_code}"] += 1

    async def run(self, watch: Any, every_s: float) -> None:
        """Run all clients together, and `watch` beside them."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.address, limits=limits) as http, Client(self.address) as client:
            asking = [self.ask(http, random.Random(seed)) for seed in range(12)]
            talking = [self.talk(client, random.Random(100 + seed)) for seed in range(6)]
            await asyncio.gather(*asking, *talking, self.reload(http, every_s), watch())


def run_memory(minutes: float) -> dict[str, Any]:
    """Return the server's memory every five seconds, and how it changed from the second third to the last."""
    log = RESULTS.parent / "soak.log"
    samples: list[float] = []
    with serving(log) as (process, address):
        began_s = time.monotonic()
        traffic = Traffic(process, address, began_s + 60 * minutes)

        async def watch() -> None:
            with Progress() as progress:
                bar = progress.add_task("memory", total=60 * minutes)
                while traffic.goes_on():
                    await asyncio.sleep(min(5.0, 6 * minutes))
                    samples.append(round(resident_mb(process.pid), 1))
                    progress.update(bar, completed=time.monotonic() - began_s)

        asyncio.run(traffic.run(watch, every_s=min(20.0, 15 * minutes)))
        if (status := process.poll()) is not None:
            traffic.wrong.append(f"the server has ended with status {status}: {log.read_text()[-500:]}")
    log.unlink()
    third = max(1, len(samples) // 3)
    middle, last = statistics.median(samples[third : 2 * third]), statistics.median(samples[2 * third :])
    return {
        "minutes": minutes, "resident MB": samples, "second third MB": middle, "last third MB": last,
        "growth": round(last / middle, 3), "outcomes": dict(traffic.outcomes),
        "wrong": len(traffic.wrong), "first wrong": traffic.wrong[:20],
    }  # fmt: skip


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the server's memory over time."""
    samples = result["resident MB"]
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    axes.plot(np.linspace(0, result["minutes"], len(samples)), samples)
    axes.set(
        xlabel="minutes of requests, sequences, reloads and cancellations", ylabel="resident memory, MB", ylim=(0, None)
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("requests", "memory"))
    parser.add_argument("--requests", type=int, default=100_000, help="how many, of all mixes together")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: for requests")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long the server is watched")
    given = parser.parse_args()
    found = run_requests(given.requests, given.device) if given.what == "requests" else run_memory(given.minutes)
    path = RESULTS / f"soak-{given.what}{'' if given.device == 'cpu' else '-gpu'}.json"
    path.write_text(json.dumps({**made_by(MEASURES), **found}, indent=1) + "\n")
    if given.what == "memory":
        draw(found, path.with_suffix(".png"))
    print(json.dumps({name: found[name] for name in found if name not in ("resident MB", "mixes")}, indent=1))
    sys.exit(found["wrong"] > 0)


if __name__ == "__main__":
    main()
