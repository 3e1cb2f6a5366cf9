"""What a policy sees and decides. A policy chooses; the scheduler forms the batch, keeps the books and submits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from batchmaker.graph.spec import CellType, TypeId


class ReadyView(Protocol):
    """The scheduler as a policy sees it."""

    @property
    def cells(self) -> Sequence[CellType]:
        """All cell types; position is the type id."""

    def num_ready(self, type_id: TypeId) -> int:
        """Nodes of this type whose inputs are there or on their way."""

    def num_running(self, type_id: TypeId) -> int:
        """Steps of this type submitted and not finished."""


class CellPolicy(ABC):
    """Decides which cell type an idle worker runs next."""

    name: str

    @property
    @abstractmethod
    def max_steps(self) -> int:
        """Steps that one task may have (MaxTasksToSubmit)."""

    @abstractmethod
    def rank(self, view: ReadyView) -> Sequence[TypeId]:
        """Cell types with ready nodes, best first. The scheduler takes the first of which it can form a batch."""


class GraphPolicy(ABC):
    """Decides which whole requests an idle worker computes together (graph batching)."""

    name: str

    @property
    @abstractmethod
    def max_batch(self) -> int:
        """Most requests computed together. Above 1 they are padded to a common length."""

    @abstractmethod
    def add(self, request: int, length: int) -> None:
        """A request of this length has arrived."""

    @abstractmethod
    def discard(self, request: int) -> None:
        """A waiting request was given up; unknown requests are ignored."""

    @abstractmethod
    def choose(self) -> Sequence[int]:
        """Remove and return the requests of the next batch; empty if nothing waits."""

    @abstractmethod
    def __len__(self) -> int:
        """Waiting requests."""
