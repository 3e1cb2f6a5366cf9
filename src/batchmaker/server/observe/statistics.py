"""Counts of the requests of one model."""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final, final

from batchmaker.engine import StepsSeen, Ticket
from batchmaker.engine.request import SequenceEnd
from batchmaker.errors import DeadlineError
from batchmaker.server.faults import FaultKind, fault_of
from batchmaker.server.observe.recent import RecentSeconds

FIRST_RESPONSE_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds of the histogram of times to the first response."""

DURATION_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the histograms of times to the whole answer, and to the first cell."""

SLACK_S: Final = (0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)
"""Upper bounds of the histogram of what was left before deadlines; 0: none."""


@final
class Histogram:
    """Counts of values up to each bound, and above the last."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class CellCounts:
    """Of one cell. rows: useful; padded: computed, padding included."""

    steps: int = 0
    rows: int = 0
    padded: int = 0
    busy_s: float = 0.0


@dataclass(slots=True)
class ModelStatistics:
    """Counts since the model was loaded, in seconds and requests.

    Each field has one thread that writes it, so none has a lock: the first group the engine's, the second the server's.
    settled: answered by the engine, in whatever way. missed: deadlines. accepted: handed to the engine.
    settled_chunks, accepted_chunks: those of them that are chunks of sequences. queueing_s: until the first cell began.
    duration_s: from a request that has been read to its whole answer.
    """

    settled: int = 0
    settled_chunks: int = 0
    succeeded: int = 0
    failed: dict[FaultKind, int] = field(default_factory=lambda: dict.fromkeys(FaultKind, 0))
    failed_s: float = 0.0
    queue_s: float = 0.0
    compute_s: float = 0.0
    nodes: int = 0
    missed: int = 0
    queueing_s: Histogram = field(default_factory=lambda: Histogram(DURATION_S))
    slack_s: Histogram = field(default_factory=lambda: Histogram(SLACK_S))
    last_unix_s: float = 0.0
    sequences_ended: dict[SequenceEnd, int] = field(default_factory=lambda: dict.fromkeys(SequenceEnd, 0))
    cells: dict[str, CellCounts] = field(default_factory=dict)
    recent: RecentSeconds = field(default_factory=RecentSeconds)

    accepted: int = 0
    accepted_chunks: int = 0
    refused: dict[FaultKind, int] = field(default_factory=lambda: dict.fromkeys(FaultKind, 0))
    input_s: float = 0.0
    output_s: float = 0.0
    first_response_s: Histogram = field(default_factory=lambda: Histogram(FIRST_RESPONSE_S))
    duration_s: Histogram = field(default_factory=lambda: Histogram(DURATION_S))

    @property
    def in_flight(self) -> int:
        """Requests handed to the engine and not answered by it."""
        return self.accepted - self.settled

    @property
    def in_flight_alone(self) -> int:
        """Those of them that are no chunks of sequences."""
        return self.in_flight - (self.accepted_chunks - self.settled_chunks)

    def note_answer(self, began_s: float, answered_s: float, ended_s: float) -> None:
        """Count the times of a whole answer: when its request was read, computed, and answered. One clock for all."""
        self.first_response_s.add(answered_s - began_s)
        self.duration_s.add(ended_s - began_s)
        self.output_s += ended_s - answered_s

    def note_settled(self, ticket: Ticket, error: BaseException | None) -> None:
        """Count one answer. Called in the engine's thread."""
        finished_s = ticket.arrived_s if ticket.finished_s is None else ticket.finished_s
        if error is None:
            started_s = finished_s if ticket.started_s is None else ticket.started_s
            self.succeeded += 1
            self.queue_s += started_s - ticket.arrived_s
            self.queueing_s.add(started_s - ticket.arrived_s)
            self.compute_s += finished_s - started_s
            self.nodes += ticket.num_cells
            self.last_unix_s = time.time()
            if ticket.deadline_s is not None:
                self.slack_s.add(ticket.deadline_s - finished_s)
        else:
            kind = fault_of(error).kind
            self.failed[kind] += 1
            self.failed_s += finished_s - ticket.arrived_s
            self.missed += isinstance(error, DeadlineError)
        self.recent.at(finished_s, self.in_flight).add(ticket, error)
        self.settled_chunks += ticket.chunk is not None
        self.settled += 1

    def note_steps(self, steps: StepsSeen) -> None:
        """Count finished steps. Called in the engine's thread."""
        counts = self.cells.get(steps.cell)
        if counts is None:
            counts = CellCounts()
            self.cells = {**self.cells, steps.cell: counts}  # replaced, so that a reader's iteration is not disturbed
        num_steps, num_rows, computed = len(steps.rows), len(steps.requests), sum(steps.padded)
        counts.steps += num_steps
        counts.rows += num_rows
        counts.padded += computed
        counts.busy_s += steps.end_s - steps.begin_s
        recent = self.recent.at(steps.end_s, self.in_flight)
        recent.steps += num_steps
        recent.rows += num_rows
        recent.computed += computed
