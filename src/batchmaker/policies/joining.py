"""How many of the requests in line may join those in flight: LazyBatching's tests for all prefixes, in one compiled call.

The k-th step of a type is taken by all requests with at least k steps of it left (see `cost/replay.py`). So a forecast
is a walk over the types and their steps, and the rows of a step change only where a request ends. Prefixes are tried
from the longest on: the next shorter one takes one request out of the walk.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled

Steps = NDArray[np.int64]
Seconds = NDArray[np.float64]

NO_TEST, REPLAY, OLDEST, LITERAL = range(4)
"""Meaning of `JoiningRules.slack`."""
ALIKE: Final[NDArray[np.float64]] = np.ones((0, 0))
"""As `width`: every request has one row in each step."""
NO_STEPS: Final[Steps] = np.zeros((0, 0), np.int64)
"""As `whole` where no rule reads it."""
_ROUNDING: Final = 1e-6


class JoiningRules(NamedTuple):
    """What must be true of the requests that join. slack, veto, from_table, benefit: see LazyPolicy (`hopeless`,
    `estimate`)."""

    slack: int
    veto: bool
    from_table: bool
    benefit: bool


class _Walk(NamedTuple):
    """Requests that run together. rows: [types] in the first step of each type. leaving: [types, longest + 1] rows
    that take a step of this number as their last. done_s: [types, longest + 1] when that step is done."""

    rows: Seconds
    leaving: Seconds
    done_s: Seconds


@compiled
def _walk(num_types: int, longest: int) -> _Walk:
    return _Walk(np.zeros(num_types), np.zeros((num_types, longest + 1)), np.zeros((num_types, longest + 1)))


@compiled
def _enter(walk: _Walk, steps: Steps, width: Seconds, request: int, sign: float) -> None:
    """Put a request in, or take it out with sign -1."""
    for type_id in range(steps.shape[1]):
        count = steps[request, type_id]
        if count > 0:
            rows = sign * (width[request, type_id] if len(width) > 0 else 1.0)
            walk.rows[type_id] += rows
            walk.leaving[type_id, count] += rows


@compiled
def _play(walk: _Walk, seconds: Seconds) -> float:
    """Write when each step is done, in seconds from now; return the end of the last."""
    most = seconds.shape[1] - 1
    now_s = 0.0
    for type_id in range(len(walk.rows)):
        rows, step = walk.rows[type_id], 0
        batch = int(np.ceil(rows - _ROUNDING))
        while batch > 0:
            taken_s = seconds[type_id, min(batch, most)]
            if batch > most:
                taken_s = (batch // most) * seconds[type_id, most] + seconds[type_id, batch % most]
            left = 0.0
            while left == 0.0:
                step += 1
                now_s += taken_s
                walk.done_s[type_id, step] = now_s
                left = walk.leaving[type_id, step]
            rows -= left
            batch = int(np.ceil(rows - _ROUNDING))
    return now_s


@compiled
def _longest(steps: Steps) -> int:
    longest = 0
    for request in range(steps.shape[0]):
        for type_id in range(steps.shape[1]):
            longest = max(longest, steps[request, type_id])
    return longest


@compiled
def _equation_two(
    whole: Steps, width: Seconds, num_in_flight: int, seconds: Seconds, slack_s: Seconds, rules: JoiningRules
) -> NDArray[np.bool_]:
    """Return for 0, 1, 2, ... candidates whether nobody's slack is negative (LazyBatching, Equation 2)."""
    num = len(whole)
    alone_s, total_s = np.zeros(num), np.zeros(num - num_in_flight + 1)
    for request in range(num):
        for type_id in range(whole.shape[1]):
            alone_s[request] += whole[request, type_id] * seconds[type_id, 1]
    if rules.from_table:
        walk = _walk(whole.shape[1], _longest(whole))
        for request in range(num):
            _enter(walk, whole, width, request, 1.0)
            if request >= num_in_flight - 1:
                total_s[request - num_in_flight + 1] = _play(walk, seconds)
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
def _finish_s(walk: _Walk, left: Steps, last: Steps, request: int) -> float:
    if last[request] < 0:
        return 0.0
    finish_s: float = walk.done_s[last[request], left[request, last[request]]]
    return finish_s


@compiled
def num_joining(
    left: Steps,
    width: Seconds,
    whole: Steps,
    num_in_flight: int,
    seconds: Seconds,
    deadline_s: Seconds,
    slack_s: Seconds,
    rules: JoiningRules,
) -> int:
    """Return how many of the candidates join: the longest prefix that the slack test and the benefit test allow.

    - left, whole: [requests, types] remaining steps, and all steps; first the requests in flight, at least one, in the
      order in which they began, then the candidates. whole: NO_STEPS unless the test is Equation 2.
    - width: [requests, types] rows of a request in a step, or ALIKE.
    - seconds: [types, max_batch + 1] of a step. A larger batch takes whole calls of max_batch, and one for the rest.
    - deadline_s: [requests] from now. slack_s: [requests] deadline minus the end of the time in line.
    """
    num, num_types = left.shape
    num_candidates = num - num_in_flight
    allowed = np.ones(num_candidates + 1, np.bool_)
    if rules.slack == OLDEST or rules.slack == LITERAL:  # noqa: PLR1714
        allowed = _equation_two(whole, width, num_in_flight, seconds, slack_s, rules)
    if rules.slack != REPLAY and not rules.benefit:
        for joining in range(num_candidates, -1, -1):
            if allowed[joining]:
                return joining
        return 0
    last = np.full(num, -1)
    for request in range(num):
        for type_id in range(num_types):
            if left[request, type_id] > 0:
                last[request] = type_id
    longest = _longest(left)
    together, after = _walk(num_types, longest), _walk(num_types, longest)
    for request in range(num_in_flight):
        _enter(together, left, width, request, 1.0)
    drain_s = _play(together, seconds)
    apart_s = np.zeros(num)
    for request in range(num_in_flight):
        apart_s[request] = _finish_s(together, left, last, request)
    for request in range(num_in_flight, num):
        _enter(together, left, width, request, 1.0)
        _enter(after, left, width, request, 1.0)
    for joining in range(num_candidates, 0, -1):
        present = num_in_flight + joining
        if allowed[joining]:
            _play(together, seconds)
            _play(after, seconds)
            fits, gained_s = True, 0.0
            for request in range(present):
                joined_s = _finish_s(together, left, last, request)
                if request >= num_in_flight:
                    apart_s[request] = drain_s + _finish_s(after, left, last, request)
                late = rules.slack == REPLAY and joined_s > deadline_s[request]
                if late and (rules.veto or apart_s[request] <= deadline_s[request]):
                    fits = False
                    break
                gained_s += apart_s[request] - joined_s
            if fits and (not rules.benefit or gained_s >= 0.0):
                return joining
        _enter(together, left, width, present - 1, -1.0)
        _enter(after, left, width, present - 1, -1.0)
    return 0
