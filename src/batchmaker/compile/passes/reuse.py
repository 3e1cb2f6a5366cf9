"""Reuse of memory: a pointwise operation that is the only reader of a fresh value overwrites it with its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, fx

from batchmaker.compile.convolution import Convolution
from batchmaker.compile.dataflow import TracedCell
from batchmaker.compile.linear import Linear
from batchmaker.compile.passes.nodes import is_pointwise, shape_of

_aten = torch.ops.aten
_IN_PLACE: Final[dict[Any, Callable[..., Tensor]]] = {
    _aten.sigmoid.default: torch.sigmoid_,
    _aten.tanh.default: torch.tanh_,
    _aten.relu.default: torch.relu_,
    _aten.neg.default: torch.neg_,
    _aten.add.Tensor: Tensor.add_,
    _aten.sub.Tensor: Tensor.sub_,
    _aten.mul.Tensor: Tensor.mul_,
    _aten.div.Tensor: Tensor.div_,
    _aten.addcmul.default: Tensor.addcmul_,
}
_FRESH = frozenset((*_IN_PLACE, *_IN_PLACE.values(), _aten.lerp.Tensor, _aten.lerp.Scalar, _aten.rsub.Scalar))
"""Operations whose result always has memory of its own. The result of others may be the argument itself."""
_EITHER_WAY = (_aten.add.Tensor, _aten.mul.Tensor)


def reuse_memory(cell: TracedCell) -> None:
    """Rewrite the graph in place.

    This must be the last pass: from here on its nodes may write. Inputs and outputs are left alone.
    """
    for node in cell.graph.nodes:
        layer = getattr(node.target, "__self__", None)
        if isinstance(layer, Linear) and node.target == layer.add and _can_write(node, node.args[1]):
            node.target = layer.add_
        if node.target not in _IN_PLACE or not is_pointwise(node):
            continue
        if node.target in _EITHER_WAY and not node.kwargs and not _can_write(node, node.args[0]):
            node.args = (node.args[1], node.args[0])
            if not _can_write(node, node.args[0]):
                node.args = (node.args[1], node.args[0])
        if _can_write(node, node.args[0]):
            node.target = _IN_PLACE[node.target]


def _can_write(node: fx.Node, value: Any) -> bool:
    """Whether the node may overwrite the value: it is fresh, has no other reader, and has the same form."""
    if not isinstance(value, fx.Node) or not _is_fresh(value) or len(value.users) != 1:
        return False
    its, mine = value.meta["val"], node.meta["val"]
    return its.dtype is mine.dtype and str(shape_of(value)) == str(shape_of(node))


def _is_fresh(value: fx.Node) -> bool:
    """Whether the node's value has memory of its own that it shares with no other node."""
    return value.target in _FRESH or isinstance(getattr(value.target, "__self__", value.target), Linear | Convolution)
