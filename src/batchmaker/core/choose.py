"""Which cell type a worker runs next, compiled: the policy's order, urgent requests, and who waited too long."""

from __future__ import annotations

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled, compiled_within
from batchmaker.core.addresses import State
from batchmaker.core.layout import (
    AGED_EVERY,
    GAVE_WAY,
    HEAD_OF_QUEUE,
    INDEPENDENT,
    JUST_RAN,
    KEY,
    LEFT_DEPTHS,
    MAX_BATCH,
    MINI_BATCH_DEPTHS,
    NODE_BITS,
    NODE_MASK,
    NUM_RANKED,
    NUM_RUNNING,
    ORDER,
    PASSED_OVER,
    PRIORITY,
    SHORT_TASKS,
    TAIL_OF_QUEUE,
    TYPE_PATIENCE,
    TYPES_PASSED,
    URGENT_FIRST,
)
from batchmaker.core.priorities import as_member, level_of
from batchmaker.core.queues import ages_and_ranks, ready_types
from batchmaker.policies.ageing import overdue_first
from batchmaker.policies.order import ALGORITHM_1, LONGEST_READY, LOWEST_DEPTH, MEAN_DEPTH, READY_SHARE, ranked


@compiled_within
def _measure(state: State, order: int, type_id: int) -> float:
    """Return what an order looks at besides ready nodes; see `ranked`. The type has ready nodes."""
    types, measure = state.types, 0.0
    if order == ALGORITHM_1:
        measure += types[NUM_RUNNING, type_id] + types[JUST_RAN, type_id]
    elif order == READY_SHARE:
        measure += types[INDEPENDENT, type_id]
    elif order == LONGEST_READY:
        measure += ages_and_ranks(types, state.queue, type_id)[0] >> NODE_BITS
    elif order == LOWEST_DEPTH:
        head = types[HEAD_OF_QUEUE, type_id]
        lowest = state.depth_of[state.queue[KEY, head] & NODE_MASK]
        for at in range(head + 1, types[TAIL_OF_QUEUE, type_id]):
            lowest = min(lowest, state.depth_of[state.queue[KEY, at] & NODE_MASK])
        measure += lowest
    else:
        first = MINI_BATCH_DEPTHS if order == MEAN_DEPTH else LEFT_DEPTHS
        if types[first, type_id] > 0:
            measure += types[first + 1, type_id] / types[first, type_id]
    return measure


@compiled_within
def _by_policy(state: State) -> Ints:
    """Return the types with ready nodes in the policy's order."""
    types, order, ready = state.types, state.rules[ORDER], ready_types(state.types)
    if len(ready) < 2:
        return ready
    measure = np.empty(len(ready))
    for i in range(len(ready)):
        measure[i] = _measure(state, order, ready[i])
    return ranked(
        order,
        ready,
        types[TAIL_OF_QUEUE][ready] - types[HEAD_OF_QUEUE][ready],
        types[MAX_BATCH][ready],
        measure,
        types[PRIORITY][ready],
    )


@compiled_within
def _urgent_first(state: State, by_policy: Ints, worker: int) -> tuple[Ints, bool]:
    """Return the types of the most urgent requests first (see `Urgency`), and whether that is by age.

    By age: the types whose first nodes have been ready longest go first. Otherwise a full batch ranks as if it were the
    cohort's, since it would take as long later. This is not done twice in a row, so the cohort has at least every
    second task.
    """
    types, counts, workers, every = state.types, state.counts, state.workers, state.rules[AGED_EVERY]
    order, count = by_policy.copy(), len(by_policy)
    keys, highest = np.empty(count, np.int64), np.empty(count, np.int64)
    by_age, lowest = every > 0 and workers[TYPES_PASSED, worker] >= every - 1, np.iinfo(np.int64).max
    for i in range(count):
        oldest, highest[i], least = ages_and_ranks(types, state.queue, order[i])
        lowest = min(lowest, least)
        keys[i] = oldest if by_age else -highest[i]
    if by_age:
        workers[TYPES_PASSED, worker] = 0
    else:
        workers[TYPES_PASSED, worker] += level_of(lowest) < level_of(highest.max())
        for i in range(0 if counts[GAVE_WAY] > 0 else count):
            if types[TAIL_OF_QUEUE, order[i]] - types[HEAD_OF_QUEUE, order[i]] >= types[MAX_BATCH, order[i]]:
                keys[i] = -as_member(highest[i])
    places = np.argsort(keys, kind="mergesort")
    if not by_age:
        counts[GAVE_WAY] = -keys[places[0]] > highest[places[0]]
    return order[places], by_age


@compiled
def choose(state: State, ranking: Ints, worker: int) -> tuple[Ints, bool]:
    """Return the types with ready nodes in the order in which to try them, and whether to take their oldest nodes.

    ranking: the order of a policy that was asked; empty if the policy is its `order`.
    """
    order, by_age = ranking if len(ranking) > 0 else _by_policy(state), False
    by_rank = state.rules[URGENT_FIRST] > 0 or state.rules[SHORT_TASKS] > 0
    if len(order) > 1 and by_rank and state.counts[NUM_RANKED] > 0:
        order, by_age = _urgent_first(state, order, worker)
    return overdue_first(order, state.types[PASSED_OVER], state.rules[TYPE_PATIENCE]), by_age
