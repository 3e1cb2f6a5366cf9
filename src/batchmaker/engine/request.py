"""One request on its way through the engine: its ticket, the driver's record of it, and the delivery of its answer."""

from __future__ import annotations

import asyncio
import math
import queue
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Protocol, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Ints
from batchmaker.core.commands import Admit
from batchmaker.core.events import RequestId, SequenceId
from batchmaker.engine.answer import Answer, call_soon, wake_all
from batchmaker.errors import RAISED_BY_USERS, BatchmakerError, CancelledError, CellError, said_by
from batchmaker.graph.values import ValueSequence
from batchmaker.model.model import Model
from batchmaker.model.moved_state import MovedState
from batchmaker.model.scope import OpenLoop
from batchmaker.model.sequence_state import NOTHING_KEPT, KeptState
from batchmaker.model.structure import Handle, owned
from batchmaker.model.template_values import GatheredValues, TemplateValues
from batchmaker.model.templates import Template
from batchmaker.model.unfolding import Unfolding, end_of_loop


class SequenceKeeper(Protocol):
    """The owner of the open sequences of a worker; see `batchmaker.engine.open_sequences.Sequences`."""

    num_open: int

    def decide(self, chunks: Sequence[SettledChunk]) -> None:
        """Let the sequences of chunks whose callers get a result have the new state. Called before the callers do."""
        ...

    def settled(self, chunks: Sequence[SettledChunk]) -> None:
        """Note that chunks are answered."""
        ...

    def close(self, entry: SequenceEntry, end: SequenceEnd) -> None:
        """End a sequence once its chunks are answered."""
        ...

    def uncount(self, entry: SequenceEntry) -> None:
        """Stop counting a sequence towards the limit. Any thread may call this."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Reset:
    """Tells a sequence to keep nothing any more."""


@final
@dataclass(frozen=True, slots=True)
class TakeState:
    """Asks a sequence for its state as bytes. identity: of its model."""

    identity: str


@final
@dataclass(frozen=True, slots=True)
class GoOn:
    """Tells a sequence that keeps nothing to go on from a state that came from elsewhere."""

    state: MovedState


@final
@dataclass(frozen=True, slots=True)
class Settle:
    """Asks a sequence only for an answer after all others."""


class SequenceEnd(StrEnum):
    """Why a sequence has ended.

    Its caller has sent the last chunk, has closed it, or has given it up (`close(drain=False)`); a chunk had no result,
    where that is the end; no chunk came for too long; or the engine, or what serves its caller, was stopped, or the
    engine has failed.
    """

    FINISHED = "finished"
    CLOSED = "closed"
    GIVEN_UP = "given up"
    FAILED = "failed"
    IDLE = "idle"
    STOPPED = "stopped"


@final
@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """The end of a sequence. said: why, in words. num_chunks: accepted ones. lasted_s: seconds since it was opened."""

    end: SequenceEnd
    said: str
    num_chunks: int
    lasted_s: float


Control = Reset | TakeState | GoOn | Settle
"""What a sequence is told or asked besides chunks, in their order."""


@dataclass(slots=True)
class Chunk:
    """Marks a ticket as a chunk of a sequence, or as a control of one.

    era: how many times its caller had called `resume` before. number: its position in the sequence, -1 until it has
    come to the engine's thread. last: it is the last chunk, and the model's `unfold_chunk` is told so. control: what
    the sequence is told in place of a chunk.
    """

    sequence: SequenceEntry
    era: int
    number: int = -1
    last: bool = False
    control: Control | None = None

    @property
    def before(self) -> KeptState:
        """The state that it begins with, as long as it is the next one."""
        state = self.sequence.state
        return replace(state, last=True) if self.last else state


@final
class SequenceEntry:
    """One open sequence. It belongs to the engine's thread. Other threads may only read `ended` and call `uncount`.

    state: what is kept after the last answered chunk. computed: what the active chunk keeps once it is computed, if its
    caller gets the result. outstanding: the chunks that are accepted and not settled. active: the chunk that has begun,
    or None. waiting: the chunks behind it, in order. failed: era -> number of the first chunk without a result.
    counted: it counts towards the limit of open sequences. closing: why it ends once its chunks are answered, None
    while it does not. ended: why it takes no more chunks, None while it is open.
    """

    __slots__ = (
        "active", "closing", "computed", "counted", "ended", "failed", "idle_since_s", "idle_timeout_s", "next_number",
        "on_ended", "opened_s", "outstanding", "sequence_id", "sequences", "state", "waiting",
    )  # fmt: skip

    def __init__(
        self,
        sequence_id: SequenceId,
        idle_timeout_s: float,
        sequences: SequenceKeeper,
        on_ended: Callable[[SequenceEnded], None] | None = None,
    ) -> None:
        """on_ended: called in the engine's thread when it has ended."""
        self.sequence_id = sequence_id
        self.on_ended = on_ended
        self.opened_s = 0.0
        self.idle_timeout_s = idle_timeout_s
        self.sequences = sequences
        self.state = NOTHING_KEPT
        self.computed: KeptState | None = None
        self.outstanding: dict[RequestId, Ticket] = {}
        self.active: Ticket | None = None
        self.waiting: OrderedDict[RequestId, Ticket] = OrderedDict()
        self.failed: dict[int, int] = {}
        self.next_number = 0
        self.idle_since_s = 0.0
        self.closing: SequenceEnd | None = None
        self.counted = True
        self.ended: str | None = None

    @staticmethod
    def accept(tickets: Iterable[Ticket]) -> None:
        """Number the chunks among tickets that have come to the engine's thread, each once."""
        for ticket in tickets:
            chunk = ticket.chunk
            if chunk is not None and chunk.number < 0:
                entry = chunk.sequence
                chunk.number = entry.next_number
                entry.next_number += not isinstance(chunk.control, TakeState | Settle)  # nothing counts on these
                entry.outstanding[ticket.request_id] = ticket

    def counts_on_failed(self, chunk: Chunk) -> bool:
        """Whether an earlier chunk of the same era has no result: the caller has not called `resume` after it."""
        return chunk.number > self.failed.get(chunk.era, chunk.number)


class AnswerTaker(Protocol):
    """Takes the answers to many requests of one caller, in blocks: one block for each turn of the engine."""

    def put(self, block: list[Settled]) -> None:
        """Take the answers of one turn. Called by the thread that answers; it must return at once."""
        ...


@final
class Answers:
    """An AnswerTaker for a caller that blocks (`map`)."""

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: queue.SimpleQueue[list[Settled]] = queue.SimpleQueue()

    def put(self, block: list[Settled]) -> None:
        """Hand over the answers of one turn. Called by the thread that answers."""
        self._blocks.put(block)

    def take(self) -> list[Settled]:
        """Return the next block; blocks until there is one."""
        return self._blocks.get()


@final
class Ticket:
    """A request, its times (engine seconds) and its answer.

    - arrived_s, started_s, finished_s: when it was submitted, when its first cell began, when it was settled.
    - priority: larger is served first. precedence: twice that, and one more for a chunk; see RequestArrived.
    - is_urgent: it has a deadline, a priority above 0 or a sequence, so it should not wait for more requests to arrive.
    - counted: whether it is counted as a request: no example of the engine, and no control of a sequence.
    - chunk: set if the request is a chunk of a sequence.
    - answer: the object that the caller holds. Callers of many requests have `answers` instead. place: which of theirs.
    - num_places: how many of the places of `max_queue` it takes.
    - worker: number of the one that must run it, because its sequence is there; None if any may. work: about how much
      there is to compute, beside other requests of the engine; see Workers.
    - on_value: takes each streamed value; None if nothing is streamed. See `stream`.
    - fault: what `on_value` has raised, if anything: the request fails with it.
    - bulk: the requests, if it is a bulk ticket. num_requests: how many it stands for. member_of: for a request of a
      bulk that has a ticket of its own, the bulk and the request's place there.
    - error: set if another thread has answered. Then the engine's thread does not answer.

    Attributes that few requests need are class defaults, to keep tickets cheap.
    """

    counted = True
    chunk: Chunk | None = None
    started_s: float | None = None
    finished_s: float | None = None
    num_cells = 0
    answer: Answer | None = None
    answers: AnswerTaker | None = None
    place: Any = 0
    num_places = 0
    bulk: Bulk | None = None
    num_requests = 1
    member_of: tuple[Bulk, int] | None = None
    worker: int | None = None
    work = 1
    error: BatchmakerError | None = None
    on_value: Callable[[Any], None] | None = None
    fault: BatchmakerError | None = None

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
        self.precedence = 2 * priority
        self.is_urgent = deadline_s is not None or priority > 0

    def stream(self, value: Any) -> None:
        """Give `on_value` a value, in the engine's thread. It must return at once."""
        if self.on_value is None or self.fault is not None:
            return
        try:
            self.on_value(owned(value))  # the unfold function and the result may have the value, too
        except RAISED_BY_USERS as error:
            self.fault = CellError(f"request {self.request_id}: what it streams to raised {said_by(error)}")
            self.fault.__cause__ = error

    @property
    def ended_by(self) -> BatchmakerError | None:
        """The error of a request that is cancelled or answered by another thread; None if it must be answered."""
        # Race: the engine's thread reads this while callers cancel. A cancellation just after this look is not seen
        # here. Then the request begins, and the engine's thread finds the cancellation in its inbox later, because
        # `Answer.cancel` puts it there after everything else.
        if self.error is None and self.answer is not None and self.answer.is_cancelled:
            return CancelledError(f"request {self.request_id}: cancelled by the caller")
        return self.error

    @property
    def due_after_s(self) -> float:
        """Seconds from arrival to deadline; infinite if there is no deadline."""
        return math.inf if self.deadline_s is None else self.deadline_s - self.arrived_s

    @property
    def said_late(self) -> str:
        """What its caller hears if it is given up at its deadline."""
        return f"request {self.request_id}: not done by its deadline, {self.due_after_s:.3f} s after it arrived"

    @property
    def is_late(self) -> bool:
        """Whether it was settled after its deadline."""
        return self.deadline_s is not None and self.finished_s is not None and self.finished_s > self.deadline_s

    @property
    def latency_s(self) -> float | None:
        """Seconds from arrival to answer; None while it is not answered."""
        return None if self.finished_s is None else self.finished_s - self.arrived_s

    @property
    def queue_s(self) -> float | None:
        """Seconds from arrival until its first cell began to run; None if none has begun."""
        return None if self.started_s is None else self.started_s - self.arrived_s


@final
class Bulk:
    """Requests of one caller that come together, have no deadlines and get one answer, when all are answered.

    - ticket: theirs, a *bulk ticket*. requests, ids: of each, itself and its number.
    - results, errors: what has come, by place. started_s, finished_s, num_cells: of each, see Ticket. num_left: how
      many are not answered.
    - For those that have no record of their own (see Bulks), by place: their templates; `gathered_at`, their places in
      `gathered`, where their values are; and their shifts (see InFlight), -1 until they are admitted. result_form: of
      all of them.
    """

    __slots__ = (
        "errors", "finished_s", "gathered", "gathered_at", "ids", "num_cells", "num_left", "requests", "result_form",
        "results", "shifts", "started_s", "templates", "ticket",
    )  # fmt: skip

    def __init__(self, ticket: Ticket, requests: Sequence[Any], ids: Sequence[RequestId]) -> None:
        count = len(ids)
        self.ticket = ticket
        self.requests = requests
        self.ids = ids
        self.results: list[Any] = [None] * count
        self.errors: dict[int, BaseException] = {}
        self.started_s: list[float | None] = [None] * count
        self.finished_s = [0.0] * count
        self.num_cells = [0] * count
        self.num_left = count
        self.templates: list[Any] = [None] * count
        self.gathered_at = [0] * count
        self.shifts = [-1] * count
        self.gathered: GatheredValues | None = None
        self.result_form: Hashable = None

    def begin(
        self, places: Sequence[int], templates: Sequence[Template], gathered: GatheredValues, gathered_at: Sequence[int]
    ) -> None:
        """Note the templates and values of requests that begin without records of their own."""
        self.gathered, self.result_form = gathered, templates[0].result_form
        for place, template, at in zip(places, templates, gathered_at, strict=True):
            self.templates[place], self.gathered_at[place] = template, at
            self.num_cells[place] = template.num_nodes

    def ticket_of(self, place: int) -> Ticket:
        """Return a ticket for one of the requests, whose outcome comes back by `in_bulks`."""
        of = self.ticket
        mine = Ticket(
            self.ids[place],
            self.requests[place],
            of.arrived_s,
            None,
            model=of.model,
            model_id=of.model_id,
            priority=of.priority,
        )
        mine.member_of, mine.worker, mine.counted = (self, place), of.worker or 0, of.counted
        return mine

    def tickets(self) -> list[Ticket]:
        """Return a ticket for each of the requests; see `ticket_of`."""
        return [self.ticket_of(place) for place in range(len(self.ids))]

    def put(self, place: int, result: Any, error: BaseException | None, now_s: float) -> None:
        """Take the outcome of one request."""
        if error is None:
            self.results[place] = result
        else:
            self.errors[place] = error
        self.finished_s[place] = now_s
        self.num_left -= 1

    @property
    def latencies_s(self) -> list[float]:
        """Seconds from arrival to answer, of the requests that have a result."""
        arrived_s, errors = self.ticket.arrived_s, self.errors
        return [at_s - arrived_s for place, at_s in enumerate(self.finished_s) if place not in errors]

    def each(self, error: BaseException | None) -> Iterator[tuple[Ticket, BaseException | None]]:
        """Yield the requests as if each had had its own ticket, and the error of each. error: of all of them, if any.

        For those who count or observe requests.
        """
        of = self.ticket
        for place in range(len(self.ids)):
            ticket, mine = self.ticket_of(place), error or self.errors.get(place)
            ticket.started_s, ticket.num_cells = self.started_s[place], self.num_cells[place]
            ticket.finished_s = self.finished_s[place] or of.finished_s
            yield ticket, mine


def apart(tickets: Sequence[Ticket]) -> list[Ticket]:
    """Return tickets, and in place of each bulk ticket one for each of its requests."""
    return [one for ticket in tickets for one in ([ticket] if ticket.bulk is None else ticket.bulk.tickets())]


def in_bulks(outcomes: Sequence[Settled], now_s: float) -> Sequence[Settled]:
    """Give outcomes of requests of bulks to their bulks. Return the others, and the bulk tickets that are answered."""
    for ticket, _, _ in outcomes:
        if ticket.member_of is not None:
            break
    else:
        return outcomes
    others, bulks = list[Settled](), dict[Bulk, None]()
    for ticket, result, error in outcomes:
        if ticket.member_of is None:
            others.append((ticket, result, error))
            continue
        bulk, place = ticket.member_of
        bulk.put(place, result, error, now_s)
        bulk.started_s[place], bulk.num_cells[place] = ticket.started_s, ticket.num_cells
        bulks[bulk] = None
    return others + [(bulk.ticket, None, None) for bulk in bulks if not bulk.num_left]


Settled = tuple[Ticket, Any, BaseException | None]
"""A settled request: its ticket, its result, and its error or None."""

SettledChunk = tuple[Ticket, Chunk, BaseException | None]
"""A settled request that is a chunk: its ticket, its place in its sequence, and its error or None."""


@final
class Outbox:
    """Answers collected during one turn of the engine and delivered together: one wake-up per event loop and caller.

    has_news: whether somebody is to be woken at the next flush.
    """

    def __init__(self) -> None:
        self.has_news = False
        self._by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        self._together: dict[AnswerTaker, list[Settled]] = {}

    def deliver(self, outcomes: Iterable[Settled]) -> None:
        """Answer claimed tickets. Wakes waiting threads now, event loops and callers of `map` at the next flush."""
        alone: list[tuple[Answer, Any, BaseException | None]] = []
        caller: AnswerTaker | None = None
        block: list[Settled] = []
        for outcome in outcomes:
            ticket, result, error = outcome
            if ticket.answer is not None:
                alone.append((ticket.answer, result, error))
            elif ticket.answers is not None:
                if ticket.answers is not caller:
                    self.has_news = True
                    caller = ticket.answers
                    block = self._together.setdefault(caller, [])
                block.append(outcome)
        if alone:
            for future in Answer.settle(alone):
                self.has_news = True
                self._by_loop.setdefault(future.get_loop(), []).append(future)

    def flush(self) -> None:
        """Wake every event loop and every caller of `map` for which there are answers."""
        while self._by_loop:  # one at a time: whatever happens, nobody is answered twice
            loop, futures = self._by_loop.popitem()
            call_soon(loop, partial(wake_all, futures))
        while self._together:
            caller, block = self._together.popitem()
            caller.put(block)
        self.has_news = False


_NO_PLACES: Final = np.empty(0, np.int64)
_DECIDED: Final = -(1 << 41)
"""The local number of a node that began as values decided is _DECIDED minus its number."""
_DECIDED_LOOPS: Final = 1 << 42
"""The shift of a loop that began as values decided."""


class InFlight:
    """The driver's record of a request between its arrival and its answer.

    A *local number* of a node counts the nodes of this request only; local number + shift = node number.

    - awaits_values: it gets each value when the value comes. This is so if its unfold function waits for values, if
      it is streamed, or if its result contains values of an earlier chunk of its sequence.
    - template_values: its template and values, if it has a template.
    - graphs: the graphs that were given to the scheduler and are not admitted yet. admitted: the node numbers of the
      other graphs. shift: that of the last admitted graph.
    - loops: the loops that a value may end, each with its shift. ended: for each loop that has ended, local number of
      its last possible node -> local number of the node at which it ended.
    - values: the values that it was told, by local number and output. waiting_for: those that its unfold function waits
      for. streamed: how many elements of the streamed sequence were given to the caller.
    - gathered: the other values of its result: of each handle a list, for all requests that were gathered with it.
      place: its place among them. See Results.gather. result: what its caller gets.
    - error: what it fails with, if a value could not be read or its unfold function raised.
    - is_withdrawn: it leaves the scheduler, and begins elsewhere.

    - outputs: of a request that decides by values, once its last decision is made, `node * OUTPUTS + output` of each
      output of its region. collected: by number of a collection, the same of each value that was collected so far.

    Attributes that few requests need are class defaults, to keep records cheap.
    """

    admitted: tuple[Admit, ...] = ()
    loops: tuple[tuple[int, OpenLoop], ...] = ()
    waiting_for: set[tuple[int, int]] | None = None
    shift = 0
    streamed = 0
    error: BatchmakerError | None = None
    is_withdrawn = False
    gathered: Mapping[Handle, list[Any]] = MappingProxyType({})
    outputs: Ints = _NO_PLACES
    collected: Mapping[int, list[int]] = MappingProxyType({})
    place = 0
    result: Any = None

    def __init__(
        self, ticket: Ticket, unfolding: Unfolding | Template, template_values: TemplateValues | None = None
    ) -> None:
        self.ticket = ticket
        self.unfolding = unfolding
        self.template_values = template_values
        streams = unfolding.streamed_sequence is not None and ticket.on_value is not None
        self.awaits_values = unfolding.open or streams or (ticket.chunk is not None and unfolding.returns_kept)
        self.graphs = [unfolding.graph]
        self.values: dict[tuple[int, int], Any] = {}
        self.ended: dict[int, int] = {}
        if unfolding.open:
            self.waiting_for = set(unfolding.awaited)
        if unfolding.decided is not None:
            self.collected = {number: [] for number in unfolding.decided.collections.values()}

    def local(self, node: int) -> int:
        """Return the local number of a node. Fast for nodes of the last graph, because these usually run.

        A node that began as values decided has a number below all others. KeyError if the node is not of this request.
        """
        for command in reversed(self.admitted):
            if command.base <= node < command.base + command.num_nodes:
                return node - command.base + command.first_local
        if self.unfolding.decided is not None:
            return _DECIDED - node
        first = self.admitted[0]
        if first.kept_base <= node < first.kept_base + first.first_local:
            return node - first.kept_base
        raise KeyError(node)

    def nodes(self, sequence: ValueSequence) -> NDArray[np.int64]:
        """Return the node numbers of a sequence, [count]; of a loop, up to the node at which it ended.

        Only for a request with one graph, since one shift is used.
        """
        local = sequence.nodes
        if sequence.open_ended:
            local = local[: self.ended[int(local[-1])] - int(local[0]) + 1]
        return local + self.shift

    def begin_loops(self, base: int, loops: Iterable[OpenLoop]) -> list[tuple[int, OpenLoop]]:
        """Note loops that began as values decided, of a segment whose first node is `base`; return them as `loops` has
        them. Their local numbers are below all others, so that they are no other loop's."""
        first = base - _DECIDED_LOOPS
        begun = [(_DECIDED_LOOPS, replace(loop, first=loop.first + first, last=loop.last + first)) for loop in loops]
        self.loops += tuple(begun)
        return begun

    def loop_at(self, node: int) -> tuple[int, OpenLoop] | None:
        """Return the local number of a node and the loop that it is a step of; None if no value may end its loop."""
        for shift, loop in reversed(self.loops):
            if loop.first <= node - shift <= loop.last:
                return node - shift, loop
        return None

    def store(self, local: int, output: int, value: Any) -> None:
        """Keep a value. Stream the elements that have come, in order, up to the first that is missing."""
        self.values[local, output] = value
        if self.waiting_for:
            self.waiting_for.discard((local, output))
        if self.ticket.on_value is None:
            return
        sequence = self.unfolding.streamed_sequence
        if sequence is not None and sequence.output == output:
            nodes = sequence.nodes
            while self.streamed < len(nodes) and (int(nodes[self.streamed]), output) in self.values:
                self.ticket.stream(self.values[int(nodes[self.streamed]), output])
                self.streamed += 1

    def end_loop(self, last: int, local: int, fetched: Iterable[int]) -> None:
        """Note at which node a loop has ended, and store its final outputs under the number that readers use.

        last: local number of its last possible node. local: that of the node at which it ended. fetched: the outputs
        that came to the host.
        """
        self.ended[last] = local
        for output in fetched:
            if (local, output) in self.values:
                self.store(end_of_loop(last), output, self.values[local, output])

    def value(self, node: int, output: int) -> Any:
        """Return a value that it was told. node: local number."""
        return self.values[node, output]
