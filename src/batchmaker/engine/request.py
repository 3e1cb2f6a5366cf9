"""One submitted request on its way through the engine: its ticket, what the driver keeps of it, and how its answer
reaches whoever waits."""

from __future__ import annotations

import asyncio
import math
import queue
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.engine.answer import Answer, call_soon, wake_all
from batchmaker.errors import RAISED_BY_USERS, BatchmakerError, CancelledError, CellError, said_by
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.values import ValueSequence
from batchmaker.model.model import Model
from batchmaker.model.scope import OpenLoop
from batchmaker.model.sequence_state import KeptState
from batchmaker.model.structure import Handle
from batchmaker.model.template_values import Drawn
from batchmaker.model.templates import Template
from batchmaker.model.unfolding import Unfolding, end_of_loop
from batchmaker.scheduler.commands import Admit
from batchmaker.scheduler.events import RequestId, SequenceId


class SequenceKeeper(Protocol):
    """What has all open sequences; see `batchmaker.engine.open_sequences.Sequences`."""

    def settled(self, ticket: Ticket, chunk: Chunk, error: BaseException | None) -> None: ...

    def close(self, entry: SequenceEntry) -> None: ...

    def uncount(self, entry: SequenceEntry) -> None: ...


@dataclass(slots=True)
class Chunk:
    """What makes a ticket a chunk. era: how often its caller had said `resume`. number: its place in the sequence."""

    sequence: SequenceEntry
    era: int
    number: int = -1


@final
class SequenceEntry:
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


class InFlight:
    """A request between its arrival and its answer. What only some have is set where it is needed.

    told: whether it must hear of every value when it comes, since an unfold function waits for it, it is streamed, or
    the result has some that an earlier request of its sequence has computed. drawn: its values, where a template stands
    for its unfolding. graphs: those handed to the scheduler and not admitted yet; admitted: where the others are;
    shift: what leads from the request's own numbers to those of the nodes, in the last of them. loops: those that a
    value may end, after their shift; ended: last node of each that has ended -> the node at which it did. values: those
    it was told of, by the request's own number and output. gathered: the others that its result takes; see
    Results.gather.
    """

    admitted: tuple[Admit, ...] = ()
    loops: tuple[tuple[int, OpenLoop], ...] = ()
    waiting_for: set[tuple[int, int]] | None = None
    shift = 0
    streamed = 0
    error: BatchmakerError | None = None

    def __init__(self, ticket: Ticket, unfolding: Unfolding | Template, drawn: Drawn | None = None) -> None:
        self.ticket = ticket
        self.unfolding = unfolding
        self.drawn = drawn
        streams = unfolding.streamed_sequence is not None and ticket.on_value is not None
        self.told = unfolding.open or streams or (ticket.chunk is not None and unfolding.returns_kept)
        self.graphs = [unfolding.graph]
        self.values: dict[tuple[int, int], Any] = {}
        self.ended: dict[int, int] = {}
        self.gathered: dict[Handle, Any] = {}
        if unfolding.open:
            self.waiting_for = set(unfolding.awaited)

    def admit(self, command: Admit) -> CellGraph:
        """Take the numbers of the nodes of its next graph, and return that."""
        graph = self.graphs.pop(0)
        self.admitted += (command,)
        self.shift = command.base - command.first_local
        if self.unfolding.loops:
            found = (self.unfolding.loops[run.first] for run in graph.runs if run.open_ended)
            self.loops += tuple([(self.shift, loop) for loop in found])
        return graph

    def local(self, node: int) -> int:
        """Return the request's own number of a node; fast for those added last, which are those that run."""
        for command in reversed(self.admitted):
            if command.base <= node < command.base + command.num_nodes:
                return node - command.base + command.first_local
        kept = self.admitted[0]
        if kept.kept_base <= node < kept.kept_base + kept.first_local:
            return node - kept.kept_base
        raise KeyError(node)

    def nodes(self, sequence: ValueSequence) -> NDArray[np.int64]:
        """Return the numbers of the nodes of a sequence, as far as it has come to be. It has not been extended."""
        local = sequence.nodes
        if sequence.open_ended:
            local = local[: self.ended[int(local[-1])] - int(local[0]) + 1]
        return local + self.shift

    def loop_at(self, node: int) -> tuple[int, OpenLoop] | None:
        """Return the request's own number of a node, and the loop that it is a step of, if a value may end it."""
        for shift, loop in reversed(self.loops):
            if loop.first <= node - shift <= loop.last:
                return node - shift, loop
        return None

    def store(self, local: int, output: int, value: Any) -> None:
        """Keep a value that has come, and hand it to whoever reads the stream as far as that has come in order."""
        self.values[local, output] = value
        if self.waiting_for:
            self.waiting_for.discard((local, output))
        if self.ticket.on_value is None:
            return
        sequence = self.unfolding.streamed_sequence
        if sequence is not None and sequence.output == output:
            nodes = sequence.nodes
            while self.streamed < len(nodes) and (int(nodes[self.streamed]), output) in self.values:
                self.ticket.on_value(self.values[int(nodes[self.streamed]), output])
                self.streamed += 1

    def end_loop(self, last: int, local: int, fetched: Iterable[int]) -> None:
        """Note where the loop to node `last` has ended, and keep its final outputs where they are looked up.

        fetched: outputs that came to the host.
        """
        self.ended[last] = local
        for output in fetched:
            if (local, output) in self.values:
                self.store(end_of_loop(last), output, self.values[local, output])

    def value(self, node: int, output: int) -> Any:
        """Return what it has been told of a node, by the request's own number."""
        return self.values[node, output]
