"""Graph batching without I/O: whole requests in, batches of them out. The counterpart of `core` for `GraphPolicy`.

    for command in scheduler.handle(event, ...):
        ...carry it out...

A request's life: arrived -> (in a batch -> finished) -> Reply or Fail, exactly one of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType, final

from batchmaker.core.commands import Fail, FailureKind, Reply
from batchmaker.core.deadline_heap import Deadlines
from batchmaker.core.events import RequestCancelled, RequestId, TimePassed, WorkerId
from batchmaker.errors import InvariantError
from batchmaker.policies.base import GraphPolicy

BatchId = NewType("BatchId", int)


@dataclass(frozen=True, slots=True)
class WholeRequestArrived:
    """A request of this length waits to be computed as a whole. priority, model: see `RequestArrived`."""

    request: RequestId
    length: int
    at_s: float
    deadline_s: float | None = None
    priority: int = 0
    model: int = 0


@dataclass(frozen=True, slots=True)
class BatchFinished:
    """A batch is computed and its worker idle. failed: the requests that have no result, with the reason for each."""

    batch: BatchId
    at_s: float
    failed: tuple[tuple[RequestId, str], ...] = ()


GraphEvent = WholeRequestArrived | BatchFinished | RequestCancelled | TimePassed


@dataclass(frozen=True, slots=True)
class RunBatch:
    """Compute these requests of one model together on an idle worker."""

    batch: BatchId
    worker: WorkerId
    requests: tuple[RequestId, ...]
    model: int


GraphCommand = RunBatch | Reply | Fail


@dataclass(slots=True)
class _Request:
    event: WholeRequestArrived
    batch: BatchId | None = None  # None while it waits


@dataclass(frozen=True, slots=True)
class _Batch:
    run: RunBatch
    lengths: tuple[int, ...]
    begin_s: float


@final
class GraphScheduler:
    """Gives an idle worker the policy's next batch of whole requests; all requests of a batch leave together.

    policy: decides which requests run together, and when. num_workers: one batch at a time on each. give_up_late: a
    request that still waits at its deadline fails; one in a batch is computed, however late. A cancelled request fails
    at once; if it is in a batch, its worker still computes it.
    """

    def __init__(self, policy: GraphPolicy, *, num_workers: int = 1, give_up_late: bool = True) -> None:
        self._policy = policy
        self._give_up_late = give_up_late
        self._num_workers = num_workers
        self._idle = [WorkerId(number) for number in range(num_workers)]  # a heap
        self._requests: dict[RequestId, _Request] = {}
        self._batches: dict[BatchId, _Batch] = {}
        self._waiting: set[RequestId] = set()
        self._deadlines: Deadlines[RequestId] = Deadlines()
        self._next_batch = 0
        self._now_s = 0.0

    # --- called by a driver ----------------------------------------------------------------------------------

    def handle(self, *events: GraphEvent) -> list[GraphCommand]:
        """Take events in order, then give idle workers work. Returns commands in the order to carry them out."""
        commands: list[GraphCommand] = []
        for event in events:
            self._now_s = event.at_s
            self._expire(commands)
            match event:
                case WholeRequestArrived():
                    self._arrived(event)
                case BatchFinished():
                    self._finished(event, commands)
                case RequestCancelled():
                    if event.request in self._requests:
                        self._fail(event.request, FailureKind.CANCELLED, "cancelled by the caller", commands)
                case TimePassed():
                    pass
        self._expire(commands)  # requests that arrived too late
        if self._idle:
            self._dispatch(commands)
        return commands

    @property
    def next_deadline_s(self) -> float | None:
        """When the first waiting request is given up."""
        return self._deadlines.next_of(self._waiting)

    @property
    def next_wakeup_s(self) -> float | None:
        """The latest time for the driver to send TimePassed."""
        times = [self.next_deadline_s, self._policy.next_wakeup_s(self._now_s) if self._idle else None]
        return min((time_s for time_s in times if time_s is not None), default=None)

    @property
    def num_requests(self) -> int:
        """Unanswered requests, waiting or in a batch."""
        return len(self._requests)

    @property
    def num_batches(self) -> int:
        """Batches on workers."""
        return len(self._batches)

    def check_invariants(self) -> None:
        """Raise InvariantError unless the state balance. Slow: for tests and after incidents."""
        waiting = [request for request, entry in self._requests.items() if entry.batch is None]
        if self._waiting != set(waiting):
            raise InvariantError(f"requests {sorted(self._waiting)} are said to wait, and {sorted(waiting)} do")
        if len(waiting) != len(self._policy):
            raise InvariantError(f"{len(waiting)} requests wait, the policy holds {len(self._policy)}")
        for request, entry in self._requests.items():
            if entry.batch is not None and request not in self._batches[entry.batch].run.requests:
                raise InvariantError(f"request {request} is not in its batch {entry.batch}")
        workers = sorted([*self._idle, *(batch.run.worker for batch in self._batches.values())])
        if workers != list(range(self._num_workers)):
            raise InvariantError(f"workers idle or busy: {workers}, there are {self._num_workers}")
        if self._give_up_late:
            missed = [request for request in waiting if self._requests[request].event.deadline_s is not None]
            if not set(self._deadlines).issuperset(missed):
                raise InvariantError("a waiting request's deadline is not looked at")

    # --- events ----------------------------------------------------------------------------------------------

    def _arrived(self, event: WholeRequestArrived) -> None:
        if event.request in self._requests:
            raise InvariantError(f"request {event.request} arrived twice")
        self._requests[event.request] = _Request(event)
        self._waiting.add(event.request)
        self._policy.add(event.request, event.length, event.at_s, event.deadline_s, event.model, event.priority)
        if event.deadline_s is not None and self._give_up_late:
            self._deadlines.add(event.deadline_s, event.request, self._waiting, len(self._requests))

    def _finished(self, event: BatchFinished, commands: list[GraphCommand]) -> None:
        batch = self._batches.pop(event.batch, None)
        if batch is None:
            raise InvariantError(f"batch {event.batch} is not on a worker")
        heapq.heappush(self._idle, batch.run.worker)
        self._policy.batch_finished(batch.run.model, batch.lengths, event.at_s - batch.begin_s)
        reasons = dict(event.failed)
        for request in batch.run.requests:
            if request not in self._requests or self._requests[request].batch != event.batch:
                continue  # cancelled meanwhile
            if request in reasons:
                self._fail(request, FailureKind.CELL, reasons[request], commands)
            else:
                del self._requests[request]
                commands.append(Reply(request))

    def _expire(self, commands: list[GraphCommand]) -> None:
        for request in self._deadlines.passed(self._now_s):
            if request in self._waiting:
                self._fail(request, FailureKind.DEADLINE, "not begun by its deadline", commands)

    def _fail(self, request: RequestId, kind: FailureKind, reason: str, commands: list[GraphCommand]) -> None:
        if self._requests.pop(request).batch is None:
            self._waiting.discard(request)
            self._policy.discard(request)
        commands.append(Fail(request, kind, reason))

    # --- scheduling ------------------------------------------------------------------------------------------

    def _dispatch(self, commands: list[GraphCommand]) -> None:
        for number in self._policy.refuse(self._now_s):
            request = RequestId(number)
            deadline_s = self._requests[request].event.deadline_s
            late = "its deadline" if deadline_s is None else f"its deadline in {deadline_s - self._now_s:.3f} s"
            self._fail(request, FailureKind.REFUSED, f"refused: {late} cannot be met", commands)
        while self._idle:
            chosen = self._policy.choose(self._now_s)
            if not chosen:
                return
            model = self._check_batch(chosen)
            requests = tuple(RequestId(number) for number in chosen)
            run = RunBatch(BatchId(self._next_batch), heapq.heappop(self._idle), requests, model)
            self._next_batch += 1
            lengths = tuple(self._requests[request].event.length for request in requests)
            self._batches[run.batch] = _Batch(run, lengths, self._now_s)
            self._waiting.difference_update(requests)
            for request in requests:
                self._requests[request].batch = run.batch
            commands.append(run)

    def _check_batch(self, chosen: Sequence[int]) -> int:
        """Return the model of a batch. It must be of one model, of waiting requests, and not too large."""
        name = self._policy.name
        if not self._waiting.issuperset(chosen) or len(set(chosen)) < len(chosen):
            raise InvariantError(f"policy {name!r} chose {list(chosen)}; not all of these wait")
        models = {self._requests[RequestId(number)].event.model for number in chosen}
        if len(models) > 1 or len(chosen) > self._policy.max_batch:
            raise InvariantError(
                f"policy {name!r} chose {len(chosen)} requests of models {sorted(models)}; wanted at most "
                f"{self._policy.max_batch} of one"
            )
        return models.pop()
