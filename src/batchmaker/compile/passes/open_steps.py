"""Steps of torch's recurrent cells, written out as layers and pointwise operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from batchmaker.compile.dataflow import TracedCell, copied
from batchmaker.compile.passes.nodes import like, shape_of
from batchmaker.compile.projected_steps import GRUStep, LSTMStep, RNNStep, gru_rows, lstm_rows

_aten = torch.ops.aten


def open_steps(cell: TracedCell, *, layers: bool = True) -> TracedCell:
    """Return an equal graph without steps of LSTMs and GRUs.

    layers: the steps' layers become plain linear nodes that can be planned; otherwise the packed ones stay, and steps
    of plain RNNs are written out too.
    """
    opened = copied(cell)
    for node in list(opened.graph.nodes):
        step: Any = node.target
        if isinstance(step, LSTMStep | GRUStep) or (isinstance(step, RNNStep) and not layers and not step.relu):
            with opened.graph.inserting_before(node):
                for index, result in enumerate(_StepWriter(opened, node, layers).step(step)):
                    _replace(node, index, result)
    opened.graph.eliminate_dead_code()
    return opened


def _replace(step: fx.Node, index: int, result: fx.Node) -> None:
    """Let the readers of one output of a step read `result`."""
    if not isinstance(step.target, LSTMStep):
        step.replace_all_uses_with(result)
        return
    for user in [user for user in step.users if user.args[1] == index]:
        user.replace_all_uses_with(result)


class _StepWriter:
    """Writes one step before its node. Inputs of tanh are scaled by two (see compile/projected_steps.py)."""

    def __init__(self, cell: TracedCell, step: fx.Node, layers: bool) -> None:
        self.cell, self.layers = cell, layers
        self.projected, self.h, *rest = step.args
        self.c = rest[0] if rest else None
        self.width = int(shape_of(self.h)[1])  # type: ignore[arg-type]

    def step(self, step: LSTMStep | GRUStep | RNNStep) -> tuple[fx.Node, ...]:
        """Return the nodes of the step's outputs."""
        if isinstance(step, LSTMStep):
            return self._lstm(step)
        return (self._gru(step),) if isinstance(step, GRUStep) else (self._tanh_of_half(self._total(step)),)

    def _lstm(self, step: LSTMStep) -> tuple[fx.Node, fx.Node]:
        gates = self._total(step)
        i, f, o, g = (self._gate(gates, index) for index in range(4))
        i, f, o = (self._call(_aten.sigmoid.default, gate) for gate in (i, f, o))
        carry = self._call(_aten.mul.Tensor, f, self.c)
        c = self._call(_aten.add.Tensor, carry, self._call(_aten.mul.Tensor, i, self._tanh_of_half(g)))
        return self._call(_aten.mul.Tensor, o, self._call(_aten.tanh.default, c)), c

    def _gru(self, step: GRUStep) -> fx.Node:
        bias = None if step.bias_hh is None else gru_rows(step.bias_hh)
        recurrent = self._layer(gru_rows(step.weight_hh), bias) if self.layers else self._packed(step.linear, self.h)
        r, z = (
            self._call(
                _aten.sigmoid.default,
                self._call(_aten.add.Tensor, self._gate(self.projected, index), self._gate(recurrent, index)),
            )
            for index in range(2)
        )
        reset = self._call(_aten.mul.Tensor, r, self._gate(recurrent, 2))
        n = self._tanh_of_half(self._call(_aten.add.Tensor, self._gate(self.projected, 2), reset))
        return self._call(_aten.lerp.Tensor, n, self.h, z)

    def _total(self, step: LSTMStep | RNNStep) -> fx.Node:
        """Return the gates before their sigmoids: the sum of the shares of the inputs and the state."""
        if self.layers and isinstance(step, LSTMStep):
            return self._call(_aten.add.Tensor, self.projected, self._layer(lstm_rows(step.weight_hh), None))
        return self._packed(step.linear.add, self.h, self.projected)

    def _tanh_of_half(self, x: fx.Node) -> fx.Node:
        return self._call(_aten.tanh.default, self._call(_aten.mul.Tensor, x, 0.5))

    def _layer(self, weight: Tensor, bias: Tensor | None) -> fx.Node:
        constants = (self.cell.constant(weight), None if bias is None else self.cell.constant(bias))
        return self._call(_aten.linear.default, self.h, *constants, width=weight.shape[0])

    def _packed(self, layer: Any, *arguments: Any) -> fx.Node:
        """Append a call of a packed layer with a result as wide as the projected input."""
        return self._call(layer, *arguments, width=int(shape_of(self.projected)[1]))  # type: ignore[arg-type]

    def _gate(self, gates: Any, index: int) -> fx.Node:
        return self._call(_aten.narrow.default, gates, 1, index * self.width, self.width)

    def _call(self, target: Any, *arguments: Any, width: int | None = None) -> fx.Node:
        """Append a call.

        width: columns of its result, by default those of its first argument; for a slice, those of a gate.
        """
        made = self.cell.graph.call_function(target, arguments)
        first = arguments[0]
        columns = self.width if target is _aten.narrow.default else width or int(shape_of(first)[1])
        made.meta["val"] = like(first, shape_of(first)[0], columns)
        return made
