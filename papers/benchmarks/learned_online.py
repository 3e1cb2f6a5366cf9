"""Learned and other orders of cells under Poisson arrivals, in the simulator and on the engine.

    python papers/benchmarks/learned_online.py [--model NAME ...] [--no-real] [--json OUT.json] [--png OUT.png]

For each model an order is learnt from closed mini-batches of generated requests. Then other requests arrive one by one.
Loads are shares of what the best order serves per second if all requests are there at once. The simulator's costs are
measured on this machine: the model's cells, and what the engine needs beside them (one thread, one worker). The engine
is then offered the same requests for a few seconds. At last every request gets a deadline, and late ones are counted.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from batchmaker.cli.bench.load import quiet_interpreter
from batchmaker.cli.bench.report import commit, machine
from batchmaker.cli.cell_times import measured_cells
from batchmaker.cli.overhead import measured_overhead
from batchmaker.cli.requests import requests_from
from batchmaker.cli.simulate.study import make_policy
from batchmaker.cost import CostProfile, LatencyTable, ProfileOptions
from batchmaker.cost.profile import Overhead
from batchmaker.engine.engine import Engine
from batchmaker.graph.mini_batch import unrolled
from batchmaker.graph.spec import TypeId
from batchmaker.lab.datasets import poisson_arrivals
from batchmaker.lab.plots.sweeps import Line, Panel, draw_panels
from batchmaker.lab.simulator.costs import step_costs
from batchmaker.lab.simulator.simulate import SimulatedDevice, simulate
from batchmaker.lab.simulator.workload import Offered, Records, SimulatedModel, SimulatedRequest
from batchmaker.lab.zoo.blueprint import Blueprint
from batchmaker.model.model import Model
from batchmaker.policies.base import CellPolicy, ReadyView, in_order
from batchmaker.policies.learned import CellRow, LearnedPolicy, LearntFrom, PolicyFile
from batchmaker.policies.learned import policy as learned
from batchmaker.policies.sufficient import SufficientPolicy
from batchmaker_papers.learners.learning import Samples, learn
from batchmaker_papers.learners.qlearning import Settings
from shared import made_by  # puts benchmarks/ in reach
from simulated_and_real import Seen, live

MODELS = ("treelstm-2type", "latticelstm", "bilstm-tagger")
NO_COHORTS = ", no cohorts"
NOT_FULL_FIRST = ", full ones not first"
POLICIES = (
    "cellular", "cellular:max_steps=1", "agenda", "agenda-remaining", "sufficient", "sufficient" + NOT_FULL_FIRST,
    "sufficient" + NO_COHORTS, "learned", "learned" + NOT_FULL_FIRST, "learned" + NO_COHORTS,
)  # fmt: skip
SIZES = (1, 2, 4, 8, 16, 32, 64)
LOADS = (0.3, 0.5, 0.7, 0.9)
REAL_LOADS = (0.3, 0.6)
FULL_FIRST = learned.full_first
MEASURES = (
    "papers/benchmarks/learned_online.py", "papers/src/batchmaker_papers/learners", "src/batchmaker/engine",
    "src/batchmaker/policies", "src/batchmaker/core", "src/batchmaker/lab/simulator",
)  # fmt: skip
AT_ONCE = 256
"""Requests that are there at once where capacity is measured."""
LEARN_BATCH = 64
"""Requests in the mini-batches that are learnt from: as many as rows of the largest batch."""
DEADLINE = 3.0
"""Deadlines, in multiples of the median latency of `cellular` at the lowest load."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model and all that is needed to simulate it. requests, shapes: those that are offered, and their graphs."""

    name: str
    model: Model
    network: SimulatedModel
    requests: Sequence[Any]
    shapes: Sequence[SimulatedRequest]
    profile: CostProfile
    policy_file: Path
    about: dict[str, Any]

    @property
    def device(self) -> SimulatedDevice:
        costs = step_costs(self.network, self.profile.latency)
        return SimulatedDevice(costs, take_turns=True, overhead=self.profile.overhead or Overhead())

    def policy(self, text: str) -> str:
        name = text.partition(",")[0]
        return f"learned:file={self.policy_file}" if name == "learned" else name


def prepared(name: str, options: argparse.Namespace, folder: Path) -> Prepared:
    """Generate requests, learn from the first half of them, and measure what steps cost."""
    found = requests_from(name, count=2 * options.count, seed=options.seed, hidden=options.hidden, max_batch=SIZES[-1])
    blueprint = Blueprint(name, found.model)
    shapes = [blueprint.request(request) for request in found.requests]
    network = blueprint.model
    requests, offered = found.requests[options.count :], shapes[options.count :]
    samples = [unrolled(shape.graph, len(network.cells)) for shape in shapes[: options.count]]
    settings = Settings(episodes=options.episodes)
    learnt = learn(Samples(samples, LEARN_BATCH, options.seed), settings)
    path = folder / f"{name}.json"
    about = LearntFrom(
        found.source, options.count, LEARN_BATCH, settings.learners, settings.episodes, settings.steps, settings.seed,
        learnt.ratio, learnt.seconds, "papers/benchmarks/learned_online.py",
    )  # fmt: skip
    PolicyFile(name, settings.encoding, tuple(map(CellRow.of, network.cells)), learnt.table, about).write(path)
    profile = measured(name, found.model, requests, options)
    facts = {
        "learnt_s": learnt.seconds, "learnt_ratio": learnt.ratio, "states": len(learnt.table),
        "nodes_per_request": fmean(shape.graph.num_nodes for shape in offered),
        "cells_us": {
            cell.name: {str(size): 1e6 * s for size, s in zip(cell.batch, cell.median_s, strict=True)}
            for cell in profile.latency.cells
        },
        "overhead_us": {key: 1e6 * value for key, value in asdict(profile.overhead or Overhead()).items()},
    }  # fmt: skip
    return Prepared(name, found.model, network, requests, offered, profile, path, facts)


def measured(name: str, model: Model, requests: Sequence[Any], options: argparse.Namespace) -> CostProfile:
    """Measure the cells as an engine runs them, and its overhead."""
    with Engine(model, "cellular:max_steps=1", threads=1) as engine:
        engine.submit(requests[0]).result()
        latency = LatencyTable(tuple(measured_cells(engine.registry, SIZES, options.seconds / 20, 1)))
        with quiet_interpreter():
            served, overhead = measured_overhead(engine, requests, latency, options.seconds / 4)
    about = ProfileOptions("float32", 1, machine()["cpu"], commit())
    return CostProfile(name, about, served, (), overhead)


def drawn(prepared: Prepared, count: int, seed: int) -> list[SimulatedRequest]:
    """Return requests in an order of this seed."""
    order = np.random.default_rng(seed).integers(0, len(prepared.shapes), size=count)
    return [prepared.shapes[i] for i in order.tolist()]


@contextmanager
def altered(policy: str) -> Iterator[None]:
    """If the name says so, let the policies look at neither cohorts nor deadlines, or not whether batches are full."""
    SufficientPolicy.urgent_first = LearnedPolicy.urgent_first = not policy.endswith(NO_COHORTS)
    if policy.endswith(NOT_FULL_FIRST):
        SufficientPolicy.rank = by_share
        learned.full_first, learned.in_order = lambda view, ranked: ranked, by_share
    try:
        yield
    finally:
        SufficientPolicy.urgent_first = LearnedPolicy.urgent_first = True
        SufficientPolicy.rank = CellPolicy.rank
        learned.full_first, learned.in_order = FULL_FIRST, in_order


def by_share(_: object, view: ReadyView) -> list[TypeId]:
    """Return the ready types as `sufficient` ranks them if none fills a batch."""
    independent = view.frontiers.independent
    return sorted(view.ready, key=lambda t: (-view.num_ready(t) / independent(t), -view.num_ready(t), t))


def played(prepared: Prepared, policy: str, offered: Offered, sla_s: float | None = None) -> Records:
    """Simulate one policy."""
    made = make_policy(prepared.policy(policy), prepared.profile)
    with altered(policy):
        return simulate(prepared.network, made, offered, prepared.device, sla_s=sla_s)


def figures(records: Records) -> dict[str, float]:
    """Return what is compared. Throughput is up to the last answer."""
    latency_ms = 1e3 * (records.finished_s - records.arrived_s)
    p50, p90 = np.percentile(latency_ms, (50, 90)).tolist()
    count = len(latency_ms)
    span_s = float(records.finished_s.max() - records.arrived_s[0])
    return {
        "p50_ms": p50, "p90_ms": p90, "served_rps": count / span_s, "batches": records.steps / count,
        "mean_batch": records.rows / records.steps,
    }  # fmt: skip


def at_once(prepared: Prepared, names: Sequence[str], seed: int) -> dict[str, dict[str, float]]:
    """Return what each policy makes of requests that are all there at the beginning."""
    offered = Offered(drawn(prepared, AT_ONCE, seed), np.zeros(AT_ONCE))
    return {name: figures(played(prepared, name, offered)) for name in names}


def simulated(prepared: Prepared, rate: float, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Return, by policy and figure, the numbers of all seeds under Poisson arrivals."""
    results: dict[str, dict[str, list[float]]] = {}
    for seed in range(options.seeds):
        offered = Offered(
            drawn(prepared, options.requests, 1 + seed), poisson_arrivals(rate, seed, count=options.requests)
        )
        for name in options.policies:
            for key, value in figures(played(prepared, name, offered)).items():
                results.setdefault(name, {}).setdefault(key, []).append(value)
    return results


def real(prepared: Prepared, rate: float, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the same figures of an engine with one thread that is offered requests at this rate."""
    results = {}
    for name in options.policies:
        with altered(name), Engine(prepared.model, prepared.policy(name), threads=1) as engine:
            for future in [engine.submit(request) for request in prepared.requests[:16]]:
                future.result()
            count = max(20, int(rate * options.seconds))
            seen: Seen = live(engine, prepared.requests, poisson_arrivals(rate, options.seed, count=count))
        latency_ms = 1e3 * (seen.finished_s - seen.arrived_s)
        p50, p90 = np.percentile(latency_ms, (50, 90)).tolist()
        results[name] = {
            "p50_ms": p50, "p90_ms": p90, "served_rps": count / float(seen.finished_s.max() - seen.arrived_s[0]),
            "batches": seen.steps / count, "mean_batch": seen.rows / seen.steps,
        }  # fmt: skip
    return results


def late(prepared: Prepared, rate: float, sla_s: float, options: argparse.Namespace) -> dict[str, float]:
    """Return the share of requests that are late, where policies see the deadlines and where they do not."""
    count = options.requests
    offered = Offered(drawn(prepared, count, 1), poisson_arrivals(rate, 0, count=count))
    shares = {}
    for name in ("cellular", "lazy:max_in_flight=64", "sufficient", "learned"):
        shares[name] = 1.0 - float(played(prepared, name, offered, sla_s).met(sla_s).mean())
    for name in ("sufficient", "learned"):
        shares[f"{name}, deadlines unseen"] = 1.0 - float(played(prepared, name, offered).met(sla_s).mean())
    return shares


def compared(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return everything about one model."""
    one = prepared(name, options, folder)
    once = at_once(one, options.policies, options.seed)
    capacity_rps = max(found["served_rps"] for found in once.values())
    result: dict[str, Any] = {"model": name, **one.about, "capacity_rps": capacity_rps, "at_once": once}
    print(f"{name}: learnt in {one.about['learnt_s']:.1f} s, {capacity_rps:.0f} requests/s at most", flush=True)
    result["simulated"] = {str(load): simulated(one, load * capacity_rps, options) for load in options.loads}
    if options.real:
        result["real"] = {str(load): real(one, load * capacity_rps, options) for load in REAL_LOADS}
    base = result["simulated"][str(options.loads[0])][options.policies[0]]
    sla_s = DEADLINE * median(base["p50_ms"]) / 1e3
    result["sla_ms"] = 1e3 * sla_s
    result["late"] = {str(load): late(one, load * capacity_rps, sla_s, options) for load in options.loads}
    print(markdown(result), flush=True)
    return result


def markdown(result: dict[str, Any]) -> str:
    """Return the tables of one model: p50 / p90 ms by load, batches per request, and late requests."""
    loads = list(result["simulated"])
    names = list(result["at_once"])

    def row(*cells: str) -> str:
        return f"| {' | '.join(cells)} |"

    heads = [f"load {load}" for load in loads]
    lines = [row(result["model"], "at once: requests/s, batches", *heads), "|---" * (2 + len(loads)) + "|"]
    for name in names:
        once, cells = result["at_once"][name], []
        for load in loads:
            found = {key: median(values) for key, values in result["simulated"][load][name].items()}
            cells.append(f"{found['p50_ms']:.3g} / {found['p90_ms']:.3g}, {found['batches']:.1f}")
        whole = once["batches"] * AT_ONCE
        lines.append(row(f"`{name}`", f"{once['served_rps']:.0f}, {whole:.0f}", *cells))
    if "real" in result:
        lines += ["", row("on the engine", *(f"load {load}" for load in result["real"]))]
        lines.append("|---" * (1 + len(result["real"])) + "|")
        for name in names:
            seen = [by_policy[name] for by_policy in result["real"].values()]
            lines.append(
                row(f"`{name}`", *(f"{s['p50_ms']:.3g} / {s['p90_ms']:.3g}, {s['batches']:.1f}" for s in seen))
            )
    lines += ["", row(f"late after {result['sla_ms']:.1f} ms", *heads), "|---" * (1 + len(loads)) + "|"]
    for name in result["late"][loads[0]]:
        lines.append(row(name, *(f"{result['late'][load][name]:.1%}" for load in loads)))
    return "\n".join(lines) + "\n"


def draw(path: Path, results: Sequence[dict[str, Any]], about: str) -> None:
    """Draw p90 latency and batches per request against load."""
    panels = []
    for result in results:
        for key, title, log in (("p90_ms", "p90 latency, ms", True), ("batches", "batches per request", False)):
            lines = []
            for name in result["at_once"]:
                values = [by_policy[name][key] for by_policy in result["simulated"].values()]
                low, middle, high = np.percentile(values, (25, 50, 75), axis=1).tolist()
                lines.append(Line(name, list(map(float, result["simulated"])), middle, low, high))
            panels.append(Panel(f"{result['model']}: {title}", "share of the capacity offered", title, lines, log=log))
    draw_panels(path, panels, "Orders of cells under Poisson arrivals", about)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", dest="models", action="append")
    parser.add_argument("--policy", dest="policies", action="append", choices=POLICIES)
    parser.add_argument("--load", dest="loads", action="append", type=float)
    parser.add_argument("--count", type=int, default=256, help="requests to learn from, and as many others to offer")
    parser.add_argument("--requests", type=int, default=800, help="of one simulation")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of requests and of learning")
    parser.add_argument("--episodes", type=int, default=300)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one run on the engine")
    parser.add_argument("--quick", action="store_true", help="one seed, short runs, little to learn from")
    parser.add_argument("--no-real", dest="real", action="store_false", help="leave the engine out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.count, options.requests, options.seeds, options.episodes, options.seconds = 64, 100, 1, 30, 0.2
    options.policies = options.policies or POLICIES
    options.loads = sorted(options.loads or LOADS)
    with tempfile.TemporaryDirectory() as folder:
        results = [compared(name, options, Path(folder)) for name in options.models or MODELS]
    if options.json:
        about = {**made_by(MEASURES), "quick": options.quick}
        options.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")
    if options.png:
        draw(options.png, results, f"simulated with costs measured on {machine()['cpu']}, one thread; hidden size "
             f"{options.hidden}; median and quartiles of {options.seeds} seeds")  # fmt: skip


if __name__ == "__main__":
    main()
