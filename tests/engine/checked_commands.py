"""Checks of the scheduler's commands that no loop makes: those that compute addresses read and write without any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from batchmaker.core.commands import ZERO_TABLE, Admit, Read, Reserve, RunTask, StateStored, TaskLanes
from batchmaker.core.scheduler import Scheduler


class CommandChecks:
    """Checks each command before it is carried out: every row that it names is one of its table, and no row is missing.

    wrong: what was found. every: after so many calls of the scheduler its state is checked as well.
    """

    def __init__(self, scheduler: Scheduler, every: int = 16) -> None:
        self._scheduler = scheduler
        self._num_rows = np.zeros(64, np.int64)  # by table
        self._num_calls = 0
        self._every = every
        self.wrong: list[str] = []

    def __call__(self, events: Sequence[Any], commands: Sequence[Any]) -> None:
        """As `CellDriver.record`. What is wrong is noted: a driver goes on when this raises."""
        try:
            for command in commands:
                self._check(command)
            self._num_calls += 1
            if self._num_calls % self._every == 0:
                self._scheduler.check_invariants()
        except Exception as error:
            self.wrong.append(f"{type(error).__name__}: {error}")

    def _check(self, command: Any) -> None:
        match command:
            case Reserve():
                for spec in command.tables:
                    while spec.table >= len(self._num_rows):
                        self._num_rows = np.concatenate((self._num_rows, np.zeros_like(self._num_rows)))
                    self._num_rows[spec.table] = max(self._num_rows[spec.table], command.num_rows)
            case Admit():
                rows = np.array([command.base + command.num_nodes - 1])
                for table in command.host_tables:
                    self._are_rows("data", np.array([table]), rows)
            case Read():
                self._are_rows("a read", np.array([command.table]), np.array([command.row]))
            case StateStored():
                for stored in command.rows:
                    self._are_rows("a state", np.array(stored.tables), np.full(len(stored.tables), stored.row))
            case RunTask():
                self._check_task(command)

    def _check_task(self, task: RunTask) -> None:
        count = len(task.nodes)
        assert (np.diff(task.ends, prepend=0) > 0).all()
        assert task.ends[-1] == count
        chained = np.zeros(count, np.bool_)
        num_state = 0
        if task.lanes is not None:
            chained = np.repeat(task.lanes.used, np.diff(task.ends, prepend=0))
            num_state = len(task.lanes.tables)
            self._check_lanes(task.lanes, chained, count)
        num_memories = 0 if task.memories is None else len(task.memories.firsts)
        for port in range(num_memories):
            firsts, lengths = task.memories.firsts[port], task.memories.lengths[port]
            _are_below(f"memory {port}", firsts + lengths, len(task.memories.rows) + 1)
            for table, first, length in zip(task.source_tables[port], firsts, lengths, strict=True):
                rows = task.memories.rows[first : first + length]
                self._are_rows(f"memory {port}", np.full(length, table), rows)
        for port in range(num_memories, len(task.source_tables)):
            mine = ~chained if port >= len(task.source_tables) - num_state else np.ones(count, np.bool_)
            self._are_rows(f"input {port}", task.source_tables[port][mine], task.source_rows[port][mine])
        if task.keep is not None:
            positions = np.arange(count) if task.keep.positions is None else task.keep.positions
            _are_below("kept positions", positions, count)
            assert len(positions) == len(task.keep.rows)
            for table in task.keep.tables:
                self._are_rows("kept", np.full(len(positions), table), task.keep.rows)
        for fetch in task.fetches:
            _are_below("fetched positions", fetch.positions, count)

    def _check_lanes(self, lanes: TaskLanes, chained: Any, count: int) -> None:
        _are_below("moves", lanes.move_at, count)
        for part, table in enumerate(lanes.tables):
            mine = lanes.rows[chained]
            self._are_rows("lanes", np.full(len(mine), table), mine)
            self._are_rows("moved state", lanes.move_tables[part], lanes.move_rows[part])

    def _are_rows(self, what: str, tables: Any, rows: Any) -> None:
        _are_below(f"tables of {what}", tables, len(self._num_rows))
        rows, tables = rows[tables != ZERO_TABLE], tables[tables != ZERO_TABLE]
        _are_below(what, rows, self._num_rows[tables])


def _are_below(what: str, numbers: Any, limits: Any) -> None:
    outside = (numbers < 0) | (numbers >= limits)
    assert not outside.any(), f"{what}: {numbers[outside]} of {np.broadcast_to(limits, numbers.shape)[outside]}"
