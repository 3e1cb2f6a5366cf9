"""Long runs leave nothing behind."""

from __future__ import annotations

import tracemalloc
from collections import deque

import numpy as np
import pytest
from scheduler_harness import cell_type, host

from batchmaker.core.commands import Reply, RunTask
from batchmaker.core.events import CellTypeAdded, RequestArrived, StepsFinished
from batchmaker.core.scheduler import Scheduler
from batchmaker.graph.recorder import Recorder
from batchmaker.policies.cellular import CellularPolicy


def soak(num_requests: int) -> None:
    """Short chains through the scheduler over an hour of virtual time; steps finish at once."""
    cell = cell_type(0, "a", 2, sizes=(1, 64))
    scheduler = Scheduler(CellularPolicy())
    scheduler.handle(CellTypeAdded(cell, 0.0))
    graphs = []
    for length in range(1, 6):
        recorder = Recorder()
        recorder.fetch(recorder.run(cell, [host(*range(length))], None)[0])
        graphs.append(recorder.take())
    lengths = np.random.default_rng(0).integers(0, 5, num_requests).tolist()
    arrived = answered = 0
    tasks: deque[RunTask] = deque()
    sizes: list[tuple[int, int]] = []
    marks = [num_requests // 10, num_requests - 1]
    tracemalloc.start()
    try:
        while answered < num_requests:
            at_s = 3600.0 * arrived / num_requests
            events = []
            if tasks:
                task = tasks.popleft()
                events.append(StepsFinished(task.task, 0, task.num_steps, at_s))
            while arrived < num_requests and scheduler.num_requests + len(events) < 200:
                events.append(RequestArrived(arrived, graphs[lengths[arrived]], at_s, deadline_s=at_s + 7200))
                arrived += 1
            for command in scheduler.handle(*events):
                if isinstance(command, RunTask):
                    tasks.append(command)
                elif isinstance(command, Reply):
                    answered += 1
            if marks and answered >= marks[0]:
                marks.pop(0)
                sizes.append((scheduler.state.arena.node_capacity, tracemalloc.get_traced_memory()[0]))
        sizes.append((scheduler.state.arena.node_capacity, tracemalloc.get_traced_memory()[0]))
    finally:
        tracemalloc.stop()
    scheduler.check_invariants()
    assert (scheduler.num_requests, scheduler.num_rows, scheduler.num_tasks) == (0, 0, 0)
    assert sizes[-1][0] == sizes[0][0]
    assert sizes[-1][1] < sizes[0][1] + 200_000


@pytest.mark.slow
def test_twenty_thousand_requests_leave_nothing_behind():
    soak(20_000)


@pytest.mark.slow
def test_an_hour_of_a_million_requests_leaves_nothing_behind():
    soak(1_000_000)
