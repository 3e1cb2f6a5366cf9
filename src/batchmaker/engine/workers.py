"""The workers of an engine: each has a thread, a driver, a scheduler and rows of its own. Requests are dealt to them.

Nothing is shared by workers at a step: a request runs in one of them from its first cell to its last, and so does a
sequence. A worker that has nothing to do is given what has not begun at another.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from heapq import heapify, heappop, heapreplace
from typing import Any, Final, final

import numpy as np
from torch import Tensor

from batchmaker.core.events import RequestId
from batchmaker.engine.driver import Driver
from batchmaker.engine.heartbeat import Heartbeat
from batchmaker.engine.request import Ticket
from batchmaker.engine.stats import DriverStats
from batchmaker.engine.worker import Worker

TO_BE_BUSY: Final = 0.7
"""The share of its time that a worker computes, if it does not wait for the interpreter's lock for too long."""

LOOK_S: Final = 0.05
"""Seconds between two looks at how busy the workers are."""

LONG_TURN_S: Final = 0.05
"""Seconds. A worker that has been in one turn for longer takes no requests while there is another."""

_COUNTED: Final = (list, str, bytes, bytearray)


@final
class Workers:
    """The workers of an engine, which take requests as one does. Any thread may call its methods.

    A request goes to the worker with the least work. The work of a request is taken to be the number of its values,
    such as words; see `work_of`. It is only compared with the work of others.

    adapts: whether as many take requests as the interpreter's lock lets run (see `_num_useful`); otherwise all do.
    is_running: whether the threads have been started. entrance: what takes requests, and callers wait with: this
    object, or the only worker.
    """

    def __init__(self, workers: Sequence[Worker], *, adapts: bool = False) -> None:
        self.members = tuple(workers)
        self._adapts = adapts and hasattr(time, "pthread_getcpuclockid")
        self._look = time.monotonic(), 0.0  # when it last looked, and the processor time until then
        self._num_taking = len(self.members)
        self._seeking: set[Worker] = set()
        self.is_running = False
        self.entrance = self.members[0] if len(self.members) == 1 else self
        if self.entrance is self:
            for worker in workers:
                worker.on_idle = partial(self._seek_work, worker)
                worker.on_failed = partial(self._end, drain=True)

    # --- life ----------------------------------------------------------------------------------------------------

    @property
    def drivers(self) -> tuple[Driver, ...]:
        """What the workers turn."""
        return tuple([worker.driver for worker in self.members])

    @property
    def stats(self) -> DriverStats:
        """The counts of all drivers together."""
        return DriverStats.total([driver.stats for driver in self.drivers])

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller runs in the thread of a worker, as a callback does."""
        return any(worker.is_own_thread for worker in self.members)

    def heartbeat(self) -> Heartbeat:
        """Return the heartbeat of a worker that is not alive, otherwise of the one in its present turn for longest."""
        return max([worker.heartbeat() for worker in self.members], key=lambda beat: (not beat.alive, beat.busy_for_s))

    def respond_within(self, seconds: float) -> bool:
        """Whether each thread runs, and none has been in one turn for so long."""
        return all(worker.responds_within(seconds) for worker in self.members)

    def start(self) -> bool:
        """Start all threads. False if that was done before. Raises StoppedError after `stop`."""
        started = [worker.start() for worker in self.members]
        self.is_running = True
        return started[0]

    def stop(self, *, drain: bool, within_s: float | None = None) -> bool:
        """Take no more requests, finish the accepted ones, and end all threads; see Worker.end and Worker.join.

        Returns whether they have ended. If it is called in one of them, such as in a callback, it returns at once.
        """
        self._end(drain=drain)
        if self.is_own_thread:
            return False
        until_s = None if within_s is None else time.monotonic() + within_s
        ended = [
            worker.join(None if until_s is None else max(0.0, until_s - time.monotonic())) for worker in self.members
        ]
        return all(ended)

    def check(self) -> None:
        """Raise StoppedError if no more requests are taken."""
        for worker in self.members:
            worker.check()

    def least_sequences(self) -> tuple[int, Worker]:
        """Return the number and the worker with the fewest open sequences."""
        taking = self.members[: self._num_useful()]
        return min(enumerate(taking), key=lambda worker: worker[1].driver.num_sequences)

    def _end(self, *, drain: bool) -> None:
        for worker in self.members:
            worker.end(drain=drain)

    # --- requests ------------------------------------------------------------------------------------------------

    def send(self, item: list[Ticket]) -> None:
        """Accept requests that come together. Raises StoppedError after `stop`."""
        for worker, share in self._dealt(item):
            worker.send(share)

    def hold(self, tickets: list[Ticket]) -> None:
        """Accept requests, but hand them over later; see Worker.hold."""
        for worker, share in self._dealt(tickets):
            worker.hold(share)

    def release(self) -> None:
        """Hand over all held requests."""
        for worker in self.members:
            worker.release()

    def cancel(self, request_id: RequestId) -> None:
        """Give a request up, whichever worker has it. An answer asks its own."""
        for worker in self.members:
            worker.cancel(request_id)

    def _dealt(self, tickets: Sequence[Ticket]) -> list[tuple[Worker, list[Ticket]]]:
        """Say which worker gets which of these requests."""
        shares: dict[int, list[Ticket]] = {}
        least = [(worker.work, number) for number, worker in enumerate(self.members[: self._num_useful()])]
        heapify(least)
        for ticket in tickets:
            bulk = ticket.bulk
            ticket.work = work_of(ticket.request) if bulk is None else sum(map(work_of, bulk.requests))
            number = ticket.worker
            if number is None:
                work, number = least[0]
                while number not in shares and len(least) > 1 and self.members[number].busy_for_s > LONG_TURN_S:
                    heappop(least)
                    work, number = least[0]
                heapreplace(least, (work + ticket.work, number))
            share = shares.get(number)
            if share is None:
                share = shares[number] = []
            share.append(ticket)
            if ticket.answer is not None:
                ticket.answer.handover = self.members[number]
        return [(self.members[number], share) for number, share in shares.items()]

    def _num_useful(self) -> int:
        """Return how many workers are to take requests.

        Threads share the interpreter's lock. With small cells, two keep it busy, and each further one makes the others
        wait. So this looks at how many processors the workers have kept busy lately. As many take requests as can each
        be busy for TO_BE_BUSY of the time, and one more, so that their number can grow; two at least.
        """
        now_s, (looked_s, seen_s) = time.monotonic(), self._look  # other callers may look at the same time
        if not self._adapts or now_s < looked_s + LOOK_S:
            return self._num_taking
        used_s = sum([worker.used_s for worker in self.members])
        self._look = now_s, used_s
        busy = max(0.0, used_s - seen_s) / (now_s - looked_s)  # one that has ended has used nothing
        self._num_taking = min(len(self.members), int(busy / TO_BE_BUSY) + 2)
        return self._num_taking

    def _seek_work(self, idle: Worker) -> None:
        """Ask the worker with the most work for some of it. Called in the thread of the idle one."""
        if idle in self._seeking or idle not in self.members[: self._num_taking]:
            return
        busiest = max(self.members, key=lambda worker: worker.work)
        if busiest is not idle and busiest.work:
            self._seeking.add(idle)  # until it is answered: who asks again and again would keep the other from its work
            busiest.call_soon(partial(self._give, busiest, idle))

    def _give(self, busiest: Worker, idle: Worker) -> None:
        self._seeking.discard(idle)
        busiest.give(idle)


def work_of(request: Any) -> int:
    """Return the number of values that a request brings, at least 1; of the longest, if it brings several."""
    if isinstance(request, _COUNTED):
        return len(request) or 1
    if isinstance(request, Tensor | np.ndarray):
        return request.shape[0] or 1 if request.ndim else 1
    if isinstance(request, dict):
        request = tuple(request.values())
    if isinstance(request, tuple):
        return max([1, *[work_of(part) for part in request if not isinstance(part, tuple | dict)]])
    return 1
