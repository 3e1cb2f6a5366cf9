"""Simulating a fleet: replicas that start slowly, die, and are as many as a rule wants."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from batchmaker.errors import OptionError
from batchmaker.fleet.scaling import Autoscaler, ScalingRule
from batchmaker.lab.simulator.fleet.records import FleetRecords, Sample
from batchmaker.lab.simulator.fleet.replicas import ROWS, SEQUENCES, STEPS, Replicas

NUM_SAMPLES: Final = 200
"""Looks at the fleet from the first arrival to the last."""
DEATHS_STREAM: Final = 7
"""Number of the random stream of deaths, beside others of the same seed."""

_READY, _DEATH, _SCALE, _LOOK = range(4)  # what happens; of several at one time, in this order


@final
@dataclass(frozen=True, slots=True)
class FleetPlan:
    """How many replicas there are. replicas: serving when the first request comes; without scaling, always so many.

    start_s: seconds from when a replica is asked for to when it serves. mean_life_s: seconds that a replica serves
    before it dies, exponential; another is asked for at once. scaling: how many there should be. seed: of deaths.
    OptionError if a number is out of range.
    """

    replicas: int
    start_s: float = 0.0
    mean_life_s: float = math.inf
    scaling: ScalingRule | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise OptionError(f"a fleet has at least 1 replica, got {self.replicas}")
        if not (math.isfinite(self.start_s) and self.start_s >= 0):
            raise OptionError(f"start_s must be a finite time of at least 0, got {self.start_s:g}")
        if not self.mean_life_s > 0:
            raise OptionError(f"mean_life_s must be above 0, got {self.mean_life_s:g}")
        if self.seed < 0:
            raise OptionError(f"seed must be at least 0, got {self.seed}")


def simulate_fleet(
    replicas: Replicas, plan: FleetPlan, *, progress: Callable[[float], None] | None = None
) -> FleetRecords:
    """Return what becomes of every request, and how many replicas there were.

    replicas: new ones. progress: called now and then with the share of requests that have come. The same arguments give
    the same records.
    """
    return _Fleet(replicas, plan, progress).run()


class _Fleet:
    """The control of one fleet: a heap of what happens when, and who serves, starts and leaves."""

    def __init__(self, replicas: Replicas, plan: FleetPlan, progress: Callable[[float], None] | None) -> None:
        self._replicas = replicas
        self._plan = plan
        self._progress = progress
        self._last_s = float(replicas.work.arrived_s[-1])
        self._look_s = self._last_s / NUM_SAMPLES or 1.0
        self._scaler = None if plan.scaling is None else Autoscaler(plan.scaling, plan.replicas)
        self._lives = np.random.default_rng((plan.seed, DEATHS_STREAM))
        self._events: list[tuple[float, int, int]] = []  # time, what, number of the replica
        self._wanted = plan.replicas
        self._num_started = 0  # replicas so far, which numbers them
        self._serving: dict[int, tuple[int, float]] = {}  # by number: the place, and since when it is paid for
        self._starting: dict[int, float] = {}
        self._leaving: dict[int, tuple[int, float]] = {}

    def run(self) -> FleetRecords:
        """Play to the last answer."""
        replicas, records = self._replicas, self._replicas.records
        for _ in range(self._plan.replicas):
            self._num_started += 1
            self._ready(self._num_started, 0.0, 0.0)
        self._at(0.0, _LOOK)
        if self._scaler is not None:
            self._at(0.0, _SCALE)
        now_s = 0.0
        while replicas.num_waiting:
            now_s, what, number = heapq.heappop(self._events)
            replicas.play(now_s)
            if what == _READY and number in self._starting:
                self._ready(number, now_s, self._starting.pop(number))
            elif what == _DEATH:
                self._death(number, now_s)
            elif what == _SCALE:
                self._scale(now_s)
            elif what == _LOOK:
                self._look(now_s)
        end_s = max(self._last_s, float(records.finished_s.max()))
        gone = [*self._serving.values(), *self._leaving.values()]
        records.paid_s += sum(
            max(end_s - since_s, 0.0) for since_s in (*(s for _, s in gone), *self._starting.values())
        )
        records.steps, records.rows = int(replicas.totals[STEPS]), int(replicas.totals[ROWS])
        return records

    def _at(self, at_s: float, what: int, number: int = 0) -> None:
        heapq.heappush(self._events, (at_s, what, number))

    def _ask(self, now_s: float) -> None:
        """Start one more replica."""
        self._num_started += 1
        self._starting[self._num_started] = now_s
        self._at(now_s + self._plan.start_s, _READY, self._num_started)

    def _ready(self, number: int, now_s: float, since_s: float) -> None:
        self._serving[number] = (self._replicas.open(now_s), since_s)
        if self._plan.mean_life_s < math.inf:
            self._at(now_s + float(self._lives.exponential(self._plan.mean_life_s)), _DEATH, number)

    def _death(self, number: int, now_s: float) -> None:
        replica = self._serving.pop(number, None)
        was_serving = replica is not None
        replica = replica or self._leaving.pop(number, None)
        if replica is None:
            return  # it has left before
        place, since_s = replica
        self._replicas.records.paid_s += now_s - since_s
        self._replicas.die(place, now_s)
        if was_serving:
            self._ask(now_s)

    def _scale(self, now_s: float) -> None:
        """Ask for replicas, or send the youngest away, until there are as many as the rule wants."""
        plan, replicas = self._plan, self._replicas
        assert self._scaler is not None
        assert plan.scaling is not None
        by_work = plan.scaling.measure == "work"
        wanted = self._scaler.wanted(now_s, replicas.queued_s if by_work else float(replicas.totals[SEQUENCES]))
        while len(self._serving) + len(self._starting) < wanted:
            self._ask(now_s)
        while len(self._serving) + len(self._starting) > wanted:
            if self._starting:
                _, since_s = self._starting.popitem()
                replicas.records.paid_s += now_s - since_s
            else:
                number, (place, since_s) = self._serving.popitem()
                replicas.close(place)
                self._leaving[number] = (place, since_s)
        self._bury(now_s)
        self._at(now_s + plan.scaling.every_s, _SCALE)

    def _bury(self, now_s: float) -> None:
        """Those that leave and have nothing left are paid for no longer."""
        for number, (place, since_s) in list(self._leaving.items()):
            if self._replicas.is_empty(place):
                del self._leaving[number]
                self._replicas.leave(place)
                self._replicas.records.paid_s += now_s - since_s

    def _look(self, now_s: float) -> None:
        replicas = self._replicas
        replicas.records.samples.append(
            Sample(
                now_s,
                len(self._serving),
                len(self._starting),
                len(self._leaving),
                replicas.num_unanswered,
                replicas.queued_s,
            )
        )
        if self._progress is not None:
            self._progress(replicas.share_come)
        if len(replicas.records.samples) % (2 * NUM_SAMPLES) == 0:
            self._look_s *= 2  # the last request came long ago
        self._at(now_s + self._look_s, _LOOK)
