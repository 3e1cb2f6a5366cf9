"""A cell as a graph of ATen calls and constants: dependencies of nodes, and extraction of parts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch
from torch import Tensor, fx

from batchmaker.compile.export import spec_of_rows
from batchmaker.errors import ModelError
from batchmaker.graph.spec import ValueSpec

BATCH: Final = "<batch>"
"""Stands for the batch size among the dependencies of a node."""


class CannotRewriteError(Exception):
    """The graph has a part that these passes do not support; the message is the reason."""


_numbers = itertools.count()
_MULTIPLE: Final = re.compile(r"(?:(\d+)\*)?s\d+", re.ASCII)


@final
@dataclass(frozen=True, slots=True)
class TracedSize:
    """A number worked out from the batch size, such as "s77" or "3*s77". Equal texts are equal numbers."""

    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def factor(self) -> int | None:
        """How many batch sizes it is; None where it is no multiple."""
        match = _MULTIPLE.fullmatch(self.text)
        return None if match is None else int(match[1] or 1)

    def at(self, num_rows: int) -> int | None:
        """Return the number for so many rows, None where it is no multiple of them."""
        return None if self.factor is None else self.factor * num_rows

    def __mul__(self, times: int) -> TracedSize:
        symbol = self.text.rpartition("*")[2]
        return TracedSize(f"({self.text})*{times}" if self.factor is None else f"{self.factor * times}*{symbol}")


@final
@dataclass(frozen=True, slots=True)
class TracedValue:
    """Shape and dtype of a tensor in a graph, in `meta["val"]` of its node. Sizes are integers, or follow the batch."""

    shape: tuple[int | TracedSize, ...]
    dtype: torch.dtype

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def like(self, *shape: int | TracedSize) -> TracedValue:
        """Return a value of this dtype with another shape."""
        return TracedValue(shape, self.dtype)


def traced_value(value: Any) -> Any:
    """Return what torch traced a node with as our own: tensors, sizes, and lists of them; None for anything else."""
    if isinstance(value, Tensor):
        return TracedValue(tuple([s if isinstance(s, int) else TracedSize(str(s)) for s in value.shape]), value.dtype)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return TracedSize(str(value))
    return tuple(map(traced_value, value)) if isinstance(value, list | tuple) else None


@dataclass(slots=True)
class TracedCell:
    """A functional graph: placeholders, get_attr of `constants`, calls, one output tuple of nodes."""

    graph: fx.Graph
    constants: dict[str, Tensor] = field(default_factory=dict)

    @property
    def inputs(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def outputs(self) -> list[fx.Node]:
        results: list[fx.Node] = list(self.graph.output_node().args[0])  # type: ignore[arg-type]
        return results

    def constant(self, tensor: Tensor) -> fx.Node:
        """Add a constant and return its node, placed at the graph's insertion point."""
        name = f"constant_{next(_numbers)}"
        self.constants[name] = tensor.detach()
        return self.graph.get_attr(name)

    def move_to(self, device: torch.device) -> None:
        """Move the constants to a device, and change calls that make tensors to make them there."""
        self.constants = {name: tensor.to(device) for name, tensor in self.constants.items()}
        for node in self.graph.nodes:
            if node.kwargs.get("device") is not None:
                node.kwargs = {**node.kwargs, "device": device}

    def drop_unused_constants(self) -> None:
        """Remove the constants that no node reads any more."""
        used = {str(node.target) for node in self.graph.nodes if node.op == "get_attr"}
        self.constants = {name: tensor for name, tensor in self.constants.items() if name in used}

    def value(self, node: Any) -> Tensor | None:
        """Return the tensor of a constant's node, None for any other node."""
        if isinstance(node, fx.Node) and node.op == "get_attr":
            return self.constants[str(node.target)]
        return None


def is_symbolic(node: fx.Node) -> bool:
    """Whether the node's value is a number worked out from the batch size."""
    return isinstance(node.meta.get("val"), TracedSize)


def dependencies(graph: fx.Graph) -> dict[fx.Node, frozenset[str]]:
    """Return for each node the names of the placeholders that it depends on, BATCH for the batch size."""
    depends: dict[fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            depends[node] = frozenset((node.name,))
        elif is_symbolic(node):
            depends[node] = frozenset((BATCH,))
        else:
            depends[node] = frozenset().union(*(depends[source] for source in node.all_input_nodes))
    return depends


def row_spec(node: fx.Node, where: fx.Node) -> ValueSpec:
    """Return the spec of one row of a node's value. Its dimension 0 must be that of `where`, a placeholder.

    Raises CannotRewriteError if the value has no batch dimension.
    """
    value, batch = node.meta.get("val"), where.meta["val"]
    if not isinstance(value, TracedValue) or value.dim() == 0 or value.shape[0] != batch.shape[0]:
        raise CannotRewriteError(f"{node.name} has no row per node")
    if not all(isinstance(size, int) for size in value.shape[1:]):
        raise CannotRewriteError(f"the rows of {node.name} change shape with the batch")
    try:
        return spec_of_rows(value)
    except ModelError as error:
        raise CannotRewriteError(str(error)) from None


def extract(cell: TracedCell, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> TracedCell:
    """Copy the nodes from `inputs` to `outputs` into a new graph that shares the constants.

    Nodes that need only constants or the batch size are copied with it; the batch size is then read from the first
    input. Names of input nodes are kept. Raises CannotRewriteError if `outputs` need more than `inputs`.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    first = copies[inputs[0]] if inputs else None
    needed = _ancestors(outputs, stop=set(inputs))
    for node in cell.graph.nodes:
        if node not in needed or node in copies:
            continue
        if node.op == "placeholder":
            raise CannotRewriteError(f"{node.name} is needed on both sides of the cut")
        if node.target is torch.ops.aten.sym_size.int:
            copies[node] = graph.call_function(torch.ops.aten.sym_size.int, (first, 0))
            copies[node].meta = dict(node.meta)
        else:
            copies[node] = graph.node_copy(node, lambda source: copies[source])
    graph.output(tuple(copies[node] for node in outputs))
    return TracedCell(graph, cell.constants)


def copied(cell: TracedCell) -> TracedCell:
    """Return an independent copy of the graph; it shares the tensors of its constants."""
    made = extract(cell, cell.inputs, cell.outputs)
    made.constants = dict(made.constants)
    return made


def _ancestors(outputs: Iterable[fx.Node], stop: set[fx.Node]) -> set[fx.Node]:
    """Return the outputs and all nodes that they are computed from, without going beyond `stop`.

    The size of an input is not its value: sym_size does not lead to its argument.
    """
    ancestors: set[fx.Node] = set()
    waiting = list(outputs)
    while waiting:
        node = waiting.pop()
        if node in ancestors:
            continue
        ancestors.add(node)
        if node not in stop and node.target is not torch.ops.aten.sym_size.int:
            waiting.extend(node.all_input_nodes)
    return ancestors
