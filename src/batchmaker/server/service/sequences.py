"""The open sequences of one model: which requests may go on with which, and what ends one.

The engine keeps a sequence's rows, and ends it when it has been idle for too long. The server has one rule for every
protocol: **a chunk without a result ends its sequence**, whether it failed, was given up or was refused, so that no
chunk runs on a state that lacks one. The chunks before it are answered; those after it fail, and so do all later ones
until the client begins anew.

Names belong to their owner: the holder of an API key or, without keys, an address. Two clients of one owner may choose
the same name. They are told apart by their connections: see `OpenSequences.take`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Final, NamedTuple, final

from batchmaker.engine.request import SequenceEnded
from batchmaker.engine.sequence import Sequence
from batchmaker.errors import BatchmakerError, SequenceError
from batchmaker.server.access.sender import Sender
from batchmaker.server.faults import FaultKind, ServiceError, fault_of, invalid
from batchmaker.server.formats.parameters import CallOptions, SequenceName, named_sequence
from batchmaker.server.limits import Limits
from batchmaker.server.service.engine_port import EnginePort

_RETRY_AFTER_S: Final = 1.0

_MOST_KNOWN: Final = 1 << 14
"""How many connections with their sequences are remembered."""

_Key = tuple[tuple[str, str], SequenceName]
"""The owner and the name of a sequence."""


@final
class TakenChunk:
    """The place of one request in its sequence, entered while the request is computed and answered.

    If the block ends with an error, or because the client has gone, the sequence has ended, with all requests sent
    after this one. ended: the message for the client then, after the error. on_failed: called then. wants_state: the
    answer has the state of the sequence after this request. only_asks: it changes nothing, and ends nothing.
    """

    __slots__ = ("_ended", "_on_failed", "only_asks", "sequence", "wants_state")

    def __init__(
        self, sequence: Sequence, *, ended: str, on_failed: Callable[[], None] = lambda: None, wants_state: bool = False
    ) -> None:
        self.sequence = sequence
        self.wants_state = wants_state
        self.only_asks = False
        self._ended = ended
        self._on_failed = on_failed

    def refused(self, fault: ServiceError) -> ServiceError:
        """End the sequence, for this request, which the engine does not get; return what its client is told."""
        self.sequence.close(failed=True)
        self._on_failed()
        return _ended_with(fault, self._ended)

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (self.only_asks and self.sequence.is_open):
            return
        self.sequence.close(drain=False, failed=isinstance(error, ServiceError))
        self._on_failed()
        if not isinstance(error, ServiceError) or isinstance(error.__cause__, SequenceError):
            return
        if error.kind is FaultKind.CANCELLED:  # by closing for an earlier one; the client still waits
            raise fault_of(SequenceError()) from error
        raise _ended_with(error, self._ended) from error


class Wording(NamedTuple):
    """What clients are told. ended: with the error that ends a sequence. identity: of a chunk that names its own."""

    ended: str
    identity: str


ONE_SEQUENCE: Final = Wording("the sequence has ended with it: connect anew", "the connection is the sequence")
"""Of a connection that is one sequence."""

MANY_SEQUENCES: Final = Wording("the sequence has ended with it: begin anew", "the frame's number is the sequence")
"""Of a connection that carries many."""


@final
class ConnectedSequence:
    """A sequence of one connection, which needs no name. on_closed: called at its end."""

    __slots__ = ("_on_closed", "_wording", "sequence")

    def __init__(self, sequence: Sequence, on_closed: Callable[[Sequence], object], wording: Wording) -> None:
        self.sequence = sequence
        self._on_closed = on_closed
        self._wording = wording

    def check(self, options: CallOptions) -> None:
        """Raise INVALID for a chunk that names a sequence."""
        if options.chunk is not None:
            raise invalid(f"{self._wording.identity}: leave out sequence_id, sequence_start and sequence_end")

    def refused(self, fault: ServiceError) -> ServiceError:
        """End the sequence, for a chunk that the engine does not get; return what its client is told."""
        self.sequence.close(failed=True)
        return _ended_with(fault, self._wording.ended)

    def failed(self, error: BaseException, fault: ServiceError) -> ServiceError:
        """End the sequence, for a chunk that has no result; return what its client is told. fault: of the error."""
        self.sequence.close(drain=False, failed=True)
        if isinstance(error, SequenceError):
            return fault
        if fault.kind is FaultKind.CANCELLED:  # by closing for an earlier one; the client still waits
            return fault_of(SequenceError())
        return _ended_with(fault, self._wording.ended)

    @property
    def is_open(self) -> bool:
        """Whether it takes chunks. It does not after a long idle time, or after a failed or refused chunk."""
        return self.sequence.is_open

    def close(self, *, stopped: bool = False) -> None:
        """Cancel unanswered chunks and free the rows. stopped: the server ends it, not its client."""
        self.sequence.close(drain=False, stopped=stopped)
        self._on_closed(self.sequence)


@final
class _Held:
    """A sequence with a name. disputed: a second client has tried to begin one of that name.

    end_is_known: its client has heard that it has ended.
    """

    __slots__ = ("disputed", "end_is_known", "sequence")

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.disputed = False
        self.end_is_known = False


@final
class OpenSequences:
    """The open sequences, used from one event loop. Keeps only names of ended sequences, for a while."""

    def __init__(
        self,
        model: str,
        port: EnginePort,
        limits: Limits,
        on_ended: Callable[[Sender, SequenceEnded], None] = lambda _, __: None,
    ) -> None:
        """on_ended: called in the engine's thread when a sequence has ended, with who had opened it."""
        self._on_ended = on_ended
        self._model = model
        self._port = port
        self._limits = limits
        self._named: dict[_Key, _Held] = {}
        self._last_used: OrderedDict[tuple[str, _Key], _Held] = OrderedDict()  # by connection; the oldest first
        self._connected: dict[Sequence, tuple[str, str]] = {}  # the owners of those without names
        self._sweep_at = 64
        self.stopping = False
        """Whether the model takes no more chunks."""
        self.num_connected = 0
        self.num_begun = 0

    @property
    def idle_s(self) -> float:
        """Seconds without a request after which a sequence ends."""
        return self._limits.sequence_idle_seconds

    @property
    def chunks_ahead(self) -> int:
        """The most chunks of a sequence of a connection that are not answered."""
        return self._limits.max_chunks_ahead

    @property
    def has_named(self) -> bool:
        """Whether a request that is not read yet may be a chunk of an open sequence."""
        return bool(self._named) and self._port.num_sequences > 0

    def take(self, options: CallOptions, sender: Sender) -> TakenChunk | None:
        """Return a request's place in the sequence that it names; None for a request outside sequences.

        A first request begins the sequence, a last one releases the name. A client may use several connections, so any
        connection of the owner may go on with a sequence, until two of them begin one of the same name:

        - a connection that uses an open sequence may begin it anew; its earlier chunks are answered;
        - for any other connection the beginning is a CONFLICT, and the open sequence is *disputed*: from then on only
          the connections that have used it go on with it;
        - a connection whose last sequence of this name has ended, without its client being told so, does not go on
          with another one of that name.

        Raises INVALID for a sequence that is not open, UNAVAILABLE if no more may be open.
        """
        chunk = options.chunk
        if chunk is None:
            return None
        self.check_kept("leave sequence_id out")
        key = (sender.owner, chunk.name)
        held, previous = self._open(key), self._last_used.get((sender.connection, key))
        if chunk.start:
            if held is not None and previous is not held:
                held.disputed = True
                self._remember((sender.connection, key), _Held(held.sequence))  # not the one that is open
                raise self._conflict(chunk.name, sender)
            held = self._begin(key, sender, options.priority, chunk.state)
        elif held is None:
            raise self._not_open(chunk.name, previous)
        elif not _may_go_on(held, previous):
            raise self._conflict(chunk.name, sender) if held.disputed else self._not_open(chunk.name, previous)
        self._remember((sender.connection, key), held)
        if chunk.end:
            self._forget(key, held)
        return TakenChunk(
            held.sequence,
            ended=_begin_anew(chunk.name),
            on_failed=lambda: self._forget(key, held),
            wants_state=chunk.wants_state,
        )

    def refused(self, parameters: Mapping[str, Any], sender: Sender, fault: ServiceError) -> ServiceError:
        """End the sequence that a request names which cannot be taken; return what its client is told.

        Nothing ends for a request outside sequences, or of a client that may not go on with the one that it names. Not
        for the errors of `take`, which have said all.
        """
        name = named_sequence(parameters)
        if name is None:
            return fault
        key = (sender.owner, name)
        held, previous = self._open(key), self._last_used.get((sender.connection, key))
        if held is None or not _may_go_on(held, previous):
            return fault
        held.sequence.close(failed=not self.stopping, stopped=self.stopping)
        self._forget(key, held)
        return _ended_with(fault, _begin_anew(name))

    def connect(
        self, sender: Sender, priority: int, wording: Wording = ONE_SEQUENCE, state: bytes | None = None
    ) -> ConnectedSequence:
        """Begin a sequence of a connection. It has no name, and counts with the owner's named ones.

        state: to go on from. Raises INVALID for a model without state between requests, and for bytes that are no state
        of it; UNAVAILABLE if no more may be open.
        """
        self.check_kept("ask it by infer or generate")
        self.num_connected += 1
        sequence = self._opened(sender, priority, state)
        self._connected[sequence] = sender.owner
        return ConnectedSequence(sequence, self._disconnected, wording)

    def _disconnected(self, sequence: Sequence) -> None:
        self._connected.pop(sequence, None)

    def check_kept(self, instead: str) -> None:
        """Raise INVALID for a model without state between requests. instead: what to do with it."""
        if not self._port.takes_sequences:
            raise invalid(
                f"model {self._model!r} keeps nothing between requests (it has no unfold_chunk, or its policy batches "
                f"whole requests); {instead}"
            )

    def _open(self, key: _Key) -> _Held | None:
        held = self._named.get(key)
        return held if held is not None and held.sequence.is_open else None

    def _begin(self, key: _Key, sender: Sender, priority: int, state: bytes | None) -> _Held:
        before = self._named.pop(key, None)
        if before is not None:
            before.sequence.close()
        self._forget_ended()
        held = self._named[key] = _Held(self._opened(sender, priority, state))
        held.disputed = before is not None and before.disputed
        return held

    def _opened(self, sender: Sender, priority: int, state: bytes | None) -> Sequence:
        of_key, owner = self._limits.max_key_sequences, sender.owner
        if sender.holder and self._num_open(owner) >= of_key:
            raise ServiceError(
                FaultKind.UNAVAILABLE,
                f"{of_key} sequences of this API key are open, as many as may be; end one with sequence_end, or try "
                "again later",
                _RETRY_AFTER_S,
            )
        try:
            ended = partial(self._on_ended, sender)
            sequence = self._port.open_sequence(priority, self._limits.sequence_idle_seconds, ended, state)
        except BatchmakerError as error:
            raise fault_of(error) from error
        self.num_begun += 1
        return sequence

    def _num_open(self, owner: tuple[str, str]) -> int:
        num_named = sum(mine == owner and held.sequence.is_open for (mine, _), held in self._named.items())
        return num_named + sum(mine == owner and sequence.is_open for sequence, mine in self._connected.items())

    def _forget(self, key: _Key, held: _Held) -> None:
        """A sequence has ended, or will with its last answer, and its client knows that."""
        held.end_is_known = True
        if self._named.get(key) is held:
            del self._named[key]

    def _forget_ended(self) -> None:
        """Drop the names of ended sequences when there are twice as many names as sequences were open."""
        if len(self._named) >= self._sweep_at:
            self._named = {key: held for key, held in self._named.items() if held.sequence.is_open}
            self._sweep_at = max(64, 2 * len(self._named))

    def _remember(self, place: tuple[str, _Key], held: _Held) -> None:
        self._last_used[place] = held
        self._last_used.move_to_end(place)
        if len(self._last_used) > _MOST_KNOWN:
            self._last_used.popitem(last=False)

    def _not_open(self, name: SequenceName, previous: _Held | None) -> ServiceError:
        if previous is not None:
            previous.end_is_known = True
        return invalid(
            f"sequence {name!r} is not open: it was not begun, or it has ended, or nothing came for "
            f"{self._limits.sequence_idle_seconds:g} seconds. Send sequence_start with its first request"
        )

    def _conflict(self, name: SequenceName, sender: Sender) -> ServiceError:
        whose = "with the same API key" if sender.holder else "from the same address"
        return ServiceError(
            FaultKind.CONFLICT,
            f"sequence {name!r} is open, and another connection {whose} has begun it: its state is not yours. Take "
            "another sequence_id, such as a random one; or wait until that sequence has ended or was idle for "
            f"{self._limits.sequence_idle_seconds:g} seconds",
        )


def _may_go_on(held: _Held, previous: _Held | None) -> bool:
    """Whether a connection goes on with an open sequence. previous: the one of that name that it used last."""
    return previous is held or (not held.disputed and (previous is None or previous.end_is_known))


def _begin_anew(name: SequenceName) -> str:
    return f"sequence {name!r} has ended with it: begin anew with sequence_start"


def _ended_with(fault: ServiceError, ended: str) -> ServiceError:
    return ServiceError(fault.kind, f"{fault}; {ended}", fault.retry_after_s)
