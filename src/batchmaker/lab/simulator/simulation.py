"""The common part of both simulations: virtual time, arrivals, work on the workers, outcomes of requests."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from batchmaker.core.commands import Fail, FailureKind, Reply
from batchmaker.core.events import WorkerId
from batchmaker.errors import InvariantError, OptionError
from batchmaker.lab.simulator.workload import ANSWERED, GIVEN_UP, REFUSED, Offered, Records

Ran = TypeVar("Ran")
"""Work submitted to a worker."""


@dataclass(frozen=True, slots=True)
class Computed:
    """One batched call on a worker. what: the cell, or "graph". requests: those in its rows, in order."""

    worker: WorkerId
    what: str
    begin_s: float
    end_s: float
    requests: NDArray[np.int64]


Observe = Callable[[Computed], None]


@dataclass(frozen=True, slots=True)
class OfFleet:
    """What makes a simulation one of a fleet.

    coming: numbers of the requests that it has got so far, in order. records: that the fleet shares. ended: called with
    the number of a request and the time when it is answered or fails.
    """

    coming: list[int]
    records: Records
    ended: Callable[[int, float], None]


class Simulation(ABC, Generic[Ran]):
    """Runs one scheduler from the first arrival to the last answer. Scheduling itself takes no time.

    sla_s: the deadline of each request, in seconds from its arrival. observe: called with every batched call when it is
    submitted.

    Arrivals are told to the scheduler when a worker may be given work, or with the next end of a call: until then it
    could do nothing about them. With `give_up_late` they are told at once, since it may give them up.

    One of a fleet is not run but asked for its turns: `begin` once, then `offer`, `next_s` and `turn`.
    """

    def __init__(
        self,
        offered: Offered,
        sla_s: float | None,
        num_workers: int,
        name: str,
        observe: Observe | None,
        *,
        give_up_late: bool,
        fleet: OfFleet | None = None,
    ) -> None:
        if num_workers < 1:
            raise OptionError(f"workers must be at least 1, got {num_workers}")
        if sla_s is not None and not (math.isfinite(sla_s) and sla_s > 0):
            raise OptionError(f"an SLA must be a finite time above 0, got {sla_s} s")
        self._arrived_s: list[float] = offered.arrived_s.tolist()
        self._sla_s = sla_s
        self._name = name
        self._tell_at_once = give_up_late
        self._coming: Sequence[int] = range(len(self._arrived_s)) if fleet is None else fleet.coming
        self._next = 0  # in `_coming`
        self._on_workers: list[tuple[float, int, Ran]] = []  # a heap by the end; then in order of submission
        self._submitted = 0
        self._unfinished = [0] * num_workers
        self._observe = observe
        self._ended = None if fleet is None else fleet.ended
        self.records = Records.of(offered.arrived_s) if fleet is None else fleet.records

    def run(self) -> Records:
        """Run to the end. InvariantError if the policy leaves requests unanswered with nothing running."""
        now_s = 0.0
        self.begin()
        while (next_s := self.next_s()) < math.inf:
            now_s = max(now_s, next_s)
            happened = self.turn(now_s)
            if not happened and self.next_s() <= now_s:
                raise InvariantError(f"policy {self._name!r} wants to be asked at {now_s} s and then does nothing")
        if self._num_left():
            raise InvariantError(
                f"policy {self._name!r} leaves {self._num_left()} requests unanswered and nothing runs"
            )
        return self.records

    # --- different in the two simulations ---------------------------------------------------------------------

    @abstractmethod
    def begin(self) -> None:
        """Tell the scheduler what it must know before the first request."""

    @abstractmethod
    def _handle(self, arrivals: Sequence[int], ended: Sequence[Ran], now_s: float) -> int:
        """Report events to the scheduler and execute its commands; return the number of commands."""

    @abstractmethod
    def _may_submit(self) -> bool:
        """Whether some worker may get work."""

    @abstractmethod
    def _wakeup_s(self) -> float | None:
        """When the passing of time alone gives the scheduler something to do."""

    @abstractmethod
    def _num_left(self) -> int:
        """Requests that are still in the scheduler."""

    # --- common to both --------------------------------------------------------------------------------------

    def offer(self, request: int) -> None:
        """One more request comes, at the next turn. Only of a fleet, whose `coming` is a list."""
        assert isinstance(self._coming, list)
        self._coming.append(request)

    def next_s(self) -> float:
        """Return the next time at which the scheduler has something to decide or to learn."""
        next_s = self._on_workers[0][0] if self._on_workers else math.inf
        if self._next < len(self._coming) and (self._tell_at_once or self._may_submit()):
            next_s = min(next_s, self._arrived_s[self._coming[self._next]])
        wakeup_s = self._wakeup_s()
        return next_s if wakeup_s is None else min(next_s, wakeup_s)

    def turn(self, now_s: float) -> bool:
        """Play everything that happens at one time; return whether anything did."""
        first, arrived_s, coming = self._next, self._arrived_s, self._coming
        while self._next < len(coming) and arrived_s[coming[self._next]] <= now_s:
            self._next += 1
        ended: list[Ran] = []
        while self._on_workers and self._on_workers[0][0] <= now_s:
            ended.append(heapq.heappop(self._on_workers)[2])
        num_commands = self._handle(coming[first : self._next], ended, now_s)
        return bool(num_commands or ended or self._next > first)

    def _deadline_s(self, request: int) -> float | None:
        return None if self._sla_s is None else self._arrived_s[request] + self._sla_s

    def _submit(
        self, ran: Ran, worker: WorkerId, what: str, begin_s: float, seconds: float, requests: NDArray[np.int64]
    ) -> None:
        """Put one batched call on a worker."""
        records, end_s = self.records, begin_s + seconds
        heapq.heappush(self._on_workers, (end_s, self._submitted, ran))
        self._submitted += 1
        self._unfinished[worker] += 1
        records.steps += 1
        records.rows += len(requests)
        records.busy_s += seconds
        fresh = requests[np.isnan(records.started_s[requests])]
        if len(fresh):
            records.started_s[fresh] = begin_s
        if self._observe is not None:
            self._observe(Computed(worker, what, begin_s, end_s, requests))

    def _end(self, command: Reply | Fail, now_s: float) -> None:
        """Note that a request was answered, or has failed."""
        request = command.request
        self.records.finished_s[request] = now_s
        if isinstance(command, Reply):
            self.records.outcome[request] = ANSWERED
        else:
            self.records.outcome[request] = REFUSED if command.kind is FailureKind.REFUSED else GIVEN_UP
        if self._ended is not None:
            self._ended(request, now_s)
