"""When two cells are one type: same graph, weights and row shapes (BatchMaker, EuroSys 2018, 3.1)."""

from __future__ import annotations

import operator
from typing import Any, final

import torch
from torch import Tensor, fx, nn

from batchmaker.compile.dataflow import TracedCell
from batchmaker.graph.spec import ValueSpec


@final
class CellIdentity:
    """Equal exactly if two cells compute the same from rows of the same shapes.

    Graph text, specs and shapes of weights are compared first, then weights: by storage, else element by element. A
    module that could not be traced is equal to itself alone. Keeps the weights (or the module) alive.
    """

    __slots__ = ("_key", "_module", "_weights")

    def __init__(
        self,
        text: str,
        specs: tuple[tuple[ValueSpec, ...], tuple[ValueSpec, ...]],
        weights: tuple[Tensor, ...] = (),
        module: nn.Module | None = None,
    ) -> None:
        shapes = tuple((tuple(weight.shape), str(weight.dtype)) for weight in weights)
        rows = tuple(tuple(spec.row_signature for spec in side) for side in specs)
        self._key = (text, rows, shapes)
        self._weights = weights
        self._module = module

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CellIdentity):
            return NotImplemented
        if self._key != other._key or self._module is not other._module:
            return False
        return all(map(_same_tensor, self._weights, other._weights))

    def __repr__(self) -> str:
        return f"CellIdentity({hash(self):#x}, {len(self._weights)} weights)"


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same values."""
    if a is b or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.device == b.device):
        return True
    return a.device == b.device and torch.equal(a, b)


def canonical(cell: TracedCell) -> tuple[str, tuple[Tensor, ...]]:
    """Return the graph as text without names, and its constants in order of first use."""
    numbers: dict[fx.Node, str] = {}
    weights: dict[str, Tensor] = {}
    lines: list[str] = []

    def show(value: Any) -> str:
        if isinstance(value, fx.Node):
            return numbers[value]
        if isinstance(value, tuple | list):
            return f"[{', '.join(map(show, value))}]"
        return repr(value)

    for node in cell.graph.nodes:
        if node.op == "get_attr":
            weights.setdefault(str(node.target), cell.constants[str(node.target)])
            numbers[node] = f"w{list(weights).index(str(node.target))}"
            continue
        numbers[node] = f"v{len(numbers)}"
        target = "getitem" if node.target is operator.getitem else str(node.target)
        if node.op != "call_function":
            target = node.op
        arguments = show((*node.args, *sorted(node.kwargs.items())))
        lines.append(f"{numbers[node]} = {target}{arguments}")
    return "\n".join(lines), tuple(weights.values())
