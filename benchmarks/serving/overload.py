"""Up to five times what the server can serve: memory stays flat, and what it answers stays near its best.

    python benchmarks/serving/overload.py [DATA] [--seconds 60] [--model lstm|lstm-256|trivial] [--replicas 1]

Capacity is what a closed loop with as many connections as requests may be in flight gets. Then Poisson processes offer
multiples of that; what there is no room for is refused with 503. Goodput is what is answered with 200, within the
deadline where there is one. --replicas: of a fleet, whose front refuses; needs `pip install 'batchmaker[ray]'`.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
import processes
import wire
from generator import Outcome, Plan, offer
from report import WARM_SHARE, figures, write
from trivial import Trivial

import batchmaker as bm
from batchmaker.cli.workload import make_workload

MEASURES = ("src/batchmaker/server", "benchmarks/serving/overload.py", "benchmarks/serving/generator.py")
PICTURES = Path(__file__).resolve().parents[2] / "papers" / "docs" / "images"


class MemoryWatch:
    """Reads the server's memory every second while it is entered."""

    def __init__(self, server: processes.Server) -> None:
        self._server = server
        self.resident_mb: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            self.resident_mb.append(round(self._server.resident_mb(), 1))

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()


@dataclass(frozen=True, slots=True)
class Load:
    """What is offered. seconds: of each load. times: loads, in capacities. deadline_s: of a request; None without."""

    requests: list[bytes]
    in_flight: int
    seconds: float
    times: list[float]
    deadline_s: float | None


def in_time_rps(outcome: Outcome, seconds: float, deadline_s: float | None) -> float:
    """Return good answers a second; with a deadline those alone that came within it, from when they were due."""
    due, done, status = (outcome.array(name) for name in ("due_s", "done_s", "status"))
    begin = WARM_SHARE * seconds
    good = (status == 200) & (done >= begin) & (done < seconds)
    if deadline_s is not None:
        good &= done - due <= deadline_s
    return round(float(good.sum()) / (seconds - begin), 1)


def offer_times(server: processes.Server, load: Load, rate: float, times: float) -> dict[str, Any]:
    """Return what comes of `times` times the capacity, by a Poisson process, with memory and processor time."""
    with MemoryWatch(server) as memory:
        before_s, begin_s = server.processor_s(), time.monotonic()
        plan = Plan(server.host, server.port, load.requests, times * rate, load.seconds, 4 * load.in_flight)
        outcome = offer(plan)
        share = (server.processor_s() - before_s) / (time.monotonic() - begin_s)
    seen = memory.resident_mb
    return {
        "times": times,
        **figures(outcome, load.seconds),
        "goodput_rps": in_time_rps(outcome, load.seconds, load.deadline_s),
        "server_processors": round(share, 2),
        "memory_mb": {"after 5 s": seen[min(4, len(seen) - 1)], "every 10 s": seen[9::10], "most": max(seen)},
    }


_SPIN = """
import sys, time
share = float(sys.argv[1])
while True:
    end = time.perf_counter() + share / 1e3
    while time.perf_counter() < end:
        pass
    time.sleep((1 - share) / 1e3)
"""


@contextlib.contextmanager
def neighbour(share: float) -> Iterator[None]:
    """Another process uses this share of a processor, in turns of a millisecond, while the block runs."""
    process = subprocess.Popen([sys.executable, "-c", _SPIN, str(share)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(server: processes.Server, load: Load) -> dict[str, Any]:
    """Return capacity, goodput at multiples of it, and capacity again.

    Then, to tell what refusals cost from what the machine has to give: capacity beside a process that has nothing to do
    with the server and takes as much of the processors as refusing and being refused did at the highest load.
    """
    warm = load.seconds / 4

    def closed() -> dict[str, Any]:
        before_s, begin_s = server.processor_s(), time.monotonic()
        found = figures(offer(Plan(server.host, server.port, load.requests, None, warm, load.in_flight)), warm)
        share = (server.processor_s() - before_s) / (time.monotonic() - begin_s)
        return {**found, "server_processors": round(share, 2)}

    offer(Plan(server.host, server.port, load.requests, None, 2.0, load.in_flight))
    capacity = closed()
    offered = [offer_times(server, load, capacity["served_rps"], times) for times in load.times]
    after = closed()
    peak = max(one["goodput_rps"] for one in offered)
    taken = sum(max(0.0, offered[-1][name] - after[name]) for name in ("server_processors", "generator_share"))
    with neighbour(min(taken, 1.0)):
        beside = {**closed(), "neighbour_share": round(taken, 3)}
    return {
        "capacity": capacity,
        "offered": offered,
        "after": after,
        "beside another process": beside,
        "goodput_over_capacity": {
            one["times"]: round(one["goodput_rps"] / capacity["served_rps"], 3) for one in offered
        },
        "goodput_over_peak": {one["times"]: round(one["goodput_rps"] / peak, 3) for one in offered},
    }


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw goodput and refusals over what was offered, as multiples of the capacity."""
    capacity = results["capacity"]["served_rps"]
    offered = [one["offered_rps"] / capacity for one in results["offered"]]
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    axes.axhline(0.9, color="0.7", linestyle=":", label="90 % of the capacity")
    axes.plot(offered, [one["goodput_rps"] / capacity for one in results["offered"]], "o-", label="answered in time")
    axes.plot(offered, [one["refused_rps"] / capacity for one in results["offered"]], "s--", label="refused with 503")
    axes.set(xlabel="offered, times the capacity", ylabel="times the capacity", ylim=(0, None), xlim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def requests_of(model: str, data: Path | None, deadline_ms: float | None) -> list[bytes]:
    """Return requests: sentences of the data, or of 5 to 45 random words."""
    parameters = {} if deadline_ms is None else {"deadline_ms": deadline_ms}
    if model == "trivial":
        return [wire.infer_binary("trivial", {"input_0": [1]}, parameters=parameters)]
    if data is not None:
        work = make_workload("lstm", data=[data], count=5000)
        sentences = [[int(word) % 10_000 for word in request] for request in work.requests]
    else:
        rng = np.random.default_rng(0)
        sentences = [rng.integers(10_000, size=rng.integers(5, 46)).tolist() for _ in range(5000)]
    return [wire.infer_binary("lstm", {"input_0": sentence}, parameters=parameters) for sentence in sentences]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", help="sentences, one a line; random ones without it")
    parser.add_argument("--model", choices=("lstm", "lstm-256", "trivial"), default="lstm")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--deadline-ms", type=float)
    parser.add_argument("--replicas", type=int, help="a fleet of so many; without it one server")
    parser.add_argument("--times", type=float, nargs="+", default=[0.8, 1.0, 2.0, 5.0])
    given = parser.parse_args()
    sources = {"lstm": "lstm:hidden=1024,dtype=bfloat16", "lstm-256": "lstm:hidden=256"}
    with tempfile.TemporaryDirectory() as folder:
        if given.model == "trivial":
            bm.save(Trivial(), Path(folder) / "trivial")
        deadline_s = None if given.deadline_ms is None else given.deadline_ms / 1e3
        load = Load(
            requests_of(given.model, given.data, given.deadline_ms),
            given.in_flight,
            given.seconds,
            given.times,
            deadline_s,
        )
        model = sources.get(given.model, folder)
        fleet = () if given.replicas is None else ("--replicas", given.replicas)
        with processes.batchmaker(model, "--max-in-flight", given.in_flight, *fleet) as server:
            results = measure(server, load)
    settings = {
        "seconds": given.seconds, "max_in_flight": given.in_flight, "deadline_ms": given.deadline_ms,
        "connections": 4 * given.in_flight, "threads": 1, "replicas": given.replicas,
    }  # fmt: skip
    name = f"overload-{given.model}" + ("" if given.replicas is None else "-fleet")
    write(name, settings, results, MEASURES if given.replicas is None else (*MEASURES, "src/batchmaker/fleet"))
    draw(results, PICTURES / f"{name}.png")


if __name__ == "__main__":
    main()
