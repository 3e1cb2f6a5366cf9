"""The LSTM over HTTP: batchmaker beside LitServe and Ray Serve with nn.LSTM over padded batches of 64.

    python benchmarks/serving/lstm.py DATA [--peers PYTHON] [--seconds 10]

The peers run twice: over padded batches as they are, and packed. Hidden 1024, bfloat16, one thread, sentences of
DATA (europarl_deen/raw5k.en), whose answers are the last state as float32 bytes. One generator for all: Poisson at 100
requests/s, and at far more than any server takes, where 512 connections keep it busy and what is answered is its peak.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import processes
import wire
from generator import Plan, offer
from report import figures, write

from batchmaker.cli.workload import make_workload

RATE = 100.0
SATURATING = 2000.0
CONNECTIONS = 512
MODEL = "lstm:hidden=1024,dtype=bfloat16"


def measure(server: processes.Server, requests: Sequence[bytes], seconds: float) -> dict[str, Any]:
    """Return latencies at RATE, and the peak."""
    processes.warm_up(server, requests[0])
    plan = Plan(server.host, server.port, list(requests), RATE, seconds, CONNECTIONS)
    calm = figures(offer(plan), seconds)
    plan = Plan(server.host, server.port, list(requests), SATURATING, seconds, CONNECTIONS)
    return {"at 100/s": calm, "peak": figures(offer(plan), seconds), "memory_mb": round(server.resident_mb())}


def ratios(results: dict[str, Any]) -> dict[str, Any]:
    """Return how batchmaker's peak and p90 compare with the others'."""
    ours = results["batchmaker"]
    return {
        name: {
            "peak_over": round(ours["peak"]["served_rps"] / line["peak"]["served_rps"], 2),
            "p90_of": round(ours["at 100/s"]["p90_ms"] / line["at 100/s"]["p90_ms"], 3),
        }
        for name, line in results.items()
        if name != "batchmaker"
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    work = make_workload("lstm", data=[given.data], count=5000)
    sentences = [[int(word) % 10_000 for word in request] for request in work.requests]
    servers: dict[str, tuple[contextlib.AbstractContextManager[processes.Server], list[bytes]]] = {
        "batchmaker": (
            processes.batchmaker(MODEL),
            [wire.infer_binary("lstm", {"input_0": sentence}) for sentence in sentences],
        )
    }
    requests = [wire.peer_json("/predict", sentence) for sentence in sentences]
    for name, form in () if given.peers is None else itertools.product(("litserve", "ray"), ("padded", "packed")):
        servers[f"{name}, {form}"] = processes.peer(given.peers, f"{name}_app.py", f"lstm-{form}"), requests
    settings = {"seconds": given.seconds, "threads": 1, "mean_words": round(work.cells.mean(), 1)}
    results: dict[str, Any] = {}
    for name, (starting, requests) in servers.items():
        with starting as server:
            results[name] = measure(server, requests, given.seconds)
        write("lstm", settings, {**results, "ratios": ratios(results)})


if __name__ == "__main__":
    main()
