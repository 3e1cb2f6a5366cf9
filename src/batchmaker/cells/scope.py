"""Where the calls of cells go while an unfold function runs."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, final

from batchmaker.cells.arguments import where
from batchmaker.errors import ModelError
from batchmaker.graph.calls import Calls
from batchmaker.graph.recorder import Recorder
from batchmaker.graph.spec import TypeId

if TYPE_CHECKING:
    from batchmaker.cells.cell import Cell, CellTypes, OpenLoop


@final
class UnfoldingScope:
    """What cell calls inside a running unfold function write to. loops: by first node. calls: those made one by one;
    other_calls: those of cells called with other shapes than at first, by type."""

    __slots__ = ("calls", "loops", "other_calls", "recorder", "types")

    def __init__(self, recorder: Recorder, types: CellTypes) -> None:
        self.recorder = recorder
        self.types = types
        self.loops: dict[int, OpenLoop] = {}
        self.calls: dict[Cell, Calls] = {}
        self.other_calls: dict[TypeId, Calls] = {}


current_scope: ContextVar[UnfoldingScope | None] = ContextVar("batchmaker_unfolding", default=None)


def scope_of(cell: Cell) -> UnfoldingScope:
    """Return the scope of the unfold function that calls a cell; ModelError where none does."""
    scope = current_scope.get()
    if scope is None:
        raise ModelError(f"{where(cell)} was called outside Model.unfold; hand the request to an Engine instead")
    return scope
