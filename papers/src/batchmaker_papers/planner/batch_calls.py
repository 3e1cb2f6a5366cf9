"""Writes batches as a graph: one call each, on slices of earlier results."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import getitem
from typing import Any, final

import torch
from torch import fx

from batchmaker.compile.dataflow import TracedCell
from batchmaker.compile.passes.nodes import is_linear, is_pointwise, like, operands, shape_of, width_of
from batchmaker_papers.planner.cell_nodes import Batched

_aten = torch.ops.aten


def write_batches(cell: TracedCell, plan: Batched) -> TracedCell:
    """Return an equal graph in which a batch is one call, if its operands are slices of one value.

    A pointwise batch with operands in several places becomes one call for each stretch of them: this is never slower
    than copying them together first, because the copy is a call as well.
    """
    writer = _BatchWriter(cell)
    for batch, placed in zip(plan.batches, plan.layout.batches, strict=True):
        writer.batch([batch[position] for position in placed.positions])
    writer.finish()
    return writer.made


@final
class _BatchWriter:
    """Writes batches. places: for each written operation, the node with its value, and the first column."""

    def __init__(self, cell: TracedCell) -> None:
        self.cell = cell
        self.made = TracedCell(fx.Graph(), dict(cell.constants))
        self._places: dict[fx.Node, tuple[fx.Node, int]] = {}
        self._copies: dict[fx.Node, fx.Node] = {}
        self._slices: dict[tuple[fx.Node, int, int], fx.Node] = {}
        for node in cell.inputs:
            self._copies[node] = self.made.graph.node_copy(node)

    def batch(self, nodes: Sequence[fx.Node]) -> None:
        """Write operations of one kind. Their results lie in the given order."""
        if is_linear(self.cell, nodes[0]):
            self._layer(nodes)
        elif is_pointwise(nodes[0]):
            start = 0
            for stop in range(1, len(nodes) + 1):
                if stop == len(nodes) or not self._follow(nodes[stop - 1], nodes[stop]):
                    self._pointwise(nodes[start:stop])
                    start = stop
        else:
            (node,) = nodes
            self._copies[node] = self.made.graph.node_copy(node, self._value)

    def finish(self) -> None:
        self.made.graph.output(tuple(self._value(node) for node in self.cell.outputs))
        _split_once(self.made.graph)
        self.made.graph.eliminate_dead_code()
        self.made.drop_unused_constants()

    def _value(self, node: fx.Node) -> fx.Node:
        """Return the node of the new graph for the value of an old node."""
        if node in self._places:
            return self._stretch(*self._places[node], width_of(node) or 0)
        if node not in self._copies:
            self._copies[node] = self.made.graph.node_copy(node, self._value)
        return self._copies[node]

    def _stretch(self, whole: fx.Node, start: int, width: int) -> fx.Node:
        if width == width_of(whole):
            return whole
        key = (whole, start, width)
        if key not in self._slices:
            self._slices[key] = self.made.graph.call_function(_aten.narrow.default, (whole, 1, start, width))
            self._slices[key].meta["val"] = like(whole, shape_of(whole)[0], width)
        return self._slices[key]

    def _follow(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether every operand of `other` is a constant, the same single column, or directly after that of `one`."""
        width = width_of(one) or 0
        for a, b in zip(operands(one), operands(other), strict=True):
            if self.cell.value(a) is not None:
                continue
            if a in self._places and b in self._places and width_of(a) == width:
                (whole, start), (other_whole, other_start) = self._places[a], self._places[b]
                if whole is not other_whole or other_start != start + width:
                    return False
            elif a is not b or width_of(a) != 1:
                return False
        return True

    def _layer(self, nodes: Sequence[fx.Node]) -> None:
        parts = [[None if a is None else self.cell.value(a) for a in (*node.args[1:], None)[:2]] for node in nodes]
        weights = [weight for weight, _ in parts if weight is not None]
        biases = [bias for _, bias in parts]
        arguments: list[Any] = [self._value(nodes[0].args[0])]  # type: ignore[arg-type]
        if len(nodes) == 1:
            arguments += [a if a is None else self._value(a) for a in nodes[0].args[1:]]  # type: ignore[arg-type]
        else:
            arguments.append(self.made.constant(torch.cat(weights)))
            if any(bias is not None for bias in biases):
                filled = [w.new_zeros(w.shape[0]) if b is None else b for w, b in zip(weights, biases, strict=True)]
                arguments.append(self.made.constant(torch.cat(filled)))
        self._add(nodes, self.made.graph.call_function(_aten.linear.default, tuple(arguments)))

    def _pointwise(self, nodes: Sequence[fx.Node]) -> None:
        columns = [list(column) for column in zip(*map(operands, nodes), strict=True)]
        values = iter([self._operands(nodes, column) for column in columns])
        first = nodes[0]
        arguments, keywords = fx.map_arg((first.args, first.kwargs), lambda _: next(values))
        self._add(nodes, self.made.graph.call_function(first.target, arguments, keywords))  # type: ignore[arg-type]

    def _operands(self, nodes: Sequence[fx.Node], column: Sequence[fx.Node]) -> fx.Node:
        first, width = column[0], width_of(nodes[0]) or 0
        constants = [self.cell.value(node) for node in column]
        rows = [constant for constant in constants if constant is not None and constant.dim()]
        if len(rows) == len(nodes) > 1:
            return self.made.constant(torch.cat([row.reshape(-1).expand(width) for row in rows]))
        if first in self._places and width_of(first) == width:
            whole, start = self._places[first]
            return self._stretch(whole, start, width * len(nodes))
        return self._value(first)

    def _add(self, nodes: Sequence[fx.Node], made: fx.Node) -> None:
        widths = [width_of(node) or 0 for node in nodes]
        made.meta["val"] = like(nodes[0], shape_of(nodes[0])[0], sum(widths))
        start = 0
        for node, width in zip(nodes, widths, strict=True):
            self._places[node] = made, start
            start += width


def _split_once(graph: fx.Graph) -> None:
    """Replace slices of one value that do not overlap by one split call."""
    slices: dict[fx.Node, list[tuple[int, int, fx.Node]]] = {}
    for node in graph.nodes:
        if node.target is _aten.narrow.default and node.args[1] == 1:
            whole, _, start, width = node.args
            slices.setdefault(whole, []).append((start, start + width, node))
    for whole, places in slices.items():
        places.sort(key=lambda place: place[:2])
        nodes = [node for _, _, node in places]
        ends = [(0, 0), *((start, stop) for start, stop, _ in places)]
        if len(nodes) < 2 or any(stop > start for (_, stop), (start, _) in pairwise(ends)):
            continue
        sizes: list[int] = []
        indices = []
        for (_, before), (start, stop) in pairwise(ends):
            sizes += [start - before] * (start > before)
            indices.append(len(sizes))
            sizes.append(stop - start)
        if (rest := (width_of(whole) or 0) - ends[-1][1]) > 0:
            sizes.append(rest)
        with graph.inserting_after(whole):
            parts = graph.call_function(torch.unsafe_split_with_sizes, (whole, sizes, 1))
        with graph.inserting_after(parts):
            for node, index in zip(nodes, indices, strict=True):
                made = graph.call_function(getitem, (parts, index))
                made.meta = dict(node.meta)
                node.replace_all_uses_with(made)
