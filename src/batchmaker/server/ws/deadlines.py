"""Deadlines of thousands of connections, with one timer for all of them."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import Final, Protocol, final

_CLOSEST_S: Final = 0.01
"""Deadlines that are as close together are looked at together."""


class Watched(Protocol):
    """What has deadlines."""

    def look(self, now_s: float) -> None:
        """Do what is due, and plan the next look. Times are the event loop's."""
        ...


@final
class WatchEntry:
    """A look that is planned, or no longer: `watched` is None then."""

    __slots__ = ("at_s", "watched")

    def __init__(self, at_s: float, watched: Watched) -> None:
        self.at_s = at_s
        self.watched: Watched | None = watched


@final
class Watch:
    """Looks at connections when they have asked for it. Used from one event loop.

    A heap of planned looks. A deadline that moves away costs nothing: the look finds that it is not due, and is planned
    anew.
    """

    def __init__(self) -> None:
        self._planned: list[tuple[float, int, WatchEntry]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def plan(self, at_s: float, watched: Watched, planned: WatchEntry | None) -> WatchEntry:
        """Have `watched` be looked at no later than this, and return that entry. planned: the entry that it has."""
        if planned is not None:
            if planned.watched is not None and planned.at_s <= at_s:
                return planned
            planned.watched = None
        entry = WatchEntry(at_s, watched)
        heapq.heappush(self._planned, (at_s, next(self._numbers), entry))
        if self._planned[0][2] is entry:
            self._arm()
        return entry

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._planned:
            self._timer = asyncio.get_running_loop().call_at(self._planned[0][0], self._look)

    def _look(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time() + _CLOSEST_S
        try:
            while self._planned and self._planned[0][0] <= now_s:
                _, _, entry = heapq.heappop(self._planned)
                watched, entry.watched = entry.watched, None
                if watched is not None:
                    watched.look(now_s)
        finally:
            self._arm()
