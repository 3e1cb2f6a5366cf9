"""What follows when steps have run, as one compiled call: rows freed, runs ended or continued, subgraphs released."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled
from batchmaker.scheduler.arena import State
from batchmaker.scheduler.layout import (
    LANES_BEGIN,
    NOBODY,
    NUM_LANES,
    NUM_PORTS,
    NUM_RUNNING,
    NUM_SEQUENCE,
    STEERING_ON,
    STEPS_ON,
    TASKS_ON,
)
from batchmaker.scheduler.progress import end_step, finish, release, stop_or_go_on
from batchmaker.scheduler.queues import put, ranks_of, sort
from batchmaker.scheduler.row_release import free_rows
from batchmaker.scheduler.steps import AT_NODE, AT_SUBGRAPH, DONE, ENTERING, LEFT, MAY_STOP, POSITIONS, STEERS, Steps

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Retired(NamedTuple):
    """What steps that have run mean.

    - over: slots of the requests that have no work left, by step, then by slot.
    - done: nodes that are done: single nodes, and last nodes of runs.
    - stopped_at, stopped_last: for each run that a value has ended, the node at which it ended and its last node.
    """

    over: Ids
    done: Ids
    stopped_at: Ids
    stopped_last: Ids


@compiled
def _before(steps: Steps, what: int, step: int) -> int:
    """Return how many of something come before a step."""
    return steps.ends[what, step - 1] if step > 0 else 0


@compiled
def retire(
    state: State, own_type_follows: bool, type_id: int, worker: int, steps: Steps, first: int, end: int, stopped: Flags
) -> Retired:
    """Update the tables after steps `first` to before `end` of a task have run.

    stopped: [positions of these steps] whether a value has ended the run; empty if none has.
    """
    nodes, subgraphs, types, queue, requests, counts = (
        state.nodes, state.subgraphs, state.types, state.queue, state.requests, state.counts,
    )  # fmt: skip
    types[NUM_RUNNING, type_id] -= end - first
    state.workers[STEPS_ON, worker] -= end - first
    state.workers[TASKS_ON, worker] -= end == steps.num_steps
    may_stop = False
    for step in range(first, end):
        state.workers[STEERING_ON, worker] -= steps.flags[STEERS, step]
        may_stop |= steps.flags[MAY_STOP, step] > 0
    begin, last_at = _before(steps, POSITIONS, first), _before(steps, POSITIONS, end)
    ran, of = steps.at[AT_NODE, begin:last_at], steps.at[AT_SUBGRAPH, begin:last_at]
    unused, found = end_step(
        nodes, subgraphs, state.source, state.source_table, state.is_host, state.ports[type_id, : types[NUM_PORTS, type_id]],
        max(types[NUM_SEQUENCE, type_id], 0), ran, of,
        steps.entering[_before(steps, ENTERING, first) : _before(steps, ENTERING, end)],
    )  # fmt: skip
    at = 0
    for upto in found:
        part = unused[at:upto]
        sort(part, part[:0])
        free_rows(nodes, subgraphs, types, state.pools, state.free_rows, part)
        at = upto
    for k in range(_before(steps, LEFT, first), _before(steps, LEFT, end)):
        state.occupant[state.lanes[LANES_BEGIN, steps.left[0, k], type_id] + steps.left[1, k]] = NOBODY
    done = steps.done[_before(steps, DONE, first) : _before(steps, DONE, end)].copy()
    stopped_at = stopped_last = done[:0]
    if may_stop:
        lane = state.lanes[LANES_BEGIN, worker, type_id]
        stopped_at, stopped_last, following = stop_or_go_on(
            nodes, subgraphs, requests, state.occupant[lane : lane + state.lanes[NUM_LANES, worker, type_id]], stopped,
            ran, of,
        )  # fmt: skip
        ranks = ranks_of(nodes, requests, counts, following)
        sort(following, ranks)
        put(types, queue, type_id, following, ranks)
        done = np.concatenate((done, stopped_last))
    over = done[:0]
    if len(done) > 0:
        waiting, over, places = finish(nodes, subgraphs, state.consumer, requests, own_type_follows, done)
        sort(waiting, waiting[:0])
        release(nodes, subgraphs, requests, types, queue, counts, waiting)
        for i in range(len(over)):  # by step, then by slot, so that the order of the rows has no effect
            step = first
            while step < end - 1 and places[i] >= steps.ends[DONE, step] - _before(steps, DONE, first):
                step += 1
            over[i] |= step << 32
        sort(over, over[:0])
        over &= (1 << 32) - 1
    return Retired(over, done, stopped_at, stopped_last)
