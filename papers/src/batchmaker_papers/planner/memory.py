"""The copies of a cell that runs in batches: before, with variables in program order, and after, in the planned graph.

A memory kernel is one copy that gathers an operand of a batch, or scatters its results: ED-Batch's measure (table 2).
Before, every isomorphic batch needs one for each operand whose values are not consecutive in the batch's order, one for
each value that all its operations share, and one for scattered results; parameters are in the order of their use.
After, only the copies of the graph count. A value that layers share is not copied, because the layers became one
product.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

import torch
from torch import fx

from batchmaker.compile.dataflow import TracedCell, TracedValue
from batchmaker.compile.passes.atoms import gate_by_gate
from batchmaker.compile.passes.nodes import is_linear, is_pointwise, shape_of
from batchmaker_papers.planner.cell_nodes import computing, schedule_of

_aten = torch.ops.aten
_COPIES = (_aten.cat.default, _aten.stack.default, _aten.clone.default)


@dataclass(frozen=True, slots=True)
class CellMemory:
    """The work of one run of a cell at some batch size.

    calls: calls that compute; a batch is one. kernels: calls that copy. copied_bytes: bytes that these write.
    """

    calls: int
    kernels: int
    copied_bytes: int


def memory_before(cell: TracedCell, batch: int) -> CellMemory:
    """Return the work of isomorphic batches if every value is stored in program order."""
    gates = gate_by_gate(cell)
    place = {node: index for index, node in enumerate(_as_written(gates))}
    computed = computing(gates)
    schedule = schedule_of(computed, lambda node: _isomorphic(gates, node))
    kernels = copied = 0
    for numbers in schedule.batches:
        nodes = [computed[index] for index in numbers]
        gathered = [nodes, *_columns(gates, nodes)] if len(nodes) > 1 else []
        gathered = [column for column in gathered if not _lies_together(column, place)]
        if nodes[0].target in _COPIES:
            gathered = [[node] for node in nodes]
        kernels += len(gathered)
        copied += sum(_bytes(gates, node, batch) for column in gathered for node in column)
    return CellMemory(len(schedule.batches), kernels, copied)


def memory_after(graph: TracedCell, batch: int) -> CellMemory:
    """Return the copies of a graph's calls."""
    calls = [node for node in computing(graph) if node.target is not torch.unsafe_split_with_sizes]
    copies = [node for node in calls if node.target in _COPIES]
    copied = sum(_bytes(graph, node, batch) for node in copies)
    return CellMemory(len(calls) - len(copies), len(copies), copied)


def _as_written(cell: TracedCell) -> list[fx.Node]:
    """Return inputs, parameters and results in the order of the program."""
    inputs = cell.inputs
    seen: dict[fx.Node, None] = dict.fromkeys(inputs)
    for node in cell.graph.nodes:
        if node.op == "call_function":
            seen.update(dict.fromkeys(argument for argument in node.all_input_nodes if argument.op == "get_attr"))
            seen[node] = None
    return list(seen)


def _isomorphic(cell: TracedCell, node: fx.Node) -> Hashable:
    """Return a key that is equal for operations of one form and shape. Outputs of the cell have keys of their own."""
    leaves = any(user.op == "output" for user in node.users)
    if is_linear(cell, node) or is_linear(cell, node, 3):
        x: Any = node.args[0]
        return node.target, shape_of(node)[1:], shape_of(x)[1:], leaves
    if is_pointwise(node) or node.target is _aten.bmm.default:
        shapes = fx.map_arg((node.args, node.kwargs), lambda a: str(shape_of(a)[1:]) + a.op[:3])
        return node.target, repr(shapes), leaves
    return node


def _columns(cell: TracedCell, nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Return the operands of a batch: for each argument, the nodes that its operations read."""
    arguments = zip_longest(*((*node.args, *node.kwargs.values()) for node in nodes))
    columns = [[a for a in column if isinstance(a, fx.Node) and _is_large(cell, a)] for column in arguments]
    return [column for column in columns if len(column) > 1]


def _is_large(cell: TracedCell, node: fx.Node) -> bool:
    constant = cell.value(node)
    return constant is None or constant.dim() > 0


def _lies_together(column: Sequence[fx.Node], place: dict[fx.Node, int]) -> bool:
    places = [place.get(node) for node in column]
    return all(a is not None and b == a + 1 for a, b in pairwise(places))


def _bytes(cell: TracedCell, node: fx.Node, batch: int) -> int:
    """Return the bytes of a value at a batch size, of a constant at any."""
    value = cell.value(node)
    if value is not None:
        return value.numel() * value.itemsize
    row: TracedValue = node.meta["val"]
    return (
        batch
        * math.prod(size if isinstance(size, int) else size.at(batch) or 1 for size in row.shape[1:])
        * row.dtype.itemsize
    )
