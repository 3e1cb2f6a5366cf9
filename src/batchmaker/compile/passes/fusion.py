"""Fuses pointwise operations between matrix products into passes over the rows (see interpreter.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from operator import getitem
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor, fx

from batchmaker.compile.dataflow import CannotRewriteError, TracedCell, TracedValue, row_spec
from batchmaker.compile.passes.atoms import gate_by_gate
from batchmaker.compile.passes.cheaper import cheaper_sums
from batchmaker.compile.passes.interpreter import is_available
from batchmaker.compile.passes.nodes import (
    columns,
    is_elementwise,
    is_pointwise,
    is_view,
    like,
    operands,
    shape_of,
    width_of,
)
from batchmaker.compile.passes.open_steps import open_steps
from batchmaker.compile.passes.pointwise import Assembler, can_be_assembled, is_spread
from batchmaker.compile.projected_steps import GRUStep, LSTMStep, RNNStep

_FEWEST_SAVED: Final = 3
"""Calls that a pass must replace at least, beyond its results.

A pass starts in the time of two to three calls, and adding up a few values is no faster in it at any batch size.
Measured on one core. Slices count, because they are calls too.
"""
_CALLS_OF_A_STEP: Final = 5
_MOST_NUMBERS: Final = 1 << 20
"""Of a row: a constant is written out for all of it."""
_aten = torch.ops.aten
_DTYPES: Final = (torch.float32, torch.bfloat16)

_Shape: TypeAlias = tuple[int, ...]
_Stage: TypeAlias = tuple[int, int, str, torch.dtype]
"""The common properties of operations in one pass: number of other calls before it, width, rows and dtype."""


def run_in_passes(cell: TracedCell) -> None:
    """Rewrite the graph in place with passes, if that leaves fewer calls.

    Steps of recurrent cells are written out, pointwise operations that are read in slices are split, and all go into
    passes.
    """
    if not is_available():
        return
    made = gate_by_gate(open_steps(cell, layers=False), layers=False)
    cheaper_sums(made)
    fuse_pointwise(made)
    if _num_calls(made) < _num_calls(cell):
        cell.graph, cell.constants = made.graph, made.constants


def _num_calls(cell: TracedCell) -> int:
    """Count the calls that compute; the step of a recurrent cell counts as several."""
    calls = [node for node in cell.graph.nodes if node.op == "call_function" and not is_view(node)]
    return sum(_CALLS_OF_A_STEP if isinstance(node.target, LSTMStep | GRUStep | RNNStep) else 1 for node in calls)


def fuse_pointwise(cell: TracedCell, fewest_saved: int = _FEWEST_SAVED) -> None:
    """Replace pointwise operations by passes, in place.

    All operations on rows of one width and dtype between the same products become one pass. Values that are not
    pointwise, and their readers, stay the same.
    """
    passes = _passes(cell, fewest_saved) if is_available() else []
    if passes:
        cell.graph = _Rewriting(cell, passes).write()


def can_fuse(cell: TracedCell) -> bool:
    """Whether there is anything to fuse."""
    return is_available() and bool(_passes(cell, _FEWEST_SAVED))


def _passes(cell: TracedCell, fewest_saved: int) -> list[list[fx.Node]]:
    """Return the operations of each pass, in graph order."""
    stages = _stages(cell)
    passes: dict[_Stage, list[fx.Node]] = {}
    for node in cell.graph.nodes:
        if _can_be_fused(cell, node):
            stage = (stages[node], width_of(node) or 0, str(shape_of(node)[0]), node.meta["val"].dtype)
            passes.setdefault(stage, []).append(node)
    return [nodes for nodes in passes.values() if _calls_saved(nodes) >= fewest_saved]


def _calls_saved(nodes: Sequence[fx.Node]) -> int:
    """Count the operations and the slices that they read, minus the results."""
    read = {operand for node in nodes for operand in operands(node)}
    return len(nodes) + sum(columns(value)[0] is not value for value in read) - len(_results(nodes))


def _results(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes that nodes outside the pass read as well."""
    inside = set(nodes)
    return [node for node in nodes if any(user not in inside for user in node.users)]


def _stages(cell: TracedCell) -> dict[fx.Node, int]:
    """Return for each node the number of non-pointwise calls that must come before it, itself included.

    Views count too unless they are slices of columns, through which a pass reads; so within a stage rows only become
    narrower: what makes them wider counts, too. Otherwise two passes could wait for each other, or one for itself. An
    operation that needs only one value is moved to the stage of its first reader, but for one that makes it wider: then
    the value need not be written and read again.
    """
    stages: dict[fx.Node, int] = {}
    for node in cell.graph.nodes:
        before = max((stages[source] for source in node.all_input_nodes), default=0)
        works = node.op == "call_function" and not _can_be_fused(cell, node)
        stages[node] = before + ((works and not _is_slice(node)) or is_spread(node))
    for node in reversed(cell.graph.nodes):
        if not _can_be_fused(cell, node) or len([value for value in operands(node) if cell.value(value) is None]) > 1:
            continue
        if all(_can_be_fused(cell, user) and not is_spread(user) for user in node.users):
            stages[node] = max(stages[node], min((stages[user] for user in node.users), default=0))
    return stages


def _can_be_fused(cell: TracedCell, node: fx.Node) -> bool:
    """Whether the interpreter supports the operation and its arguments: rows as wide as the result, or constants."""
    if is_spread(node):
        return cell.value(node.args[0]) is None
    if not is_pointwise(node) or not can_be_assembled(node) or node.meta["val"].dtype not in _DTYPES:
        return False
    width, dtype = width_of(node), node.meta["val"].dtype
    for argument in operands(node):
        constant = cell.value(argument)
        if constant is not None:
            if constant.dtype is not dtype or constant.numel() not in (1, width) or _is_column(constant, width):
                return False
        elif not _is_alike(argument, node):
            return False
    return True


def _is_alike(value: fx.Node, node: fx.Node) -> bool:
    its, mine = value.meta["val"], node.meta["val"]
    return isinstance(its, TracedValue) and its.dtype is mine.dtype and str(shape_of(value)) == str(shape_of(node))


def _is_column(constant: Tensor, width: int | None) -> bool:
    """Whether a constant with `width` elements is not one row."""
    return constant.dim() > 0 and constant.numel() == width and constant.shape[-1] != width


def _is_slice(node: fx.Node) -> bool:
    """Whether the node is some of the columns of another, or an item or a size."""
    return is_view(node) and (width_of(node) is None or columns(node)[0] is not node)


@final
class _Rewriting:
    """Copies a graph node by node, each after its arguments, with one node for the operations of a pass."""

    def __init__(self, cell: TracedCell, passes: Sequence[Sequence[fx.Node]]) -> None:
        self.cell = cell
        self.made = fx.Graph()
        self._pass_of = {node: nodes for nodes in passes for node in nodes}
        self._copies: dict[fx.Node, fx.Node] = {}

    def write(self) -> fx.Graph:
        for node in self.cell.inputs:
            self._copies[node] = self.made.node_copy(node)
        self.made.output(tuple(self._copy(node) for node in self.cell.outputs))
        return self.made

    def _copy(self, node: fx.Node) -> fx.Node:
        if node not in self._copies:
            if node in self._pass_of:
                self._write_pass(self._pass_of[node])
            else:
                self._copies[node] = self.made.node_copy(node, self._copy)
        return self._copies[node]

    def _write_pass(self, nodes: Sequence[fx.Node]) -> None:
        inside, results = set(nodes), _results(nodes)
        assembler = Assembler(width_of(nodes[0]) or 0, nodes[0].meta["val"].dtype)
        arguments: dict[fx.Node, int] = {}
        for node in nodes:
            if is_spread(node):
                source, column, _ = columns(node.args[0])  # type: ignore[arg-type]
                assembler.spread(node, arguments.setdefault(source, len(arguments)), source, column)
                continue
            for operand in operands(node):
                if operand in inside or assembler.knows(operand):
                    continue
                constant = self.cell.value(operand)
                if constant is not None:
                    assembler.constant(operand, constant)
                    continue
                source, column, _ = columns(operand)
                assembler.argument(operand, arguments.setdefault(source, len(arguments)), source, column)
            assembler.operation(node)
        made = self.made.call_function(assembler.finished(results), tuple(self._copy(node) for node in arguments))
        if len(results) == 1:
            self._copies[results[0]] = made
            made.meta = dict(results[0].meta)
            return
        for index, node in enumerate(results):
            self._copies[node] = self.made.call_function(getitem, (made, index))
            self._copies[node].meta = dict(node.meta)


# --- rows of several dimensions --------------------------------------------------------------------------------------


def flatten_rows(cell: TracedCell) -> None:
    """Rewrite, in place, pointwise operations on rows of several dimensions, [n, ...], as operations on [n, numbers].

    An operand that is broadcast becomes a row as wide as the result, in which each number, or the whole row, is
    repeated. A pass reads such a row without writing it (see `pointwise.SPREADS`). Operations whose operands cannot be
    flat rows stay, and so do those on other numbers than float32.
    """
    if is_available() and cell.inputs:
        _Flattening(cell).write()
        cell.graph.eliminate_dead_code()


@final
class _Flattening:
    """Writes flat operations beside the others, whose readers get the flat results in their own shape."""

    def __init__(self, cell: TracedCell) -> None:
        self._cell, self._graph = cell, cell.graph
        self._rows_like = cell.inputs[0]
        self._flat: dict[fx.Node, fx.Node] = {}  # the flat value of each result

    def write(self) -> None:
        for node in list(self._graph.nodes):
            shape = self._shape(node)
            if shape is None or len(shape) < 2 or not self._can_be_flat(node, shape):
                continue
            with self._graph.inserting_before(node):
                operand: Any = partial(self._operand, shape)
                arguments, options = fx.map_arg(node.args, operand), fx.map_arg(node.kwargs, operand)
                made = self._call(node, math.prod(shape), node.target, *arguments, **options)
                rows = self._graph.call_function(_aten.reshape.default, (made, [-1, *shape]))
            rows.meta = dict(node.meta)
            node.replace_all_uses_with(rows)
            self._flat[rows] = made

    def _shape(self, node: fx.Node) -> _Shape | None:
        """Return the shape of rows of float32, one for each of the batch; None for any other value."""
        try:
            spec = row_spec(node, self._rows_like)
        except CannotRewriteError:
            return None
        return spec.shape if spec.dtype == "float32" else None

    def _can_be_flat(self, node: fx.Node, shape: _Shape) -> bool:
        if not (is_elementwise(node) and can_be_assembled(node) and 0 < math.prod(shape) <= _MOST_NUMBERS):
            return False
        for operand in operands(node):
            constant = self._cell.value(operand)
            if constant is not None:
                own = tuple(constant.shape)
                if constant.dtype is not torch.float32 or (len(own) > len(shape) and own[: -len(shape)] != (1,)):
                    return False
            elif _spread(self._shape(operand), shape) is None:
                return False
        return True

    def _operand(self, shape: _Shape, operand: fx.Node) -> fx.Node:
        """Return an operand of an operation on rows of this shape: a flat row as wide as they are, or one number."""
        constant = self._cell.value(operand)
        if constant is not None and constant.numel() == 1:
            return self._cell.constant(constant.reshape(()))
        if constant is not None:
            row = constant.reshape(constant.shape[-len(shape) :]).expand(shape)
            return self._cell.constant(row.reshape(-1).contiguous())
        spread = _spread(self._shape(operand), shape)
        assert spread is not None
        numbers, times, each = spread
        row_of = self._flat.get(operand) or self._one_row(operand, numbers)
        if times == 1:
            return row_of
        if each:
            return self._call(operand, numbers * times, _aten.repeat_interleave.self_int, row_of, times, -1)
        return self._call(operand, numbers * times, _aten.repeat.default, row_of, [1, times])

    def _one_row(self, operand: fx.Node, numbers: int) -> fx.Node:
        """Return a value as rows of one dimension. What got a new dimension is as it was before."""
        source: Any = operand.args[0] if operand.target is _aten.unsqueeze.default else operand
        if self._shape(source) == (numbers,):
            return source  # type: ignore[no-any-return]
        return self._call(operand, numbers, _aten.reshape.default, operand, [-1, numbers])

    def _call(self, rows: fx.Node, width: int, target: Any, *arguments: Any, **options: Any) -> fx.Node:
        """Return a call whose result is [n, width], with as many rows, and of the dtype, as those of a node."""
        made = self._graph.call_function(target, arguments, options)
        made.meta["val"] = like(rows, shape_of(rows)[0], width)
        return made


def _spread(own: _Shape | None, shape: _Shape) -> tuple[int, int, bool] | None:
    """Return how rows of one shape become rows of another: of how many numbers they are, how often these are repeated,
    and whether each by itself. None if they do not become these in this way."""
    if own is None or len(own) != len(shape):
        return None
    numbers, wanted = math.prod(own), math.prod(shape)
    for k in range(len(shape)):
        if own == shape[:k] + (1,) * (len(shape) - k):
            return numbers, wanted // numbers, True
        if own == (1,) * k + shape[k:]:
            return numbers, wanted // numbers, False
    return None
