"""What a policy sees of the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from batchmaker.errors import InvariantError
from batchmaker.graph.spec import CellType, TypeId
from batchmaker.policies.base import CellPolicy
from batchmaker.policies.requests import RequestTable
from batchmaker.scheduler.books import Books
from batchmaker.scheduler.depths import DepthBook
from batchmaker.scheduler.frontiers import FrontierBook

Kept = TypeVar("Kept")


class View:
    """A ReadyView, read off the books. The scheduler that it is part of keeps the time and what has just run."""

    def __init__(self, policy: CellPolicy, books: Books) -> None:
        self._policy = policy
        self._books = books
        self._cells: list[CellType] = []
        self._ready: set[TypeId] = set()
        self._just_run: TypeId | None = None
        self._now_s = 0.0

    @property
    def now_s(self) -> float:
        return self._now_s

    @property
    def cells(self) -> Sequence[CellType]:
        return self._cells

    @property
    def ready(self) -> Sequence[TypeId]:
        return sorted(self._ready)

    def num_ready(self, type_id: TypeId) -> int:
        return len(self._books.types[type_id].ready)

    def num_running(self, type_id: TypeId) -> int:
        return self._books.types[type_id].num_running + (type_id == self._just_run)

    @property
    def num_waiting(self) -> int:
        return len(self._books.line)

    def waiting(self, limit: int) -> NDArray[np.int64]:
        return self._books.line.first(limit)

    @property
    def requests(self) -> RequestTable:
        return self._kept(self._books.watched, "requests", "watches_requests")

    @property
    def depths(self) -> DepthBook:
        return self._kept(self._books.depths, "depths", "needs_depth")

    @property
    def frontiers(self) -> FrontierBook:
        return self._kept(self._books.frontiers, "frontiers", "needs_frontiers")

    def _kept(self, kept: Kept | None, what: str, flag: str) -> Kept:
        if kept is None:
            raise InvariantError(f"policy {self._policy.name!r} reads {what} and does not declare {flag}")
        return kept
