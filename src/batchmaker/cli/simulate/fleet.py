"""`batchmaker simulate --replicas`: fleets of engines behind routers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast, final

import numpy as np
from numpy.typing import NDArray
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from batchmaker import policies
from batchmaker.cli import options
from batchmaker.cli.simulate import fleet_tables
from batchmaker.cli.simulate.fleet_options import MOST_EXACT_REPLICAS, MOST_EXACT_REQUESTS, FleetAsk
from batchmaker.cli.simulate.plan import Ask
from batchmaker.cli.simulate.study import Result, make_policy
from batchmaker.cli.simulate.workload import SimulatedArrivals, SimulatedWorkload
from batchmaker.cost.profile import CostProfile
from batchmaker.errors import OptionError
from batchmaker.fleet.routing import Router
from batchmaker.lab.simulator.fleet.exact import ExactReplicas
from batchmaker.lab.simulator.fleet.fast import FastReplicas, why_not_fast
from batchmaker.lab.simulator.fleet.records import FleetRecords, FleetWork
from batchmaker.lab.simulator.fleet.replicas import Replicas
from batchmaker.lab.simulator.fleet.report import summarise_fleet
from batchmaker.lab.simulator.fleet.run import FleetPlan, simulate_fleet
from batchmaker.lab.simulator.simulate import SimulatedDevice
from batchmaker.lab.simulator.workload import SimulatedModel, SimulatedRequest
from batchmaker.policies.base import CellPolicy

GUESS_STREAM: Final = 3
"""Number of the random stream of a router's guesses, beside others of the same seed."""
CHUNKS_STREAM: Final = 4
"""Of how many chunks sequences have."""


@final
@dataclass(frozen=True, slots=True)
class FleetStudy:
    """What all simulations have in common. about: fields of every result."""

    model: SimulatedModel
    policy: str
    device: SimulatedDevice
    profile: CostProfile
    workload: SimulatedWorkload
    arrivals: SimulatedArrivals
    about: Mapping[str, Any]


def simulate_fleets(study: FleetStudy, ask: Ask, fleet: FleetAsk, json: Path | None, png: Path | None) -> None:
    """Play everything that is asked for, show it and write it."""
    results, fleets = run_fleets(study, ask, fleet)
    fleet_tables.show(options.out(), results)
    if json is not None:
        options.write_json(json, results)
    if png is not None:
        under = (
            f"{study.about['workload']}; {study.arrivals} arrivals; costs: {study.about['costs']}; {ask.requests} "
            f"requests; {results[0]['fidelity']}"
        )
        fleet_tables.draw(png, fleets, f"A fleet of {study.model.name}, simulated", under)


def run_fleets(study: FleetStudy, ask: Ask, fleet: FleetAsk) -> tuple[list[Result], list[tuple[str, FleetRecords]]]:
    """Return the results in the order in which things are given, and the records of the first seed and rate by name."""
    results: list[Result] = []
    fleets: list[tuple[str, FleetRecords]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    console = options.err()
    jobs = len(ask.rates) * len(ask.seeds) * len(fleet.sizes) * len(fleet.all_routers)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task, done = bar.add_task("simulations", total=float(jobs)), 0
        for rate in ask.rates:
            for seed in ask.seeds:
                work = make_work(study, fleet, rate, seed, ask.requests)
                for replicas in fleet.sizes:
                    for router in fleet.all_routers:
                        bar.update(task, description=f"{replicas} replicas, {router}")
                        progress = partial(_advance, bar, task, done)
                        records, fidelity = play(study, fleet, work, router, replicas, seed, progress)
                        done += 1
                        facts = {"router": router, "replicas": replicas, "rate": rate, "seed": seed}
                        results += _results(study, fleet, records, facts, ask.slas_ms, fidelity)
                        if (rate, seed) == (ask.rates[0], ask.seeds[0]):
                            fleets.append((f"{router}, {replicas}" if len(fleet.sizes) > 1 else router, records))
    return results, fleets


def _advance(bar: Progress, task: TaskID, done: int, share: float) -> None:
    bar.update(task, completed=done + share)


def _results(
    study: FleetStudy,
    fleet: FleetAsk,
    records: FleetRecords,
    facts: Mapping[str, Any],
    slas_ms: Sequence[float],
    fidelity: str,
) -> list[Result]:
    """Return one result for each SLA."""
    about = {
        **study.about,
        "fidelity": fidelity,
        "autoscale": fleet.autoscale,
        "start_s": fleet.start_s,
        "mean_life_s": fleet.mean_life_s,
        "chunks": fleet.chunks,
        "length_error": fleet.length_error,
    }
    return [
        {"model": study.model.name, "policy": study.policy, **facts, "sla_ms": sla_ms}
        | asdict(summarise_fleet(records, sla_ms / 1e3))
        | about
        for sla_ms in slas_ms
    ]


def play(
    study: FleetStudy,
    fleet: FleetAsk,
    work: FleetWork,
    router: str,
    replicas: int,
    seed: int,
    progress: Callable[[float], None] | None = None,
) -> tuple[FleetRecords, str]:
    """Return what becomes of one fleet, and how it was simulated: exact or fast."""
    fidelity = fidelity_of(study, fleet, work, replicas)
    made, way = make_policy(study.policy, study.profile), Router(router, seed)
    assert isinstance(made, CellPolicy)
    fleet_of: Replicas
    if fidelity == "fast":
        fleet_of = FastReplicas(study.model, made, work, way, study.device)
    else:
        again = lambda: cast(CellPolicy, make_policy(study.policy, study.profile))  # noqa: E731
        fleet_of = ExactReplicas(study.model, again, work, way, study.device)
    plan = FleetPlan(replicas, fleet.start_s, fleet.mean_life_s or math.inf, fleet.rule, seed)
    return simulate_fleet(fleet_of, plan, progress=progress), fidelity


def fidelity_of(study: FleetStudy, fleet: FleetAsk, work: FleetWork, replicas: int) -> str:
    """Return how a fleet is simulated: as asked for, or exactly if it is small or cannot be simulated fast."""
    if fleet.fidelity is not None:
        return fleet.fidelity
    if replicas <= MOST_EXACT_REPLICAS and len(work.requests) <= MOST_EXACT_REQUESTS and fleet.rule is None:
        return "exact"
    policy = make_policy(study.policy, study.profile)
    assert isinstance(policy, CellPolicy)
    reason = why_not_fast(study.model, list(work.requests.shapes), policy, study.device)
    if reason is None:
        return "fast"
    if len(work.requests) > MOST_EXACT_REQUESTS:
        options.err().print(f"exact, which takes long: {reason}", style="yellow")
    return "exact"


def make_work(study: FleetStudy, fleet: FleetAsk, rate: float, seed: int, count: int) -> FleetWork:
    """Draw the requests, when they come, and what a router knows of them."""
    requests = study.workload.draw(seed, count)
    true, forecast = unit_work_ns(study.model, study.profile, study.device, requests.shapes)
    known_ns = forecast[requests.kinds]
    if fleet.length_error:
        guess = np.random.default_rng((seed, GUESS_STREAM)).standard_normal(count)
        known_ns = np.maximum(known_ns * np.exp(fleet.length_error * guess), 1).astype(np.int64)
    if fleet.chunks is None:
        return FleetWork(requests, study.arrivals.times_s(rate, seed, count), known_ns, true[requests.kinds])
    generator = np.random.default_rng((seed, CHUNKS_STREAM))
    chunks = generator.geometric(1 / fleet.chunks, count)
    sequence = np.repeat(np.arange(count), chunks)[:count]
    begins_s = study.arrivals.times_s(rate / fleet.chunks, seed, int(sequence[-1]) + 1)
    first = np.searchsorted(sequence, sequence)  # the first chunk of each chunk's sequence
    times_s = begins_s[sequence] + (np.arange(count) - first) * fleet.chunk_gap_ms / 1e3
    order = np.argsort(times_s, kind="stable")
    return FleetWork(requests, times_s[order], known_ns, true[requests.kinds], sequence[order].astype(np.int32))


def unit_work_ns(
    model: SimulatedModel, profile: CostProfile, device: SimulatedDevice, shapes: Sequence[SimulatedRequest]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return nanoseconds of work of each shape at full batches, true and as known when it comes: [shapes] int64 each.

    A run that a value ends is known to take as many steps as the median of those in the profile. A request in which
    values decide is known to take what all such requests take on average.
    """
    overhead = device.overhead
    row_s = [
        (device.costs.seconds[cell.type_id, cell.max_batch] + overhead.step_s + overhead.turn_s) / cell.max_batch
        + overhead.row_s
        for cell in model.cells
    ]
    true, forecast = np.empty(len(shapes), np.int64), np.empty(len(shapes), np.int64)
    for number, shape in enumerate(shapes):
        work = shape.work
        nodes = dict(zip(work.types.tolist(), work.nodes.tolist(), strict=True))
        true[number] = _ns(nodes, row_s, overhead.request_s)
        for type_id in {int(run.type_id) for run in shape.graph.runs if run.open_ended}:
            length = profile.length_of(model.cells[type_id].name)
            if length is None:
                raise OptionError(
                    f"nothing is known of how many steps cell {model.cells[type_id].name!r} takes, so a router cannot "
                    "guess the work of a request. Measure lengths too: `batchmaker profile MODEL --data FILE`"
                )
            source_steps = [nodes.get(cell.type_id, 0) for cell in model.cells if cell.name == length.given] or [0]
            nodes[type_id] = int(length.profile.remaining(np.array(source_steps), np.zeros(1, np.int64), 0.5)[0])
        forecast[number] = _ns(nodes, row_s, overhead.request_s)
    decided = np.array([shape.decided is not None for shape in shapes])
    if decided.any():
        forecast[decided] = round(float(true[decided].mean()))
    return true, forecast


def _ns(nodes: Mapping[int, int], row_s: Sequence[float], request_s: float) -> int:
    return max(1, round(1e9 * (sum(count * row_s[type_id] for type_id, count in nodes.items()) + request_s)))


def check_fleet(fleet: FleetAsk, ask: Ask, workers: int, jobs: int) -> None:
    """Raise OptionError for what fleets do not do."""
    fleet.check()
    if ask.give_up:
        raise OptionError("--give-up is for one engine; a fleet finishes late requests and counts them as violations")
    if len(ask.policies) > 1:
        raise OptionError(f"a fleet has one policy; got --policy {' and --policy '.join(ask.policies)}")
    if not issubclass(policies.find(ask.policies[0].partition(":")[0]), CellPolicy):
        raise OptionError(
            f"replicas run a policy of cells, such as cellular; {ask.policies[0]!r} batches whole requests"
        )
    if jobs > 1:
        raise OptionError("--jobs is for one engine; fleets are simulated one after the other, in one process")
    if workers > 1 and fleet.fidelity == "fast":
        raise OptionError("--fidelity fast knows replicas with one worker; leave --workers out, or use exact")
