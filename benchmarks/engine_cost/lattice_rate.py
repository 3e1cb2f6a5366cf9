"""Lattices per second of one source tree's engine, for one workload; run by trees.py with that tree on PYTHONPATH.

    python lattice_rate.py WORKLOAD FILE COUNT ROUNDS POLICY [POLICY ...]

Prints a JSON object: policy -> requests per second in each round, all requests waiting, the policies in turn.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path


def main() -> None:
    import batchmaker as bm
    from batchmaker.cli.requests import requests_from

    name, file, count, rounds, *policies = sys.argv[1:]
    found = requests_from(name, Path(file), count=int(count), hidden=256)
    rates: dict[str, list[float]] = {policy: [] for policy in policies}
    with ExitStack() as stack:
        engines = {policy: stack.enter_context(bm.Engine(found.model, policy, threads=1)) for policy in policies}
        for _ in range(1 + int(rounds)):
            for policy, engine in engines.items():
                begin_s = time.perf_counter()
                engine.map(found.requests, progress=False)
                rates[policy].append(len(found.requests) / (time.perf_counter() - begin_s))
    print(json.dumps({policy: seen[1:] for policy, seen in rates.items()}))


if __name__ == "__main__":
    main()
