"""Forming tasks: Batch and FormBatchedTask of Algorithm 1 (BatchMaker section 4.3), on arrays.

A step is one batched call of a cell. A task is the steps that one call of Batch submits: up to MaxTasksToSubmit steps,
or as many as fit into a budget of time. `form` is compiled, a part of `turn`; `Scheduler` calls `Batcher`.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Flags, Ints
from batchmaker.compiled import compiled, compiled_inline
from batchmaker.core.addresses import state_at
from batchmaker.core.commands import Command, FetchOutput, Keep, Reserve, RunTask, TaskLanes, TaskMemories
from batchmaker.core.events import TaskId, WorkerId
from batchmaker.core.find_steps import find_steps
from batchmaker.core.layout import (
    AGED_EVERY,
    END_TABLE,
    FIRST_TABLE,
    HEAD_OF_QUEUE,
    KEY_RANK,
    LANES_BEGIN,
    LOOPS_AHEAD,
    MAX_BATCH,
    MAX_STEPS,
    MIN_BATCH,
    NODE_MASK,
    NODES,
    NOWHERE,
    NUM_FREE,
    NUM_INPUTS,
    NUM_LANES,
    NUM_MEMORIES,
    NUM_PASSED,
    NUM_PORTS,
    NUM_RANKED,
    NUM_RESERVED,
    NUM_ROWS,
    NUM_RUNNING,
    NUM_STEP_INPUTS,
    OWN_MEMORY,
    OWN_TYPE_FOLLOWS,
    PATIENCE,
    PLAN_ROWS,
    POOL,
    RANK,
    REQUEST,
    ROWS_BEGIN,
    SHARE_WORKERS,
    SHORT_TASKS,
    STEERING_ON,
    STEPS_ON,
    TAIL_OF_QUEUE,
    TASKS_ON,
    TURNS_PASSED,
    USED,
    WEIGHS_TASKS,
)
from batchmaker.core.priorities import is_chunk, level_of
from batchmaker.core.queues import candidates, put, ranks_of, sort, take
from batchmaker.core.state import SchedulerState, TaskEntry, TypeEntry
from batchmaker.core.steps import (
    ALL_FLAGS,
    ALL_MARKS,
    AT_LANE,
    AT_NODE,
    FIRST_PART,
    HAS_LANES,
    HEADER,
    IS_DENSE,
    LANES_WANTED,
    LARGEST,
    MAY_STOP,
    NUM_FACTS,
    OF_TYPE,
    ON_WORKER,
    POSITIONS,
    ROWS_NEEDED,
    ROWS_WANTED,
    STEERS,
    Places,
    TaskArrays,
    TaskLimits,
    marked,
    packed,
    without_steps,
)

BATCHES_AHEAD: Final = 2
"""How many full batches of ready nodes are candidates for a task that is bounded by time.

This is enough for the chains that join within the task.
"""

MOST_AHEAD: Final = 8
"""How many are at most where a task's steps are weighed against its own cost: as many as it has time for. Of trees and
lattices nothing joins within a task there, and small cells would need a task for every two batches."""

TASK_S: Final = 150e-6
"""Seconds that a task of the engine costs beside its steps: to choose and form it, its results (docs/policies.md)."""

TASKS_WORTH: Final = 27
"""How often its own cost a task's steps may take (see CellPolicy, `weighs_tasks`): for `TASK_S`, the 4 ms of decision
14."""

SHORT_TASK_S: Final = 1e-3
"""Seconds of steps in a task while live streams are served: a frame that comes waits for the end of a task. A step with
others has no more of their rows than such a task has time for."""

SATURATED_BUDGETS: Final = 2
"""How many budgets a task may take while another full batch is waiting.

A newcomer could not join it earlier in any case, because the waiting nodes come first.
"""


@compiled
def _num_ahead(rules: Ints, budget_s: float, full_s: float) -> int:
    """Return how many full batches of ready nodes are candidates for a task. full_s: seconds of a full step."""
    if budget_s == np.inf:
        return int(rules[MAX_STEPS])
    if not rules[WEIGHS_TASKS]:
        return BATCHES_AHEAD
    return min(max(int(budget_s / full_s), BATCHES_AHEAD), MOST_AHEAD)


@compiled
def _depth(
    nodes: Ints,
    subgraphs: Ints,
    types: Ints,
    queue: Ints,
    depth_of: Ints,
    patience: int,
    type_id: int,
    worker: int,
    by_age: bool,
) -> tuple[int, int]:
    """Return the depth of the nodes of a batch, and NUM_PASSED after it.

    It is the smallest depth of a ready node. After `patience` batches in a row of another depth than that of the first
    node in the queue, it is the depth of this node. Otherwise a stream of newcomers, all at depth 0, would block the
    older nodes for ever. With `by_age` it is the depth of the node that has been ready longest.
    """
    num_ready = types[TAIL_OF_QUEUE, type_id] - types[HEAD_OF_QUEUE, type_id]
    keys, _ = candidates(nodes, subgraphs, types, queue, depth_of, type_id, worker, NOWHERE, by_age, num_ready)
    if len(keys) == 0:
        return NOWHERE, types[NUM_PASSED, type_id]
    oldest = lowest = depth_of[keys[0] & NODE_MASK]
    for key in keys:
        lowest = min(lowest, depth_of[key & NODE_MASK])
    depth = oldest if by_age or types[NUM_PASSED, type_id] >= patience else lowest
    return depth, 0 if depth == oldest else types[NUM_PASSED, type_id] + 1


@compiled_inline
def _num_beside(nodes: Ints, requests: Ints, keys: Ints, known_s: NDArray[np.float64], max_batch: int) -> int:
    """Return the most rows of a step while live streams are served: all chunks, and others for `SHORT_TASK_S`.

    keys: the candidates. known_s: of the type; see State. A size of which nothing is known is expected to take its
    share of the next larger one that is, so that it is tried and known then; above all known ones, as much for a row.
    """
    chunks, rows, last = 0, 1, len(known_s) - 1
    for key in keys:
        chunks += is_chunk(requests[RANK, nodes[REQUEST, key & NODE_MASK]])
    while last >= 0 and np.isnan(known_s[last]):
        last -= 1
    row_s = known_s[last] / (1 << last) if last >= 0 else 0.0
    for size in range(len(known_s) - 1, -1, -1):
        if not np.isnan(known_s[size]):
            row_s = known_s[size] / (1 << size)
        if rows == 1 and row_s * (1 << size) <= SHORT_TASK_S:
            rows = 1 << size
    return min(max(chunks, rows), max_batch)


@compiled_inline
def form(addresses: Ints, type_id: int, worker: int, by_age: bool, may_ask: bool) -> Ints:
    """Form a task of ready nodes of one type, and note that it is on the worker; see `find_steps` and `packed`.

    by_age: of those that have been ready longest, also if it is not their turn within the type. may_ask: whether to
    change nothing and return a task without steps if the pool has fewer free rows than the task could use; always if it
    has too few for the first step. A task without steps and without a wish means that no ready node may run on the
    worker.
    """
    state = state_at(addresses)
    nodes, subgraphs, types, queue, pools, lanes = (
        state.nodes,
        state.subgraphs,
        state.types,
        state.queue,
        state.pools,
        state.lanes,
    )
    rules, workers, depth_of, budget_s = state.rules, state.workers, state.depth_of, state.budget_s[0, 0]
    if rules[SHORT_TASKS]:
        budget_s = min(budget_s, SHORT_TASK_S)
    only_worker = worker if rules[SHARE_WORKERS] else NOWHERE
    ranked, plan_rows = state.counts[NUM_RANKED] > 0, rules[PLAN_ROWS] > 0
    max_batch, pool = types[MAX_BATCH, type_id], types[POOL, type_id]
    num_inputs, num_step_inputs = types[NUM_INPUTS, type_id], types[NUM_STEP_INPUTS, type_id]
    if plan_rows and num_step_inputs != NOWHERE and lanes[NUM_LANES, worker, type_id] == 0:  # its first task there
        return without_steps(type_id, worker, 1)
    is_turn = ranked and 0 < rules[AGED_EVERY] <= lanes[TURNS_PASSED, worker, type_id] + 1
    by_age = by_age or is_turn
    depth, num_passed = NOWHERE, types[NUM_PASSED, type_id]
    if rules[PATIENCE] != NOWHERE:
        depth, num_passed = _depth(
            nodes, subgraphs, types, queue, depth_of, rules[PATIENCE], type_id, only_worker, by_age
        )
    seconds = state.seconds[type_id, : max_batch + 1]
    num_waiting = types[TAIL_OF_QUEUE, type_id] - types[HEAD_OF_QUEUE, type_id]
    highest = queue[KEY_RANK, types[HEAD_OF_QUEUE, type_id]] if num_waiting > 0 else 0
    keys, ranks = candidates(
        nodes,
        subgraphs,
        types,
        queue,
        depth_of,
        type_id,
        only_worker,
        depth,
        by_age,
        max_batch * _num_ahead(rules, budget_s, seconds[max_batch]),
    )
    if not ranked and len(keys) >= BATCHES_AHEAD * max_batch:
        is_alone = True
        for other in range(types.shape[1]):
            is_alone &= other == type_id or types[TAIL_OF_QUEUE, other] == types[HEAD_OF_QUEUE, other]
        budget_s *= SATURATED_BUDGETS if is_alone else 1
    if rules[SHORT_TASKS]:
        max_batch = _num_beside(nodes, state.requests, keys, state.known_s[type_id], max_batch)
    rows_wanted, rows_needed, batch, rows_each = 0, 0, min(len(keys), max_batch), 1 + types[OWN_MEMORY, type_id]
    if plan_rows and batch > 0:
        wanted = batch * int(min(1.0 * rules[MAX_STEPS], budget_s / seconds[batch] + 1))
        wanted = min(wanted, state.counts[USED + NODES]) + max_batch  # there are no more nodes
        wanted, needed = wanted * rows_each, batch * rows_each
        if pools[NUM_FREE, pool] < (wanted if may_ask else needed):
            rows_wanted, rows_needed, keys, ranks = wanted, needed, keys[:0], ranks[:0]
    places = Places(
        plan_rows,
        worker,
        pools[NUM_FREE, pool],
        pools[FIRST_TABLE, pool],
        pools[END_TABLE, pool],
        num_inputs if plan_rows else 0,
        (num_inputs if num_step_inputs == NOWHERE else num_step_inputs) if plan_rows else 0,
        types[NUM_MEMORIES, type_id] if plan_rows else 0,
        rows_each,
    )
    limits = TaskLimits(
        max_batch,
        types[MIN_BATCH, type_id],
        rules[MAX_STEPS] if budget_s > 0 else 1,
        budget_s,
        num_waiting > len(keys),
        rules[LOOPS_AHEAD] > 0,
        rules[OWN_TYPE_FOLLOWS] > 0,
    )
    first_row, first_lane = pools[ROWS_BEGIN, pool], lanes[LANES_BEGIN, worker, type_id]
    arrays = TaskArrays(
        nodes,
        subgraphs,
        state.source,
        state.source_table,
        state.reach,
        state.consumer,
        state.is_host,
        state.ports[type_id, : types[NUM_PORTS, type_id]],
        state.free_rows[first_row : first_row + pools[NUM_ROWS, pool]],
        state.occupant[first_lane : first_lane + lanes[NUM_LANES, worker, type_id]],
        state.lane_tables[type_id],
        seconds,
    )
    steps = find_steps(
        arrays, places, limits, rows_wanted, rows_needed, keys, ranks[: len(keys) if ranked and not by_age else 0]
    )
    task = packed(steps, type_id, worker)
    if steps.num_steps == 0:
        return task
    types[NUM_PASSED, type_id] = num_passed
    if plan_rows:
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
        lanes[TURNS_PASSED, worker, type_id] += level_of(lowest) < level_of(highest)
    types[NUM_RUNNING, type_id] += steps.num_steps
    workers[STEPS_ON, worker] += steps.num_steps
    workers[TASKS_ON, worker] += 1
    for step in range(steps.num_steps):
        workers[STEERING_ON, worker] += steps.flags[STEERS, step]
    return task


NO_FLAGS: Final[Flags] = np.zeros((0, 0), np.bool_)


@final
class Batcher:
    """Makes room for tasks, and commands of them."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def make_room(self, task: Ints) -> tuple[Reserve, ...]:
        """Make room for a task that lacks some; return how tables must grow first.

        Raises NoMemoryError, with nothing changed, if there is no memory for the rows of its first step.
        """
        state, header = self._state, task[:HEADER].tolist()
        entry, worker = state.types[header[OF_TYPE]], header[ON_WORKER]
        if header[ROWS_WANTED]:
            grown = state.tables.fit_rows(entry.pool, header[ROWS_WANTED], header[ROWS_NEEDED], state.grow)
            return () if grown is None else (grown,)
        if not entry.has_lane_tables:
            assert entry.num_step_inputs is not None
            state.tables.enter_lanes(entry.cell, entry.num_step_inputs, state.num_workers)
            entry.has_lane_tables = True
        state.arena.grow_lanes(worker, entry.cell.type_id, header[LANES_WANTED])
        return ()

    def formed(self, task: TaskId, steps: Ints, commands: list[Command]) -> None:
        """Note that a packed task is on its worker, and command what it needs, and to run it."""
        state, header = self._state, steps[:HEADER].tolist()
        entry, worker = state.types[header[OF_TYPE]], WorkerId(header[ON_WORKER])
        if header[LANES_WANTED]:  # for its next steps
            state.arena.grow_lanes(worker, entry.cell.type_id, header[LANES_WANTED])
        if entry.num_step_inputs is not None and state.plan_rows:
            self._reserve_lanes(entry, worker, commands)
        run = self._described(task, worker, entry, steps, header)
        if state.observed:
            state.submitted(entry.cell.type_id, run.nodes)
        state.tasks[task] = TaskEntry(steps, run)
        commands.append(run)

    def _reserve_lanes(self, entry: TypeEntry, worker: WorkerId, commands: list[Command]) -> None:
        """Command how the lane tables must grow, if there are more lanes than rows."""
        assert entry.num_step_inputs is not None
        type_id, lanes = entry.cell.type_id, self._state.arena.lanes
        if lanes[NUM_LANES, worker, type_id] > lanes[NUM_RESERVED, worker, type_id]:
            lanes[NUM_RESERVED, worker, type_id] = max(int(lanes[NUM_LANES, worker, type_id]), entry.cell.max_batch)
            specs = self._state.tables.lanes(worker, entry.cell, entry.num_step_inputs)
            commands.append(Reserve(specs, int(lanes[NUM_RESERVED, worker, type_id])))

    def _described(self, task: TaskId, worker: WorkerId, entry: TypeEntry, steps: Ints, header: list[int]) -> RunTask:
        """Return the command of a packed task."""
        parts = []
        for begin, rows, columns in zip(*[iter(header[FIRST_PART:])] * 3, strict=True):
            parts.append(steps[begin : begin + rows * columns].reshape(rows, columns))
        ends, flags, at, _, _, _, moves, keeps, marks, members = parts
        num_memories = len(entry.cell.memories) if self._state.plan_rows else 0
        inputs, rows = NUM_FACTS + (len(at) - NUM_FACTS - num_memories) // 2, len(at) - num_memories
        keep = Keep(entry.pool.table_ids, keeps[1], keeps[0]) if keeps.shape[1] else None
        lanes = memories = None
        said = flags > 0 if header[ALL_FLAGS] else NO_FLAGS
        if header[ALL_FLAGS] >> HAS_LANES & 1:
            assert entry.num_step_inputs is not None
            tables = self._state.tables.lane_ids(worker, entry.cell, entry.num_step_inputs)
            lanes = TaskLanes(
                tables,
                at[AT_LANE],
                said[HAS_LANES],
                said[IS_DENSE],
                moves[0],
                moves[1 : 1 + len(tables)],
                moves[1 + len(tables) :],
            )
        if num_memories:
            memories = TaskMemories(members[0], at[inputs : inputs + num_memories], at[rows:])
        fetches, all_marks = list[FetchOutput](), header[ALL_MARKS]
        for output in range(all_marks.bit_length()):
            if all_marks >> output & 1:
                fetches.append(FetchOutput(output, marked(marks[0], output)))
        return RunTask(
            task,
            worker,
            entry.cell.type_id,
            header[LARGEST],
            ends[POSITIONS],
            at[AT_NODE],
            at[NUM_FACTS:inputs],
            at[inputs:rows],
            lanes,
            keep,
            tuple(fetches),
            said[MAY_STOP] if header[ALL_FLAGS] >> MAY_STOP & 1 else None,
            memories,
        )
