"""What a policy sees and decides. A policy chooses; the scheduler forms the batch, keeps the books and submits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from batchmaker.graph.spec import CellType, TypeId
from batchmaker.policies.requests import RequestTable


class ReadyView(Protocol):
    """The scheduler as a policy sees it."""

    @property
    def now_s(self) -> float:
        """Time of the last event, in engine seconds."""

    @property
    def cells(self) -> Sequence[CellType]:
        """All cell types; position is the type id."""

    def num_ready(self, type_id: TypeId) -> int:
        """Nodes of this type whose inputs are there or on their way."""

    def num_running(self, type_id: TypeId) -> int:
        """Steps of this type submitted and not finished."""

    @property
    def requests(self) -> RequestTable:
        """What is known of each request. Kept only for policies that watch requests."""

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun."""

    def waiting(self, limit: int) -> NDArray[np.int64]:
        """Slots of the first `limit` requests that have not begun, first in line first."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Which waiting requests begin now: the first `begin` in line, once those in `refuse` have been turned away."""

    begin: int
    refuse: tuple[int, ...] = ()


class CellPolicy(ABC):
    """Decides which requests begin and which cell type an idle worker runs next.

    watches_requests: the policy holds requests back or looks at them one by one; the scheduler keeps `view.requests`
    and asks `admit`. Otherwise every request begins when it arrives.
    """

    name: str
    watches_requests: ClassVar[bool] = False

    @property
    @abstractmethod
    def max_steps(self) -> int:
        """Steps that one task may have (MaxTasksToSubmit)."""

    @abstractmethod
    def rank(self, view: ReadyView) -> Sequence[TypeId]:
        """Cell types with ready nodes, best first. The scheduler takes the first of which it can form a batch."""

    def admit(self, view: ReadyView) -> Admission:
        """Decide which waiting requests begin, whenever a worker is about to be given work.

        If none is in flight, the first in line begins all the same.
        """
        return Admission(view.num_waiting)

    def step_finished(self, type_id: TypeId, batch: int, seconds: float) -> None:  # noqa: B027
        """A step of `batch` rows took so long on its worker."""

    def request_finished(self, view: ReadyView, slot: int) -> None:  # noqa: B027
        """A request was answered; its facts can be read a last time."""


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
