"""The open sequences of one model by clients' names: the sequence of each request, and the end of sequences.

The engine keeps a sequence's rows, and ends it when it has been idle for too long. Names belong to the caller: the same
name of another caller is another sequence.
"""

from __future__ import annotations

from types import TracebackType
from typing import Final, final

from batchmaker.engine.sequence import Sequence
from batchmaker.errors import BatchmakerError, SequenceError
from batchmaker.server.engine_port import EnginePort
from batchmaker.server.faults import FaultKind, ServiceError, fault_of, invalid
from batchmaker.server.limits import Limits
from batchmaker.server.parameters import CallOptions, SequenceName

_RETRY_AFTER_S: Final = 1.0


@final
class TakenChunk:
    """The place of one request in its sequence, entered while the request is computed and answered.

    If the block ends with an answer, the rows are freed if this was the sequence's last request. If it ends with an
    error, or because the client has gone, the sequence has ended, with all requests sent after this one. ended: the
    message for the client then, after the error.
    """

    __slots__ = ("_ended", "_last", "sequence")

    def __init__(self, sequence: Sequence, *, last: bool, ended: str) -> None:
        self.sequence = sequence
        self._last = last
        self._ended = ended

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            if self._last:
                self.sequence.close()
            return
        self.sequence.close(drain=False)
        if not isinstance(error, ServiceError) or isinstance(error.__cause__, SequenceError):
            return
        if error.kind is FaultKind.CANCELLED:  # by closing for an earlier one; the client still waits
            raise fault_of(SequenceError()) from error
        raise ServiceError(error.kind, f"{error}; {self._ended}", error.retry_after_s) from error


@final
class ConnectedSequence:
    """The sequence of one connection: the connection's requests are its chunks."""

    __slots__ = ("_sequence",)

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence

    def take(self, options: CallOptions) -> TakenChunk:
        """Return the place of the next request. INVALID for one that names a sequence, or after the end."""
        if options.chunk is not None:
            raise invalid("the connection is the sequence: leave out sequence_id, sequence_start and sequence_end")
        if not self._sequence.is_open:
            raise invalid("the sequence of this connection has ended; connect anew")
        return TakenChunk(self._sequence, last=False, ended="the sequence has ended with it: connect anew")

    @property
    def is_open(self) -> bool:
        """Whether it takes requests. It does not after a long idle time, or after a failed request."""
        return self._sequence.is_open

    def close(self) -> None:
        """Cancel unanswered requests and free the rows."""
        self._sequence.close(drain=False)


@final
class OpenSequences:
    """The open sequences, used from one event loop. Keeps only names of ended sequences, for a while."""

    def __init__(self, model: str, port: EnginePort, limits: Limits) -> None:
        self._model = model
        self._port = port
        self._limits = limits
        self._named: dict[tuple[str, SequenceName], Sequence] = {}
        self._sweep_at = 64
        self.num_connected = 0
        self.num_begun = 0

    @property
    def idle_s(self) -> float:
        """Seconds without a request after which a sequence ends."""
        return self._limits.sequence_idle_seconds

    def take(self, options: CallOptions, caller: str) -> TakenChunk | None:
        """Return a request's place in the sequence that it names; None for a request outside sequences.

        A first request begins the sequence; an open one of that name ends once its requests are answered. A last one
        releases the name. caller: the owner of the names. Raises INVALID for a sequence that is not open, UNAVAILABLE
        if no more may be open.
        """
        chunk = options.chunk
        if chunk is None:
            return None
        self._check_kept("leave sequence_id out")
        key = (caller, chunk.name)
        sequence = self._begin(key, options.priority) if chunk.start else self._named.get(key)
        if sequence is None or not sequence.is_open:
            raise invalid(
                f"sequence {chunk.name!r} is not open: it was not begun, or it has ended, or nothing came for "
                f"{self._limits.sequence_idle_seconds:g} seconds. Send sequence_start with its first request"
            )
        if chunk.end:
            del self._named[key]
        said = f"sequence {chunk.name!r} has ended with it: begin anew with sequence_start"
        return TakenChunk(sequence, last=chunk.end, ended=said)

    def connect(self, caller: str, priority: int) -> ConnectedSequence:
        """Begin the sequence of one connection. It has no name, and counts with the caller's named ones.

        Raises INVALID for a model without state between requests, UNAVAILABLE if no more may be open.
        """
        self._check_kept("ask it by infer or generate")
        self.num_connected += 1
        return ConnectedSequence(self._begin((caller, -self.num_connected), priority))  # clients' names are above 0

    def _check_kept(self, instead: str) -> None:
        if not self._port.takes_sequences:
            raise invalid(
                f"model {self._model!r} keeps nothing between requests (it has no unfold_chunk, or its policy batches "
                f"whole requests); {instead}"
            )

    def _begin(self, key: tuple[str, SequenceName], priority: int) -> Sequence:
        before = self._named.pop(key, None)
        if before is not None:
            before.close()
        self._forget_ended()
        caller, _ = key
        of_key = self._limits.max_key_sequences
        if caller and sum(owner == caller and held.is_open for (owner, _), held in self._named.items()) >= of_key:
            raise ServiceError(
                FaultKind.UNAVAILABLE,
                f"{of_key} sequences of this API key are open, as many as may be; end one with sequence_end, or try "
                "again later",
                _RETRY_AFTER_S,
            )
        try:
            sequence = self._port.open_sequence(priority, self._limits.sequence_idle_seconds)
        except BatchmakerError as error:
            raise fault_of(error) from error
        self._named[key] = sequence
        self.num_begun += 1
        return sequence

    def _forget_ended(self) -> None:
        """Drop the names of ended sequences when there are twice as many names as sequences were open."""
        if len(self._named) >= self._sweep_at:
            self._named = {key: held for key, held in self._named.items() if held.is_open}
            self._sweep_at = max(64, 2 * len(self._named))
