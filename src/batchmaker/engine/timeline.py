"""Which request was in which row of which step: recorded live, for pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from batchmaker.engine.stats import StepSeen


@dataclass(frozen=True, slots=True)
class Span:
    """One request in one row, from step `begin` up to before step `end`, or in seconds. used_s: end of its own work.

    Beyond `used_s` the row is held by a request that is finished and waits for the longest of its batch.
    """

    request: int
    row: int
    begin_s: float
    end_s: float
    used_s: float


@final
class Timeline:
    """Collects finished steps; give `add` to `engine.observe`. Keeps at most `max_steps`."""

    def __init__(self, max_steps: int = 200_000) -> None:
        self._max_steps = max_steps
        self.steps: list[StepSeen] = []

    def add(self, step: StepSeen) -> None:
        """Note one step. Called in the engine's thread."""
        if len(self.steps) < self._max_steps:
            self.steps.append(step)

    def mean_batch(self) -> float:
        """Return the mean number of rows in use, 0 where nothing ran."""
        return sum(len(step.requests) for step in self.steps) / len(self.steps) if self.steps else 0.0


def cell_spans(steps: Sequence[StepSeen], begin_s: float, end_s: float) -> list[Span]:
    """Return who held each row in a stretch of time where cells are batched.

    A request keeps its row while it runs; rows are drawn, not the batch's own order, in which the last request moves
    into the place of one that left. A row is free again as soon as its request has done its last step.
    """
    chosen = [step for step in steps if step.end_s > begin_s and step.begin_s < end_s]
    last = {request: number for number, step in enumerate(chosen) for request in step.requests if request is not None}
    rows: dict[int, int] = {}
    began: dict[int, float] = {}
    free: list[int] = []
    spans: list[Span] = []
    for number, step in enumerate(chosen):
        for request in step.requests:
            if request is None or request in rows:
                continue
            if free:
                free.sort(reverse=True)
                rows[request] = free.pop()
            else:
                rows[request] = len(rows)
            began[request] = step.begin_s
        for request in {request for request in step.requests if request is not None}:
            if last[request] == number:
                row = rows.pop(request)
                free.append(row)
                spans.append(Span(request, row, began.pop(request), step.end_s, step.end_s))
    return spans


def graph_spans(steps: Sequence[StepSeen], length: Callable[[int], int], begin_s: float, end_s: float) -> list[Span]:
    """Return who held each row in a stretch of time where whole requests are batched and padded.

    length: gives the cells of a request. A request uses its row for its share of the longest's time; the rest is
    padding.
    """
    spans: list[Span] = []
    for step in steps:
        if step.end_s <= begin_s or step.begin_s >= end_s:
            continue
        requests = [request for request in step.requests if request is not None]
        longest = max((length(request) for request in requests), default=1)
        for row, request in enumerate(requests):
            used = step.begin_s + (step.end_s - step.begin_s) * length(request) / longest
            spans.append(Span(request, row, step.begin_s, step.end_s, used))
    return spans
