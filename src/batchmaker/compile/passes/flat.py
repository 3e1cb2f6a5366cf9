"""Writes pointwise operations on rows of several dimensions as operations on flat rows, so that passes can take them.

An operand that is broadcast becomes a row as wide as the result, in which each number, or the whole row, is repeated. A
pass reads such a row without writing it (see `pointwise.SPREADS`).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import fx

from batchmaker.compile.dataflow import TracedCell, TracedValue
from batchmaker.compile.passes.interpreter import is_available
from batchmaker.compile.passes.nodes import is_elementwise, like, operands, shape_of
from batchmaker.compile.passes.pointwise import can_be_assembled

_aten = torch.ops.aten

_MOST_NUMBERS: Final = 1 << 20
"""Of a row: a constant is written out for all of it."""

_Shape: TypeAlias = tuple[int, ...]


def flatten_rows(cell: TracedCell) -> None:
    """Rewrite, in place, pointwise operations on rows of several dimensions, [n, ...], as operations on [n, numbers].

    Those whose operands cannot be flat rows stay.
    """
    if not is_available():
        return
    flat: dict[fx.Node, fx.Node] = {}  # the flat value of each result
    for node in list(cell.graph.nodes):
        shape = _rows_of(cell, node)
        if shape is None or len(shape) < 2 or not _can_be_flat(cell, node, shape):
            continue
        with cell.graph.inserting_before(node):
            to_flat: Any = partial(_flat, cell, shape, flat)
            arguments, options = fx.map_arg(node.args, to_flat), fx.map_arg(node.kwargs, to_flat)
            made = cell.graph.call_function(node.target, arguments, options)
            made.meta["val"] = like(node, shape_of(node)[0], math.prod(shape))
            rows = cell.graph.call_function(_aten.reshape.default, (made, [-1, *shape]))
            rows.meta = dict(node.meta)
        node.replace_all_uses_with(rows)
        flat[rows] = made
    cell.graph.eliminate_dead_code()


def _rows_of(cell: TracedCell, node: fx.Node) -> _Shape | None:
    """Return the shape of the rows of a batch of float32; None if the node is none."""
    value, inputs = node.meta.get("val"), cell.inputs
    if not isinstance(value, TracedValue) or value.dtype is not torch.float32 or not value.shape or not inputs:
        return None
    batch, *shape = value.shape
    if str(batch) != str(shape_of(inputs[0])[0]) or not all(isinstance(size, int) for size in shape):
        return None
    return tuple([int(str(size)) for size in shape])


def _can_be_flat(cell: TracedCell, node: fx.Node, shape: _Shape) -> bool:
    if not (is_elementwise(node) and can_be_assembled(node) and 0 < math.prod(shape) <= _MOST_NUMBERS):
        return False
    for operand in operands(node):
        constant = cell.value(operand)
        if constant is not None:
            own = tuple(constant.shape)
            if constant.dtype is not torch.float32 or (len(own) > len(shape) and own[: -len(shape)] != (1,)):
                return False
        elif _spread(_rows_of(cell, operand), shape) is None:
            return False
    return True


def _spread(own: _Shape | None, shape: _Shape) -> tuple[int, int, bool] | None:
    """Return how rows of one shape become rows of another: of how many numbers they are, how often these are repeated,
    and whether each by itself. None if they do not become these in this way."""
    if own is None or len(own) != len(shape):
        return None
    numbers, wanted = math.prod(own), math.prod(shape)
    for k in range(len(shape), -1, -1):
        if own == shape[:k] + (1,) * (len(shape) - k):
            return numbers, wanted // numbers, True
        if own == (1,) * k + shape[k:]:
            return numbers, wanted // numbers, False
    return None


def _flat(cell: TracedCell, shape: _Shape, flat: dict[fx.Node, fx.Node], operand: fx.Node) -> fx.Node:
    """Return an operand of an operation on rows of this shape as a flat row as wide as they are, or as one number."""
    constant, graph = cell.value(operand), cell.graph
    if constant is not None:
        if constant.numel() == 1:
            return cell.constant(constant.reshape(()))
        row = constant.reshape(constant.shape[-len(shape) :]).expand(shape)
        return cell.constant(row.reshape(-1).contiguous())
    spread = _spread(_rows_of(cell, operand), shape)
    assert spread is not None
    numbers, times, each = spread
    row_of = flat.get(operand) or _one_row(graph, operand, numbers)
    if times == 1:
        return row_of
    target: Any = _aten.repeat_interleave.self_int if each else _aten.repeat.default
    made = graph.call_function(target, (row_of, times, -1) if each else (row_of, [1, times]))
    made.meta["val"] = like(operand, shape_of(operand)[0], numbers * times)
    return made


def _one_row(graph: fx.Graph, operand: fx.Node, numbers: int) -> fx.Node:
    """Return a value as rows of one dimension. What was made of such rows by a new dimension is these rows."""
    source: Any = operand.args[0] if operand.target is _aten.unsqueeze.default else operand
    batch = shape_of(operand)[0]
    if len(shape_of(source)) == 2 and str(shape_of(source)[0]) == str(batch) and shape_of(source)[1] == numbers:
        return source  # type: ignore[no-any-return]
    made = graph.call_function(_aten.reshape.default, (operand, [-1, numbers]))
    made.meta["val"] = like(operand, batch, numbers)
    return made
