"""Which replica a request goes to, live: what each has to do, which sequences are open where, and who has gone.

Without I/O but for locks; used from one event loop. The rules are those of `routing`, which the simulator plays too.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, final

from batchmaker.clock import Clock, RealClock
from batchmaker.fleet.routed_request import RoutedRequest
from batchmaker.fleet.routing import Router
from batchmaker.server.access.sender import NOBODY, Sender
from batchmaker.server.faults import FaultKind, ServiceError, invalid
from batchmaker.server.formats.messages import Parameter
from batchmaker.server.formats.parameters import SequenceName
from batchmaker.server.limits import Limits

State = Literal["open", "suspended", "draining", "lost"]
"""Of a replica: takes requests; does not at the moment; takes only chunks of its open sequences; has ended."""

_FIRST_US: Final = 100.0
"""Microseconds of an element of a model of which nothing has been measured. With one model only ratios matter."""

_Model = tuple[str, str | None]
"""Model and version, as a call names them."""

_KEPT: Final = 0.8
"""How much of what was measured before is kept at each look, once a second."""

_TRY_AGAIN_S: Final = 1.0

_FORGET_S: Final = 5.0
"""Seconds after which the front forgets a sequence that its replica has ended for being idle."""


@final
@dataclass(slots=True, eq=False)
class Replica:
    """A replica in the table. link: what carries requests to it. num_sequences: open ones, WebSockets among them.

    work_us: of its unanswered requests, estimated. routed: requests so far. computed: elements of its answers since
    that was last asked, by model. unanswered: its requests outside sequences, by model and version as calls name them.
    judged: not set while it is suspended, until it takes requests again or is removed.
    """

    number: int
    link: Any
    state: State = "open"
    num_requests: int = 0
    num_sequences: int = 0
    work_us: int = 0
    routed: int = 0
    computed: Counter[str] = field(default_factory=Counter)
    unanswered: dict[_Model, int] = field(default_factory=dict)
    judged: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def idle(self) -> bool:
        """Whether it has nothing to finish."""
        return not self.num_requests and not self.num_sequences

    @contextmanager
    def questioned(self) -> Iterator[None]:
        """Count a call that is no work of a model: one that leaves answers it first."""
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1


@final
class _OpenSequence:
    """Where a sequence is. Its chunks go there one after the other, in the order in which they came.

    is_begun: whether a request of it was answered. A beginning that is refused before ends it; later it may be another
    client's: then is_disputed is set. sender: of its latest chunk. priority: as its first request had it.
    """

    __slots__ = ("is_begun", "is_disputed", "lock", "num_chunks", "priority", "quiet_since_s", "replica", "sender")

    def __init__(self, replica: Replica, now_s: float) -> None:
        self.replica = replica
        self.lock = asyncio.Lock()
        self.num_chunks = 0
        self.is_begun = False
        self.is_disputed = False
        self.sender = NOBODY
        self.priority: Parameter = None
        self.quiet_since_s = now_s

    @property
    def may_move(self) -> bool:
        """Whether it may be handed over. A disputed one may not: only its replica knows whose chunks to refuse."""
        return self.is_begun and not self.is_disputed and self.replica.state == "draining"

    @property
    def must_move(self) -> bool:
        """Whether a new sequence of this name has to go to another replica."""
        return self.replica.state == "lost" or (self.replica.state != "open" and not self.num_chunks)


_Name = tuple[tuple[str, str], str, str | None, SequenceName]
"""Owner, model, version and name of a sequence."""


class NamedSequence(NamedTuple):
    """An open sequence, with what clients call it, and where it is."""

    owner: tuple[str, str]
    model: str
    version: str | None
    name: SequenceName
    at: _OpenSequence


@final
class Lease:
    """One request's place at a replica, from `Balancer.take` to `end`."""

    __slots__ = ("_balancer", "_began", "_name", "_open", "_weight", "replica", "request")

    def __init__(
        self,
        balancer: Balancer,
        replica: Replica,
        request: RoutedRequest,
        weight: int,
        name: _Name | None,
        at: _OpenSequence | None,
    ) -> None:
        """at: its sequence, None outside sequences."""
        self._balancer = balancer
        self._name = name
        self._open = at
        self._began = at is not None and not at.is_begun
        self._weight = weight
        self.request = request
        self.replica = replica

    def end(self, *, answered: bool) -> None:
        """The request is over. answered: with a result; otherwise it failed, was refused or was given up."""
        balancer, replica = self._balancer, self.replica
        replica.num_requests -= 1
        replica.work_us -= self._weight
        model = self.request.model, self.request.version
        if self.request.chunk is None:
            replica.unanswered[model] -= 1
            if not replica.unanswered[model]:
                del replica.unanswered[model]  # clients may ask for models without end
        balancer.work.answered(replica.number, balancer.routed_weight(self._weight))
        if answered:
            replica.computed[self.request.model] += self.request.elements
        if self._open is not None and self._name is not None and self.request.chunk is not None:
            self._open.num_chunks -= 1
            self._open.quiet_since_s = balancer.clock.now_s()
            self._open.lock.release()
            self._open.is_disputed |= self._open.is_begun and self.request.chunk.start and not answered
            self._open.is_begun = self._open.is_begun or answered
            has_ended = self.request.chunk.end if answered else self._began
            if has_ended and not self._open.num_chunks:
                balancer.forget(self._name, self._open)


@final
class ModelRoom:
    """What the replicas together take of a model's requests."""

    __slots__ = ("_balancer", "_model")

    def __init__(self, balancer: Balancer, model: _Model) -> None:
        self._balancer = balancer
        self._model = model

    def check_room(self) -> None:
        """Raise UNAVAILABLE, with when to try again, if every replica that takes requests has as many as it takes.

        A chunk of an open sequence is never refused so: see ServedModel.check_room.
        """
        if self._balancer.has_named:
            return
        most, is_full = self._balancer.most_requests, False
        for replica in self._balancer.replicas.values():
            if replica.state == "open":
                if replica.unanswered.get(self._model, 0) < most:
                    return
                is_full = True
        if is_full:
            raise ServiceError(
                FaultKind.UNAVAILABLE,
                f"model {self._model[0]!r} has {most} requests in flight at each replica and takes no more now; "
                "try again later",
                _TRY_AGAIN_S,
            )

    def count_refusal(self, fault: ServiceError) -> None:
        """A call got this error before it was routed."""
        self._balancer.num_refused += 1


@final
class Balancer:
    """The table of replicas. router: a rule for requests, see routing.RULES; sequences begin where fewest are open.

    idle_s: after which a replica ends a sequence without a chunk. most_requests: of one model that a replica takes.
    """

    def __init__(
        self,
        router: str = "least-work",
        idle_s: float = 60.0,
        clock: Clock | None = None,
        most_requests: int = Limits().max_in_flight,
    ) -> None:
        self.work = Router(router)
        self.clock: Clock = clock or RealClock()
        self.replicas: dict[int, Replica] = {}
        self.most_requests = most_requests
        self.num_lost_sequences = 0
        self.num_moved_sequences = 0
        self.num_refused = 0
        self._by_sequences = Router("sticky")
        self._by_count = router in ("least-requests", "two-choices")
        self._idle_s = idle_s
        self._named: dict[_Name, _OpenSequence] = {}
        self._measured: dict[str, tuple[float, float]] = {}  # model: microseconds, elements

    # --- replicas -----------------------------------------------------------------------------------------------------

    def open(self, number: int, link: Any) -> Replica:
        """A new replica takes requests from now on. Numbers are never used again."""
        replica = self.replicas[number] = Replica(number, link)
        self._open(replica)
        return replica

    def suspend(self, replica: Replica) -> None:
        """It gets nothing for now: it does not answer, or says that it is not ready."""
        if replica.state == "open":
            self._close(replica, "suspended")
            replica.judged.clear()

    def resume(self, replica: Replica) -> None:
        """It takes requests again."""
        if replica.state == "suspended":
            replica.state = "open"
            replica.judged.set()
            loads = [(router, int(router.load[replica.number])) for router in (self.work, self._by_sequences)]
            self._open(replica)
            for router, load in loads:  # what it still has to do
                router.load[replica.number] = load

    def drain(self, replica: Replica) -> None:
        """It gets no new requests; those that it has are answered, and its open sequences go on."""
        if replica.state == "open":
            self._close(replica, "draining")
        elif replica.state == "suspended":
            replica.state = "draining"

    def remove(self, replica: Replica) -> None:
        """It has ended, or is given up. Its sequences end with an error that says so."""
        if replica.state == "open":
            self._close(replica, "lost")
        replica.state = "lost"
        replica.judged.set()
        self.replicas.pop(replica.number, None)
        self.num_lost_sequences += replica.num_sequences

    def _open(self, replica: Replica) -> None:
        for router in (self.work, self._by_sequences):
            router.open(replica.number)

    def _close(self, replica: Replica, state: State) -> None:
        for router in (self.work, self._by_sequences):
            router.close(replica.number)
        replica.state = state

    # --- requests -----------------------------------------------------------------------------------------------------

    async def take(self, request: RoutedRequest, sender: Sender) -> Lease:
        """Return a request's place at a replica. Chunks of a sequence wait for those before them.

        sender: whose names of sequences it uses. Which of an owner's clients may go on with one, the replica says.
        Raises ServiceError: UNAVAILABLE if no replica takes requests, INVALID for a chunk whose sequence was lost.
        """
        if request.chunk is None:
            return self._lease(None, request)
        name = (sender.owner, request.model, request.version, request.chunk.name)
        sequence = self._named.get(name)
        if sequence is None or (request.chunk.start and sequence.must_move):
            if not request.chunk.start:
                return self._lease(None, request)  # no replica knows it, and any one says so
            if sequence is not None:
                self.forget(name, sequence)
            sequence = self._named[name] = _OpenSequence(self.connect(), self.clock.now_s())
        sequence.num_chunks += 1
        try:
            await sequence.lock.acquire()
        except asyncio.CancelledError:
            sequence.num_chunks -= 1
            raise
        if sequence.replica.state == "lost":
            sequence.lock.release()
            sequence.num_chunks -= 1
            raise lost_sequence()
        sequence.sender = sender
        if request.chunk.start:
            sequence.priority = request.priority
        return self._lease(sequence.replica, request, name, sequence)

    def connect(self) -> Replica:
        """Return the replica of a new sequence, which has one more then. UNAVAILABLE if none takes requests."""
        if not self._by_sequences.num_open:
            raise _nobody()
        replica = self.replicas[self._by_sequences.route(1)]
        replica.num_sequences += 1
        return replica

    def disconnect(self, replica: Replica) -> None:
        """A sequence at this replica has ended."""
        self._by_sequences.answered(replica.number, 1)
        replica.num_sequences -= 1

    def room_of(self, model: str, version: str | None) -> ModelRoom:
        """Return the room for calls that name this model and version."""
        return ModelRoom(self, (model, version))

    def any_open(self) -> Replica:
        """Return a replica that takes requests, for a question that each can answer. UNAVAILABLE if none does."""
        if not self.work.num_open:
            raise _nobody()
        return self.replicas[self.work.route(0)]

    def forget(self, name: _Name, sequence: _OpenSequence) -> None:
        """A sequence has ended."""
        if self._named.get(name) is sequence:
            del self._named[name]
            self.disconnect(sequence.replica)

    def sequences_at(self, replica: Replica) -> list[NamedSequence]:
        """Return the open sequences with names at a replica."""
        return [NamedSequence(*name, one) for name, one in self._named.items() if one.replica is replica]

    def is_open(self, sequence: NamedSequence) -> bool:
        """Whether a sequence is still open under its name."""
        return self._named.get(sequence[:4]) is sequence.at

    def move(self, sequence: NamedSequence, to: Replica) -> None:
        """A sequence goes on at another replica, from `connect`."""
        self.moved(sequence.at.replica)
        sequence.at.replica = to

    def moved(self, replica: Replica, count: int = 1) -> None:
        """A sequence of this replica goes on at another, from `connect`. count: those of a connection of many."""
        self.disconnect(replica)
        self.num_moved_sequences += count

    def forget_idle(self) -> None:
        """Forget sequences that replicas have ended because nothing came. Call it now and then."""
        before_s = self.clock.now_s() - self._idle_s - _FORGET_S
        idle = [(n, one) for n, one in self._named.items() if not one.num_chunks and one.quiet_since_s < before_s]
        for name, sequence in idle:
            self.forget(name, sequence)

    def _lease(
        self,
        at: Replica | None,
        request: RoutedRequest,
        name: _Name | None = None,
        sequence: _OpenSequence | None = None,
    ) -> Lease:
        weight = self.weigh(request)
        if at is not None:
            self.work.load[at.number] += self.routed_weight(weight)
        elif self.work.num_open:
            at = self.replicas[self.work.route(self.routed_weight(weight))]
        else:
            raise _nobody()
        model = request.model, request.version
        if request.chunk is None:
            at.unanswered[model] = at.unanswered.get(model, 0) + 1
        at.num_requests += 1
        at.work_us += weight
        at.routed += 1
        return Lease(self, at, request, weight, name, sequence)

    # --- work ---------------------------------------------------------------------------------------------------------

    def routed_weight(self, weight: int) -> int:
        """Return what the router's rule adds up: work, or requests."""
        return 1 if self._by_count else weight

    def weigh(self, request: RoutedRequest) -> int:
        """Return the microseconds of work in a request, by what its model's elements took so far; at least 1."""
        return max(1, round(request.elements * self.element_us(request.model)))

    def element_us(self, model: str) -> float:
        """Return the microseconds that one element of this model takes."""
        busy_us, elements = self._measured.get(model, (_FIRST_US, 1.0))
        return busy_us / elements

    def learn(self, replica: Replica, model: str, busy_us: float) -> None:
        """A replica has computed for `busy_us` since the last call; what it answered meanwhile took that long."""
        elements = replica.computed.pop(model, 0)
        if elements and busy_us > 0:
            before_us, before = self._measured.get(model, (0.0, 0.0))
            self._measured[model] = (_KEPT * before_us + busy_us, _KEPT * before + elements)

    @property
    def has_named(self) -> bool:
        """Whether a request that is not read yet may be a chunk of an open sequence."""
        return bool(self._named)

    @property
    def waiting_s(self) -> float:
        """Seconds of work that is not answered, at all replicas."""
        return sum(replica.work_us for replica in self.replicas.values()) / 1e6

    @property
    def num_sequences(self) -> int:
        """Open sequences, at all replicas."""
        return sum(replica.num_sequences for replica in self.replicas.values())


def _nobody() -> ServiceError:
    return ServiceError(FaultKind.UNAVAILABLE, "no replica takes requests at the moment; try again", _TRY_AGAIN_S)


def lost_sequence() -> ServiceError:
    """Return the error of a chunk whose sequence has ended with its replica."""
    return invalid("the sequence has ended: the replica that held its state is gone. Begin anew with sequence_start")
