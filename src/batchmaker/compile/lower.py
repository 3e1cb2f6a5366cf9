"""Nodes with constant weights become packed layers.

Linear ones are merged, and fused with the next activation or sum. Convolutions are fused with the next activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from batchmaker.compile.convolution import Convolution, Window
from batchmaker.compile.dataflow import TracedCell, TracedValue
from batchmaker.compile.linear import Activation, Linear
from batchmaker.compile.passes.fusion import run_in_passes
from batchmaker.compile.passes.nodes import is_linear, shape_of
from batchmaker.compile.passes.products import beside, merge_products, parameters
from batchmaker.compile.passes.reuse import reuse_memory

_aten = torch.ops.aten
_CONVOLUTIONS = (_aten.conv1d.default, _aten.conv2d.default)
_ACTIVATIONS: dict[Any, Activation] = {
    _aten.tanh.default: "tanh",
    _aten.sigmoid.default: "sigmoid",
    _aten.relu.default: "relu",
}


class Packer:
    """Packs each set of weights once for any number of graphs.

    Weights are identified by object identity; the caller keeps them alive (as constants of a TracedCell). reuse:
    pointwise operations overwrite values without another reader. fuse: they run in passes over the rows, if there is a
    program for them. by_time: a convolution is computed in the way that is measured to be fastest, else in torch's.
    """

    def __init__(self, *, reuse: bool = False, fuse: bool = False, by_time: bool = True) -> None:
        self.reuse, self.fuse, self.by_time = reuse, fuse, by_time
        self._layers: dict[tuple[Any, ...], Linear] = {}
        self._convolutions: dict[tuple[Any, ...], Convolution] = {}

    def linear(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: Activation = "none"
    ) -> Linear:
        """Return the layer whose outputs are those of the given ones side by side."""
        key = (tuple(map(id, weights)), tuple(map(id, biases)), activation)
        if key not in self._layers:
            self._layers[key] = Linear(*beside(weights, biases), activation)
        return self._layers[key]

    def convolution(
        self, weight: Tensor, bias: Tensor | None, window: Window, row: tuple[int, ...], activation: Activation
    ) -> Convolution:
        """Return the convolution of rows of this shape."""
        key = (id(weight), id(bias), window, row, activation)
        if key not in self._convolutions:
            self._convolutions[key] = Convolution(weight, bias, window, row, activation)
        return self._convolutions[key]


def lower(cell: TracedCell, packer: Packer) -> None:
    """Replace linear nodes over two dimensions, and convolutions over one or two, in place."""
    merge_products(cell, lambda x, *layers: cell.graph.call_function(packer.linear(*layers), (x,)))
    if packer.fuse:
        run_in_passes(cell)
    for node in list(cell.graph.nodes):
        if is_linear(cell, node):
            _fuse(cell, node, packer)
        elif packer.by_time and node.target in _CONVOLUTIONS:
            _convolve(cell, node, packer)
    cell.graph.eliminate_dead_code()
    if packer.reuse:
        reuse_memory(cell)


def _fuse(cell: TracedCell, node: fx.Node, packer: Packer) -> None:
    """Replace a layer, together with the activation or sum that alone reads it."""
    weight, bias = parameters(cell, node)
    user = next(iter(node.users))
    alone = len(node.users) == 1
    if alone and user.target in _ACTIVATIONS:
        layer = packer.linear([weight], [bias], _ACTIVATIONS[user.target])
        _substitute(cell, user, layer, (node.args[0],))
    elif alone and (other := _other_summand(node, user)) is not None:
        _substitute(cell, user, packer.linear([weight], [bias]).add, (node.args[0], other))
    else:
        _substitute(cell, node, packer.linear([weight], [bias]), (node.args[0],))


def _convolve(cell: TracedCell, node: fx.Node, packer: Packer) -> None:
    """Replace a convolution of float32 on the CPU, together with the activation that alone reads it.

    Left alone are convolutions in groups, calls with arguments by name, and convolutions over values whose sizes depend
    on the batch in another dimension.
    """
    x: Any = node.args[0]
    rest: Any = node.args[1:]
    if node.kwargs or cell.value(rest[0]) is None:
        return
    weight, bias = parameters(cell, node)
    row = shape_of(x)[1:]
    if (bias is None and rest[1:2] not in ((), (None,))) or len(row) != weight.ndim - 1:
        return
    if weight.device.type != "cpu" or weight.dtype is not torch.float32 or row[:1] != weight.shape[1:2]:
        return
    if not all(isinstance(size, int) for size in row):
        return
    window = Window(
        *[_each(rest, place, by_default, weight.ndim - 2) for place, by_default in ((2, 1), (3, 0), (4, 1))]
    )
    user = next(iter(node.users))
    activation = _ACTIVATIONS.get(user.target) if len(node.users) == 1 else None
    layer = packer.convolution(weight, bias, window, row, activation or "none")
    _substitute(cell, node if activation is None else user, layer, (x,))


def _each(arguments: Sequence[Any], place: int, by_default: int, dimensions: int) -> tuple[int, ...]:
    """Return an argument of a convolution for each dimension; it may be left out, or be one number for all."""
    argument = arguments[place] if len(arguments) > place else [by_default]
    return tuple(argument) if len(argument) == dimensions else (argument[0],) * dimensions


def _other_summand(node: fx.Node, user: fx.Node) -> fx.Node | None:
    """Return the other operand of `user` if it is a plain sum with `node`, of the same shape and dtype."""
    if user.target is not _aten.add.Tensor or user.kwargs or len(user.args) != 2:
        return None
    other = user.args[1] if user.args[0] is node else user.args[0]
    if not isinstance(other, fx.Node) or other is node or other.op == "get_attr":
        return None
    mine, theirs = node.meta["val"], other.meta.get("val")
    if not isinstance(theirs, TracedValue) or theirs.dtype is not mine.dtype or theirs.shape != mine.shape:
        return None
    return other


def _substitute(cell: TracedCell, node: fx.Node, target: Any, arguments: tuple[Any, ...]) -> None:
    with cell.graph.inserting_before(node):
        replacement = cell.graph.call_function(target, arguments)
    replacement.meta = dict(node.meta)
    node.replace_all_uses_with(replacement)
    cell.graph.erase_node(node)
