"""LazyBatching's evaluation, simulated: every figure of the paper that can be, and the improved policy against all.

    python papers/benchmarks/lazybatching.py --data DATA [--jobs 2] [--quick] [--only PART ...] [--minutes M]

Writes papers/benchmarks/results/lazybatching.json (numbers per seed, with command, commit and machine), pictures under
papers/docs/images and the tables of papers/docs/lazybatching.md. Costs are those of the NPU model: raw, and scaled per
network so that a request alone takes what the paper's Table II says. DATA holds `wmt_pairs` and `arrival_traces`;
without it the parts with language pairs and the recorded trace are left out.

What a file holds already is not simulated again, if it has as many seeds and requests and a few small simulations
still come out as they did; so a run may be cut into pieces with --minutes, and --fresh begins anew. Rates are simulated
with all requests, the other parts with a tenth of them; --full: all parts with all, for over an hour. --quick: 3 seeds
of 500 requests of each part, into another file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from batchmaker.cli import options
from batchmaker.cli.simulate import workload
from batchmaker.cli.simulate.study import make_policy
from batchmaker.lab.simulator.costs import step_costs
from batchmaker.lab.simulator.report import summarise
from batchmaker.lab.simulator.simulate import SimulatedDevice, simulate
from batchmaker.lab.simulator.workload import Offered
from lazybatching_cases import (
    IMPROVED,
    ORACLE,
    PARTS,
    WINDOWS,
    Case,
    Network,
    Part,
    believed,
    cases_of,
    label,
    network,
)  # fmt: skip
from lazybatching_page import write_page
from shared import RESULTS, made_by

OUT = RESULTS / "lazybatching.json"
TRACE = "AzureLLMInferenceTrace_code.csv"
KEPT = ("mean_ms", "p50_ms", "p90_ms", "p99_ms", "throughput_rps", "goodput_rps", "violation_share", "mean_batch")
MEASURES = (
    "papers/benchmarks/lazybatching_cases.py", "papers/src/batchmaker_papers/npu", "src/batchmaker/lab/simulator",
    "src/batchmaker/core", "src/batchmaker/policies/cellular.py", "src/batchmaker/policies/joining.py",
    "src/batchmaker/policies/lazy.py", "src/batchmaker/policies/requests.py", "src/batchmaker/policies/expectation.py",
)  # fmt: skip
"""What decides the results."""
KEEP_EVERY_S = 60
LOW_RATE = 100
"""Below so many requests a second nothing builds up, and a fifth of the requests is simulated."""
QUANTILES = np.arange(101) / 100


@dataclass(frozen=True)
class Size:
    """How much is simulated, and from what data."""

    seeds: int
    requests: int
    data: Path | None


def network_of(part: Part, model: str, size: Size) -> Network:
    """Return the network of a part."""
    pair = size.data / "wmt_pairs" / part.pair if part.pair and size.data is not None else None
    return network(
        model, calibrated=part.calibrated, dataflow=part.dataflow, max_batch=part.max_batch, pair=pair
    )  # fmt: skip


@lru_cache(maxsize=40)
def _drawn(part: Part, model: str, size: Size, seed: int, count: int) -> Any:
    return network_of(part, model, size).work.draw(seed, count)


def rate_of(case: Case, net: Network) -> float:
    """Return requests per second; rates below 4 are shares of the capacity."""
    return case.rate * net.capacity_rps if case.rate < 4 else case.rate


def count_of(case: Case, size: Size) -> int:
    """Return how many requests a simulation has."""
    return round(size.requests * case.part.share) // (5 if 4 <= case.rate < LOW_RATE else 1)


def play(case: Case, size: Size) -> list[dict[str, Any]]:
    """Simulate a case with every seed; return a row for each SLA, with a number per seed."""
    part, begin_s = case.part, time.process_time()
    net = network_of(part, case.model, size)
    trace = size.data / "arrival_traces" / TRACE if size.data and part.arrivals == "trace" else None
    arrivals = workload.SimulatedArrivals(part.arrivals, trace)
    rate, count = rate_of(case, net), count_of(case, size)
    told = believed(net.profile, part)
    machine_ = SimulatedDevice(step_costs(net.model, net.profile.latency, padded=False))
    found: dict[float, dict[str, list[float]]] = {sla: {key: [] for key in KEPT} for sla in case.slas_ms}
    quantiles: list[float] = []
    for seed in range(size.seeds):
        offered = Offered(_drawn(part, case.model, size, seed, count), arrivals.times_s(rate, seed, count))
        records = simulate(
            net.model, make_policy(case.policy, told), offered, machine_, sla_s=case.slas_ms[0] / 1e3
        )  # fmt: skip
        for sla in case.slas_ms:
            numbers = asdict(summarise(records, sla / 1e3))
            for key in KEPT:
                found[sla][key].append(float(f"{numbers[key]:.5g}"))
        if seed == 0 and part.name == "rates" and rate == 1000:
            latency_ms = 1e3 * (records.finished_s - records.arrived_s)
            quantiles = np.quantile(latency_ms, QUANTILES).round(2).tolist()
    took_s = time.process_time() - begin_s
    return [
        {
            "part": part.name, "model": label(part, case.model), "costs": "calibrated" if part.calibrated else "raw",
            "policy": case.policy, "asked_rate": case.rate, "rate": rate, "share_of_capacity": rate / net.capacity_rps,
            "sla_ms": sla, "requests": count, "seeds": size.seeds, "cpu_s": round(took_s / len(found), 2), **numbers,
            **({"quantiles_ms": quantiles} if quantiles else {}),
        }
        for sla, numbers in found.items()
    ]  # fmt: skip


def about(part: Part, model: str, size: Size) -> dict[str, Any]:
    """Return what a network takes alone and serves at most, and what a batch of it takes."""
    net = network_of(part, model, size)
    return {
        "model": label(part, model), "costs": "calibrated" if part.calibrated else "raw", "single_ms": net.single_ms[0],
        "single_p99_ms": net.single_ms[1], "capacity_rps": net.capacity_rps, "cells": len(net.model.cells),
        "batch_ms": net.batch_ms,
    }  # fmt: skip


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what identifies a row."""
    return row["part"], row["model"], row["costs"], row["policy"], row["asked_rate"], row["sla_ms"]


def keys_of(case: Case) -> list[tuple[Any, ...]]:
    """Return the keys of the rows of a case."""
    costs = "calibrated" if case.part.calibrated else "raw"
    name = label(case.part, case.model)
    return [(case.part.name, name, costs, case.policy, case.rate, sla) for sla in case.slas_ms]


def probe() -> str:
    """Return a digest of a few small simulations: equal as long as the simulator and the policies behave alike."""
    part = next(part for part in PARTS if part.name == "rates")
    size = Size(1, 60, None)
    seen = [
        play(Case(part, model, policy, 1000, part.slas_ms), size)
        for model, policy in (
            ("gnmt", IMPROVED),
            ("gnmt", ORACLE),
            ("transformer", "cellular"),
            ("resnet50", WINDOWS[0]),
        )
    ]
    numbers = [[row[key] for key in KEPT] for rows in seen for row in rows]
    return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:16]


def begin(out: Path, size: Size, *, fresh: bool) -> dict[str, Any]:
    """Return the results so far: those in the file that were measured alike, or none."""
    command = f"python papers/benchmarks/lazybatching.py --data DATA --seeds {size.seeds} --requests {size.requests}"
    found = {**made_by(MEASURES, command), "seeds": size.seeds, "requests": size.requests}
    found["measures"]["probe"] = probe()
    if out.exists() and not fresh:
        known: dict[str, Any] = json.loads(out.read_text())
        if known.get("measures", {}).get("probe") == found["measures"]["probe"]:
            return {**found, **{name: known[name] for name in ("wall_s", "networks", "rows")}}
    return {**found, "wall_s": 0.0, "networks": [], "rows": []}


def run(parts: Sequence[Part], size: Size, jobs: int, out: Path, *, minutes: float, fresh: bool) -> dict[str, Any]:
    """Simulate what is missing of the parts, for so many minutes; return all results. `out` has them, too."""
    results = begin(out, size, fresh=fresh)
    counts = {key: count_of(case, size) for case in cases_of(parts) for key in keys_of(case)}
    wrong = [row for row in results["rows"] if (row["seeds"], row["requests"]) != (size.seeds, counts.get(key_of(row)))]
    results["rows"] = [row for row in results["rows"] if row not in wrong or key_of(row) not in counts]
    have = {key_of(row) for row in results["rows"]}
    named = {(net["model"], net["costs"]) for net in results["networks"]}
    wanted = [(part, model) for part in parts for model in part.models]
    results["networks"] += [
        about(part, model, size)
        for i, (part, model) in enumerate(wanted)
        if (key := (label(part, model), "calibrated" if part.calibrated else "raw")) not in named
        and key not in [(label(p, m), "calibrated" if p.calibrated else "raw") for p, m in wanted[:i]]
    ]
    todo = [case for case in cases_of(parts) if not have.issuperset(keys_of(case))]
    began_s = kept_s = time.monotonic()
    before_s = results["wall_s"]
    context = multiprocessing.get_context("spawn")  # the parent has torch's threads, which do not survive a fork
    with Progress(console=options.err()) as progress, ProcessPoolExecutor(jobs, context) as pool:
        bar = progress.add_task("simulations", total=len(todo))
        coming, running = iter(todo), set[Future[list[dict[str, Any]]]]()
        while True:
            in_time = time.monotonic() - began_s < 60 * minutes
            while in_time and len(running) < jobs + 1 and (case := next(coming, None)) is not None:
                running.add(pool.submit(play, case, size))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                results["rows"] += future.result()
                progress.advance(bar)
            if time.monotonic() - kept_s > KEEP_EVERY_S:
                kept_s = time.monotonic()
                out.write_text(json.dumps(results) + "\n")
    order = order_of()
    results["rows"].sort(key=lambda row: order[key_of(row)])
    results["wall_s"] = round(before_s + time.monotonic() - began_s, 1)
    out.write_text(json.dumps(results) + "\n")
    return results


def fill(results: dict[str, Any], others: dict[str, Any]) -> None:
    """Add the rows of another result, such as a quick one, that this one lacks; each row says how large it is."""
    if others["measures"]["probe"] != results["measures"]["probe"]:
        raise SystemExit("the other result is of other code: simulate it again")
    for name, key in (("rows", key_of), ("networks", lambda net: (net["model"], net["costs"]))):
        have = {key(one) for one in results[name]}
        results[name] += [one for one in others[name] if key(one) not in have]
    order = order_of()
    results["rows"].sort(key=lambda row: order[key_of(row)])


def order_of() -> dict[tuple[Any, ...], int]:
    """Return the place of each row in the file, by its key."""
    return {key: i for i, key in enumerate(key for case in cases_of(PARTS) for key in keys_of(case))}


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with wmt_pairs and arrival_traces")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=10_000, help="of each simulation")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--full", action="store_true", help="as many requests in each part: 75 minutes on two cores")
    parser.add_argument("--fill", type=Path, metavar="JSON", help="rows of another result, for what this one lacks")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no simulation after so many")
    parser.add_argument("--fresh", action="store_true", help="forget what the file holds")
    parser.add_argument("--only", action="append", choices=sorted({p.name for p in PARTS}), help="repeat for several")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    parts = [p for p in PARTS if (given.only is None or p.name in given.only) and (given.data or not p.needs_data)]
    if given.full or given.quick:
        parts = [replace(part, share=1.0) for part in parts]
    size = Size(3, 500, given.data) if given.quick else Size(given.seeds, given.requests, given.data)
    out = given.out or (Path("lazybatching-quick.json") if given.quick else OUT)
    results = run(parts, size, given.jobs, out, minutes=given.minutes, fresh=given.fresh)
    if given.fill is not None:
        fill(results, json.loads(given.fill.read_text()))
        out.write_text(json.dumps(results) + "\n")
    if out == OUT:
        write_page(results)


if __name__ == "__main__":
    main()
