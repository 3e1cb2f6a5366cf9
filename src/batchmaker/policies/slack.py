"""Slack tests: how many of the candidates may join without making a request late (LazyBatching, Equations 1 and 2).

A test answers for all prefixes of the candidates at once, first in line first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.cost.replay import Forecasts, Replay
from batchmaker.policies.expectation import StepsLeft
from batchmaker.policies.requests import RequestTable, Slots

Steps = NDArray[np.int64]
Seconds = NDArray[np.float64]
Allowed = NDArray[np.bool_]
"""[candidates + 1] whether 0, 1, 2, ... of the candidates may join."""


@final
@dataclass(frozen=True)
class Situation:
    """A boundary between two steps: the requests in flight and the candidates to join.

    slots: [requests] those in flight, in the order in which they began, then the candidates. left, whole: [requests,
    types] remaining steps, and all steps. deadline_s: [requests] seconds from now. Forecasts are computed at the first
    use. ends_apart: a single call at the very end of a request is left out if the request has several nodes of another
    type as well: it does not wait for requests that reach it later.
    """

    table: RequestTable
    steps: StepsLeft
    replay: Replay
    now_s: float
    slots: Slots
    num_in_flight: int
    ends_apart: bool = False

    @property
    def num_candidates(self) -> int:
        return len(self.slots) - self.num_in_flight

    @cached_property
    def left(self) -> Steps:
        """Remaining steps of each request by type, [requests, types]; with `ends_apart`, without such a last call."""
        left = self.steps.left(self.table, self.slots)
        if self.ends_apart:
            rows = np.arange(len(left))
            last = left.shape[1] - 1 - (left[:, ::-1] > 0).argmax(axis=1)
            whole = left + self.table.done[self.slots]
            whole[rows, last] = 0
            left[rows, last] -= (left[rows, last] == 1) & (whole.max(axis=1, initial=0) > 1)
        return left

    @cached_property
    def whole(self) -> Steps:
        return self.steps.whole(self.table, self.slots)

    @cached_property
    def width(self) -> NDArray[np.float64] | None:
        width = self.table.width[self.slots]
        return None if (width == 1).all() else width

    @cached_property
    def deadline_s(self) -> Seconds:
        deadline_s: Seconds = self.table.deadline_s[self.slots] - self.now_s
        return deadline_s

    @cached_property
    def slack_of_line_s(self) -> Seconds:
        """SLA minus the time in line: [requests]. Stalls after the beginning do not count (the paper's T_wait)."""
        begun_s = np.minimum(self.table.began_s[self.slots], self.now_s)
        slack_s: Seconds = self.table.deadline_s[self.slots] - begun_s
        return slack_s

    @cached_property
    def together(self) -> Forecasts:
        """Finish times if 0, 1, 2, ... of the candidates join now."""
        return self.replay.forecasts(self.left, self.num_in_flight, self.width)

    @cached_property
    def _after(self) -> Forecasts:
        """When so many candidates finish by themselves, from their start on."""
        n = self.num_in_flight
        return self.replay.forecasts(self.left[n:], 0, None if self.width is None else self.width[n:])

    @cached_property
    def apart_drain_s(self) -> Seconds:
        """When all are done if so many candidates start once those in flight are done: [candidates + 1]."""
        drain_s: Seconds = self.together.drain_s[0] + self._after.drain_s
        return drain_s

    @cached_property
    def apart_s(self) -> Seconds:
        """Finish times if so many candidates start after those in flight are done: [candidates + 1, requests]."""
        n, after = self.num_in_flight, self._after
        finish_s = np.empty_like(self.together.finish_s)
        finish_s[:, :n] = self.together.finish_s[0, :n]
        finish_s[:, n:] = after.finish_s + self.together.drain_s[0]
        return finish_s

    @cached_property
    def counts(self) -> Allowed:
        """The requests that are present if so many candidates join: [candidates + 1, requests]."""
        joining = np.arange(len(self.slots)) - self.num_in_flight
        return joining < np.arange(self.num_candidates + 1)[:, None]


class SlackTest(ABC):
    """Decides how many candidates may join."""

    @abstractmethod
    def allows(self, situation: Situation) -> Allowed:
        """Return which prefixes of the candidates may join the requests in flight."""


@final
class NoSlack(SlackTest):
    """Allows everybody."""

    def allows(self, situation: Situation) -> Allowed:
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

    def allows(self, situation: Situation) -> Allowed:
        """Return, for each prefix of the candidates, whether nobody's slack is negative: [candidates + 1] bool."""
        s, n = situation, situation.num_in_flight
        alone_s = s.replay.alone(s.whole)
        summed_s = alone_s.cumsum()[n - 1 :]
        total_s = s.replay.forecasts(s.whole, n, s.width).drain_s if self._from_table else summed_s
        late = s.slack_of_line_s < total_s[:, None]
        if not self._veto:
            needs_s = np.where(np.arange(len(s.slots)) < n, total_s[0], alone_s)
            late &= s.slack_of_line_s >= needs_s
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

    def allows(self, situation: Situation) -> Allowed:
        s = situation
        late = (s.together.finish_s > s.deadline_s) & s.counts
        if not self._veto and late.any():
            late &= s.apart_s <= s.deadline_s
        return np.logical_not(late.any(axis=1))


def beneficial(situation: Situation) -> Allowed:
    """Return the prefixes for which joining now gives a smaller sum of finish times than starting after the others."""
    s = situation
    sooner: Allowed = ((s.together.finish_s - s.apart_s) * s.counts).sum(axis=1) <= 0.0
    return sooner


def largest_prefix(situation: Situation, test: SlackTest, *, benefit: bool) -> int:
    """Return how many candidates may join: the longest prefix that is allowed by the test and beneficial."""
    allowed = test.allows(situation)
    if benefit and allowed[1:].any():
        allowed &= beneficial(situation)
    found = np.flatnonzero(allowed)
    return int(found[-1]) if len(found) else 0
