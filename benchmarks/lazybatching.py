"""LazyBatching's evaluation, simulated: every figure of the paper that can be, and the improved policy against all.

Usage: python benchmarks/lazybatching.py [--seeds 20] [--requests 1000] [--jobs N] [--only PART ...] [--out FILE]

Writes benchmarks/results/lazybatching.json (numbers per seed, with commit and machine), pictures under docs/images and
the tables of docs/lazybatching.md. Costs are those of the NPU model: raw, and scaled per network so that a request
alone takes what the paper's Table II says.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from batchmaker.cli import options
from batchmaker.cli.bench.report import commit, machine
from batchmaker.cli.simulate import device, workload
from batchmaker.cli.simulate.study import Job, Study, make_policy, play_all
from batchmaker.cost.profile import CostProfile
from batchmaker.graph.work import work_of
from batchmaker.lab.simulator.costs import step_costs
from batchmaker.lab.simulator.run import SimulatedDevice, simulate
from batchmaker.lab.simulator.together import Together
from batchmaker.lab.simulator.workload import Offered, SimulatedModel, SimulatedRequest
from batchmaker.lab.zoo.blueprint import blueprint
from lazybatching_page import write_page

RESULTS = Path(__file__).parent / "results" / "lazybatching.json"
SINGLE_MS = {"resnet50": 1.1, "gnmt": 7.2, "transformer": 2.4}
"""Table II: latency of one request alone."""
OPTIONS: dict[str, dict[str, str]] = {"resnet50": {"cut": "blocks"}, "mobilenet": {"cut": "blocks"}}
"""Blocks of a few layers as nodes, since a simulation costs by the node."""
MAX_BATCH = 64

SERIAL, WINDOWS = "serial", tuple(f"graph:window_ms={n}" for n in (5, 45, 95))
LITERAL = "lazy:slack=literal,benefit=no,lengths=fixed"
OLDEST = "lazy:slack=oldest,benefit=no,lengths=fixed"
ORACLE = "lazy:benefit=no,lengths=true"
ORACLE_BENEFIT = "lazy:lengths=true"
GREEDY = "lazy:slack=none,benefit=no"
IMPROVED = "lazy"
RECENT = "lazy:stack=recent"
CELLULAR = "cellular"
PAPER = (SERIAL, *WINDOWS, OLDEST, CELLULAR, IMPROVED, ORACLE_BENEFIT)
STRESS = (OLDEST, IMPROVED, ORACLE_BENEFIT)
ABLATION = (
    LITERAL, OLDEST, f"{OLDEST},estimate=table", "lazy:slack=oldest", GREEDY, "lazy:slack=none", "lazy:benefit=no",
    "lazy:lengths=fixed", "lazy:hopeless=drop", "orloj", IMPROVED, ORACLE, ORACLE_BENEFIT,
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Some of the simulations. rates: per second, or shares of the capacity where below 4. known_factor: by how much
    the policies' latency table is off. few: a fifth of the requests, at low rates, where nothing builds up and small
    batches make a simulation slow. shift: what the policies take for the true lengths, as a factor."""

    name: str
    models: tuple[str, ...]
    policies: tuple[str, ...]
    rates: tuple[float, ...]
    slas_ms: tuple[float, ...]
    calibrated: bool = True
    arrivals: str = "poisson"
    few: bool = False
    known_factor: float = 1.0
    shift: float = 1.0


MAIN = ("resnet50", "gnmt", "transformer")
TRANSLATION = MAIN[1:]
OTHERS = ("vgg16", "mobilenet", "las", "bert")
PARTS = (
    Part("rates", MAIN, (SERIAL, *WINDOWS, OLDEST, CELLULAR, IMPROVED), (500, 1000), (100,)),
    Part("slas", MAIN, (*WINDOWS, CELLULAR, *STRESS), (1000,), (20, 40, 60)),
    Part("gates", TRANSLATION, STRESS, (0.7, 0.9, 1.1), (60,)),
    Part("ablation", ("gnmt",), ABLATION, (0.9,), (60,)),
    Part("rates", MAIN, (SERIAL, *WINDOWS, OLDEST, CELLULAR, IMPROVED), (16, 100), (100,), few=True),
    Part("rates raw", MAIN, (SERIAL, *WINDOWS, OLDEST, IMPROVED), (1000,), (100,), calibrated=False),
    Part("rates raw", MAIN, (SERIAL, *WINDOWS, OLDEST, IMPROVED), (100,), (100,), calibrated=False, few=True),
    Part("others", OTHERS, (SERIAL, *WINDOWS, OLDEST, IMPROVED), (1000,), (60,), calibrated=False),
    Part("others", OTHERS, (SERIAL, *WINDOWS, OLDEST, IMPROVED), (16,), (60,), calibrated=False, few=True),
    Part("two models together", ("gnmt + transformer",), (*WINDOWS, CELLULAR, RECENT, *STRESS), (0.7,), (60,)),
    Part("bursts", ("gnmt",), (*WINDOWS, CELLULAR, *STRESS), (0.7,), (60,), arrivals="mmpp"),
    Part("table 20 % low", ("gnmt",), STRESS, (0.9,), (60,), known_factor=0.8),
    Part("table 20 % high", ("gnmt",), STRESS, (0.9,), (60,), known_factor=1.2),
    Part("lengths half as long as known", ("gnmt",), STRESS, (0.9,), (60,), shift=2.0),
    Part("lengths twice as long as known", ("gnmt",), STRESS, (0.9,), (60,), shift=0.5),
)  # fmt: skip


@dataclass(frozen=True)
class Network:
    """A network ready to be simulated.

    single_ms: one request alone, mean and p99. capacity_rps: the most that is served.
    """

    model: SimulatedModel
    work: workload.Workload
    profile: CostProfile
    costs: str
    single_ms: tuple[float, float]
    capacity_rps: float


def network(name: str, *, calibrated: bool) -> Network:
    """Build a network without weights, cost it, and find what it takes alone and at most."""
    plan = blueprint(name, lambda: options.make_model(name, max_batch=MAX_BATCH, **OPTIONS.get(name, {})))
    work = workload.make(name, plan, (), 2000)
    profile, costs = device.cost_profile(plan, work, npu=True, dataflow=device.DATAFLOW, table=None)
    requests = work.draw(0, 2000)

    def alone_ms(latency: Any) -> np.ndarray:
        seconds = step_costs(plan.model, latency, padded=False).seconds[:, 1]
        works = [work_of(request.graph) for request in requests]
        return np.array([1e3 * float(work.steps @ seconds[work.types]) for work in works])

    if calibrated:
        factor = SINGLE_MS[name] / float(alone_ms(profile.latency).mean())
        profile = replace(profile, latency=profile.latency.with_error(factor))
    alone = alone_ms(profile.latency)
    machine_ = SimulatedDevice(step_costs(plan.model, profile.latency, padded=False))
    offered = Offered(requests, np.zeros(len(requests)))
    records = simulate(plan.model, make_policy(IMPROVED, profile), offered, machine_)
    capacity = len(requests) / float(records.finished_s.max())
    return Network(plan.model, work, profile, costs, (float(alone.mean()), float(np.quantile(alone, 0.99))), capacity)


def shared(first: Network, second: Network) -> Network:
    """Return two networks on one device, each with every other request."""
    both = Together([first.model, second.model])

    def draw(seed: int, count: int) -> list[SimulatedRequest]:
        pairs = zip(first.work.draw(seed, count), second.work.draw(seed, count), strict=True)
        return [both.request(i % 2, pair[i % 2]) for i, pair in enumerate(pairs)]

    capacity = 2 / (1 / first.capacity_rps + 1 / second.capacity_rps)
    mean_ms, p99_ms = ((one + other) / 2 for one, other in zip(first.single_ms, second.single_ms, strict=True))
    profile = both.profile([first.profile, second.profile])
    return Network(both.model, replace(first.work, draw=draw), profile, first.costs, (mean_ms, p99_ms), capacity)


def believed(profile: CostProfile, part: Part) -> CostProfile:
    """Return what the policies are told, which may be wrong."""
    lengths = profile.lengths
    if part.shift != 1.0:
        source, words = workload.lazybatching_lengths(30_000, 1)
        wrong = np.maximum(np.round(words * part.shift), 1).astype(np.int64)
        lengths = tuple(replace(k, profile=type(k.profile).from_pairs(source, wrong)) for k in lengths)
    return replace(profile, latency=profile.latency.with_error(part.known_factor), lengths=lengths)


def play(part: Part, name: str, net: Network, seeds: int, requests: int, jobs: int) -> list[dict[str, Any]]:
    """Simulate one network's share of a part; one row per policy, rate and SLA with a number per seed."""
    rates = tuple(rate * net.capacity_rps if rate < 4 else rate for rate in part.rates)
    coming = workload.Arrivals(part.arrivals)
    requests = requests // 5 if part.few else requests
    drawn = {seed: net.work.draw(seed, requests) for seed in range(seeds)}
    arrivals = {(rate, seed): coming.times_s(rate, seed, requests) for rate in rates for seed in range(seeds)}
    device_ = SimulatedDevice(step_costs(net.model, net.profile.latency, padded=False))
    slas_s = tuple(sla / 1e3 for sla in part.slas_ms)
    study = Study(net.model, device_, believed(net.profile, part), slas_s, drawn, arrivals, False, {})
    blind = (SERIAL, *WINDOWS, CELLULAR, GREEDY)
    todo = [
        Job(policy, rate, seed, sla)
        for policy in part.policies
        for rate in rates
        for sla in ((None,) if policy in blind else slas_s)
        for seed in range(seeds)
    ]
    groups: dict[tuple[str, float, float], list[dict[str, Any]]] = {}
    for row in play_all(study, todo, jobs, lambda: None):
        groups.setdefault((row["policy"], row["rate"], row["sla_ms"]), []).append(row)
    kept = ("mean_ms", "p50_ms", "p90_ms", "p99_ms", "throughput_rps", "goodput_rps", "violation_share", "mean_batch")
    return [
        {
            "part": part.name, "model": name, "costs": "calibrated" if part.calibrated else "raw", "policy": policy,
            "rate": rate, "share_of_capacity": rate / net.capacity_rps, "sla_ms": sla, "requests": requests,
            "seeds": seeds, **{key: [round(row[key], 4) for row in rows] for key in kept},
        }
        for (policy, rate, sla), rows in groups.items()
    ]  # fmt: skip


def latency_curves(net: Network, name: str, rate: float, sla_s: float) -> Iterator[dict[str, Any]]:
    """Figure 14: quantiles of latency under high load, one seed."""
    requests, times = net.work.draw(0, 2000), workload.Arrivals("poisson").times_s(rate, 0, 2000)
    device_ = SimulatedDevice(step_costs(net.model, net.profile.latency, padded=False))
    for policy in (*WINDOWS, OLDEST, CELLULAR, IMPROVED):
        chosen = make_policy(policy, net.profile)
        records = simulate(net.model, chosen, Offered(requests, times), device_, sla_s=sla_s)
        latency_ms = 1e3 * (records.finished_s - records.arrived_s)
        quantiles = np.quantile(latency_ms, np.arange(101) / 100).round(3).tolist()
        yield {"part": "latencies", "model": name, "policy": policy, "rate": rate, "quantiles_ms": quantiles}


def batch_curve(net: Network, name: str) -> dict[str, Any]:
    """Figure 3: throughput and latency of whole batches of one median request."""
    seconds = step_costs(net.model, net.profile.latency, padded=False).seconds
    work = work_of(net.work.draw(0, 1)[0].graph)
    batch_ms = (1e3 * work.steps @ seconds[work.types, 1:]).round(4).tolist()
    return {"part": "batches", "model": name, "batch_ms": batch_ms}


def simulation_speed(net: Network, requests: int = 4000) -> list[dict[str, Any]]:
    """Requests simulated per second of wall time at high load, in this process alone."""
    rows = []
    times = workload.Arrivals("poisson").times_s(0.95 * net.capacity_rps, 0, requests)
    device_ = SimulatedDevice(step_costs(net.model, net.profile.latency, padded=False))
    drawn = net.work.draw(0, requests)
    for policy in (WINDOWS[0], CELLULAR, IMPROVED):
        begin = time.perf_counter()
        records = simulate(net.model, make_policy(policy, net.profile), Offered(drawn, times), device_, sla_s=0.1)
        wall_s = time.perf_counter() - begin
        rates = {"requests_per_s": round(requests / wall_s), "steps_per_s": round(records.steps / wall_s)}
        rows.append(
            {"part": "speed", "model": "gnmt", "policy": policy, **rates, "mean_batch": records.rows / records.steps}
        )
    return rows


def find(name: str, *, calibrated: bool) -> Network:
    """Return a network, or two of them together."""
    nets = [network(part, calibrated=calibrated) for part in name.split(" + ")]
    return nets[0] if len(nets) == 1 else shared(*nets)


def run(parts: Sequence[Part], seeds: int, requests: int, jobs: int, out: Path) -> dict[str, Any]:
    """Simulate the parts and return everything that the page is made of; `out` always holds what there is so far."""
    networks: dict[tuple[str, bool], Network] = {}
    results: dict[str, Any] = {"commit": commit(), "machine": machine(), "networks": [], "rows": []}
    begin = time.perf_counter()
    todo = [(part, name) for part in parts for name in part.models]
    for part, name in track(todo, "simulations", console=options.err()):
        if (name, part.calibrated) not in networks:
            net = networks[name, part.calibrated] = find(name, calibrated=part.calibrated)
            costs = "calibrated" if part.calibrated else "raw"
            results["networks"].append({
                "model": name, "costs": costs, "single_ms": net.single_ms[0], "single_p99_ms": net.single_ms[1],
                "capacity_rps": net.capacity_rps, "cells": len(net.model.cells),
            })  # fmt: skip
        results["rows"] += play(part, name, networks[name, part.calibrated], seeds, requests, jobs)
        results["wall_s"] = round(time.perf_counter() - begin)
        out.write_text(json.dumps(results) + "\n")
    for (name, calibrated), net in networks.items():
        if calibrated and name in MAIN:
            results["rows"] += [batch_curve(net, name), *latency_curves(net, name, 1000, 0.1)]
            results["rows"] += simulation_speed(net) if name == "gnmt" else []
    out.write_text(json.dumps(results) + "\n")
    return results


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=500, help="of each simulation")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument(
        "--only", action="append", choices=sorted({part.name for part in PARTS}), help="repeat for several"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    parts = [part for part in PARTS if given.only is None or part.name in given.only]
    results = run(parts, given.seeds, given.requests, given.jobs, given.out)
    if given.out == RESULTS and given.only is None:
        write_page(results)


if __name__ == "__main__":
    main()
