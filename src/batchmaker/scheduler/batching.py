"""Forming tasks: Batch and FormBatchedTask of Algorithm 1 (BatchMaker section 4.3), on arrays.

A step is one batched call of a cell. A task is the steps that one call of Batch submits: up to MaxTasksToSubmit steps,
or as many as fit into a budget of time. The scheduler core calls `Batcher.form_task`; `find_steps` does the work.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.graph.spec import TypeId
from batchmaker.policies.ageing import AgeTurns
from batchmaker.scheduler.commands import FetchOutput, Keep, Reserve, Rows, RunTask, TaskLanes
from batchmaker.scheduler.events import TaskId, WorkerId
from batchmaker.scheduler.find_steps import find_steps
from batchmaker.scheduler.lanes import LaneMap
from batchmaker.scheduler.priorities import priority_of
from batchmaker.scheduler.progress import unpinned_of
from batchmaker.scheduler.ready import Keys
from batchmaker.scheduler.row_release import marked
from batchmaker.scheduler.rows import NoMemoryError
from batchmaker.scheduler.state import SchedulerState, TaskEntry, TypeEntry
from batchmaker.scheduler.steps import (
    AT_LANE,
    AT_NODE,
    AT_SUBGRAPH,
    HAS_LANES,
    IS_DENSE,
    MAY_STOP,
    NUM_FACTS,
    POSITIONS,
    STEERS,
    Places,
    Steps,
    TaskLimits,
)

NONE: Final[Rows] = np.empty(0, np.int64)
NO_LANES: Final[Rows] = np.empty((0, 0), np.int64)
Allowed = Callable[[Keys], NDArray[np.bool_]]
"""Returns which ready nodes may be taken, as a mask [keys]."""

BATCHES_AHEAD: Final = 2
"""How many full batches of ready nodes are candidates for a task that is bounded by time.

This is enough for the chains that join within the task.
"""

MOST_AHEAD: Final = 8
"""How many are at most where a task's steps are weighed against its own cost: as many as it has time for. Of trees and
lattices nothing joins within a task there, and small cells would need a task for every two batches."""

TASK_S: Final = 150e-6
"""Seconds that a task of the engine costs beside its steps: to choose and form it, its results (docs/benchmarks.md)."""

TASKS_WORTH: Final = 27
"""How often its own cost a task's steps may take (see CellPolicy, `weighs_tasks`): for `TASK_S`, the 4 ms of decision
14."""

SATURATED_BUDGETS: Final = 2
"""How many budgets a task may take while another full batch is waiting.

A newcomer could not join it earlier in any case, because the waiting nodes come first.
"""


@dataclass(frozen=True, slots=True)
class Formed:
    """A task, the record of it, and the tables that must grow before it runs."""

    run: RunTask
    entry: TaskEntry
    reserves: tuple[Reserve, ...]


@final
class Batcher:
    """Forms tasks from the state.

    - share_workers: there are several workers, so some nodes may be pinned to another one.
    - max_steps, budget_s: limits of a task; see CellPolicy.
    - task_s: seconds that a task costs beside its steps, where its length follows from that (`weighs_tasks`); infinity
      elsewhere.
    - loops_ahead: see TaskLimits.
    - patience: given if a batch may hold only nodes of one depth; then a task has one step. How many batches in a row
      may have another depth than the first node in the queue (see `_one_depth`).

    Of the tasks of one type on one worker in which a higher priority goes first while a lower one waits, one of
    `state.aged_every` takes the nodes that have been ready longest, whatever their priority.
    """

    def __init__(
        self,
        state: SchedulerState,
        *,
        share_workers: bool,
        max_steps: int,
        budget_s: float,
        loops_ahead: bool = False,
        task_s: float = math.inf,
        patience: int | None = None,
    ) -> None:
        self._state = state
        self._turns: defaultdict[tuple[WorkerId, TypeId], AgeTurns] = defaultdict(lambda: AgeTurns(state.aged_every))
        self._patience = patience
        self._share_workers = share_workers
        self._max_steps = 1 if patience is not None else max_steps
        self._weighs_tasks = task_s < math.inf
        self._budget_s = min(budget_s, TASKS_WORTH * task_s)
        self._loops_ahead = loops_ahead

    def form_task(self, task: TaskId, type_id: TypeId, worker: WorkerId, *, by_age: bool = False) -> Formed | None:
        """Form a task of ready nodes of one type; None if all of them are pinned to other workers.

        by_age: of those that have been ready longest, also if it is not their turn within the type. Raises
        NoMemoryError, with nothing changed, if there is no memory for the rows of its first step.
        """
        state, entry = self._state, self._state.types[type_id]
        arena = state.arena
        turns = self._turns[worker, type_id] if state.priorities.differ else None
        by_age = by_age or (turns is not None and turns.is_due)
        highest = 0 if turns is None else entry.ready.highest

        def unpinned(keys: Keys) -> NDArray[np.bool_]:
            return unpinned_of(arena.of_nodes, arena.of_subgraphs, worker, keys)

        allowed = self._one_depth(entry, unpinned if self._share_workers else None, by_age=by_age)
        candidates = entry.ready.take(entry.cell.max_batch * self._num_ahead(entry), allowed, by_age=by_age)
        if len(candidates) == 0:
            return None
        lane_map = None if entry.num_sequence_inputs is None else state.lane_map(worker, type_id)
        reserves: list[Reserve] = []
        steps = self._find(entry, worker, lane_map, candidates, reserves, by_age=by_age)
        entry.ready.merge(np.concatenate((candidates[steps.num_used :], steps.ready)))
        if turns is not None:
            if by_age:
                turns.had_turn()
            elif len(entry.ready) and priority_of(entry.ready.lowest) < priority_of(highest):
                turns.passed_over()
        if lane_map is not None and lane_map.capacity > lane_map.num_reserved and state.plan_rows:
            reserves.append(self._reserve_lanes(entry, worker, lane_map))
        formed = self._described(task, worker, entry, steps)
        self._submitted(entry, formed)
        return Formed(formed[0], formed[1], tuple(reserves))

    def _num_ahead(self, entry: TypeEntry) -> int:
        """Return how many full batches of ready nodes are candidates for a task."""
        if self._budget_s == np.inf:
            return self._max_steps
        if not self._weighs_tasks:
            return BATCHES_AHEAD
        return min(max(int(self._budget_s / entry.step_times.seconds[-1]), BATCHES_AHEAD), MOST_AHEAD)

    def _find(
        self,
        entry: TypeEntry,
        worker: WorkerId,
        lane_map: LaneMap | None,
        candidates: Keys,
        reserves: list[Reserve],
        *,
        by_age: bool,
    ) -> Steps:
        """Find the steps of the task. Adds lanes and rows if there are too few.

        Appends the tables that must grow to `reserves`.
        """
        state, arena, cell = self._state, self._state.arena, entry.cell
        ranks = None if by_age else state.priorities.of(candidates)
        budget_s = self._budget_s
        if not state.priorities.differ and len(candidates) >= BATCHES_AHEAD * cell.max_batch and self._is_alone(entry):
            budget_s *= SATURATED_BUDGETS
        max_steps = self._max_steps if budget_s > 0 else 1
        limits = TaskLimits(
            cell.max_batch, cell.min_batch, max_steps, budget_s, len(entry.ready) > 0, self._loops_ahead,
            state.own_type_follows,
        )  # fmt: skip
        batch = min(len(candidates), cell.max_batch)
        if state.plan_rows:
            try:
                grown = entry.pool.fit(self._rows_wanted(entry, batch, budget_s), batch, state.grow)
            except NoMemoryError:
                entry.ready.merge(candidates)
                raise
            reserves += () if grown is None else (grown,)
        while True:
            free, num_free = entry.pool.free
            num_sequence = len(cell.inputs) if entry.num_sequence_inputs is None else entry.num_sequence_inputs
            places = Places(
                state.plan_rows, worker, num_free, entry.pool.first_table, entry.pool.end_table,
                len(cell.inputs) if state.plan_rows else 0, num_sequence if state.plan_rows else 0,
            )  # fmt: skip
            steps = find_steps(
                arena.of_nodes, arena.of_subgraphs, arena.source, arena.source_table, arena.consumer,
                state.tables.is_host, entry.ports, free, NONE if lane_map is None else lane_map.occupant,
                NO_LANES if lane_map is None else self._lane_tables(entry, worker), places, limits,
                entry.step_times.seconds, candidates, NONE if ranks is None else ranks,
            )  # fmt: skip
            if state.plan_rows:
                entry.pool.take(steps.num_free)
            if lane_map is not None and steps.lanes_wanted:
                lane_map.grow(steps.lanes_wanted)
            if steps.num_steps:
                return steps

    def _is_alone(self, entry: TypeEntry) -> bool:
        """Whether no other type has ready nodes."""
        return all(other is entry or not len(other.ready) for other in self._state.types)

    def _rows_wanted(self, entry: TypeEntry, batch: int, budget_s: float) -> int:
        """Return an estimate of the free rows with which the task can have all its steps."""
        steps_s = budget_s / entry.step_times.seconds[batch]
        return batch * int(min(self._max_steps, steps_s + 1)) + entry.cell.max_batch

    def _lane_tables(self, entry: TypeEntry, worker: WorkerId) -> Rows:
        """Return the lane tables of a type: [workers, state inputs]. Only the first worker if there is no other."""
        return self._state.tables.lane_tables(
            entry.cell, entry.num_sequence_inputs or 0, len(self._state.worker_steps) if self._share_workers else 1
        )

    def _reserve_lanes(self, entry: TypeEntry, worker: WorkerId, lane_map: LaneMap) -> Reserve:
        assert entry.num_sequence_inputs is not None
        specs = self._state.tables.lanes(worker, entry.cell, entry.num_sequence_inputs)
        lane_map.num_reserved = max(lane_map.capacity, entry.cell.max_batch)
        return Reserve(specs, lane_map.num_reserved)

    # --- describing a task ---------------------------------------------------------------------------------------

    def _described(self, task: TaskId, worker: WorkerId, entry: TypeEntry, steps: Steps) -> tuple[RunTask, TaskEntry]:
        """Return the command, and the record for updates when the steps finish."""
        flags = steps.flags > 0
        type_id, at, ends = entry.cell.type_id, steps.at, steps.ends[POSITIONS]
        num_inputs = (len(at) - NUM_FACTS) // 2
        keep = Keep(entry.pool.table_ids, steps.kept[1], steps.kept[0]) if steps.kept.shape[1] else None
        run = RunTask(
            task, worker, type_id, steps.largest, ends, at[AT_NODE],
            at[NUM_FACTS : NUM_FACTS + num_inputs], at[NUM_FACTS + num_inputs :],
            self._lanes(entry, worker, steps, flags), keep, self._fetches(entry, steps), flags[MAY_STOP],
        )  # fmt: skip
        left = [(self._state.lane_map(WorkerId(number), type_id), lane) for number, lane in steps.left.T.tolist()]
        record = TaskEntry(
            task, worker, type_id, at[AT_NODE], at[AT_SUBGRAPH], steps.ends, steps.done, steps.entering, left,
            flags[MAY_STOP], flags[STEERS],
        )  # fmt: skip
        return run, record

    def _lanes(self, entry: TypeEntry, worker: WorkerId, steps: Steps, flags: NDArray[np.bool_]) -> TaskLanes | None:
        used = flags[HAS_LANES]
        if not used.any():
            return None
        assert entry.num_sequence_inputs is not None
        specs = self._state.tables.lanes(worker, entry.cell, entry.num_sequence_inputs)
        tables, moves = tuple([spec.table for spec in specs]), steps.moves
        return TaskLanes(
            tables, steps.at[AT_LANE], used, flags[IS_DENSE], moves[0], moves[1 : 1 + len(tables)],
            moves[1 + len(tables) :],
        )  # fmt: skip

    def _fetches(self, entry: TypeEntry, steps: Steps) -> tuple[FetchOutput, ...]:
        return tuple(
            [
                FetchOutput(output, marked(steps.marks, output))
                for output in range(len(entry.cell.outputs) if steps.all_marks else 0)
                if steps.all_marks >> output & 1
            ]
        )

    def _submitted(self, entry: TypeEntry, formed: tuple[RunTask, TaskEntry]) -> None:
        """Count the steps on the worker, and tell what policies read about them."""
        state, (run, record) = self._state, formed
        entry.num_running += run.num_steps
        state.worker_steps[run.worker] += run.num_steps
        state.worker_steering[run.worker] += int(np.count_nonzero(record.steers))
        if state.observed:
            state.submitted(run.type_id, record.nodes, record.subgraphs)

    def _one_depth(self, entry: TypeEntry, allowed: Allowed | None, *, by_age: bool) -> Allowed | None:
        """Return a test for the ready nodes of the smallest depth.

        After `patience` batches in a row of another depth than that of the first node in the queue, it is a test for
        the depth of this node. Otherwise a stream of newcomers, all at depth 0, would block the older nodes for ever.
        With `by_age` it is a test for the depth of the node that has been ready longest.
        """
        depths = self._state.depths
        if self._patience is None or depths is None:
            return allowed
        keys = np.sort(entry.ready.keys()) if by_age else entry.ready.keys()
        keys = keys if allowed is None else keys[allowed(keys)]
        if len(keys) == 0:
            return allowed
        lowest, oldest = depths.lowest(keys)
        depth = oldest if by_age or entry.num_passed >= self._patience else lowest
        entry.num_passed = 0 if depth == oldest else entry.num_passed + 1

        def at_depth(keys: Keys) -> NDArray[np.bool_]:
            mask = depths.at(depth, keys)
            return mask if allowed is None else mask & allowed(keys)

        return at_depth
