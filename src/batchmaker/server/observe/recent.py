"""Counts of the last minute of one model, second by second."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, final

from batchmaker.engine import Ticket
from batchmaker.engine.stats import LatencyHistogram
from batchmaker.errors import DeadlineError, RefusedError

KEPT_S: Final = 61
"""Seconds that are kept: a minute, and the present one."""


@dataclass(slots=True)
class Stretch:
    """Counts of one second of the engine's clock, or of several.

    second: the first one. missed: deadlines, by late answers and by requests given up or refused. failed: for any other
    reason. queue_s: time until the first cell began, summed over the answered requests. deadline_ms: the shortest
    deadline of a request. in_flight: the most requests accepted and not answered. rows: useful; computed: padding
    included.
    """

    second: int
    latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    failed: int = 0
    missed: int = 0
    queue_s: float = 0.0
    deadline_ms: float | None = None
    in_flight: int = 0
    steps: int = 0
    rows: int = 0
    computed: int = 0

    def add(self, ticket: Ticket, error: BaseException | None) -> None:
        """Count one answer."""
        if ticket.deadline_s is not None:
            deadline_ms = 1e3 * (ticket.deadline_s - ticket.arrived_s)
            self.deadline_ms = deadline_ms if self.deadline_ms is None else min(self.deadline_ms, deadline_ms)
        if error is None:
            self.latency.add(ticket.latency_s or 0.0)
            self.queue_s += ticket.queue_s or 0.0
            self.missed += ticket.is_late
        elif isinstance(error, DeadlineError | RefusedError):
            self.missed += 1
        else:
            self.failed += 1

    def absorb(self, other: Stretch) -> None:
        """Add the counts of another stretch."""
        self.latency.absorb(other.latency)
        self.failed += other.failed
        self.missed += other.missed
        self.queue_s += other.queue_s
        deadlines_ms = [limit for limit in (self.deadline_ms, other.deadline_ms) if limit is not None]
        self.deadline_ms = min(deadlines_ms, default=None)
        self.in_flight = max(self.in_flight, other.in_flight)
        self.steps += other.steps
        self.rows += other.rows
        self.computed += other.computed


@final
class RecentSeconds:
    """The last KEPT_S seconds with activity. The engine's thread writes, any thread reads."""

    __slots__ = ("_seconds",)

    def __init__(self) -> None:
        self._seconds: deque[Stretch] = deque([Stretch(-1)], maxlen=KEPT_S)

    def at(self, now_s: float, in_flight: int) -> Stretch:
        """Return the second of `now_s` (engine seconds) for writing. in_flight: requests now."""
        last = self._seconds[-1]
        if now_s >= last.second + 1:
            last = Stretch(int(now_s))
            self._seconds.append(last)
        if in_flight > last.in_flight:
            last.in_flight = in_flight
        return last

    def since(self, second: int) -> list[Stretch]:
        """Return the seconds from this one on, oldest first; the last one may still grow."""
        return [stretch for stretch in self._seconds.copy() if stretch.second >= second]


def together(stretches: Iterable[Stretch], second: int) -> Stretch:
    """Return the sum of some seconds, under the number of the first."""
    total = Stretch(second)
    for stretch in stretches:
        total.absorb(stretch)
    return total
