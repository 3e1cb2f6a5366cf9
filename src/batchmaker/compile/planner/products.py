"""Layers over concatenated values: one product over all of them, or a sum of products over each.

W [a, b] = Wa a + Wb b. One product starts once, but the values must be copied together first, and layers that read a or
b alone cannot share it. The faster form is found by measuring.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx

from batchmaker.compile.dataflow import TracedCell
from batchmaker.compile.passes.nodes import is_linear, like, shape_of

_aten = torch.ops.aten


def part_products(cell: TracedCell) -> None:
    """Rewrite every layer over concatenated values as a sum."""
    for node in list(cell.graph.nodes):
        parts = _side_by_side(cell, node)
        if len(parts) < 2:
            continue
        weight, bias = cell.value(node.args[1]), node.args[2] if len(node.args) > 2 else None
        assert weight is not None
        widths = [int(shape_of(part)[-1]) for part in parts]
        with cell.graph.inserting_before(node):
            total = None
            biases = [None] * (len(parts) - 1) + [bias]  # the others are added to the last one
            for part, own, own_bias in zip(parts, torch.split_with_sizes(weight, widths, 1), biases, strict=True):
                arguments = (part, cell.constant(own.contiguous()), own_bias)
                term = cell.graph.call_function(_aten.linear.default, arguments)
                term.meta = dict(node.meta)
                if total is not None:
                    term = cell.graph.call_function(_aten.add.Tensor, (total, term))
                    term.meta = dict(node.meta)
                total = term
        node.replace_all_uses_with(total)
        cell.graph.erase_node(node)
    cell.graph.eliminate_dead_code()


def join_products(cell: TracedCell) -> None:
    """Rewrite every sum of layers over different values as one layer over the concatenated values."""
    joined: dict[tuple[fx.Node, ...], fx.Node] = {}
    for node in list(cell.graph.nodes):
        if node.target is not _aten.add.Tensor or node.kwargs:
            continue
        first, second = node.args[:2]
        if first is second or not all(_is_lone_layer(cell, value) for value in (first, second)):
            continue
        assert isinstance(first, fx.Node)
        assert isinstance(second, fx.Node)
        inputs = (*_side_by_side(cell, first), *_side_by_side(cell, second))
        if len(set(inputs)) < len(inputs) or not _one_dtype(inputs):
            continue
        weights = [cell.value(layer.args[1]) for layer in (first, second)]
        with cell.graph.inserting_before(node):
            bias = _total_bias(cell, first, second)
            if inputs not in joined:
                joined[inputs] = _concatenation(cell, inputs)
            weight = cell.constant(torch.cat([w for w in weights if w is not None], 1))
            made = cell.graph.call_function(_aten.linear.default, (joined[inputs], weight, bias))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
    cell.graph.eliminate_dead_code()


def flatten_products(cell: TracedCell) -> None:
    """Rewrite layers over values of several rows each, and sums of them, as layers over all rows.

    These can be packed.
    """
    for node in list(cell.graph.nodes):
        if len(shape_of(node)) != 3 or not isinstance(shape_of(node)[1], int):
            continue
        if is_linear(cell, node, dimensions=3):
            x: Any = node.args[0]
            with cell.graph.inserting_before(node):
                rows = _flat(cell, x)
                made = cell.graph.call_function(_aten.linear.default, (rows, *node.args[1:]))
                made.meta["val"] = _flat_like(node)
            _unflatten(cell, node, made)
        elif node.target is _aten.add.Tensor and not node.kwargs and all(map(_is_unflattened, node.args[:2])):
            flat = tuple(argument.args[0] for argument in node.args[:2])
            with cell.graph.inserting_before(node):
                made = cell.graph.call_function(_aten.add.Tensor, flat)
                made.meta["val"] = _flat_like(node)
            _unflatten(cell, node, made)
    cell.graph.eliminate_dead_code()


def merge_products(cell: TracedCell) -> None:
    """Rewrite layers over one value as one layer and slices of its result."""
    readers: dict[Any, list[fx.Node]] = {}
    for node in cell.graph.nodes:
        if is_linear(cell, node):
            readers.setdefault((node.args[0], node.meta["val"].dtype), []).append(node)
    for nodes in readers.values():
        if len(nodes) > 1:
            _merge(cell, nodes)
    cell.graph.eliminate_dead_code()


def _merge(cell: TracedCell, nodes: Sequence[fx.Node]) -> None:
    parts = [[cell.value(a) for a in (*node.args[1:], None)[:2]] for node in nodes]
    weights = [weight for weight, _ in parts if weight is not None]
    biases = [bias for _, bias in parts]
    first, widths = nodes[0], [int(shape_of(node)[1]) for node in nodes]
    with cell.graph.inserting_before(first):
        bias = None
        if any(bias is not None for bias in biases):
            filled = [w.new_zeros(w.shape[0]) if b is None else b for w, b in zip(weights, biases, strict=True)]
            bias = cell.constant(torch.cat(filled))
        weight = cell.constant(torch.cat(weights))
        whole = cell.graph.call_function(_aten.linear.default, (first.args[0], weight, bias))
        whole.meta["val"] = like(first, shape_of(first)[0], sum(widths))
        for node, width, stop in zip(nodes, widths, accumulate(widths), strict=True):
            made = cell.graph.call_function(_aten.narrow.default, (whole, 1, stop - width, width))
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)


def _side_by_side(cell: TracedCell, node: fx.Node) -> list[fx.Node]:
    """Return the concatenated values that a layer reads, [] if the node is not a layer."""
    if not (is_linear(cell, node, 2) or is_linear(cell, node, 3)):
        return []
    x: Any = node.args[0]
    if x.target is not _aten.cat.default:
        return [x]
    parts: Any = x.args[0]
    last = len(shape_of(x)) - 1
    return list(parts) if (x.args[1] if len(x.args) > 1 else 0) in (last, -1) and _one_dtype(parts) else [x]


def _is_lone_layer(cell: TracedCell, value: Any) -> bool:
    return isinstance(value, fx.Node) and is_linear(cell, value) and len(value.users) == 1


def _one_dtype(nodes: Sequence[fx.Node]) -> bool:
    return len({node.meta["val"].dtype for node in nodes}) == 1


def _total_bias(cell: TracedCell, *layers: fx.Node) -> fx.Node | None:
    biases = [cell.value(layer.args[2]) for layer in layers if len(layer.args) > 2 and layer.args[2] is not None]
    known: list[Tensor] = [bias for bias in biases if bias is not None]
    if not known:
        return None
    total = torch.stack([bias.to(torch.promote_types(bias.dtype, torch.float32)) for bias in known]).sum(0)
    return cell.constant(total.to(known[0].dtype))


def _concatenation(cell: TracedCell, parts: Sequence[fx.Node]) -> fx.Node:
    made = cell.graph.call_function(_aten.cat.default, (list(parts), 1))
    made.meta["val"] = like(parts[0], shape_of(parts[0])[0], sum(int(shape_of(part)[1]) for part in parts))
    return made


def _flat_like(node: fx.Node) -> Tensor:
    batch, rows, width = shape_of(node)
    return like(node, batch * rows, width)


def _flat(cell: TracedCell, node: fx.Node) -> fx.Node:
    made = cell.graph.call_function(_aten.flatten.using_ints, (node, 0, 1))
    made.meta["val"] = _flat_like(node)
    return made


def _unflatten(cell: TracedCell, node: fx.Node, flat: fx.Node) -> None:
    with cell.graph.inserting_before(node):
        made = cell.graph.call_function(_aten.unflatten.int, (flat, 0, (-1, shape_of(node)[1])))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    cell.graph.erase_node(node)


def _is_unflattened(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.target is _aten.unflatten.int and len(value.users) == 1
