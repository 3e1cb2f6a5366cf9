"""What both kinds of replicas share: places, routing, deaths, and the counts that autoscaling looks at."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Ints
from batchmaker.errors import OptionError
from batchmaker.fleet.routing import Router
from batchmaker.lab.simulator.fleet.records import FAILED, MOST_TRIES, FleetRecords, FleetWork

UNANSWERED, WORK_NS, SEQUENCES, NEXT, STEPS, ROWS = range(6)
"""Places in `Replicas.totals`."""

NO_HOME, ENDED = -1, -2
"""In `Replicas.home`: the sequence has not begun; it is over, or its replica died."""

NS: Final = 1e9


class Replicas(ABC):
    """Replicas of an engine behind a router, in virtual time.

    work: what is offered. A router `sticky` needs its sequences, and no other knows what to do with them: OptionError.

    totals: [6] int64: unanswered requests, nanoseconds of known work in them, open sequences, requests that have
    arrived, steps and rows. home: [sequences] int64, the replica of each or NO_HOME or ENDED. chunks_left: [sequences]
    int64 unanswered. weight: [num_requests] int64 that a request adds to the router's load.
    """

    def __init__(self, work: FleetWork, router: Router) -> None:
        self.sticky = router.rule == "sticky"
        if self.sticky != (work.sequence is not None):
            raise OptionError(
                "the router `sticky` is for requests in sequences, and they need it: state is where one began; "
                f"got the router {router.rule!r} and {'no' if work.sequence is None else 'requests in'} sequences"
            )
        self.work = work
        self.router = router
        self.records = FleetRecords.of(work.arrived_s)
        self.totals: Ints = np.zeros(6, np.int64)
        self.sequence: NDArray[np.int32] = np.zeros(1, np.int32) if work.sequence is None else work.sequence
        self.chunks_left: Ints = np.bincount(self.sequence).astype(np.int64)
        self.home: Ints = np.full(len(self.chunks_left), NO_HOME, np.int64)
        self.num_places = 0
        self._free: list[int] = []  # a heap
        self._held: list[int] = []  # requests that came while no replica was open
        count = len(work.requests)
        if router.rule == "least-work":
            self.weight = work.known_ns
        elif router.rule == "least-work-true":
            self.weight = work.true_ns
        else:
            self.weight = np.ones(count, np.int64)

    # --- what the two do differently -------------------------------------------------------------------------

    @abstractmethod
    def play(self, until_s: float) -> None:
        """Play everything that happens up to this time, itself included: arrivals before what ends at the same time."""

    @abstractmethod
    def _fresh(self, place: int) -> None:
        """An engine that has seen nothing is in this place."""

    @abstractmethod
    def _drop(self, place: int) -> list[int]:
        """The engine in this place is gone; return its unanswered requests."""

    @abstractmethod
    def _hand_over(self, request: int, place: int, now_s: float) -> None:
        """A replica has a request."""

    @abstractmethod
    def num_here(self, place: int) -> int:
        """Return how many requests of a replica are unanswered."""

    # --- what the fleet's control does -----------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that will still be answered or fail, those to come included."""
        return len(self.weight) - int(self.totals[NEXT]) + int(self.totals[UNANSWERED]) + len(self._held)

    @property
    def share_come(self) -> float:
        """Share of the requests that have come, from 0 to 1."""
        return int(self.totals[NEXT]) / len(self.weight)

    @property
    def num_unanswered(self) -> int:
        """Requests that have come and are not answered."""
        return int(self.totals[UNANSWERED]) + len(self._held)

    @property
    def queued_s(self) -> float:
        """Seconds of known work at full batches that is not answered."""
        held = self.work.known_ns[self._held].sum() if self._held else 0
        return float(self.totals[WORK_NS] + held) / NS

    def open(self, now_s: float) -> int:
        """A new replica serves; return its place. It gets what was held while there was none."""
        if self._free:
            place = heapq.heappop(self._free)
        else:
            place, self.num_places = self.num_places, self.num_places + 1
        self._fresh(place)
        self.router.open(place)
        held, self._held = self._held, []
        for request in held:
            self._route(request, now_s)
        return place

    def close(self, place: int) -> None:
        """A replica gets nothing new but chunks of its open sequences."""
        self.router.close(place)

    def is_empty(self, place: int) -> bool:
        """Whether a replica has nothing left to do: no request, no open sequence."""
        return not self.num_here(place) and not (self.sticky and self.router.load[place])

    def leave(self, place: int) -> None:
        """A closed replica with nothing left is gone."""
        self._drop(place)
        heapq.heappush(self._free, place)

    def die(self, place: int, now_s: float) -> None:
        """A replica is gone, with what it computed. Its requests are tried once more elsewhere; its sequences end."""
        if place in self.router.replicas[: self.router.num_open]:
            self.router.close(place)
        requests = sorted(self._drop(place))
        if self.sticky:
            (lost,) = np.nonzero(self.home == place)
            self.home[lost] = ENDED
            self.totals[SEQUENCES] -= len(lost)
        self.totals[UNANSWERED] -= len(requests)
        self.totals[WORK_NS] -= int(self.work.known_ns[requests].sum())
        self.records.deaths += 1
        heapq.heappush(self._free, place)
        for request in requests:
            if self.sticky or self.records.tries[request] >= MOST_TRIES:
                self.fail(request, now_s)
            else:
                self._route(request, now_s)

    def fail(self, request: int, now_s: float) -> None:
        """A request will not be answered."""
        self.records.outcome[request] = FAILED
        self.records.finished_s[request] = now_s

    def _route(self, request: int, now_s: float) -> None:
        """Give a request to a replica, or hold it until there is one."""
        router, sequence = self.router, int(self.sequence[request]) if self.sticky else 0
        home = int(self.home[sequence])
        if self.sticky and home == ENDED:
            self.fail(request, now_s)
            return
        if self.sticky and home != NO_HOME:
            place = home
        elif router.num_open:
            place = router.route(int(self.weight[request]))
            if self.sticky:
                self.home[sequence] = place
                self.totals[SEQUENCES] += 1
        else:
            self._held.append(request)
            return
        self.records.replica[request] = place
        self.records.tries[request] += 1
        self.totals[UNANSWERED] += 1
        self.totals[WORK_NS] += self.work.known_ns[request]
        self._hand_over(request, place, now_s)
