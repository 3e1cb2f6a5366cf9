"""`batchmaker simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from batchmaker.cli import options
from batchmaker.cli.policy_model import warn_of_another_model
from batchmaker.cli.simulate import device, fleet, fleet_options, output, workload
from batchmaker.cli.simulate.plan import Ask, make_study, run_study
from batchmaker.cli.simulate.study import Result, Study
from batchmaker.cost.profile import CostProfile
from batchmaker.errors import OptionError
from batchmaker.lab.plots.sweeps import draw_panels
from batchmaker.lab.simulator.cells import NO_OVERHEAD
from batchmaker.lab.simulator.costs import step_costs
from batchmaker.lab.simulator.run import SimulatedDevice
from batchmaker.lab.zoo.blueprint import Blueprint, blueprint

DEFAULT_POLICIES: Final = ("serial", "graph", "cellular", "auto")
MAX_BATCH: Final = 64
"""As in LazyBatching's evaluation."""


def simulate(
    model: Annotated[str, typer.Argument(help="A built-in model: lstm, gru, seq2seq, treelstm, gnmt, ...")],
    trace: Annotated[Path | None, typer.Argument(help="The recorded trace, with --arrivals trace.")] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="For example cellular, serial or graph:window_ms=45. Repeat for several.")
    ] = None,
    rate: Annotated[list[float] | None, typer.Option(help="Requests per second. Repeat for several.")] = None,
    sla_ms: Annotated[list[float] | None, typer.Option(help="Time to answer in. Repeat for several.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each simulation.")] = 2000,
    seed: Annotated[list[int] | None, typer.Option(min=0, help="Of arrivals and requests. Repeat for several.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="As --seed 0, 1, ... up to so many.")] = None,
    npu: Annotated[bool, typer.Option("--npu", help="Steps cost what LazyBatching's accelerator takes.")] = False,
    dataflow: Annotated[str, typer.Option(help="Of the NPU: ws, os or tpu; see `npu`.")] = device.DATAFLOW,
    latency_table: Annotated[Path | None, typer.Option(help="What steps cost: from `profile MODEL --out`.")] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option("--workload", help="JSON lines, text or trees; two aligned files. Default: generated."),
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="Of what is generated: lazybatching (up to 80 words) or europarl (up to 330).")
    ] = workload.LENGTHS[0],
    arrivals: Annotated[str, typer.Option(help="poisson, mmpp (bursts), or trace FILE.")] = "poisson",
    burst_s: Annotated[
        float | None, typer.Option(min=0, help="Mean seconds of a burst of mmpp. Default: of 50 requests.")
    ] = None,
    season: Annotated[
        float, typer.Option(min=0, max=0.999, help="Day and night: 0.8 is a rate from 0.2 to 1.8 times the mean.")
    ] = 0.0,
    day_s: Annotated[float, typer.Option(min=0.001, help="Seconds of a day, with --season.")] = 86_400.0,
    hidden: options.Hidden = None,
    layers: options.Layers = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Most rows in one call of a cell.")] = MAX_BATCH,
    workers: Annotated[int, typer.Option(min=1, help="Devices.")] = 1,
    run_ahead: Annotated[int, typer.Option(min=0, help="Steps left on a worker when it gets its next task.")] = 0,
    give_up: Annotated[
        bool, typer.Option("--give-up", help="Late requests fail; else they are finished late.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write the results here, one object per simulation.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw latency, throughput and violations here.")] = None,
    replicas: fleet_options.Replicas = None,
    router: fleet_options.Routers = None,
    fidelity: fleet_options.Fidelity = None,
    autoscale: fleet_options.Scale = None,
    start_s: fleet_options.StartS = 0.0,
    mean_life_s: fleet_options.MeanLifeS = None,
    chunks: fleet_options.Chunks = None,
    chunk_gap_ms: fleet_options.ChunkGapMs = 100.0,
    length_error: fleet_options.LengthError = 0.0,
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
    if seed and seeds:
        raise OptionError("give --seed or --seeds, not both")
    coming = workload.SimulatedArrivals(arrivals, trace, burst_s=burst_s, season=season, day_s=day_s)
    asked = fleet_options.FleetAsk(
        tuple(replicas or ()), tuple(router or ()), fidelity, autoscale, start_s, mean_life_s, chunks, chunk_gap_ms,
        length_error,
    )  # fmt: skip
    ask = Ask(
        tuple(policy or (("cellular",) if replicas else DEFAULT_POLICIES)), tuple(rate or coming.default_rates),
        tuple(sla_ms or (100.0,)), tuple(seed or range(seeds or 1)), requests, give_up,
    )  # fmt: skip
    ask.check()
    asked.check()
    if replicas:
        fleet.check_fleet(asked, ask, workers, jobs)
    made = partial(options.make_model, model, hidden=hidden, layers=layers, max_batch=max_batch)
    plan = blueprint(model, made, computes=True)
    work = workload.make(model, plan, files or (), requests, lengths)
    profile, costs = device.cost_profile(plan, work, npu=npu, dataflow=dataflow, table=latency_table)
    machine = _machine(plan, profile, npu=npu, workers=workers, run_ahead=run_ahead)
    about = {"workload": work.source, "arrivals": str(coming), "costs": costs, "workers": workers}
    if replicas:
        study = fleet.FleetStudy(plan.model, ask.policies[0], machine, profile, work, coming, about)
        fleet.simulate_fleets(study, ask, asked, json, png)
    else:
        one = make_study(ask, plan, work, coming, profile, machine, about)
        _compare_policies(one, ask, jobs, f"{work.source}; {coming} arrivals; costs: {costs}", json, png)


def _compare_policies(study: Study, ask: Ask, jobs: int, under: str, json: Path | None, png: Path | None) -> None:
    """Play one engine under every policy, show it and write it. under: what stands below the picture's title."""
    model = study.model.name
    results = run_study(study, ask, jobs)
    for name in ask.policies:  # policies for other cells have been refused
        warn_of_another_model(name, model)
    under = f"{under}; {ask.requests} requests, {len(ask.seeds)} seeds"
    _show(results, json, png, f"Policies on {model}, simulated", under)


def _machine(plan: Blueprint, profile: CostProfile, *, npu: bool, workers: int, run_ahead: int) -> SimulatedDevice:
    """Return the device of the simulations: that of the profile, with the engine's overhead if it has one worker."""
    as_inline = not npu and workers == 1  # then the engine computes in its own thread, and cell types take turns
    overhead = profile.overhead if as_inline and profile.overhead is not None else NO_OVERHEAD
    costs = step_costs(plan.model, profile.latency, padded=not npu)
    return SimulatedDevice(costs, workers, run_ahead, as_inline, overhead)


def _show(results: Sequence[Result], json: Path | None, png: Path | None, title: str, under: str) -> None:
    """Print the tables; write the results to `json` and the picture to `png`, if given."""
    output.show(options.out(), results)
    output.show_differences(options.out(), results)
    if json is not None:
        options.write_json(json, results)
    if png is not None:
        draw_panels(png, output.panels(results), title, under)
