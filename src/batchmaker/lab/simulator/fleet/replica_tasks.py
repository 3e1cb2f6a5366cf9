"""Tasks of one replica whose requests are chains of one cell, in virtual time: the scheduler's own compiled calls.

A replica is the tables of a scheduler. Its task is formed when the one before has ended, and retired at once: of chains
of one cell nothing else can be ready, so nothing that comes meanwhile could see the difference.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Floats, Ints
from batchmaker.compiled import compiled
from batchmaker.core.addresses import state_at
from batchmaker.core.arrive import arrive
from batchmaker.core.batching import form
from batchmaker.core.layout import HEAD_OF_QUEUE, MAX_BATCH, TAIL_OF_QUEUE
from batchmaker.core.retire import NUM_FINISHED, RETIRED, retire
from batchmaker.core.step_times import learn_steps
from batchmaker.core.steps import DONE, NUM_STEPS, PART_ENDS, POSITIONS, part_of


class ChainCosts(NamedTuple):
    """What a step takes. seconds: [max_batch + 1] by rows. step_s, row_s, turn_s, request_s: see Overhead."""

    seconds: Floats
    step_s: float
    row_s: float
    turn_s: float
    request_s: float


class ReplicaTables(NamedTuple):
    """Every replica. Arrays [replicas], but for two.

    addresses: [replicas, tables, 4] where the tables of its scheduler are, see `state_at`. num_new: requests that
    arrived since its last task. is_busy: 0 or 1. task_end_s: of the task that runs. done: [replicas, most] requests
    whose last step is in the task, in order; num_done: how many, next_done: the first that has not been told of.
    num_here: unanswered.
    """

    addresses: Ints
    num_new: Ints
    is_busy: Ints
    task_end_s: Floats
    done: NDArray[np.int32]
    num_done: Ints
    next_done: Ints
    num_here: Ints


@compiled
def join(places: ReplicaTables, forms: Ints, place: int, request: int, kind: int) -> bool:
    """A request arrives at a replica; or, if its tables may lack room, nothing has changed. Returns whether it did."""
    ids, ranks, kinds = np.empty(1, np.int64), np.zeros(1, np.int64), np.empty(1, np.int64)
    ids[0], kinds[0] = request, kind
    if arrive(places.addresses[place], forms, ids, ranks, kinds, np.zeros(1, np.int64)).shape[1] == 0:
        return False
    places.num_new[place] += 1
    places.num_here[place] += 1
    return True


@compiled
def has_work(places: ReplicaTables, place: int) -> bool:
    """Whether an idle replica has something to compute."""
    types = state_at(places.addresses[place]).types
    is_waiting: bool = types[TAIL_OF_QUEUE, 0] > types[HEAD_OF_QUEUE, 0]
    return is_waiting


@compiled
def form_task(
    places: ReplicaTables,
    costs: ChainCosts,
    finished_s: Floats,
    never: NDArray[np.bool_],
    place: int,
    now_s: float,
    busy_s: Floats,
) -> tuple[int, int]:
    """Form and retire the next task of an idle replica that has work; return how many steps and rows it has.

    finished_s: [requests] when its last step ends, written. never: no flags.
    """
    addresses, done = places.addresses[place], places.done[place]
    task = form(addresses, 0, 0, False, False)
    state, num_steps = state_at(addresses), task[NUM_STEPS]
    ends, upto = part_of(task, PART_ENDS, POSITIONS), part_of(task, PART_ENDS, DONE)
    end_s = now_s + places.num_new[place] * costs.request_s
    first = rows_before = done_before = num_done = 0
    for step in range(num_steps):
        rows = ends[step] - rows_before
        rows_before = ends[step]
        taken_s = costs.seconds[rows] + costs.step_s + rows * costs.row_s
        end_s += taken_s + costs.turn_s
        busy_s[0] += taken_s + costs.turn_s
        learn_steps(state.seconds, state.known_s, 0, state.types[MAX_BATCH, 0], 1, rows, taken_s)
        if step + 1 < num_steps and upto[step] == done_before:
            continue
        outcome = retire(addresses, task, first, step + 1, never, True, 0.0)
        first, done_before, num_finished = step + 1, upto[step], outcome[NUM_FINISHED]
        for i in range(num_finished):
            request = outcome[RETIRED + num_finished + i]
            finished_s[request] = end_s
            done[num_done] = request
            num_done += 1
    places.num_new[place] = places.next_done[place] = 0
    places.num_done[place], places.is_busy[place], places.task_end_s[place] = num_done, 1, end_s
    return num_steps, rows_before
