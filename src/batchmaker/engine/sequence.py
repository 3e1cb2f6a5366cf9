"""A sequence for its caller: chunks go in, each gets a result, and the state between them stays on the device."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, final

from batchmaker.engine.answer import Answer
from batchmaker.engine.open_sequences import said_end
from batchmaker.engine.request import (
    Chunk,
    Control,
    GoOn,
    Reset,
    SequenceEnd,
    SequenceEntry,
    Settle,
    TakeState,
    Ticket,
)
from batchmaker.engine.submission import Submitter
from batchmaker.engine.worker import Worker
from batchmaker.errors import SequenceError, StoppedError
from batchmaker.model.moved_state import MovedState
from batchmaker.model.structure import owned


@final
class Sequence:
    """A sequence of chunks: what `Engine.open_sequence` returns. Any thread or event loop may use it.

    It keeps state on the device until it ends: with the chunk given to `finish`, at `close`, at the end of a `with`
    block, or when it is idle for too long. Chunks are computed in the order in which they were sent. Each is batched
    with all other requests. A chunk may be sent before the one before it is answered.

    If a chunk has no result (an error, a deadline, cancelled), the sequence keeps the state from before it. Chunks that
    were sent after it, and all further ones, fail with SequenceError until `resume` is called. Once the sequence has
    ended, every chunk fails with SequenceError.
    """

    def __init__(
        self,
        entry: SequenceEntry,
        worker: Worker,
        submitter: Submitter,
        make_ticket: Callable[..., Ticket],
        identity: Callable[[], str],
        deadline_ms: float | None = None,
        number: int = 0,
        *,
        takes_last: bool = False,
    ) -> None:
        """identity: of the model; see identity_of. takes_last: its `unfold_chunk` is told which chunk is the last."""
        self._entry = entry
        self._identity = identity
        self._takes_last = takes_last
        self._worker = worker
        self._number = number
        self._submitter = submitter
        self._make_ticket = make_ticket  # Tickets.one with its model and its priority
        self._deadline_ms = deadline_ms
        self._era = 0
        self._end_asked: SequenceEnd | None = None

    def submit(self, chunk: Any, *, deadline_ms: float | None = None, stream: bool = False) -> Answer:
        """Submit a chunk and return its answer, as Engine.submit does. deadline_ms: default is the sequence's.

        Raises SequenceError at once if the sequence has ended. If it ends before the chunk begins, SequenceError comes
        with the answer.
        """
        return self._submitter.submit(self.ticket(chunk, deadline_ms), stream=stream)

    def finish(self, chunk: Any = None, *, deadline_ms: float | None = None, stream: bool = False) -> Answer:
        """Submit the last chunk and return its answer. The sequence ends with it, after all chunks sent before.

        `unfold_chunk(chunk, state, last)` gets last=True, so that a model with look-ahead answers for all that it has
        kept back; its chunk is None where none is given here. A model whose function takes no `last` is not asked
        without a chunk: the answer is None. Raises as `submit`.
        """
        if chunk is None and not self._takes_last:
            answer = self._tell(Settle(), stream=stream)
        else:
            ticket = self.ticket(chunk, deadline_ms, last=True)
            answer = self._submitter.submit(ticket, stream=stream)
        self._end_with(SequenceEnd.FINISHED, drain=True)
        return answer

    def reset(self) -> Answer:
        """Forget the state: chunks sent from now on begin from none, also after one without a result.

        The sequence stays open. The answer is None, and comes after those of all chunks sent before. Raises as
        `submit`.
        """
        self._era += 1
        return self._tell(Reset())

    def state(self) -> bytes:
        """Return the state after all chunks sent so far, with which `Engine.open_sequence(state=...)` goes on.

        In the format of safetensors, with the identity of the model; as often as wanted, here, in another process or on
        another machine. Waits for these chunks; `snapshot` does not. Raises SequenceError after a chunk without a
        result, and SequenceStateError for a state with objects of other classes than numbers, text, bytes, arrays,
        lists, tuples and dicts.
        """
        state: bytes = self.snapshot().result()
        return state

    def settled(self) -> Answer:
        """Return an answer, None, that comes after those of all chunks sent so far."""
        return self._tell(Settle())

    def snapshot(self) -> Answer:
        """Ask for the state after all chunks sent so far, without waiting; the answer is what `state` returns."""
        return self._tell(TakeState(self._identity()))

    @property
    def takes_last(self) -> bool:
        """Whether the model is told which chunk is the last, so that `finish` asks it even without a chunk."""
        return self._takes_last

    def resume(self) -> None:
        """Go on after a chunk without a result: chunks sent from now on continue from the last answered chunk."""
        self._era += 1

    @property
    def is_open(self) -> bool:
        """Whether it takes chunks: it is not closed and has not ended, for example by being idle for too long."""
        return self._end_asked is None and self._entry.ended is None

    def close(self, *, drain: bool = True, failed: bool = False, stopped: bool = False) -> None:
        """Take no more chunks. The state is freed once the accepted chunks are answered; drain=False cancels them.

        failed: it ends because of a chunk without a result, and says so. stopped: it ends because what serves its
        caller stops, and says so. Returns at once. A second call only cancels.
        """
        end = SequenceEnd.CLOSED if drain else SequenceEnd.GIVEN_UP
        self._end_with(SequenceEnd.FAILED if failed else SequenceEnd.STOPPED if stopped else end, drain=drain)

    def _end_with(self, end: SequenceEnd, *, drain: bool) -> None:
        if self._end_asked is not None and drain:
            return
        self._end_asked = self._end_asked or end
        self._entry.sequences.uncount(self._entry)
        with contextlib.suppress(StoppedError):  # the engine has stopped, and the sequence with it
            self._worker.send(partial(self._end, end, drain=drain))

    def __enter__(self) -> Sequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)

    async def __aenter__(self) -> Sequence:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)

    def ticket(
        self, chunk: Any, deadline_ms: float | None = None, now_s: float | None = None, *, last: bool = False
    ) -> Ticket:
        """Return the ticket of the next chunk, which is not sent yet. For the engine itself; see `submit`, `finish`."""
        if self._entry.ended or self._end_asked:
            self._check()
        due_ms = self._deadline_ms if deadline_ms is None else deadline_ms
        ticket = self._make_ticket(owned(chunk), due_ms, now_s=now_s)
        ticket.chunk, ticket.worker = Chunk(self._entry, self._era, last=last and self._takes_last), self._number
        ticket.precedence, ticket.is_urgent = ticket.precedence + 1, True
        return ticket

    def go_on(self, state: MovedState) -> None:
        """Begin with a state from elsewhere. For the engine itself, before the first chunk."""
        self._tell(GoOn(state))

    def _tell(self, control: Control, *, stream: bool = False) -> Answer:
        self._check()
        ticket = self._make_ticket(None, math.inf)
        ticket.chunk, ticket.worker = Chunk(self._entry, self._era, control=control), self._number
        ticket.precedence, ticket.is_urgent = ticket.precedence + 1, True
        ticket.counted = False
        return self._submitter.submit(ticket, stream=stream)

    def _check(self) -> None:
        said = self._entry.ended or (self._end_asked and said_end(self._end_asked))
        if said:
            raise SequenceError(f"the sequence has ended: {said}; open another")

    def _end(self, end: SequenceEnd, *, drain: bool) -> None:
        if not drain:
            for request_id in reversed(self._entry.outstanding):
                self._worker.cancel(request_id)
        self._entry.sequences.close(self._entry, end)
