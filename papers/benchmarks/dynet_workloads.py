"""DyNet with automatic batching on all nine workloads of ED-Batch, at several hidden sizes; run where it is installed.

    dynet/bin/python papers/benchmarks/dynet_workloads.py INPUTS.json OUT.json [--strategy 1 2] [--hidden 256]

INPUTS: workload -> {"sizes": ids of words and so on, "requests": [...]}, as ed_batch_sizes.py writes it. Strategy 1 is
DyNet's agenda, 2 its depth; a process for each. Seconds are CPU time of the process, graphs built in Python told apart.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from dynet_networks import NETWORKS
from dynet_peer import NAMES, measured


def rates(dy: Any, inputs: dict[str, Any], hiddens: list[int], sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """Return requests per second of each workload, hidden size and mini-batch, medians over rounds."""
    rows = []
    for name, given in inputs.items():
        for hidden in hiddens:
            if hidden > given.get("most_hidden", hidden):
                continue
            network = NETWORKS[name](dy, hidden, given["sizes"])
            for size in sizes:
                requests = given["requests"][: max(size, given.get("count", len(given["requests"])))]
                measured(dy, network, requests[:size], size)
                both = [measured(dy, network, requests, size) for _ in range(rounds)]
                building_s, total_s = (median(column) for column in zip(*both, strict=True))
                rows.append(
                    {
                        "workload": name, "hidden": hidden, "size": size, "per_s": len(requests) / total_s,
                        "per_s_without_building": len(requests) / (total_s - building_s),
                        "building_share": building_s / total_s,
                    }
                )  # fmt: skip
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--strategy", type=int, nargs="+", default=[1, 2], choices=NAMES)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if len(options.strategy) == 1:
        import _dynet as dy

        sys.argv = [sys.argv[0], "--dynet-autobatch", str(options.strategy[0]), "--dynet-mem", "4096"]
        parameters = dy.DynetParams()
        parameters.from_args()
        parameters.init()
        inputs = json.loads(options.inputs.read_text("utf-8"))
        found = rates(dy, inputs, options.hidden, options.sizes, options.rounds)
        rows = [{**row, "strategy": NAMES[options.strategy[0]]} for row in found]
    else:
        rows = []
        for strategy in options.strategy:
            part = options.out.with_suffix(f".{strategy}.json")
            command = [sys.executable, __file__, str(options.inputs), str(part), "--strategy", str(strategy)]
            more = ["--rounds", options.rounds, "--hidden", *options.hidden, "--sizes", *options.sizes]
            quiet = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            subprocess.run([*command, *map(str, more)], check=True, env=quiet)
            rows += json.loads(part.read_text("utf-8"))
            part.unlink()
    options.out.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
