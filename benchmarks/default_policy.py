"""The default policy against the best other policy of each case, simulated: papers/docs/default-policy.md, decision 21.

    python benchmarks/default_policy.py [--quick] [--jobs N] [--trace CSV] [--json OUT.json] [--simulations KEPT.json]
    python benchmarks/default_policy.py --measure benchmarks/results/default-policy-costs.json

A case is a network (or three that share a device), a load, its arrivals and a deadline. Every policy is offered the
same requests at the same times, in the simulator, which runs the scheduler and the policies that serve. Requests are
others than those whose lengths the policies know. Arrivals are Poisson's; at a load of 0.6 also bursts, and those of a
recorded trace. Loads are shares of what the best policy answers per second where 512 requests wait at once, eight full
batches. Deadlines are multiples of what a request takes alone, in the mean; the late are finished. For each case and
number (mean, p90, violations, throughput) `auto` is compared with the policy that is best *there*, so what it is held
against is no single policy. After three seeds, others are simulated on unless they are behind the best in every number
(`in_the_running`).

`decision_us` is what the policy's own choices take on the machine that simulates, per step; `step_us` what a step takes
there, in simulated time, without what an engine needs beside it.

Costs: cells as they were measured on a CPU (`--measure` writes the file), and LazyBatching's NPU. Only steps take
time. Policies of whole requests are simulated where the network has a padded form. `learned` is left out: it needs a
file that was learnt from examples. A policy that refuses requests has no place in latencies, and its refused requests
are violations.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from batchmaker import policies
from batchmaker.cli import options as cli_options
from batchmaker.cli.bench.report import commit, machine
from batchmaker.cli.cell_times import bound_registry, measured_cells
from batchmaker.cli.simulate import device
from batchmaker.cli.simulate.study import looks_at_deadlines, make_policy
from batchmaker.cli.simulate.workload import LENGTHS_STREAM, SimulatedArrivals, make
from batchmaker.cli.workload import UNPADDED, make_workload
from batchmaker.cost import CellLatency, CostProfile, LatencyTable, ProfileOptions
from batchmaker.graph.work import work_of
from batchmaker.lab.plots.sweeps import Line, Panel, draw_panels
from batchmaker.lab.simulator.costs import step_costs
from batchmaker.lab.simulator.report import summarise
from batchmaker.lab.simulator.simulate import SimulatedDevice, simulate
from batchmaker.lab.simulator.together import Together
from batchmaker.lab.simulator.workload import Offered, SimulatedModel, SimulatedRequest
from batchmaker.lab.zoo.blueprint import blueprint
from batchmaker.policies.auto import AutoPolicy
from pages import fill, table
from provenance import made_by

COSTS: Final = Path(__file__).parent / "results" / "default-policy-costs.json"
OUT: Final = COSTS.with_name("default-policy.json")
MAX_BATCH: Final = 64
SIZES: Final = (1, 2, 4, 8, 16, 32, 64)
MODELS: Final = {
    "lstm": "cpu", "seq2seq": "cpu", "bilstm-tagger": "cpu", "bilstm-tagger-char": "cpu", "treelstm": "cpu",
    "treelstm-2type": "cpu", "treegru": "cpu", "mvrnn": "cpu", "latticelstm": "cpu", "latticegru": "cpu",
    "gnmt": "npu", "transformer": "npu", "las": "npu", "deepspeech2": "npu", "resnet50": "npu",
}  # fmt: skip
OPTIONS: Final = {
    "lstm": {"hidden": 512}, "seq2seq": {"hidden": 256, "vocabulary_size": 10_000}, "mvrnn": {"hidden": 32},
    "resnet50": {"cut": "blocks"},
}  # fmt: skip
MIXES: Final = {
    "lstm + treelstm + latticelstm": "cpu",
    "gnmt + transformer + resnet50": "npu",
}
QUICK: Final = (
    "lstm", "seq2seq", "bilstm-tagger", "treelstm-2type", "latticelstm", "gnmt", "transformer", "resnet50", *MIXES,
)  # fmt: skip
AUTO: Final = "auto"
CELL_POLICIES: Final = (
    "cellular", "cellular:max_steps=1", "agenda", "agenda-remaining", "depth", "sufficient", "lazy", "lazy:max_steps=5",
)  # fmt: skip
WHOLE: Final = ("serial", "graph:window_ms=0", "graph:window_ms=5", "padded", "orloj")
LOADS: Final = (0.3, 0.6, 0.9)
WAITING: Final = math.inf
"""The load where all requests wait at once."""
WAITING_REQUESTS: Final = 512
"""Requests that wait at once: eight full batches."""
FIRST_SEEDS: Final = 3
"""Seeds after which policies that are behind in everything are left out."""
BEHIND: Final = 1.15
"""Times the best latency, or throughput, from which a policy is behind."""
BURSTS_AT: Final = 0.6
"""The load of other arrivals than Poisson's."""
SLAS: Final = (3.0, 10.0)
PROBED: Final = ("lstm", "seq2seq", "bilstm-tagger", "treelstm-2type", "latticelstm", "gnmt", "resnet50", *MIXES)
NUMBERS: Final = ("throughput_rps", "mean_ms", "p90_ms", "violation_share")
"""What is compared: the first where all requests wait, the others at a load."""
MEASURES: Final = (
    "benchmarks/results/default-policy-costs.json", "src/batchmaker/lab/simulator",
    "src/batchmaker/core", "src/batchmaker/policies",
)  # fmt: skip
Result = dict[str, Any]


# --- what is simulated -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Network:
    """A network, or several on one device, ready to be simulated. alone_s: one request, in the mean."""

    model: SimulatedModel
    shapes: Sequence[Sequence[SimulatedRequest]]
    profile: CostProfile
    costs: str
    can_pad: bool
    alone_s: float

    @property
    def device(self) -> SimulatedDevice:
        on_cpu = self.costs == "cpu"
        costs = step_costs(self.model, self.profile.latency, padded=on_cpu)
        return SimulatedDevice(costs, take_turns=on_cpu)

    def draw(self, seed: int, count: int) -> list[SimulatedRequest]:
        """Return requests of this seed; those of several networks in equal shares of time, in random order."""
        generator = np.random.default_rng((seed, LENGTHS_STREAM))
        seconds = [self._alone_s(part) for part in self.shapes]
        share = np.array([1 / one for one in seconds]) / sum(1 / one for one in seconds)
        chosen = generator.choice(len(self.shapes), count, p=share)
        return [self.shapes[part][generator.integers(len(self.shapes[part]))] for part in chosen.tolist()]

    def _alone_s(self, shapes: Sequence[SimulatedRequest]) -> float:
        return alone_s(self.model, self.profile.latency, shapes)


def alone_s(model: SimulatedModel, latency: LatencyTable, shapes: Sequence[SimulatedRequest]) -> float:
    """Return what a request takes alone, in the mean."""
    table = latency.dense([cell.name for cell in model.cells], MAX_BATCH)
    works = [work_of(shape.graph) for shape in shapes]
    widths = [-(-work.nodes // np.maximum(work.steps, 1)) for work in works]
    calls = [
        work.steps @ table[work.types, np.minimum(width, MAX_BATCH)] for work, width in zip(works, widths, strict=True)
    ]
    return fmean(map(float, calls))


def made(name: str) -> Any:
    """Return a new network of the zoo."""
    fitted = dict(make_workload(name, count=512).options) if name in UNPADDED else {}
    hidden = {"hidden": 128} if MODELS[name] == "cpu" else {}
    return cli_options.make_model(name, **{"max_batch": MAX_BATCH, **hidden, **fitted, **OPTIONS.get(name, {})})


@cache
def network(name: str) -> Network:
    """Return a network, or a mix of several."""
    if name in MIXES:
        return mixed([network(part) for part in name.split(" + ")])
    plan = blueprint(name, partial(made, name))
    work = make(name, plan, (), 512)
    shapes = list(work.draw(1, 512))
    if MODELS[name] == "npu":
        profile = device.cost_profile(plan, work, npu=True, dataflow=device.DATAFLOW, table=None)[0]
    else:
        profile = replace(measured()[name], lengths=device.predicted_lengths(plan, work) if name == "seq2seq" else ())
    seconds = alone_s(plan.model, profile.latency, shapes)
    return Network(plan.model, [shapes], profile, MODELS[name], name not in UNPADDED, seconds)


def mixed(parts: Sequence[Network]) -> Network:
    """Return networks that share one device, each with an equal share of its time."""
    together = Together([part.model for part in parts])
    shapes = [[together.request(i, shape) for shape in part.shapes[0]] for i, part in enumerate(parts)]
    profile = together.profile([part.profile for part in parts])
    shares = [1 / part.alone_s for part in parts]
    mean_s = len(parts) / sum(shares)  # of the requests, of which the short ones are more
    return Network(together.model, shapes, profile, parts[0].costs, all(part.can_pad for part in parts), mean_s)


# --- costs -----------------------------------------------------------------------------------------------------------


def measure(path: Path) -> None:
    """Measure the cells of the networks that run on a CPU, and write their times: the least of three medians, since
    others may use the machine."""
    found = {}
    for name in track([name for name, where in MODELS.items() if where == "cpu"], "measuring"):
        registry = bound_registry(made(name))
        rounds = [measured_cells(registry, SIZES, 0.05, 1) for _ in range(3)]
        found[name] = {
            cells[0].name: {
                "median_s": np.min([cell.median_s for cell in cells], axis=0).tolist(),
                "p95_s": np.min([cell.p95_s for cell in cells], axis=0).tolist(),
            }
            for cells in zip(*rounds, strict=True)
        }
    about = {"commit": commit(), "machine": machine(), "threads": 1, "sizes": SIZES, "options": OPTIONS}
    path.write_text(json.dumps({**about, "cells": found}, indent=1) + "\n", "utf-8")


@cache
def measured() -> dict[str, CostProfile]:
    """Return the measured times of the networks that run on a CPU."""
    content = json.loads(COSTS.read_text("utf-8"))
    about = ProfileOptions("float32", 1, content["machine"]["cpu"], content["commit"])
    return {
        name: CostProfile(name, about, LatencyTable(tuple(latency(cell, seen) for cell, seen in cells.items())))
        for name, cells in content["cells"].items()
    }


def latency(name: str, seen: dict[str, list[float]]) -> CellLatency:
    """Return the times of a cell as they are in the file."""
    return CellLatency(name, SIZES, tuple(seen["median_s"]), tuple(seen["p95_s"]))


# --- simulating ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Job:
    """One simulation. rate: per second, infinity: all at once. sla: in times alone, None: no deadlines."""

    network: str
    policy: str
    load: float
    rate: float
    sla: float | None
    seed: int
    requests: int
    arrivals: str = "poisson"


def play(job: Job) -> list[Result]:
    """Return the numbers of one simulation under each deadline that it stands for."""
    net = network(job.network)
    requests = net.draw(job.seed, job.requests)
    arrived_s = np.zeros(len(requests))
    if job.rate < math.inf:
        kind, _, path = job.arrivals.partition(" ")
        arrived_s = SimulatedArrivals(kind, Path(path) if path else None).times_s(job.rate, job.seed, len(requests))
    policy = made_policy(job.policy, net.profile)
    sla_s = None if job.sla is None else job.sla * net.alone_s
    decisions = timed(policy) if isinstance(policy, AutoPolicy) else [0.0]
    records = simulate(net.model, policy, Offered(requests, arrived_s), net.device, sla_s=sla_s)
    blind = job.sla is None and not looks_at_deadlines(made_policy(job.policy, net.profile))
    results = []
    for sla in (None, *SLAS) if blind and job.load < WAITING else (job.sla,):
        numbers = summarise(records, math.inf if sla is None else sla * net.alone_s) if sla else summarise(records, 1e9)
        about = {**asdict(job), "sla": sla, "steps": records.steps, "alone_ms": 1e3 * net.alone_s}
        about |= {"decision_us": 1e6 * sum(decisions) / records.steps, "step_us": 1e6 * records.busy_s / records.steps}
        results.append({**asdict(numbers), **about, "requests": job.requests})
    return results


def timed(policy: AutoPolicy) -> list[float]:
    """Note what the policy's decisions take: seconds of the processor, which the list gets as they come."""
    seconds: list[float] = []

    def counted(decide: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def decided(view: Any) -> Any:
            began_s = time.thread_time()
            found = decide(view)
            seconds.append(time.thread_time() - began_s)
            return found

        return decided

    policy.rank = counted(policy.rank)  # type: ignore[method-assign]
    policy.admit = counted(policy.admit)  # type: ignore[method-assign]
    return seconds


def probe() -> str:
    """Return a digest of a few small simulations: equal as long as the simulator and the policies behave alike.

    What decisions take of a processor is no part of it.
    """
    seen: list[Any] = []
    for name in PROBED:
        net = network(name)
        for policy, rate, sla in ((AUTO, 3 / net.alone_s, 3.0), (AUTO, math.inf, None), ("cellular", math.inf, None)):
            (found,) = play(Job(name, policy, WAITING, rate, sla, 0, 160))
            seen.append([name, found["steps"], *(f"{found[number]:.6g}" for number in NUMBERS)])
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:16]


def made_policy(text: str, profile: CostProfile) -> Any:
    """Return a new policy; `NAME, no profile` is told nothing of costs."""
    name, _, blind = text.partition(", ")
    if blind:
        return policies.make(name)
    return make_policy(name, profile)


def policies_of(name: str, ours: Sequence[str]) -> list[str]:
    """Return the policies that a network is simulated with."""
    return [*ours, *CELL_POLICIES, *(WHOLE if network(name).can_pad else WHOLE[:1])]


@dataclass(slots=True)
class Kept:
    """Simulations of earlier calls, by job, and the capacity of each network, which stays when seeds are added."""

    capacity_rps: dict[str, float] = field(default_factory=dict)
    simulations: dict[str, list[Result]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path | None, without: Sequence[str]) -> Kept:
        """Return what the file has, or nothing. without: policies that are simulated again."""
        if path is None or not path.exists():
            return cls()
        kept = cls(**json.loads(path.read_text("utf-8")))
        kept.simulations = {k: r for k, r in kept.simulations.items() if json.loads(k)["policy"] not in without}
        return kept


def played(jobs: Sequence[Job], processes: int, what: str, known: dict[str, list[Result]]) -> list[Result]:
    """Return the results of all jobs; those that are known already are not simulated again."""
    fresh = [job for job in jobs if key(job) not in known]
    if processes == 1:
        for job in track(fresh, what, console=Console(stderr=True)):
            known[key(job)] = play(job)
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, context) as pool:
            futures = {pool.submit(play, job): job for job in fresh}
            for future in track(as_completed(futures), what, len(fresh), console=Console(stderr=True)):
                known[key(futures[future])] = future.result()
    return [result for job in jobs for result in known[key(job)]]


def key(job: Job) -> str:
    return json.dumps(asdict(job), sort_keys=True)


def simulated(names: Sequence[str], options: argparse.Namespace, kept: Kept) -> list[Result]:
    """Simulate all cases: first what each policy serves at most, then loads that are shares of the most."""
    at_once = [
        Job(name, policy, WAITING, math.inf, None, 0, options.waiting)
        for name in names for policy in policies_of(name, options.ours)
    ]  # fmt: skip
    results = with_seeds(at_once, options, "all waiting", kept.simulations)
    jobs = []
    for name in names:
        others = [r for r in results if r["network"] == name and r["policy"] not in options.ours]
        capacity = kept.capacity_rps.setdefault(name, max(
            fmean(r["throughput_rps"] for r in others if r["policy"] == policy)
            for policy in {r["policy"] for r in others}
        ))  # fmt: skip
        for load, arrivals in loads_of(options.trace):
            for policy in policies_of(name, options.ours):
                blind = not looks_at_deadlines(made_policy(policy, network(name).profile))
                slas: tuple[float | None, ...] = (None,) if blind else (None, *SLAS)
                rate = float(f"{load * capacity:.4g}")
                jobs += [Job(name, policy, load, rate, sla, 0, options.requests, arrivals) for sla in slas]
    return results + with_seeds(jobs, options, "loads", kept.simulations)


def with_seeds(
    jobs: Sequence[Job], options: argparse.Namespace, what: str, known: dict[str, list[Result]]
) -> list[Result]:
    """Return the results of jobs with all seeds, without those of policies that are left out after the first seeds."""
    first, rest = range(options.seeds)[:FIRST_SEEDS], range(options.seeds)[FIRST_SEEDS:]
    results = played([replace(job, seed=seed) for job in jobs for seed in first], options.jobs, what, known)
    running = in_the_running(results, options.ours)
    left = [job for job in jobs if situation(asdict(job)) in running]
    more = [replace(job, seed=seed) for job in left for seed in rest]
    results += played(more, options.jobs, f"{what}, the other seeds", known)
    return [result for result in results if situation(result) in running]


def situation(result: Result) -> tuple[str, float, str, str]:
    """Return network, load, arrivals and policy of a simulation."""
    return result["network"], result["load"], result["arrivals"], result["policy"]


def in_the_running(results: Sequence[Result], ours: Sequence[str]) -> set[tuple[str, float, str, str]]:
    """Return the situations of ours, and of the others that may be the best of a case.

    These are those whose latency or throughput is at most BEHIND times as bad as the best, and the two with the fewest
    late requests.
    """
    found = {situation(result) for result in results if result["policy"] in ours}
    for case, by_policy in by_case(results).items():
        others = {policy: seen for policy, seen in by_policy.items() if policy not in ours}
        for number in numbers_at(case[1]):
            means = means_of(others, number)
            if number == "violation_share":
                mean_ms = {policy: fmean(r["mean_ms"] for r in others[policy]) for policy in means}
                near = sorted(means, key=lambda policy: (means[policy], mean_ms[policy]))[:2]
            elif number == "throughput_rps":
                near = [policy for policy, mean in means.items() if mean * BEHIND >= max(means.values())]
            else:
                near = [policy for policy, mean in means.items() if mean <= BEHIND * min(means.values())]
            found |= {situation(others[policy][0]) for policy in near}
    return found


def loads_of(trace: Path | None) -> list[tuple[float, str]]:
    """Return the loads and how requests come at each. trace: a file with recorded arrivals, if there is one."""
    others = ["mmpp", *([] if trace is None else [f"trace {trace}"])]
    return [*((load, "poisson") for load in LOADS), *((BURSTS_AT, arrivals) for arrivals in others)]


# --- what comes out --------------------------------------------------------------------------------------------------


def by_case(results: Sequence[Result]) -> dict[tuple[str, float, float | None, str], dict[str, list[Result]]]:
    """Return the simulations of each network, load, deadline and kind of arrivals, by policy."""
    groups: dict[tuple[str, float, float | None, str], dict[str, list[Result]]] = {}
    for result in results:
        case = (result["network"], result["load"], result["sla"], result["arrivals"].partition(" ")[0])
        groups.setdefault(case, {}).setdefault(result["policy"], []).append(result)
    return groups


def numbers_at(load: float) -> tuple[str, ...]:
    """Return what is compared at a load."""
    return NUMBERS[:1] if load == WAITING else NUMBERS[1:]


def means_of(by_policy: dict[str, list[Result]], number: str) -> dict[str, float]:
    """Return a number in the mean over seeds. Who refused requests has late ones, and no latencies."""
    return {
        policy: fmean(r[number] for r in seen) for policy, seen in by_policy.items()
        if number == "violation_share" or all(r["answered"] == r["requests"] for r in seen)
    }  # fmt: skip


def cases(results: Sequence[Result], ours: str, all_ours: Sequence[str]) -> Iterator[Result]:
    """Compare one policy with the best other in every case."""
    for (name, load, sla, arrivals), by_policy in by_case(results).items():
        row: Result = {"network": name, "load": load, "sla": sla, "arrivals": arrivals}
        others = {policy: seen for policy, seen in by_policy.items() if policy not in all_ours}
        mine = by_policy[ours]
        for number in numbers_at(load):
            means = means_of(others, number)
            pick = max if number == "throughput_rps" else min
            best = pick(means, key=means.__getitem__)
            own = fmean(r[number] for r in mine)
            row[number] = {"auto": own, "best": means[best], "policy": best}
            if number != "violation_share":
                row[number]["ratio"] = own / means[best]
        row["decision_us"] = fmean(r["decision_us"] for r in mine)
        row["step_us"] = fmean(r["step_us"] for r in mine)
        yield row


def shown(rows: Sequence[Result], ours: str) -> None:
    """Print a table of all cases, and the summary."""
    table = Table(title=ours)
    for column in ("network", "load", "deadline", "mean ms", "best", "ratio", "p90 ratio", "best", "late", "best"):
        table.add_column(column, justify="left" if column in ("network", "best") else "right")
    for row in sorted(rows, key=lambda r: (r["network"], r["load"], r["arrivals"], r["sla"] or 0)):
        if row["load"] == WAITING:
            most = row["throughput_rps"]
            table.add_row(row["network"], "all", "", f"{most['auto']:.1f}/s", most["policy"], f"{most['ratio']:.3f}")
            continue
        mean, p90, late = row["mean_ms"], row["p90_ms"], row["violation_share"]
        table.add_row(
            row["network"], f"{row['load']} {row['arrivals']}", f"{row['sla'] or ''}", f"{mean['auto']:.3g}",
            mean["policy"], f"{mean['ratio']:.3f}", f"{p90['ratio']:.3f}", p90["policy"],
            f"{late['auto']:.1%}" if row["sla"] else "", f"{late['best']:.1%} {late['policy']}" if row["sla"] else "",
        )  # fmt: skip
    console = Console(width=170)
    console.print(table)
    console.print(json.dumps(summary(rows), indent=1))


def summary(rows: Sequence[Result]) -> Result:
    """Return the medians and the worst of all cases."""
    found: Result = {}
    for number in ("mean_ms", "p90_ms"):
        ratios = [(row[number]["ratio"], row) for row in rows if number in row]
        worst, case = max(ratios, key=lambda pair: pair[0])
        found[number] = {
            "median": median(r for r, _ in ratios), "worst": worst,
            "worst_case": [case["network"], case["load"], case["sla"], case[number]["policy"]],
            "above_1.15": sum(r > 1.15 for r, _ in ratios), "cases": len(ratios),
        }  # fmt: skip
    late = [(r["violation_share"]["auto"] - r["violation_share"]["best"], r) for r in rows if r["sla"]]
    found["violation_share"] = {
        "median": median(d for d, _ in late), "worst": max(late, key=lambda pair: pair[0])[0],
        "worst_case": [max(late, key=lambda pair: pair[0])[1][k] for k in ("network", "load", "sla")],
    }  # fmt: skip
    most = [(row["throughput_rps"]["ratio"], row["network"]) for row in rows if "throughput_rps" in row]
    shares = [row["decision_us"] / row["step_us"] for row in rows]
    found["decision_over_step"] = {"median": median(shares), "worst": max(shares)}
    found["throughput_rps"] = {"median": median(r for r, _ in most), "worst": min(most)}
    return found


def page_table(found: Result) -> str:
    """Return a row for each network: medians and worst of its cases, and what deciding takes at a load of 0.6."""
    rows = found["cases"][AUTO]
    lines = []
    for name in [*found["networks"], None]:
        mine = [row for row in rows if name in (None, row["network"])]
        ratios = {number: [row[number]["ratio"] for row in mine if number in row] for number in ("mean_ms", "p90_ms")}
        late = [row["violation_share"]["auto"] - row["violation_share"]["best"] for row in mine if row["sla"]]
        most = [row["throughput_rps"]["ratio"] for row in mine if "throughput_rps" in row]
        plain = [row for row in mine if row["load"] == BURSTS_AT and row["sla"] is None]
        costs = [(row["decision_us"], row["step_us"]) for row in plain]
        lines.append([
            name or "all", *(f"{median(seen):.2f}, {max(seen):.2f}" for seen in ratios.values()),
            f"{100 * max(late):+.1f}", f"{min(most):.3f}",
            f"{costs[0][0]:.0f} / {costs[0][1]:.0f}" if name and costs else "",
        ])  # fmt: skip
    heads = ("network", "mean: median, worst", "p90: median, worst", "late, points above the fewest: worst",
             "throughput, all waiting", "decision / step, us")  # fmt: skip
    note = (
        f"`{found['command']}`, commit {found['commit']}, {found['machine']['cpu']}: {found['seeds']} seeds of "
        f"{found['requests']} requests, {found['waiting']} where all wait, {len(rows)} cases."
    )
    return f"{table(heads, lines)}\n\n{note}"


def draw(path: Path, rows: Sequence[Result], subtitle: str) -> None:
    """Draw the ratios of all cases, in order of size, without and with deadlines."""
    lines: dict[str, list[Line]] = {"mean_ms": [], "p90_ms": []}
    for number, found in lines.items():
        for sla in (None, *SLAS):
            ratios = sorted(row[number]["ratio"] for row in rows if number in row and row["sla"] == sla)
            name = "no deadlines" if sla is None else f"deadlines of {sla:g} times alone"
            found.append(Line(name, list(range(len(ratios))), ratios, ratios, ratios))
    panels = [
        Panel(f"{title} of auto over the best other's", "cases, best first", "ratio", lines[number])
        for number, title in (("mean_ms", "Mean latency"), ("p90_ms", "p90 latency"))
    ]
    draw_panels(path, panels, "One policy against the best of each case", subtitle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="some networks of each kind, few requests, two seeds")
    parser.add_argument("--network", action="append", choices=(*MODELS, *MIXES))
    parser.add_argument("--ours", action="append", help="policies that are compared with all others; auto")
    parser.add_argument("--requests", type=int, help="at each load")
    parser.add_argument("--waiting", type=int, default=WAITING_REQUESTS, help="requests that wait at once")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--trace", type=Path, help="recorded arrivals, such as AzureLLMInferenceTrace_code.csv")
    parser.add_argument("--json", type=Path, help="default: among the results, if all was simulated: 20 seeds, --trace")
    parser.add_argument("--png", type=Path)
    parser.add_argument("--page", type=Path, help="write the table there, from --json; simulate nothing")
    parser.add_argument(
        "--simulations", type=Path, help="keep capacities and single simulations here, and reuse them, except of ours"
    )
    parser.add_argument("--measure", type=Path, help="measure what cells cost on this CPU, into this file")
    options = parser.parse_args()
    if options.measure:
        measure(options.measure)
        return
    if options.page:
        fill(options.page, {AUTO: page_table(json.loads((options.json or OUT).read_text("utf-8")))})
        return
    whole = options.trace and (options.seeds or 20) >= 20
    if whole and not (options.json or options.quick or options.network or options.ours):
        options.json = OUT
    names = options.network or (QUICK if options.quick else (*MODELS, *MIXES))
    options.requests = options.requests or (80 if options.quick else 100)
    options.seeds = options.seeds or (2 if options.quick else 20)
    options.ours = options.ours or [AUTO]
    kept = Kept.load(options.simulations, options.ours)
    results = simulated(names, options, kept)
    tables = {ours: list(cases(results, ours, options.ours)) for ours in options.ours}
    for ours, rows in tables.items():
        shown(rows, ours)
    trace = " --trace CSV" if options.trace else ""
    about = made_by(
        MEASURES, f"python benchmarks/default_policy.py --requests {options.requests} --seeds {options.seeds}{trace}"
    )
    if options.simulations:
        options.simulations.write_text(json.dumps(asdict(kept)) + "\n", "utf-8")
    if options.json:
        about["measures"]["probe"] = probe()
        about |= {"quick": options.quick, "requests": options.requests, "waiting": options.waiting}
        about |= {"seeds": options.seeds, "networks": list(names)}
        content = {**about, "summary": {o: summary(r) for o, r in tables.items()}, "cases": tables}
        options.json.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    if options.png:
        draw(options.png, tables[options.ours[0]], f"simulated, {options.requests} requests, {options.seeds} seeds")


if __name__ == "__main__":
    main()
