"""Functions of others that the engine calls to tell them something; and one of its own, which records a timeline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, ParamSpec, final

from batchmaker.engine.stats import StepSeen
from batchmaker.errors import RAISED_BY_USERS, said_by

P = ParamSpec("P")
_LOG = logging.getLogger("batchmaker.engine")


@final
class Onlooker(Generic[P]):
    """Calls a function of somebody who looks on. What it raises goes to the log the first time, and nowhere else.

    It is called on: one bad figure should not blind whoever watches for the rest of the night. what: its name there.
    """

    __slots__ = ("_call", "_has_raised", "_what")

    def __init__(self, call: Callable[P, object], what: str) -> None:
        self._call = call
        self._what = what
        self._has_raised = False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            self._call(*args, **kwargs)
        except RAISED_BY_USERS as error:
            if not self._has_raised:
                self._has_raised = True
                _LOG.error(
                    "%s raised %s; it is called on, and what else it raises is not logged",
                    self._what,
                    said_by(error),
                    exc_info=error,
                )


def call_quietly(call: Callable[[], object], what: str) -> None:
    """Call a function of a user to which nobody waits for an answer; what it raises goes to the log."""
    try:
        call()
    except RAISED_BY_USERS as error:
        _LOG.error("%s raised %s", what, said_by(error), exc_info=error)


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
