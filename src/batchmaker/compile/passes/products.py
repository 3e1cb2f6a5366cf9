"""Layers that share an input or are added up: parted, joined and merged, as whoever compiles a cell wants them.

W [a, b] = Wa a + Wb b. One product starts once, but the values must be copied together first, and layers that read a or
b alone cannot share it. Parted, each term can go its own way: a decoder that reads its last word next to a context
looks the word's term up in a table and may hoist the context's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from batchmaker.compile.dataflow import TracedCell, TracedValue
from batchmaker.compile.passes.nodes import is_linear, like, shape_of

_aten = torch.ops.aten

Product: TypeAlias = Callable[[Any, Sequence[Tensor], Sequence[Tensor | None]], fx.Node]
"""Makes the node that computes layers over one value in one product: value, weights, biases."""


def part_products(cell: TracedCell, apart: Callable[[fx.Node], bool] | None = None) -> None:
    """Rewrite layers over values side by side as sums of layers, one over each value.

    apart: then it is one layer over the values for which this holds and one over the others, where there are both and
    they are [n, columns].
    """
    for node in list(cell.graph.nodes):
        groups = _each_or_two(_side_by_side(cell, node, (2, 3) if apart is None else (2,)), apart)
        if len(groups) > 1:
            _part(cell, node, groups)
    cell.graph.eliminate_dead_code()


def _each_or_two(parts: Sequence[fx.Node], apart: Callable[[fx.Node], bool] | None) -> list[list[int]]:
    """Return the positions of what each term of a sum reads."""
    if apart is None:
        return [[index] for index in range(len(parts))]
    early = [apart(part) for part in parts]
    groups = [[index for index, is_early in enumerate(early) if is_early is wanted] for wanted in (False, True)]
    return [group for group in groups if group]


def _part(cell: TracedCell, node: fx.Node, groups: Sequence[Sequence[int]]) -> None:
    """Write a layer as a sum. The last term has the bias: it is what the others are added to."""
    parts = _side_by_side(cell, node)
    weight, bias = parameters(cell, node)
    columns = torch.split_with_sizes(weight, [int(shape_of(part)[-1]) for part in parts], 1)
    with cell.graph.inserting_before(node):
        total: fx.Node | None = None
        for number, group in enumerate(groups, 1):
            x = parts[group[0]] if len(group) == 1 else _concatenation(cell, [parts[index] for index in group])
            own = cell.constant(torch.cat([columns[index] for index in group], 1))
            own_bias = node.args[2] if bias is not None and number == len(groups) else None
            term = cell.graph.call_function(_aten.linear.default, (x, own, own_bias))
            term.meta = dict(node.meta)
            if total is not None:
                term = cell.graph.call_function(_aten.add.Tensor, (total, term))
                term.meta = dict(node.meta)
            total = term
    assert total is not None
    node.replace_all_uses_with(total)
    cell.graph.erase_node(node)


def join_products(cell: TracedCell) -> None:
    """Rewrite every sum of layers over different values as one layer over these side by side."""
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
        weights = [parameters(cell, layer)[0] for layer in (first, second)]
        with cell.graph.inserting_before(node):
            bias = _total_bias(cell, first, second)
            if inputs not in joined:
                joined[inputs] = _concatenation(cell, inputs)
            weight = cell.constant(torch.cat(weights, 1))
            made = cell.graph.call_function(_aten.linear.default, (joined[inputs], weight, bias))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
    cell.graph.eliminate_dead_code()


def flatten_products(cell: TracedCell) -> None:
    """Rewrite layers over values of several rows each, and sums of those, as layers over all rows: these can be
    packed."""
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


def merge_products(cell: TracedCell, product: Product | None = None) -> None:
    """Rewrite layers over one value as one product and slices of its result. product: makes it; a layer by default."""
    readers: dict[Any, list[fx.Node]] = {}
    for node in cell.graph.nodes:
        if is_linear(cell, node):
            readers.setdefault(node.args[0], []).append(node)
    for nodes in readers.values():
        if len(nodes) > 1:
            _merge(cell, nodes, product or (lambda *layers: _layer(cell, *layers)))
    cell.graph.eliminate_dead_code()


def _merge(cell: TracedCell, nodes: Sequence[fx.Node], product: Product) -> None:
    weights, biases = zip(*(parameters(cell, node) for node in nodes), strict=True)
    first = nodes[0]  # in graph order, so it stands before all who read any of them
    widths = [weight.shape[0] for weight in weights]
    with cell.graph.inserting_before(first):
        whole = product(first.args[0], weights, biases)
        whole.meta["val"] = like(first, shape_of(first)[0], sum(widths))
        for node, width, stop in zip(nodes, widths, accumulate(widths), strict=True):
            made = cell.graph.call_function(_aten.narrow.default, (whole, 1, stop - width, width))
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)


def _layer(cell: TracedCell, x: Any, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> fx.Node:
    weight, bias = beside(weights, biases)
    rows = cell.constant(weight), None if bias is None else cell.constant(bias)
    return cell.graph.call_function(_aten.linear.default, (x, *rows))


def parameters(cell: TracedCell, layer: fx.Node) -> tuple[Tensor, Tensor | None]:
    """Return the weight and the bias of a layer."""
    weight = cell.value(layer.args[1])
    assert weight is not None
    return weight, cell.value(layer.args[2]) if len(layer.args) > 2 else None


def beside(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Return the weight and the bias of the layer whose outputs are those of the given ones side by side."""
    if len(weights) == 1:
        return weights[0], biases[0]
    if all(bias is None for bias in biases):
        return torch.cat(list(weights)), None
    pairs = zip(weights, biases, strict=True)
    return torch.cat(list(weights)), torch.cat([w.new_zeros(w.shape[0]) if b is None else b for w, b in pairs])


def _side_by_side(cell: TracedCell, node: fx.Node, dimensions: Sequence[int] = (2, 3)) -> list[fx.Node]:
    """Return the values that a layer of so many dimensions reads side by side, [] if the node is no such layer."""
    if not any(is_linear(cell, node, each) for each in dimensions):
        return []
    x: Any = node.args[0]
    if x.target is not _aten.cat.default:
        return [x]
    parts: Any = x.args[0]
    last = len(shape_of(x)) - 1
    even = _one_dtype(parts) and all(len(shape_of(part)) == last + 1 for part in parts)
    return list(parts) if even and (x.args[1] if len(x.args) > 1 else 0) in (last, -1) else [x]


def _is_lone_layer(cell: TracedCell, value: Any) -> bool:
    return isinstance(value, fx.Node) and is_linear(cell, value) and len(value.users) == 1


def _one_dtype(nodes: Sequence[fx.Node]) -> bool:
    return len({node.meta["val"].dtype for node in nodes}) == 1


def _total_bias(cell: TracedCell, *layers: fx.Node) -> fx.Node | None:
    biases = [bias for _, bias in (parameters(cell, layer) for layer in layers) if bias is not None]
    if not biases:
        return None
    total = torch.stack([bias.to(torch.promote_types(bias.dtype, torch.float32)) for bias in biases]).sum(0)
    return cell.constant(total.to(biases[0].dtype))


def _concatenation(cell: TracedCell, parts: Sequence[fx.Node]) -> fx.Node:
    made = cell.graph.call_function(_aten.cat.default, (list(parts), 1))
    made.meta["val"] = like(parts[0], shape_of(parts[0])[0], sum(int(shape_of(part)[1]) for part in parts))
    return made


def _flat_like(node: fx.Node) -> TracedValue:
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
