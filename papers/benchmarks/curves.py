"""Latency against throughput, after BatchMaker's Figures 7 to 9, 11, 13 to 15 and Late Batching's 3 to 7.

    python papers/benchmarks/curves.py --measure                       # what cells cost on this machine
    python papers/benchmarks/curves.py [--case NAME ...] [--data DATA] [--quick] [--jobs 2]
    python papers/benchmarks/curves.py --keep-dynet DYNET.json         # what DyNet itself takes for trees
    python papers/benchmarks/curves.py --live --data DATA              # a small network on the engine
    python papers/benchmarks/curves.py --page papers/docs/curves.md    # tables and pictures from the results

Simulated: the scheduler and the policies that serve under a virtual clock, with the costs of cells that `--measure` has
written. Each line gets eight Poisson loads, from a tenth of what the cells could do at most to all of it, each with
several seeds; the first third of the requests is left out. Intervals are 95 % of Student's t over the seeds. Latency is
told apart into queueing (until the first step begins) and computing. Cases are kept in the JSON one by one. The case
`treebank` has the trees of DATA/sst; without --data it is left out, and random trees of like sizes stand for it.

DYNET.json: what `dynet_peer.py INPUTS.json DYNET.json --sizes 1 2 4 8 16 32 64` has written, with the inputs of
`ed_batch_throughput.py inputs`. It is kept among the results; without it the line of DyNet itself is left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one compute thread

import numpy as np
from rich.console import Console
from rich.progress import track

from batchmaker.lab.plots.sweeps import Line, Panel, draw_panels
from curve_cases import CASES, DYNET, TREEBANK, Case, capacity_rps, played, with_data
from curve_costs import COSTS, SIZES, measure
from curve_costs import MEASURES as COSTS_MEASURE
from shared import IMAGES, RESULTS, Result, command_now, fill, interval, made_by, table

LOADS: Final = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0)
FIGURES: Final = ("p50_ms", "p90_ms", "p99_ms", "queue_p99_ms", "compute_p50_ms", "served_rps")
DYNET_ROWS: Final = RESULTS / "curves-dynet.json"
OUT: Final = RESULTS / "curves.json"
LIVE: Final = OUT.with_name("curves-live.json")
MEASURES: Final = (
    "papers/benchmarks/curve_cases.py", "papers/benchmarks/results/curves-costs.json", "src/batchmaker/lab/simulator",
    "src/batchmaker/core", "src/batchmaker/policies/cellular.py", "src/batchmaker/lab/baselines/buckets.py",
    "src/batchmaker/lab/baselines/closed.py",
)  # fmt: skip
PERCENTS: Final = tuple(range(1, 100))


@dataclass(frozen=True, slots=True)
class Job:
    """One simulation."""

    case: str
    way: int
    load: float
    rate: float
    count: int
    seed: int


def play(job: Job, dynet_s: Sequence[float] | None, data: str = "") -> Result:
    """Return the numbers of one simulation, without its first third."""
    case = with_data(CASES[job.case], data)
    records = played(case, case.ways[job.way], job.rate, job.count, job.seed, dynet_s)
    kept = slice(job.count // 3, None)
    arrived, started, finished = (
        part[kept] for part in (records.arrived_s, records.started_s, records.finished_s)
    )  # fmt: skip
    whole, queue, compute = 1e3 * (finished - arrived), 1e3 * (started - arrived), 1e3 * (finished - started)
    p50, p90, p99 = np.percentile(whole, (50, 90, 99)).tolist()
    done = np.sort(records.finished_s)[kept]
    found = {
        **asdict(job), "p50_ms": p50, "p90_ms": p90, "p99_ms": p99,
        "queue_p50_ms": float(np.median(queue)), "queue_p99_ms": float(np.percentile(queue, 99)),
        "compute_p50_ms": float(np.median(compute)), "compute_p99_ms": float(np.percentile(compute, 99)),
        "served_rps": float((len(done) - 1) / (done[-1] - done[0])), "mean_batch": records.rows / records.steps,
    }  # fmt: skip
    if job.load == case.watched:
        found |= {"queue_cdf_ms": np.percentile(queue, PERCENTS).tolist()}
        found |= {"compute_cdf_ms": np.percentile(compute, PERCENTS).tolist()}
    return found


def jobs_of(case: Case, *, seeds: int, quick: bool, dynet: bool, data: str = "") -> list[Job]:
    """Return all simulations of a case. Few requests come at low loads: their steps are small and many."""
    capacity = capacity_rps(with_data(case, data))
    loads = LOADS[::4] if quick else LOADS
    return [
        Job(case.name, number, load, load * capacity, 150 if quick else 1500 if load < 0.5 else 5000, seed)
        for number, way in enumerate(case.ways) if dynet or way.policy != DYNET
        for load in loads for seed in range(seeds)
    ]  # fmt: skip


def run(case: Case, jobs: Sequence[Job], processes: int, dynet_s: Sequence[float] | None, data: str) -> list[Result]:
    """Simulate all jobs; results in their order."""
    console = Console(stderr=True)
    if processes == 1:
        return [play(job, dynet_s, data) for job in track(jobs, case.name, console=console)]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(play, job, dynet_s, data): number for number, job in enumerate(jobs)}
        found: list[Result] = [{}] * len(jobs)
        for future in track(as_completed(futures), case.name, len(jobs), console=console):
            found[futures[future]] = future.result()
    return found


def summed_up(case: Case, results: Sequence[Result]) -> Result:
    """Return a point for each line and load: mean and half the interval of every figure over the seeds."""
    points = []
    for number, way in enumerate(case.ways):
        mine = [result for result in results if result["way"] == number]
        for load in sorted({result["load"] for result in mine}):
            seen = [result for result in mine if result["load"] == load]
            point: Result = {"way": way.label, "load": load, "rate": seen[0]["rate"], "seeds": len(seen)}
            for figure in (*FIGURES, "queue_p50_ms", "compute_p99_ms", "mean_batch"):
                point[figure] = interval([result[figure] for result in seen])
            if "queue_cdf_ms" in seen[0]:
                point |= {key: seen[0][key] for key in ("queue_cdf_ms", "compute_cdf_ms")}
            points.append(point)
    return {"case": case.name, "figure": case.figure, "lengths": case.lengths, "points": points}


def probe() -> str:
    """Return a digest of a few small simulations: equal as long as the simulator and the policies behave alike."""
    seen = []
    for name, way in (("lstm-512", 0), ("lstm-512", 1), ("lstm-64", 1), ("seq2seq-2", 0), ("trees", 0), ("trees", 2)):
        case = CASES[name]
        records = played(case, case.ways[way], 0.5 * capacity_rps(case), 60, 99, None)
        seen.append([name, records.steps, *(f"{value:.6g}" for value in records.finished_s)])
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:16]


# --- DyNet itself ----------------------------------------------------------------------------------------------------


def dynet_seconds(rows: Sequence[Result], most: int = 64) -> list[float]:
    """Return DyNet's seconds for a batch of 0 to `most` trees, with the better strategy at each size that was measured.

    Between two sizes seconds are interpolated; graphs are built in Python, as in its rates.
    """
    trees = [row for row in rows if row["workload"] == "treelstm"]
    sizes = sorted({row["size"] for row in trees})
    best = [min(row["size"] / row["per_s"] for row in trees if row["size"] == size) for size in sizes]
    return [0.0, *np.interp(range(1, most + 1), sizes, best).tolist()]


# --- the page --------------------------------------------------------------------------------------------------------


def case_table(found: Result) -> str:
    """Return a row for each line: at a fifth and at half of the cells' capacity, and the most that it served."""
    rows = []
    for label in dict.fromkeys(point["way"] for point in found["points"]):
        points = [point for point in found["points"] if point["way"] == label]
        most = max(points, key=lambda point: point["served_rps"][0])
        row = [label]
        for load in (0.2, 0.5):
            point = next((point for point in points if point["load"] == load), None)
            row += ["-"] * 2 if point is None else [_shown(point["p90_ms"]), _shown(point["queue_p99_ms"])]
        rows.append([*row, _shown(most["served_rps"])])
    head = (
        "line",
        "p90 at 0.2, ms",
        "queueing p99 at 0.2, ms",
        "p90 at 0.5, ms",
        "queueing p99 at 0.5, ms",
        "most, /s",
    )
    return table(head, rows)


def _shown(value: Sequence[float]) -> str:
    middle, half = value
    digits = f"{middle:,.0f}" if middle >= 100 else f"{middle:.3g}"
    return digits if math.isnan(half) else f"{digits} ± {half:,.0f}" if middle >= 100 else f"{digits} ± {half:.2g}"


def panels(found: Result) -> list[Panel]:
    """Return p50, p90, p99 and queueing against what was served; and where they were kept, both parts as CDFs."""
    made = []
    for figure, title in (("p50_ms", "p50"), ("p90_ms", "p90"), ("p99_ms", "p99"), ("queue_p99_ms", "queueing, p99")):
        lines = []
        for label in dict.fromkeys(point["way"] for point in found["points"]):
            points = [point for point in found["points"] if point["way"] == label]
            x, y = [point["served_rps"][0] for point in points], [point[figure][0] for point in points]
            half = [0.0 if math.isnan(point[figure][1]) else point[figure][1] for point in points]
            low = [max(value - width, 1e-3) for value, width in zip(y, half, strict=True)]
            lines.append(Line(label, x, y, low, [value + width for value, width in zip(y, half, strict=True)]))
        made.append(Panel(f"{title}", "requests served per second", "ms", lines, log=True))
    watched = [point for point in found["points"] if "queue_cdf_ms" in point]
    for key, title in (("queue_cdf_ms", "queueing"), ("compute_cdf_ms", "computing")) if watched else ():
        lines = [Line(point["way"], point[key], PERCENTS, PERCENTS, PERCENTS) for point in watched]
        made.append(Panel(f"{title} at {watched[0]['load']:g} of the capacity: CDF", "ms", "% of requests", lines))
    return made


def show(found: Result, page: Path) -> None:
    """Put every case's table into the page, and draw its curves."""
    sections = {"machine": machine_text(found)}
    for case in found["cases"]:
        png = IMAGES / f"curves-{case['case']}.png"
        about = f"{case['figure']}; {case['lengths']}; simulated with measured costs; bands: 95 % over seeds"
        draw_panels(png, panels(case), f"Latency against throughput: {case['case']}", about)
        link = os.path.relpath(png, page.parent)
        sections[case["case"]] = f"{case_table(case)}\n\n![Latency against throughput, {case['case']}]({link})"
    if LIVE.exists():
        sections["live"] = live_table(json.loads(LIVE.read_text("utf-8")))
    fill(page, sections)


def machine_text(found: Result) -> str:
    seeds = sorted({point["seeds"] for case in found["cases"] for point in case["points"]})
    num_seeds = " or ".join(map(str, seeds))
    about, quick = found["machine"], " Of a quick run: the figures mean nothing." if found["quick"] else ""
    return (
        f"Costs of cells: {about['cpu']}, one thread, `python papers/benchmarks/curves.py --measure`. Simulated at "
        f"commit {found['commit']}, {num_seeds} seeds: `{command_now(found)}`.{quick}"
    )


def live_table(live: Result) -> str:
    """Return p90 and queueing of the engine itself, a row for each way and load."""
    rows = [
        [point["way"], f"{point['load']:g}", f"{point['rate']:,.0f}", *(_shown(point[key]) for key in
         ("p50_ms", "p90_ms", "p99_ms", "queue_p99_ms"))]
        for point in live["points"]
    ]  # fmt: skip
    heads = ("line", "load", "offered/s", "p50, ms", "p90, ms", "p99, ms", "queueing p99, ms")
    note = f"{live['work']}, {live['machine']['cpu']}, load average {live['load_average']}, commit {live['commit']}."
    return f"{table(heads, rows)}\n\n{note}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure what cells cost, and write it")
    parser.add_argument("--live", action="store_true", help="measure a small network on the engine")
    parser.add_argument("--case", nargs="+", choices=CASES, metavar="NAME", help="default: all that have their data")
    parser.add_argument("--data", type=Path, help="folder of the data sets: for `treebank` and --live")
    parser.add_argument("--keep-dynet", type=Path, metavar="DYNET.json", help="keep what dynet_peer.py has written")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, default=OUT)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.keep_dynet is not None:
        about = made_by(("benchmarks/dynet_peer.py",), "PYTHON benchmarks/dynet_peer.py INPUTS.json DYNET.json")
        rows = json.loads(options.keep_dynet.read_text("utf-8"))
        DYNET_ROWS.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", "utf-8")
    elif options.measure:
        sizes, seconds = (SIZES[:4], 0.02) if options.quick else (SIZES, 0.1)
        found = {**made_by(COSTS_MEASURE), **measure(sizes, seconds)}
        (options.json if options.quick else COSTS).write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    elif options.live:
        from curves_live import measured_live

        if options.data is None:
            parser.error("--live needs --data DATA")
        found = measured_live(options.data, quick=options.quick)
        (options.json if options.json != OUT else LIVE).write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    elif options.page is None:
        if not options.data and any(CASES[name].lengths == TREEBANK for name in options.case or ()):
            parser.error("the case treebank needs --data DATA")
        simulate_cases(options)
    if options.page is not None:
        show(json.loads(options.json.read_text("utf-8")), options.page)


def simulate_cases(options: argparse.Namespace) -> None:
    """Simulate the cases that were asked for, and keep each beside those that the JSON has of the same code."""
    dynet = json.loads(DYNET_ROWS.read_text("utf-8"))["rows"] if DYNET_ROWS.exists() else None
    dynet_s = None if dynet is None else dynet_seconds(dynet)
    more = f"{' --data DATA' if options.data else ''}{' --quick' if options.quick else ''}"
    about = made_by(MEASURES, f"python papers/benchmarks/curves.py{more} --jobs {options.jobs}")
    about["measures"]["probe"] = probe()
    seeds, data = 2 if options.quick else options.seeds, str(options.data or "")
    before = json.loads(options.json.read_text("utf-8")) if options.json.exists() else {}
    kept: dict[str, Any] = {}
    if before.get("quick") == options.quick and of_the_same(before["measures"], about["measures"]):
        kept = {case["case"]: case for case in before["cases"]}
    for name in options.case or [name for name, case in CASES.items() if data or case.lengths != TREEBANK]:
        case = CASES[name]
        jobs = jobs_of(case, seeds=seeds, quick=options.quick, dynet=dynet is not None, data=data)
        began_s = time.monotonic()
        kept[name] = summed_up(case, run(case, jobs, options.jobs, dynet_s, data))
        print(f"{name}: {len(jobs)} simulations in {time.monotonic() - began_s:.0f} s", flush=True)
        cases = [kept[each] for each in CASES if each in kept]
        found = {**about, "quick": options.quick, "seeds": seeds, "cases": cases}
        options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def of_the_same(before: Result, now: Result) -> bool:
    """Return whether two simulations are of the same code and costs, or play a little of it alike."""
    return bool(before["digest"] == now["digest"] or before.get("probe") == now["probe"])


if __name__ == "__main__":
    main()
