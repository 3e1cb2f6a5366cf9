"""What batching brings and what cells bring: cellular beside the best batches with torch's layers, and with its cells.

    python benchmarks/batching_and_cells.py --data DATA [--only NAME ...] [--quick] [--json FILE] [--page PAGE]
    python benchmarks/batching_and_cells.py --show --page PAGE     # papers/docs/benchmarks-in-full.md

Three ways to serve the same sentences: padded batches of torch's own `nn.LSTM`; the same batches in the same engine and
with the same cells as cellular batching (`closed`: folded, hoisted, in compiled loops, nothing padded; only nobody
joins a batch that runs); and cellular batching. The first two are swept over bucket widths and maxima, and have a
backlog in which their batches are full. Then all three are measured in turn, and every ratio is a median over the
rounds, with the least and the most. The second over the first is what cells bring, the third over the second what
batching brings. Latencies are those of Poisson processes at half of the peak of the first, another one in each round
and the same for all three; engines are warmed up before. One compute thread. The network in bfloat16 is
left out on a processor without AVX-512, unless --only names it: there its sweep alone takes more than twelve minutes.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import numpy as np
import torch
from rich.progress import Progress

from batchmaker.cli import options as cli_options
from batchmaker.cli.bench.measurement import Bench, BenchPlan
from batchmaker.cli.bench.report import Setting
from batchmaker.cli.bench.statistics import percentiles
from batchmaker.cli.workload import make_workload
from pages import fill, table
from provenance import CPU_EXECUTOR, ROOT, Result, made_by

SIZES: Final = {
    "LSTM 128 float32": (128, "float32"), "LSTM 512 float32": (512, "float32"),
    "LSTM 1024 bfloat16": (1024, "bfloat16"),
}  # fmt: skip
MEASURES: Final = (
    "benchmarks/batching_and_cells.py", "src/batchmaker/cli/bench", "src/batchmaker/compile", "src/batchmaker/engine",
    *CPU_EXECUTOR, "src/batchmaker/kernels/cpu", "src/batchmaker/core", "src/batchmaker/policies/cellular.py",
    "src/batchmaker/lab/baselines", "src/batchmaker/lab/zoo/padding.py", "src/batchmaker/lab/zoo/recurrent.py",
)  # fmt: skip
WAYS: Final = {"torch": "padded", "same cells": "closed", "cellular": "cellular"}
RATIOS: Final = {"cells": ("same cells", "torch"), "batching": ("cellular", "same cells")}
SECTION: Final = "cells-and-batching"


def measurable() -> list[str]:
    """Return the networks that are measured unless some are named: all, without AVX-512 those in float32."""
    computes_bfloat16 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return [name for name, (_, dtype) in SIZES.items() if dtype == "float32" or computes_bfloat16]


def measured(name: str, data: Path, rounds: int, seconds: float) -> Result:
    """Measure one network: cells per second with a backlog, p90 in ms at half load."""
    hidden, dtype = SIZES[name]
    workload = make_workload("lstm", data=[data / "europarl_deen" / "raw5k.en"])
    model = cli_options.make_model("lstm", hidden=hidden, dtype=dtype, vocabulary_size=workload.vocabulary_size)
    setting = Setting("lstm", hidden, 1, dtype, 1, 1, workload.source, None)
    plan = BenchPlan(tuple(WAYS.values()), seconds, None, None, None, None, 0)
    with Progress(transient=True) as bar:
        benches = [Bench(model, workload, setting, replace(plan, seed=seed), bar) for seed in range(rounds)]
        waiting = _in_turn(benches, None)
        peak = float(np.median(waiting["figures"]["torch"])) / float(workload.cells.mean())
        return {
            "work": name, "rate": 0.5 * peak, "all waiting": waiting,
            "half load": _in_turn(benches, 0.5 * peak),
        }  # fmt: skip


def _in_turn(benches: Sequence[Bench], rate: float | None) -> Result:
    """Sweep what can be swept, then measure all ways in turn, every second time in the other order."""
    best, looks = {}, {}
    for name, way in WAYS.items():
        best[name], looks[name] = benches[0].best_of(way, rate)
    figures: dict[str, list[float]] = {name: [] for name in WAYS}
    for number, bench in enumerate(benches):
        for name in list(best)[:: -1 if number % 2 else 1]:
            seen = bench.measure(best[name], rate).measured
            figure = seen.cells / seen.seconds if rate is None else percentiles(seen.latencies_s).p90_ms
            figures[name].append(figure)
            print(name, best[name], f"{figure:.5g}", flush=True)
    return {"figures": figures, "best": best, "sweep": looks}


def ratios(part: Result) -> dict[str, tuple[float, float, float]]:
    """Return median, least and most of what cells bring and what batching brings, over the rounds."""
    figures = part["figures"]
    found = {}
    for name, (over, under) in RATIOS.items():
        each = np.array(figures[over]) / np.array(figures[under])
        found[name] = (float(np.median(each)), float(each.min()), float(each.max()))
    return found


def results_table(results: Sequence[Result]) -> str:
    """Return a row for each network and load: the three figures, and both ratios with their range over rounds."""
    rows = []
    for result in results:
        for load, unit in (("all waiting", "cells/s"), ("half load", "p90, ms (lower is better)")):
            part = result[load]
            middle = [f"{float(np.median(part['figures'][name])):,.4g}" for name in WAYS]
            found = [f"{value:.2f} ({low:.2f} to {high:.2f})" for value, low, high in ratios(part).values()]
            rows.append([result["work"], f"{load}, {unit}", *middle, *found])
    return table(
        ("LSTM", "", "padded, torch's layers", "closed, same cells", "cellular", "cells bring", "batching brings"), rows
    )


def page_text(found: Result) -> str:
    """Return the table and where it was measured."""
    about = found["machine"]
    quick = " Of a quick run: the figures mean nothing." if found["quick"] else ""
    return (
        f"{results_table(found['results'])}\n\n{about['cpu']}, one compute thread, load average "
        f"{found['load_average']}, commit {found['commit']}, {found['rounds']} rounds: `{found['command']}`.{quick}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--only", nargs="+", choices=SIZES, default=measurable(), metavar="NAME")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--show", action="store_true", help="measure nothing: the page from the JSON")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "batching-and-cells.json")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if not options.show:
        if options.data is None:
            parser.error("give --data DATA to measure, or --show")
        rounds, seconds = (2, 0.5) if options.quick else (5, 2.0)
        quick = " --quick" if options.quick else ""
        command = f"python benchmarks/batching_and_cells.py --data DATA{quick}"
        kept: dict[str, Any] = {}
        if options.json.exists():
            before = json.loads(options.json.read_text("utf-8"))
            if before["measures"] == made_by(MEASURES)["measures"] and before["quick"] == options.quick:
                kept = {result["work"]: result for result in before["results"]}
        for name in options.only:
            kept[name] = measured(name, options.data, rounds, seconds)
            results = [kept[size] for size in SIZES if size in kept]
            found = {**made_by(MEASURES, command), "quick": options.quick, "rounds": rounds, "results": results}
            options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    if options.page is not None:
        fill(options.page, {SECTION: page_text(json.loads(options.json.read_text("utf-8")))})


if __name__ == "__main__":
    main()
