"""A cell's operations as nodes to batch: their types, their operands, and the layout of their results."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import fx

from batchmaker.compile.dataflow import TracedCell
from batchmaker.compile.passes.nodes import is_linear, is_pointwise, is_view, operands, shape_of, width_of
from batchmaker_papers.planner.batches import Batch, Operand, Variable
from batchmaker_papers.planner.layout import Layout, plan_layout
from batchmaker_papers.planner.search import Schedule, fewest_batches

Kind: TypeAlias = Callable[[fx.Node], Hashable]
"""The type of an operation. Operations of one type can run as one."""


@dataclass(frozen=True, slots=True)
class Batched:
    """The batches of a cell.

    operations: in graph order. batches: of these, in the order in which they run. layout: its variables are the
    operations by number. proven: no schedule has fewer batches.
    """

    operations: tuple[fx.Node, ...]
    batches: tuple[tuple[fx.Node, ...], ...]
    layout: Layout
    proven: bool


def computing(cell: TracedCell) -> list[fx.Node]:
    """Return the nodes that compute or copy, in order: all calls except views."""
    return [node for node in cell.graph.nodes if node.op == "call_function" and not is_view(node)]


def batched(cell: TracedCell) -> Batched:
    """Choose batches and a layout. The graph should already be split gate by gate."""
    operations = computing(cell)
    number = {node: index for index, node in enumerate(operations)}
    schedule = schedule_of(operations, lambda node: _kind(cell, node, number))
    batches = [
        Batch(batch, _layout_operands(cell, [operations[index] for index in batch], number))
        for batch in schedule.batches
    ]
    layout = plan_layout([Variable(width_of(node) or 0) for node in operations], batches)
    chosen = tuple(tuple(operations[index] for index in batch) for batch in schedule.batches)
    return Batched(tuple(operations), chosen, layout, schedule.proven)


def schedule_of(operations: Sequence[fx.Node], kind: Kind) -> Schedule:
    """Return the fewest batches of operations of equal kinds."""
    number = {node: index for index, node in enumerate(operations)}
    kinds: dict[Hashable, int] = {}
    types = [kinds.setdefault(kind(node), len(kinds)) for node in operations]
    sources = [[number[source] for source in _computed_from(node, number)] for node in operations]
    return fewest_batches(types, sources)


def _computed_from(node: fx.Node, number: dict[fx.Node, int]) -> Iterator[fx.Node]:
    """Yield the operations whose results a node reads, directly or through views."""
    for source in node.all_input_nodes:
        if source in number:
            yield source
        else:
            yield from _computed_from(source, number)


def _kind(cell: TracedCell, node: fx.Node, number: dict[fx.Node, int]) -> Hashable:
    """Return a key that is equal for operations that can run as one; the node itself if it always runs alone.

    Layers are alike if they have the same input. Pointwise operations are alike if they do the same and have their own
    operands at the same arguments, as wide as the result; all other arguments must be equal. Outputs of the cell have
    types of their own, because they must not share memory with other values.
    """
    leaves = any(user.op == "output" for user in node.users)
    if is_linear(cell, node):
        return "layer", node.args[0], shape_of(node)[1], node.meta["val"].dtype, leaves
    if not is_pointwise(node):
        return node
    shown = fx.map_arg((node.args, node.kwargs), lambda source: _operand_kind(cell, source, node, number))
    return "pointwise", node.target, repr(shown), width_of(node), node.meta["val"].dtype, leaves


def _operand_kind(cell: TracedCell, operand: fx.Node, node: fx.Node, number: dict[fx.Node, int]) -> str:
    constant = cell.value(operand)
    if constant is not None and constant.dim() and constant.numel() == width_of(node):
        return f"a row of {constant.dtype}"
    if operand in number and width_of(operand) == width_of(node):
        return f"{operand.meta['val'].dtype}"
    return f"always {operand.name}"


def _layout_operands(cell: TracedCell, nodes: Sequence[fx.Node], number: dict[fx.Node, int]) -> tuple[Operand, ...]:
    """Return the operands of a batch that should be in order: the operands of pointwise operations."""
    if is_linear(cell, nodes[0]) or not is_pointwise(nodes[0]):
        return ()
    columns = zip(*(tuple(operands(node)) for node in nodes), strict=True)
    return tuple(
        Operand(tuple(number.get(operand) for operand in column))
        for column in columns
        if any(operand in number and width_of(operand) == width_of(nodes[0]) for operand in column)
    )
