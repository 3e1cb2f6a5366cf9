"""Common handling of every gRPC call: its id, its key, its span, its log line, and the answer to its errors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

import grpc
from grpc import aio

from batchmaker.server.access.connections import Connections
from batchmaker.server.access.request_body import HeldBytes
from batchmaker.server.access.sender import HEADER as SENDER
from batchmaker.server.access.sender import NOBODY, Sender, forwarded_sender
from batchmaker.server.faults import STATUS, FaultKind, ServiceError, fault_of
from batchmaker.server.observe.request_ids import HEADER, RequestIds
from batchmaker.server.observe.spans import Spans
from batchmaker.server.rpc.connection import STREAM, RpcStream
from batchmaker.server.rpc.schema import decode
from batchmaker.server.service.site import CallAccess

_LOG = logging.getLogger("batchmaker.server")

CODE: Final[dict[FaultKind, grpc.StatusCode]] = {
    FaultKind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    FaultKind.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    FaultKind.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    FaultKind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    FaultKind.CONFLICT: grpc.StatusCode.ALREADY_EXISTS,
    FaultKind.TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    FaultKind.TOO_SLOW: grpc.StatusCode.DEADLINE_EXCEEDED,
    FaultKind.ENCODING: grpc.StatusCode.UNIMPLEMENTED,
    FaultKind.TOO_MANY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    FaultKind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    FaultKind.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    FaultKind.CANCELLED: grpc.StatusCode.CANCELLED,
    FaultKind.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    FaultKind.INTERNAL: grpc.StatusCode.INTERNAL,
}
_LOGGED: Final = {kind for kind, status in STATUS.items() if status >= 500} - {FaultKind.UNAVAILABLE}
"""As over HTTP: refusals of an overloaded server are counted and not logged."""

_PREFIX_BYTES: Final = 5
"""What gRPC puts before each message."""


@dataclass(frozen=True, slots=True)
class RpcService:
    """A service. open: its methods that need no key. calls: the count of those in progress, and their limits."""

    name: str
    messages: Mapping[str, Any]
    open: frozenset[str]
    calls: Connections


@final
class RpcCall:
    """One call. Messages are bytes here."""

    __slots__ = ("_calls", "_context", "_stream", "fault", "key", "metadata", "method", "request_id", "sender")

    def __init__(self, method: str, context: Any, handlers: RpcHandlers) -> None:
        self._context = context
        self._calls = handlers.service.calls
        self.method = method
        self.metadata = {name: value for name, value in context.invocation_metadata() if isinstance(value, str)}
        self._stream = handlers.stream_of(self.metadata.pop(STREAM, None))
        self.request_id = handlers.ids.of(self.metadata.get(HEADER))
        self.key = _key(self.metadata)
        self.sender = NOBODY
        self.fault: FaultKind | None = None

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the client's deadline, None without one."""
        seconds: float | None = self._context.time_remaining()
        return seconds

    @property
    def is_stream(self) -> bool:
        """Whether it carries many requests."""
        return self.method == "ModelStreamInfer"

    @property
    def client(self) -> str:
        """The client's address."""
        return "" if self._stream is None else self._stream.client

    def begin(self) -> None:
        """Count the call. UNAVAILABLE if its address, or all together, have as many as they may."""
        if self._stream is None:
            raise ServiceError(FaultKind.CANCELLED, "the client has gone")
        refused = self._calls.opened(self, self._stream.client)
        if refused is not None:
            raise ServiceError(FaultKind.UNAVAILABLE, refused, 1.0)
        self._calls.busy(self)

    def end(self, within_s: float) -> None:
        """Count the call until the client has taken the answer, for which it must take something every `within_s`."""
        if self._stream is not None:
            self._stream.answered(within_s, partial(self._calls.closed, self))

    @property
    def caller(self) -> str:
        """The holder of its key; "" without keys, and before `belongs_to`."""
        return self.sender.holder

    @property
    def connection(self) -> str:
        """The name of the client's connection."""
        return "" if self._stream is None else self._stream.connection

    def belongs_to(self, sender: Sender) -> None:
        """Note who calls: whose the bytes of its messages are."""
        self.sender = sender
        if self._stream is not None:
            self._stream.held.belongs_to(sender.client)

    def idle(self) -> None:
        """Note that the call does nothing but wait. It is ended if others need the room."""
        if self._stream is not None:
            self._calls.idle(self)
            self._stream.is_busy = False

    def busy(self) -> None:
        """Note that the call has work to do."""
        if self._stream is not None:
            self._calls.busy(self)
            self._stream.is_busy = True

    def close_idle(self) -> None:
        """End the call to make room for others."""
        assert self._stream is not None
        self._stream.refuse(ServiceError(FaultKind.UNAVAILABLE, "ended to make room for others; call again", 1.0))

    def hold(self, size: int) -> HeldBytes:
        """Return the count of a message's bytes, to be released. Those not held here count until the call ends."""
        assert self._stream is not None
        return self._stream.held.part(size + _PREFIX_BYTES)

    async def wait(self, *events: asyncio.Future[Any], within_s: float | None = None) -> None:
        """Wait until one of these is done, or the time is over. Raises the error with which the call must end."""
        assert self._stream is not None
        refusal = self._stream.refusal
        await asyncio.wait((*events, refusal), timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if refusal.done():
            raise refusal.result()

    async def read(self, within_s: float) -> bytes | None:
        """Return the next message, None if there is none. TOO_SLOW if it is not there in time."""
        reading = self._reading()
        await self.wait(reading, within_s=within_s)
        if not reading.done():
            raise _too_slow(within_s)
        return _message(reading)

    async def read_next(self, within_s: float, stop: asyncio.Future[None]) -> bytes | None:
        """Return the next message of many, None if there is no more or `stop` is done first.

        Waits as long as nothing comes. TOO_SLOW if a message that has begun to arrive is not there after `within_s`, or
        twice that at most.
        """
        reading, begun = self._reading(), False
        while True:
            await self.wait(reading, stop, within_s=within_s)
            if reading.done():
                return _message(reading)
            if stop.done():
                return None
            if begun:
                raise _too_slow(within_s)
            begun = self._stream is not None and self._stream.held.size > 0

    def _reading(self) -> asyncio.Future[Any]:
        # The read continues even if nobody waits any more: the core of gRPC still writes into the object.
        reading: asyncio.Future[Any] = asyncio.ensure_future(self._context.read())
        reading.add_done_callback(_noticed)
        return reading

    async def write(self, message: bytes, within_s: float) -> None:
        """Send one message of a stream. CANCELLED if the client does not take it in time."""
        writing = asyncio.ensure_future(self._context.write(message))
        writing.add_done_callback(_noticed)
        await asyncio.wait({writing}, timeout=within_s)
        if not writing.done():
            raise ServiceError(FaultKind.CANCELLED, "the client does not take what it asked for")
        writing.result()

    def send_id(self, *more: tuple[str, str]) -> None:
        """Send the id, and other metadata, after the answer."""
        self._context.set_trailing_metadata(((HEADER, self.request_id), *more))

    async def fail(self, fault: ServiceError) -> None:
        """End the call with an error. Raises the exception that ends it."""
        self.fault = fault.kind
        if fault.retry_after_s is not None:
            self.send_id(("retry-after", str(fault.retry_after)))
        ending = asyncio.ensure_future(self._context.abort(CODE[fault.kind], str(fault)))
        ending.add_done_callback(_noticed)
        if fault.kind is FaultKind.CANCELLED:  # nobody listens
            raise asyncio.CancelledError
        await ending


Answer = Callable[[Any, RpcCall], Awaitable[Any]]
"""Takes a message; returns the fields of the answer, or the answer, or its bytes."""


@final
class RpcHandlers:
    """Makes gRPC's handlers from functions. Exceptions of these become statuses."""

    def __init__(
        self,
        service: RpcService,
        access: CallAccess,
        spans: Spans,
        stream_of: Callable[[str | None], RpcStream | None],
        *,
        log_access: bool,
    ) -> None:
        """stream_of: finds the stream of a call by the value of its header STREAM."""
        self.service = service
        self._access = access
        self._spans = spans
        self.stream_of = stream_of
        self._log_access = log_access
        self.ids = RequestIds()
        self.num_active = 0

    def unary(self, method: str, answer: Answer) -> Any:
        """Return the handler of a method that takes one message and gives one."""
        messages = self.service.messages

        async def work(call: RpcCall) -> bytes:
            """Read the message, answer it, and return the encoded answer. CANCELLED if the client goes before."""
            data = await call.read(self._access.bodies.limits.body_seconds)
            if data is None:
                raise ServiceError(FaultKind.CANCELLED, "the client has gone")
            answered = await answer(decode(f"{method}Request", data, messages), call)
            if isinstance(answered, bytes):
                return answered
            if isinstance(answered, dict):
                answered = messages[f"{method}Response"](**answered)
            encoded: bytes = answered.SerializeToString()
            return encoded

        # a stream of requests for gRPC, to limit the time to send the only one; clients see no difference
        async def handle(_: Any, context: Any) -> bytes:
            encoded: bytes = await self._pass(RpcCall(method, context, self), work)
            return encoded

        return grpc.stream_unary_rpc_method_handler(handle)

    def stream(self, method: str, work: Callable[[RpcCall], Awaitable[None]]) -> Any:
        """Return the handler of a method that reads and writes itself."""

        async def handle(_: Any, context: Any) -> None:
            await self._pass(RpcCall(method, context, self), work)

        return grpc.stream_stream_rpc_method_handler(handle)

    async def _pass(self, call: RpcCall, work: Callable[[RpcCall], Awaitable[Any]]) -> Any:
        begin = time.perf_counter()
        self.num_active += 1
        call.send_id()
        try:
            with self._span(call):
                return await self._guarded(call, work)
        finally:
            self.num_active -= 1
            call.end(self._access.bodies.limits.write_seconds)
            self._access.answered["grpc", _code(call).name] += 1
            failed = call.fault in _LOGGED
            if self._log_access or failed:
                self._log(call, time.perf_counter() - begin, logging.WARNING if failed else logging.INFO)

    async def _guarded(self, call: RpcCall, work: Callable[[RpcCall], Awaitable[Any]]) -> Any:
        try:
            call.begin()
            if call.method not in self.service.open:
                call.belongs_to(self._sender(call))
            return await work(call)
        except asyncio.CancelledError:
            call.fault = FaultKind.CANCELLED
            raise
        except aio.InternalError:  # a read or write failed: the client has gone
            call.fault = FaultKind.CANCELLED
            raise asyncio.CancelledError from None
        except Exception as error:
            if not isinstance(error, ServiceError):
                _LOG.exception("call failed", extra={"request_id": call.request_id, "path": call.method})
            fault = fault_of(error)
        return await call.fail(fault)

    def _sender(self, call: RpcCall) -> Sender:
        holder = self._access.keys.caller(call.key)
        forwarded = call.metadata.get(SENDER) if self._access.keys.is_of_fleet else None
        return (
            Sender(holder, call.client, call.connection) if forwarded is None else forwarded_sender(holder, forwarded)
        )

    @contextlib.contextmanager
    def _span(self, call: RpcCall) -> Iterator[None]:
        if not self._spans.enabled:
            yield
            return
        service = self.service.name
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": call.method}
        with self._spans.call(f"{service}/{call.method}", call.metadata, attributes) as span:
            try:
                yield
            finally:
                span.set_attribute("rpc.grpc.status_code", _code(call).value[0])
                span.set_attribute("batchmaker.request_id", call.request_id)

    def _log(self, call: RpcCall, seconds: float, level: int) -> None:
        detail = {
            "request_id": call.request_id,
            "method": "gRPC",
            "path": f"/{self.service.name}/{call.method}",
            "status": _code(call).name,
            "ms": round(1e3 * seconds, 3),
            "client": call.client,
            "caller": call.caller,
        }
        _LOG.log(level, "call", extra=detail)


def _code(call: RpcCall) -> grpc.StatusCode:
    return grpc.StatusCode.OK if call.fault is None else CODE[call.fault]


def _key(metadata: dict[str, str]) -> str | None:
    """Return the API key in a call's metadata."""
    bearer = metadata.get("authorization", "")
    if "x-api-key" not in metadata and bearer[:7].lower() == "bearer ":
        return bearer[7:].strip()
    return metadata.get("x-api-key")


def _message(reading: asyncio.Future[Any]) -> bytes | None:
    data: Any = reading.result()
    return None if data is aio.EOF else data


def _too_slow(within_s: float) -> ServiceError:
    return ServiceError(FaultKind.TOO_SLOW, f"the message did not arrive within {within_s:g} seconds; send it faster")


def _noticed(future: asyncio.Future[Any]) -> None:
    """Consume the result of a read or write that nobody waits for any more."""
    if not future.cancelled():
        future.exception()
