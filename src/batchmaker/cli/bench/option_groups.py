"""The options of `batchmaker bench`, in groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, final

import typer

from batchmaker.cli import options


@final
@dataclass(frozen=True, slots=True)
class CellOptions:
    """Sizes of the network and of its steps."""

    hidden: options.Hidden = None
    layers: options.Layers = None
    dtype: options.Dtype = options.DTYPE
    max_batch: options.MaxBatch = None


@final
@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What is offered, and for how long."""

    rate: Annotated[float | None, typer.Option(help="Offer a Poisson process of so many requests a second.")] = None
    load: Annotated[
        float | None, typer.Option(help="As --rate, as a share of the padded baseline's peak, measured first.")
    ] = None
    requests: Annotated[
        int | None, typer.Option(min=1, help="Offer so many requests at once; measure to the last.")
    ] = None
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of the measured window.")] = 10.0
    deadline_ms: options.DeadlineMs = None


@final
@dataclass(frozen=True, slots=True)
class HardwareOptions:
    """What computes."""

    threads: options.Threads = None
    workers: Annotated[int, typer.Option(min=1, help="Worker threads.")] = 1
    device: options.Device = "cpu"


@final
@dataclass(frozen=True, slots=True)
class BaselineOptions:
    """How whole requests are batched for comparison."""

    padded_batch: Annotated[
        int | None, typer.Option(min=1, help="Most requests in a padded batch. Default: the best of 64, 128 and 256.")
    ] = None
    sweep: Annotated[
        bool, typer.Option(help="Look for padded's best bucket width and maximum first; without: 10 and 64.")
    ] = True
    equal_work: Annotated[
        bool,
        typer.Option("--equal-work", help="Measure padded and serial with the engine's own cells as well: closed."),
    ] = False
