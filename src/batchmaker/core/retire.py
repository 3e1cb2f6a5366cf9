"""What follows when steps have run, as one compiled call: rows freed, runs ended or continued, subgraphs released."""

from __future__ import annotations

from typing import Final

import numpy as np

from batchmaker.arrays import Flags, Ints
from batchmaker.compiled import compiled_within, number
from batchmaker.core.addresses import state_at
from batchmaker.core.layout import (
    ID,
    LANES_BEGIN,
    MAX_BATCH,
    NOBODY,
    NUM_LANES,
    NUM_MEMORIES,
    NUM_PORTS,
    NUM_RUNNING,
    NUM_STEP_INPUTS,
    OWN_TYPE_FOLLOWS,
    PLAN_ROWS,
    STEERING_ON,
    STEPS_ON,
    TASKS_ON,
)
from batchmaker.core.leave import end_those_done, leave_all
from batchmaker.core.progress import end_step, finish, forget_memories, free_rows, release, stop_or_go_on
from batchmaker.core.queues import put, ranks_of, sort
from batchmaker.core.step_times import learn_steps
from batchmaker.core.steps import (
    AT_NODE,
    AT_SUBGRAPH,
    DONE,
    ENTERING,
    MAY_STOP,
    NUM_ENDS,
    NUM_STEPS,
    OF_TYPE,
    ON_WORKER,
    PART_AT,
    PART_DONE,
    PART_ENDS,
    PART_ENTERING,
    PART_FLAGS,
    PART_VACATED,
    POSITIONS,
    STEERS,
    VACATED,
    part_of,
)

NUM_FINISHED, NUM_DYING, NUM_DONE, NUM_STOPPED, RETIRED = map(number, range(5))
VACATED_WORKER, VACATED_LANE = map(number, range(2))
FIRST_ROW: Final = number(0)
"""What `retire` returns begins with four counts. Then come

- slots of requests that have no work left, by step, then by slot: if they were to be answered, only those that are;
- of these, if they were answered: their numbers, the two rows of `store_kept`, and the slots of those of which a worker
  still has steps;
- nodes that are done: single nodes, and last nodes of runs;
- for each run that a value has ended, the node at which it ended, and then, for each, its last node.
"""


@compiled_within
def _joined(one: Ints, other: Ints) -> Ints:
    both = np.empty(len(one) + len(other), np.int64)
    _put(both, _put(both, FIRST_ROW, one), other)
    return both


@compiled_within
def _put(result: Ints, at: int, values: Ints) -> int:
    """Write values from a place on; return the place behind them."""
    for i in range(len(values)):
        result[at + i] = values[i]
    return at + len(values)


@compiled_within
def retire(addresses: Ints, task: Ints, first: int, end: int, stopped: Flags, answer: bool, busy_s: float) -> Ints:
    """Update the tables after steps `first` to before `end` of a task have run.

    task: see `packed`. stopped: [positions of these steps] whether a value has ended the run; empty if none has.
    answer: whether to end the requests that have no work left and may get no more, and to forget them, see `leave_all`;
    only if no unfold function waits for what has run. busy_s: seconds that the steps took, to learn from; 0 if nobody
    knows.
    """
    state = state_at(addresses)
    nodes, subgraphs, types, queue, requests, counts = (
        state.nodes,
        state.subgraphs,
        state.types,
        state.queue,
        state.requests,
        state.counts,
    )
    type_id, worker, ends = task[OF_TYPE], task[ON_WORKER], part_of(task, PART_ENDS, DONE)
    begins, until = np.zeros(NUM_ENDS, np.int64), np.zeros(NUM_ENDS, np.int64)
    for what in range(NUM_ENDS):
        upto = part_of(task, PART_ENDS, what)
        begins[what], until[what] = upto[first - 1] if first > 0 else 0, upto[end - 1]
    if busy_s > 0:
        learn_steps(
            state.seconds,
            state.known_s,
            type_id,
            types[MAX_BATCH, type_id],
            end - first,
            until[POSITIONS] - begins[POSITIONS],
            busy_s,
        )
    types[NUM_RUNNING, type_id] -= end - first
    state.workers[STEPS_ON, worker] -= end - first
    state.workers[TASKS_ON, worker] -= end == task[NUM_STEPS]
    may_stop = False
    for step in range(first, end):
        state.workers[STEERING_ON, worker] -= part_of(task, PART_FLAGS, STEERS)[step]
        may_stop |= part_of(task, PART_FLAGS, MAY_STOP)[step] > 0
    ran = part_of(task, PART_AT, AT_NODE)[begins[POSITIONS] : until[POSITIONS]]
    of = part_of(task, PART_AT, AT_SUBGRAPH)[begins[POSITIONS] : until[POSITIONS]]
    unused, upto_port = end_step(
        nodes,
        subgraphs,
        state.source,
        state.source_table,
        state.is_host,
        state.ports[type_id, : types[NUM_PORTS, type_id]],
        max(types[NUM_STEP_INPUTS, type_id], 0),
        ran,
        of,
        part_of(task, PART_ENTERING, FIRST_ROW)[begins[ENTERING] : until[ENTERING]],
    )
    begin = 0
    for upto in upto_port:
        part = unused[begin:upto]
        sort(part, part[:0])
        free_rows(nodes, subgraphs, types, state.pools, state.free_rows, part)
        begin = upto
    for k in range(begins[VACATED], until[VACATED]):
        home, lane = part_of(task, PART_VACATED, VACATED_WORKER)[k], part_of(task, PART_VACATED, VACATED_LANE)[k]
        state.occupant[state.lanes[LANES_BEGIN, home, type_id] + lane] = NOBODY
    done = part_of(task, PART_DONE, FIRST_ROW)[begins[DONE] : until[DONE]]
    stopped_at = stopped_last = finished = done[:0]
    if may_stop:
        first_lane = state.lanes[LANES_BEGIN, worker, type_id]
        stopped_at, stopped_last, following = stop_or_go_on(
            nodes,
            subgraphs,
            requests,
            state.occupant[first_lane : first_lane + state.lanes[NUM_LANES, worker, type_id]],
            stopped,
            ran,
            of,
        )
        ranks = ranks_of(nodes, requests, counts, following)
        sort(following, ranks)
        put(types, queue, type_id, following, ranks)
        done = _joined(done, stopped_last)
    if types[NUM_MEMORIES, type_id] > 0 and state.rules[PLAN_ROWS]:
        forgotten = forget_memories(
            nodes, subgraphs, state.source, state.source_table, state.reach, types[NUM_MEMORIES, type_id], done
        )
        sort(forgotten, forgotten[:0])
        free_rows(nodes, subgraphs, types, state.pools, state.free_rows, forgotten)
    if len(done) > 0:
        waiting, finished, places = finish(
            nodes, subgraphs, state.consumer, requests, state.rules[OWN_TYPE_FOLLOWS] > 0, done
        )
        sort(waiting, waiting[:0])
        release(nodes, subgraphs, requests, types, queue, counts, waiting)
        for i in range(len(finished)):  # by step, then by slot, so that the order of the rows has no effect
            step = first
            while step < end - 1 and places[i] >= ends[step] - begins[DONE]:
                step += 1
            finished[i] |= step << 32
        sort(finished, finished[:0])
        finished &= (1 << 32) - 1
    dying = finished[:0]
    if answer:
        finished = end_those_done(requests, finished)
    num_finished, num_stopped = len(finished), len(stopped_last)
    result = np.empty(RETIRED + 5 * num_finished + len(done) + 2 * num_stopped, np.int64)
    after = _put(result, RETIRED, finished)
    if answer:
        for i in range(num_finished):
            result[after + i] = requests[ID, finished[i]]
        dying, moved = leave_all(state, finished)
        after = _put(result, _put(result, after + num_finished, moved[0]), moved[1])
        after = _put(result, after, dying)
    after = _put(result, _put(result, _put(result, after, done), stopped_at), stopped_last)
    result[NUM_FINISHED], result[NUM_DYING], result[NUM_DONE] = num_finished, len(dying), len(done)
    result[NUM_STOPPED] = num_stopped
    return result[:after]
