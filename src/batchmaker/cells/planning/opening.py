"""Steps of torch's recurrent cells written out as layers and pointwise operations, so that these can be planned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from batchmaker.cells.dataflow import TracedCell, copied
from batchmaker.cells.planning.nodes import like, shape_of
from batchmaker.cells.recurrent import GRUStep, LSTMStep, gru_rows, lstm_rows

_aten = torch.ops.aten


def open_steps(cell: TracedCell) -> TracedCell:
    """Return an equal graph without steps of LSTMs and GRUs."""
    opened = copied(cell)
    for node in list(opened.graph.nodes):
        if isinstance(node.target, LSTMStep | GRUStep):
            with opened.graph.inserting_before(node):
                writer = _Writer(opened, node)
                results = writer.lstm(node.target) if isinstance(node.target, LSTMStep) else (writer.gru(node.target),)
            for index, result in enumerate(results):
                _replace(node, index, result)
    opened.graph.eliminate_dead_code()
    return opened


def _replace(step: fx.Node, index: int, result: fx.Node) -> None:
    """Let who read one output of a step read `result`."""
    if isinstance(step.target, GRUStep):
        step.replace_all_uses_with(result)
        return
    for user in [user for user in step.users if user.args[1] == index]:
        user.replace_all_uses_with(result)


class _Writer:
    """Writes one step before its node: rows that go through tanh are scaled by two, and tanh(x) = 2 sigmoid(2x) - 1."""

    def __init__(self, cell: TracedCell, step: fx.Node) -> None:
        self.cell = cell
        self.projected, self.h, *rest = step.args
        self.c = rest[0] if rest else None
        self.width = int(shape_of(self.h)[1])  # type: ignore[arg-type]

    def lstm(self, step: LSTMStep) -> tuple[fx.Node, fx.Node]:
        gates = self._call(_aten.add.Tensor, self.projected, self._layer(lstm_rows(step.weight_hh), None))
        i, f, o, g = (self._gate(gates, index) for index in range(4))
        i, f, o = (self._call(_aten.sigmoid.default, gate) for gate in (i, f, o))
        kept = self._call(_aten.mul.Tensor, f, self.c)
        c = self._call(_aten.add.Tensor, kept, self._call(_aten.mul.Tensor, i, self._tanh_of_half(g)))
        return self._call(_aten.mul.Tensor, o, self._call(_aten.tanh.default, c)), c

    def gru(self, step: GRUStep) -> fx.Node:
        bias = None if step.bias_hh is None else gru_rows(step.bias_hh)
        recurrent = self._layer(gru_rows(step.weight_hh), bias)
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

    def _tanh_of_half(self, x: fx.Node) -> fx.Node:
        doubled = self._call(_aten.mul.Tensor, self._call(_aten.sigmoid.default, x), 2)
        return self._call(_aten.add.Tensor, doubled, -1)

    def _layer(self, weight: Tensor, bias: Tensor | None) -> fx.Node:
        constants = (self.cell.constant(weight), None if bias is None else self.cell.constant(bias))
        return self._call(_aten.linear.default, self.h, *constants, width=weight.shape[0])

    def _gate(self, gates: Any, index: int) -> fx.Node:
        return self._call(_aten.narrow.default, gates, 1, index * self.width, self.width)

    def _call(self, target: Any, *arguments: Any, width: int | None = None) -> fx.Node:
        """Append a call. width: columns of its result, by default those of its first argument, a gate's for a slice."""
        made = self.cell.graph.call_function(target, arguments)
        first = arguments[0]
        columns = self.width if target is _aten.narrow.default else width or int(shape_of(first)[1])
        made.meta["val"] = like(first, shape_of(first)[0], columns)
        return made
