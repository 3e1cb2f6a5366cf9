"""The effect of planning on a cell, in numbers: batches, copies, and times beside the unplanned module."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import truediv
from typing import Any, Final, final

import torch
from torch import Tensor, fx

from batchmaker.compile.binding import bind
from batchmaker.compile.dataflow import CannotRewriteError, TracedCell, TracedValue
from batchmaker.compile.export import example_rows, flat_module
from batchmaker.compile.linear import Linear
from batchmaker.compile.program import compile_program
from batchmaker.compile.rewrite import cut_recurrent_cells, fold_constants, lift
from batchmaker.compile.split import compile_whole
from batchmaker.graph.spec import ValueSpec
from batchmaker.model.cell import Cell
from batchmaker_papers.planner.memory import CellMemory, memory_after, memory_before
from batchmaker_papers.planner.plan import plan_cell
from batchmaker_papers.planner.timing import times_in_turn_s

_aten = torch.ops.aten
_PRODUCTS: Final = (_aten.linear.default, _aten.bmm.default, _aten.matmul.default, _aten.mm.default)


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """Operations that run together. results: their names in memory order."""

    operation: str
    results: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CellReport:
    """A cell before and after planning.

    - num_operations: of the cell written gate by gate, 0 if it cannot be traced.
    - batches: as planned.
    - written: names of the results in program order; planned: in memory order; widths: columns of each, by name.
    - before, after: the work of one run at the batch size.
    - eager_us, bound_us, planned_us: medians of a call of the module itself, of the cell bound without planning, and
      planned.
    - over_eager, over_bound: speed-ups of the planned cell, as medians of the ratios round by round, so a slow phase of
      the machine affects both sides.
    - products_us: the time of the planned call's matrix products; 0 for a cell that cannot be traced.
    """

    name: str
    note: str
    num_operations: int
    batches: tuple[PlannedBatch, ...]
    written: tuple[str, ...]
    planned: tuple[str, ...]
    widths: dict[str, int]
    before: CellMemory
    after: CellMemory
    eager_us: float
    bound_us: float
    planned_us: float
    over_eager: float
    over_bound: float
    products_us: float


def report_on(cell: Cell, inputs: tuple[ValueSpec, ...], name: str, batch: int, seconds: float) -> CellReport:
    """Plan a cell for these inputs and measure it, for about so many seconds."""
    source = cell.source(inputs)
    bound = bind(source, inputs, name=name, fold_bytes=0)
    rows = example_rows(inputs, batch, random=True)
    module = flat_module(source) if isinstance(source, torch.nn.Module) else cell.module_for(inputs)
    nothing = CellMemory(0, 0, 0)
    try:
        graph = lift(cell.exported(inputs))
    except CannotRewriteError as error:
        calls: list[Callable[[], Any]] = [lambda: module(*rows), lambda: bound.call(rows), lambda: bound.call(rows)]
        times = [*_compared(calls, seconds), 0.0]
        return CellReport(name, f"not planned: {error}", 0, (), (), (), {}, nothing, nothing, *times)
    before = memory_before(graph, batch)
    cut_recurrent_cells(graph)
    fold_constants(graph)
    plan = plan_cell(graph)
    way = plan.way
    program = compile_whole(way.graph, way.packer())
    times = _compared([lambda: module(*rows), lambda: bound.call(rows), lambda: program(*rows)], seconds)
    lowered = way.lowered()
    after = memory_after(lowered, batch)
    measured = [*times, _products_us(lowered, rows, seconds / 8)]
    if way.batched is None:
        return CellReport(name, plan.note, 0, (), (), (), {}, before, after, *measured)
    operations, layout = way.batched.operations, way.batched.layout
    names = _names(operations)
    batches = tuple(
        PlannedBatch(_operation(nodes[0]), tuple(names[nodes[position]] for position in placed.positions))
        for nodes, placed in zip(way.batched.batches, layout.batches, strict=True)
    )
    planned = tuple(names[operations[index]] for index in layout.order)
    widths = {names[node]: _width(node) for node in operations}
    written = tuple(names.values())
    return CellReport(name, plan.note, way.num_operations, batches, written, planned, widths, before, after, *measured)


def _compared(calls: Sequence[Callable[[], Any]], seconds: float) -> list[float]:
    """Return the medians of the calls in microseconds, and the speed-up of the last over each before it."""
    measured = times_in_turn_s(calls, seconds)
    *others, last = measured
    ratios = [statistics.median(map(truediv, other, last)) for other in others]
    return [*(1e6 * statistics.median(times) for times in measured), *ratios]


@final
class _Timed:
    """A call that sums up its times. seconds: so far."""

    __name__ = "timed"

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.seconds = 0.0

    def __call__(self, *arguments: Any) -> Any:
        begin_s = time.perf_counter()
        made = self.call(*arguments)
        self.seconds += time.perf_counter() - begin_s
        return made


def _products_us(lowered: TracedCell, rows: tuple[Tensor, ...], seconds: float) -> float:
    """Return the median over calls of the microseconds spent in matrix products. Changes the graph."""
    timed: list[_Timed] = []
    for node in lowered.graph.nodes:
        target: Any = node.target
        if target in _PRODUCTS or isinstance(getattr(target, "__self__", target), Linear):
            node.target = _Timed(target)
            timed.append(node.target)
    program = compile_program(lowered)
    spent: list[float] = [0.0]

    def call() -> None:
        program(*rows)
        spent.append(sum(each.seconds for each in timed))

    times_in_turn_s([call], seconds)
    return 1e6 * statistics.median([after - before for before, after in pairwise(spent)])


def _names(operations: Sequence[fx.Node]) -> dict[fx.Node, str]:
    """Return a name for each result: its operation, numbered from 1 in program order."""
    seen: Counter[str] = Counter()
    names = {}
    for node in operations:
        seen[_operation(node)] += 1
        names[node] = f"{_operation(node)} {seen[_operation(node)]}"
    return names


def _operation(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).split(".")[0]


def _width(node: fx.Node) -> int:
    value: Any = node.meta.get("val")
    width = value.shape[-1] if isinstance(value, TracedValue) and value.dim() else 1
    return width if isinstance(width, int) else 1
