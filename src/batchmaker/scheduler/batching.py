"""Forming tasks: Batch and FormBatchedTask of Algorithm 1 (BatchMaker section 4.3), on arrays.

A step is one batched call of a cell. A task is the steps that one call of Batch submits: up to MaxTasksToSubmit steps,
or as many as fit into a budget of time. The scheduler core calls `Batcher.form_task`; `form` is one compiled call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled
from batchmaker.graph.spec import TypeId
from batchmaker.scheduler.arena import State
from batchmaker.scheduler.commands import FetchOutput, Keep, Reserve, RunTask, TaskLanes
from batchmaker.scheduler.events import TaskId, WorkerId
from batchmaker.scheduler.find_steps import find_steps
from batchmaker.scheduler.layout import (
    END_TABLE,
    FIRST_TABLE,
    HEAD_OF_QUEUE,
    KEY_RANK,
    LANES_BEGIN,
    MAX_BATCH,
    MIN_BATCH,
    NODE_MASK,
    NOWHERE,
    NUM_FREE,
    NUM_INPUTS,
    NUM_LANES,
    NUM_PASSED,
    NUM_PORTS,
    NUM_RANKED,
    NUM_RESERVED,
    NUM_ROWS,
    NUM_RUNNING,
    NUM_SEQUENCE,
    POOL,
    ROWS_BEGIN,
    STEERING_ON,
    STEPS_ON,
    TAIL_OF_QUEUE,
    TASKS_ON,
    TURNS_PASSED,
)
from batchmaker.scheduler.priorities import priority_of
from batchmaker.scheduler.queues import candidates, put, ranks_of, sort, take
from batchmaker.scheduler.row_release import marked
from batchmaker.scheduler.state import NO_NODES, SchedulerState, TaskEntry, TypeEntry
from batchmaker.scheduler.steps import (
    AT_LANE,
    AT_NODE,
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

Ids = NDArray[np.int64]

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


class Rules(NamedTuple):
    """How tasks are formed.

    - plan_rows, own_type_follows, loops_ahead: see Scheduler and SchedulerState.
    - share_workers: there are several workers, so some nodes may be pinned to another one.
    - max_steps, budget_s: limits of a task; see CellPolicy. weighs_tasks: its length follows from its own cost.
    - patience: how many batches in a row may have another depth than the first node in the queue, where a batch holds
      only nodes of one depth and a task has one step (see `_depth`); NOWHERE elsewhere.
    - aged_every: of the tasks of one type on one worker in which a higher priority goes first while a lower one waits,
      one of so many takes the nodes that have been ready longest, whatever their priority; 0: none does.
    """

    plan_rows: bool
    own_type_follows: bool
    loops_ahead: bool
    share_workers: bool
    max_steps: int
    budget_s: float
    weighs_tasks: bool
    patience: int
    aged_every: int


@compiled
def _num_ahead(rules: Rules, full_s: float) -> int:
    """Return how many full batches of ready nodes are candidates for a task. full_s: seconds of a full step."""
    if rules.budget_s == np.inf:
        return rules.max_steps
    if not rules.weighs_tasks:
        return BATCHES_AHEAD
    return min(max(int(rules.budget_s / full_s), BATCHES_AHEAD), MOST_AHEAD)


@compiled
def _depth(state: State, rules: Rules, depth_of: Ids, type_id: int, worker: int, by_age: bool) -> tuple[int, int]:
    """Return the depth of the nodes of a batch, and NUM_PASSED after it.

    It is the smallest depth of a ready node. After `patience` batches in a row of another depth than that of the first
    node in the queue, it is the depth of this node. Otherwise a stream of newcomers, all at depth 0, would block the
    older nodes for ever. With `by_age` it is the depth of the node that has been ready longest.
    """
    types = state.types
    keys, _ = candidates(
        state.nodes, state.subgraphs, types, state.queue, depth_of, type_id, worker, NOWHERE, by_age,
        types[TAIL_OF_QUEUE, type_id] - types[HEAD_OF_QUEUE, type_id],
    )  # fmt: skip
    if len(keys) == 0:
        return NOWHERE, types[NUM_PASSED, type_id]
    oldest = lowest = depth_of[keys[0] & NODE_MASK]
    for key in keys:
        lowest = min(lowest, depth_of[key & NODE_MASK])
    depth = oldest if by_age or types[NUM_PASSED, type_id] >= rules.patience else lowest
    return depth, 0 if depth == oldest else types[NUM_PASSED, type_id] + 1


@compiled
def form(state: State, rules: Rules, depth_of: Ids, type_id: int, worker: int, by_age: bool, may_ask: bool) -> Steps:
    """Form a task of ready nodes of one type, and note that it is on the worker; see `find_steps`.

    depth_of: [nodes], if `rules.patience` asks for it. may_ask: whether to change nothing and return a task without
    steps if the pool has fewer free rows than the task could use; never if it has too few for the first step. A task
    without steps and without a wish means that no ready node may run on the worker.
    """
    nodes, subgraphs, types, queue, pools, lanes = (
        state.nodes, state.subgraphs, state.types, state.queue, state.pools, state.lanes,
    )  # fmt: skip
    only_worker = worker if rules.share_workers else NOWHERE
    ranked = state.counts[NUM_RANKED] > 0
    max_batch, pool = types[MAX_BATCH, type_id], types[POOL, type_id]
    is_turn = ranked and rules.aged_every > 0 and lanes[TURNS_PASSED, worker, type_id] >= rules.aged_every - 1
    by_age = by_age or is_turn
    depth, num_passed = NOWHERE, types[NUM_PASSED, type_id]
    if rules.patience != NOWHERE:
        depth, num_passed = _depth(state, rules, depth_of, type_id, only_worker, by_age)
    seconds = state.seconds[type_id, : max_batch + 1]
    num_waiting = types[TAIL_OF_QUEUE, type_id] - types[HEAD_OF_QUEUE, type_id]
    highest = queue[KEY_RANK, types[HEAD_OF_QUEUE, type_id]] if num_waiting > 0 else 0
    keys, ranks = candidates(
        nodes, subgraphs, types, queue, depth_of, type_id, only_worker, depth, by_age,
        max_batch * _num_ahead(rules, seconds[max_batch]),
    )  # fmt: skip
    budget_s = rules.budget_s
    if not ranked and len(keys) >= BATCHES_AHEAD * max_batch:
        is_alone = True
        for other in range(types.shape[1]):
            is_alone &= other == type_id or types[TAIL_OF_QUEUE, other] == types[HEAD_OF_QUEUE, other]
        budget_s *= SATURATED_BUDGETS if is_alone else 1
    rows_wanted, rows_needed, batch = 0, 0, min(len(keys), max_batch)
    if rules.plan_rows and batch > 0:
        most = 1.0 * rules.max_steps
        wanted = batch * int(min(most, budget_s / seconds[batch] + 1)) + max_batch
        if pools[NUM_FREE, pool] < (wanted if may_ask else batch):
            rows_wanted, rows_needed, keys, ranks = wanted, batch, keys[:0], ranks[:0]
    num_inputs, num_sequence = types[NUM_INPUTS, type_id], types[NUM_SEQUENCE, type_id]
    places = Places(
        rules.plan_rows, worker, pools[NUM_FREE, pool], pools[FIRST_TABLE, pool], pools[END_TABLE, pool],
        num_inputs if rules.plan_rows else 0,
        (num_inputs if num_sequence == NOWHERE else num_sequence) if rules.plan_rows else 0,
    )  # fmt: skip
    limits = TaskLimits(
        max_batch, types[MIN_BATCH, type_id], rules.max_steps if budget_s > 0 else 1, budget_s, num_waiting > len(keys),
        rules.loops_ahead, rules.own_type_follows,
    )  # fmt: skip
    rows, first = state.free_rows[pools[ROWS_BEGIN, pool] :], lanes[LANES_BEGIN, worker, type_id]
    steps = find_steps(
        nodes, subgraphs, state.source, state.source_table, state.consumer, state.is_host,
        state.ports[type_id, : types[NUM_PORTS, type_id]], rows[: pools[NUM_ROWS, pool]],
        state.occupant[first : first + lanes[NUM_LANES, worker, type_id]], state.lane_tables[type_id], places, limits,
        seconds, rows_wanted, rows_needed, keys, ranks[: len(keys) if ranked and not by_age else 0],
    )  # fmt: skip
    if steps.num_steps == 0:
        return steps
    types[NUM_PASSED, type_id] = num_passed
    if rules.plan_rows:
        pools[NUM_FREE, pool] = steps.num_free
    take(nodes, subgraphs, types, queue, depth_of, type_id, only_worker, depth, by_age, keys[: steps.num_used])
    more = steps.ready.copy()
    ranks = ranks_of(nodes, state.requests, state.counts, more)
    sort(more, ranks)
    put(types, queue, type_id, more, ranks)
    if ranked and by_age:
        lanes[TURNS_PASSED, worker, type_id] = 0
    elif ranked and types[TAIL_OF_QUEUE, type_id] > types[HEAD_OF_QUEUE, type_id]:
        lowest = queue[KEY_RANK, types[TAIL_OF_QUEUE, type_id] - 1]
        lanes[TURNS_PASSED, worker, type_id] += priority_of(lowest) < priority_of(highest)
    types[NUM_RUNNING, type_id] += steps.num_steps
    state.workers[STEPS_ON, worker] += steps.num_steps
    state.workers[TASKS_ON, worker] += 1
    for step in range(steps.num_steps):
        state.workers[STEERING_ON, worker] += steps.flags[STEERS, step]
    return steps


@final
class Batcher:
    """Forms tasks from the state."""

    def __init__(self, state: SchedulerState, rules: Rules) -> None:
        self._state = state
        self._rules = rules

    def form_task(self, task: TaskId, type_id: TypeId, worker: WorkerId, *, by_age: bool = False) -> Formed | None:
        """Form a task of ready nodes of one type; None if all of them are pinned to other workers.

        by_age: of those that have been ready longest, also if it is not their turn within the type. Raises
        NoMemoryError, with nothing changed, if there is no memory for the rows of its first step.
        """
        state, entry = self._state, self._state.types[type_id]
        arena, reserves, may_ask = state.arena, list[Reserve](), True
        depth_of = NO_NODES if state.depths is None else state.depths.of
        if entry.num_sequence_inputs is not None and not entry.has_lane_tables:
            state.tables.enter_lanes(entry.cell, entry.num_sequence_inputs, state.num_workers)
            entry.has_lane_tables = True
        while True:
            steps = form(arena.tables, self._rules, depth_of, type_id, worker, by_age, may_ask)
            if steps.rows_wanted:
                grown = state.tables.fit_rows(entry.pool, steps.rows_wanted, steps.rows_needed, state.grow)
                reserves += () if grown is None else (grown,)
                may_ask = False
            elif steps.lanes_wanted:
                arena.grow_lanes(worker, type_id, steps.lanes_wanted)
                if steps.num_steps:
                    break
            else:
                break
        if not steps.num_steps:
            return None
        if entry.num_sequence_inputs is not None and state.plan_rows:
            reserves += self._reserve_lanes(entry, worker)
        formed = self._described(task, worker, entry, steps)
        if state.observed:
            state.submitted(type_id, formed[0].nodes)
        return Formed(formed[0], formed[1], tuple(reserves))

    def _reserve_lanes(self, entry: TypeEntry, worker: WorkerId) -> tuple[Reserve, ...]:
        """Return how the lane tables must grow, if there are more lanes than rows."""
        assert entry.num_sequence_inputs is not None
        type_id, lanes = entry.cell.type_id, self._state.arena.lanes
        if lanes[NUM_LANES, worker, type_id] <= lanes[NUM_RESERVED, worker, type_id]:
            return ()
        lanes[NUM_RESERVED, worker, type_id] = max(int(lanes[NUM_LANES, worker, type_id]), entry.cell.max_batch)
        specs = self._state.tables.lanes(worker, entry.cell, entry.num_sequence_inputs)
        return (Reserve(specs, int(lanes[NUM_RESERVED, worker, type_id])),)

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
        return run, TaskEntry(worker, type_id, steps)

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
