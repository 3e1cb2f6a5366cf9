"""`batchmaker profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import track
from rich.table import Table

from batchmaker import models
from batchmaker.cells.binding import BoundCell
from batchmaker.cells.export import example_rows
from batchmaker.cells.model import Model
from batchmaker.cells.registry import CellRegistry
from batchmaker.cells.unfolding import Unfolding
from batchmaker.cli import options
from batchmaker.cli.bench.reference import median_s
from batchmaker.cli.bench.report import commit, machine
from batchmaker.errors import ModelError
from batchmaker.executor.cpu import default_threads
from batchmaker.graph.spec import CellType
from batchmaker.observe.plots import Curve, draw_profile

TOLERANCE = 0.05
"""The smallest batch within so much of the best throughput is chosen."""
STEPS_PER_TASK = 5
"""Steps over which an input projection is shared, as in the engine's tasks."""


def choose_batch(sizes: list[int], cells_per_s: list[float], tolerance: float = TOLERANCE) -> int:
    """Return the smallest size whose throughput is within `tolerance` of the best."""
    best = max(cells_per_s)
    return next(size for size, speed in zip(sizes, cells_per_s, strict=True) if speed >= (1 - tolerance) * best)


def profile(
    model: Annotated[str, typer.Argument(help="lstm, gru, seq2seq or treelstm.")],
    hidden: options.Hidden = None,
    layers: options.Layers = None,
    dtype: options.Dtype = "float32",
    threads: options.Threads = None,
    largest: Annotated[int, typer.Option("--max", min=1, help="Largest batch tried; sizes double from 1.")] = 512,
    seconds: Annotated[float, typer.Option(min=0.001, help="Time spent on each size of each cell.")] = 0.3,
    json: Annotated[Path | None, typer.Option(help="Write the numbers here.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw time and throughput against batch size here.")] = None,
    seed: options.Seed = 0,
) -> None:
    """Measure every cell of a model at every batch size, and choose where larger batches stop paying.

    [bold]Examples[/bold]

    batchmaker profile lstm --hidden 1024 --dtype bfloat16 --png lstm.png

    batchmaker profile treelstm --max 256 --json tree.json
    """
    options.check_writable(json)
    options.check_writable(png)
    models.option_names(model)
    threads = threads or default_threads()
    built = options.make_model(model, hidden=hidden, layers=layers, dtype=dtype, seed=seed)
    registry = bound_registry(built)
    sizes = [1 << power for power in range(largest.bit_length())]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        curves = [_curve(registry, cell, bound, sizes, seconds) for cell, bound in zip(
            registry.types, registry.bound, strict=True)]  # fmt: skip
    finally:
        torch.set_num_threads(before)
    width = hidden or options.default_of(model, "hidden")
    about = f"{model}, hidden {width}, {dtype}, {threads} thread{'s' if threads > 1 else ''}"
    _show(about, curves)
    if json is not None:
        given = {"model": model, "hidden": width, "dtype": dtype, "threads": threads, "machine": machine()}
        cells = [
            {
                "name": curve.name, "batch": list(curve.sizes), "step_ms": list(curve.step_ms),
                "cells_per_s": list(curve.cells_per_s), "max_batch": curve.best,
            }
            for curve in curves
        ]  # fmt: skip
        options.write_json(json, {**given, "commit": commit(), "torch": torch.__version__, "cells": cells})
    if png is not None:
        draw_profile(png, curves, f"{about}; {machine()['cpu']}")


def bound_registry(model: Model) -> CellRegistry:
    """Return the model's cells bound to the inputs that its example request gives them. ModelError without one."""
    if model.example_request is None:
        raise ModelError(f"{type(model).__name__} has no example_request to tell what its cells are given")
    registry = CellRegistry()
    Unfolding(model, registry, model.example_request).start()
    return registry


def _curve(registry: CellRegistry, cell: CellType, bound: BoundCell, sizes: list[int], seconds: float) -> Curve:
    num_sequence = registry.num_sequence_inputs.get(cell.type_id)
    console = options.err()
    shown = track(sizes, cell.name, console=console, transient=True, disable=not console.is_terminal)
    with torch.no_grad():
        step_ms = [1e3 * _step_s(bound, size, num_sequence, seconds) for size in shown]
    speeds = [1e3 * size / ms for size, ms in zip(sizes, step_ms, strict=True)]
    return Curve(cell.name, sizes, step_ms, speeds, choose_batch(sizes, speeds))


def _step_s(bound: BoundCell, size: int, num_sequence: int | None, seconds: float) -> float:
    """Return seconds per step as the engine runs it: what needs no state is computed for several steps at once."""
    if num_sequence is None:
        inputs = example_rows(bound.inputs, size, random=True)
        return median_s(lambda: bound.call(inputs), seconds)
    split = bound.split(num_sequence)
    state = example_rows(bound.inputs[num_sequence:], size, random=True)
    given = example_rows(bound.inputs[:num_sequence], size * STEPS_PER_TASK, random=True)
    hoisted = split.hoist(tuple(value[:size] for value in given))
    step_s = median_s(lambda: split.step(hoisted, state), seconds)
    return step_s + (median_s(lambda: split.hoist(given), seconds / 4) / STEPS_PER_TASK if num_sequence else 0.0)


def _show(about: str, curves: list[Curve]) -> None:
    console = options.out()
    for curve in curves:
        table = Table(title=f"{curve.name} of {about}", title_style="bold")
        for name in ("batch", "ms per step", "cells/s", "of the best"):
            table.add_column(name, justify="right")
        best = sorted(curve.cells_per_s)[-1]
        for size, ms, speed in zip(curve.sizes, curve.step_ms, curve.cells_per_s, strict=True):
            style = "bold green" if size == curve.best else ""
            table.add_row(str(size), f"{ms:.3f}", f"{speed:,.0f}", f"{speed / best:.0%}", style=style)
        console.print(table)
        console.print(
            f"{curve.name}: max_batch [bold]{curve.best}[/bold], "
            f"the smallest within {TOLERANCE:.0%} of the best throughput\n"
        )
