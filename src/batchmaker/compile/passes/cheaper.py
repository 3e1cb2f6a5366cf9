"""Cheaper operations with the same results, before batches are chosen.

tanh costs five times as much as sigmoid on a CPU, and tanh(x) = 2 sigmoid(2x) - 1 (see compile/projected_steps.py).
Doubling is exact, so it goes into the weights before the gate; the gate is then one more sigmoid and can share their
batch. Sums of products, and means with complementary weights, become one operation each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from batchmaker.compile.dataflow import TracedCell, TracedValue
from batchmaker.compile.passes.nodes import is_linear, operands, shape_of, width_of
from batchmaker.compile.projected_steps import SMALL_NUMEL

_aten = torch.ops.aten
_EXACT = (torch.float32, torch.float64)
_MINUS_ONE = {dtype: torch.tensor(-1.0, dtype=dtype) for dtype in _EXACT}


def cheaper(cell: TracedCell) -> None:
    """Rewrite the graph in place."""
    for node in list(cell.graph.nodes):
        if node.target is _aten.tanh.default and width_of(node) is not None and node.meta["val"].dtype in _EXACT:
            _rewrite_tanh(cell, node)
    cheaper_sums(cell)


def cheaper_sums(cell: TracedCell) -> None:
    """Rewrite sums of products and means in place."""
    for node in list(cell.graph.nodes):
        if node.target is _aten.add.Tensor and not _as_lerp(cell, node):
            _as_addcmul(cell, node)
        elif node.target in (_aten.mul.Tensor, _aten.div.Tensor):
            _as_mean(cell, node)
    cell.graph.eliminate_dead_code()


def tanh(x: Tensor) -> Tensor:
    """Return tanh of float32 or float64; the absolute error stays below 2e-7."""
    if x.numel() < SMALL_NUMEL:
        return x.tanh()
    s = torch.add(x, x).sigmoid_()
    return torch.add(_MINUS_ONE[x.dtype], s, alpha=2, out=s)


def _rewrite_tanh(cell: TracedCell, node: fx.Node) -> None:
    x: Any = node.args[0]
    layers = _doubled_by(cell, x)
    with cell.graph.inserting_before(node):
        if layers is None:
            made = cell.graph.call_function(tanh, (x,))
        else:
            for layer in layers:
                _double(cell, layer)
            gate = cell.graph.call_function(_aten.sigmoid.default, (x,))
            gate.meta = dict(node.meta)
            minus_one = cell.constant(_MINUS_ONE[node.meta["val"].dtype])
            made = cell.graph.call_function(_aten.add.Tensor, (minus_one, gate), {"alpha": 2})
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    cell.graph.erase_node(node)


def _doubled_by(cell: TracedCell, node: Any) -> list[fx.Node] | None:
    """Return the layers whose weights to double so that the node's value doubles; None if there are none.

    The value must be read once.
    """
    if not isinstance(node, fx.Node) or len(node.users) != 1:
        return None
    if is_linear(cell, node):
        return [node]
    if node.target in (_aten.add.Tensor, _aten.sub.Tensor):
        first, second = (_doubled_by(cell, argument) for argument in node.args[:2])
        return None if first is None or second is None or first == second else [*first, *second]
    if node.target is _aten.mul.Tensor:
        candidates = (_doubled_by(cell, argument) for argument in node.args[:2])
        return next((layers for layers in candidates if layers is not None), None)
    return None


def _double(cell: TracedCell, layer: fx.Node) -> None:
    weights = [cell.value(argument) for argument in layer.args[1:3]]
    with cell.graph.inserting_before(layer):
        layer.args = (layer.args[0], *(None if weight is None else cell.constant(2 * weight) for weight in weights))


def _as_lerp(cell: TracedCell, node: fx.Node) -> bool:
    """Rewrite (1 - z) a + z b as a + z (b - a), if the node is such a sum."""
    for one, other in (node.args[:2], node.args[1::-1]):
        if node.kwargs or not (_is_product(one, node) and _is_product(other, node)):
            continue
        for rest, a in (one.args[:2], one.args[1::-1]):  # type: ignore[union-attr]
            if not isinstance(rest, fx.Node) or rest.target is not _aten.rsub.Scalar or rest.args[1:] != (1,):
                continue
            z = rest.args[0]
            if z in other.args[:2]:  # type: ignore[union-attr]
                b = other.args[1] if other.args[0] is z else other.args[0]  # type: ignore[union-attr]
                if all(_alike(value, node) for value in (z, a, b)):
                    _replace(cell, node, _aten.lerp.Tensor, (a, b, z))
                    return True
    return False


def _as_addcmul(cell: TracedCell, node: fx.Node) -> None:
    """Rewrite c + a b as one operation."""
    if node.kwargs:
        return
    for product, c in (node.args[1::-1], node.args[:2]):
        if _is_product(product, node) and _alike(c, node):
            a, b = product.args[:2]  # type: ignore[union-attr]
            if _alike(a, node) and _alike(b, node):
                _replace(cell, node, _aten.addcmul.default, (c, a, b))
                return


def _as_mean(cell: TracedCell, node: fx.Node) -> None:
    """Rewrite (a + b) / 2 as one operation."""
    total, factor = node.args[:2]
    if not isinstance(total, fx.Node) or total.target is not _aten.add.Tensor or total.kwargs or len(total.users) > 1:
        return
    if factor == (0.5 if node.target is _aten.mul.Tensor else 2) and not node.kwargs:
        a, b = total.args[:2]
        if _alike(a, node) and _alike(b, node) and node.meta["val"].dtype.is_floating_point:
            _replace(cell, node, _aten.lerp.Scalar, (a, b, 0.5))


def _is_product(value: Any, reader: fx.Node) -> bool:
    """Whether the value is a product and this node is its only reader, once."""
    if not isinstance(value, fx.Node) or value.target is not _aten.mul.Tensor or len(value.users) != 1:
        return False
    return list(operands(reader)).count(value) == 1


def _alike(value: Any, node: fx.Node) -> bool:
    """Whether the value is computed, and has the shape and dtype of the node's value."""
    if not isinstance(value, fx.Node) or value.op == "get_attr" or width_of(node) is None:
        return False
    mine, its = node.meta["val"], value.meta.get("val")
    return isinstance(its, TracedValue) and its.dtype is mine.dtype and str(shape_of(value)) == str(shape_of(node))


def _replace(cell: TracedCell, node: fx.Node, target: Any, arguments: tuple[Any, ...]) -> None:
    with cell.graph.inserting_before(node):
        made = cell.graph.call_function(target, arguments)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    cell.graph.erase_node(node)
