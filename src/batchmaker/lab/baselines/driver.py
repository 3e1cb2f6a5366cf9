"""The driver of graph batching: whole requests, padded and computed together by the model's own `batched`."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from batchmaker.clock import Clock
from batchmaker.core.commands import Fail, Reply
from batchmaker.core.events import RequestCancelled, RequestId, TimePassed
from batchmaker.engine.failures import error_of, stopped
from batchmaker.engine.request import Settled, Ticket
from batchmaker.engine.stats import DriverStats, StepsSeen
from batchmaker.errors import RAISED_BY_USERS, BatchmakerError, CellError, InvalidRequestError, ModelError, said_by
from batchmaker.lab.baselines.scheduler import BatchFinished, GraphEvent, GraphScheduler, RunBatch, WholeRequestArrived
from batchmaker.model.structure import replaced
from batchmaker.policies.base import GraphPolicy


@dataclass(frozen=True, slots=True)
class _ComputedBatch:
    """The work of a worker. tickets: those of `run.requests`, in order."""

    run: RunBatch
    tickets: list[Ticket]


@dataclass(frozen=True, slots=True)
class _Done:
    batch: _ComputedBatch
    outcomes: list[tuple[Any, BatchmakerError | None]]
    begin_s: float
    end_s: float


@final
class GraphDriver:
    """Hands whole requests to a GraphScheduler and computes its batches on threads.

    It uses the same clock and tickets as cellular batching, so the two can be compared.
    """

    def __init__(
        self,
        policy: GraphPolicy,
        clock: Clock,
        *,
        num_workers: int = 1,
        num_threads: int = 1,
        give_up_late: bool = True,
    ) -> None:
        self._scheduler = GraphScheduler(policy, num_workers=num_workers, give_up_late=give_up_late)
        self._clock = clock
        self._num_threads = num_threads
        self._tickets: dict[RequestId, Ticket] = {}
        self._outcome: dict[RequestId, tuple[Any, BatchmakerError | None]] = {}  # computed and not answered
        self._work: list[queue.SimpleQueue[_ComputedBatch | None]] = [queue.SimpleQueue() for _ in range(num_workers)]
        self._threads: list[threading.Thread] = []
        self._finished: deque[_Done] = deque()
        self._settle: Callable[[Sequence[Settled]], None] = lambda _: None
        self._notify: Callable[[], None] = lambda: None
        self.own_tasks = ()
        self.stats = DriverStats()
        self.observer: Callable[[StepsSeen], None] | None = None

    def start(self, notify: Callable[[], None], settle: Callable[[Sequence[Settled]], None]) -> None:
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
    def begin_together(self) -> int | None:
        return None

    @property
    def has_live_streams(self) -> bool:
        return False

    @property
    def num_in_flight(self) -> int:
        return len(self._tickets)

    @property
    def num_sequences(self) -> int:
        return 0

    def next_wakeup_s(self) -> float | None:
        return self._scheduler.next_wakeup_s

    def finish(self) -> None:
        self.stop()
        self.advance([])

    def stop(self) -> None:
        for work in self._work:
            work.put(None)
        for thread in self._threads:
            thread.join()

    # --- requests ------------------------------------------------------------------------------------------------

    def _accept(self, tickets: Sequence[Ticket], events: list[GraphEvent]) -> None:
        for ticket in tickets:
            if (ended_by := ticket.ended_by) is not None:  # perhaps while the length of others was computed
                self._settle([(ticket, None, ended_by)])
                continue
            try:
                ticket.num_cells = int(ticket.model.length(ticket.request))
            except RAISED_BY_USERS as error:  # the model's own code; this request fails
                self._settle([(ticket, None, _as_invalid(error))])
                continue
            self._tickets[ticket.request_id] = ticket
            now_s = self._clock.now_s()
            events.append(
                WholeRequestArrived(
                    ticket.request_id, ticket.num_cells, now_s, ticket.deadline_s, ticket.priority, ticket.model_id
                )
            )

    def cancel(self, request_id: RequestId) -> None:
        if request_id in self._tickets:
            self._handle([RequestCancelled(request_id, self._clock.now_s())])

    def stop_all(self) -> None:
        self._outcome |= {request_id: (None, stopped(request_id)) for request_id in self._tickets}
        self._handle([RequestCancelled(request_id, self._clock.now_s()) for request_id in self._tickets])

    def withdraw(self, most: int) -> list[Ticket]:
        """See Driver.withdraw. It gives none up: all workers of an engine take from it."""
        return []

    def tickets(self) -> Sequence[Ticket]:
        return list(self._tickets.values())

    # --- work ------------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Nothing to do: workers hand their results over themselves."""

    def advance(self, tickets: Sequence[Ticket]) -> None:
        events: list[GraphEvent] = []
        while self._finished:
            events.append(self._take_result(self._finished.popleft()))
        self._accept(tickets, events)
        self._handle(events or [TimePassed(self._clock.now_s())])

    def _take_result(self, done: _Done) -> BatchFinished:
        """Store the results of a batch and turn them into an event."""
        run, lengths = done.batch.run, [ticket.num_cells for ticket in done.batch.tickets]
        stats = self.stats
        stats.steps += 1
        stats.cells += sum(lengths)
        stats.padded_cells += max(lengths) * len(lengths)
        stats.busy_s += done.end_s - done.begin_s
        if self.observer is not None:
            rows = [len(lengths)]
            self.observer(StepsSeen(run.worker, "graph", done.begin_s, done.end_s, run.requests, rows, rows))
        failed = []
        for ticket, outcome in zip(done.batch.tickets, done.outcomes, strict=True):
            if ticket.request_id not in self._tickets:
                continue  # cancelled meanwhile
            ticket.started_s = done.begin_s
            self._outcome[ticket.request_id] = outcome
            if outcome[1] is not None:
                failed.append((ticket.request_id, said_by(outcome[1])))
        return BatchFinished(run.batch, self._clock.now_s(), tuple(failed))

    def _handle(self, events: Sequence[GraphEvent]) -> None:
        begin = time.perf_counter()
        commands = self._scheduler.handle(*events)
        self.stats.scheduler_s += time.perf_counter() - begin
        settled: list[Settled] = []
        for command in commands:
            match command:
                case RunBatch():
                    self._submit(command)
                case Reply():
                    ticket, (result, _) = self._leave(command.request)
                    ticket.stream(result)
                    settled.append((ticket, result, None))
                case Fail():
                    ticket, (_, error) = self._leave(command.request)
                    settled.append((ticket, None, error or error_of(command, ticket)))
        self._settle(settled)

    def _submit(self, command: RunBatch) -> None:
        self.stats.tasks += 1
        tickets = [self._tickets[request] for request in command.requests]
        now_s = self._clock.now_s()
        for ticket in tickets:
            ticket.started_s = now_s
        self._work[command.worker].put(_ComputedBatch(command, tickets))

    def _leave(self, request_id: RequestId) -> tuple[Ticket, tuple[Any, BatchmakerError | None]]:
        return self._tickets.pop(request_id), self._outcome.pop(request_id, (None, None))

    # --- in the workers' threads -------------------------------------------------------------------------------------

    def _run(self, worker: int) -> None:
        torch.set_num_threads(self._num_threads)
        with torch.no_grad():
            while (batch := self._work[worker].get()) is not None:
                begin_s = self._clock.now_s()
                outcomes = self._outcomes(batch.tickets)
                self._finished.append(_Done(batch, outcomes, begin_s, self._clock.now_s()))
                self._notify()

    def _outcomes(self, tickets: list[Ticket]) -> list[tuple[Any, BatchmakerError | None]]:
        """Compute a batch. If it raises, compute one request at a time, so that only the wrong requests fail."""
        model = tickets[0].model  # all requests of a batch have one model
        try:
            results = list(model.batched([ticket.request for ticket in tickets]))
            if len(results) != len(tickets):
                raise ModelError(
                    f"{type(model).__name__}.batched gave {len(results)} results for {len(tickets)} requests"
                )
            return [(replaced(result, (Tensor,), _as_answered), None) for result in results]
        except RAISED_BY_USERS as error:  # the model's own code
            if len(tickets) == 1:
                return [(None, _as_invalid(error))]
            return [outcome for ticket in tickets for outcome in self._outcomes([ticket])]


def _as_answered(value: Tensor) -> Any:
    """Return a value as the engine answers with it: a number where it is one, else in memory of its own."""
    if value.dim() == 0:
        return value.item()
    return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value


def _as_invalid(error: BaseException) -> BatchmakerError:
    if isinstance(error, BatchmakerError):
        return error
    invalid = isinstance(error, TypeError | ValueError | IndexError | KeyError)
    return InvalidRequestError(said_by(error)) if invalid else CellError(said_by(error))
