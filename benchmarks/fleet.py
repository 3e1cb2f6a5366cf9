"""What routing by work gains and what an SLA costs in replicas, simulated: papers/docs/simulations.md.

    python benchmarks/fleet.py [PART ...]     parts: agree, routers, sizes, guesses, sla, big; all without a name

Costs are those of an LSTM of 1024 on one core, cells and engine, that results/simulated-and-real.json measured; they
are written into results/fleet-costs.json, which `batchmaker simulate --latency-table` takes. Each part writes its
numbers into results/fleet.json, beside those of the others; `routers` and `sla` also write a picture into
papers/docs/images.
Seconds are of processor time as well as of wall time, since other programs disturb the latter.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from batchmaker.cli import options
from batchmaker.cli.simulate import device, workload
from batchmaker.cli.simulate.fleet import FleetStudy, make_work, play, unit_work_ns
from batchmaker.cli.simulate.fleet_options import FleetAsk
from batchmaker.cost.latency import CellLatency, LatencyTable, isotonic
from batchmaker.cost.profile import CostProfile, Overhead, ProfileOptions
from batchmaker.lab.plots.sweeps import Line, Panel, draw_panels
from batchmaker.lab.simulator.costs import step_costs
from batchmaker.lab.simulator.fleet.report import summarise_fleet
from batchmaker.lab.simulator.simulate import SimulatedDevice
from batchmaker.lab.zoo.blueprint import blueprint
from provenance import made_by

HERE = Path(__file__).resolve().parent
COSTS = HERE / "results" / "fleet-costs.json"
RESULTS = HERE / "results" / "fleet.json"
IMAGES = HERE.parent / "papers" / "docs" / "images"
MAX_BATCH = 32
ROUTERS = ("random", "round-robin", "two-choices", "least-requests", "least-work")
LOADS = (0.4, 0.6, 0.7, 0.8, 0.9, 0.95)
SEEDS = (0, 1)
SIZES = (2, 10, 100, 1000)
SIZED_ROUTERS = ("round-robin", "least-requests", "least-work")
SIZED_LOADS = (0.6, 0.9)
MOST_WITH_SEQUENCES = 10
"""Replicas. With more, the requests are over before as many sequences are open as there will be."""
REQUESTS = 100_000
MEASURES: Final = (
    "benchmarks/fleet.py", "benchmarks/results/fleet-costs.json", "src/batchmaker/cli/simulate/fleet.py",
    "src/batchmaker/fleet/routing.py", "src/batchmaker/lab/simulator/fleet", "src/batchmaker/policies/cellular.py",
    "src/batchmaker/core",
)  # fmt: skip
KEPT = ("mean_ms", "p50_ms", "p90_ms", "p99_ms", "p999_ms", "mean_batch", "busy_share")


def write_costs() -> None:
    """Write what was measured as a profile."""
    measured = json.loads((HERE / "results" / "simulated-and-real.json").read_text("utf-8"))
    of = next(one for one in measured["results"] if (one["model"], one["policy"]) == ("lstm", "cellular"))
    (steps_ms,), (overhead,) = (list(of["cells_ms"][0].values()), of["overhead_us"])
    seconds = tuple(float(ms) / 1e3 for ms in isotonic(list(steps_ms.values())))
    cell = CellLatency("step", tuple(map(int, steps_ms)), seconds, seconds)
    about = ProfileOptions("float32", 1, measured["machine"]["cpu"], measured["commit"], of["hidden"])
    engine = Overhead(**{name: us / 1e6 for name, us in overhead.items()})
    CostProfile("lstm", about, LatencyTable((cell,)), (), engine).write(COSTS)


def make_study(count: int, lengths: str = "europarl") -> tuple[FleetStudy, float]:
    """Return what is simulated, and how many requests a second one replica serves at full batches."""
    plan = blueprint("lstm", lambda: options.make_model("lstm", hidden=1024, max_batch=MAX_BATCH))
    work = workload.make("lstm", plan, (), count, lengths)
    profile, _ = device.cost_profile(plan, work, npu=False, dataflow=device.DATAFLOW, table=COSTS)
    assert profile.overhead is not None
    of = SimulatedDevice(step_costs(plan.model, profile.latency), 1, 0, True, profile.overhead)
    drawn = work.draw(0, 100_000)
    true, _ = unit_work_ns(plan.model, profile, of, drawn.shapes)
    study = FleetStudy(plan.model, "cellular", of, profile, work, workload.SimulatedArrivals("poisson"), {})
    return study, 1e9 / float(true[drawn.kinds].mean())


def measure(study: FleetStudy, fleet: FleetAsk, router: str, replicas: int, rate: float, seed: int, count: int) -> Any:
    """Return the summary of one fleet, how it was simulated, and seconds of wall and processor time."""
    work = make_work(study, fleet, rate, seed, count)
    wall_s, busy_s = time.perf_counter(), time.process_time()
    records, fidelity = play(study, fleet, work, router, replicas, seed)
    taken = time.perf_counter() - wall_s, time.process_time() - busy_s
    return summarise_fleet(records, 0.1), fidelity, taken


def mean_of(
    study: FleetStudy,
    fleet: FleetAsk,
    router: str,
    replicas: int,
    rate: float,
    seeds: tuple[int, ...] = SEEDS,
    count: int = REQUESTS,
) -> dict[str, Any]:
    """Return the means over seeds, and all seeds' p99."""
    found = [measure(study, fleet, router, replicas, rate, seed, count)[0] for seed in seeds]
    means = {key: float(np.mean([getattr(one, key) for one in found])) for key in KEPT}
    return {**means, "p99_ms_of_seeds": [one.p99_ms for one in found]}


def agree() -> list[dict[str, Any]]:
    """Play the same fleets exactly and fast."""
    study, capacity = make_study(3000)
    rows = []
    for replicas, load, router in ((4, 0.5, "least-work"), (8, 0.9, "two-choices"), (16, 0.8, "least-requests")):
        both = {}
        for fidelity in ("exact", "fast"):
            asked = FleetAsk((replicas,), (router,), fidelity)
            told, _, (wall_s, cpu_s) = measure(study, asked, router, replicas, load * replicas * capacity, 0, 3000)
            both[fidelity] = {key: getattr(told, key) for key in KEPT} | {"wall_s": wall_s, "cpu_s": cpu_s}
            print(replicas, load, router, fidelity, both[fidelity], flush=True)
        rows.append({"replicas": replicas, "load": load, "router": router, "requests": 3000, **both})
    return rows


def routers() -> list[dict[str, Any]]:
    """Play every router at every load, on 16 and on 64 replicas."""
    study, capacity = make_study(REQUESTS)
    rows = []
    for replicas in (16, 64):
        for router in ROUTERS:
            for load in LOADS:
                rate = load * replicas * capacity
                told = mean_of(study, FleetAsk((replicas,), (router,), "fast"), router, replicas, rate)
                rows.append({"replicas": replicas, "router": router, "load": load, "rate": rate, **told})
            print(json.dumps(rows[-1]), flush=True)
    panels = []
    for replicas in (16, 64):
        for title, key in (("99th percentile of latency", "p99_ms"), ("Median of latency", "p50_ms")):
            lines = [
                Line(router, LOADS, *(3 * [[row[key] for row in rows if row["router"] == router and (
                    row["replicas"] == replicas)]])) for router in ROUTERS
            ]  # fmt: skip
            panels.append(Panel(f"{title}, {replicas} replicas", "load, as a share of full batches", "ms", lines, True))
    under = "LSTM of 1024 on one core each, sentences of 1 to 330 words; 100 000 requests, mean of 2 seeds"
    draw_panels(IMAGES / "fleet-routers.png", panels, "Routers of a fleet, simulated", under)
    return rows


def sizes() -> list[dict[str, Any]]:
    """Play fleets of 2 to 1,000 replicas: single requests under three routers, and sequences of 20 chunks."""
    study, capacity = make_study(1_000_000)
    rows = []
    for replicas in SIZES:
        count = max(REQUESTS, 1000 * replicas)
        routers = (*SIZED_ROUTERS, "sticky") if replicas <= MOST_WITH_SEQUENCES else SIZED_ROUTERS
        for router, load in itertools.product(routers, SIZED_LOADS):
            chunked = {"chunks": 20.0, "chunk_gap_ms": 200.0} if router == "sticky" else {}
            asked = FleetAsk((replicas,), (router,), "fast", **chunked)
            told = mean_of(study, asked, router, replicas, load * replicas * capacity, count=count)
            rows.append({"replicas": replicas, "router": router, "load": load, "requests": count, **told})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def guesses() -> list[dict[str, Any]]:
    """Play least-work with guesses of work that are more and more wrong, beside least-requests."""
    study, capacity = make_study(REQUESTS)
    rows = []
    for load in (0.6, 0.9):
        for router, error in (("least-requests", 0.0), *(("least-work", e) for e in (0.0, 0.5, 1.0, 2.0))):
            asked = FleetAsk((16,), (router,), "fast", length_error=error)
            told = mean_of(study, asked, router, 16, load * 16 * capacity)
            rows.append({"replicas": 16, "router": router, "load": load, "length_error": error, **told})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def fewest(study: FleetStudy, router: str, rate: float, p99_ms: float, least: int, known: dict[int, float]) -> int:
    """Return the fewest replicas with which the p99 is within the SLA, with one seed.

    least: too few. known: the p99 by replicas, as far as it has been found.
    """

    def enough(replicas: int) -> bool:
        if replicas not in known:
            told = mean_of(study, FleetAsk((replicas,), (router,), "fast"), router, replicas, rate, (0,))
            known[replicas] = told["p99_ms"]
        return known[replicas] <= p99_ms

    low = max((n for n, p99 in known.items() if p99 > p99_ms), default=least)
    high = min((n for n, p99 in known.items() if p99 <= p99_ms), default=low + 4)
    while not enough(high):
        low, high = high, high + 2 * (high - low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def sla() -> list[dict[str, Any]]:
    """Find the fewest replicas for each SLA and router, at a rate that 40 replicas could serve at full batches."""
    study, capacity = make_study(REQUESTS)
    slas_ms, rate = SLAS_MS, 40 * capacity
    rows = []
    for router in ROUTERS:
        known: dict[int, float] = {}
        for p99_ms in reversed(slas_ms):
            found = fewest(study, router, rate, p99_ms, 38, known)
            rows.append({"router": router, "p99_ms": p99_ms, "rate": rate, "replicas": found})
        print(json.dumps(rows[-len(slas_ms) :]), flush=True)
    lines = [
        Line(router, slas_ms, *(3 * [[row["replicas"] for row in reversed(rows) if row["router"] == router]]))
        for router in ROUTERS
    ]
    more = [Line(line.name, line.x, *(3 * [[100 * (n / 40 - 1) for n in line.y]])) for line in lines]
    panels = [
        Panel("Fewest replicas", "SLA: 99 % within (ms)", "replicas", lines),
        Panel("Replicas above those that full batches need", "SLA: 99 % within (ms)", "%", more),
    ]
    under = f"LSTM of 1024 on one core each, sentences of 1 to 330 words; {rate:.0f} requests per second"
    draw_panels(IMAGES / "fleet-sla.png", panels, "What an SLA costs in replicas, simulated", under)
    return rows


SLAS_MS = (80, 100, 120, 150, 200, 300)


def big() -> list[dict[str, Any]]:
    """Play 10 million requests on 1,000 replicas."""
    count = 10_000_000
    study, capacity = make_study(count)
    rows = []
    for router in ("least-work",):
        told, fidelity, (wall_s, cpu_s) = measure(
            study, FleetAsk((1000,), (router,), "fast"), router, 1000, 0.8 * 1000 * capacity, 0, count
        )
        rows.append({"replicas": 1000, "requests": count, "router": router, "fidelity": fidelity, "wall_s": wall_s,
                     "cpu_s": cpu_s, "p99_ms": told.p99_ms, "mean_batch": told.mean_batch})  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


PARTS = {"agree": agree, "routers": routers, "sizes": sizes, "guesses": guesses, "sla": sla, "big": big}


def main() -> None:
    """Run the parts that are named, and keep each beside those that the file has of the same code."""
    wrong = [name for name in sys.argv[1:] if name not in PARTS]
    if wrong:
        raise SystemExit(f"parts are {', '.join(PARTS)}; got {', '.join(wrong)}")
    write_costs()
    for name in sys.argv[1:] or PARTS:
        rows = PARTS[name]()
        about = made_by(MEASURES, "python benchmarks/fleet.py")
        before = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
        same = before.get("measures") == about["measures"]
        options.write_json(RESULTS, (before if same else {}) | about | {name: rows})


if __name__ == "__main__":
    main()
