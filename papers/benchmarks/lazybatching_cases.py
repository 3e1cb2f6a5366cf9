"""What papers/benchmarks/lazybatching.py simulates: parts of the evaluation, and the networks in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from batchmaker.cli import options
from batchmaker.cli.simulate import device, workload
from batchmaker.cli.simulate.study import make_policy
from batchmaker.cost.profile import CostProfile
from batchmaker.graph.work import work_of
from batchmaker.lab.datasets import lazybatching_lengths, read_aligned
from batchmaker.lab.simulator.costs import step_costs
from batchmaker.lab.simulator.simulate import SimulatedDevice, simulate
from batchmaker.lab.simulator.together import Together
from batchmaker.lab.simulator.workload import Offered, ShapedRequests, SimulatedModel, SimulatedRequest
from batchmaker.lab.zoo.blueprint import blueprint

SINGLE_MS = {"resnet50": 1.1, "gnmt": 7.2, "transformer": 2.4}
"""Table II: latency of one request alone."""
OPTIONS: dict[str, dict[str, str]] = {"resnet50": {"cut": "blocks"}, "mobilenet": {"cut": "blocks"}}
"""Blocks of a few layers as nodes, as deep as the paper's figures show them."""

SERIAL, WINDOWS = "serial", tuple(f"graph:window_ms={n}" for n in (5, 25, 45, 95))
OLDEST = "lazy:slack=oldest,benefit=no,lengths=fixed"
ALL = "lazy:slack=literal,benefit=no,lengths=fixed"
READINGS = (OLDEST, f"{OLDEST},hopeless=veto", ALL, f"{ALL},hopeless=veto")
"""Equation 2 asked of the oldest request or of all, where a request that is late anyway is ignored or vetoes."""
ORACLE = "lazy:benefit=no,lengths=true"
ORACLE_BENEFIT, IMPROVED, RECENT, CELLULAR = "lazy:lengths=true", "lazy", "lazy:stack=recent", "cellular"
GREEDY = "lazy:slack=none,benefit=no"
BLIND = (SERIAL, CELLULAR, GREEDY)
"""Policies that do not look at deadlines, beside those of windows: simulated once for all SLAs."""
PAPER = (SERIAL, *WINDOWS, *READINGS, ORACLE, CELLULAR, IMPROVED)
STRESS = (*READINGS, ORACLE, IMPROVED, ORACLE_BENEFIT)
CROWD = (*WINDOWS, CELLULAR, *READINGS, ORACLE, IMPROVED)
PERCENTS = (16, 50, 90, 99)
"""Shares of outputs that dec_timesteps covers; the paper's 10 steps are 16 %, and its 32 are 90 %."""
ABLATION = (
    *READINGS, f"{OLDEST},estimate=table", f"{ALL},estimate=table", "lazy:slack=oldest", "lazy:slack=literal", GREEDY,
    "lazy:slack=none", "lazy:benefit=no", "lazy:lengths=fixed", IMPROVED, ORACLE, ORACLE_BENEFIT,
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Some of the simulations.

    rates: per second, or shares of the capacity where below 4. known_factor: by how much the policies' latency table is
    off. shift: what the policies take for the true lengths, as a factor. pair: of languages, for lengths of requests.
    share: of the requests; only the first part has all, since all of them in each part would take hours.
    """

    name: str
    models: tuple[str, ...]
    policies: tuple[str, ...]
    rates: tuple[float, ...]
    slas_ms: tuple[float, ...]
    calibrated: bool = True
    arrivals: str = "poisson"
    dataflow: str = device.DATAFLOW
    max_batch: int = 64
    pair: str = ""
    known_factor: float = 1.0
    shift: float = 1.0
    share: float = 0.1

    @property
    def needs_data(self) -> bool:
        return bool(self.pair) or self.arrivals == "trace"


MAIN = ("resnet50", "gnmt", "transformer")
TRANSLATION = MAIN[1:]
OTHERS = ("vgg16", "mobilenet", "bert")
RATES = (16, 64, 250, 500, 1000, 1500, 2000)
SLAS = (20, 40, 60, 80, 100, 150, 200)
BY_PERCENT = tuple(f"{reading},percent={n}" for reading in READINGS for n in PERCENTS)
PARTS = (
    Part("rates", MAIN, PAPER, RATES, (100,), share=1.0),
    Part("rates", ("resnet50",), PAPER, RATES, (100,), dataflow="ws", share=1.0),
    Part("slas", MAIN, (SERIAL, *WINDOWS, CELLULAR, *STRESS), (1000,), SLAS),
    Part("slas", ("resnet50",), (SERIAL, *WINDOWS, CELLULAR, *STRESS), (1000,), SLAS, dataflow="ws"),
    Part("gates", TRANSLATION, STRESS, (0.7, 0.9, 1.1), (60,)),
    Part("ablation", ("gnmt",), ABLATION, (0.9,), (60,)),
    Part("rates raw", MAIN, PAPER, (100, 1000), (100,), calibrated=False),
    Part("dec_timesteps", TRANSLATION, BY_PERCENT, (1000,), (60,)),
    Part("largest batch", MAIN, (*WINDOWS, *READINGS, ORACLE, IMPROVED), (1000,), (100,), max_batch=16),
    Part("largest batch", MAIN, (*WINDOWS, *READINGS, ORACLE, IMPROVED), (1000,), (100,), max_batch=32),
    *(Part("languages", ("gnmt",), CROWD, (500, 1000), (100,), pair=pair) for pair in ("en-de", "en-fr", "en-ru")),
    Part("two models", ("gnmt + transformer",), (*CROWD, RECENT), (0.7,), (60,)),
    Part("four models", ("resnet50 + gnmt + transformer + bert",), (*CROWD, RECENT), (0.7,), (100,)),
    Part("bursts", ("gnmt",), CROWD, (0.7,), (60,), arrivals="mmpp"),
    Part("recorded trace", ("gnmt",), CROWD, (0.7,), (60,), arrivals="trace"),
    Part("table 20 % low", ("gnmt",), STRESS, (0.9,), (60,), known_factor=0.8),
    Part("table 20 % high", ("gnmt",), STRESS, (0.9,), (60,), known_factor=1.2),
    Part("lengths half as long as known", ("gnmt",), STRESS, (0.9,), (60,), shift=2.0),
    Part("lengths twice as long as known", ("gnmt",), STRESS, (0.9,), (60,), shift=0.5),
    Part("others", OTHERS, PAPER, (16, 1000), (20, 60, 100), calibrated=False),
    Part("others", ("las",), PAPER, (16, 1000), (20, 60, 100), calibrated=False, share=0.01),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One policy at one rate with one SLA, on one network; policies that do not look at SLAs have all of the part's."""

    part: Part
    model: str
    policy: str
    rate: float
    slas_ms: tuple[float, ...]


def cases_of(parts: Sequence[Part]) -> Iterator[Case]:
    """Return the simulations of these parts, each of all seeds."""
    for part in parts:
        for model in part.models:
            for rate in part.rates:
                for policy in part.policies:
                    blind = policy in BLIND or policy.startswith("graph")
                    for slas in (part.slas_ms,) if blind else ((sla,) for sla in part.slas_ms):
                        yield Case(part, model, policy, rate, slas)


@dataclass(frozen=True)
class Network:
    """A network ready to be simulated.

    single_ms: one request alone, mean and p99. capacity_rps: the most that is served. batch_ms: whole batches of one
    median request, by size.
    """

    model: SimulatedModel
    work: workload.SimulatedWorkload
    profile: CostProfile
    single_ms: tuple[float, float]
    capacity_rps: float
    batch_ms: tuple[float, ...]


@cache
def network(name: str, *, calibrated: bool, dataflow: str, max_batch: int, pair: Path | None = None) -> Network:
    """Build a network without weights, cost it, and find what it takes alone and at most. Two and more: joined by +."""
    if " + " in name:
        return _shared([
            network(part, calibrated=calibrated and part in SINGLE_MS, dataflow=dataflow, max_batch=max_batch)
            for part in name.split(" + ")
        ])  # fmt: skip
    plan = blueprint(name, lambda: options.make_model(name, max_batch=max_batch, **OPTIONS.get(name, {})))
    work = workload.make(name, plan, (), 2000)
    if pair is not None:
        offered = _of_pair(plan, pair)
    profile, _ = device.cost_profile(plan, work, npu=True, dataflow=dataflow, table=None)
    requests = work.draw(0, 2000)
    seconds = step_costs(plan.model, profile.latency, padded=False).seconds
    if calibrated:
        factor = SINGLE_MS[name] / float(_alone_ms(requests, seconds).mean())
        profile = replace(profile, latency=profile.latency.with_error(factor))
        seconds = step_costs(plan.model, profile.latency, padded=False).seconds
    if pair is not None:
        work, requests = offered, offered.draw(0, 2000)
        profile = replace(profile, lengths=device.predicted_lengths(plan, work))
    alone = _alone_ms(requests, seconds)
    machine = SimulatedDevice(step_costs(plan.model, profile.latency, padded=False))
    records = simulate(plan.model, make_policy(IMPROVED, profile), Offered(requests, np.zeros(len(requests))), machine)
    capacity = len(requests) / float(records.finished_s.max())
    median = work_of(requests[int(np.argsort(alone)[len(alone) // 2])].graph)
    batch_ms = tuple((1e3 * median.steps @ seconds[median.types, 1:]).round(4).tolist())
    single_ms = (float(alone.mean()), float(np.quantile(alone, 0.99)))
    return Network(plan.model, work, profile, single_ms, capacity, batch_ms)


def _alone_ms(requests: Sequence[SimulatedRequest], seconds: np.ndarray) -> np.ndarray:
    works = [work_of(request.graph) for request in requests]
    return np.array([1e3 * float(work.steps @ seconds[work.types, 1]) for work in works])


def _of_pair(plan: Any, folder: Path) -> workload.SimulatedWorkload:
    """Return requests with the lengths of every second pair of lines; policies know those of the others."""
    files = sorted(folder.iterdir())
    languages = folder.name.split("-")
    pairs = []
    for file in files:
        stem, _, language = file.name.rpartition(".")
        other = folder / f"{stem}.{languages[1]}"
        if language == languages[0] and other in files:
            pairs += [(len(p.source_tokens), len(p.target_tokens)) for p in read_aligned(file, other).pairs]
    lengths = np.clip(np.array(pairs), 1, workload.MOST_WORDS)
    shapes = [plan.sized(*size) for size in lengths[::2].tolist()]

    def draw(seed: int, count: int) -> ShapedRequests:
        kinds = np.random.default_rng((seed, workload.LENGTHS_STREAM)).integers(0, len(shapes), size=count)
        return ShapedRequests(shapes, kinds.astype(np.int32))

    return workload.SimulatedWorkload(draw, folder.name, (lengths[1::2, 0], lengths[1::2, 1]))


def _shared(nets: Sequence[Network]) -> Network:
    """Return networks on one device, requests of each in turn."""
    both = Together([net.model for net in nets])

    def draw(seed: int, count: int) -> Any:
        drawn = [net.work.draw(seed, count) for net in nets]
        return [both.request(i % len(nets), drawn[i % len(nets)][i]) for i in range(count)]

    capacity = len(nets) / sum(1 / net.capacity_rps for net in nets)
    mean_ms, p99_ms = (float(np.mean(column)) for column in zip(*(net.single_ms for net in nets), strict=True))
    profile = both.profile([net.profile for net in nets])
    work = workload.SimulatedWorkload(draw, "requests of each model in turn")
    return Network(both.model, work, profile, (mean_ms, p99_ms), capacity, ())


def believed(profile: CostProfile, part: Part) -> CostProfile:
    """Return what the policies are told, which may be wrong."""
    lengths = profile.lengths
    if part.shift != 1.0:
        source, words = lazybatching_lengths(30_000, 1)
        wrong = np.maximum(np.round(words * part.shift), 1).astype(np.int64)
        lengths = tuple(replace(known, profile=type(known.profile).from_pairs(source, wrong)) for known in lengths)
    return replace(profile, latency=profile.latency.with_error(part.known_factor), lengths=lengths)


def label(part: Part, model: str) -> str:
    """Return what a network is called in the results."""
    notes = [part.dataflow] if part.dataflow != device.DATAFLOW else []
    notes += [f"batch {part.max_batch}"] if part.max_batch != 64 else []
    notes += [part.pair] if part.pair else []
    return f"{model} ({', '.join(notes)})" if notes else model
