"""Replicas that are the engine's own scheduler, each under its own virtual driver."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import final

from batchmaker.errors import InvariantError
from batchmaker.fleet.routing import Router
from batchmaker.lab.simulator.cell_simulation import CellSimulation
from batchmaker.lab.simulator.fleet.records import ANSWERED, FleetWork
from batchmaker.lab.simulator.fleet.replicas import ENDED, NEXT, ROWS, SEQUENCES, STEPS, UNANSWERED, WORK_NS, Replicas
from batchmaker.lab.simulator.simulate import SimulatedDevice
from batchmaker.lab.simulator.simulation import OfFleet
from batchmaker.lab.simulator.workload import Offered, Records, SimulatedModel
from batchmaker.policies.base import CellPolicy


@final
class ExactReplicas(Replicas):
    """Each replica is a Scheduler with a policy of its own. device: one worker, or several, of each replica."""

    def __init__(
        self,
        model: SimulatedModel,
        make_policy: Callable[[], CellPolicy],
        work: FleetWork,
        router: Router,
        device: SimulatedDevice,
    ) -> None:
        super().__init__(work, router)
        self._model = model
        self._make_policy = make_policy
        self._device = device
        self._engines: list[CellSimulation | None] = []
        self._here: list[set[int]] = []
        self._next_s: list[float] = []
        self._offered = Offered(work.requests, work.arrived_s)
        self._shared = Records.of(work.arrived_s)

    def play(self, until_s: float) -> None:
        """See Replicas.play. Takes the next of two times, an arrival and the earliest replica, until `until_s`."""
        arrived_s, count = self.work.arrived_s, len(self.work.arrived_s)
        while True:
            request = int(self.totals[NEXT])
            arrival_s = float(arrived_s[request]) if request < count else math.inf
            event_s = min(self._next_s, default=math.inf)
            if min(arrival_s, event_s) > until_s or min(arrival_s, event_s) == math.inf:
                break
            if arrival_s <= event_s:
                self.totals[NEXT] += 1
                self._route(request, arrival_s)
            else:
                self._turn(self._next_s.index(event_s), event_s)
        self.records.busy_s = self._shared.busy_s
        self.totals[STEPS], self.totals[ROWS] = self._shared.steps, self._shared.rows

    def _turn(self, place: int, now_s: float) -> None:
        engine = self._engines[place]
        assert engine is not None
        happened = engine.turn(now_s)
        next_s = engine.next_s()
        if next_s <= now_s and not happened:
            raise InvariantError(f"replica {place} wants to be asked at {now_s} s and then does nothing")
        self._next_s[place] = max(next_s, now_s)

    def _answered(self, request: int, now_s: float) -> None:
        place = int(self.records.replica[request])
        self._here[place].remove(request)
        self.records.outcome[request] = ANSWERED
        self.records.finished_s[request] = now_s
        self.totals[UNANSWERED] -= 1
        self.totals[WORK_NS] -= self.work.known_ns[request]
        if not self.sticky:
            self.router.answered(place, int(self.weight[request]))
            return
        sequence = self.sequence[request]
        self.chunks_left[sequence] -= 1
        if not self.chunks_left[sequence]:
            self.home[sequence] = ENDED
            self.totals[SEQUENCES] -= 1
            self.router.answered(place, 1)

    def _fresh(self, place: int) -> None:
        fleet = OfFleet([], self._shared, self._answered)
        engine = CellSimulation(self._model, self._make_policy(), self._offered, self._device, fleet=fleet)
        engine.begin()
        if place == len(self._engines):
            self._engines.append(engine)
            self._here.append(set())
            self._next_s.append(math.inf)
        self._engines[place] = engine

    def _drop(self, place: int) -> list[int]:
        requests = list(self._here[place])
        self._engines[place] = None
        self._here[place] = set()
        self._next_s[place] = math.inf
        return requests

    def _hand_over(self, request: int, place: int, now_s: float) -> None:
        engine = self._engines[place]
        assert engine is not None
        self._here[place].add(request)
        engine.offer(request)
        self._next_s[place] = max(engine.next_s(), now_s)

    def num_here(self, place: int) -> int:
        return len(self._here[place])
