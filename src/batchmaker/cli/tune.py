"""`batchmaker tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from batchmaker.cli import options
from batchmaker.cli.bench.report import commit
from batchmaker.errors import DeviceError
from batchmaker.kernels.cache import CacheDirectory, default_directory
from batchmaker.kernels.configuration import Problem, fallback_reason
from batchmaker.kernels.devices import DeviceSpec, modelled
from batchmaker.kernels.found import FoundDevice, found_device
from batchmaker.kernels.launch import prepared_call
from batchmaker.kernels.nvrtc import CachedCompiler, Nvrtc
from batchmaker.kernels.source import kernel_source
from batchmaker.kernels.template import CellKind, KernelConfig, KernelType
from batchmaker.kernels.timing import CudaTimer
from batchmaker.kernels.tuner import TOP, Timer, Trial, Tuning, agreement, tune
from batchmaker.lab.plots.tuning import TriedBar, draw_tuning

DEFAULT_ARCH = "sm_90"
"""The architecture to compile for without a device and --arch."""


def tune_command(
    model: Annotated[
        str,
        typer.Argument(
            help="lstm, gru (reset after the product, as in PyTorch), gru-before (the canonical GRU) or "
            "gru-before-once (the same with one exchange a step)."
        ),
    ],
    hidden: Annotated[int, typer.Option(min=1, help="Width of the state.")],
    batch: Annotated[int, typer.Option(min=1, help="Rows of a call.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    steps: Annotated[int, typer.Option(min=1, help="Steps of each row.")] = 100,
    top: Annotated[int, typer.Option(min=1, help="Configurations to compile, and to measure on a GPU.")] = TOP,
    arch: Annotated[
        str | None, typer.Option(help="Compile for this architecture: sm_80 or sm_90. Default: the GPU's, or sm_90.")
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="Keep kernels and winners here. Default: batchmaker in XDG_CACHE_HOME or ~/.cache."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write everything found here.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw predicted, and measured, times here.")] = None,
) -> None:
    """Choose how a recurrent layer's persistent kernel is laid onto a GPU.

    A cost model ranks all configurations that fit. The best few are compiled, and measured if there is a GPU of the
    architecture. The winner is kept for the engine. Without a GPU the compiler still reports registers and spills.
    Needs the extra: pip install 'batchmaker\\[cuda]'. papers/docs/kernels.md explains the columns.

    [bold]Examples[/bold]

    batchmaker tune lstm --hidden 1024 --batch 64 --dtype bfloat16 --png tuning.png

    batchmaker tune gru --hidden 256 --batch 10 --arch sm_90 --json tuning.json
    """
    options.check_writable(json)
    options.check_picture(png)
    problem = Problem(
        cell=cast(CellKind, model), dtype=cast(KernelType, dtype), hidden=hidden, batch=batch, steps=steps
    )
    device, wanted, timer, why_not_measured = _target(arch)
    directory = CacheDirectory(cache or default_directory())
    compiler = CachedCompiler(Nvrtc(), directory)
    if why_not_measured:
        options.err().print(f"nothing is measured: {why_not_measured}", style="yellow", markup=False, soft_wrap=True)
    with _progress() as bar:
        task = bar.add_task("configurations", total=None)

        def done(trial: Trial) -> None:
            bar.update(task, total=top, advance=1)

        tuning = tune(
            problem, device, kernel_source(), compiler, arch=wanted, top=top, timer=timer, cache=directory, done=done
        )
    _show(tuning)
    if json is not None:
        result = _json(tuning, why_not_measured)
        options.write_json(json, {**result, "compiler": f"NVRTC {compiler.version}", "commit": commit()})
    if png is not None and tuning.trials:
        draw_tuning(png, [_bar(tuning, trial) for trial in tuning.trials], _about(tuning))


def _target(arch: str | None) -> tuple[DeviceSpec, str, Timer | None, str | None]:
    """Return the cost model's device, the architecture, and the timer, or the reason why nothing is measured."""
    try:
        gpu: FoundDevice | None = found_device()
        missing = None
    except DeviceError as error:
        gpu, missing = None, str(error)
    if gpu is not None and arch in (None, gpu.arch):
        return gpu.device, gpu.arch, CudaTimer(gpu, prepared_call), None
    if gpu is not None:
        missing = f"--arch is {arch}, this GPU ({gpu.identity.name}) is {gpu.arch}"
    elif arch is None:
        missing = f"{missing}; compiling for {DEFAULT_ARCH}, give --arch for another"
    wanted = arch or DEFAULT_ARCH
    return modelled(wanted), wanted, None, missing


def _progress() -> Progress:
    console = options.err()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _about(tuning: Tuning) -> str:
    where = tuning.measured_on.name if tuning.measured_on else f"{tuning.device.name}, predicted"
    return f"{tuning.problem}, {tuning.problem.steps} steps, {tuning.arch} ({where})"


def _show(tuning: Tuning) -> None:
    console = options.out()
    if not tuning.trials:
        console.print(fallback_reason(tuning.problem, tuning.device), markup=False, soft_wrap=True)
        return
    table = Table(title=_about(tuning), title_style="bold")
    measured = ("ms", "rank") if tuning.measured_on else ()
    columns = ("rank", "predicted ms", "regime", "tile", "groups", "at once", "shared", "blocks", "registers", "spills")
    for name in (*columns, *measured):
        table.add_column(name, justify="left" if name == "regime" else "right")
    for trial in tuning.trials:
        table.add_row(*_cells(tuning, trial), style="bold green" if trial is tuning.chosen else "")
    console.print(table)
    for trial in tuning.trials:
        if trial.failure:
            console.print(f"{trial.rank}: {trial.failure}", style="red", markup=False, soft_wrap=True)
    console.print(_conclusion(tuning), markup=False, soft_wrap=True)


def _cells(tuning: Tuning, trial: Trial) -> list[str]:
    config = trial.config
    cells = [
        str(trial.rank),
        f"{1e3 * trial.cost.seconds:.3f}",
        config.regime,
        *_layout(config),
        str(config.row_step),
        f"{config.shared_steps}/{config.steps}",
        str(config.blocks_per_tile),
        _or_dash(trial.registers),
        _or_dash(trial.spill_bytes),
    ]
    if tuning.measured_on:
        cells.append("-" if trial.measured_s is None else f"{1e3 * trial.measured_s:.3f}")
        cells.append(_or_dash(tuning.measured_rank(trial)))
    return cells


def _layout(config: KernelConfig) -> tuple[str, str]:
    """Return tile width by height, and groups by their size."""
    return f"{config.tile_width} x {config.tile_height}", f"{config.groups} x {config.group_size}"


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)


def _conclusion(tuning: Tuning) -> str:
    chosen = tuning.chosen
    if chosen is None:
        return "none of them can be used"
    fit = f"{tuning.num_candidates:,} configurations fit; number {chosen.rank} by the model"
    if tuning.measured_on is None:
        return f"{fit} is taken: it is the first that does not spill." if not chosen.spill_bytes else f"{fit} is taken."
    order = agreement(tuning.trials)
    text = "" if order is None else f" Model and measurement agree with Kendall's tau {order:+.2f}."
    num_measured = sum(trial.measured_s is not None for trial in tuning.trials)
    return f"{fit} is the fastest of {num_measured} measured.{text}"


def _json(tuning: Tuning, why_not_measured: str | None) -> dict[str, Any]:
    problem, on = tuning.problem, tuning.measured_on
    return {
        "model": problem.cell,
        "hidden": problem.hidden,
        "batch": problem.batch,
        "dtype": problem.dtype,
        "steps": problem.steps,
        "arch": tuning.arch,
        "modelled": tuning.device.name,
        "measured_on": None if on is None else {"name": on.name, "sms": on.sms, "driver": on.driver},
        "why_not_measured": why_not_measured,
        "num_candidates": tuning.num_candidates,
        "chosen": tuning.chosen.rank if tuning.chosen else None,
        "fallback": None if tuning.trials else fallback_reason(problem, tuning.device),
        "configurations": [_json_row(tuning, trial) for trial in tuning.trials],
    }


def _json_row(tuning: Tuning, trial: Trial) -> dict[str, Any]:
    config, step = trial.config, trial.cost.step
    names = ("regime", "tile_width", "tile_height", "groups", "group_size", "row_step", "shared_steps")
    return {
        "rank": trial.rank,
        **{name: getattr(config, name) for name in names},
        "blocks_per_tile": config.blocks_per_tile,
        "threads": config.num_threads,
        "weight_registers": config.weight_registers,
        "shared_bytes": config.shared_bytes,
        "name_expression": config.name_expression,
        "registers": trial.registers,
        "spill_bytes": trial.spill_bytes,
        "predicted_ms": 1e3 * trial.cost.seconds,
        "tiles_in_turn": trial.cost.tiles_in_turn,
        "step_clocks": {name: round(getattr(step, name), 1) for name in ("multiply", "gates", "exchange", "input")},
        "measured_ms": None if trial.measured_s is None else 1e3 * trial.measured_s,
        "measured_rank": tuning.measured_rank(trial),
        "failure": trial.failure,
    }


def _bar(tuning: Tuning, trial: Trial) -> TriedBar:
    config, cost = trial.config, trial.cost
    whole = 1e3 * tuning.problem.steps * cost.tiles_in_turn / tuning.device.clock_hz
    phases = {name: whole * getattr(cost.step, name) for name in ("multiply", "gates", "exchange", "input")}
    label = f"{trial.rank}: {config.regime} {', '.join(_layout(config))}"
    measured_ms = None if trial.measured_s is None else 1e3 * trial.measured_s
    return TriedBar(label, {"start": 1e3 * cost.start_s, **phases}, measured_ms)
