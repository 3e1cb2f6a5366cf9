"""Times of a model's cells by batch size, measured on this machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, final

import torch
from rich.progress import track

from batchmaker.cli import options
from batchmaker.cli.bench.reference import times_s
from batchmaker.compile.binding import BoundCell
from batchmaker.compile.export import example_rows
from batchmaker.compile.run_form import run_form
from batchmaker.cost.latency import CellLatency
from batchmaker.engine.engine import Engine
from batchmaker.errors import DataError, ModelError
from batchmaker.graph.spec import CellType
from batchmaker.model.model import Model
from batchmaker.model.registry import CellRegistry
from batchmaker.model.unfolding import Unfolding
from batchmaker.policies.base import CellPolicy
from batchmaker.policies.cellular import BUDGET_MS, MOST_STEPS, CellularPolicy

STEPS_PER_TASK: Final = 5
"""Steps over which an input projection is shared, as in the engine's tasks."""


def bound_registry(model: Model) -> CellRegistry:
    """Return the model's cells bound to the inputs in its example request. ModelError without one."""
    if not model.examples:
        raise ModelError(f"{type(model).__name__} has no example_request to tell what its cells are given")
    registry = CellRegistry()
    for request in model.examples:
        Unfolding(model, registry, request).start()
    return registry


@final
class EveryStep(CellPolicy):
    """The policy `cellular`, with steps for every run, also where its cell has a form for whole runs."""

    name = "every-step"
    order: ClassVar[int] = CellularPolicy.order
    knows_steps_only: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__(MOST_STEPS, BUDGET_MS)


def used_registry(model: Model, requests: Sequence[tuple[str, Any]], threads: int) -> CellRegistry:
    """Return the cells that the model's examples and these requests use, bound: those of an engine that computes them.

    So cells are among them that are called only after a computed value is known. requests: each with the words that say
    where it comes from. Raises ModelError if an example fails, DataError if one of the requests does.
    """
    with Engine(model, EveryStep(), threads=threads, workers=1) as engine:
        answers = [(where, engine.submit(request, deadline_ms=math.inf)) for where, request in requests]
        for where, answer in answers:
            error = answer.exception()
            if error is not None:
                raise DataError(f"{where}: {error}") from error
        return engine.registry


def forms_in(registry: CellRegistry) -> list[str]:
    """Say of every bound cell in which form an engine runs it, and why in no faster one."""
    said = []
    for cell, bound in zip(registry.types, registry.bound, strict=True):
        num_step_inputs = registry.num_step_inputs.get(cell.type_id)
        form = run_form(bound if num_step_inputs is None else bound.split(num_step_inputs))
        said.append(f"an engine runs it as {form.form}{f' ({form.why})' if form.why else ''}")
    return said


def measured_cells(registry: CellRegistry, sizes: Sequence[int], seconds: float, threads: int) -> list[CellLatency]:
    """Return the time of every bound cell at every batch size. seconds: spent on each size of each cell."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            return [
                _measured(registry, cell, bound, sizes, seconds)
                for cell, bound in zip(registry.types, registry.bound, strict=True)
            ]
    finally:
        torch.set_num_threads(before)


def _measured(
    registry: CellRegistry, cell: CellType, bound: BoundCell, sizes: Sequence[int], seconds: float
) -> CellLatency:
    num_step_inputs = registry.num_step_inputs.get(cell.type_id)
    console = options.err()
    shown = track(sizes, cell.name, console=console, transient=True, disable=not console.is_terminal)
    times = [_step_s(bound, size, num_step_inputs, seconds) for size in shown]
    return CellLatency(cell.name, tuple(sizes), tuple(middle for middle, _ in times), tuple(high for _, high in times))


def _step_s(bound: BoundCell, size: int, num_step_inputs: int | None, seconds: float) -> tuple[float, float]:
    """Return median and 95th percentile of a step as in the engine.

    The state-independent part is computed for several steps at once.
    """
    if num_step_inputs is None:
        inputs = example_rows(bound.inputs, size, random=True)
        return _median_and_p95(lambda: bound.call(inputs), seconds)
    split = bound.split(num_step_inputs)
    state = example_rows(bound.inputs[num_step_inputs:], size, random=True)
    step_inputs = example_rows(bound.inputs[:num_step_inputs], size * STEPS_PER_TASK, random=True)
    hoisted = split.hoist(tuple(value[:size] for value in step_inputs))
    step = _median_and_p95(lambda: split.step(hoisted, state), seconds)
    if not num_step_inputs:
        return step
    shared = _median_and_p95(lambda: split.hoist(step_inputs), seconds / 4)
    return step[0] + shared[0] / STEPS_PER_TASK, step[1] + shared[1] / STEPS_PER_TASK


def _median_and_p95(call: Callable[[], Any], seconds: float) -> tuple[float, float]:
    times = times_s(call, seconds)
    return times[len(times) // 2], times[math.ceil(0.95 * len(times)) - 1]
