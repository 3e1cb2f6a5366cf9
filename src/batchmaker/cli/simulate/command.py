"""`batchmaker simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from batchmaker.cli import options
from batchmaker.cli.policy_model import warn_of_another_model
from batchmaker.cli.simulate import device, output, workload
from batchmaker.cli.simulate.fleet import FleetStudy, check_fleet, simulate_fleets
from batchmaker.cli.simulate.fleet_options import FleetAsk
from batchmaker.cli.simulate.option_groups import (
    CostOptions,
    MachineOptions,
    NetworkOptions,
    Simulations,
    TrafficOptions,
)
from batchmaker.cli.simulate.plan import Ask, make_study, run_study
from batchmaker.cli.simulate.study import Result, Study
from batchmaker.cost.profile import CostProfile
from batchmaker.errors import OptionError
from batchmaker.lab.plots.sweeps import draw_panels
from batchmaker.lab.simulator.costs import NO_OVERHEAD, step_costs
from batchmaker.lab.simulator.simulate import SimulatedDevice
from batchmaker.lab.zoo.blueprint import Blueprint, blueprint

DEFAULT_POLICIES: Final = ("serial", "graph", "cellular", "auto")


def simulate(
    model: Annotated[str, typer.Argument(help="A built-in model: lstm, gru, seq2seq, treelstm, gnmt, ...")],
    trace: Annotated[Path | None, typer.Argument(help="The recorded trace, with --arrivals trace.")] = None,
    *,
    simulations: Simulations,
    cost: CostOptions,
    traffic: TrafficOptions,
    network: NetworkOptions,
    machine: MachineOptions,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write the results here, one object per simulation.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw latency, throughput and violations here.")] = None,
    fleet: FleetAsk,
) -> None:
    """Compare policies under a virtual clock: the scheduler and policies that serve, with a model of cost as device.

    Every policy gets the same arrivals and requests for a seed; the same command gives the same numbers.

    [bold]Examples[/bold]

    batchmaker simulate gnmt --npu --policy lazy --policy graph:window_ms=45 --rate 250 --rate 1000 --seeds 20 --jobs 8

    batchmaker simulate lstm --latency-table profile.json --policy cellular --rate 500 --sla-ms 20 --json out.json

    [bold]Fleets[/bold]: with --replicas, so many engines behind each router, with the policy cellular.

    batchmaker simulate lstm --npu --lengths europarl --replicas 8 --replicas 10 --rate 40000 --sla-ms 20

    batchmaker simulate lstm --npu --replicas 1000 --router least-work --rate 5000000 --requests 10000000

    batchmaker simulate lstm --npu --replicas 4 --autoscale work:target=0.02,most=40 --start-s 5 --mean-life-s 600
    --season 0.8 --day-s 60 --rate 40000 --requests 5000000 --png fleet.png

    batchmaker simulate gru --npu --replicas 4 --router sticky --chunks 20 --chunk-gap-ms 50 --rate 10000
    """
    options.check_writable(json)
    options.check_picture(png)
    if simulations.seed and simulations.seeds:
        raise OptionError("give --seed or --seeds, not both")
    coming = workload.SimulatedArrivals(
        traffic.arrivals, trace, burst_s=traffic.burst_s, season=traffic.season, day_s=traffic.day_s
    )
    ask = Ask(
        tuple(simulations.policy or (("cellular",) if fleet.replicas else DEFAULT_POLICIES)),
        tuple(simulations.rate or coming.default_rates),
        tuple(simulations.sla_ms or (100.0,)),
        tuple(simulations.seed or range(simulations.seeds or 1)),
        simulations.requests,
        simulations.give_up,
    )
    ask.check()
    fleet.check()
    if fleet.replicas:
        check_fleet(fleet, ask, machine.workers, jobs)
    plan = blueprint(model, partial(options.make_model, model, **asdict(network)), computes=True)
    work = workload.make(model, plan, traffic.files or (), ask.requests, traffic.lengths)
    profile, costs = device.cost_profile(plan, work, npu=cost.npu, dataflow=cost.dataflow, table=cost.latency_table)
    simulated = _machine(plan, profile, machine, npu=cost.npu)
    about = {"workload": work.source, "arrivals": str(coming), "costs": costs, "workers": machine.workers}
    if fleet.replicas:
        study = FleetStudy(plan.model, ask.policies[0], simulated, profile, work, coming, about)
        simulate_fleets(study, ask, fleet, json, png)
    else:
        one = make_study(ask, plan, work, coming, profile, simulated, about)
        _compare_policies(one, ask, jobs, f"{work.source}; {coming} arrivals; costs: {costs}", json, png)


def _compare_policies(study: Study, ask: Ask, jobs: int, under: str, json: Path | None, png: Path | None) -> None:
    """Play one engine under every policy, show it and write it. under: what stands below the picture's title."""
    model = study.model.name
    results = run_study(study, ask, jobs)
    for name in ask.policies:  # policies for other cells have been refused
        warn_of_another_model(name, model)
    under = f"{under}; {ask.requests} requests, {len(ask.seeds)} seeds"
    _show(results, json, png, f"Policies on {model}, simulated", under)


def _machine(plan: Blueprint, profile: CostProfile, machine: MachineOptions, *, npu: bool) -> SimulatedDevice:
    """Return the device of the simulations: that of the profile, with the engine's overhead if it has one worker."""
    as_inline = not npu and machine.workers == 1  # the engine computes in its own thread, and cell types take turns
    overhead = profile.overhead if as_inline and profile.overhead is not None else NO_OVERHEAD
    costs = step_costs(plan.model, profile.latency, padded=not npu)
    return SimulatedDevice(costs, machine.workers, machine.run_ahead, as_inline, overhead)


def _show(results: Sequence[Result], json: Path | None, png: Path | None, title: str, under: str) -> None:
    """Print the tables; write the results to `json` and the picture to `png`, if given."""
    output.show(options.out(), results)
    output.show_differences(options.out(), results)
    if json is not None:
        options.write_json(json, results)
    if png is not None:
        draw_panels(png, output.panels(results), title, under)
