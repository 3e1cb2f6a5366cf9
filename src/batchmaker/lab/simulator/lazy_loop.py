"""What the policy `lazy` does, for `CompiledCells`, in compiled loops over `Flight`."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled
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


@compiled
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


@compiled
def _find_candidates(flight: Flight, shapes: Shapes, kinds: Ids, lazy: Lazy) -> int:
    """Write the requests in line that could begin; return their number."""
    numbers = flight.numbers
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
            lazy.candidates[found] = request
            found += 1
        looked += 1
        request = flight.next_in_line[request]
    return found


@compiled
def _steps_left(flight: Flight, shapes: Shapes, kinds: Ids, lazy: Lazy, num: int) -> tuple[Ids, Ids]:
    """Return the remaining steps and all steps of the requests in flight and of `num` candidates. See `StepsLeft`."""
    num_in_flight, num_types = flight.numbers[IN_FLIGHT], flight.left.shape[1]
    left = np.zeros((num_in_flight + num, num_types), np.int64)
    whole = np.zeros((num_in_flight + num, num_types), np.int64)
    for i in range(num_in_flight + num):
        if i < num_in_flight:
            slot = flight.members[i]
            for type_id in range(num_types):
                left[i, type_id] = flight.left[slot, type_id]
                whole[i, type_id] = flight.left[slot, type_id] + flight.done[slot, type_id]
        else:
            kind = kinds[lazy.candidates[i - num_in_flight]]
            for type_id in range(num_types):
                left[i, type_id] = whole[i, type_id] = shapes.steps[kind, type_id]
        for which in range(len(lazy.cell)):
            cell = lazy.cell[which]
            if not left[i, cell]:
                continue
            done = whole[i, cell] - left[i, cell]
            if lazy.fixed[which]:
                left[i, cell] = max(lazy.fixed[which] - done, 1)
            else:
                given = whole[i, lazy.given[which]] if lazy.given[which] != NOBODY else 0
                bucket = 0
                while bucket < lazy.num_edges[which] and lazy.edges[which, bucket] < given:
                    bucket += 1
                left[i, cell] = lazy.tables[which, bucket, min(done, lazy.widths[which] - 1)]
            whole[i, cell] = left[i, cell] + done
    return left, whole


@compiled
def _num_beginning(flight: Flight, shapes: Shapes, kinds: Ids, lazy: Lazy, num: int) -> int:
    """Return how many of `num` candidates may join the requests in flight."""
    num_in_flight, now_s = flight.numbers[IN_FLIGHT], flight.seconds[NOW_S]
    left, whole = _steps_left(flight, shapes, kinds, lazy, num)
    deadline_s, slack_s = np.empty(num_in_flight + num), np.empty(num_in_flight + num)
    for i in range(num_in_flight + num):
        request = lazy.candidates[i - num_in_flight] if i >= num_in_flight else flight.owner[flight.members[i]]
        deadline_s[i] = lazy.deadline_s[request] - now_s
        slack_s[i] = lazy.deadline_s[request] - min(lazy.began_s[request], now_s)
    alike = np.ones((0, 0))
    return num_joining(left, alike, whole, num_in_flight, lazy.expected, deadline_s, slack_s, lazy.rules)


@compiled
def admit(flight: Flight, shapes: Shapes, kinds: Ids, lazy: Lazy) -> int:
    """Let requests begin, as `LazyPolicy.admit`."""
    numbers = flight.numbers
    if numbers[LINE] == NOBODY:
        return NOTHING_ADMITTED
    num = _find_candidates(flight, shapes, kinds, lazy)
    if num and numbers[CHANGES] == numbers[REJECTED]:
        return NOTHING_ADMITTED
    if num and numbers[IN_FLIGHT] and (lazy.rules.benefit or lazy.rules.slack != NO_TEST):
        if numbers[STALE]:
            return STOPPED
        num = _num_beginning(flight, shapes, kinds, lazy, num)
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


@compiled
def urgencies(flight: Flight, shapes: Shapes, kinds: Ids, lazy: Lazy) -> Times:
    """Return a number for each model, as `LazyPolicy.rank`: the smallest goes first."""
    found = np.full(flight.numbers[MODELS], np.inf)
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


@compiled
def learn_step(flight: Flight, lazy: Lazy, type_id: int, rows: int, seconds: float) -> None:
    """As `ExpectedStepTimes.step_finished`."""
    if not lazy.corrects:
        return
    predicted = lazy.base[type_id, min(rows, lazy.base.shape[1] - 1)]
    ratio = min(max(seconds / predicted, LOWEST), HIGHEST)
    lazy.factors[type_id] += WEIGHT * (ratio - lazy.factors[type_id])
    flight.numbers[SINCE] += 1
    if flight.numbers[SINCE] >= CORRECT_EVERY:
        flight.numbers[SINCE] = 0
        for other in range(lazy.base.shape[0]):
            for size in range(lazy.base.shape[1]):
                lazy.expected[other, size] = lazy.base[other, size] * lazy.factors[other]


@compiled
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


