"""All simulations of one call: every policy at every rate, SLA and seed, on a number of processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any, Final, final

from batchmaker import policies
from batchmaker.arrays import Floats
from batchmaker.cost.profile import CostProfile
from batchmaker.engine.setup import wants_costs
from batchmaker.lab.simulator.report import summarise
from batchmaker.lab.simulator.simulate import SimulatedDevice, simulate
from batchmaker.lab.simulator.workload import Offered, SimulatedModel, SimulatedRequest
from batchmaker.policies.base import CellPolicy, GraphPolicy

Result = dict[str, Any]
"""One simulation under one SLA, as it is written to JSON."""

BLIND: Final = ("serial", "padded", "graph")
"""Graph policies that do not look at deadlines."""


@final
@dataclass(frozen=True, slots=True)
class Study:
    """The common part of all simulations.

    profile: costs and lengths for policies. requests: by seed, the same for all policies and rates. arrivals: by rate
    and seed, the same for all policies. about: fields of every result.
    """

    model: SimulatedModel
    device: SimulatedDevice
    profile: CostProfile
    slas_s: tuple[float, ...]
    requests: Mapping[int, Sequence[SimulatedRequest]]
    arrivals: dict[tuple[float, int], Floats]
    give_up_late: bool
    about: dict[str, Any]


@final
@dataclass(frozen=True, slots=True)
class Job:
    """One simulation. sla_s: the deadlines in the policy's view; None if it ignores them."""

    policy: str
    rate_rps: float
    seed: int
    sla_s: float | None


def make_policy(text: str, profile: CostProfile) -> CellPolicy | GraphPolicy:
    """Return a new policy, with the profile if it takes one. OptionError for unknown names and options."""
    policy = policies.make(text)
    if wants_costs(policy):
        policy.use_profile(profile)
    return policy


def looks_at_deadlines(policy: CellPolicy | GraphPolicy) -> bool:
    """Whether another SLA could change the policy's decisions. Unknown policies count as looking at deadlines."""
    if isinstance(policy, CellPolicy):
        return policy.watches_requests or policy.urgent_first
    return policy.name not in BLIND


def jobs_of(study: Study, names: Sequence[str], rates: Sequence[float], seeds: Sequence[int]) -> list[Job]:
    """Return all necessary simulations: one for all SLAs if the policy ignores the SLA."""
    jobs = []
    for name in names:
        blind = not study.give_up_late and not looks_at_deadlines(make_policy(name, study.profile))
        slas: Sequence[float | None] = (None,) if blind else study.slas_s
        jobs += [Job(name, rate, seed, sla) for rate in rates for seed in seeds for sla in slas]
    return jobs


def play(study: Study, job: Job) -> list[Result]:
    """Return the results of one simulation: one for each SLA that it covers."""
    offered = Offered(study.requests[job.seed], study.arrivals[job.rate_rps, job.seed])
    records = simulate(
        study.model,
        make_policy(job.policy, study.profile),
        offered,
        study.device,
        sla_s=job.sla_s,
        give_up_late=study.give_up_late,
    )
    results = []
    for sla_s in study.slas_s if job.sla_s is None else (job.sla_s,):
        numbers = asdict(summarise(records, sla_s, study.device.workers))
        facts = {"policy": job.policy, "rate": job.rate_rps, "sla_ms": 1e3 * sla_s, "seed": job.seed}
        results.append({"model": study.model.name, **facts, **numbers, **study.about})
    return results


def play_all(study: Study, jobs: Sequence[Job], num_processes: int, finished: Callable[[], None]) -> list[Result]:
    """Return the results of all jobs, in order of the jobs, for any number of processes.

    finished: called after each job.
    """
    by_job: list[list[Result]] = [[] for _ in jobs]
    for number, results in _played(study, jobs, num_processes):
        by_job[number] = results
        finished()
    return [result for results in by_job for result in results]


def _played(study: Study, jobs: Sequence[Job], num_processes: int) -> Iterator[tuple[int, list[Result]]]:
    if num_processes == 1 or len(jobs) == 1:
        for number, job in enumerate(jobs):
            yield number, play(study, job)
        return
    context = multiprocessing.get_context("spawn")  # the parent has torch's threads, which do not survive a fork
    with ProcessPoolExecutor(min(num_processes, len(jobs)), context, _receive, (study,)) as pool:
        numbers = {pool.submit(_play_here, job): number for number, job in enumerate(jobs)}
        for future in as_completed(numbers):
            yield numbers[future], future.result()


_study: Study | None = None
"""The study of this process, if it is a worker of `play_all`."""


def _receive(study: Study) -> None:
    global _study
    _study = study


def _play_here(job: Job) -> list[Result]:
    assert _study is not None
    return play(_study, job)
