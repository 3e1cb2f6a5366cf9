"""`batchmaker bench`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from batchmaker.cli import options
from batchmaker.cli.bench import report
from batchmaker.cli.bench.contenders import with_equal_work
from batchmaker.cli.bench.measurement import BenchPlan, measure_all
from batchmaker.cli.bench.option_groups import BaselineOptions, CellOptions, HardwareOptions, LoadOptions
from batchmaker.cli.bench.report import Result, Setting
from batchmaker.cli.given_model import only_built_in
from batchmaker.cli.workload import UNPADDED, Workload, make_workload
from batchmaker.engine.setup import DEFAULT
from batchmaker.errors import OptionError
from batchmaker.executor.cuda.open import device_numbers
from batchmaker.executor.processors import default_threads
from batchmaker.model.model import Model


def bench(
    model: Annotated[
        str,
        typer.Argument(
            help="A built-in model: lstm, gru, seq2seq, treelstm, latticelstm, ... Options follow a colon: "
            "lstm:hidden=64. `profile` measures the cells of a model of your own."
        ),
    ],
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text lines (lstm, gru), source then target (seq2seq, give it twice), trees (treelstm), CoNLL-U "
            "(treelstm-childsum), words with tags, lattices. Default: seeded sentences of Europarl's lengths, seeded "
            "trees and lattices."
        ),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="auto, padded, learned:file=FILE, ...; may be given several times.")
    ] = None,
    *,
    network: CellOptions,
    offered: LoadOptions,
    hardware: HardwareOptions,
    baseline: BaselineOptions,
    planned: Annotated[bool, typer.Option("--planned", help="Plan the operations inside all cells.")] = False,
    lengths: Annotated[str | None, typer.Option(help="fixed:24 or clip:50, for generated sentences.")] = None,
    seed: options.Seed = 0,
    json: Annotated[Path | None, typer.Option(help="Write the results here, one object per policy.")] = None,
) -> None:
    """Measure policies against each other and against the best of plain torch, all in one run.

    Without --rate, --load or --requests the engine is saturated: many requests always wait. With --deadline-ms late
    requests are counted, and still computed to the end. Baselines run on the CPU only; with --device the policies are
    those that batch cells, and the reference is torch on the same GPU.

    [bold]Examples[/bold]

    batchmaker bench lstm --dtype bfloat16 --seconds 20 --json lstm.json

    batchmaker bench lstm --load 0.5 --policy cellular --policy padded

    batchmaker bench lstm --hidden 512 --equal-work --json cells-and-batching.json

    batchmaker bench seq2seq --data europarl.de --data europarl.en --hidden 512

    batchmaker bench treelstm --data sst/test.txt --requests 1000

    batchmaker bench lstm --hidden 1024 --device cuda --dtype bfloat16
    """
    device = hardware.device
    workers = hardware.workers if device == "cpu" else len(device_numbers(device))
    if baseline.equal_work and workers > 1:
        raise OptionError(f"--equal-work has one batch at a time: use --workers 1, got {workers}")
    named = only_built_in(model, "bench", **asdict(network))
    model = named.network
    names = _policies_for(model, policy, device, equal_work=baseline.equal_work)
    plan = BenchPlan(
        names,
        offered.seconds,
        offered.requests,
        offered.rate,
        offered.load,
        baseline.padded_batch,
        seed,
        baseline.sweep,
    )
    options.check_writable(json)
    made_options = {"seed": seed, **named.options}
    options.check_model(model, **made_options)
    workload = make_workload(model, data=data or (), lengths=lengths, count=offered.requests, seed=seed)
    built = _made_for(workload, model, made_options)
    for cell in built.cells.values():
        cell.optimize = cell.optimize or planned
    width, layers = made_options.get("hidden") or options.width_of(model), made_options.get("layers", 1)
    dtype, threads = made_options.get("dtype", options.DTYPE), hardware.threads or default_threads(workers)
    setting = Setting(
        model, width, layers, dtype, threads, workers, workload.source, offered.load, offered.deadline_ms, device
    )
    results = measure_all(built, workload, setting, plan)
    _report(setting, results, json)


def _made_for(workload: Workload, model: str, model_options: dict[str, Any]) -> Model:
    """Return the built-in model with the sizes of the workload. model_options: its other options."""
    sizes = {"vocabulary_size": workload.vocabulary_size, **workload.options}
    for name in model_options.keys() & {name for name, size in sizes.items() if size is not None}:
        raise OptionError(f"{name} is that of the requests; leave it out")
    return options.make_model(model, **sizes, **model_options)


def _report(setting: Setting, results: list[Result], json: Path | None) -> None:
    """Print the results, and write them to `json` if it is given."""
    report.show(options.out(), setting, results)
    if json is not None:
        options.write_json(json, results)


def _policies_for(model: str, chosen: list[str] | None, device: str, *, equal_work: bool) -> tuple[str, ...]:
    """Return the policies to measure: those given, else the default and the model's best baseline."""
    if device != "cpu" and equal_work:
        raise OptionError(f"--equal-work compares baselines, which run on the CPU; got --device {device}")
    if model in UNPADDED and not equal_work and any(policy.partition(":")[0] == "padded" for policy in chosen or ()):
        raise OptionError(
            f"requests of different shapes cannot be padded; the baseline of {model} is --policy serial, or "
            "--equal-work"
        )
    if device != "cpu":
        return tuple(chosen or ("cellular",))
    names = tuple(chosen or (DEFAULT, "serial" if model in UNPADDED and not equal_work else "padded"))
    return with_equal_work(model, names) if equal_work else names
