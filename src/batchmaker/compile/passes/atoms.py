"""A cell gate by gate: layers and operations that compute several gates at once are split.

If a value is read slice by slice, each slice gets a layer or operation of its own, back to the layer at its origin. So
the plan does not depend on the way in which a cell was written.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor, fx

from batchmaker.compile.dataflow import TracedCell, TracedValue, extract
from batchmaker.compile.passes.nodes import (
    columns,
    is_linear,
    is_pointwise,
    is_view,
    like,
    operands,
    shape_of,
    width_of,
)

_aten = torch.ops.aten


def gate_by_gate(cell: TracedCell, *, layers: bool = True) -> TracedCell:
    """Return an equal graph without pointwise operations that are read in slices; with `layers`, no such layers either.

    Operations that cannot be split remain.
    """
    apart = _Apart(extract(cell, cell.inputs, cell.outputs), layers)
    apart.write()
    return apart.made


@final
class _Apart:
    """The split graph. cuts: for each node that can be split, its column boundaries, both ends included."""

    def __init__(self, cell: TracedCell, layers: bool) -> None:
        self.cell = cell
        self.made = TracedCell(fx.Graph(), dict(cell.constants))
        self.cuts = _cuts(cell, layers)
        self._pieces: dict[fx.Node, list[fx.Node]] = {}
        self._copies: dict[fx.Node, fx.Node] = {}
        self._slices: dict[tuple[fx.Node, int, int], fx.Node] = {}

    def write(self) -> None:
        for node in self.cell.graph.nodes:
            if node.op == "output":
                self.made.graph.output(tuple(self._whole(source) for source in self.cell.outputs))
            elif node in self.cuts:
                self._pieces[node] = [self._piece(node, start, stop) for start, stop in pairwise(self.cuts[node])]
            elif node.op != "call_function" or not is_view(node):
                self._whole(node)
        self.made.graph.eliminate_dead_code()

    def _whole(self, node: fx.Node) -> fx.Node:
        """Return the copy of a node; a view is copied at its first use."""
        source, start, stop = columns(node)
        if node in self.cuts or source is not node:
            return self._columns(source, start, stop)
        if node not in self._copies:
            self._copies[node] = self.made.graph.node_copy(node, self._whole)
        return self._copies[node]

    def _columns(self, source: fx.Node, start: int, stop: int) -> fx.Node:
        """Return columns start to stop of a node that is not a slice itself."""
        key = (source, start, stop)
        if key in self._slices:
            return self._slices[key]
        if source in self.cuts:
            cuts = self.cuts[source]
            parts = self._pieces[source][cuts.index(start) : cuts.index(stop)]
            made = parts[0]
            if len(parts) > 1:
                made = self.made.graph.call_function(_aten.cat.default, (parts, 1))
                made.meta["val"] = _rows(source, stop - start)
        else:
            made = self._whole(source)
            if stop - start < width_of(source):  # type: ignore[operator]
                made = self.made.graph.call_function(_aten.narrow.default, (made, 1, start, stop - start))
                made.meta["val"] = _rows(source, stop - start)
        self._slices[key] = made
        return made

    def _piece(self, node: fx.Node, start: int, stop: int) -> fx.Node:
        if is_linear(self.cell, node):
            rows = [None if a is None else self._constant(a, start, stop, 0) for a in (*node.args[1:], None)[:2]]
            arguments: tuple[Any, ...] = (self._whole(node.args[0]), *rows)  # type: ignore[arg-type]
            piece = self.made.graph.call_function(_aten.linear.default, arguments)
        else:
            arguments = fx.map_arg(node.args, lambda a: self._operand(node, a, start, stop))
            keywords = fx.map_arg(node.kwargs, lambda a: self._operand(node, a, start, stop))
            piece = self.made.graph.call_function(node.target, arguments, keywords)  # type: ignore[arg-type]
        piece.meta["val"] = _rows(node, stop - start)
        return piece

    def _operand(self, node: fx.Node, argument: fx.Node, start: int, stop: int) -> fx.Node:
        constant = self.cell.value(argument)
        if constant is not None:
            return self._constant(argument, start, stop, -1) if constant.dim() else self._whole(argument)
        if width_of(argument) != width_of(node):
            return self._whole(argument)
        source, first, _ = columns(argument)
        return self._columns(source, first + start, first + stop)

    def _constant(self, argument: Any, start: int, stop: int, dim: int) -> fx.Node:
        """Return rows or columns of a constant; the constant itself if these are all, so that it can be recognised."""
        constant: Tensor = self.cell.constants[str(argument.target)]
        if constant.shape[dim] == stop - start or (dim == -1 and constant.shape[dim] == 1):
            return self._whole(argument)
        return self.made.constant(constant.narrow(dim, start, stop - start))


def _rows(node: fx.Node, width: int) -> TracedValue:
    return like(node, shape_of(node)[0], width)


def _cuts(cell: TracedCell, layers: bool) -> dict[fx.Node, list[int]]:
    """Return the columns at which nodes are split.

    They are the boundaries of the slices that are read, for every node from there to the layers.
    """
    cuts: dict[fx.Node, set[int]] = {}
    for node in cell.graph.nodes:
        if (layers and is_linear(cell, node)) or (is_pointwise(node) and _is_even(cell, node)):
            cuts[node] = {0, width_of(node) or 0}
    changed = True
    while changed:
        before = sum(map(len, cuts.values()))
        for node in reversed(cell.graph.nodes):
            if node in cuts and is_pointwise(node):
                _join_cuts(cuts, node)
            elif not is_view(node) or columns(node)[0] is node:  # skip slices of slices
                for argument in node.all_input_nodes:
                    source, start, stop = columns(argument)
                    if source in cuts:
                        cuts[source] |= {start, stop}
        changed = sum(map(len, cuts.values())) != before
    return {node: sorted(places) for node, places in cuts.items()}


def _join_cuts(cuts: dict[fx.Node, set[int]], node: fx.Node) -> None:
    """Split a pointwise node at the boundaries of its arguments, and the arguments at its own."""
    for argument in operands(node):
        source, start, stop = columns(argument)
        if source not in cuts:
            continue
        if width_of(argument) == width_of(node):
            cuts[node] |= {place - start for place in cuts[source] if start < place < stop}
            cuts[source] |= {place + start for place in cuts[node]}
        else:
            cuts[source] |= {start, stop}


def _is_even(cell: TracedCell, node: fx.Node) -> bool:
    """Whether all arguments can be split like the result.

    They are rows as wide as the result, single columns, or constants that can be split in the same way.
    """
    width = width_of(node)
    for argument in operands(node):
        constant = cell.value(argument)
        if constant is not None:
            if constant.dim() and (constant.shape[-1] not in (1, width) or constant.numel() != constant.shape[-1]):
                return False
        elif width_of(argument) not in (1, width) or shape_of(argument)[0] != shape_of(node)[0]:
            return False
    return True
