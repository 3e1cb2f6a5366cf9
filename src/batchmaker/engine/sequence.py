"""A sequence as its caller holds it: chunks in, a result for each, the state between them on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, final

from batchmaker.engine.answer import Answer
from batchmaker.engine.loop import Loop
from batchmaker.engine.request import Chunk, SequenceEntry, Ticket
from batchmaker.engine.submission import Submitter
from batchmaker.errors import SequenceError, StoppedError


@final
class Sequence:
    """What `Engine.open_sequence` returns; leave it, or call `close`, to free what it keeps. Safe to use from any
    thread or event loop.

    Chunks are computed in the order in which they were sent, each batched with all other requests; the next may be sent
    before the last is answered. A chunk without a result (an error, a deadline, given up) leaves the sequence as it was
    before that chunk: those already sent after it, and all further ones, fail with SequenceError until `resume` is
    called. Once the sequence has ended, closed or idle for too long, so do all.
    """

    def __init__(
        self, entry: SequenceEntry, loop: Loop, submitter: Submitter, ticket: Callable[[Any, Any], Ticket]
    ) -> None:
        self._entry = entry
        self._loop = loop
        self._submitter = submitter
        self._make_ticket = ticket
        self._era = 0
        self._closed = False

    def submit(self, chunk: Any, *, deadline_ms: float | None = None, stream: bool = False) -> Answer:
        """Hand a chunk over and return its answer, as Engine.submit does; the deadline is the sequence's by default.

        SequenceError comes at once where the sequence has ended, and with the answer if it ends before the chunk
        begins.
        """
        return self._submitter.submit(self._ticket(chunk, deadline_ms), stream=stream)

    def resume(self) -> None:
        """After a chunk without a result: what is sent from now on goes on from the last one that was answered."""
        self._era += 1

    @property
    def is_open(self) -> bool:
        """Whether it takes chunks; one that was idle for too long does not."""
        return not self._closed and self._entry.ended is None

    def close(self, *, drain: bool = True) -> None:
        """Take no more chunks; what is kept is free once those accepted are done, or given up, without `drain`.

        Returns at once. Once is enough.
        """
        if self._closed:
            return
        self._closed = True
        self._entry.sequences.uncount(self._entry)
        with contextlib.suppress(StoppedError):  # then it has ended with the engine
            self._loop.send(partial(self._end, drain=drain))

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

    def _ticket(self, chunk: Any, deadline_ms: float | None) -> Ticket:
        if not self.is_open:
            raise SequenceError(f"the sequence has ended: {self._entry.ended or 'it was closed'}; open another")
        ticket = self._make_ticket(chunk, deadline_ms)
        ticket.chunk = Chunk(self._entry, self._era)
        return ticket

    def _end(self, *, drain: bool) -> None:
        if not drain:
            for request_id in reversed(self._entry.outstanding):
                self._loop.cancel(request_id)
        self._entry.sequences.close(self._entry)
