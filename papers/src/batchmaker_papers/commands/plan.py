"""`batchmaker plan`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.table import Table

from batchmaker.cli import options
from batchmaker.cli.bench.report import commit, machine
from batchmaker.cli.cell_times import bound_registry
from batchmaker.errors import OptionError, unknown_name
from batchmaker.lab import zoo
from batchmaker.model.cell import Cell
from batchmaker.model.model import Model
from batchmaker.saved import load
from batchmaker_papers.cell_layout import CellStrips, draw_cell_layouts
from batchmaker_papers.gatewise import CELLS, GatewiseModel
from batchmaker_papers.plan_report import CellReport, report_on

GATEWISE: Final = "gatewise"
GATEWISE_HIDDEN: Final = 256
MAX_BATCH: Final = 65536
"""Most rows to measure: each value of a cell is held for all of them."""


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help=f"A built-in model, the directory of a saved one, or {GATEWISE}: the seven cells of ED-Batch's table "
            "written gate by gate."
        ),
    ],
    cell: Annotated[str | None, typer.Option("--cell", help="One cell by its name. Default: all of the model.")] = None,
    hidden: options.Hidden = None,
    dtype: options.Dtype = "float32",
    batch: Annotated[int, typer.Option(min=1, help="Rows in a call when bytes and times are taken.")] = 64,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads.")] = 1,
    seconds: Annotated[float, typer.Option(min=0.001, help="Time spent on measuring each cell.")] = 1.0,
    json: Annotated[Path | None, typer.Option(help="Write the numbers here.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw where each value lies in memory here.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights.")] = 0,
) -> None:
    """Show what `bm.Cell(module, optimize=True)` would do to a cell, and what it gains.

    Equal operations inside the cell become batches, with one weight matrix for each batch, and values are placed so
    that a batch reads and writes slices of memory. A memory kernel is a copy that gathers the operands of a batch.
    Before: with every value where the program writes it; after: the copies of the planned cell. Times are of the module
    in eager PyTorch, of the cell as it is bound by default, and of the planned cell; one thread.

    [bold]Examples[/bold]

    batchmaker plan gatewise --cell lstm --png lstm.png

    batchmaker plan treelstm --cell inner --hidden 512 --batch 16

    batchmaker plan saved/translator --json plan.json
    """
    if batch > MAX_BATCH:
        raise OptionError(f"--batch {batch}: at most {MAX_BATCH} rows are measured in a call; give fewer")
    options.check_writable(json)
    options.check_picture(png)
    chosen = _cells(model, cell, hidden, dtype, seed)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        reports = [report_on(*one, batch, seconds) for one in chosen]
    finally:
        torch.set_num_threads(before)
    about = f"{model}, {f'hidden {hidden}, ' if hidden else ''}{dtype}, batch {batch}"
    _show(about, reports, in_full=cell is not None)
    if json is not None:
        settings = {"model": model, "hidden": hidden, "dtype": dtype, "batch": batch, "threads": threads}
        made = {"machine": machine(), "commit": commit(), "torch": torch.__version__}
        options.write_json(json, {**settings, **made, "cells": [asdict(report) for report in reports]})
    if png is not None:
        draw_cell_layouts(png, [_strips(report) for report in reports], about)


def _cells(
    model: str, name: str | None, hidden: int | None, dtype: str, seed: int
) -> list[tuple[Cell, tuple[Any, ...], str]]:
    """Return the requested cells, with the inputs in the model's example request, and their names."""
    built: list[Model]
    if model == GATEWISE:
        width = hidden or GATEWISE_HIDDEN
        built = [GatewiseModel(kind, width, dtype, seed=seed) for kind in CELLS if name in (None, kind)]
        names = list(CELLS)
    else:
        if model not in zoo.MODELS and not Path(model).is_dir():
            raise unknown_name("model (and no directory of a saved one)", model, (*zoo.MODELS, GATEWISE))
        one = load(model) if Path(model).is_dir() and model not in zoo.MODELS else None
        built = [one or options.make_model(model, hidden=hidden, dtype=dtype, seed=seed)]
        names = list(built[0].cells)
    if name is not None and name not in names:
        raise unknown_name(f"cell of {model}", name, names)
    cells = []
    for network in built:
        registry = bound_registry(network)
        for attribute, cell in network.cells.items():
            cell_type = registry.type_of(cell)
            if cell_type is not None and name in (None, attribute):
                cells.append((cell, cell_type.inputs, attribute))
    return cells


def _show(about: str, reports: list[CellReport], *, in_full: bool) -> None:
    console = options.out()
    table = Table(title=f"Cells of {about}", title_style="bold")
    for column in ("cell", "operations", "batches", "memory kernels", "kB copied", "eager us", "bound us", "planned us",
                   "over eager"):  # fmt: skip
        table.add_column(column, justify="left" if column == "cell" else "right")
    for report in reports:
        kernels = f"{report.before.kernels} -> {report.after.kernels}"
        copied = f"{report.before.copied_bytes / 1e3:,.0f} -> {report.after.copied_bytes / 1e3:,.0f}"
        times = (f"{us:,.0f}" for us in (report.eager_us, report.bound_us, report.planned_us))
        counts = str(report.num_operations), str(len(report.batches))
        table.add_row(report.name, *counts, kernels, copied, *times, f"{report.over_eager:.2f}x")
    console.print(table)
    for report in reports:
        console.print(f"{report.name}: {report.note}", markup=False, highlight=False, soft_wrap=True)
        if in_full:
            for number, batch in enumerate(report.batches, start=1):
                line = f"{number:3}  {batch.operation:12} {len(batch.results)} x  {' | '.join(batch.results)}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)


def _strips(report: CellReport) -> CellStrips:
    results = [batch.results for batch in report.batches]
    return CellStrips(f"{report.name}: {report.note}", report.written, report.planned, report.widths, results)
