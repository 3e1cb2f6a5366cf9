"""How many of the requests in line may join those in flight: LazyBatching's tests of prefixes, compiled.

The k-th step of a type is taken by all requests with at least k steps of it left (see `cost/replay.py`). So a forecast
is a walk over the types and their steps, and the rows of a step change only where a request ends. Prefixes are tried
from the longest on: the next shorter one takes one request out of the walk.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Floats, Ints
from batchmaker.compiled import compiled

NO_TEST, REPLAY, OLDEST, LITERAL = range(4)
"""Meaning of `JoiningRules.slack`."""
ALIKE: Final[NDArray[np.float64]] = np.ones((0, 0))
"""As `width`: every request has one row in each step."""
NO_STEPS: Final[Ints] = np.zeros((0, 0), np.int64)
"""As `whole` where no rule reads it."""
_ROUNDING: Final = 1e-6


class JoiningRules(NamedTuple):
    """What must be true of the requests that join. slack, veto, from_table, benefit: see LazyPolicy (`hopeless`,
    `estimate`)."""

    slack: int
    veto: bool
    from_table: bool
    benefit: bool


@compiled
def enter(rows: Floats, leaving: Floats, steps: Ints, width: Floats, request: int, sign: float) -> None:
    """Put a request into a walk, or take it out with sign -1.

    rows: [types] in the first step of each type. leaving: [types, longest + 1] rows that take a step of this number as
    their last.
    """
    is_alike = len(width) == 0
    for type_id in range(steps.shape[1]):
        count = steps[request, type_id]
        if count > 0:
            own = sign if is_alike else sign * width[request, type_id]
            rows[type_id] += own
            leaving[type_id, count] += own


@compiled
def walk(rows: Floats, leaving: Floats, done_s: Floats, seconds: Floats) -> float:
    """Write when each step of the requests in a walk is done, in seconds from now; return the end of the last.

    done_s: [types, longest + 1]. Rows are sums of fractions: with many wide requests some may seem to be left after the
    longest has ended.
    """
    most, longest = seconds.shape[1] - 1, leaving.shape[1] - 1
    now_s = 0.0
    for type_id in range(len(rows)):
        running, step = rows[type_id], 0
        batch = int(np.ceil(running - _ROUNDING))
        while batch > 0 and step < longest:
            taken_s = seconds[type_id, min(batch, most)]
            if batch > most:
                taken_s = (batch // most) * seconds[type_id, most] + seconds[type_id, batch % most]
            gone = 0.0
            while gone == 0.0 and step < longest:
                step += 1
                now_s += taken_s
                done_s[type_id, step] = now_s
                gone = leaving[type_id, step]
            running -= gone
            batch = int(np.ceil(running - _ROUNDING))
    return now_s


@compiled
def _longest(steps: Ints) -> int:
    longest = 0
    for request in range(steps.shape[0]):
        for type_id in range(steps.shape[1]):
            longest = max(longest, steps[request, type_id])
    return longest


@compiled
def last_types(steps: Ints) -> Ints:
    """Return the last type with steps left of each request: [requests]; 0 without any, and its step 0 takes no time."""
    last = np.zeros(len(steps), np.int64)
    for request in range(len(steps)):
        for type_id in range(steps.shape[1]):
            if steps[request, type_id] > 0:
                last[request] = type_id
    return last


@compiled
def drained(
    steps: Ints, width: Floats, num_in_flight: int, seconds: Floats, last: Ints
) -> tuple[Floats, Floats, Floats, float, Floats]:
    """Walk with the requests in flight alone.

    Returns the rows, leaving and done_s of this walk (see `enter`, `walk`), its end, and [requests] when each of
    those in flight is done; 0 of the candidates.
    """
    rows, leaving = np.zeros(steps.shape[1]), np.zeros((steps.shape[1], _longest(steps) + 1))
    done_s, apart_s = np.zeros_like(leaving), np.zeros(len(steps))
    for request in range(num_in_flight):
        enter(rows, leaving, steps, width, request, 1.0)
    drain_s = walk(rows, leaving, done_s, seconds)
    for request in range(num_in_flight):
        apart_s[request] = done_s[last[request], steps[request, last[request]]]
    return rows, leaving, done_s, drain_s, apart_s


@compiled
def _equation_two(
    whole: Ints, width: Floats, num_in_flight: int, seconds: Floats, slack_s: Floats, rules: JoiningRules
) -> NDArray[np.bool_]:
    """Return for 0, 1, 2, ... candidates whether nobody's slack is negative (LazyBatching, Equation 2)."""
    num = len(whole)
    alone_s, total_s = np.zeros(num), np.zeros(num - num_in_flight + 1)
    for request in range(num):
        for type_id in range(whole.shape[1]):
            alone_s[request] += whole[request, type_id] * seconds[type_id, 1]
    if rules.from_table:
        rows, leaving = np.zeros(whole.shape[1]), np.zeros((whole.shape[1], _longest(whole) + 1))
        done_s = np.empty_like(leaving)
        for request in range(num):
            enter(rows, leaving, whole, width, request, 1.0)
            if request >= num_in_flight - 1:
                total_s[request - num_in_flight + 1] = walk(rows, leaving, done_s, seconds)
    else:
        sum_s = 0.0
        for request in range(num):
            sum_s += alone_s[request]
            if request >= num_in_flight - 1:
                total_s[request - num_in_flight + 1] = sum_s
    allowed = np.ones(len(total_s), np.bool_)
    for joining in range(len(total_s)):
        present = 1 if rules.slack == OLDEST else num_in_flight + joining
        for request in range(present):
            needs_s = total_s[0] if request < num_in_flight else alone_s[request]
            if slack_s[request] < total_s[joining] and (rules.veto or slack_s[request] >= needs_s):
                allowed[joining] = False
                break
    return allowed


@compiled
def num_joining(
    steps: Ints,
    width: Floats,
    whole: Ints,
    num_in_flight: int,
    seconds: Floats,
    deadline_s: Floats,
    slack_s: Floats,
    rules: JoiningRules,
) -> int:
    """Return how many of the candidates join: the longest prefix that the slack test and the benefit test allow.

    - steps, whole: [requests, types] remaining steps, and all steps; first the requests in flight, at least one, in the
      order in which they began, then the candidates. whole: NO_STEPS unless the test is Equation 2.
    - width: [requests, types] rows of a request in a step, or ALIKE.
    - seconds: [types, max_batch + 1] of a step. A larger batch takes whole calls of max_batch, and one for the rest.
    - deadline_s: [requests] from now. slack_s: [requests] deadline minus the end of the time in line.
    """
    num_candidates = len(steps) - num_in_flight
    allowed = np.ones(num_candidates + 1, np.bool_)
    if rules.slack == OLDEST or rules.slack == LITERAL:
        allowed = _equation_two(whole, width, num_in_flight, seconds, slack_s, rules)
    if rules.slack != REPLAY and not rules.benefit:
        for joining in range(num_candidates, -1, -1):
            if allowed[joining]:
                return joining
        return 0
    return _longest_prefix(steps, width, num_in_flight, seconds, deadline_s, allowed, rules)


@compiled
def _longest_prefix(
    steps: Ints,
    width: Floats,
    num_in_flight: int,
    seconds: Floats,
    deadline_s: Floats,
    allowed: NDArray[np.bool_],
    rules: JoiningRules,
) -> int:
    """Return the longest of the allowed prefixes that makes nobody late, and is beneficial, as the rules ask.

    Compared are two futures of a prefix: it joins now, or it starts when all in flight are done.
    """
    num, num_types = steps.shape
    replayed, veto, benefit = rules.slack == REPLAY, rules.veto, rules.benefit
    last = last_types(steps)
    rows, leaving, done_s, drain_s, apart_s = drained(steps, width, num_in_flight, seconds, last)
    after_rows, after_leaving, after_done_s = np.zeros(num_types), np.zeros_like(leaving), np.zeros_like(leaving)
    for request in range(num_in_flight, num):
        enter(rows, leaving, steps, width, request, 1.0)
        enter(after_rows, after_leaving, steps, width, request, 1.0)
    for present in range(num, num_in_flight, -1):
        if allowed[present - num_in_flight]:
            walk(rows, leaving, done_s, seconds)
            walk(after_rows, after_leaving, after_done_s, seconds)
            fits, gained_s = True, 0.0
            for request in range(present):
                type_id = last[request]
                joined_s = done_s[type_id, steps[request, type_id]]
                if request >= num_in_flight:
                    apart_s[request] = drain_s + after_done_s[type_id, steps[request, type_id]]
                if replayed and joined_s > deadline_s[request] and (veto or apart_s[request] <= deadline_s[request]):
                    fits = False
                    break
                gained_s += apart_s[request] - joined_s
            if fits and (not benefit or gained_s >= 0.0):
                return present - num_in_flight
        enter(rows, leaving, steps, width, present - 1, -1.0)
        enter(after_rows, after_leaving, steps, width, present - 1, -1.0)
    return 0
