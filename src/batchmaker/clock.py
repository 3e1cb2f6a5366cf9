"""Clocks: seconds since a clock's own start."""

from __future__ import annotations

import time
from typing import Protocol, final


class Clock(Protocol):
    """A clock: seconds since its start."""

    def now_s(self) -> float: ...


@final
class RealClock:
    """Monotonic wall-clock seconds since this object was made."""

    __slots__ = ("_start",)

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._start


@final
class VirtualClock:
    """A clock that moves only when told to: for tests and simulation."""

    __slots__ = ("_now_s",)

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, by_s: float) -> float:
        """Move forward by `by_s` seconds and return the new time. Time never runs back."""
        if by_s < 0:
            raise ValueError(f"a clock only moves forward, got {by_s} s")
        self._now_s += by_s
        return self._now_s
