"""Linear nodes with constant weights become packed layers, merged, and fused with the next activation or sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from batchmaker.compile.dataflow import TracedCell
from batchmaker.compile.linear import Activation, Linear
from batchmaker.compile.passes.fusion import run_in_passes
from batchmaker.compile.passes.reuse import reuse_memory

_aten = torch.ops.aten
_ACTIVATIONS: dict[Any, Activation] = {
    _aten.tanh.default: "tanh",
    _aten.sigmoid.default: "sigmoid",
    _aten.relu.default: "relu",
}


class Packer:
    """Packs each set of weights once for any number of graphs.

    Weights are identified by object identity; the caller keeps them alive (as constants of a TracedCell). reuse:
    pointwise operations overwrite values without another reader. fuse: they run in passes over the rows, if there is a
    program for them.
    """

    def __init__(self, *, reuse: bool = False, fuse: bool = False) -> None:
        self.reuse, self.fuse = reuse, fuse
        self._layers: dict[tuple[Any, ...], Linear] = {}

    def linear(self, weights: list[Tensor], biases: list[Tensor | None], activation: Activation = "none") -> Linear:
        """Return one layer whose outputs are the concatenated outputs of the given layers."""
        key = (tuple(map(id, weights)), tuple(map(id, biases)), activation)
        if key not in self._layers:
            weight, bias = weights[0], biases[0]
            if len(weights) > 1:
                weight, bias = torch.cat(weights), _side_by_side(weights, biases)
            self._layers[key] = Linear(weight, bias, activation)
        return self._layers[key]


def _side_by_side(weights: list[Tensor], biases: list[Tensor | None]) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    pairs = zip(weights, biases, strict=True)
    return torch.cat([w.new_zeros(w.shape[0]) if b is None else b for w, b in pairs])


def lower(cell: TracedCell, packer: Packer) -> None:
    """Replace the linear nodes of a graph in place; nodes over more than two dimensions stay."""
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in cell.graph.nodes:
        if _is_plain_linear(cell, node):
            readers.setdefault(node.args[0], []).append(node)
    for nodes in readers.values():
        if len(nodes) > 1:
            _merge(cell, nodes, packer)
    cell.graph.eliminate_dead_code()
    if packer.fuse:
        run_in_passes(cell)
    for node in list(cell.graph.nodes):
        if _is_plain_linear(cell, node):
            _fuse(cell, node, packer)
    cell.graph.eliminate_dead_code()
    if packer.reuse:
        reuse_memory(cell)


def _is_plain_linear(cell: TracedCell, node: fx.Node) -> bool:
    """Whether the node is a linear layer [n, in] -> [n, out] with constant weights."""
    if node.target is not _aten.linear.default or cell.value(node.args[1]) is None:
        return False
    if len(node.args) > 2 and node.args[2] is not None and cell.value(node.args[2]) is None:
        return False
    return bool(node.meta["val"].dim() == 2)


def _parameters(cell: TracedCell, node: fx.Node) -> tuple[Tensor, Tensor | None]:
    weight = cell.value(node.args[1])
    assert weight is not None
    return weight, cell.value(node.args[2]) if len(node.args) > 2 else None


def _merge(cell: TracedCell, nodes: list[fx.Node], packer: Packer) -> None:
    """Compute layers that read the same input in one product and slice it."""
    parameters = [_parameters(cell, node) for node in nodes]
    layer = packer.linear([weight for weight, _ in parameters], [bias for _, bias in parameters])
    first = nodes[0]  # in graph order, so it comes before all readers
    with cell.graph.inserting_before(first):
        product = cell.graph.call_function(layer, (first.args[0],))
        value = first.meta["val"]
        product.meta["val"] = value.new_empty((value.shape[0], sum(weight.shape[0] for weight, _ in parameters)))
        start = 0
        for node, (weight, _) in zip(nodes, parameters, strict=True):
            width = weight.shape[0]
            part = cell.graph.call_function(torch.narrow, (product, 1, start, width))
            part.meta = dict(node.meta)
            node.replace_all_uses_with(part)
            start += width


def _fuse(cell: TracedCell, node: fx.Node, packer: Packer) -> None:
    """Merge a layer with the activation or sum that is its only reader."""
    weight, bias = _parameters(cell, node)
    user = next(iter(node.users))
    alone = len(node.users) == 1
    if alone and user.target in _ACTIVATIONS:
        layer = packer.linear([weight], [bias], _ACTIVATIONS[user.target])
        _substitute(cell, user, layer, (node.args[0],))
    elif alone and (other := _other_summand(node, user)) is not None:
        _substitute(cell, user, packer.linear([weight], [bias]).add, (node.args[0], other))
    else:
        _substitute(cell, node, packer.linear([weight], [bias]), (node.args[0],))


def _other_summand(node: fx.Node, user: fx.Node) -> fx.Node | None:
    """Return the other operand of `user` if it is a plain sum with `node`, of the same shape and dtype."""
    if user.target is not _aten.add.Tensor or user.kwargs or len(user.args) != 2:
        return None
    other = user.args[1] if user.args[0] is node else user.args[0]
    if not isinstance(other, fx.Node) or other is node or other.op == "get_attr":
        return None
    mine, theirs = node.meta["val"], other.meta.get("val")
    if not isinstance(theirs, Tensor) or theirs.dtype is not mine.dtype or theirs.shape != mine.shape:
        return None
    return other


def _substitute(cell: TracedCell, node: fx.Node, target: Any, arguments: tuple[Any, ...]) -> None:
    with cell.graph.inserting_before(node):
        replacement = cell.graph.call_function(target, arguments)
    replacement.meta = dict(node.meta)
    node.replace_all_uses_with(replacement)
    cell.graph.erase_node(node)
