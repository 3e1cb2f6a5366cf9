"""Kinds of nodes for the planner: layers, operations on single values, and views."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from batchmaker.compile.dataflow import TracedCell, TracedValue, is_symbolic

_aten = torch.ops.aten
_SPLITS = (_aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default)


_UNTAGGED = (_aten.hardswish.default, _aten.log_sigmoid.default)
"""Pointwise operations that torch does not mark as such."""


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    """Return the shape of a node's value, () if it is not a tensor. Sizes that depend on the batch are symbols."""
    value = node.meta.get("val")
    return value.shape if isinstance(value, TracedValue) else ()


def width_of(node: fx.Node) -> int | None:
    """Return the number of columns of a value [n, columns], None for a value of another form."""
    shape = shape_of(node)
    return shape[1] if len(shape) == 2 and isinstance(shape[1], int) else None


def like(node: fx.Node, *shape: Any) -> TracedValue:
    """Return a value of this shape with the dtype of the node's."""
    value: TracedValue = node.meta["val"]
    return value.like(*shape)


def is_linear(cell: TracedCell, node: fx.Node, dimensions: int = 2) -> bool:
    """Whether the node is a linear layer with constant weights over values with so many dimensions."""
    if node.target is not _aten.linear.default or cell.value(node.args[1]) is None:
        return False
    bias = node.args[2] if len(node.args) > 2 else None
    return (bias is None or cell.value(bias) is not None) and len(shape_of(node)) == dimensions


def is_pointwise(node: fx.Node) -> bool:
    """Whether the result is [n, columns], each number of it from those at the same place of the arguments."""
    return width_of(node) is not None and is_elementwise(node)


def is_elementwise(node: fx.Node) -> bool:
    """Whether each number of the result depends only on the numbers at the same place of the arguments."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.pointwise not in node.target.tags and node.target not in _UNTAGGED:
        return False
    return not is_view(node) and all(_is_plain(argument) for argument in (*node.args, *node.kwargs.values()))


def _is_plain(argument: Any) -> bool:
    return not isinstance(argument, list | tuple) and not (isinstance(argument, fx.Node) and is_symbolic(argument))


def is_view(node: fx.Node) -> bool:
    """Whether the node only points into its argument's memory, so that it costs nothing, or is a size."""
    if node.target is operator.getitem or is_symbolic(node):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    return any(r.alias_info is not None for r in schema.returns) and not schema.is_mutable


def operands(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the arguments of a pointwise node that are nodes, in order, with repeats."""
    for argument in (*node.args, *node.kwargs.values()):
        if isinstance(argument, fx.Node):
            yield argument


def columns(node: fx.Node) -> tuple[fx.Node, int, int]:
    """Follow slices of columns: the node is source[:, start:stop]. A node that is no slice is its own source."""
    width = width_of(node)
    if width is None:
        return node, 0, 0
    start, source = 0, node
    while (step := _slice(source)) is not None:
        source, start = step[0], start + step[1]
    return source, start, start + width


def put_together(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes, with a value in place of all the slices of its columns."""
    slices: dict[fx.Node, dict[tuple[int, int], fx.Node]] = {}
    for node in nodes:
        source, *place = columns(node)
        if source is not node:
            slices.setdefault(source, {})[place[0], place[1]] = node
    whole: dict[fx.Node, fx.Node] = {}
    for source, by_place in slices.items():
        places = sorted(by_place)
        ends = [0, *(stop for _, stop in places)]
        if ends[-1] == width_of(source) and all(start == end for (start, _), end in zip(places, ends, strict=False)):
            whole |= dict.fromkeys(by_place.values(), source)
    return list(dict.fromkeys(whole.get(node, node) for node in nodes))


def _slice(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Return the node whose columns this node is a slice of, and the first column; None if it is no such slice."""
    if node.target is operator.getitem:
        parts, index = node.args
        if not isinstance(parts, fx.Node) or parts.target not in _SPLITS or not isinstance(index, int):
            return None
        source: Any = parts.args[0]
        if len(parts.args) < 3 or parts.args[2] not in (1, -1) or width_of(source) is None:
            return None
        return source, sum(int(part.shape[1]) for part in parts.meta["val"][:index])
    if node.target in (_aten.narrow.default, _aten.slice.Tensor):
        source, dim, start = (*node.args, 0, 0)[:3]
        step = node.args[4] if len(node.args) > 4 else 1
        width = width_of(source)
        if dim not in (1, -1) or width is None or step != 1 or not isinstance(start, int | None):
            return None
        return source, min(start + width if start is not None and start < 0 else start or 0, width)
    return None
