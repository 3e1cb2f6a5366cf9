"""What the policy `lazy` does, for `CompiledCells`, in compiled loops over `Flight`."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled_inline
from batchmaker.cost.latency import OnlineCorrection
from batchmaker.lab.simulator.line_loop import (
    CHANGES,
    IN_FLIGHT,
    LAST_IN_LINE,
    LINE,
    MODELS,
    NOBODY,
    NOW_S,
    REJECTED,
    SINCE,
    STALE,
    Flight,
    Times,
    begin,
)
from batchmaker.lab.simulator.shapes import Ids, Shapes
from batchmaker.policies.expectation import CORRECT_EVERY
from batchmaker.policies.joining import NO_TEST, JoiningRules, num_joining

_CORRECTION: Final = OnlineCorrection(0)
WEIGHT, LOWEST, HIGHEST = _CORRECTION.weight, _CORRECTION.lowest, _CORRECTION.highest

NOTHING_ADMITTED, ADMITTED, STOPPED = range(3)
"""What `admit` returns. STOPPED: a table of lengths must be made anew first."""


class Lazy(NamedTuple):
    """The policy's options and what it has learnt.

    - rules: see JoiningRules. cap: requests of a model in flight. recent: see LazyPolicy (`stack`).
    - base, expected, factors: [types, most + 1] seconds of a step as known beforehand, and as corrected; [types] see
      OnlineCorrection. corrects: whether measured steps change them.
    - model: [types] that uses the type.
    - cell, given, fixed: [predictions] the type whose length is predicted, the type whose length is given or NOBODY,
      and the length if it is `fixed`, otherwise 0. edges, num_edges: [predictions, most edges] and how many.
      tables, widths: [predictions, buckets, steps] of LengthProfile, and the steps of each.
    - seen_given, seen_steps, num_seen, stale_at: [predictions, requests] runs that have ended since the tables were
      made; how many; and how many make the table stale.
    - deadline_s, arrived_s, began_s: [requests].
    - candidates: scratch.
    """

    rules: JoiningRules
    cap: int
    recent: bool
    corrects: bool
    base: Times
    expected: Times
    factors: Times
    model: Ids
    cell: Ids
    given: Ids
    fixed: Ids
    edges: Ids
    num_edges: Ids
    tables: NDArray[np.int64]
    widths: Ids
    seen_given: Ids
    seen_steps: Ids
    num_seen: Ids
    stale_at: Ids
    deadline_s: Times
    began_s: Times
    candidates: Ids


@compiled_inline
def join_line(flight: Flight, shapes: Shapes, kind: int, request: int) -> None:
    """A request has arrived, and waits."""
    numbers = flight.numbers
    flight.next_in_line[request] = NOBODY
    if numbers[LINE] == NOBODY:
        numbers[LINE] = request
    else:
        flight.next_in_line[numbers[LAST_IN_LINE]] = request
    numbers[LAST_IN_LINE] = request
    numbers[MODELS] = max(numbers[MODELS], shapes.model[kind] + 1)
    numbers[CHANGES] += 1


@compiled_inline
def _find_candidates(flight: Flight, shapes: Shapes, kinds: Ids, lazy: Lazy) -> int:
    """Write the requests in line that could begin; return their number."""
    numbers, candidates, next_in_line = flight.numbers, lazy.candidates, flight.next_in_line
    one_model = numbers[MODELS] < 2
    room = lazy.cap - numbers[IN_FLIGHT] if one_model else lazy.cap * numbers[MODELS]
    counts = np.zeros(numbers[MODELS], np.int64)
    if not one_model:
        for i in range(numbers[IN_FLIGHT]):
            counts[shapes.model[kinds[flight.owner[flight.members[i]]]]] += 1
    found, looked, request = 0, 0, numbers[LINE]
    while request != NOBODY and looked < room:
        model = shapes.model[kinds[request]]
        if one_model or counts[model] < lazy.cap:
            counts[model] += 1
            candidates[found] = request
            found += 1
        looked += 1
        request = next_in_line[request]
    return found


@compiled_inline
def _steps_left(flight: Flight, shapes: Shapes, kinds: Ids, lazy: Lazy, num: int) -> tuple[Ids, Ids]:
    """Return the remaining steps and all steps of the requests in flight and of `num` candidates. See `StepsLeft`."""
    num_in_flight, num_types = flight.numbers[IN_FLIGHT], flight.left.shape[1]
    members, own_left, own_done, steps, candidates = (
        flight.members, flight.left, flight.done, shapes.steps, lazy.candidates
    )  # fmt: skip
    left = np.empty((num_in_flight + num, num_types), np.int64)
    whole = np.empty((num_in_flight + num, num_types), np.int64)
    for i in range(num_in_flight):
        slot = members[i]
        for type_id in range(num_types):
            left[i, type_id] = own_left[slot, type_id]
            whole[i, type_id] = own_left[slot, type_id] + own_done[slot, type_id]
    for i in range(num):
        kind = kinds[candidates[i]]
        for type_id in range(num_types):
            left[num_in_flight + i, type_id] = whole[num_in_flight + i, type_id] = steps[kind, type_id]
    edges, tables = lazy.edges, lazy.tables
    for which in range(len(lazy.cell)):
        cell, given_by, fixed = lazy.cell[which], lazy.given[which], lazy.fixed[which]
        num_edges, last = lazy.num_edges[which], lazy.widths[which] - 1
        for i in range(num_in_flight + num):
            if not left[i, cell]:
                continue
            done = whole[i, cell] - left[i, cell]
            if fixed:
                left[i, cell] = max(fixed - done, 1)
            else:
                given = whole[i, given_by] if given_by != NOBODY else 0
                bucket = 0
                while bucket < num_edges and edges[which, bucket] < given:
                    bucket += 1
                left[i, cell] = tables[which, bucket, min(done, last)]
            whole[i, cell] = left[i, cell] + done
    return left, whole


@compiled_inline
def _num_joining(flight: Flight, shapes: Shapes, kinds: Ids, lazy: Lazy, num: int) -> int:
    """Return how many of `num` candidates may join the requests in flight."""
    num_in_flight, now_s = flight.numbers[IN_FLIGHT], flight.seconds[NOW_S]
    left, whole = _steps_left(flight, shapes, kinds, lazy, num)
    deadline_s, slack_s = np.empty(num_in_flight + num), np.empty(num_in_flight + num)
    due_s, began_s, candidates, owner, members = (
        lazy.deadline_s, lazy.began_s, lazy.candidates, flight.owner, flight.members
    )  # fmt: skip
    for i in range(num_in_flight + num):
        request = candidates[i - num_in_flight] if i >= num_in_flight else owner[members[i]]
        deadline_s[i] = due_s[request] - now_s
        slack_s[i] = due_s[request] - min(began_s[request], now_s)
    alike = np.ones((0, 0))
    return num_joining(left, alike, whole, num_in_flight, lazy.expected, deadline_s, slack_s, lazy.rules)


@compiled_inline
def admit(flight: Flight, shapes: Shapes, kinds: Ids, lazy: Lazy) -> int:
    """Let requests begin, as `LazyPolicy.admit`."""
    numbers = flight.numbers
    if numbers[LINE] == NOBODY or numbers[CHANGES] == numbers[REJECTED]:
        return NOTHING_ADMITTED
    num = _find_candidates(flight, shapes, kinds, lazy)
    if num and numbers[IN_FLIGHT] and (lazy.rules.benefit or lazy.rules.slack != NO_TEST):
        if numbers[STALE]:
            return STOPPED
        num = _num_joining(flight, shapes, kinds, lazy, num)
        numbers[REJECTED] = NOBODY if num else numbers[CHANGES]
    at, before = numbers[LINE], NOBODY
    for i in range(num):
        request = lazy.candidates[i]
        while at != request:
            before, at = at, flight.next_in_line[at]
        at = flight.next_in_line[request]
        if before == NOBODY:
            numbers[LINE] = at
        else:
            flight.next_in_line[before] = at
        if at == NOBODY:
            numbers[LAST_IN_LINE] = before
        lazy.began_s[request] = flight.seconds[NOW_S]
        begin(flight, shapes, kinds[request], request, True)
    return ADMITTED if num else NOTHING_ADMITTED


@compiled_inline
def urgencies(flight: Flight, shapes: Shapes, kinds: Ids, lazy: Lazy) -> Times:
    """Return a number for each model, as `LazyPolicy.rank`: the smallest goes first."""
    found = np.full(flight.numbers[MODELS], np.inf)
    left = np.zeros((0, 0), np.int64)
    if not lazy.recent:
        left, _ = _steps_left(flight, shapes, kinds, lazy, 0)
    for i in range(flight.numbers[IN_FLIGHT]):
        request = flight.owner[flight.members[i]]
        key = -lazy.began_s[request]
        if not lazy.recent:
            alone_s = 0.0
            for type_id in range(left.shape[1]):
                alone_s += left[i, type_id] * lazy.expected[type_id, 1]
            key = lazy.deadline_s[request] - alone_s
        model = shapes.model[kinds[request]]
        found[model] = min(found[model], key)
    return found


@compiled_inline
def learn_step(
    base: Times, expected: Times, factors: Times, numbers: Ids, type_id: int, rows: int, seconds: float
) -> None:  # fmt: skip
    """As `ExpectedStepTimes.step_finished`. base, expected, factors: see Lazy."""
    predicted = base[type_id, min(rows, base.shape[1] - 1)]
    ratio = min(max(seconds / predicted, LOWEST), HIGHEST)
    factors[type_id] += WEIGHT * (ratio - factors[type_id])
    numbers[SINCE] += 1
    if numbers[SINCE] >= CORRECT_EVERY:
        numbers[SINCE] = 0
        for other in range(base.shape[0]):
            for size in range(base.shape[1]):
                expected[other, size] = base[other, size] * factors[other]


@compiled_inline
def learn_lengths(flight: Flight, lazy: Lazy, slot: int) -> None:
    """Note the lengths of a request that is done."""
    for which in range(len(lazy.cell)):
        done = flight.done[slot, lazy.cell[which]]
        if not done or lazy.fixed[which]:
            continue
        at, given = lazy.num_seen[which], lazy.given[which]
        lazy.seen_given[which, at] = flight.done[slot, given] + flight.left[slot, given] if given != NOBODY else 0
        lazy.seen_steps[which, at] = done
        lazy.num_seen[which] += 1
        if lazy.num_seen[which] >= lazy.stale_at[which]:
            flight.numbers[STALE] = 1
