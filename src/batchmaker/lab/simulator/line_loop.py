"""Ready requests and tasks of `CompiledCells`, by the scheduler's own rules, in compiled loops.

What `ReadyQueue`, `Batcher`, `find_steps` and `Completion` do for requests in which each cell type is one part (see
`Shapes`). `tests/lab/simulator` compares the two answer by answer.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled_inline
from batchmaker.lab.simulator.fleet.chain_tasks import bit_length, learn
from batchmaker.lab.simulator.shapes import Ids, Shapes, Small
from batchmaker.scheduler.batching import SATURATED_BUDGETS

Times = NDArray[np.float64]
NOBODY: Final = -1

(
    NEXT, NUM_FREE, TOP, IN_FLIGHT, PLACE, CHANGES, REJECTED, LINE, LAST_IN_LINE, MODELS, PHASE, STEPS, ROWS, NUM_NEW,
    STALE, SINCE, NUM_NUMBERS,
) = range(17)  # fmt: skip
"""Entries of `Flight.numbers`.

NEXT: the next request to arrive. NUM_FREE, TOP: slots that were given back, and slots given out for the first time.
IN_FLIGHT: requests that have begun. PLACE: the next place in the queues. CHANGES, REJECTED: see LazyPolicy. LINE,
LAST_IN_LINE: both ends of the waiting line. MODELS: see RequestTable. PHASE: where `play` goes on. STEPS, ROWS: that
have run. NUM_NEW: arrived since a step was submitted. STALE: 1 if a table of lengths must be made anew. SINCE: steps
since the forecast's times were corrected.
"""
NOW_S, FREE_S, BUSY_S, NUM_SECONDS = range(4)
"""Entries of `Flight.seconds`: the present; the end of the latest task; the time of all steps."""


class DeviceCosts(NamedTuple):
    """Costs and limits. seconds: [types, most + 1] of a step. step_s, row_s, turn_s, request_s: see Overhead.

    max_batch, min_batch, priority: [types]. max_steps, budget_s: of a task. num_ahead: full batches that a task is
    formed of. watched: the policy decides which requests begin, and never so many that a queue holds more than a batch;
    otherwise the order of the queues matters.
    """

    seconds: Times
    step_s: float
    row_s: float
    turn_s: float
    request_s: float
    max_batch: Ids
    min_batch: Ids
    priority: Ids
    max_steps: int
    budget_s: float
    num_ahead: int
    watched: bool


class Flight(NamedTuple):
    """Requests in flight, by slot, and their queues.

    - left, done, waits, following: [slots, types] steps that are not submitted; those that are; parts to wait for;
      the next in the queue of the type. place: [slots, types] in the queue.
    - parts_left, owner: [slots] parts that are not done; the request.
    - free: [slots] slots that were given back. members: [slots] slots in flight, in the order in which they began.
    - first, last, ready, passed: [types] both ends of each queue, and how many it holds; passed: see Ageing.
    - known, step_s: [types, doublings] and [types, most + 1] of StepTimes.
    - next_in_line: [requests]. numbers, seconds: see NUM_NUMBERS and NUM_SECONDS.
    - started_s, finished_s: [requests], see Records.
    """

    left: Small
    done: Small
    waits: Small
    following: Small
    place: Ids
    parts_left: Ids
    owner: Ids
    free: Ids
    members: Ids
    first: Ids
    last: Ids
    ready: Ids
    passed: Ids
    known: Times
    step_s: Times
    next_in_line: Ids
    numbers: Ids
    seconds: Times
    started_s: Times
    finished_s: Times


class Task(NamedTuple):
    """The task that runs. slots, is_last: [max_steps * most] rows of all steps, and whether it is their part's last.

    ends, end_s: [max_steps] where the rows of a step end, and when it is done. batch, released, types: scratch.
    """

    slots: Ids
    is_last: Ids
    ends: Ids
    end_s: Times
    batch: Ids
    released: Ids
    types: Ids


@compiled_inline
def append(flight: Flight, type_id: int, slot: int) -> None:
    """Put a part at the end of its queue."""
    numbers, following, last, count = flight.numbers, flight.following, flight.last, flight.ready
    flight.place[slot, type_id] = numbers[PLACE]
    numbers[PLACE] += 1
    following[slot, type_id] = NOBODY
    if count[type_id]:
        following[last[type_id], type_id] = slot
    else:
        flight.first[type_id] = slot
    last[type_id] = slot
    count[type_id] += 1


@compiled_inline
def put_back(flight: Flight, type_id: int, slots: Ids, num: int) -> None:
    """Put parts back into their queue, at their places. slots: the first `num`, by place."""
    place, following, first, last, count = flight.place, flight.following, flight.first, flight.last, flight.ready
    before, at = NOBODY, first[type_id] if count[type_id] else NOBODY
    for i in range(num):
        slot = slots[i]
        while at != NOBODY and place[at, type_id] < place[slot, type_id]:
            before, at = at, np.int64(following[at, type_id])
        following[slot, type_id] = at
        if before == NOBODY:
            first[type_id] = slot
        else:
            following[before, type_id] = slot
        if at == NOBODY:
            last[type_id] = slot
        before = slot
    count[type_id] += num


@compiled_inline
def begin(flight: Flight, shapes: Shapes, kind: int, request: int, watched: bool) -> None:
    """A request begins: its parts that wait for no other are ready."""
    numbers = flight.numbers
    if numbers[NUM_FREE]:
        numbers[NUM_FREE] -= 1
        slot = flight.free[numbers[NUM_FREE]]
    else:
        slot = numbers[TOP]
        numbers[TOP] += 1
    flight.owner[slot] = request
    flight.parts_left[slot] = shapes.parts[kind]
    if watched:
        flight.members[numbers[IN_FLIGHT]] = slot
    numbers[IN_FLIGHT] += 1
    numbers[CHANGES] += 1
    left, done, waits, steps, sources = flight.left, flight.done, flight.waits, shapes.steps, shapes.waits
    for type_id in range(left.shape[1]):
        left[slot, type_id] = steps[kind, type_id]
        done[slot, type_id] = 0
        waits[slot, type_id] = sources[kind, type_id]
        if left[slot, type_id] and not waits[slot, type_id]:
            append(flight, type_id, slot)


@compiled_inline
def _budget_s(flight: Flight, device: DeviceCosts, type_id: int, candidates: int) -> float:
    """Return the seconds that the task may take: more while a second full batch is ready and nothing else."""
    if candidates < 2 * device.max_batch[type_id]:
        return device.budget_s
    for other in range(len(flight.ready)):
        if other != type_id and flight.ready[other]:
            return device.budget_s
    return device.budget_s * SATURATED_BUDGETS


@compiled_inline
def _note_step(
    flight: Flight, task: Task, device: DeviceCosts, type_id: int, count: int, first: int, begin_s: float
) -> float:
    """Write the rows of one step; return when it is done."""
    seconds, numbers, left, done = flight.seconds, flight.numbers, flight.left, flight.done
    owner, started_s, batch, slots, is_last = flight.owner, flight.started_s, task.batch, task.slots, task.is_last
    until_next_s = device.seconds[type_id, count] + device.step_s + count * device.row_s + device.turn_s
    for i in range(count):
        slot = batch[i]
        left[slot, type_id] -= 1
        done[slot, type_id] += 1
        slots[first + i] = slot
        is_last[first + i] = left[slot, type_id] == 0
        if np.isnan(started_s[owner[slot]]):
            started_s[owner[slot]] = begin_s
    numbers[STEPS] += 1
    numbers[ROWS] += count
    seconds[BUSY_S] += until_next_s
    end_s: float = begin_s + until_next_s
    return end_s


@compiled_inline
def form_task(flight: Flight, shapes: Shapes, kinds: Ids, task: Task, device: DeviceCosts, type_id: int) -> int:
    """Submit the next task of a type; return its number of steps. See `find_steps`."""
    most, batch = device.max_batch[type_id], task.batch
    candidates = min(flight.ready[type_id], most * device.num_ahead)
    more = flight.ready[type_id] > candidates
    budget_s = _budget_s(flight, device, type_id, candidates)
    begin_s = max(flight.seconds[FREE_S], flight.seconds[NOW_S]) + flight.numbers[NUM_NEW] * device.request_s
    flight.numbers[NUM_NEW] = 0
    step_s, following, left, owner = flight.step_s[type_id], flight.following, flight.left, flight.owner
    open_ended = shapes.open_ended
    waiting, num_used, count, num_steps, num_rows = flight.first[type_id], 0, 0, 0, 0
    used_s = 0.0
    goes_on = False
    while num_steps < device.max_steps:
        while count < most and num_used < candidates:
            batch[count] = waiting
            waiting = np.int64(following[waiting, type_id])
            count, num_used = count + 1, num_used + 1
        if count == 0:
            break
        if num_steps > 0 and (
            count < device.min_batch[type_id]
            or used_s + step_s[count] > budget_s
            or (more and count < most and num_used == candidates)
        ):
            break
        num_alike = 1
        if goes_on:  # nobody has left since the step before, so nobody came
            num_alike = device.max_steps - num_steps
            if used_s + num_alike * step_s[count] > budget_s:
                num_alike = max(1, int((budget_s - used_s) / step_s[count]))
            for i in range(count):
                num_alike = min(num_alike, left[batch[i], type_id])
        for _ in range(num_alike):
            begin_s = _note_step(flight, task, device, type_id, count, num_rows, begin_s)
            num_rows += count
            task.ends[num_steps], task.end_s[num_steps] = num_rows, begin_s
            num_steps += 1
        used_s += num_alike * step_s[count]
        staying = 0
        for i in range(count):
            slot = batch[i]
            if left[slot, type_id] and not open_ended[kinds[owner[slot]], type_id]:
                batch[staying] = slot
                staying += 1
        goes_on = staying == count
        count = staying
    flight.first[type_id] = waiting
    flight.ready[type_id] -= num_used
    put_back(flight, type_id, batch, count)
    flight.seconds[FREE_S] = begin_s
    if device.budget_s < np.inf:
        first = 0
        for step in range(num_steps):
            rows = task.ends[step] - first
            first = task.ends[step]
            taken_s = device.seconds[type_id, rows] + device.step_s + rows * device.row_s
            learn(flight.known[type_id, : bit_length(most)], step_s[: most + 1], rows, 1, taken_s)
    return num_steps


@compiled_inline
def end_step(
    flight: Flight, shapes: Shapes, kinds: Ids, task: Task, device: DeviceCosts, type_id: int, step: int
) -> int:
    """A step is done: runs that may end go on or end, and parts that waited are ready.

    Returns how many requests are done with it; their slots are the first in `task.batch`.
    """
    slots, is_last, batch, released, types = task.slots, task.is_last, task.batch, task.released, task.types
    waits, parts_left, owner, open_ended = flight.waits, flight.parts_left, flight.owner, shapes.open_ended
    form_of, first_fed, all_fed = shapes.form, shapes.first_fed, shapes.fed
    first, end = task.ends[step - 1] if step else 0, task.ends[step]
    num_back = num_done = num_released = 0
    for at in range(first, end):
        slot = slots[at]
        kind = kinds[owner[slot]]
        if not is_last[at]:
            if open_ended[kind, type_id]:
                batch[num_back] = slot
                num_back += 1
            continue
        form = form_of[kind]
        for edge in range(first_fed[form, type_id], first_fed[form, type_id + 1]):
            fed = all_fed[edge]
            waits[slot, fed] -= 1
            if waits[slot, fed] == 0:
                released[num_released], types[num_released] = slot, fed
                num_released += 1
        parts_left[slot] -= 1
    if num_back:
        put_back(flight, type_id, batch, num_back)
    if not device.watched and num_released > 1:
        order = np.argsort(released[:num_released], kind="mergesort")
        for i in order:
            append(flight, types[i], released[i])
    else:
        for i in range(num_released):
            append(flight, types[i], released[i])
    for at in range(first, end):
        if is_last[at] and parts_left[slots[at]] == 0:
            batch[num_done] = slots[at]
            num_done += 1
    if not device.watched and num_done > 1:
        batch[:num_done].sort()
    return num_done


@compiled_inline
def leave(flight: Flight, slot: int, watched: bool) -> None:
    """A request is done: its slot is free."""
    numbers, members = flight.numbers, flight.members
    flight.finished_s[flight.owner[slot]] = flight.seconds[NOW_S]
    flight.free[numbers[NUM_FREE]] = slot
    numbers[NUM_FREE] += 1
    numbers[IN_FLIGHT] -= 1
    numbers[CHANGES] += 1
    if not watched:
        return
    at = 0
    while members[at] != slot:
        at += 1
    for i in range(at, numbers[IN_FLIGHT]):
        members[i] = members[i + 1]
