"""Drives graph batching: whole requests, padded and computed together by the model's own `batched`. The baselines."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from batchmaker.cells.model import Model
from batchmaker.clock import Clock
from batchmaker.engine.driver import DriverStats, StepSeen
from batchmaker.engine.ticket import Ticket
from batchmaker.errors import BatchmakerError, CancelledError, CellError, DeadlineError, InvalidRequestError, ModelError
from batchmaker.policies.base import GraphPolicy
from batchmaker.scheduler.events import RequestId

Settle = Callable[[Ticket, Any, BaseException | None], None]


@dataclass(frozen=True, slots=True)
class _Finished:
    tickets: list[Ticket]
    outcomes: list[tuple[Any, BaseException | None]]
    begin_s: float
    end_s: float
    worker: int


@final
class GraphDriver:
    """Gives an idle worker the policy's next batch of whole requests; all of a batch leave together.

    The same threads, clock and tickets as cellular batching, so that the two can be compared.
    """

    def __init__(
        self, model: Model, policy: GraphPolicy, clock: Clock, *, num_workers: int = 1, num_threads: int = 1
    ) -> None:
        self._model = model
        self._policy = policy
        self._clock = clock
        self._num_threads = num_threads
        self._waiting: dict[RequestId, tuple[Ticket, int]] = {}
        self._running: dict[RequestId, Ticket] = {}
        self._cancelled: set[RequestId] = set()
        self._idle = deque(range(num_workers))
        self._work: list[queue.SimpleQueue[list[Ticket] | None]] = [queue.SimpleQueue() for _ in range(num_workers)]
        self._threads: list[threading.Thread] = []
        self._finished: deque[_Finished] = deque()
        self._lengths: dict[RequestId, int] = {}
        self._settle: Settle = lambda *_: None
        self._notify: Callable[[], None] = lambda: None
        self.stats = DriverStats()
        self.observer: Callable[[StepSeen], None] | None = None

    def start(self, notify: Callable[[], None], settle: Settle) -> None:
        self._notify = notify
        self._settle = settle
        for number in range(len(self._work)):
            thread = threading.Thread(target=self._run, args=(number,), name=f"batchmaker-worker-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    @property
    def wants_requests(self) -> bool:
        return True

    @property
    def num_in_flight(self) -> int:
        return len(self._waiting) + len(self._running)

    def next_wakeup_s(self) -> float | None:
        return None

    def finish(self) -> None:
        """Nothing to do: a request is in flight for as long as a worker holds it."""

    def stop(self) -> None:
        for work in self._work:
            work.put(None)
        for thread in self._threads:
            thread.join()

    def _accept(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            try:
                length = int(self._model.length(ticket.request))
            except Exception as error:  # the model's own code; it is that request's error
                self._settle(ticket, None, _as_invalid(error))
                continue
            ticket.num_cells = length
            self._waiting[ticket.request_id] = (ticket, length)
            self._policy.add(ticket.request_id, length)

    def cancel(self, request_id: RequestId) -> None:
        if request_id in self._waiting:
            ticket, _ = self._waiting.pop(request_id)
            self._policy.discard(request_id)
            self._settle(ticket, None, CancelledError(f"request {request_id}: cancelled by the caller"))
        elif request_id in self._running:
            self._cancelled.add(request_id)

    def cancel_all(self) -> None:
        for request_id in [*self._waiting, *self._running]:
            self.cancel(request_id)

    def tickets(self) -> Sequence[Ticket]:
        return [*(ticket for ticket, _ in self._waiting.values()), *self._running.values()]

    def collect(self) -> None:
        """Nothing to do: workers hand their results over themselves."""

    def advance(self, tickets: Sequence[Ticket]) -> None:
        self._accept(tickets)
        while self._finished:
            done = self._finished.popleft()
            self._idle.append(done.worker)
            self._count(done)
            for ticket, (result, error) in zip(done.tickets, done.outcomes, strict=True):
                del self._running[ticket.request_id]
                self._lengths.pop(ticket.request_id)
                ticket.started_s = done.begin_s
                if ticket.request_id in self._cancelled:
                    self._cancelled.discard(ticket.request_id)
                    error = CancelledError(f"request {ticket.request_id}: cancelled by the caller")
                elif ticket.on_value is not None and error is None:
                    ticket.on_value(result)
                self._settle(ticket, result, error)
        self._dispatch()

    def _dispatch(self) -> None:
        while self._idle:
            begin = time.perf_counter()
            chosen = self._policy.choose()
            self.stats.scheduler_s += time.perf_counter() - begin
            if not chosen:
                return
            tickets = []
            now_s = self._clock.now_s()
            for request in chosen:
                ticket, length = self._waiting.pop(RequestId(request))
                if ticket.deadline_s is not None and ticket.deadline_s <= now_s:
                    late = f"request {request}: its deadline passed {1e3 * (now_s - ticket.deadline_s):.1f} ms ago"
                    self._settle(ticket, None, DeadlineError(late))
                    continue
                self._running[ticket.request_id] = ticket
                self._lengths[ticket.request_id] = length
                tickets.append(ticket)
            if tickets:
                self._work[self._idle.popleft()].put(tickets)

    def _count(self, done: _Finished) -> None:
        lengths = [self._lengths[ticket.request_id] for ticket in done.tickets]
        stats = self.stats
        stats.tasks += 1
        stats.steps += 1
        stats.cells += sum(lengths)
        stats.padded_cells += max(lengths) * len(lengths)
        stats.busy_s += done.end_s - done.begin_s
        if self.observer is not None:
            owners = tuple(ticket.request_id for ticket in done.tickets)
            self.observer(StepSeen(done.worker, "graph", done.begin_s, done.end_s, owners, len(owners)))

    def _run(self, worker: int) -> None:
        torch.set_num_threads(self._num_threads)
        with torch.no_grad():
            while (tickets := self._work[worker].get()) is not None:
                begin_s = self._clock.now_s()
                outcomes = self._outcomes(tickets)
                self._finished.append(_Finished(tickets, outcomes, begin_s, self._clock.now_s(), worker))
                self._notify()

    def _outcomes(self, tickets: list[Ticket]) -> list[tuple[Any, BaseException | None]]:
        """Compute a batch; if it raises, one request at a time, so that only the requests at fault fail."""
        try:
            results = list(self._model.batched([ticket.request for ticket in tickets]))
            if len(results) != len(tickets):
                raise ModelError(
                    f"{type(self._model).__name__}.batched gave {len(results)} results for {len(tickets)} requests"
                )
            return [(result, None) for result in results]
        except Exception as error:  # the model's own code
            if len(tickets) == 1:
                return [(None, _as_invalid(error))]
            return [outcome for ticket in tickets for outcome in self._outcomes([ticket])]


def _as_invalid(error: Exception) -> BatchmakerError:
    if isinstance(error, BatchmakerError):
        return error
    if isinstance(error, TypeError | ValueError | IndexError | KeyError):
        return InvalidRequestError(f"{type(error).__name__}: {error}")
    return CellError(f"{type(error).__name__}: {error}")
