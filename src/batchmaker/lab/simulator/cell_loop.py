"""The scheduler's compiled calls in virtual time, one after the other: the loop of `CompiledCells`.

Nothing is decided here. Requests arrive by `arrive`, or `wait` and `begin`; tasks are formed by `form` and end by
`retire`; the policies' own functions say which type goes first, and who begins. What is here is time, and records.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled, compiled_inline
from batchmaker.cost.latency import corrected
from batchmaker.policies.ageing import note_ran, overdue_first
from batchmaker.policies.cellular import by_algorithm_one
from batchmaker.policies.expectation import CORRECT_EVERY, Predictions
from batchmaker.policies.joining import NO_TEST, JoiningRules
from batchmaker.policies.lazy import fitting, num_joining_of, urgencies
from batchmaker.policies.requests import submit
from batchmaker.scheduler.arrive import arrive, begin, wait
from batchmaker.scheduler.batching import form
from batchmaker.scheduler.layout import (
    HEAD_OF_QUEUE,
    ID,
    MAX_BATCH,
    NUM_RUNNING,
    REQUEST,
    TAIL_OF_QUEUE,
)
from batchmaker.scheduler.retire import NUM_OVER, RETIRED, retire
from batchmaker.scheduler.steps import (
    AT_NODE,
    ENTERING,
    NUM_STEPS,
    PART_AT,
    PART_ENDS,
    PART_ENTERING,
    POSITIONS,
    part_of,
)
from batchmaker.scheduler.tables import State, state_at

Ids = NDArray[np.int64]
Times = NDArray[np.float64]

NONE: Final = -1
"""No type is ready."""
OVER, NO_ROOM, RECOUNT, CORRECT = range(4)
"""Why `play` comes back: all is done; a table may lack room for `Loop.coming`; a table of lengths must be made anew;
the expected times of steps must be."""
(
    NEXT, STEP, TYPE, STEPS, ROWS, NUM_NEW, CHANGES, REJECTED, FIRST, LAST, IN_FLIGHT, MODELS, SINCE, STALE, WHY,
    NUM_COMING, ADMITTED, NUM_NUMBERS,
) = range(18)  # fmt: skip
"""Entries of `Loop.numbers`.

NEXT: the next request to arrive. STEP, TYPE: of the task that runs, its next step to end, and its type. STEPS, ROWS:
that were submitted. NUM_NEW: arrived since a step was submitted. CHANGES, REJECTED: see LazyPolicy. FIRST, LAST: where
those who wait are in `Loop.line`. IN_FLIGHT: how many. MODELS: see RequestTable. SINCE: steps since the expected times
were made. STALE: 1 if a table of lengths must be made anew. WHY: as above. NUM_COMING: of `Loop.coming`.
ADMITTED: 1 where the policy has said who begins, but not yet which type goes first.
"""
NOW_S, STEP_S, FREE_S, BUSY_S, NUM_SECONDS = range(5)
"""Entries of `Loop.seconds`: the present; the begin of the step that ends next; the end of the task; of all steps."""


class Device(NamedTuple):
    """seconds: [types, most + 1] of a step. step_s, row_s, turn_s, request_s: see Overhead. priority: [types].
    patience: see Ageing."""

    seconds: Times
    step_s: float
    row_s: float
    turn_s: float
    request_s: float
    priority: Ids
    patience: int


class Offer(NamedTuple):
    """What comes. arrived_s, deadline_s, kinds: [requests]; kinds: the form of each. nodes, width: [kinds, types], see
    RequestTable. model: [kinds]."""

    arrived_s: Times
    deadline_s: Times
    kinds: Ids
    nodes: Ids
    width: Times
    model: Ids


class Watched(NamedTuple):
    """Columns of the RequestTable, by slot."""

    left: Ids
    done: Ids
    width: Times
    is_open: NDArray[np.bool_]
    deadline_s: Times
    began_s: Times
    model: Ids


class Lazy(NamedTuple):
    """What `lazy` knows. watches: False under `cellular`, which needs nothing of this.

    - rules, cap, recent: see LazyPolicy. corrects, base_s, factors, expected_s: see ExpectedStepTimes; expected_s are
      those of its `replay`. type_model: [types]. predictions: see StepsLeft.
    - seen_given, seen_steps, num_seen, stale_at: [predictions, requests] runs that have ended since the tables were
      made; [predictions] how many; and how many make the table stale.
    """

    watches: bool
    rules: JoiningRules
    cap: int
    recent: bool
    corrects: bool
    base_s: Times
    factors: Times
    expected_s: Times
    type_model: Ids
    predictions: Predictions
    seen_given: Ids
    seen_steps: Ids
    num_seen: Ids
    stale_at: Ids


class Loop(NamedTuple):
    """What the loop itself keeps. line: [requests] slots of those who wait. members: [requests] slots of those in
    flight, in the order in which they began. passed: [types] see Ageing. coming: [requests] forms that lack room.
    started_s, finished_s: [requests], see Records. never: no flags."""

    numbers: Ids
    seconds: Times
    line: Ids
    members: Ids
    passed: Ids
    coming: Ids
    started_s: Times
    finished_s: Times
    never: NDArray[np.bool_]


@compiled_inline
def _wants(loop: Loop, kinds: Ids) -> None:
    """There may be no room for requests of these forms."""
    loop.numbers[WHY], loop.numbers[NUM_COMING] = NO_ROOM, len(kinds)
    loop.coming[: len(kinds)] = kinds


@compiled
def _tell(addresses: Ids, forms: Ids, loop: Loop, offer: Offer, watched: Watched, lazy: Lazy) -> bool:
    """Requests that have arrived by now wait in line, or begin. Returns whether there was room."""
    numbers, first = loop.numbers, loop.numbers[NEXT]
    end = first
    while end < len(offer.arrived_s) and offer.arrived_s[end] <= loop.seconds[NOW_S]:
        end += 1
    if end == first:
        return True
    ids, kinds, ranks = np.arange(first, end), offer.kinds[first:end], np.zeros(end - first, np.int64)
    slots = wait(addresses, ids, ranks) if lazy.watches else arrive(addresses, forms, ids, ranks, kinds)[0]
    if len(slots) == 0:
        _wants(loop, kinds)
        return False
    numbers[NEXT] = end
    numbers[NUM_NEW] += end - first
    if not lazy.watches:
        return True
    numbers[CHANGES] += 1
    for i in range(len(slots)):
        slot, kind = slots[i], kinds[i]
        watched.left[slot], watched.done[slot], watched.width[slot] = offer.nodes[kind], 0, offer.width[kind]
        watched.deadline_s[slot], watched.began_s[slot] = offer.deadline_s[ids[i]], np.inf
        watched.model[slot] = offer.model[kind]
        numbers[MODELS] = max(numbers[MODELS], offer.model[kind] + 1)
        loop.line[numbers[LAST]] = slot
        numbers[LAST] += 1
    return True


@compiled
def _admit(addresses: Ids, forms: Ids, loop: Loop, offer: Offer, watched: Watched, lazy: Lazy) -> bool:
    """Let requests begin, as LazyPolicy.admit says. Returns False where it cannot be said yet; see WHY."""
    numbers, line, state = loop.numbers, loop.line, state_at(addresses)
    first, last, in_flight = numbers[FIRST], numbers[LAST], loop.members[: numbers[IN_FLIGHT]]
    if first == last or numbers[CHANGES] == numbers[REJECTED]:
        return True
    room = lazy.cap - len(in_flight) if numbers[MODELS] < 2 else lazy.cap * numbers[MODELS]
    found = line[first : min(last, first + max(room, 0))]
    if numbers[MODELS] > 1:
        found = fitting(watched.model, in_flight, found, lazy.cap, numbers[MODELS])
    if len(found) > 0 and len(in_flight) > 0 and (lazy.rules.benefit or lazy.rules.slack != NO_TEST):
        if numbers[STALE]:
            numbers[WHY] = RECOUNT
            return False
        num = num_joining_of(
            np.concatenate((in_flight, found)), len(in_flight), watched.left, watched.done, watched.width,
            watched.is_open, watched.deadline_s, watched.began_s, lazy.predictions, lazy.expected_s,
            loop.seconds[NOW_S], lazy.rules,
        )  # fmt: skip
        found = found[:num]
        if num == 0:
            numbers[REJECTED] = numbers[CHANGES]
    if len(found) == 0:
        return True
    slots, kinds = found.copy(), np.empty(len(found), np.int64)
    for i in range(len(slots)):
        kinds[i] = offer.kinds[state.requests[ID, slots[i]]]
    if len(begin(addresses, forms, slots, kinds)) == 0:
        _wants(loop, kinds)
        return False
    numbers[CHANGES] += 1
    at, to = last - 1, last - 1
    taken = len(slots) - 1
    while at >= first:  # those who stay move up to the end
        if taken >= 0 and line[at] == slots[taken]:
            taken -= 1
        else:
            line[to] = line[at]
            to -= 1
        at -= 1
    numbers[FIRST] = to + 1
    for slot in slots:
        watched.began_s[slot] = loop.seconds[NOW_S]
        loop.members[numbers[IN_FLIGHT]] = slot
        numbers[IN_FLIGHT] += 1
    return True


@compiled
def _choose(state: State, loop: Loop, device: Device, watched: Watched, lazy: Lazy) -> int:
    """Return the type that runs next, NONE if none is ready; or, if it cannot be said yet, a number below; see WHY."""
    types, num_types = state.types, state.types.shape[1]
    ready = np.empty(num_types, np.int64)
    count = 0
    for type_id in range(num_types):
        if types[TAIL_OF_QUEUE, type_id] > types[HEAD_OF_QUEUE, type_id]:
            ready[count] = type_id
            count += 1
    if count == 0:
        return NONE
    ready = ready[:count]
    ranked = ready
    if count > 1 and not lazy.watches:
        num_ready, max_batch = np.empty(count, np.int64), np.empty(count, np.int64)
        num_running, priority = np.empty(count, np.int64), np.empty(count, np.int64)
        for i in range(count):
            type_id = ready[i]
            num_ready[i] = types[TAIL_OF_QUEUE, type_id] - types[HEAD_OF_QUEUE, type_id]
            max_batch[i], num_running[i] = types[MAX_BATCH, type_id], types[NUM_RUNNING, type_id]
            priority[i] = device.priority[type_id]
        ranked = by_algorithm_one(ready, num_ready, num_running, max_batch, priority)
    elif count > 1 and loop.numbers[MODELS] > 1:
        if loop.numbers[STALE] and not lazy.recent:
            loop.numbers[WHY] = RECOUNT
            return NONE - 1
        urgency = urgencies(
            loop.members[: loop.numbers[IN_FLIGHT]], watched.left, watched.done, watched.width, watched.is_open,
            watched.deadline_s, watched.began_s, watched.model, loop.numbers[MODELS], lazy.predictions,
            lazy.expected_s, lazy.recent,
        )  # fmt: skip
        ranked = ready[np.argsort(urgency[lazy.type_model[ready]], kind="mergesort")]
    first: int = overdue_first(ranked, loop.passed, device.patience)[0]
    note_ran(loop.passed, ready, first)
    return first


@compiled
def _submitted(state: State, loop: Loop, device: Device, watched: Watched, lazy: Lazy, task: Ids) -> None:
    """Note when the steps of a new task begin and end."""
    numbers, seconds, type_id = loop.numbers, loop.seconds, loop.numbers[TYPE]
    ends, entering, nodes = part_of(task, PART_ENDS), part_of(task, PART_ENTERING)[0], part_of(task, PART_AT)[AT_NODE]
    begin_s = max(seconds[FREE_S], seconds[NOW_S]) + numbers[NUM_NEW] * device.request_s
    numbers[NUM_NEW] = numbers[STEP] = 0
    seconds[STEP_S] = begin_s
    at = num_rows = 0
    for step in range(task[NUM_STEPS]):
        for i in range(at, ends[ENTERING, step]):  # those who were in the step before have started
            request = state.requests[ID, state.nodes[REQUEST, entering[i]]]
            if np.isnan(loop.started_s[request]):
                loop.started_s[request] = begin_s
        rows = ends[POSITIONS, step] - num_rows
        at, num_rows = ends[ENTERING, step], ends[POSITIONS, step]
        taken_s = device.seconds[type_id, rows] + device.step_s + rows * device.row_s
        until_next_s = taken_s + device.turn_s
        seconds[BUSY_S] += until_next_s
        begin_s += until_next_s
    seconds[FREE_S] = begin_s
    numbers[STEPS] += task[NUM_STEPS]
    numbers[ROWS] += num_rows
    if lazy.watches:
        submit(watched.left, watched.done, state.nodes[REQUEST][nodes], type_id)


@compiled
def _learn_lengths(loop: Loop, watched: Watched, lazy: Lazy, slot: int) -> None:
    """Note the lengths of the runs of a request that is done."""
    cells, given = lazy.predictions.cell, lazy.predictions.given
    for which in range(len(cells)):
        done, source, at = watched.done[slot, cells[which]], given[which], lazy.num_seen[which]
        if done == 0 or lazy.predictions.fixed[which] > 0:
            continue
        lazy.seen_given[which, at] = watched.left[slot, source] + watched.done[slot, source] if source >= 0 else 0
        lazy.seen_steps[which, at] = done
        lazy.num_seen[which] += 1
        if lazy.num_seen[which] >= lazy.stale_at[which]:
            loop.numbers[STALE] = 1


@compiled
def _end_step(
    addresses: Ids, loop: Loop, device: Device, watched: Watched, lazy: Lazy, task: Ids, taken_s: float, rows: int
) -> None:  # fmt: skip
    """The next step of the task is done: retire it, answer whom it finishes, and learn from it."""
    numbers, type_id, step, now_s = loop.numbers, loop.numbers[TYPE], loop.numbers[STEP], loop.seconds[NOW_S]
    found = retire(addresses, type_id, 0, task, step, step + 1, loop.never, True, taken_s)
    numbers[STEP] += 1
    num_over = found[NUM_OVER]
    for i in range(num_over):
        loop.finished_s[found[RETIRED + num_over + i]] = now_s
    if not lazy.watches:
        return
    if lazy.corrects:
        lazy.factors[type_id] = corrected(lazy.factors[type_id], lazy.base_s[type_id, rows], taken_s)
        numbers[SINCE] += 1
    numbers[CHANGES] += num_over > 0
    for i in range(num_over):
        slot = found[RETIRED + i]
        _learn_lengths(loop, watched, lazy, slot)
        at = 0
        while loop.members[at] != slot:
            at += 1
        numbers[IN_FLIGHT] -= 1
        for k in range(at, numbers[IN_FLIGHT]):
            loop.members[k] = loop.members[k + 1]


@compiled
def play(
    addresses: Ids, forms: Ids, loop: Loop, offer: Offer, device: Device, watched: Watched, lazy: Lazy, task: Ids
) -> Ids:  # fmt: skip
    """Play until all is done, or until there is something to do that is not compiled: see `numbers[WHY]`.

    addresses, forms: see `arrive`. Returns the task that runs, to go on with: see `packed`.
    """
    state, numbers, seconds = state_at(addresses), loop.numbers, loop.seconds
    while True:
        if numbers[STEP] < task[NUM_STEPS]:
            type_id, step, ends = numbers[TYPE], numbers[STEP], part_of(task, PART_ENDS)
            rows = ends[POSITIONS, step] - (ends[POSITIONS, step - 1] if step > 0 else 0)
            taken_s = device.seconds[type_id, rows] + device.step_s + rows * device.row_s
            seconds[NOW_S] = seconds[STEP_S] + (taken_s + device.turn_s)
            if not _tell(addresses, forms, loop, offer, watched, lazy):
                return task
            seconds[STEP_S] = seconds[NOW_S]
            _end_step(addresses, loop, device, watched, lazy, task, taken_s, rows)
            if numbers[SINCE] >= CORRECT_EVERY:
                numbers[WHY] = CORRECT
                return task
            continue
        if lazy.watches and not numbers[ADMITTED] and not _admit(addresses, forms, loop, offer, watched, lazy):
            return task
        numbers[ADMITTED] = 1
        type_id = _choose(state, loop, device, watched, lazy)
        if type_id < NONE:
            return task
        numbers[ADMITTED] = 0
        if type_id != NONE:
            numbers[TYPE] = type_id
            task = form(addresses, type_id, 0, False, False)
            _submitted(state, loop, device, watched, lazy, task)
            continue
        if numbers[NEXT] == len(offer.arrived_s):
            numbers[WHY] = OVER
            return task
        seconds[NOW_S] = max(seconds[NOW_S], offer.arrived_s[numbers[NEXT]])
        if not _tell(addresses, forms, loop, offer, watched, lazy):
            return task
