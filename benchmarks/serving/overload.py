"""Five times what the server can serve: memory stays flat, and what it answers stays near its best.

    python benchmarks/serving/overload.py DATA [--seconds 60] [--model lstm|trivial]

Capacity is what a closed loop with as many connections as requests may be in flight gets. Then a Poisson process offers
five times that; what there is no room for is refused with 503, and everything that is answered with 200 is goodput.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import processes
import wire
from generator import Plan, offer
from report import figures, write
from trivial import Trivial

import batchmaker as bm
from batchmaker.cli.workload import make_workload

TIMES = 5.0


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


def measure(server: processes.Server, requests: list[bytes], in_flight: int, seconds: float) -> dict[str, Any]:
    """Return capacity, goodput at five times that, and memory."""
    warm = seconds / 4
    offer(Plan(server.host, server.port, requests, None, 2.0, in_flight))
    capacity = figures(offer(Plan(server.host, server.port, requests, None, warm, in_flight)), warm)
    rate = TIMES * capacity["served_rps"]
    with MemoryWatch(server) as memory:
        before_s, begin_s = server.processor_s(), time.monotonic()
        outcome = offer(Plan(server.host, server.port, requests, rate, seconds, 4 * in_flight))
        share = (server.processor_s() - before_s) / (time.monotonic() - begin_s)
    overloaded = figures(outcome, seconds)
    after = figures(offer(Plan(server.host, server.port, requests, None, warm, in_flight)), warm)
    seen = memory.resident_mb
    return {
        "capacity": capacity,
        "overloaded": overloaded,
        "after": after,
        "goodput_over_capacity": round(overloaded["served_rps"] / capacity["served_rps"], 3),
        "server_processors": round(share, 2),
        "memory_mb": {"after 5 s": seen[min(4, len(seen) - 1)], "every 10 s": seen[9::10], "most": max(seen)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", choices=("lstm", "trivial"), default="lstm")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--in-flight", type=int, default=256)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.model == "lstm":
            source = "lstm:hidden=1024,dtype=bfloat16"
            work = make_workload("lstm", data=[given.data], count=5000)
            sentences = [[int(word) % 10_000 for word in request] for request in work.requests]
            requests = [wire.infer_binary("lstm", {"input_0": sentence}) for sentence in sentences]
        else:
            source = folder
            bm.save(Trivial(), Path(folder) / "trivial")
            requests = [wire.infer_binary("trivial", {"input_0": [1]})]
        with processes.batchmaker(source, "--max-in-flight", given.in_flight) as server:
            results = measure(server, requests, given.in_flight, given.seconds)
    settings = {"seconds": given.seconds, "max_in_flight": given.in_flight, "times": TIMES, "threads": 1}
    write(f"overload-{given.model}", settings, results)


if __name__ == "__main__":
    main()
