"""Deadlines of requests, and of idle sequences: the earliest first.

The scheduler, `Urgency`, the scheduler of whole requests and the engine's open sequences use it.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator
from typing import Generic, TypeVar, final

Key = TypeVar("Key", bound=int)


@final
class Deadlines(Generic[Key]):
    """A heap of deadlines. Deadlines of requests that have ended stay in it until they come up or are cleaned out.

    heap: to see whether there are any.
    """

    __slots__ = ("heap",)

    def __init__(self) -> None:
        self.heap: list[tuple[float, Key]] = []

    @property
    def next_s(self) -> float | None:
        """The earliest deadline, perhaps of a request that has ended; None if there is none."""
        return self.heap[0][0] if self.heap else None

    def next_of(self, living: Container[Key]) -> float | None:
        """Return the earliest deadline of a request in `living`; None if there is none. Forgets those before it."""
        while self.heap and self.heap[0][1] not in living:
            heapq.heappop(self.heap)
        return self.next_s

    def __len__(self) -> int:
        return len(self.heap)

    def __iter__(self) -> Iterator[Key]:
        return (request for _, request in self.heap)

    def add(self, deadline_s: float, request: Key, living: Container[Key], num_living: int) -> None:
        """Add a deadline. living: requests that have not ended, num_living of them.

        Now and then, most deadlines of other requests are forgotten, so that the heap stays small.
        """
        heapq.heappush(self.heap, (deadline_s, request))
        if len(self.heap) > 2 * num_living + 1024:
            self.heap = [entry for entry in self.heap if entry[1] in living]
            heapq.heapify(self.heap)

    def passed(self, now_s: float) -> Iterator[Key]:
        """Remove the deadlines up to now, the earliest first, and yield whose they are."""
        while self.heap and self.heap[0][0] <= now_s:
            yield heapq.heappop(self.heap)[1]
