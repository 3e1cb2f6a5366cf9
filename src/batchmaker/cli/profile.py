"""`batchmaker profile`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.table import Table

from batchmaker.cli import options
from batchmaker.cli.bench.load import quiet_interpreter
from batchmaker.cli.bench.report import commit, machine
from batchmaker.cli.cell_times import EveryStep, bound_registry, forms_in, measured_cells, used_registry
from batchmaker.cli.given_model import given_model, read_requests
from batchmaker.cli.overhead import measured_overhead
from batchmaker.cli.workload import make_workload
from batchmaker.cost.latency import CellLatency, LatencyTable
from batchmaker.cost.lengths import LengthProfile
from batchmaker.cost.profile import CostProfile, Overhead, PredictedLength, ProfileOptions
from batchmaker.engine.engine import Engine
from batchmaker.engine.setup import dtype_of_cells
from batchmaker.errors import OptionError
from batchmaker.executor.processors import default_threads
from batchmaker.lab.datasets import read_aligned
from batchmaker.lab.plots.pictures import Curve, draw_profile
from batchmaker.model.model import Model
from batchmaker.model.registry import CellRegistry
from batchmaker.saved.sources import BuiltIn, one_model

TOLERANCE = 0.05
"""The smallest batch within this share of the best throughput is chosen."""
FEED_PREVIOUS: Final = {
    "seq2seq": ("encoder", "decoder"),
    "lstm-nmt": ("encoder", "decoder"),
    "gnmt": ("left", "decoder"),
    "transformer": (None, "decoder"),
}
"""Translators whose decoder runs until an end word: the cell with a step for each source word, and the decoder."""


def choose_batch(sizes: Sequence[int], cells_per_s: Sequence[float], tolerance: float = TOLERANCE) -> int:
    """Return the smallest size whose throughput is within `tolerance` of the best."""
    best = max(cells_per_s)
    return next(size for size, speed in zip(sizes, cells_per_s, strict=True) if speed >= (1 - tolerance) * best)


def profile(
    model: options.ModelName,
    requests: Annotated[
        Path | None,
        typer.Option(
            help="Requests that use the cells of a model of your own, as JSON, one a line. Default: the model's "
            "example requests."
        ),
    ] = None,
    hidden: options.Hidden = None,
    layers: options.Layers = None,
    dtype: options.Dtype = options.DTYPE,
    threads: options.Threads = None,
    largest: Annotated[int, typer.Option("--max", min=1, help="Largest batch tried; sizes double from 1.")] = 512,
    seconds: Annotated[float, typer.Option(min=0.001, help="Time spent on each size of each cell.")] = 0.3,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Two aligned files, for how long outputs get: --data SOURCE --data TARGET."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write times and lengths for the scheduler here.")] = None,
    overhead: Annotated[
        bool,
        typer.Option(
            "--overhead", help="Store with --out the cells as the engine runs them, and what it needs beside them."
        ),
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the numbers here.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw time and throughput against batch size here.")] = None,
    seed: options.Seed = 0,
) -> None:
    """Measure every cell of a model at every batch size, and choose where larger batches stop paying.

    Of a model of your own the cells are measured that its example requests use, and those of --requests: one request
    that reaches every cell is enough.

    [bold]Examples[/bold]

    batchmaker profile lstm --hidden 1024 --dtype bfloat16 --png lstm.png

    batchmaker profile seq2seq --data train.en --data train.de --out profile.json

    batchmaker profile translator.py:hidden=64 --requests requests.jsonl

    batchmaker profile saved/translator --out saved/translator/profile.json
    """
    for path in (out, json):
        options.check_writable(path)
    options.check_picture(png)
    named = given_model(model, hidden=hidden, layers=layers, dtype=dtype)
    if data and out is None:
        raise OptionError("--data is for length profiles, which are written with --out; give --out profile.json too")
    if overhead and out is None:
        raise OptionError("--overhead is stored with --out; give --out profile.json too")
    name = named.network if isinstance(named, BuiltIn) else named.name
    lengths = output_lengths(name, data) if data else ()
    threads = threads or default_threads()
    read = [] if requests is None else [(f"{requests}, line {line}", one) for line, one in read_requests(requests)]
    if isinstance(named, BuiltIn):
        model_options = {"seed": seed, **named.options}
        built = options.make_model(name, **model_options)
        registry = used_registry(built, read, threads) if read else bound_registry(built)
        width, layers = model_options.get("hidden") or options.width_of(name), model_options.get("layers")
        dtype = model_options.get("dtype", options.DTYPE)
    else:
        built = one_model(named)
        registry = _of_own(built, read, threads, overhead=overhead)
        width, dtype = None, dtype_of_cells(registry)
    sizes = [1 << power for power in range(largest.bit_length())]
    cells = measured_cells(registry, sizes, seconds, threads)
    curves = [_curve(cell) for cell in cells]
    about = f"{name}{f', hidden {width}' if width else ''}, {dtype}, {threads} thread{'s' if threads > 1 else ''}"
    _show(about, cells, curves, forms_in(registry))
    if json is not None:
        about_it = {"model": name, "hidden": width, "dtype": dtype, "threads": threads, "machine": machine()}
        rows = [_json_row(cell, curve) for cell, curve in zip(cells, curves, strict=True)]
        options.write_json(json, {**about_it, "commit": commit(), "torch": torch.__version__, "cells": rows})
    if png is not None:
        draw_profile(png, curves, f"{about}; {machine()['cpu']}")
    if out is not None:
        where = f"{machine()['cpu']}, {machine()['cores']} cores"
        measured_for = ProfileOptions(dtype, threads, where, commit(), width, layers)
        latency = LatencyTable(tuple(cells))
        needed = None
        if overhead:
            first = [one for _, one in read]  # to use every cell before anything is measured
            offered = first or built.examples
            if isinstance(named, BuiltIn):
                offered = first or list(make_workload(name, count=256, seed=seed).requests)
            latency, needed = _as_served(built, first, offered, latency, seconds, threads)
        CostProfile(name, measured_for, latency, lengths, needed).write(out)


def _of_own(model: Model, read: list[tuple[str, Any]], threads: int, *, overhead: bool) -> CellRegistry:
    """Return the bound cells of a user's model, and say which are not. OptionError if nothing tells what they get."""
    remedy = "give --requests FILE (JSON, one request a line)"
    if not (read or model.examples or model.example_chunks):
        raise OptionError(
            f"nothing tells what the cells of {type(model).__name__} are given: {remedy}, or set example_request in "
            "the model"
        )
    if overhead and not (read or model.examples):
        raise OptionError(f"--overhead is measured with requests: {remedy}")
    registry = used_registry(model, read, threads)
    unused = model.cells.keys() - {cell.name for cell in registry.types}
    if unused:
        said = f"not measured, because no request uses them: {', '.join(sorted(unused))}; {remedy} with one that does"
        options.err().print(said, style="yellow", markup=False, highlight=False, soft_wrap=True)
    return registry


def _as_served(
    model: Model, first: Sequence[Any], requests: Sequence[Any], latency: LatencyTable, seconds: float, threads: int
) -> tuple[LatencyTable, Overhead]:
    """Return the cells' times as the engine runs them, and its overhead beside them, under cellular batching.

    first: requests that are answered before anything is measured, and use all cells that the model's examples do not.
    """
    with Engine(model, EveryStep(), threads=threads) as engine, quiet_interpreter():
        engine.map(first, progress=False)
        return measured_overhead(engine, requests, latency, seconds)


def output_lengths(model: str, data: Sequence[Path]) -> tuple[PredictedLength, ...]:
    """Return how the decoder's number of steps depends on the encoder's in the data.

    data: a source and a target file, aligned. Raises OptionError for a model that is not a translator, and DataError.
    """
    if model not in FEED_PREVIOUS:
        raise OptionError(
            f"--data is for models whose output length is not known beforehand ({', '.join(FEED_PREVIOUS)}); "
            f"leave it out for {model}"
        )
    if len(data) != 2:
        raise OptionError(f"lengths are read from two aligned files (--data SOURCE --data TARGET), got {len(data)}")
    encoder, cell = FEED_PREVIOUS[model]
    pairs = read_aligned(data[0], data[1]).pairs
    source = [len(pair.source_tokens) if encoder else 0 for pair in pairs]
    target = [len(pair.target_tokens) for pair in pairs]
    return (PredictedLength(cell, encoder, LengthProfile.from_pairs(source, target)),)


def _curve(cell: CellLatency) -> Curve:
    speeds = [size / seconds for size, seconds in zip(cell.batch, cell.median_s, strict=True)]
    return Curve(cell.name, cell.batch, [1e3 * s for s in cell.median_s], speeds, choose_batch(cell.batch, speeds))


def _json_row(cell: CellLatency, curve: Curve) -> dict[str, Any]:
    return {
        "name": curve.name,
        "batch": list(curve.sizes),
        "step_ms": list(curve.step_ms),
        "p95_ms": [1e3 * seconds for seconds in cell.p95_s],
        "cells_per_s": list(curve.cells_per_s),
        "max_batch": curve.best,
    }


def _show(about: str, cells: Sequence[CellLatency], curves: Sequence[Curve], forms: Sequence[str]) -> None:
    console = options.out()
    for cell, curve, form in zip(cells, curves, forms, strict=True):
        table = Table(title=f"{curve.name} of {about}", title_style="bold")
        for name in ("batch", "ms per step", "p95 ms", "cells/s", "of the best"):
            table.add_column(name, justify="right")
        best = max(curve.cells_per_s)
        for size, ms, p95_s, speed in zip(curve.sizes, curve.step_ms, cell.p95_s, curve.cells_per_s, strict=True):
            style = "bold green" if size == curve.best else ""
            table.add_row(
                str(size), f"{ms:.3f}", f"{1e3 * p95_s:.3f}", f"{speed:,.0f}", f"{speed / best:.0%}", style=style
            )
        console.print(table)
        console.print(
            f"{curve.name}: max_batch [bold]{curve.best}[/bold], "
            f"the smallest within {TOLERANCE:.0%} of the best throughput"
        )
        console.print(f"{curve.name}: {form}\n", markup=False, highlight=False, soft_wrap=True)
