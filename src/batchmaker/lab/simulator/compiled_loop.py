"""The scheduler's compiled calls in virtual time, one after the other: the loop of `CompiledCells`.

Nothing is decided here. Requests arrive by `arrive`, or `wait` and `begin`; tasks are formed by `form_next` and end by
`retire`; the functions of policies that are asked say who begins, and how they rank types. What is here is time, and
records.
"""

from __future__ import annotations

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled, compiled_inline
from batchmaker.core.addresses import State, state_at
from batchmaker.core.arrive import arrive, begin, wait
from batchmaker.core.layout import HEAD_OF_QUEUE, ID, NOWHERE, REQUEST, TAIL_OF_QUEUE
from batchmaker.core.queues import ready_types
from batchmaker.core.retire import FIRST_ROW, NUM_FINISHED, RETIRED, retire
from batchmaker.core.steps import (
    AT_NODE,
    ENTERING,
    NUM_STEPS,
    OF_TYPE,
    PART_AT,
    PART_ENDS,
    PART_ENTERING,
    POSITIONS,
    part_of,
)
from batchmaker.core.turn import form_next
from batchmaker.cost.latency import corrected
from batchmaker.lab.simulator.lazy_turns import learn_lengths, urgency_of, who_joins
from batchmaker.lab.simulator.loop_tables import (
    ADMITTED,
    AUTO,
    BUSY_S,
    CELLULAR,
    CHANGES,
    FIRST,
    FREE_S,
    IN_FLIGHT,
    IS_LEARNING,
    LAST,
    LAZY,
    LEARN,
    MODELS,
    NEXT,
    NO_ROOM,
    NOW_S,
    NUM_CHOSEN,
    NUM_COMING,
    NUM_NEW,
    NUM_RANKED,
    OVER,
    REJECTED,
    ROWS,
    SINCE,
    STALE,
    STEP,
    STEP_S,
    STEPS,
    WHY,
    DeviceCosts,
    LoopTables,
    OfferTables,
    Policy,
)
from batchmaker.policies.beginning import num_candidates, who_begins
from batchmaker.policies.expectation import CORRECT_EVERY
from batchmaker.policies.requests import RequestColumns, submit
from batchmaker.policies.run_lengths import note_ended
from batchmaker.policies.type_order import count_chains, type_order


@compiled_inline
def _wants(loop: LoopTables, kinds: Ints) -> None:
    """There may be no room for requests of these forms."""
    loop.numbers[WHY], loop.numbers[NUM_COMING] = NO_ROOM, len(kinds)
    loop.coming[: len(kinds)] = kinds


@compiled
def _tell(
    addresses: Ints, forms: Ints, loop: LoopTables, offer: OfferTables, watched: RequestColumns, policy: Policy
) -> bool:
    """Requests that have arrived by now wait in line, or begin. Returns whether there was room."""
    numbers, first = loop.numbers, loop.numbers[NEXT]
    end = first
    while end < len(offer.arrived_s) and offer.arrived_s[end] <= loop.seconds[NOW_S]:
        end += 1
    if end == first:
        return True
    ids, kinds, ranks = np.arange(first, end), offer.kinds[first:end], np.zeros(end - first, np.int64)
    if policy.how == CELLULAR:
        slots = arrive(addresses, forms, ids, ranks, kinds, np.zeros(end - first, np.int64))[0]
    else:
        slots = wait(addresses, ids, ranks)
    if len(slots) == 0:
        _wants(loop, kinds)
        return False
    numbers[NEXT] = end
    numbers[NUM_NEW] += end - first
    if policy.how == CELLULAR:
        return True
    numbers[CHANGES] += 1
    for i in range(len(slots)):
        slot, kind = slots[i], kinds[i]
        watched.left[slot], watched.done[slot], watched.width[slot] = offer.nodes[kind], 0, offer.width[kind]
        watched.deadline_s[slot], watched.began_s[slot] = offer.deadline_s[ids[i]], np.inf
        watched.arrived_s[slot] = offer.arrived_s[ids[i]]
        watched.model[slot] = offer.model[kind]
        numbers[MODELS] = max(numbers[MODELS], offer.model[kind] + 1)
        loop.line[numbers[LAST]] = slot
        numbers[LAST] += 1
    return True


@compiled
def _beginners(loop: LoopTables, watched: RequestColumns, policy: Policy) -> Ints:
    """Return the slots of those who begin now, as AutoPolicy.admit."""
    numbers, line = loop.numbers, loop.line[loop.numbers[FIRST] : loop.numbers[LAST]]
    if len(line) == 0 or numbers[CHANGES] == numbers[REJECTED]:
        return line[:0]
    num_waiting, in_flight, auto, seconds = (
        len(line),
        loop.members[: numbers[IN_FLIGHT]],
        policy.auto,
        policy.times.seconds,
    )
    looked_at = num_candidates(line[:1], num_waiting, in_flight, watched, auto, seconds)
    slots = who_begins(line[:looked_at], num_waiting, in_flight, watched, auto, seconds, loop.seconds[NOW_S])
    numbers[REJECTED] = -1 if len(slots) > 0 or numbers[IS_LEARNING] else numbers[CHANGES]
    return slots.copy()


@compiled
def _admit(
    addresses: Ints, forms: Ints, loop: LoopTables, offer: OfferTables, watched: RequestColumns, policy: Policy
) -> bool:
    """Let requests begin, as the policy says. Returns False where it cannot be said, or done, yet; see WHY."""
    numbers, line, state = loop.numbers, loop.line, state_at(addresses)
    if numbers[NUM_CHOSEN] == 0:
        numbers[WHY] = OVER
        beginners = who_joins(loop, watched, policy) if policy.how == LAZY else _beginners(loop, watched, policy)
        if numbers[WHY] == LEARN:
            return False
        loop.chosen[: len(beginners)] = beginners
        numbers[NUM_CHOSEN] = len(beginners)
    slots = loop.chosen[: numbers[NUM_CHOSEN]]
    if len(slots) == 0:
        return True
    kinds = np.empty(len(slots), np.int64)
    for i in range(len(slots)):
        kinds[i] = offer.kinds[state.requests[ID, slots[i]]]
    if len(begin(addresses, forms, slots, kinds)) == 0:
        _wants(loop, kinds)
        return False
    numbers[CHANGES] += 1
    numbers[NUM_CHOSEN] = 0
    for slot in slots:
        watched.began_s[slot] = loop.seconds[NOW_S]
        loop.members[numbers[IN_FLIGHT]] = slot
        numbers[IN_FLIGHT] += 1
    end, num_left = numbers[FIRST], len(slots)
    while num_left > 0:
        num_left -= watched.began_s[line[end]] < np.inf
        end += 1
    to = end - 1
    for at in range(end - 1, numbers[FIRST] - 1, -1):  # those before who stay move up
        if watched.began_s[line[at]] == np.inf:
            line[to] = line[at]
            to -= 1
    numbers[FIRST] = to + 1
    return True


@compiled
def _ask(state: State, loop: LoopTables, watched: RequestColumns, policy: Policy) -> bool:
    """Write the order in which the policy ranks the ready types; see `choose`. Returns False where it cannot be said
    yet; see WHY."""
    types, ready = state.types, ready_types(state.types)
    order = ready
    if policy.how == AUTO and len(ready) < 2:
        policy.auto.ranked_s[0], policy.auto.finishing[:] = loop.seconds[NOW_S], 0
    elif policy.how == AUTO:
        in_flight = loop.members[: loop.numbers[IN_FLIGHT]]
        for type_id in ready:
            policy.auto.num_ready[type_id] = types[TAIL_OF_QUEUE, type_id] - types[HEAD_OF_QUEUE, type_id]
        count_chains(ready, in_flight, watched.left, watched.width, policy.auto.independent)
        order = type_order(
            ready,
            loop.numbers[LAST] - loop.numbers[FIRST],
            in_flight,
            watched,
            policy.auto,
            policy.times.seconds,
            loop.seconds[NOW_S],
        )
    elif len(ready) > 1 and loop.numbers[MODELS] > 1:
        urgency = urgency_of(loop, watched, policy)
        if len(urgency) == 0:
            return False
        order = ready[np.argsort(urgency[policy.lazy.type_model[ready]], kind="mergesort")]
    loop.order[: len(order)], loop.numbers[NUM_RANKED] = order, len(order)
    return True


@compiled
def _submitted(
    state: State, loop: LoopTables, device: DeviceCosts, watched: RequestColumns, policy: Policy, task: Ints
) -> None:
    """Note when the steps of a new task begin and end."""
    numbers, seconds, type_id = loop.numbers, loop.seconds, task[OF_TYPE]
    ends, starts = part_of(task, PART_ENDS, POSITIONS), part_of(task, PART_ENDS, ENTERING)
    entering, nodes = part_of(task, PART_ENTERING, FIRST_ROW), part_of(task, PART_AT, AT_NODE)
    begin_s = max(seconds[FREE_S], seconds[NOW_S]) + numbers[NUM_NEW] * device.request_s
    numbers[NUM_NEW] = numbers[STEP] = 0
    seconds[STEP_S] = begin_s
    at = num_rows = 0
    for step in range(task[NUM_STEPS]):
        for i in range(at, starts[step]):  # those who were in the step before have started
            request = state.requests[ID, state.nodes[REQUEST, entering[i]]]
            if np.isnan(loop.started_s[request]):
                loop.started_s[request] = begin_s
        rows = ends[step] - num_rows
        at, num_rows = starts[step], ends[step]
        taken_s = device.seconds[type_id, rows] + device.step_s + rows * device.row_s
        until_next_s = taken_s + device.turn_s
        seconds[BUSY_S] += until_next_s
        begin_s += until_next_s
    seconds[FREE_S] = begin_s
    numbers[STEPS] += task[NUM_STEPS]
    numbers[ROWS] += num_rows
    if policy.how != CELLULAR:
        submit(watched.left, watched.done, state.nodes[REQUEST][nodes], type_id)


@compiled
def _end_step(
    addresses: Ints,
    loop: LoopTables,
    device: DeviceCosts,
    watched: RequestColumns,
    policy: Policy,
    task: Ints,
    taken_s: float,
    rows: int,
) -> None:
    """The next step of the task is done: retire it, answer whom it finishes, and learn from it."""
    numbers, type_id, step, now_s = loop.numbers, task[OF_TYPE], loop.numbers[STEP], loop.seconds[NOW_S]
    outcome = retire(addresses, task, step, step + 1, loop.never, True, taken_s)
    numbers[STEP] += 1
    num_finished = outcome[NUM_FINISHED]
    for i in range(num_finished):
        loop.finished_s[outcome[RETIRED + num_finished + i]] = now_s
    if policy.how == CELLULAR:
        return
    times = policy.times
    if times.corrects:
        times.factors[type_id] = corrected(times.factors[type_id], times.base_s[type_id, rows], taken_s)
        numbers[SINCE] += 1
    numbers[CHANGES] += num_finished > 0
    if num_finished == 0:
        return
    slots = outcome[RETIRED : RETIRED + num_finished]
    if policy.how == LAZY:
        learn_lengths(loop, watched, policy, slots)
    elif note_ended(slots, watched.left, watched.done, watched.width, policy.auto.ended):
        numbers[STALE] = 1
    for slot in slots:
        at = 0
        while loop.members[at] != slot:
            at += 1
        numbers[IN_FLIGHT] -= 1
        for k in range(at, numbers[IN_FLIGHT]):
            loop.members[k] = loop.members[k + 1]


@compiled
def play(
    addresses: Ints,
    forms: Ints,
    loop: LoopTables,
    offer: OfferTables,
    device: DeviceCosts,
    watched: RequestColumns,
    policy: Policy,
    task: Ints,
) -> Ints:
    """Play until all is done, or until there is something to do that is not compiled: see `numbers[WHY]`.

    addresses, forms: see `arrive`. Returns the task that runs, to go on with: see `packed`.
    """
    state, numbers, seconds = state_at(addresses), loop.numbers, loop.seconds
    while True:
        if numbers[STEP] < task[NUM_STEPS]:
            type_id, step, ends = task[OF_TYPE], numbers[STEP], part_of(task, PART_ENDS, POSITIONS)
            rows = ends[step] - (ends[step - 1] if step > 0 else 0)
            taken_s = device.seconds[type_id, rows] + device.step_s + rows * device.row_s
            seconds[NOW_S] = seconds[STEP_S] + (taken_s + device.turn_s)
            if not _tell(addresses, forms, loop, offer, watched, policy):
                return task
            seconds[STEP_S] = seconds[NOW_S]
            _end_step(addresses, loop, device, watched, policy, task, taken_s, rows)
            if numbers[SINCE] >= CORRECT_EVERY or (policy.how == AUTO and numbers[STALE]):
                numbers[WHY] = LEARN
                return task
            continue
        is_asked = policy.how != CELLULAR and not numbers[ADMITTED]
        if is_asked and not _admit(addresses, forms, loop, offer, watched, policy):
            return task
        numbers[ADMITTED] = 1
        if policy.how != CELLULAR and not _ask(state, loop, watched, policy):
            return task
        numbers[ADMITTED] = 0
        task = form_next(addresses, 0, loop.order[: numbers[NUM_RANKED]], NOWHERE, False, False)[0]
        if task[NUM_STEPS] > 0:
            _submitted(state, loop, device, watched, policy, task)
            continue
        if numbers[NEXT] == len(offer.arrived_s):
            numbers[WHY] = OVER
            return task
        seconds[NOW_S] = max(seconds[NOW_S], offer.arrived_s[numbers[NEXT]])
        if not _tell(addresses, forms, loop, offer, watched, policy):
            return task
