"""ModelStreamInfer: many requests over one call, computed together, with values as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, aclosing
from typing import Any, Final, Protocol, final

from batchmaker.server.access.request_body import HeldBytes
from batchmaker.server.faults import FaultKind, ServiceError, invalid
from batchmaker.server.formats.parameters import SequenceName, named_sequence
from batchmaker.server.rpc.handlers import RpcCall
from batchmaker.server.rpc.schema import MESSAGES, decode
from batchmaker.server.rpc.wire import FINAL, PARTS, parameters_of
from batchmaker.server.service.site import CallAccess


class StreamAnswers(Protocol):
    """Answers the requests of streams. Messages are ModelInferRequest and ModelInferResponse."""

    def conversation(self) -> AbstractContextManager[None]:
        """Count one stream as open. UNAVAILABLE if no new ones are taken."""

    async def whole(self, message: Any, call: RpcCall) -> Any:
        """Return the whole answer. Raises ServiceError."""

    def parts(self, message: Any, call: RpcCall) -> AsyncGenerator[Any, None]:
        """Yield the values as they are computed. Raises ServiceError. Closing the iterator gives the request up."""


@final
class _Part:
    """Chunks of one sequence in a stream, from one sequence_start on. is_broken: one of them has no result."""

    __slots__ = ("is_broken",)

    def __init__(self) -> None:
        self.is_broken = False


_Name = tuple[str, str, SequenceName]
"""Model, version and name of a sequence."""

_MOST_PARTS: Final = 4096
_BROKEN: Final = (
    "a request of this sequence that was sent before in this stream has no result; begin anew with sequence_start"
)


@final
class InferStream:
    """One call of ModelStreamInfer.

    Requests run as soon as they are read. Answers leave in the order of the requests, except for those requested in
    parts (PARTS): they leave as they come, and the id names their request. An error ends only its request, unless the
    message cannot be read at all.
    """

    def __init__(self, access: CallAccess, answers: StreamAnswers, call: RpcCall, stop: asyncio.Future[None]) -> None:
        """stop: done when no more requests may be read."""
        self._access = access
        self._answers = answers
        self._call = call
        self._stop = stop
        self._limits = access.bodies.limits
        self._room = asyncio.Semaphore(self._limits.max_in_flight)
        self._writing = asyncio.Lock()
        self._parts: dict[_Name, _Part] = {}
        self._num_open = 0
        self._held = 0  # bytes of requests that are not answered
        self._less_held = asyncio.Event()

    async def run(self) -> None:
        """Answer until the client has no more requests. Raises ServiceError: UNAVAILABLE if stopped before that."""
        try:
            with self._answers.conversation():
                async with asyncio.TaskGroup() as tasks:
                    await self._read_all(tasks)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        if self._stop.done():
            raise ServiceError(FaultKind.UNAVAILABLE, "the server is shutting down", retry_after_s=1.0)

    async def _read_all(self, tasks: asyncio.TaskGroup) -> None:
        """Start a task for each request.

        Reads no further while as many are open as a model may have in flight, or while they hold as many bytes as one
        may have: so a client that sends fast is slowed down, and none of its requests is refused for that.
        """
        answered = asyncio.Event()
        answered.set()
        first = True  # the call's key was checked at its beginning
        while (data := await self._read()) is not None:
            request = decode("ModelInferRequest", data)
            held = self._call.hold(len(data))
            self._held += held.size
            before = answered
            if _in_parts(request):
                tasks.create_task(self._answer(request, held, first, None, asyncio.Event()))
            else:
                answered = asyncio.Event()
                tasks.create_task(self._answer(request, held, first, before, answered))
            first = False

    async def _read(self) -> bytes | None:
        """Return the next message once there is room for it, None if there is no more."""
        while self._held > self._limits.max_body_bytes:
            self._less_held.clear()
            await self._less_held.wait()
        await self._room.acquire()
        if not self._num_open:
            self._call.idle()
        data = await self._call.read_next(self._limits.body_seconds, self._stop)
        self._call.busy()
        self._num_open += 1
        return data

    async def _answer(
        self, request: Any, held: HeldBytes, first: bool, before: asyncio.Event | None, answered: asyncio.Event
    ) -> None:
        """Answer one request: in parts, or as a whole after `before`. `answered` is set at the end in any case."""
        part = self._part_of(request)
        try:
            if part is not None and part.is_broken:
                raise invalid(_BROKEN)
            if not first:
                self._access.keys.caller(self._call.key)
            if before is None:
                await self._send_parts(request)
            else:
                await self._send_whole(request, before)
        except ServiceError as fault:
            if part is not None:
                part.is_broken = True
            if fault.kind is FaultKind.CANCELLED:
                raise
            if before is not None:
                await before.wait()
            await self._send_fault(request, fault)
        finally:
            answered.set()
            self._release(held)

    def _release(self, held: HeldBytes) -> None:
        """Note that a request has been answered."""
        self._held -= held.size
        held.release()
        self._less_held.set()
        self._room.release()
        self._num_open -= 1
        if not self._num_open:
            self._call.idle()

    def _part_of(self, request: Any) -> _Part | None:
        """Return the part of a sequence that the next request belongs to; None outside sequences."""
        parameters = parameters_of(request.parameters) if request.parameters else {}
        name = named_sequence(parameters)
        if name is None:
            return None
        key = (request.model_name, request.model_version, name)
        part = None if parameters.get("sequence_start") else self._parts.pop(key, None)
        part = part or _Part()
        if not parameters.get("sequence_end") or part.is_broken:
            self._parts[key] = part  # the last used one comes last
            if len(self._parts) > _MOST_PARTS:
                del self._parts[next(iter(self._parts))]
        return part

    async def _send_whole(self, request: Any, before: asyncio.Event) -> None:
        response = await self._answers.whole(request, self._call)
        await before.wait()
        await self._send(response, final=True)

    async def _send_parts(self, request: Any) -> None:
        async with aclosing(self._answers.parts(request, self._call)) as parts:
            async for part in parts:
                await self._send(part, final=False)
        await self._send(_empty(request), final=True)

    async def _send_fault(self, request: Any, fault: ServiceError) -> None:
        await self._send(_empty(request), final=True, error=str(fault))

    async def _send(self, response: Any, *, final: bool, error: str = "") -> None:
        response.parameters[FINAL].bool_param = final
        message = MESSAGES["ModelStreamInferResponse"](error_message=error, infer_response=response)
        async with self._writing:
            await self._call.write(message.SerializeToString(), self._limits.write_seconds)


def _in_parts(request: Any) -> bool:
    return PARTS in request.parameters and bool(request.parameters[PARTS].bool_param)


def _empty(request: Any) -> Any:
    """Return a response without outputs."""
    return MESSAGES["ModelInferResponse"](
        model_name=request.model_name, model_version=request.model_version, id=request.id
    )
