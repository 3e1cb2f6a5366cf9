"""The requested simulations, and running them with a progress bar."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from batchmaker.cli import options
from batchmaker.cli.simulate.study import Result, Study, jobs_of, play_all
from batchmaker.cli.simulate.workload import SimulatedArrivals, SimulatedWorkload
from batchmaker.cost.profile import CostProfile
from batchmaker.errors import OptionError
from batchmaker.lab.simulator.graph_simulation import PaddedCost
from batchmaker.lab.simulator.simulate import SimulatedDevice
from batchmaker.lab.zoo.blueprint import Blueprint


@final
@dataclass(frozen=True, slots=True)
class Ask:
    """All simulations of a call: every policy at every rate, SLA and seed. requests: of each simulation."""

    policies: tuple[str, ...]
    rates: tuple[float, ...]
    slas_ms: tuple[float, ...]
    seeds: tuple[int, ...]
    requests: int
    give_up: bool

    def check(self) -> None:
        """Raise OptionError unless everything is in range and without duplicates."""
        if not self.rates:
            raise OptionError("how often do requests come? Give --rate, for example --rate 500; once or several times")
        for flag, values in (("--rate", self.rates), ("--sla-ms", self.slas_ms)):
            wrong = next((value for value in values if not (math.isfinite(value) and value > 0)), None)
            if wrong is not None:
                raise OptionError(f"{flag} must be a finite number above 0, got {wrong:g}")
        lists: tuple[tuple[str, tuple[Any, ...]], ...] = (
            ("--policy", self.policies),
            ("--rate", self.rates),
            ("--sla-ms", self.slas_ms),
            ("--seed", self.seeds),
        )
        for flag, many in lists:
            if len(set(many)) < len(many):
                raise OptionError(f"{flag}: the same value is given twice among {', '.join(map(str, many))}")


def make_study(
    ask: Ask,
    plan: Blueprint,
    work: SimulatedWorkload,
    coming: SimulatedArrivals,
    profile: CostProfile,
    device: SimulatedDevice,
    about: Mapping[str, Any],
) -> Study:
    """Draw all requests and arrivals; warn if an SLA is shorter than any request alone."""
    requests = {seed: work.draw(seed, ask.requests) for seed in ask.seeds}
    arrivals = {(rate, seed): coming.times_s(rate, seed, ask.requests) for rate in ask.rates for seed in ask.seeds}
    first = requests[ask.seeds[0]]
    alone = PaddedCost(plan.model, first, device.costs)
    shapes = {id(request): i for i, request in enumerate(first)}
    fastest_ms = 1e3 * min(alone.seconds(np.array([i])) for i in shapes.values())
    for sla_ms in ask.slas_ms:
        if sla_ms < fastest_ms:
            options.err().print(
                f"no request can be answered within {sla_ms:g} ms: the shortest alone takes {fastest_ms:.3f} ms",
                style="yellow",
            )
    slas_s = tuple(sla_ms / 1e3 for sla_ms in ask.slas_ms)
    return Study(plan.model, device, profile, slas_s, requests, arrivals, ask.give_up, dict(about))


def run_study(study: Study, ask: Ask, num_processes: int) -> list[Result]:
    """Return all results by policy, rate, SLA and seed, in the given order."""
    jobs = jobs_of(study, ask.policies, ask.rates, ask.seeds)
    console = options.err()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("simulations", total=len(jobs))
        results = play_all(study, jobs, num_processes, lambda: bar.advance(task))
    order = {
        (p, r, 1e3 * s, k): i
        for i, (p, r, s, k) in enumerate(
            (p, r, s, k) for p in ask.policies for r in ask.rates for s in study.slas_s for k in ask.seeds
        )
    }
    return sorted(results, key=lambda row: order[row["policy"], row["rate"], row["sla_ms"], row["seed"]])
