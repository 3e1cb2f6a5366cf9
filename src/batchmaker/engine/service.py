"""What callers got: answers, failures by kind, deadlines missed, and how long it took."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add
from typing import Final, final

from batchmaker.engine.ticket import Ticket
from batchmaker.errors import DeadlineError, RefusedError

_SHORTEST_S: Final = 1e-6
_PER_DOUBLING: Final = 16
_NUM_BINS: Final = 30 * _PER_DOUBLING + 1  # the last one takes everything above 1073 s


@final
class LatencyHistogram:
    """How often which latency was seen, within 2.2 %, from a microsecond to a quarter of an hour. Bounded memory."""

    __slots__ = ("_counts", "num_samples", "total_s")

    def __init__(self) -> None:
        self._counts = [0] * _NUM_BINS
        self.num_samples = 0
        self.total_s = 0.0

    def add(self, latency_s: float) -> None:
        """Count one request."""
        place = int(_PER_DOUBLING * math.log2(latency_s / _SHORTEST_S)) if latency_s > _SHORTEST_S else 0
        self._counts[min(place, _NUM_BINS - 1)] += 1
        self.num_samples += 1
        self.total_s += latency_s

    def absorb(self, other: LatencyHistogram) -> None:
        """Count what another one has counted."""
        self._counts = list(map(add, self._counts, other._counts))
        self.num_samples += other.num_samples
        self.total_s += other.total_s

    @property
    def mean_ms(self) -> float:
        """Milliseconds that a request took on average, NaN before the first."""
        return 1e3 * self.total_s / self.num_samples if self.num_samples else math.nan

    def percentile_ms(self, percent: float) -> float:
        """Return milliseconds that so many percent of the requests did not exceed, NaN before the first."""
        if not self.num_samples:
            return math.nan
        wanted = max(1, math.ceil(percent / 100 * self.num_samples))
        place = bisect_left(list(accumulate(self._counts)), wanted)
        return 1e3 * _SHORTEST_S * math.exp2((place + 0.5) / _PER_DOUBLING)


@final
@dataclass(slots=True)
class ServiceStats:
    """Counts of one model's requests since the start; the engine writes, others read.

    answered: with a result, `late` of them after their deadline. failed: without, by class of error; `refused` of them
    because the deadline could not be met, `given_up` at the deadline. with_deadline: settled requests that had one.
    latency: from arrival to result, of those answered.
    """

    answered: int = 0
    late: int = 0
    refused: int = 0
    given_up: int = 0
    with_deadline: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    latency: LatencyHistogram = field(default_factory=LatencyHistogram)

    @property
    def num_failed(self) -> int:
        """Requests that ended without a result."""
        return sum(self.failed.values())

    @property
    def violations(self) -> int:
        """Requests that had no result by their deadline: answered late, given up or refused."""
        return self.late + self.refused + self.given_up

    @property
    def violation_share(self) -> float:
        """Violations among the requests with a deadline, 0 where there are none."""
        return self.violations / self.with_deadline if self.with_deadline else 0.0

    def settled(self, ticket: Ticket, error: BaseException | None) -> None:
        """Count a request that has just been settled."""
        if ticket.deadline_s is not None:
            self.with_deadline += 1
            self.late += error is None and ticket.is_late
        if error is None:
            self.answered += 1
            self.latency.add(ticket.latency_s or 0.0)
            return
        kind = type(error).__name__
        self.failed[kind] = self.failed.get(kind, 0) + 1
        if isinstance(error, RefusedError):
            self.refused += 1
        elif isinstance(error, DeadlineError):
            self.given_up += 1

    def __str__(self) -> str:
        p50, p90, p99 = (self.latency.percentile_ms(percent) for percent in (50, 90, 99))
        said = f"{self.answered} answered, p50 {p50:.1f} ms, p90 {p90:.1f} ms, p99 {p99:.1f} ms" if self.answered else (
            "none answered"
        )  # fmt: skip
        if self.failed:
            said += "; failed: " + ", ".join(f"{count} {kind}" for kind, count in sorted(self.failed.items()))
        if self.with_deadline:
            said += f"; {self.violations} of {self.with_deadline} deadlines missed"
        return said
