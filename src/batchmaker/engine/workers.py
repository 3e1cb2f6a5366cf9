"""The workers of an engine: each has a loop with a driver, a scheduler and rows of its own. Requests are dealt to them.

Nothing is shared by workers at a step: a request runs in one of them from its first cell to its last, and so does a
sequence. A worker that has nothing to do is given what has not begun at another.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from heapq import heapify, heapreplace
from typing import Any, Final, final

import numpy as np
from torch import Tensor

from batchmaker.engine.driver import Driver
from batchmaker.engine.heartbeat import Heartbeat
from batchmaker.engine.loop import Loop
from batchmaker.engine.request import Ticket
from batchmaker.engine.stats import DriverStats
from batchmaker.scheduler.events import RequestId

_COUNTED: Final = (list, str, bytes, bytearray)


@final
class Workers:
    """The loops of an engine, which take requests as one does. Any thread may call its methods.

    A request goes to the worker with the least work. The work of a request is taken to be the number of its values,
    such as words; see `work_of`. It is only compared with the work of others.

    is_running: whether the threads have been started. entrance: what takes requests, and callers wait with: this
    object, or the only loop.
    """

    def __init__(self, loops: Sequence[Loop]) -> None:
        self.loops = tuple(loops)
        self.is_running = False
        self.entrance = self.loops[0] if len(self.loops) == 1 else self
        if self.entrance is self:
            for loop in loops:
                loop.on_idle = partial(self._seek_work, loop)
                loop.on_failed = partial(self._end, drain=True)

    # --- life ----------------------------------------------------------------------------------------------------

    @property
    def drivers(self) -> tuple[Driver, ...]:
        """What the loops turn."""
        return tuple([loop.driver for loop in self.loops])

    @property
    def stats(self) -> DriverStats:
        """The counts of all drivers together."""
        return DriverStats.total([driver.stats for driver in self.drivers])

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller runs in the thread of a worker, as a callback does."""
        return any(loop.is_own_thread for loop in self.loops)

    def heartbeat(self) -> Heartbeat:
        """Return the heartbeat of a worker that is not alive, otherwise of the one in its present turn for longest."""
        return max([loop.heartbeat() for loop in self.loops], key=lambda beat: (not beat.alive, beat.busy_for_s))

    def start(self) -> bool:
        """Start all threads. False if that was done before. Raises StoppedError after `stop`."""
        started = [loop.start() for loop in self.loops]
        self.is_running = True
        return started[0]

    def stop(self, *, drain: bool, within_s: float | None = None) -> bool:
        """Take no more requests, finish the accepted ones, and end all threads; see Loop.end and Loop.join.

        Returns whether they have ended. If it is called in one of them, such as in a callback, it returns at once.
        """
        self._end(drain=drain)
        if self.is_own_thread:
            return False
        until_s = None if within_s is None else time.monotonic() + within_s
        ended = [loop.join(None if until_s is None else max(0.0, until_s - time.monotonic())) for loop in self.loops]
        return all(ended)

    def check(self) -> None:
        """Raise StoppedError if no more requests are taken."""
        for loop in self.loops:
            loop.check()

    def least_sequences(self) -> tuple[int, Loop]:
        """Return the number and the loop of the worker with the fewest open sequences."""
        return min(enumerate(self.loops), key=lambda worker: worker[1].driver.num_sequences)

    def _end(self, *, drain: bool) -> None:
        for loop in self.loops:
            loop.end(drain=drain)

    # --- requests ------------------------------------------------------------------------------------------------

    def send(self, item: list[Ticket]) -> None:
        """Accept requests that come together. Raises StoppedError after `stop`."""
        for loop, share in self._dealt(item):
            loop.send(share)

    def hold(self, tickets: list[Ticket]) -> None:
        """Accept requests, but hand them over later; see Loop.hold."""
        for loop, share in self._dealt(tickets):
            loop.hold(share)

    def release(self) -> None:
        """Hand over all held requests."""
        for loop in self.loops:
            loop.release()

    def cancel(self, request_id: RequestId) -> None:
        """Give a request up, whichever worker has it. An answer asks its own."""
        for loop in self.loops:
            loop.cancel(request_id)

    def _dealt(self, tickets: Sequence[Ticket]) -> list[tuple[Loop, list[Ticket]]]:
        """Say which worker gets which of these requests."""
        shares: dict[int, list[Ticket]] = {}
        least = [(loop.work, number) for number, loop in enumerate(self.loops)]
        heapify(least)
        for ticket in tickets:
            ticket.work = work_of(ticket.request)
            number = ticket.worker
            if number is None:
                work, number = least[0]
                heapreplace(least, (work + ticket.work, number))
            share = shares.get(number)
            if share is None:
                share = shares[number] = []
            share.append(ticket)
            if ticket.answer is not None:
                ticket.answer.handover = self.loops[number]
        return [(self.loops[number], share) for number, share in shares.items()]

    def _seek_work(self, idle: Loop) -> None:
        """Ask the worker with the most work for some of it. Called in the thread of the idle one."""
        busiest = max(self.loops, key=lambda loop: loop.work)
        if busiest is not idle and busiest.work:
            busiest.call_soon(partial(busiest.give, idle))


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
