"""The last steps of a running engine, as JSON for Perfetto and Chrome's trace viewer."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final, final

from batchmaker.engine.stats import StepSeen, StepsSeen
from batchmaker.engine.timeline import cell_spans

_MAX_NAMED: Final = 64
"""Most requests of a step that are listed by name in the trace."""


@final
class StepRing:
    """The last `max_steps` finished steps; give `add` to `engine.observe_together`. 0 keeps none."""

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps
        self._kept: deque[StepsSeen] = deque()
        self._num_kept = 0

    def add(self, steps: StepsSeen) -> None:
        """Keep steps, and drop the oldest that are too many. Called in the engine's thread."""
        self._kept.append(steps)
        self._num_kept += len(steps.rows)
        while self._kept and self._num_kept - len(self._kept[0].rows) >= self.max_steps:
            self._num_kept -= len(self._kept.popleft().rows)

    def since(self, begin_s: float) -> list[StepSeen]:
        """Return the steps that ended after `begin_s` (engine seconds), oldest first. Called in any thread."""
        while True:
            try:
                recent = list(itertools.takewhile(lambda steps: steps.end_s > begin_s, reversed(self._kept)))
            except RuntimeError:  # steps were added meanwhile
                continue
            ended = [step for steps in reversed(recent) for step in steps.each() if step.end_s > begin_s]
            return ended[max(0, len(ended) - self.max_steps) :]


def trace_events(process: int, name: str, steps: Sequence[StepSeen], origin_s: float) -> list[dict[str, Any]]:
    """Return one model's steps as events: a thread per worker with its steps, and one per row with its requests.

    process: its number in the trace; rows are under `process + 1`. origin_s: engine time that is 0 in the trace, whose
    times are microseconds.
    """
    events = [_named("process_name", process, 0, f"{name}: workers"), _named("process_name", process + 1, 0, name)]
    events += [_named("thread_name", process, worker, f"worker {worker}") for worker in {s.worker for s in steps}]
    for step in steps:
        who = [request for request in step.requests if request is not None]
        detail = {"rows": len(step.requests), "computed": step.padded, "requests": who[:_MAX_NAMED]}
        events.append(
            _span(step.cell, "step", process, step.worker, step.begin_s - origin_s, step.end_s - origin_s, detail)
        )
    if not steps:
        return events
    spans = cell_spans(steps, steps[0].begin_s, steps[-1].end_s)
    events += [_named("thread_name", process + 1, row, f"row {row}") for row in {span.row for span in spans}]
    events.extend(
        _span(
            f"request {span.request}",
            "request",
            process + 1,
            span.row,
            span.begin_s - origin_s,
            span.end_s - origin_s,
            {},
        )
        for span in spans
    )
    return events


def chrome_trace(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return a whole trace file's content."""
    return {"traceEvents": list(events), "displayTimeUnit": "ms"}


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _span(
    name: str, category: str, process: int, thread: int, begin_s: float, end_s: float, detail: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": round(1e6 * begin_s, 1),
        "dur": round(1e6 * (end_s - begin_s), 1),
        "args": detail,
    }
