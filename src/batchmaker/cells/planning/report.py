"""What planning makes of a cell, in numbers: batches, copies, and time beside the module as it is written."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from batchmaker.cells.binding import bind
from batchmaker.cells.cell import Cell
from batchmaker.cells.dataflow import CannotRewriteError
from batchmaker.cells.export import example_rows, flat_module
from batchmaker.cells.lower import Packer
from batchmaker.cells.planning.measuring import times_in_turn_s
from batchmaker.cells.planning.memory import Memory, memory_after, memory_before
from batchmaker.cells.planning.plan import plan_cell
from batchmaker.cells.rewrite import cut_recurrent_cells, fold_constants, lift
from batchmaker.cells.split import compile_whole
from batchmaker.graph.spec import ValueSpec


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """Operations that run together. results: their names as they lie in memory."""

    operation: str
    results: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CellReport:
    """A cell before and after planning.

    num_operations: of the cell written gate by gate, 0 where it cannot be traced. batches: as planned. written: names
    of the results in the order of the program; planned: in that of memory; widths: columns of each, by name. before,
    after: what one run at the batch size copies. eager_us, bound_us, planned_us: medians of a call of the module as it
    is, of the cell bound without planning, and planned.
    """

    name: str
    note: str
    num_operations: int
    batches: tuple[PlannedBatch, ...]
    written: tuple[str, ...]
    planned: tuple[str, ...]
    widths: dict[str, int]
    before: Memory
    after: Memory
    eager_us: float
    bound_us: float
    planned_us: float


def report_on(cell: Cell, inputs: tuple[ValueSpec, ...], name: str, batch: int, seconds: float) -> CellReport:
    """Plan a cell for these inputs and measure it, for about so many seconds."""
    bound = bind(cell.program or cell.module, inputs, name=name, fold_bytes=0)
    rows = example_rows(inputs, batch, random=True)
    module = cell.module if cell.program is not None else flat_module(cell.module)
    nothing = Memory(0, 0, 0)
    try:
        graph = lift(cell.exported(inputs))
    except CannotRewriteError as error:
        eager, whole = _medians_us([lambda: module(*rows), lambda: bound.call(rows)], seconds)
        return CellReport(name, f"not planned: {error}", 0, (), (), (), {}, nothing, nothing, eager, whole, whole)
    before = memory_before(graph, batch)
    cut_recurrent_cells(graph)
    fold_constants(graph)
    plan = plan_cell(graph)
    program = compile_whole(plan.graph, Packer(reuse=True))
    calls: list[Callable[[], Any]] = [lambda: module(*rows), lambda: bound.call(rows), lambda: program(*rows)]
    times = _medians_us(calls, seconds)
    after = memory_after(plan.graph, batch)
    if plan.batched is None:
        return CellReport(name, plan.note, plan.num_operations, (), (), (), {}, before, after, *times)
    operations, layout = plan.batched.operations, plan.batched.layout
    names = _names(operations)
    batches = tuple(
        PlannedBatch(_operation(nodes[0]), tuple(names[nodes[position]] for position in placed.positions))
        for nodes, placed in zip(plan.batched.batches, layout.batches, strict=True)
    )
    planned = tuple(names[operations[index]] for index in layout.order)
    widths = {names[node]: _width(node) for node in operations}
    written = tuple(names.values())
    return CellReport(name, plan.note, plan.num_operations, batches, written, planned, widths, before, after, *times)


def _medians_us(calls: Sequence[Callable[[], Any]], seconds: float) -> list[float]:
    return [1e6 * statistics.median(times) for times in times_in_turn_s(calls, seconds)]


def _names(operations: Sequence[fx.Node]) -> dict[fx.Node, str]:
    """Return what to call each result: its operation, numbered from 1 in the order of the program."""
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
    return int(value.shape[-1]) if isinstance(value, Tensor) and value.dim() else 1
