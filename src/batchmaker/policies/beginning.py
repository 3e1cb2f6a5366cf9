"""Who begins under `auto` (see auto.py), compiled. A live engine and the simulator call `who_begins`."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Floats, Ints
from batchmaker.compiled import compiled
from batchmaker.policies.joining import drained, enter, last_types, walk
from batchmaker.policies.requests import RequestColumns
from batchmaker.policies.run_lengths import EndedRuns, ExpectedLengths, run_steps_left

DEFER, IGNORE, DROP = range(3)
"""What becomes of waiting requests that cannot be in time even alone; see AutoPolicy."""
DEFERRED_FOR: Final = 10.0
"""After its deadline, a request waits behind others for at most so many times the time that it was given."""
_AHEAD: Final = 2
"""Full batches of each type in flight where newcomers have to catch up: one runs, one gathers meanwhile."""
_HALF: Final = 0.5
"""Of what its rows take one by one: what a full batch takes at most where all begin.

One that is halfway through a run and one that begins it are, together, done sooner in the sum of finish times by
sharing steps if two rows take at most 1.5 times as long as one. Where each row more takes as long, half is the limit.
"""
_IN_A_ROW: Final = 4
"""Prefixes shorter than this are all tried, longer ones in strides: two for each doubling of the length."""
NOTHING_S: Final = 1e-12


class AutoTables(NamedTuple):
    """What `auto` knows, for compiled loops.

    - has_deadlines: some request had one. hopeless: DEFER, IGNORE or DROP.
    - repeats, part: [types] whether a request has several steps of it one after another; and its part of the network,
      the lowest type of those that a request was in the middle of at once with it. Both are learnt.
    - stops, max_batch, type_model: [types] whether a value may end its runs at any time; the model that uses it.
    - num_ready, independent, since, finishing, debt_s: [types], ranked_s: [1], worth: [models], see `type_order`.
    - lengths, ended: see RunLengths.
    """

    has_deadlines: bool
    hopeless: int
    repeats: NDArray[np.bool_]
    part: Ints
    stops: NDArray[np.bool_]
    max_batch: Ints
    type_model: Ints
    num_ready: Ints
    independent: Ints
    since: Ints
    finishing: Ints
    debt_s: Floats
    ranked_s: Floats
    worth: Floats
    lengths: ExpectedLengths
    ended: EndedRuns


@compiled
def see_parts(slots: Ints, requests: RequestColumns, tables: AutoTables) -> None:
    """Learn from these requests which types repeat, and which of them are of one part."""
    left, done, width, part = requests.left, requests.done, requests.width, tables.part
    for slot in slots:
        first = -1
        for type_id in range(len(part)):
            if left[slot, type_id] + done[slot, type_id] <= width[slot, type_id]:
                continue
            tables.repeats[type_id] = True
            if left[slot, type_id] == 0 or done[slot, type_id] == 0:
                continue
            if first < 0:
                first = type_id
            elif part[type_id] != part[first]:
                old, new = max(part[type_id], part[first]), min(part[type_id], part[first])
                for other in range(len(part)):
                    if part[other] == old:
                        part[other] = new


@compiled
def all_meet(model: int, tables: AutoTables, seconds: Floats) -> bool:
    """Whether the requests of a model repeat one part of it, and full batches of that gain enough for all to begin."""
    part = -1
    for type_id in range(len(tables.part)):
        if tables.repeats[type_id] and is_of(type_id, model, tables):
            most = tables.max_batch[type_id]
            gains = seconds[type_id, most] <= _HALF * most * seconds[type_id, 1]
            if not gains or (part >= 0 and tables.part[type_id] != part):
                return False
            part = tables.part[type_id]
    return part >= 0


@compiled
def is_of(type_id: int, model: int, tables: AutoTables) -> bool:
    """Whether a model uses a type. One that is alone may be used by all."""
    return len(tables.part) == 1 or tables.type_model[type_id] == model


@compiled
def most_in_flight(model: int, tables: AutoTables) -> int:
    """Return how many requests of a model are in flight at most where newcomers have to catch up."""
    num_types, smallest, largest = 0, 0, 0
    for type_id in range(len(tables.part)):
        size = tables.max_batch[type_id]
        largest = max(largest, size)
        if is_of(type_id, model, tables):
            smallest = size if num_types == 0 else min(smallest, size)
            num_types += 1
    return _AHEAD * (smallest * num_types if num_types > 0 else largest)  # others may have used all of its types since


@compiled
def are_hopeless(
    slots: Ints, requests: RequestColumns, tables: AutoTables, seconds: Floats, now_s: float
) -> NDArray[np.bool_]:
    """Return which of these requests cannot be in time even alone: [slots].

    A run that a value may end at any time counts one step. Not if they are IGNOREd; and where they are DEFERred not
    those who have waited `DEFERRED_FOR` times what they were given. seconds: [types, max_batch + 1] of a step.
    """
    hopeless = np.zeros(len(slots), np.bool_)
    if tables.hopeless == IGNORE or not tables.has_deadlines:
        return hopeless
    steps = run_steps_left(slots, requests.left, requests.done, requests.width, requests.is_open, tables.lengths)
    for i in range(len(slots)):
        due_s, alone_s = requests.deadline_s[slots[i]], 0.0
        for type_id in range(len(tables.stops)):
            alone_s += seconds[type_id, 1] * (min(steps[i, type_id], 1) if tables.stops[type_id] else steps[i, type_id])
        hopeless[i] = now_s + alone_s > due_s
        if tables.hopeless == DEFER:
            hopeless[i] &= now_s - due_s < DEFERRED_FOR * (due_s - requests.arrived_s[slots[i]])
    return hopeless


@compiled
def behind_their_equals(line: Ints, hopeless: NDArray[np.bool_], priority: Ints) -> Ints:
    """Return the line with the hopeless behind the others of their priority. Each priority keeps its places.

    priority: [slots of the table].
    """
    if not hopeless.any():
        return line
    places = np.argsort(-priority[line], kind="mergesort")
    by_hope = line[np.argsort(hopeless, kind="mergesort")]
    ordered = np.empty_like(line)
    ordered[places] = by_hope[np.argsort(-priority[by_hope], kind="mergesort")]
    return ordered


@compiled
def num_candidates(
    first: Ints, num_waiting: int, in_flight: Ints, requests: RequestColumns, tables: AutoTables, seconds: Floats
) -> int:
    """Learn from those in flight and the first in line; return how many of the line have to be looked at."""
    see_parts(in_flight, requests, tables)
    see_parts(first, requests, tables)
    if len(tables.worth) > 1 or tables.has_deadlines or all_meet(0, tables, seconds):
        return num_waiting
    return min(max(most_in_flight(0, tables) - len(in_flight), 1), num_waiting)


@compiled
def who_begins(
    line: Ints,
    num_waiting: int,
    in_flight: Ints,
    requests: RequestColumns,
    tables: AutoTables,
    seconds: Floats,
    now_s: float,
) -> Ints:
    """Return the slots of those who begin.

    line: the first of those who wait, at least `num_candidates`. num_waiting: all of them. seconds: [types, max_batch +
    1] of a step.
    """
    line = behind_their_equals(line, are_hopeless(line, requests, tables, seconds, now_s), requests.priority)
    if len(tables.worth) < 2:
        return line[: _num_of_model(line, num_waiting, in_flight, 0, requests, tables, seconds, now_s)]
    begin, num = np.empty_like(line), 0
    is_asked = np.zeros(len(tables.worth), np.bool_)
    for i in range(len(line)):
        model = requests.model[line[i]]
        if not is_asked[model]:
            is_asked[model] = True
            theirs = line[requests.model[line] == model]
            present = in_flight[requests.model[in_flight] == model]
            count = _num_of_model(theirs, len(theirs), present, model, requests, tables, seconds, now_s)
            begin[num : num + count] = theirs[:count]
            num += count
    return begin[:num]


@compiled
def _num_of_model(
    line: Ints,
    num_waiting: int,
    in_flight: Ints,
    model: int,
    requests: RequestColumns,
    tables: AutoTables,
    seconds: Floats,
    now_s: float,
) -> int:
    """Return how many of one model's line begin; if nobody of it is in flight, at least the first."""
    if len(line) == 0 or all_meet(model, tables, seconds):
        return len(line)
    first = 1 if len(in_flight) == 0 else 0
    present = len(in_flight) + first
    candidates = line[: max(first + min(len(line) - first, most_in_flight(model, tables) - present), first)]
    if len(candidates) == first:
        return first
    slots = np.concatenate((in_flight, candidates))
    steps = run_steps_left(slots, requests.left, requests.done, requests.width, requests.is_open, tables.lengths)
    num, num_types = steps.shape
    rows, due_s, is_alike = np.empty((num, num_types)), np.empty(num), True
    for i in range(num):
        due_s[i] = requests.deadline_s[slots[i]] - now_s
        for type_id in range(num_types):
            rows[i, type_id] = requests.width[slots[i], type_id]
            is_alike = is_alike and rows[i, type_id] == 1.0
    width = np.empty((0, 0)) if is_alike else rows
    return first + num_beginning(steps, width, present, seconds, due_s, num_waiting - first)


@compiled
def _is_tried(length: int) -> bool:
    """Whether a prefix of this length is tried: 0, 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    stride = 1
    while length >= _IN_A_ROW * stride:
        stride *= 2
    return length % stride == 0


@compiled
def num_beginning(
    steps: Ints, width: Floats, num_in_flight: int, seconds: Floats, deadline_s: Floats, num_waiting: int
) -> int:
    """Return how many of the candidates begin: of the prefixes that are worth it, the best one.

    A prefix is worth it if fewer are late than if it began once all in flight are done; or as many, and the sum of
    finish times is not larger: of those in flight, its own, and of those behind it, who gain what is saved in all. The
    longest such prefix says by when all candidates can be done. The best is one with which they are done by then, and
    of these the one with the fewest late, then the smallest sum of finish times. Candidates behind a prefix begin
    together when those before them are done.

    steps, width, num_in_flight, seconds, deadline_s: see `num_joining`. num_waiting: requests in line, candidates
    included. Prefixes of 0, 1, 2, 3, 4, 6, 8, 12, 16, ... are tried, and the longest.
    """
    num, num_types = steps.shape
    num_candidates = num - num_in_flight
    last = last_types(steps)
    rows, leaving, done_s, drain_s, apart_s = drained(steps, width, num_in_flight, seconds, last)  # then the prefix too
    own_rows, own_leaving, own_done_s = np.zeros(num_types), np.zeros_like(leaving), np.zeros_like(leaving)  # it alone
    rest_rows, rest_leaving, rest_done_s = np.zeros(num_types), np.zeros_like(leaving), np.zeros_like(leaving)  # others
    for request in range(num_in_flight, num):
        enter(rows, leaving, steps, width, request, 1.0)
        enter(own_rows, own_leaving, steps, width, request, 1.0)
    best, fewest_late, least_s, by_s = -1, 0, 0.0, 0.0
    for beginning in range(num_candidates, -1, -1):
        if beginning == num_candidates or _is_tried(beginning):
            end_s = walk(rows, leaving, done_s, seconds)
            saved_s = drain_s - end_s + walk(own_rows, own_leaving, own_done_s, seconds)
            all_s = end_s + walk(rest_rows, rest_leaving, rest_done_s, seconds)
            num_fewer_late, num_late = 0, 0
            gained_s = (num_waiting - beginning) * max(saved_s, 0.0)
            sum_s = (num_waiting - num_candidates) * all_s
            for request in range(num):
                type_id = last[request]
                count = steps[request, type_id]
                if request < num_in_flight + beginning:
                    finish_s = done_s[type_id, count]
                    if request >= num_in_flight:
                        apart_s[request] = drain_s + own_done_s[type_id, count]
                    late, late_apart = finish_s > deadline_s[request], apart_s[request] > deadline_s[request]
                    num_fewer_late += int(late_apart) - int(late)
                    gained_s += apart_s[request] - finish_s
                else:
                    finish_s = end_s + rest_done_s[type_id, count]
                    late = finish_s > deadline_s[request]
                num_late += int(late)
                sum_s += finish_s
            if num_fewer_late > 0 or (num_fewer_late == 0 and gained_s >= -NOTHING_S):
                if best < 0:
                    by_s = all_s + NOTHING_S
                fewer = num_late < fewest_late or (num_late == fewest_late and sum_s < least_s - NOTHING_S)
                if best < 0 or (fewer and all_s <= by_s):
                    best, fewest_late, least_s = beginning, num_late, sum_s
        if beginning > 0:
            request = num_in_flight + beginning - 1
            enter(rows, leaving, steps, width, request, -1.0)
            enter(own_rows, own_leaving, steps, width, request, -1.0)
            enter(rest_rows, rest_leaving, steps, width, request, 1.0)
    return best
