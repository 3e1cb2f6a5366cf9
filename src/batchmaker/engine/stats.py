"""Statistics of an engine: its requests as callers see them, and the steps that have run."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from operator import add
from typing import Final, final

from batchmaker.arrays import Ints
from batchmaker.core.commands import RunTask
from batchmaker.core.events import RequestId
from batchmaker.engine.request import Settled
from batchmaker.errors import DeadlineError, RefusedError
from batchmaker.executor.base import StepsResult
from batchmaker.graph.spec import CellType, TypeId

_SHORTEST_S: Final = 1e-6
_PER_DOUBLING: Final = 16
_NUM_BINS: Final = 30 * _PER_DOUBLING + 1  # the last one takes everything above 1073 s


@final
class LatencyHistogram:
    """Counts of latencies in a fixed number of bins, from 1 us to 1073 s. Each value is known within 2.2 %."""

    __slots__ = ("_counts", "num_samples", "total_s")

    def __init__(self) -> None:
        self._counts = [0] * _NUM_BINS
        self.num_samples = 0
        self.total_s = 0.0

    def add(self, *latencies_s: float) -> None:
        """Count requests."""
        for latency_s in latencies_s:
            place = int(_PER_DOUBLING * math.log2(latency_s / _SHORTEST_S)) if latency_s > _SHORTEST_S else 0
            self._counts[min(place, _NUM_BINS - 1)] += 1
        self.num_samples += len(latencies_s)
        self.total_s += sum(latencies_s)

    def absorb(self, other: LatencyHistogram) -> None:
        """Add the counts of another histogram."""
        self._counts = list(map(add, self._counts, other._counts))
        self.num_samples += other.num_samples
        self.total_s += other.total_s

    @property
    def mean_ms(self) -> float:
        """Mean latency in milliseconds; NaN before the first request."""
        return 1e3 * self.total_s / self.num_samples if self.num_samples else math.nan

    def percentile_ms(self, percent: float) -> float:
        """Return the latency in milliseconds that `percent` % of the requests did not exceed; NaN before the first."""
        if not self.num_samples:
            return math.nan
        wanted = max(1, math.ceil(percent / 100 * self.num_samples))
        place = bisect_left(list(accumulate(self._counts)), wanted)
        return 1e3 * _SHORTEST_S * math.exp2((place + 0.5) / _PER_DOUBLING)


@final
@dataclass(slots=True)
class ServiceStats:
    """Counts of one model's requests since the start. The engine writes them, others only read.

    answered: requests with a result. late: answered requests whose result came after the deadline. failed: requests
    without a result, by class of error. refused: failed requests whose deadline could not be met. given_up: requests
    that failed at their deadline. with_deadline: settled requests that had a deadline. latency: from arrival to result,
    of answered requests.
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
        """The share of violations among the requests with a deadline; 0 if there are none."""
        return self.violations / self.with_deadline if self.with_deadline else 0.0

    def settled(self, outcomes: Iterable[Settled]) -> None:
        """Count requests that were just settled."""
        latencies_s: list[float] = []
        for ticket, _, error in outcomes:
            if ticket.bulk is not None:
                latencies_s += [] if error else ticket.bulk.latencies_s
                for one in [error] * ticket.num_requests if error else ticket.bulk.errors.values():
                    self._failed(one)
                continue
            if ticket.deadline_s is not None:
                self.with_deadline += 1
                self.late += error is None and ticket.is_late
            if error is None:
                latencies_s.append(0.0 if ticket.finished_s is None else ticket.finished_s - ticket.arrived_s)
                continue
            self._failed(error)
        self.answered += len(latencies_s)
        self.latency.add(*latencies_s)

    def _failed(self, error: BaseException) -> None:
        kind = type(error).__name__
        self.failed[kind] = self.failed.get(kind, 0) + 1
        if isinstance(error, RefusedError):
            self.refused += 1
        elif isinstance(error, DeadlineError):
            self.given_up += 1

    @staticmethod
    def total(several: Sequence[ServiceStats]) -> ServiceStats:
        """Return the counts of several workers together; those of a single one go on counting."""
        if len(several) == 1:
            return several[0]
        total = ServiceStats()
        for one in several:
            total.answered += one.answered
            total.late += one.late
            total.refused += one.refused
            total.given_up += one.given_up
            total.with_deadline += one.with_deadline
            for kind, count in one.failed.copy().items():
                total.failed[kind] = total.failed.get(kind, 0) + count
            total.latency.absorb(one.latency)
        return total

    def __str__(self) -> str:
        p50, p90, p99 = (self.latency.percentile_ms(percent) for percent in (50, 90, 99))
        said = (
            f"{self.answered} answered, p50 {p50:.1f} ms, p90 {p90:.1f} ms, p99 {p99:.1f} ms"
            if self.answered
            else ("none answered")
        )
        if self.failed:
            said += "; failed: " + ", ".join(f"{count} {kind}" for kind, count in sorted(self.failed.items()))
        if self.with_deadline:
            said += f"; {self.violations} of {self.with_deadline} deadlines missed"
        return said


@dataclass(frozen=True, slots=True)
class StepSeen:
    """One finished step, for an observer.

    cell: name of the cell type. begin_s, end_s: engine seconds. requests: [batch] the request of each position; None if
    it is no longer in flight. padded: rows that were computed, with padding.
    """

    worker: int
    cell: str
    begin_s: float
    end_s: float
    requests: tuple[RequestId | None, ...]
    padded: int


@final
@dataclass(frozen=True, slots=True)
class StepsSeen:
    """Finished steps of one task that were reported together, for an observer. Each has an equal share of the time.

    cell: name of the cell type. begin_s, end_s: engine seconds. requests: of all rows, one step after the other; None
    for one that is no longer in flight. rows: how many each step has. padded: how many it computed, with padding.
    """

    worker: int
    cell: str
    begin_s: float
    end_s: float
    requests: Sequence[RequestId | None]
    rows: Sequence[int]
    padded: Sequence[int]

    def each(self) -> list[StepSeen]:
        """Return the steps, in the order in which they ran."""
        steps, first, begin_s = list[StepSeen](), 0, self.begin_s
        share_s = (self.end_s - self.begin_s) / len(self.rows)
        for count, padded in zip(self.rows, self.padded, strict=True):
            requests = tuple(self.requests[first : first + count])
            steps.append(StepSeen(self.worker, self.cell, begin_s, begin_s + share_s, requests, padded))
            first, begin_s = first + count, begin_s + share_s
        return steps


@dataclass(slots=True)
class DriverStats:
    """Counts since the start of an engine.

    cells: useful rows that were computed. padded_cells: all rows that were computed, with padding. scheduler_s,
    unfold_s: seconds in the scheduler and in unfold functions. busy_s: seconds that steps took, summed over workers.
    restarts: how many times the engine has failed and begun anew.
    """

    steps: int = 0
    cells: int = 0
    padded_cells: int = 0
    tasks: int = 0
    scheduler_s: float = 0.0
    unfold_s: float = 0.0
    busy_s: float = 0.0
    restarts: int = 0

    @staticmethod
    def total(several: Sequence[DriverStats]) -> DriverStats:
        """Return the counts of several drivers together; those of a single one go on counting."""
        if len(several) == 1:
            return several[0]
        names = [each.name for each in fields(DriverStats)]
        return DriverStats(*[sum([getattr(stats, name) for stats in several]) for name in names])


OwnersOf = Callable[[Ints], list[RequestId | None]]


@final
class StepCounts:
    """Adds finished steps to the statistics of a driver. owners_of: returns the requests that nodes belong to."""

    def __init__(self, stats: DriverStats, owners_of: OwnersOf) -> None:
        self._stats = stats
        self._owners_of = owners_of
        self._sizes: dict[TypeId, list[int]] = {}
        self.observer: Callable[[StepsSeen], None] | None = None

    def add(
        self, task: RunTask, cell: CellType, result: StepsResult, now_s: float, owner: RequestId | None = None
    ) -> None:
        """Count finished steps, without the rows that were skipped, and show them to the observer.

        owner: the request to which all nodes belong, if the scheduler knows nothing of it.
        """
        begin, batches, padded = int(task.ends[result.first - 1]) if result.first else 0, list[int](), list[int]()
        ends: list[int] = task.ends[result.first : result.end].tolist()
        skipped = result.skipped if result.skipped is not None and result.skipped.any() else None
        sizes, first = self._sizes.get(cell.type_id) or self._padded(cell), begin
        for end in ends:
            batch = end - first
            if skipped is not None:
                batch -= int(skipped[first - begin : end - begin].sum())
            batches.append(batch)
            padded.append(sizes[batch])
            first = end
        stats = self._stats
        stats.steps += len(batches)
        stats.cells += sum(batches)
        stats.padded_cells += sum(padded)
        stats.busy_s += result.busy_s
        if self.observer is not None:
            nodes = task.nodes[begin : ends[-1]]
            nodes = nodes if skipped is None else nodes[~skipped]
            owners = self._owners_of(nodes) if owner is None else [owner] * len(nodes)
            began_s = now_s - result.busy_s
            self.observer(StepsSeen(task.worker, cell.name, began_s, now_s, owners, batches, padded))

    def add_all(self, ran: Sequence[tuple[TypeId, int, float]], types: Sequence[CellType], wall_s: float) -> None:
        """Count tasks of one step each that ran in one call: type, rows, and seconds. The first is counted as a task.

        wall_s: seconds of the call, in which these tasks were formed, too. Nobody may observe.
        """
        stats, busy_s = self._stats, 0.0
        for type_id, rows, seconds in ran:
            stats.cells += rows
            stats.padded_cells += (self._sizes.get(type_id) or self._padded(types[type_id]))[rows]
            busy_s += seconds
        stats.steps += len(ran)
        stats.tasks += len(ran) - 1
        stats.busy_s += busy_s
        stats.scheduler_s += wall_s - busy_s

    def _padded(self, cell: CellType) -> list[int]:
        """Return the supported size for each number of rows, up to max_batch; 0 for 0 rows."""
        sizes = cell.batch_sizes
        padded = self._sizes[cell.type_id] = [0, *[sizes[bisect_left(sizes, n)] for n in range(1, cell.max_batch + 1)]]
        return padded
