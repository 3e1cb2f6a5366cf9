"""The options of `batchmaker simulate`, in groups; those for fleets are in `fleet_options`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, final

import typer

from batchmaker.cli import options
from batchmaker.cli.simulate import device, workload

MAX_BATCH: Final = 64
"""As in LazyBatching's evaluation."""


@final
@dataclass(frozen=True, slots=True)
class Simulations:
    """Which simulations are run: one for each policy, rate, SLA and seed."""

    policy: Annotated[
        list[str] | None, typer.Option(help="For example cellular, serial or graph:window_ms=45. Repeat for several.")
    ] = None
    rate: Annotated[list[float] | None, typer.Option(help="Requests per second. Repeat for several.")] = None
    sla_ms: Annotated[list[float] | None, typer.Option(help="Time to answer in. Repeat for several.")] = None
    requests: Annotated[int, typer.Option(min=1, help="Requests of each simulation.")] = 2000
    seed: Annotated[list[int] | None, typer.Option(min=0, help="Of arrivals and requests. Repeat for several.")] = None
    seeds: Annotated[int | None, typer.Option(min=1, help="As --seed 0, 1, ... up to so many.")] = None
    give_up: Annotated[bool, typer.Option("--give-up", help="Late requests fail; else they are finished late.")] = False


@final
@dataclass(frozen=True, slots=True)
class CostOptions:
    """What steps cost."""

    npu: Annotated[bool, typer.Option("--npu", help="Steps cost what LazyBatching's accelerator takes.")] = False
    dataflow: Annotated[str, typer.Option(help="Of the NPU: ws, os or tpu; see `npu`.")] = device.DATAFLOW
    latency_table: Annotated[Path | None, typer.Option(help="What steps cost: from `profile MODEL --out`.")] = None


@final
@dataclass(frozen=True, slots=True)
class TrafficOptions:
    """Requests, and when they come."""

    files: Annotated[
        list[Path] | None,
        typer.Option("--workload", help="JSON lines, text or trees; two aligned files. Default: generated."),
    ] = None
    lengths: Annotated[
        str, typer.Option(help="Of what is generated: lazybatching (up to 80 words) or europarl (up to 330).")
    ] = workload.LENGTHS[0]
    arrivals: Annotated[str, typer.Option(help="poisson, mmpp (bursts), or trace FILE.")] = "poisson"
    burst_s: Annotated[
        float | None, typer.Option(min=0, help="Mean seconds of a burst of mmpp. Default: of 50 requests.")
    ] = None
    season: Annotated[
        float, typer.Option(min=0, max=0.999, help="Day and night: 0.8 is a rate from 0.2 to 1.8 times the mean.")
    ] = 0.0
    day_s: Annotated[float, typer.Option(min=0.001, help="Seconds of a day, with --season.")] = 86_400.0


@final
@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """Sizes of the network."""

    hidden: options.Hidden = None
    layers: options.Layers = None
    max_batch: Annotated[int, typer.Option(min=1, help="Most rows in one call of a cell.")] = MAX_BATCH


@final
@dataclass(frozen=True, slots=True)
class MachineOptions:
    """What computes."""

    workers: Annotated[int, typer.Option(min=1, help="Devices.")] = 1
    run_ahead: Annotated[int, typer.Option(min=0, help="Steps left on a worker when it gets its next task.")] = 0
