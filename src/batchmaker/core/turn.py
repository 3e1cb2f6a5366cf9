"""One turn of the scheduler as one compiled call: steps that have run are retired, requests begin, a task is formed."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from batchmaker.arrays import Flags, Ints
from batchmaker.compiled import compiled_inline, compiled_unlocked, compiled_within, number
from batchmaker.core.addresses import State, state_at
from batchmaker.core.arrive import arrive
from batchmaker.core.batching import form
from batchmaker.core.choose import choose
from batchmaker.core.layout import (
    ASKS_POLICY,
    COUNTS_TASKS,
    JUST_RAN,
    NOWHERE,
    PASSED_OVER,
    RUN_AHEAD,
    STEERING_ON,
    STEPS_ON,
    TAKES_TURNS,
    TASKS_ON,
)
from batchmaker.core.queues import ready_types
from batchmaker.core.region_code import ALL_DONE
from batchmaker.core.region_decisions import decide
from batchmaker.core.retire import NUM_DONE, NUM_FINISHED, RETIRED, retire
from batchmaker.core.steps import HEADER, LANES_WANTED, NUM_STEPS, ROWS_WANTED
from batchmaker.policies.ageing import note_ran

NUM_BEGUN, NEXT_WORKER, AT_TYPE, BY_AGE, NUM_TYPES, DECIDED, TURN = map(number, range(int(RETIRED), int(RETIRED) + 7))
"""What `turn` returns begins with the counts of `retire`, and then

- NUM_BEGUN: requests that have arrived. 0 although some were given: see `arrive`; then no task was formed.
- NEXT_WORKER: the first worker that may get the next task, or NOWHERE.
- AT_TYPE, BY_AGE, NUM_TYPES: if the task lacks room, which of the types it is of, in what order they are tried, whether
  by age, and how many there are.
- DECIDED: what `decide` returned.

Then come what `retire` returns, the slots of those who have arrived, the first nodes of their graphs, and the types.
"""

FIRST_TYPE: Final = number(0)


class TaskFor(NamedTuple):
    """For whom a turn forms a task, and of which types; see `turn`. By default for nobody."""

    worker: int = 0
    until: int = 0
    ranking: Ints = np.empty(0, np.int64)
    at: int = NOWHERE
    by_age: bool = False
    may_ask: bool = True


NOBODY: Final = TaskFor()


@compiled_inline
def form_next(
    addresses: Ints, worker: int, ranking: Ints, at: int, by_age: bool, may_ask: bool
) -> tuple[Ints, Ints, int, bool]:
    """Choose a type and form a task of it for a worker; see `form`.

    ranking: see `choose`. at: NOWHERE; or, where a task has lacked room, its place in `ranking`, which is the order in
    which types are tried then, and by_age as it was. may_ask: of the first type tried; else it is True.

    Returns the task, the order, which of the types the task is of, and whether by age. A task without steps may say
    what it lacks; then nothing has changed. If it lacks nothing, no ready node may run on the worker.
    """
    state, order, task = state_at(addresses), ranking, np.zeros(HEADER, np.int64)
    if at == NOWHERE:
        order, by_age = choose(state, ranking, worker)
        at = FIRST_TYPE
    while at < len(order):
        task = form(addresses, order[at], worker, by_age, may_ask)
        if task[NUM_STEPS] > 0:
            note_ran(state.types[PASSED_OVER], order, order[at])
            if state.rules[TAKES_TURNS]:
                state.types[JUST_RAN] = 0
                state.types[JUST_RAN, order[at]] = 1
            break
        if task[ROWS_WANTED] > 0 or task[LANES_WANTED] > 0:
            break
        at += 1
        may_ask = True
    return task, order, at, by_age


@compiled_within
def _may_get(state: State, worker: int) -> bool:
    """Whether a worker may get a task: it is idle, or has few enough steps and none whose values decide what is next.

    Otherwise the requests of these steps would miss the next batch, and two groups of requests would alternate for ever
    in small batches.
    """
    rules, workers = state.rules, state.workers
    if workers[STEPS_ON, worker] == 0:
        return True
    if rules[RUN_AHEAD] == 0 or workers[STEERING_ON, worker] > 0:
        return False
    counted = workers[TASKS_ON, worker] if rules[COUNTS_TASKS] else workers[STEPS_ON, worker]
    return bool(counted <= rules[RUN_AHEAD])


@compiled_inline
def _give(
    addresses: Ints, worker: int, until: int, ranking: Ints, at: int, by_age: bool, may_ask: bool
) -> tuple[Ints, Ints, Ints]:
    """Form a task for the first of some workers that may get one and has work; see `turn`. None if the policy must be
    asked first for which type, and there is no ranking.

    Returns its words of `TURN` from NEXT_WORKER on; the types, if the task lacks room; and the task.
    """
    state, formed, order = state_at(addresses), np.zeros(HEADER, np.int64), ranking[:0]
    next_worker, num_workers = worker, len(state.workers[0])
    while next_worker < num_workers:
        if _may_get(state, next_worker):
            asks = state.rules[ASKS_POLICY] > 0 and len(ranking) == 0 and len(ready_types(state.types)) > 1
            if next_worker >= until or formed[NUM_STEPS] > 0 or asks:
                break
            formed, order, at, by_age = form_next(addresses, next_worker, ranking, at, by_age, may_ask)
            if formed[NUM_STEPS] > 0:
                continue
            if formed[ROWS_WANTED] > 0 or formed[LANES_WANTED] > 0:
                break
            at = NOWHERE
        next_worker += 1
    lacks_room = formed[NUM_STEPS] == 0 and (formed[ROWS_WANTED] > 0 or formed[LANES_WANTED] > 0)
    said = np.empty(TURN - NEXT_WORKER, np.int64)
    said[0] = next_worker if next_worker < num_workers else NOWHERE
    said[AT_TYPE - NEXT_WORKER], said[BY_AGE - NEXT_WORKER] = at, by_age
    said[NUM_TYPES - NEXT_WORKER] = len(order) if lacks_room else 0
    said[DECIDED - NEXT_WORKER] = 0
    return said, order, formed


@compiled_within
def _packed(retired: Ints, num_begun: int, places: Ints, said: Ints, order: Ints) -> Ints:
    """Return what has happened; see `TURN`."""
    num_types = said[NUM_TYPES - NEXT_WORKER]
    result = np.empty(TURN + len(retired) - RETIRED + 2 * num_begun + num_types, np.int64)
    result[:RETIRED] = retired[:RETIRED]
    result[NUM_BEGUN], result[NEXT_WORKER:TURN] = num_begun, said
    k = TURN + len(retired) - RETIRED
    result[TURN:k] = retired[RETIRED:]
    for i in range(num_begun):
        result[k + i], result[k + num_begun + i] = places[0, i], places[1, i]
    result[k + 2 * num_begun :] = order[:num_types]
    return result


@compiled_unlocked
def turn(
    addresses: Ints,
    forms: Ints,
    task: Ints,
    first: int,
    end: int,
    stopped: Flags,
    answer: bool,
    busy_s: float,
    arrived: Ints,
    worker: int,
    until: int,
    ranking: Ints,
    at: int,
    by_age: bool,
    may_ask: bool,
) -> tuple[Ints, Ints]:
    """Retire steps, let requests begin, and form a task for the first of some workers that may get one and has work.

    - task, first, end, stopped, answer, busy_s: see `retire`; nothing is retired if first is `end`.
    - arrived: [4, requests] their numbers, ranks, numbers of their forms, and first stored nodes; see `arrive`.
    - worker, until: of the workers from this to before that. ranking, at, by_age, may_ask: see `form_next`.

    Returns what has happened, see `TURN`, and the task that was formed, without steps if none was; see `packed`.
    """
    retired = np.zeros(RETIRED, np.int64)
    if first < end:
        retired = retire(addresses, task, first, end, stopped, answer, busy_s)
    num_begun, places = arrived.shape[1], arrived[:2]
    if num_begun > 0:
        places = arrive(addresses, forms, arrived[0], arrived[1], arrived[2], arrived[3])
        if places.shape[1] < num_begun:
            worker = until = len(state_at(addresses).workers[0])
            num_begun = 0
    said, order, formed = _give(addresses, worker, until, ranking, at, by_age, may_ask)
    return _packed(retired, num_begun, places, said, order), formed


@compiled_unlocked
def turn_by_values(
    addresses: Ints,
    patterns: Ints,
    machine: Ints,
    task: Ints,
    first: int,
    end: int,
    stopped: Flags,
    busy_s: float,
    worker: int,
    until: int,
    ranking: Ints,
    at: int,
    by_age: bool,
    may_ask: bool,
) -> tuple[Ints, Ints]:
    """As `turn`, where some requests decide by values: what follows from those that have come is begun in between.

    patterns, machine: see `decide`. If there is something for Python to do first (see DECIDED), no task is formed.
    """
    retired = retire(addresses, task, first, end, stopped, False, busy_s)
    at_done = RETIRED + retired[NUM_FINISHED]
    decided = decide(addresses, patterns, machine, retired[at_done : at_done + retired[NUM_DONE]])
    said, order, formed = _give(
        addresses, worker, until if decided == ALL_DONE else worker, ranking, at, by_age, may_ask
    )
    said[DECIDED - NEXT_WORKER] = decided
    return _packed(retired, 0, ranking.reshape(1, len(ranking)), said, order), formed
