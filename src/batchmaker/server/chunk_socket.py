"""One WebSocket connection, one sequence: its messages are chunks, each with one message as its answer, in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

from starlette.types import Receive, Send

from batchmaker.server.chunk_form import ChunkForm
from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.parts import Site
from batchmaker.server.request_body import HeldBytes
from batchmaker.server.sequences import ConnectedSequence
from batchmaker.server.served_model import Begun, ServedModel


@dataclass(frozen=True, slots=True)
class Closing:
    """The code of RFC 6455 for closing a connection, and the reason in at most 123 bytes."""

    code: int
    reason: str


_STOPPING: Final = Closing(1001, "the server or the model is being stopped")
_IDLE: Final = Closing(1008, "no chunk came for as long as a sequence may be idle")
_FAILED: Final = Closing(1011, "the sequence has ended: a chunk has no answer, or nothing came for too long")
_LOOK_S: Final = 0.05
"""Seconds between two looks whether there is room for a chunk, where only others can make it."""


@final
class _Over(Exception):  # noqa: N818 - the end of a connection is no error of anybody
    """Ends all work for a connection. closing: None if the client has gone."""

    def __init__(self, closing: Closing | None) -> None:
        super().__init__()
        self.closing = closing


class _Taken(NamedTuple):
    """A chunk that the client has sent and the engine has not got. at_s: since when."""

    chunk: bytes | str
    at_s: float


class _Chunk(NamedTuple):
    """A chunk that was read and is not answered. begun: the request in the engine, or why it was refused."""

    held: HeldBytes
    request_id: str
    begun: Begun | ServiceError


@final
class ChunkSocket:
    """Reads chunks, has them computed and answers them.

    A chunk is never refused for want of room. No further chunk is read while `max_chunks_ahead` of them have no answer
    that was handed to the connection, while the server holds as many bytes as it may, or while the rate of the key is
    used up; this slows down the client's sending. Handing over an answer waits while the client leaves too much unread,
    for at most `write_seconds`. So a client that reads nothing is not read from either, and is then disconnected.

    A chunk without an answer is the last one: the sequence has ended, and what was sent after it is not computed.

    One task reads and hands chunks to the engine, a second one awaits their answers in order and writes. A chunk of
    live audio comes every few milliseconds on each connection, so neither a task nor a timer is made for a chunk.
    """

    def __init__(
        self,
        site: Site,
        served: ServedModel,
        sequence: ConnectedSequence,
        form: ChunkForm,
        *,
        key: str | None,
        client: str = "",
    ) -> None:
        """key: for counting each chunk. client: whose the bytes are."""
        self._client = client
        self._site = site
        self._served = served
        self._sequence = sequence
        self._form = form
        self._key = key
        self._limits = site.service.limits
        self._chunks: deque[_Chunk] = deque()
        self._taken: _Taken | None = None
        self._came = asyncio.Event()
        self._left = asyncio.Event()
        self._ended = False
        self._key_counts = False  # the first chunk's key was checked when the connection was made
        self._stopping = False
        self._now_s = asyncio.get_running_loop().time
        self._quiet_since_s = self._now_s()
        self._writing_since_s: float | None = None
        self._patience: asyncio.Timeout | None = None

    async def run(self, receive: Receive, send: Send) -> Closing | None:
        """Answer chunks until the end; return how to close the connection, None if nobody listens.

        It ends when the client, the sequence, the model or the server ends it, or when it was idle.
        """
        self._served.connected.add(self._stop)
        try:
            async with asyncio.TaskGroup() as tasks:
                writer = tasks.create_task(self._write_all(send))
                watch = tasks.create_task(self._watch())
                closing = await self._read_all(receive)
                self._ended = True
                self._came.set()
                await writer
                watch.cancel()
            return closing
        except BaseExceptionGroup as group:
            for error in _leaves(group):
                if not isinstance(error, _Over):
                    raise error from None
            return next(error.closing for error in _leaves(group) if isinstance(error, _Over))
        finally:
            self._served.connected.discard(self._stop)
            for chunk in self._chunks:
                chunk.held.release()
                if isinstance(chunk.begun, Begun):
                    chunk.begun.answer.cancel()

    def _stop(self) -> None:
        """Read no further; answer the chunks already read, and end."""
        self._stopping = True
        if self._patience is not None and not self._patience.expired():
            self._patience.reschedule(self._now_s())

    async def _read_all(self, receive: Receive) -> Closing:
        """Read until there is a reason for reading no more, and return it."""
        while not self._stopping:
            now_s = self._now_s()
            since_s = now_s if self._chunks or self._taken is not None else self._quiet_since_s
            if now_s - since_s >= self._limits.sequence_idle_seconds:
                return _IDLE
            try:
                async with asyncio.timeout_at(since_s + self._limits.sequence_idle_seconds) as self._patience:
                    await self._read(receive)
            except TimeoutError:  # idle, if no chunk has come in the meantime; or told to stop
                continue
            finally:
                self._patience = None
        return _STOPPING

    async def _read(self, receive: Receive) -> None:
        """Hand chunks to the engine in the order in which they come, up to one that is refused."""
        most = self._limits.max_chunks_ahead
        while True:
            while len(self._chunks) >= most or not self._sequence.is_open:
                await self._leaving()
            if self._taken is None:
                message = await receive()
                if message["type"] == "websocket.disconnect":
                    raise _Over(None)
                data: bytes | None = message.get("bytes")
                self._taken = _Taken(message["text"] if data is None else data, self._now_s())
            held = await self._room(self._taken)  # may be interrupted, by the end of patience
            self._chunks.append(self._begun(self._taken.chunk, held))
            self._taken = None
            self._came.set()

    async def _leaving(self) -> None:
        """Wait until a chunk has its answer."""
        self._left.clear()
        await self._left.wait()

    async def _room(self, taken: _Taken) -> HeldBytes | ServiceError:
        """Wait for room in memory and in the rate of the key; return the chunk's share of the memory.

        Returns the error of a chunk that cannot have it: it is too large, its key is gone, or it waited too long.
        """
        held, size = HeldBytes(self._site.bodies, self._client), len(taken.chunk)
        end_s = taken.at_s + self._limits.write_seconds
        while not self._site.bodies.fits(self._client, size) and self._now_s() < end_s:
            await (self._leaving() if self._chunks else asyncio.sleep(_LOOK_S))
        try:
            held.add(size)
            while self._key_counts:
                try:
                    self._site.keys.caller(self._key)
                    break
                except ServiceError as fault:
                    wait_s = fault.retry_after_s or 0.0
                    if fault.kind is not FaultKind.TOO_MANY or self._now_s() + wait_s > end_s:
                        raise
                    await asyncio.sleep(wait_s)
            self._key_counts = True
            return held
        except ServiceError as fault:
            held.release()
            return fault
        except BaseException:
            held.release()
            raise

    def _begun(self, chunk: bytes | str, held: HeldBytes | ServiceError) -> _Chunk:
        if isinstance(held, ServiceError):
            return _Chunk(HeldBytes(self._site.bodies, self._client), "", self._sequence.refused(held))
        request_id = ""
        try:
            request = self._form.read(chunk)
            request_id = request.id
        except ServiceError as fault:
            return _Chunk(held, request_id, self._sequence.refused(fault))
        try:
            return _Chunk(held, request_id, self._served.begin(request, connected=self._sequence))
        except ServiceError as fault:  # the sequence has ended with it
            return _Chunk(held, request_id, fault)

    async def _write_all(self, send: Send) -> None:
        """Answer the chunks in order, until the end of reading."""
        while True:
            while not self._chunks:
                if self._ended:
                    return
                self._came.clear()
                await self._came.wait()
            said, last = await self._answer(self._chunks[0])
            self._writing_since_s = self._now_s()
            try:
                await send({"type": "websocket.send", "text" if isinstance(said, str) else "bytes": said})
            except OSError as error:
                raise _Over(None) from error
            self._writing_since_s = None
            self._chunks.popleft().held.release()
            if last:
                raise _Over(_STOPPING if self._stopping else _FAILED)
            self._quiet_since_s = self._now_s()
            self._left.set()

    async def _answer(self, chunk: _Chunk) -> tuple[bytes | str, bool]:
        """Return the message for a chunk, and whether the sequence has ended with it."""
        begun = chunk.begun
        try:
            if isinstance(begun, ServiceError):
                raise begun
            return self._form.write(await self._served.finish(begun)), False
        except ServiceError as fault:
            return self._form.write_fault(fault, chunk.request_id), not self._sequence.is_open

    async def _watch(self) -> None:
        """End the connection once one message has waited for `write_seconds`."""
        while True:
            since_s, now_s = self._writing_since_s, self._now_s()
            left_s = self._limits.write_seconds - (0.0 if since_s is None else now_s - since_s)
            if left_s <= 0.0:
                raise _Over(None)
            await asyncio.sleep(left_s)


def _leaves(group: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    """Yield the exceptions in a group, and in groups inside it."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
