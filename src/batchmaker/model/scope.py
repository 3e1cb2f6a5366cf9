"""The destination of cell calls while an unfold function runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, TypeVar, final

from batchmaker.errors import ModelError, ShapeError
from batchmaker.graph.calls import Calls
from batchmaker.graph.recorder import Recorder
from batchmaker.graph.spec import CellType, TypeId, ValueSpec
from batchmaker.graph.values import HostValues, Value, ValueSequence
from batchmaker.graph.whole_runs import WholeForm
from batchmaker.model.arguments import CalledCell, where

C = TypeVar("C", contravariant=True)

Arguments: TypeAlias = Sequence[Value | ValueSequence | HostValues | None]
"""The arguments of a cell's first call, by input: what the cell is tried with. None: zeros."""


class CellTypes(Protocol[C]):
    """Gives types to cells. An unfolding asks it at every call."""

    def type_of(self, cell: C) -> CellType | None:
        """Return the type of a cell that has been used before."""

    def learn(self, cell: C, inputs: tuple[ValueSpec, ...], arguments: Arguments = ()) -> CellType:
        """Bind a cell to its inputs' specs, prove its outputs, and give it a type. arguments: the arguments."""

    def other(self, cell: C, inputs: tuple[ValueSpec, ...], error: ShapeError, arguments: Arguments = ()) -> CellType:
        """Return the type of a cell for other shapes than at first. Raises `error` if it does not take them."""

    def in_runs(self, cell: CellType, num_step_inputs: int) -> CellType:
        """Return the type for chains of a cell with so many inputs per step: the cell's own for the first such number.

        ModelError if the cell does not return the state that such a chain feeds it.
        """

    def whole_form(self, cell: C, cell_type: CellType, arguments: Arguments, num_step_inputs: int) -> WholeForm | None:
        """Return the second form of a cell's runs, if it is to be used; see Cell. cell_type: the type of these runs.

        arguments: the arguments of the first run, by input. ModelError if the form gives something else than the steps.
        """

    def zero_state(self, cell: C, step_inputs: tuple[ValueSpec, ...]) -> tuple[ValueSpec, ...]:
        """Return the specs of a chain's initial state when the unfold function gives none."""


Conditions: TypeAlias = tuple[tuple[int, Any], ...]
"""Outputs, each with the value or function that ends a loop."""


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """A loop that ends at a value. first, last: its nodes, if it takes all its steps. until: see Cell.loop.

    watched: the output that `until` looks at, unless it is a dict.
    """

    first: int
    last: int
    until: Any
    watched: int = 0

    @property
    def conditions(self) -> Conditions:
        """The outputs that are looked at, each with the value or function that ends the loop."""
        return tuple(self.until.items()) if isinstance(self.until, dict) else ((self.watched, self.until),)


@final
class UnfoldingScope:
    """The record of cell calls in a running unfold function.

    loops: by first node. calls: single calls. other_calls: calls of cells with other shapes than at first, by type.
    decisions: of a request that decides by computed values (see `batchmaker.model.decisions`); otherwise None.
    """

    __slots__ = ("calls", "decisions", "loops", "other_calls", "recorder", "types")

    def __init__(self, recorder: Recorder, types: CellTypes[Any]) -> None:
        self.recorder = recorder
        self.types = types
        self.loops: dict[int, OpenLoop] = {}
        self.calls: dict[Any, Calls] = {}
        self.other_calls: dict[TypeId, Calls] = {}
        self.decisions: Any = None

    def end_at(self, cell: CellType, outputs: Sequence[Value], until: Any) -> None:
        """Let a chain end at a value: see Cell.loop. outputs: of its last step. ModelError if `until` is wrong."""
        until = dict(until) if isinstance(until, dict) else until  # the caller may change its own
        loop = OpenLoop(0, outputs[0].node, until, cell.host_outputs[0] if cell.host_outputs else 0)
        watched = [output for output, _ in loop.conditions]
        if not watched or not all(isinstance(output, int) and 0 <= output < len(outputs) for output in watched):
            raise ModelError(
                f"cell {cell.name!r}: until looks at {watched or 'no output'}, expected numbers of outputs, 0 to "
                f"{len(outputs) - 1}, each with a value or a function"
            )
        for output in watched:
            first = int(outputs[output].steps.nodes[0])  # asking for the steps brings them to the host
        self.loops[first] = replace(loop, first=first)


current_scope: ContextVar[UnfoldingScope | None] = ContextVar("batchmaker_unfolding", default=None)


def scope_of(cell: CalledCell) -> UnfoldingScope:
    """Return the scope of the unfold function that calls a cell. ModelError outside an unfold function."""
    scope = current_scope.get()
    if scope is None:
        raise ModelError(f"{where(cell)} was called outside Model.unfold; hand the request to an Engine instead")
    return scope
