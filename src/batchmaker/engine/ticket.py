"""One submitted request on its way through the engine, and how its answer reaches whoever waits."""

from __future__ import annotations

import asyncio
import math
import queue
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, final

from batchmaker.engine.answer import Answer, call_soon, wake_all
from batchmaker.errors import RAISED_BY_USERS, BatchmakerError, CancelledError, CellError, said_by
from batchmaker.model.model import Model
from batchmaker.model.sequence_state import KeptState
from batchmaker.scheduler.events import RequestId, SequenceId


class SequenceKeeper(Protocol):
    """What has all open sequences; see `batchmaker.engine.open_sequences.Sequences`."""

    def settled(self, ticket: Ticket, chunk: Chunk, error: BaseException | None) -> None: ...

    def close(self, book: SequenceBook) -> None: ...

    def uncount(self, book: SequenceBook) -> None: ...


@dataclass(slots=True)
class Chunk:
    """What makes a ticket a chunk. era: how often its caller had said `resume`. number: its place in the sequence."""

    sequence: SequenceBook
    era: int
    number: int = -1


@final
class SequenceBook:
    """One open sequence. It belongs to the engine's thread; others may only read `ended`.

    state: after the last answered chunk. outstanding: chunks accepted and not settled. active: the chunk that has
    begun. waiting: those behind it, in order. failed: by era, the first chunk without a result. ended: why no chunk
    is taken any more.
    """

    __slots__ = (
        "active", "closing", "counted", "ended", "failed", "idle_since_s", "idle_timeout_s", "next_number",
        "outstanding", "sequence_id", "sequences", "state", "waiting",
    )  # fmt: skip

    def __init__(self, sequence_id: SequenceId, idle_timeout_s: float, sequences: SequenceKeeper) -> None:
        self.sequence_id = sequence_id
        self.idle_timeout_s = idle_timeout_s
        self.sequences = sequences
        self.state = KeptState()
        self.outstanding: dict[RequestId, Ticket] = {}
        self.active: Ticket | None = None
        self.waiting: OrderedDict[RequestId, Ticket] = OrderedDict()
        self.failed: dict[int, int] = {}
        self.next_number = 0
        self.idle_since_s = 0.0
        self.closing = False
        self.counted = True
        self.ended: str | None = None

    def accept(self, ticket: Ticket, chunk: Chunk) -> None:
        """A chunk has come; it may not have reached the driver."""
        chunk.number = self.next_number
        self.next_number += 1
        self.outstanding[ticket.request_id] = ticket

    def counts_on_failed(self, chunk: Chunk) -> bool:
        """Whether a chunk was sent after one that has no result, by a caller who did not say `resume` in between."""
        return chunk.number > self.failed.get(chunk.era, chunk.number)


@final
class Answers:
    """The answers to many requests of one caller, as they come: those of one turn of the engine together."""

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: queue.SimpleQueue[list[Settled]] = queue.SimpleQueue()

    def put(self, block: list[Settled]) -> None:
        """Hand over the answers of one turn. Called by the engine thread."""
        self._blocks.put(block)

    def take(self) -> list[Settled]:
        """Return the next ones, after waiting for them."""
        return self._blocks.get()


@final
class Ticket:
    """A request, its times (engine seconds) and its answer. What only some have is set where it is needed.

    priority: larger is served first. is_urgent: whether it should not wait for others to come before it is looked at.
    trial: the engine's own, to prove a model; it is not counted. chunk: what makes it one of a sequence.
    answer: what its caller holds; or answers: takes it, as that of request number `place`. has_place: it takes one of
    the places that `max_queue` gives. on_value: called by the engine thread with each streamed value; it must return at
    once, and if it raises, that is the request's error.
    error: what somebody else than the engine's thread has answered with, which then answers no more.
    """

    trial = False
    chunk: Chunk | None = None
    started_s: float | None = None
    finished_s: float | None = None
    num_cells = 0
    answer: Answer | None = None
    answers: Answers | None = None
    place = 0
    has_place = False
    error: BatchmakerError | None = None
    _on_value: Callable[[Any], None] | None = None
    _fault: BatchmakerError | None = None

    def __init__(
        self,
        request_id: RequestId,
        request: Any,
        arrived_s: float,
        deadline_s: float | None,
        *,
        model: Model,
        model_id: int = 0,
        priority: int = 0,
    ) -> None:
        self.request_id = request_id
        self.request = request
        self.arrived_s = arrived_s
        self.deadline_s = deadline_s
        self.model = model
        self.model_id = model_id
        self.priority = priority
        self.is_urgent = deadline_s is not None or priority != 0

    @property
    def on_value(self) -> Callable[[Any], None] | None:
        """What is called with each streamed value."""
        return self._on_value

    @on_value.setter
    def on_value(self, on_value: Callable[[Any], None] | None) -> None:
        self._on_value = None if on_value is None else partial(self._hand_over, on_value)

    def _hand_over(self, on_value: Callable[[Any], None], value: Any) -> None:
        if self._fault is not None:
            return
        try:
            on_value(value)
        except RAISED_BY_USERS as error:
            self._fault = CellError(f"request {self.request_id}: what it streams to raised {said_by(error)}")
            self._fault.__cause__ = error

    @property
    def over(self) -> BatchmakerError | None:
        """Why nobody waits for the answer any more, None where somebody does."""
        # Read by the engine's thread while callers cancel. One who does just after this look is not seen here: then the
        # request begins, and that thread finds the cancellation in its inbox, which `cancel` has filled last.
        if self.error is None and self.answer is not None and self.answer.is_cancelled:
            return CancelledError(f"request {self.request_id}: cancelled by the caller")
        return self.error

    def claim(self, error: BaseException | None) -> BaseException | None:
        """Let nobody cancel the request any more; return its error, which is `error` unless something came before."""
        if self.answer is not None and not self.answer.claim():
            return CancelledError(f"request {self.request_id}: cancelled by the caller")
        return error or self._fault

    @property
    def due_after_s(self) -> float:
        """Seconds from arrival to deadline, infinite without one."""
        return math.inf if self.deadline_s is None else self.deadline_s - self.arrived_s

    @property
    def is_late(self) -> bool:
        """Whether it was settled after its deadline."""
        return self.deadline_s is not None and self.finished_s is not None and self.finished_s > self.deadline_s

    @property
    def latency_s(self) -> float | None:
        """Seconds from arrival to answer, None while in flight."""
        return None if self.finished_s is None else self.finished_s - self.arrived_s

    @property
    def queue_s(self) -> float | None:
        """Seconds from arrival until the first cell began to run, None if none has."""
        return None if self.started_s is None else self.started_s - self.arrived_s


Settled = tuple[Ticket, Any, BaseException | None]
"""A request that is over, its result, and its error if it has one."""


@final
class Outbox:
    """Answers collected during one turn of the engine and delivered together: one wake-up per event loop and caller."""

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        self._together: dict[Answers, list[Settled]] = {}

    def deliver(self, ticket: Ticket, result: Any, error: BaseException | None) -> None:
        """Answer a ticket that has been claimed: threads hear of it now, event loops at the next flush."""
        if (answers := ticket.answers) is not None:
            block = self._together.get(answers)
            if block is None:
                block = self._together[answers] = []
            block.append((ticket, result, error))
            return
        answer = ticket.answer
        if answer is None or answer.is_cancelled:  # final, since it was claimed: it was cancelled before that or never
            return
        for future in answer.settle(result, error):
            self._by_loop.setdefault(future.get_loop(), []).append(future)

    def flush(self) -> None:
        """Wake every loop that has answers waiting."""
        for loop, futures in self._by_loop.items():
            call_soon(loop, partial(wake_all, futures))
        self._by_loop.clear()
        for caller, block in self._together.items():
            caller.put(block)
        self._together.clear()
