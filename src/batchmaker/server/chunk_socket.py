"""One WebSocket connection, one sequence: its messages are chunks, each with one message as its answer, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, final

from starlette.types import Message, Receive, Send

from batchmaker.server.chunk_form import ChunkForm
from batchmaker.server.faults import ServiceError
from batchmaker.server.parts import Site
from batchmaker.server.sequences import ConnectedSequence
from batchmaker.server.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class Closing:
    """The code of RFC 6455 for closing a connection, and the reason in at most 123 bytes."""

    code: int
    reason: str


_STOPPING: Final = Closing(1001, "the server or the model is being stopped")
_IDLE: Final = Closing(1008, "no chunk came for as long as a sequence may be idle")
_FAILED: Final = Closing(1011, "the sequence has ended: a chunk has no answer, or nothing came for too long")


@final
class _Over(Exception):  # noqa: N818 - the end of a connection is no error of anybody
    """Ends all work for a connection. closing: None if the client has gone."""

    def __init__(self, closing: Closing | None) -> None:
        super().__init__()
        self.closing = closing


@final
class ChunkSocket:
    """Reads chunks, has them computed and answers them.

    No further chunk is read while `max_chunks_ahead` of them have no answer that was handed to the connection; this
    slows down the client's sending. Handing over an answer waits while the client leaves too much unread, for at most
    `write_seconds`. So a client that reads nothing is not read from either, and is then disconnected.
    """

    def __init__(
        self,
        site: Site,
        served: ServedModel,
        sequence: ConnectedSequence,
        form: ChunkForm,
        *,
        caller: str,
        key: str | None,
    ) -> None:
        """caller, key: the owner of the chunks, and the key for counting each."""
        self._site = site
        self._served = served
        self._sequence = sequence
        self._form = form
        self._caller = caller
        self._key = key
        self._limits = site.service.limits
        self._room = asyncio.Semaphore(self._limits.max_chunks_ahead)
        self._num_open = 0
        self._quiet_since = 0.0
        self._stopping = False
        self._patience: asyncio.Timeout | None = None

    async def run(self, receive: Receive, send: Send) -> Closing | None:
        """Answer chunks until the end; return how to close the connection, None if nobody listens.

        It ends when the client, the sequence, the model or the server ends it, or when it was idle.
        """
        self._quiet_since = asyncio.get_running_loop().time()
        self._served.connected.add(self._stop)
        try:
            async with asyncio.TaskGroup() as tasks:
                closing = await self._read_all(tasks, receive, send)
            return closing
        except BaseExceptionGroup as group:
            for error in _leaves(group):
                if not isinstance(error, _Over):
                    raise error from None
            return next(error.closing for error in _leaves(group) if isinstance(error, _Over))
        finally:
            self._served.connected.discard(self._stop)

    def _stop(self) -> None:
        """Read no further; answer the chunks already read, and end."""
        self._stopping = True
        if self._patience is not None and not self._patience.expired():
            self._patience.reschedule(asyncio.get_running_loop().time())

    async def _read_all(self, tasks: asyncio.TaskGroup, receive: Receive, send: Send) -> Closing:
        """Start a task for each chunk. Chunks reach the engine in the order in which their tasks start."""
        answered = asyncio.Event()
        answered.set()
        first = True  # its key was checked when the connection was made
        while True:
            await self._room.acquire()
            chunk = await self._next(receive)
            if isinstance(chunk, Closing):
                return chunk
            before, answered = answered, asyncio.Event()
            self._num_open += 1
            tasks.create_task(self._answer(chunk, first, before, answered, send))
            first = False

    async def _next(self, receive: Receive) -> bytes | str | Closing:
        """Return the next chunk, or the reason for reading no more."""
        while not self._stopping:
            now_s = asyncio.get_running_loop().time()
            since_s = now_s if self._num_open else self._quiet_since
            if now_s - since_s >= self._limits.sequence_idle_seconds:
                return _IDLE
            try:
                async with asyncio.timeout_at(since_s + self._limits.sequence_idle_seconds) as self._patience:
                    message = await receive()
            except TimeoutError:
                continue
            finally:
                self._patience = None
            if message["type"] == "websocket.disconnect":
                raise _Over(None)
            data: bytes | None = message.get("bytes")
            return message["text"] if data is None else data
        return _STOPPING

    async def _answer(
        self, chunk: bytes | str, first: bool, before: asyncio.Event, answered: asyncio.Event, send: Send
    ) -> None:
        """Have one chunk computed, and answer it after all earlier ones."""
        said, last = await self._computed(chunk, first)
        await before.wait()
        await self._write(send, said)
        if last:
            raise _Over(_STOPPING if self._stopping else _FAILED)
        self._num_open -= 1
        self._quiet_since = asyncio.get_running_loop().time()
        answered.set()
        self._room.release()

    async def _computed(self, chunk: bytes | str, first: bool) -> tuple[Message, bool]:
        """Return the message for a chunk, and whether the sequence has ended with it."""
        request_id, last = "", False
        try:
            with self._site.bodies.holding() as held:
                held.add(len(chunk))
                if not first:
                    self._site.keys.caller(self._key)
                request = self._form.read(chunk)
                request_id = request.id
                response = await self._served.infer(request, self._caller, self._sequence)
                said = self._form.write(response)
        except ServiceError as fault:
            said, last = self._form.write_fault(fault, request_id), not self._sequence.is_open
        return {"type": "websocket.send", "text" if isinstance(said, str) else "bytes": said}, last

    async def _write(self, send: Send, message: Message) -> None:
        try:
            async with asyncio.timeout(self._limits.write_seconds):
                await send(message)
        except OSError as error:  # it has gone, or reads nothing (TimeoutError)
            raise _Over(None) from error


def _leaves(group: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    """Yield the exceptions in a group, and in groups inside it."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
