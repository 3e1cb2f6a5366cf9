"""Rows of memories in the scheduler: kept while they may be read, listed in order, and given back."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from batchmaker.core.commands import Admit, Reply, RunTask
from batchmaker.core.events import CellTypeAdded, RequestArrived, RequestCancelled, RequestId, StepsFinished
from batchmaker.core.layout import ID, NUM_ROWS
from batchmaker.core.scheduler import Scheduler
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.recorder import Recorder
from batchmaker.graph.spec import GIVEN, CellType, TypeId, ValueSpec
from batchmaker.graph.values import HostValues
from batchmaker.policies import make
from covering import covering

ROW = ValueSpec((), "int64")
CHAIN = CellType(TypeId(0), "chain", (ROW, ROW), (ROW,), (1, 2, 4))
LOOK = CellType(TypeId(1), "look", (ROW, ROW), (ROW,), (1, 2, 4), memories=(GIVEN,))
PAST = CellType(TypeId(2), "past", (ROW, ROW, ROW), (ROW, ROW), (1, 2, 4), memories=(1,))
CELLS = (CHAIN, LOOK, PAST)


def words(count: int) -> HostValues:
    return HostValues(np.arange(count), count, ROW)


def graph(length: int, *, open_ended: bool = False) -> CellGraph:
    """A chain; a run, a map and a node that read all of it; and a run over its own past, whose result a node reads."""
    recorder = Recorder()
    steps = recorder.run(CHAIN, [words(length)], None)[0].steps
    run = recorder.run(LOOK, [words(3)], None, memories=[steps[::-1]])[0].steps
    recorder.map(LOOK, [words(2)], [run])
    (value,) = recorder.node(LOOK, [words(1)], [steps[:0]])
    past = recorder.run(PAST, [], (value, None), max_steps=2 * length, open_ended=open_ended)
    recorder.fetch(recorder.node(LOOK, [past[1]], [steps])[0])
    return recorder.take()


class Device:
    """Plays tasks: notes which node's outputs are in each row, and which nodes each position reads as a memory."""

    def __init__(self, scheduler: Scheduler, stops: int | None) -> None:
        self.scheduler, self.stops = scheduler, stops
        self.rows: dict[tuple[int, int], int] = {}  # by table and row
        self.bases: dict[int, int] = {}  # by request
        self.read: dict[int, dict[int, list[int]]] = {}  # by request, and local node

    def run(self, task: RunTask, *, at_once: bool) -> list[Any]:
        following: list[Any] = []
        stopped, over = np.zeros(len(task.nodes), np.bool_), set[int]()
        for step in range(task.num_steps):
            for position in range(task.begin_of(step), task.begin_of(step + 1)):
                subgraph = int(self.scheduler.state.arena.subgraph[task.nodes[position]])
                if subgraph not in over:
                    self._play(task, position)
                if task.may_stop is not None and task.may_stop[step] and self.stops is not None:
                    taken = int(task.nodes[position] - self.scheduler.state.arena.head[subgraph]) + 1
                    stopped[position] = taken == self.stops and subgraph not in over
                    over |= {subgraph} if stopped[position] else set()
            if not at_once:
                told = stopped[task.begin_of(step) : task.begin_of(step + 1)]
                following += self.scheduler.handle(StepsFinished(task.task, step, step + 1, 0.0, told))
                self.scheduler.check_invariants()
        if at_once:
            following += self.scheduler.handle(StepsFinished(task.task, 0, task.num_steps, 0.0, stopped))
            self.scheduler.check_invariants()
        return following

    def _play(self, task: RunTask, position: int) -> None:
        node = int(task.nodes[position])
        if task.memories is not None:
            first, length = task.memories.firsts[0, position], task.memories.lengths[0, position]
            table = int(task.source_tables[0, position])
            rows = task.memories.rows[first : first + length].tolist()
            arena = self.scheduler.state.arena
            request = int(arena.requests[ID, arena.request[node]])
            base = self.bases[request]
            self.read.setdefault(request, {})[node - base] = [self.rows[table, row] - base for row in rows]
        if task.keep is not None:
            for kept, row in zip(task.keep.positions.tolist(), task.keep.rows.tolist(), strict=True):
                if kept == position:
                    self.rows.update({(table, row): node for table in task.keep.tables})


@pytest.mark.parametrize(
    ("at_once", "policy", "stops"),
    covering(
        [True, False], ["cellular:max_steps=1", "cellular:max_steps=5", "lazy", "agenda", "sufficient"], [None, 1, 3]
    ),
)
def test_every_node_reads_the_rows_of_its_memory_in_order(policy: str, at_once: bool, stops: int | None) -> None:
    scheduler = Scheduler(make(policy), loops_ahead=True)
    device = Device(scheduler, stops)
    lengths = (3, 1, 5, 3, 2, 3)
    arrivals = [
        RequestArrived(RequestId(i), graph(length, open_ended=stops is not None), 0.0)
        for i, length in enumerate(lengths)
    ]  # fmt: skip
    following = deque(scheduler.handle(*(CellTypeAdded(cell, 0.0) for cell in CELLS), *arrivals))
    scheduler.check_invariants()
    replies = 0
    while following:
        command = following.popleft()
        replies += isinstance(command, Reply)
        if isinstance(command, Admit):
            device.bases[command.request] = command.base
        if isinstance(command, RunTask):
            following.extend(device.run(command, at_once=at_once))
    assert replies == len(lengths)
    for i, length in enumerate(lengths):
        read = device.read[i]
        steps, past = list(range(length)), length + 6
        taken = 2 * length if stops is None else min(stops, 2 * length)
        assert all(read[length + k] == steps[::-1] for k in range(3))
        assert all(read[length + 3 + k] == [length, length + 1, length + 2] for k in range(2))
        assert read[length + 5] == []
        assert [read[past + k] for k in range(taken)] == [list(range(past, past + k)) for k in range(taken)]
        assert read[past + 2 * length] == steps
    for pool in scheduler.state.tables.pools:
        assert (
            len(scheduler.state.arena.free_rows_of(pool.number)) == scheduler.state.arena.pools[NUM_ROWS, pool.number]
        )


def test_without_planned_rows_memories_are_edges_alone() -> None:
    scheduler = Scheduler(make("cellular"), plan_rows=False)
    shared = graph(4)
    following = deque(scheduler.handle(
        *(CellTypeAdded(cell, 0.0) for cell in CELLS), *[RequestArrived(RequestId(i), shared, 0.0) for i in range(5)]
    ))  # fmt: skip
    replies = 0
    while following:
        command = following.popleft()
        replies += isinstance(command, Reply)
        if isinstance(command, RunTask):
            following.extend(scheduler.handle(StepsFinished(command.task, 0, command.num_steps, 0.0)))
            scheduler.check_invariants()
    assert replies == 5


@pytest.mark.parametrize("after", range(1, 12, 2))
def test_a_request_that_is_cancelled_gives_every_row_back(after: int) -> None:
    scheduler = Scheduler(make("cellular:max_steps=1"), loops_ahead=True)
    device = Device(scheduler, None)
    arrivals = [RequestArrived(RequestId(i), graph(4, open_ended=i % 2 == 1), 0.0) for i in range(3)]
    following = deque(scheduler.handle(*(CellTypeAdded(cell, 0.0) for cell in CELLS), *arrivals))
    count = 0
    while following:
        command = following.popleft()
        if isinstance(command, Admit):
            device.bases[command.request] = command.base
        if isinstance(command, RunTask):
            count += 1
            if count == after:
                following.extend(scheduler.handle(RequestCancelled(RequestId(1), 0.0)))
                scheduler.check_invariants()
            following.extend(device.run(command, at_once=True))
    assert not scheduler.state.slots
    for pool in scheduler.state.tables.pools:
        assert (
            len(scheduler.state.arena.free_rows_of(pool.number)) == scheduler.state.arena.pools[NUM_ROWS, pool.number]
        )
