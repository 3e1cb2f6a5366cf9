"""Single calls of cells, the general form of unfolding: recorded one by one, laid out in arrays later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol, final

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled
from batchmaker.errors import InvalidRequestError
from batchmaker.graph.cell_graph import HostInput, NodeBlock
from batchmaker.graph.spec import CellType, ValueSpec
from batchmaker.graph.values import Hold, HostValues, Output, Value, ValueSequence


class DataLayout(Protocol):
    """Makes rows from the data of calls. The graph does not look into the data."""

    def snapshot(self, data: Any, port: int) -> Any:
        """Return the data of one call for a later layout: unchanged if its type is immutable, otherwise a copy."""

    def laid_out(self, data: Sequence[Any], port: int) -> HostValues:
        """Return the data of several calls as rows, in order. Raises the error of the first wrong one."""


class Recording(Protocol):
    """Holds the nodes of a request and adds nodes for calls; see `batchmaker.graph.recorder.Recorder`."""

    num_nodes: int
    max_nodes: int
    holds_values: bool

    def outputs_of(self, cell: CellType) -> tuple[Output, ...]: ...

    def accepted_as(self, spec: ValueSpec) -> set[Output | type]: ...

    def check(self, cell: CellType, port: int, argument: Any) -> None: ...

    def remember(self, cell: CellType, first: int, count: int, sequences: Sequence[ValueSequence]) -> None: ...

    def hold(self, first: int, count: int) -> Hold | None: ...

    def too_many(self, cell: CellType) -> Exception: ...


CallNumbers = tuple[int, tuple[int, ...], tuple[tuple[tuple[int, int], ...], ...]]
"""Calls of one cell: its type, the node of each, and of each the source node and the source's output for each input."""


@final
class Calls:
    """Calls of one cell in one request; each call adds a node. Made by `Recorder.calls`.

    A call records only its arguments, because a request may make hundreds of calls. It checks at once that values fit
    and belong to the request: `accepted` holds, for each input, the outputs that fit, and the types of data that the
    layout keeps unchanged. The data itself is checked when it is laid out.
    """

    __slots__ = ("_accepted", "_first", "_layout", "_nodes", "_outputs", "_recorder", "_rows", "cell")

    def __init__(self, cell: CellType, recorder: Recording, layout: DataLayout) -> None:
        self.cell = cell
        self._recorder = recorder
        self._layout = layout
        self._outputs = recorder.outputs_of(cell)
        self._first = len(cell.memories)
        self._accepted = tuple([recorder.accepted_as(spec) for spec in cell.inputs[self._first :]])
        self._nodes: list[int] = []
        self._rows: list[Sequence[Any]] = []

    def add(self, arguments: Sequence[Any], memories: Sequence[ValueSequence] = ()) -> tuple[Value, ...]:
        """Add one node and return its outputs.

        arguments: values of this request, or data for the layout, for the inputs after the memories. memories: see
        `Recorder.remember`.
        """
        if len(arguments) != len(self._accepted):
            raise InvalidRequestError(
                f"cell {self.cell.name!r} takes {len(self._accepted)} inputs, got {len(arguments)}"
            )
        for argument, accepted in zip(arguments, self._accepted, strict=False):
            if (argument.of if type(argument) is Value else type(argument)) not in accepted:
                arguments = self._checked(arguments)
                break
        recorder = self._recorder
        node = recorder.num_nodes
        if node >= recorder.max_nodes:
            raise recorder.too_many(self.cell)
        if self._first:
            recorder.remember(self.cell, node, 1, memories)
        recorder.num_nodes = node + 1
        self._nodes.append(node)
        self._rows.append(arguments)
        holds = recorder.hold(node, 1) if recorder.holds_values else None
        return tuple([Value(node, of, holds) for of in self._outputs])

    def _checked(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the arguments as they are kept. Raises for a value that does not fit or belongs to another request."""
        checked = list(arguments)
        for place, argument in enumerate(arguments):
            if type(argument) is Value:
                self._recorder.check(self.cell, self._first + place, argument)
                self._accepted[place].add(argument.of)
            elif type(argument) not in self._accepted[place]:
                checked[place] = self._layout.snapshot(argument, self._first + place)
                if checked[place] is argument:
                    self._accepted[place].add(type(argument))
        return checked

    @property
    def waiting(self) -> bool:
        """Whether there are calls without a layout."""
        return bool(self._nodes)

    def as_numbers(self) -> CallNumbers | None:
        """Return the waiting calls, if no argument of theirs is data or a memory."""
        rows: list[tuple[tuple[int, int], ...]] = []
        if self._first:
            return None
        for arguments in self._rows:
            for argument in arguments:
                if type(argument) is not Value:
                    return None
            rows.append(tuple([(argument.node, argument.of.index) for argument in arguments]))
        return self.cell.type_id, tuple(self._nodes), tuple(rows)

    def forget(self) -> None:
        """Forget the waiting calls: they are part of a graph."""
        self._nodes, self._rows = [], []

    def lay_out(self, block: NodeBlock) -> list[HostInput]:
        """Write the waiting calls into their block; return the data of these calls.

        Raises the errors of the layout.
        """
        nodes, rows = np.array(self._nodes), self._rows
        self.forget()
        places = nodes - block.first
        block.types[places] = self.cell.type_id
        host_inputs: list[HostInput] = []
        for port, column in enumerate(zip(*rows, strict=True), start=self._first):
            data = (
                [] if set(map(type, column)) == {Value} else [i for i, a in enumerate(column) if type(a) is not Value]
            )
            if len(data) < len(column):
                values = [value for value in column if type(value) is Value] if data else column
                at = places[[i for i, a in enumerate(column) if type(a) is Value]] if data else places
                block.sources[port, at] = [value.node for value in values]
                block.outputs[port, at] = [value.of.index for value in values]
            if data:
                laid_out = self._layout.laid_out([column[i] for i in data], port)
                host_inputs.append(host_input(self.cell, port, nodes[data], laid_out))
        return host_inputs


@final
class _LaidOut:
    """The layout for data that is already HostValues, one for each call."""

    def snapshot(self, data: Any, port: int) -> Any:
        return data

    def laid_out(self, data: Sequence[HostValues], port: int) -> HostValues:
        values = data[0].values if len(data) == 1 else np.concatenate([part.values for part in data])
        return HostValues(values, len(data), data[0].spec)


LAID_OUT: Final[DataLayout] = _LaidOut()


def host_input(cell: CellType, port: int, nodes: int | Ints, values: HostValues) -> HostInput:
    """Return the data of one input for these nodes. nodes: numbers, or the first number of consecutive ones."""
    if isinstance(nodes, int):
        return HostInput(cell.type_id, port, nodes, values.count, values.values)
    first, count = int(nodes[0]), len(nodes)
    return HostInput(cell.type_id, port, first, count, values.values, None if are_consecutive(nodes) else nodes)


@compiled
def are_consecutive(nodes: Ints) -> bool:
    """Whether the numbers [count] are consecutive and ascending."""
    wrong = 0
    for i in range(1, len(nodes)):
        wrong += nodes[i] != nodes[i - 1] + 1
    return wrong == 0
