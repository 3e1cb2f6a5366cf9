"""A boundary between two steps: who is in flight, who could join, and when each would be done with them and without."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Flags, Floats, Ints
from batchmaker.cost.replay import Forecasts, Replay
from batchmaker.graph.cell_graph import Work
from batchmaker.policies.expectation import StepsLeft
from batchmaker.policies.requests import RequestTable


@final
@dataclass(frozen=True)
class Situation:
    """A boundary between two steps: the requests in flight and the candidates to join.

    slots: [requests] those in flight, in the order in which they began, then the candidates. deadline_s: [requests]
    seconds from now. Forecasts are computed at the first use.
    """

    table: RequestTable
    steps: StepsLeft
    replay: Replay
    now_s: float
    slots: Ints
    num_in_flight: int

    @property
    def num_candidates(self) -> int:
        return len(self.slots) - self.num_in_flight

    @cached_property
    def left(self) -> Ints:
        """Remaining steps of each request by type, [requests, types]."""
        return self.steps.remaining(self.table, self.slots)

    @cached_property
    def width(self) -> NDArray[np.float64] | None:
        width = self.table.width[self.slots]
        return None if (width == 1).all() else width

    @cached_property
    def deadline_s(self) -> Floats:
        deadline_s: Floats = self.table.deadline_s[self.slots] - self.now_s
        return deadline_s

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
    def apart_drain_s(self) -> Floats:
        """When all are done if so many candidates start once those in flight are done: [candidates + 1]."""
        drain_s: Floats = self.together.drain_s[0] + self._after.drain_s
        return drain_s

    @cached_property
    def apart_s(self) -> Floats:
        """Finish times if so many candidates start after those in flight are done: [candidates + 1, requests]."""
        n, after = self.num_in_flight, self._after
        finish_s = np.empty_like(self.together.finish_s)
        finish_s[:, :n] = self.together.finish_s[0, :n]
        finish_s[:, n:] = after.finish_s + self.together.drain_s[0]
        return finish_s

    @cached_property
    def counts(self) -> Flags:
        """The requests that are present if so many candidates join: [candidates + 1, requests]."""
        joining = np.arange(len(self.slots)) - self.num_in_flight
        return joining < np.arange(self.num_candidates + 1)[:, None]


def enter(table: RequestTable, slot: int, deadline_s: float, work: Work) -> None:
    """Let a request of one model arrive at 0 with this work."""
    table.enter(slot, 0.0, deadline_s, 0, 0, is_open=False)
    table.add_work(slot, work)
