"""LazyBatching's tests as NumPy writes them down, for all prefixes at once: what `num_joining` must agree with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import numpy as np
from situation import Situation

from batchmaker.arrays import Flags, Floats, Ints


def whole_of(situation: Situation) -> Ints:
    """All steps of each request by type."""
    return situation.steps.whole(situation.table, situation.slots)


def slack_of_line_s(situation: Situation) -> Floats:
    """SLA minus the time in line: [requests]. Stalls after the beginning do not count (the paper's T_wait)."""
    s = situation
    begun_s = np.minimum(s.table.began_s[s.slots], s.now_s)
    slack_s: Floats = s.table.deadline_s[s.slots] - begun_s
    return slack_s


class SlackTest(ABC):
    """Decides how many candidates may join."""

    @abstractmethod
    def allows(self, situation: Situation) -> Flags:
        """Return which prefixes of the candidates may join the requests in flight."""


@final
class NoSlack(SlackTest):
    """Allows everybody."""

    def allows(self, situation: Situation) -> Flags:
        return np.ones(situation.num_candidates + 1, np.bool_)


@final
class EquationTwo(SlackTest):
    """Slack = SLA - (time in line + execution of all members) must not be negative.

    oldest_only: test only the request in flight that began first; otherwise all of them and the candidates. from_table:
    the execution of all members is that of their common batch in the table; otherwise the sum of the times of each
    alone. veto: whether a request that would be late anyway counts as well.
    """

    def __init__(self, *, oldest_only: bool, from_table: bool, veto: bool) -> None:
        self._oldest_only = oldest_only
        self._from_table = from_table
        self._veto = veto

    def allows(self, situation: Situation) -> Flags:
        """Return, for each prefix of the candidates, whether nobody's slack is negative: [candidates + 1] bool."""
        s, n = situation, situation.num_in_flight
        alone_s = s.replay.alone(whole_of(s))
        summed_s = alone_s.cumsum()[n - 1 :]
        total_s = s.replay.forecasts(whole_of(s), n, s.width).drain_s if self._from_table else summed_s
        late = slack_of_line_s(s) < total_s[:, None]
        if not self._veto:
            needs_s = np.where(np.arange(len(s.slots)) < n, total_s[0], alone_s)
            late &= slack_of_line_s(s) >= needs_s
        if self._oldest_only:
            return ~late[:, 0]
        return np.logical_not((late & s.counts).any(axis=1))


@final
class ReplaySlack(SlackTest):
    """No request that would be in time becomes late, by forecasts of all finish times with and without joining.

    veto: a request that is late in any case forbids joining, too.
    """

    def __init__(self, *, veto: bool) -> None:
        self._veto = veto

    def allows(self, situation: Situation) -> Flags:
        s = situation
        late = (s.together.finish_s > s.deadline_s) & s.counts
        if not self._veto and late.any():
            late &= s.apart_s <= s.deadline_s
        return np.logical_not(late.any(axis=1))


def beneficial(situation: Situation) -> Flags:
    """Return the prefixes for which joining now gives a smaller sum of finish times than starting after the others."""
    s = situation
    sooner: Flags = ((s.together.finish_s - s.apart_s) * s.counts).sum(axis=1) <= 0.0
    return sooner


def largest_prefix(situation: Situation, test: SlackTest, *, benefit: bool) -> int:
    """Return how many candidates may join: the longest prefix that is allowed by the test and beneficial."""
    allowed = test.allows(situation)
    if benefit and allowed[1:].any():
        allowed &= beneficial(situation)
    found = np.flatnonzero(allowed)
    return int(found[-1]) if len(found) else 0


def worthwhile(situation: Situation, num_waiting: int) -> Flags:
    """Return which prefixes make the sum of finish times smaller by joining now, that of those behind them included.

    All who wait behind a prefix gain where computing it together with those in flight takes less time in all.
    """
    s = situation
    later_s = ((s.together.finish_s - s.apart_s) * s.counts).sum(axis=1)
    num_behind = num_waiting - np.arange(s.num_candidates + 1)
    saved_s = np.maximum(s.apart_drain_s - s.together.drain_s, 0.0)
    sooner: Flags = later_s <= num_behind * saved_s
    return sooner


def best_of_worthwhile(situation: Situation, num_waiting: int) -> int:
    """Return how many candidates begin now: `num_beginning` as it is described."""
    s, n = situation, situation.num_in_flight
    together = ((s.together.finish_s > s.deadline_s) & s.counts).sum(axis=1)
    apart = ((s.apart_s > s.deadline_s) & s.counts).sum(axis=1)
    allowed = (together < apart) | ((together == apart) & worthwhile(s, num_waiting))
    tried = {0, 1, 2, 3, 4, 6, 8, 12, 16, s.num_candidates}
    allowed &= [prefix in tried for prefix in range(s.num_candidates + 1)]
    allowed[0] = True
    finish_s, done_s = s.together.finish_s.copy(), s.together.drain_s.copy()
    for beginning in range(s.num_candidates):
        rest = slice(n + beginning, None)
        width = None if s.width is None else s.width[rest]
        after = s.replay.forecasts(s.left[rest], s.num_candidates - beginning, width)
        finish_s[beginning, rest] = s.together.drain_s[beginning] + after.finish_s[0]
        done_s[beginning] += after.drain_s[0]
    late = (finish_s > s.deadline_s).sum(axis=1)
    sum_s = finish_s.sum(axis=1) + (num_waiting - s.num_candidates) * done_s
    longest = int(np.flatnonzero(allowed)[-1])
    allowed &= done_s <= done_s[longest]
    return min(np.flatnonzero(allowed).tolist(), key=lambda prefix: (late[prefix], sum_s[prefix], -prefix))
