"""Short requests that come while nothing is in flight: they run at once, in tasks that were formed before.

What a scheduler does for a request alone depends on its graph, and all requests of a template have the same one. So it
is asked once for each template, and its commands are carried out again for each further request. CellDriver uses this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Final, NamedTuple, cast, final

import numpy as np
import torch
from torch import Tensor

from batchmaker.arrays import Ints
from batchmaker.core.commands import Admit, Grow, Reply, Reserve, RunTask, TableId
from batchmaker.core.events import CellTypeAdded, Event, RequestArrived, RequestId, StepsFinished
from batchmaker.core.scheduler import Scheduler
from batchmaker.executor.base import StepsResult
from batchmaker.executor.inline import InlineExecutor
from batchmaker.graph.spec import CellType
from batchmaker.graph.values import ValueSequence
from batchmaker.model.structure import Handle
from batchmaker.model.template_values import TemplateValues
from batchmaker.model.templates import Template
from batchmaker.policies.cellular import CellularPolicy

MOST: Final = 4
"""So many requests that come together run one after the other. More of them share batches."""
SHORT_S: Final = 1e-3
"""Seconds that all of these may take: who comes meanwhile waits for their end, and not for that of a step."""
MOST_KEPT: Final = 1024
"""The most templates of which the tasks are kept. At this limit all are forgotten."""

_MOST_STEPS: Final = 1 << 20
_MOST_NODES: Final = 4096
_ENOUGH_RUNS: Final = 3


class _FetchedAt(NamedTuple):
    """Where the values of a handle are: in rows of the fetched values with these numbers, joined; rows=None: in all."""

    fetches: tuple[int, ...]
    rows: Tensor | None


@final
class LoneRun:
    """What is done for a request of one template.

    tasks: in their order. writes: for each feed, the table and the rows of its values. places: of the handles of the
    result. seconds: that it takes; as expected until it has run, then the least. num_runs: how often it has.
    """

    __slots__ = ("num_runs", "places", "seconds", "tasks", "writes")

    def __init__(
        self,
        tasks: Sequence[RunTask],
        writes: Sequence[tuple[TableId, slice | Ints]],
        places: Mapping[Handle, _FetchedAt],
    ) -> None:
        self.tasks = tasks
        self.writes = writes
        self.places = places
        self.seconds = 0.0
        self.num_runs = 0

    def with_tasks(self, results: Sequence[StepsResult]) -> Iterable[tuple[RunTask, StepsResult]]:
        """Return the results of its steps, each with its task."""
        if len(results) == len(self.tasks):
            return zip(self.tasks, results, strict=True)
        tasks = {task.task: task for task in self.tasks}
        return [(tasks[result.task], result) for result in results]

    def note(self, seconds: float) -> None:
        """Learn from a run."""
        self.seconds = min(seconds, self.seconds) if self.num_runs else seconds
        self.num_runs += 1


@final
class LoneRuns:
    """Runs requests alone, on an executor that has state tables of its own.

    types: all cell types; grows. expected_s: seconds of a task that has not run alone. max_nodes: the most nodes of a
    request. grow: asked before the executor's tables grow. is_on: whether requests may run so.
    """

    def __init__(
        self,
        executor: InlineExecutor,
        types: Sequence[CellType],
        expected_s: Callable[[RunTask], float],
        max_nodes: int,
        grow: Grow,
    ) -> None:
        self._executor = executor
        self._types = types
        self._expected_s = expected_s
        self._scheduler = Scheduler(
            CellularPolicy(max_steps=_MOST_STEPS), take_turns=True, grow=grow, max_nodes=max_nodes
        )
        self._ids = cast(Iterator[RequestId], count())
        self._runs: dict[Template, LoneRun | None] = {}
        self.is_on = True

    def run_of(self, template: Template, within_s: float) -> LoneRun | None:
        """Return what is done for requests of a template, if that is known and expected to take so many seconds."""
        try:
            run = self._runs[template]
        except KeyError:
            if len(self._runs) >= MOST_KEPT:
                self._runs.clear()
            run = self._runs[template] = self._planned(template)
        if run is None:
            return None
        if not run.num_runs:
            run.seconds = sum(map(self._expected_s, run.tasks))
        is_short = run.seconds <= within_s or 0 < run.num_runs < _ENOUGH_RUNS
        return run if is_short else None

    def compute(self, run: LoneRun, values: TemplateValues) -> list[StepsResult] | None:
        """Run the tasks for the values of a request. None if a row has failed."""
        _, gathered, place = values
        executor, began = self._executor, time.perf_counter()
        for feed, (table, rows) in enumerate(run.writes):
            executor.write(table, rows, gathered.of(feed, place))
        results: list[StepsResult] = []
        for task in run.tasks:
            results += executor.compute(task)
            if results[-1].failed:
                return None
        run.note(time.perf_counter() - began)
        return results

    def _planned(self, template: Template) -> LoneRun | None:
        """Let the scheduler serve a request of a template, without values. Nothing is computed."""
        if template.loops or template.decided is not None or template.num_nodes > _MOST_NODES:
            return None  # what it does depends on values, or it is not short
        num_known = len(self._scheduler.cells)
        events: list[Event] = [CellTypeAdded(cell, 0.0) for cell in self._types[num_known:]]
        events.append(RequestArrived(next(self._ids), template.graph, 0.0))
        admitted, tasks, is_whole = list[Admit](), list[RunTask](), False
        while events:
            commands, events = self._scheduler.handle(*events), []
            for command in commands:
                match command:
                    case Reserve():
                        self._executor.reserve(command)
                    case Admit():
                        admitted.append(command)
                    case RunTask():
                        tasks.append(command)
                        events.append(StepsFinished(command.task, 0, command.num_steps, 0.0))
                    case Reply():
                        is_whole = True
        if not is_whole:  # there is no memory for it
            return None
        (admit,) = admitted
        shift = admit.base - admit.first_local
        places = _places(template.handles, shift, tasks)
        if places is None:
            return None
        feeds = zip(admit.host_tables, template.feeds, strict=True)
        writes = [(table, feed.host.rows(shift)) for table, feed in feeds]
        return LoneRun(tasks, writes, places)


def results_of(template: Template, run: LoneRun, results: Sequence[StepsResult]) -> Any:
    """Return the result of a request from the results of its steps. It may contain code of the user."""
    fetched = [values for result in results for values in result.fetched]
    if len(results) > len(run.tasks):  # a task was reported in parts
        fetched = _joined(run.tasks, results)
    (result,) = template.results(1, lambda handle: [_value(run.places[handle], handle, fetched)])
    return result


def _joined(tasks: Sequence[RunTask], results: Sequence[StepsResult]) -> list[Tensor]:
    """Return the values of each fetch of each task, of which the results have parts."""
    parts = {task.task: [result.fetched for result in results if result.task == task.task] for task in tasks}
    return [torch.cat(values) for task in tasks for values in zip(*parts[task.task], strict=True)]


def _value(place: _FetchedAt, handle: Handle, fetched: Sequence[Tensor]) -> Any:
    """Return what a handle stands for, in memory of its own."""
    values = fetched[place.fetches[0]] if len(place.fetches) == 1 else torch.cat([fetched[k] for k in place.fetches])
    if place.rows is not None:
        values = values[place.rows]
    if isinstance(handle, ValueSequence):
        return values
    return values.item() if values.ndim == 1 else values[0]


def _places(handles: Sequence[Handle], shift: int, tasks: Sequence[RunTask]) -> dict[Handle, _FetchedAt] | None:
    """Find the values of handles among the fetches of all tasks; None if some are not there.

    shift: node number - local number.
    """
    fetches = [(fetch.output, task.nodes[fetch.positions]) for task in tasks for fetch in task.fetches]
    places: dict[Handle, _FetchedAt] = {}
    whole: set[int] = set()  # fetches whose memory belongs to a handle
    for handle in handles:
        nodes = (handle.nodes if isinstance(handle, ValueSequence) else np.array([handle.node])) + shift
        mine = [k for k, (output, at) in enumerate(fetches) if output == handle.output and np.isin(at, nodes).any()]
        numbers = np.concatenate([fetches[k][1] for k in mine]) if mine else nodes[:0]
        if not mine or not np.isin(nodes, numbers).all():
            return None
        order = np.argsort(numbers)
        rows = order[np.searchsorted(numbers, nodes, sorter=order)]
        is_whole = np.array_equal(rows, np.arange(len(numbers))) and (len(mine) > 1 or mine[0] not in whole)
        if is_whole and len(mine) == 1:
            whole.add(mine[0])
        places[handle] = _FetchedAt(tuple(mine), None if is_whole else torch.from_numpy(rows))
    return places
