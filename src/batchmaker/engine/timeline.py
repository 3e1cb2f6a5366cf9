"""Records which request was in which row of which step of a live engine, for pictures. Used by `batchmaker demo`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from batchmaker.engine.stats import StepSeen


@dataclass(frozen=True, slots=True)
class Span:
    """One request in one row, from `begin_s` to `end_s` (engine seconds). used_s: the end of its own work.

    From `used_s` to `end_s` the request is finished, but holds its row until the longest request of its batch ends.
    """

    request: int
    row: int
    begin_s: float
    end_s: float
    used_s: float


@final
class Timeline:
    """Collects finished steps: give `add` to `Engine.observe`. Keeps the first `max_steps`."""

    def __init__(self, max_steps: int = 200_000) -> None:
        self._max_steps = max_steps
        self.steps: list[StepSeen] = []

    def add(self, step: StepSeen) -> None:
        """Note one step. Called in the engine's thread."""
        if len(self.steps) < self._max_steps:
            self.steps.append(step)

    def mean_batch(self) -> float:
        """Return the mean number of rows in use per step; 0 if nothing ran."""
        return sum(len(step.requests) for step in self.steps) / len(self.steps) if self.steps else 0.0


def cell_spans(steps: Sequence[StepSeen], begin_s: float, end_s: float) -> list[Span]:
    """Return which request held each row from `begin_s` to `end_s`, for batching of cells.

    A request keeps its row of the picture while it runs. In the real batch it may move: when a request leaves, the last
    one takes its place. A row is free as soon as its request has done its last step.
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
    """Return which request held each row from `begin_s` to `end_s`, for padded batches of whole requests.

    length: gives the number of cells of a request. A request uses its row for a part of the step: its length divided by
    that of the longest request. The rest is padding.
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
