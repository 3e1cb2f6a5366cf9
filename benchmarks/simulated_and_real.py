"""The same workload on the engine and in the simulator, and what a policy's decisions cost.

    python benchmarks/simulated_and_real.py [--data EUROPARL.en] [--json OUT.json] [--png OUT.png]

For each model and policy an engine with one worker and one compute thread is started; its cells and its overhead are
measured as `batchmaker profile --out` does; then Poisson arrivals are offered at shares of its capacity, several times,
with other arrivals each time. What came is simulated: the same cell graphs at the times at which the engine got them.
Nothing of the simulation is taken from the runs that it is compared with. Needs an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchmaker import models, policies
from batchmaker.cells.model import Model
from batchmaker.cells.registry import CellRegistry
from batchmaker.cells.unfolding import Unfolding
from batchmaker.cli.bench.load import quiet_interpreter
from batchmaker.cli.bench.report import commit, machine
from batchmaker.cli.measuring import measured_cells
from batchmaker.cli.overhead import measured_overhead
from batchmaker.cli.simulate.study import make_policy
from batchmaker.cli.workload import Workload, make_workload
from batchmaker.cost import CostProfile, LatencyTable, LengthProfile, Overhead, PredictedLength, ProfileOptions
from batchmaker.datasets import poisson_arrivals
from batchmaker.engine.costs import wants_costs
from batchmaker.engine.engine import Engine
from batchmaker.engine.ticket import Ticket
from batchmaker.policies.base import CellPolicy
from batchmaker.scheduler.commands import Command
from batchmaker.scheduler.events import Event, StepFinished
from batchmaker.simulator.costs import step_costs
from batchmaker.simulator.run import Device, simulate
from batchmaker.simulator.workload import Offered, SimulatedModel, SimulatedRequest

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LOADS = (0.3, 0.5, 0.7)
POLICIES = ("cellular", "lazy")
WATCHED_LOAD = 0.5
"""Where the cost of decisions is measured."""
WARM = 0.2
"""Share of the requests, from the first, that are offered and not counted."""
FIGURES = ("p50_ms", "p90_ms", "p99_ms", "mean_batch")


@dataclass
class Decisions:
    """How long a policy's decisions took, and the tasks that came of them, in seconds."""

    seconds: list[float] = field(default_factory=list)
    tasks: dict[int, float] = field(default_factory=dict)

    def watch(self, engine: Engine) -> None:
        """Time `admit` and `rank` of the engine's policy: a decision is one rank, and the admit before it if any."""
        policy, pending = engine.policy, [0.0]
        assert isinstance(policy, CellPolicy)
        admit, rank = type(policy).admit, type(policy).rank

        def timed_admit(view: Any) -> Any:
            begin_s = time.perf_counter()
            admission = admit(policy, view)
            pending[0] += time.perf_counter() - begin_s
            return admission

        def timed_rank(view: Any) -> Any:
            begin_s = time.perf_counter()
            ranked = rank(policy, view)
            if ranked:
                self.seconds.append(pending[0] + time.perf_counter() - begin_s)
                pending[0] = 0.0
            return ranked

        def record(events: Sequence[Event], commands: Sequence[Command]) -> None:
            for event in events:
                if isinstance(event, StepFinished):
                    self.tasks[event.task] = self.tasks.get(event.task, 0.0) + event.busy_s

        policy.admit, policy.rank = timed_admit, timed_rank  # type: ignore[method-assign]
        engine.driver.record = record  # type: ignore[attr-defined]

    @staticmethod
    def leave(engine: Engine) -> None:
        """Undo `watch`."""
        del engine.policy.admit, engine.policy.rank  # type: ignore[union-attr]
        engine.driver.record = None  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Seen:
    """Requests in order of arrival, live or simulated, and the steps that they took."""

    arrived_s: NDArray[np.float64]
    finished_s: NDArray[np.float64]
    steps: int
    rows: int

    def figures(self) -> dict[str, float]:
        """Return percentiles of the latency, and rows per step."""
        latency_ms = 1e3 * (self.finished_s - self.arrived_s)[int(WARM * len(self.arrived_s)) :]
        p50, p90, p99 = np.percentile(latency_ms, (50, 90, 99)).tolist()
        return dict(zip(FIGURES, (p50, p90, p99, self.rows / self.steps), strict=True))


def live(engine: Engine, requests: Sequence[Any], arrivals_s: NDArray[np.float64]) -> Seen:
    """Offer the requests from a thread of their own, at these seconds from now, and wait for all answers."""
    tickets: list[Ticket] = []
    done = threading.Event()

    def settled(ticket: Ticket, error: BaseException | None) -> None:
        if error is not None:
            raise error
        tickets.append(ticket)
        if len(tickets) == len(arrivals_s):
            done.set()

    def offer() -> None:
        for due_s, request in zip((arrivals_s + begin_s).tolist(), itertools.cycle(requests), strict=False):
            wait_s = due_s - engine.clock.now_s()
            if wait_s > 0:
                time.sleep(wait_s)
            engine.submit_future(request)

    steps, rows = engine.stats.steps, engine.stats.cells
    engine.on_settled = settled
    with quiet_interpreter():
        begin_s = engine.clock.now_s() + 0.01
        thread = threading.Thread(target=offer, daemon=True)
        thread.start()
        done.wait()
        thread.join()
    engine.on_settled = None
    tickets.sort(key=lambda ticket: ticket.request_id)
    arrived_s = np.array([ticket.arrived_s for ticket in tickets]) - begin_s
    finished_s = np.array([ticket.finished_s for ticket in tickets]) - begin_s
    return Seen(arrived_s, finished_s, engine.stats.steps - steps, engine.stats.cells - rows)


def simulated(
    network: SimulatedModel,
    requests: Sequence[SimulatedRequest],
    seen: Seen,
    policy: str,
    profile: CostProfile,
    overhead: Overhead,
    sla_s: float,
) -> Seen:
    """Play what was offered again, under a virtual clock."""
    device = Device(step_costs(network, profile.latency), take_turns=True, overhead=overhead)
    play = list(itertools.islice(itertools.cycle(requests), len(seen.arrived_s)))
    records = simulate(
        network, make_policy(policy, profile), Offered(play, seen.arrived_s), device,
        sla_s=sla_s if policy == "lazy" else None,
    )  # fmt: skip
    return Seen(records.arrived_s, records.finished_s, records.steps, records.rows)


def without_values(model: Model, registry: CellRegistry, workload: Workload) -> list[SimulatedRequest]:
    """Return the cell graphs that the engine unfolds; requests of the same lengths are one object."""
    known: dict[tuple[int, ...], SimulatedRequest] = {}
    found = []
    for request, chains in zip(workload.requests, workload.chains.tolist(), strict=True):
        if tuple(chains) not in known:
            unfolding = Unfolding(model, registry, request)
            unfolding.start()
            unfolding.graph.host_inputs = []
            known[tuple(chains)] = SimulatedRequest(unfolding.graph, chains[0])
        found.append(known[tuple(chains)])
    return found


def profiled(name: str, model: Model, engine: Engine, workload: Workload, seconds: float) -> tuple[CostProfile, Any]:
    """Measure an engine's cells and its overhead, and give its policy the times; return the levels measured, too."""
    cells = measured_cells(engine.registry, SIZES, seconds / 20, 1)
    lengths: tuple[PredictedLength, ...] = ()
    if name == "seq2seq":
        lengths = (PredictedLength("decoder", "encoder", LengthProfile.from_pairs(*workload.chains.T.tolist())),)
    about = ProfileOptions("float32", 1, machine()["cpu"], commit())
    profile = CostProfile(name, about, LatencyTable(tuple(cells)), lengths)
    if wants_costs(engine.policy):
        engine.policy.use_profile(profile)  # nothing is in flight
    with quiet_interpreter():
        overhead, levels = measured_overhead(engine, workload.requests, profile.latency, seconds)
    return CostProfile(name, about, profile.latency, lengths, overhead), levels


def capacity_rps(profile: CostProfile, workload: Workload) -> float:
    """Return requests per second if every step has the largest batch."""
    per_row_s = [cell.median_s[-1] / cell.batch[-1] for cell in profile.latency.cells]
    return 1.0 / float(workload.chains.mean(axis=0) @ per_row_s)


def compare(name: str, policy: str, options: argparse.Namespace, rates: dict[float, float]) -> dict[str, Any]:
    """Return all repetitions of one model under one policy. rates: by load, filled in by the first policy."""
    workload = make_workload(name, data=options.data if name == "lstm" else (), count=options.count, seed=0)
    model = models.make(name, hidden=options.hidden, vocabulary_size=workload.vocabulary_size)
    seconds, sla_s = options.seconds[name], options.sla_ms[name] / 1e3
    runs: list[dict[str, Any]] = []
    decisions = Decisions()
    with Engine(model, policies.make(policy), threads=1, deadline_ms=1e3 * sla_s, late="finish") as engine:
        profile, levels = profiled(name, model, engine, workload, options.profile_seconds[name])
        assert profile.overhead is not None
        requests = without_values(model, engine.registry, workload)
        network = SimulatedModel(name, tuple(engine.registry.types))
        if not rates:
            rates |= {load: load * capacity_rps(profile, workload) for load in options.loads}
        for seed, (load, rate) in itertools.product(range(options.repeat), rates.items()):
            watched = load == WATCHED_LOAD
            if watched:
                decisions.watch(engine)
            seen = live(engine, workload.requests, poisson_arrivals(rate, seed, seconds=seconds))
            if watched:
                decisions.leave(engine)
            runs.append({"load": load, "rate": rate, "seed": seed, "requests": len(seen.arrived_s), "seen": seen})
    for run in runs:
        seen = run.pop("seen")
        run["real"] = seen.figures()
        for key, overhead in (("simulated", profile.overhead), ("cells_alone", Overhead())):
            run[key] = simulated(network, requests, seen, policy, profile, overhead, sla_s).figures()
        print(name, policy, {k: v for k, v in run.items() if not isinstance(v, dict)})
        for key in ("real", "simulated", "cells_alone"):
            print(f"  {key:12}", "  ".join(f"{figure} {value:.2f}" for figure, value in run[key].items()), flush=True)
    return {
        "model": name, "policy": policy, "hidden": model.hidden, "workload": workload.source, "sla_ms": 1e3 * sla_s,
        "seconds": seconds, "overhead_us": {k: 1e6 * v for k, v in asdict(profile.overhead).items()},
        "cells_ms": {c.name: dict(zip(c.batch, (1e3 * s for s in c.median_s), strict=True))
                     for c in profile.latency.cells},
        "levels": [asdict(level) for level in levels], "runs": runs, "decisions": costs_of(decisions),
    }  # fmt: skip


def costs_of(decisions: Decisions) -> dict[str, float]:
    """Return what decisions cost, in microseconds and as a share of the median task."""
    if not decisions.seconds:
        return {}
    task_s = statistics.median(decisions.tasks.values())
    middle, p90 = np.percentile(decisions.seconds, (50, 90)).tolist()
    mean = statistics.fmean(decisions.seconds)
    return {
        "decisions": len(decisions.seconds), "median_us": 1e6 * middle, "mean_us": 1e6 * mean, "p90_us": 1e6 * p90,
        "median_task_us": 1e6 * task_s, "median_share": middle / task_s, "mean_share": mean / task_s,
    }  # fmt: skip
