"""Common handling of every gRPC call: its id, its key, its span, its log line, and the answer to its errors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, final

import grpc
from grpc import aio

from batchmaker.server.answers import STATUS
from batchmaker.server.faults import FaultKind, ServiceError, fault_of
from batchmaker.server.parts import CallAccess, forwarded_sender
from batchmaker.server.request_ids import HEADER, RequestIds
from batchmaker.server.rpc.schema import MESSAGES, SERVICE, decode
from batchmaker.server.sender import HEADER as SENDER
from batchmaker.server.sender import NOBODY, Sender, address_of_peer
from batchmaker.server.spans import Spans

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

_OPEN: Final = frozenset({"ServerLive", "ServerReady"})
"""Probes need no key."""


@final
class RpcCall:
    """One call. Messages are bytes here."""

    __slots__ = ("_context", "caller", "fault", "key", "metadata", "method", "request_id", "sender")

    def __init__(self, method: str, context: Any, ids: RequestIds) -> None:
        self._context = context
        self.method = method
        self.metadata = {name: value for name, value in context.invocation_metadata() if isinstance(value, str)}
        self.request_id = ids.of(self.metadata.get(HEADER))
        self.key = _key(self.metadata)
        self.caller = ""
        self.sender = NOBODY
        self.fault: FaultKind | None = None

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the client's deadline, None without one."""
        left: float | None = self._context.time_remaining()
        return left

    @property
    def is_stream(self) -> bool:
        """Whether it carries many requests."""
        return self.method == "ModelStreamInfer"

    @property
    def client(self) -> str:
        return str(self._context.peer())

    async def read(self, within_s: float | None, stop: asyncio.Future[None] | None = None) -> bytes | None:
        """Return the next message, None if there is no more or `stop` is done first. TOO_SLOW after `within_s`."""
        # The read continues even if nobody waits any more: the core of gRPC still writes into the object.
        reading = asyncio.ensure_future(self._context.read())
        reading.add_done_callback(_noticed)
        waited_for: set[asyncio.Future[Any]] = {reading} if stop is None else {reading, stop}
        await asyncio.wait(waited_for, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            if stop is not None and stop.done():
                return None
            raise ServiceError(
                FaultKind.TOO_SLOW, f"the message did not arrive within {within_s:g} seconds; send it faster"
            )
        data = reading.result()
        return None if data is aio.EOF else data

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
class RpcGate:
    """Makes gRPC's handlers from functions. Exceptions of these become statuses."""

    def __init__(self, access: CallAccess, spans: Spans, *, log_access: bool) -> None:
        self._access = access
        self._spans = spans
        self._log_access = log_access
        self._ids = RequestIds()
        self.num_active = 0

    def unary(self, method: str, answer: Answer) -> Any:
        """Return the handler of a method that takes one message and gives one."""

        async def work(call: RpcCall) -> bytes:
            data = await call.read(self._access.bodies.limits.body_seconds)
            if data is None:
                raise ServiceError(FaultKind.CANCELLED, "the client has gone")
            with self._access.bodies.holding() as held:
                held.add(len(data))
                answered = await answer(decode(f"{method}Request", data), call)
                if isinstance(answered, bytes):
                    return answered
                if isinstance(answered, dict):
                    answered = MESSAGES[f"{method}Response"](**answered)
                encoded: bytes = answered.SerializeToString()
                return encoded

        # a stream of requests for gRPC, to limit the time to send the only one; clients see no difference
        async def handle(_: Any, context: Any) -> bytes:
            encoded: bytes = await self._pass(RpcCall(method, context, self._ids), work)
            return encoded

        return grpc.stream_unary_rpc_method_handler(handle)

    def stream(self, method: str, work: Callable[[RpcCall], Awaitable[None]]) -> Any:
        """Return the handler of a method that reads and writes itself."""

        async def handle(_: Any, context: Any) -> None:
            await self._pass(RpcCall(method, context, self._ids), work)

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
            self._access.answered["grpc", _code(call).name] += 1
            failed = call.fault in _LOGGED
            if self._log_access or failed:
                self._log(call, time.perf_counter() - begin, logging.WARNING if failed else logging.INFO)

    async def _guarded(self, call: RpcCall, work: Callable[[RpcCall], Awaitable[Any]]) -> Any:
        try:
            if call.method not in _OPEN:
                call.caller = self._access.keys.caller(call.key)
                call.sender = self._sender(call)
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
        forwarded = call.metadata.get(SENDER) if self._access.keys.is_of_fleet else None
        if forwarded is not None:
            return forwarded_sender(call.caller, forwarded)
        return Sender(call.caller, address_of_peer(call.client), call.client)

    @contextlib.contextmanager
    def _span(self, call: RpcCall) -> Iterator[None]:
        if not self._spans.enabled:
            yield
            return
        attributes = {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": call.method}
        with self._spans.call(f"{SERVICE}/{call.method}", call.metadata, attributes) as span:
            try:
                yield
            finally:
                span.set_attribute("rpc.grpc.status_code", _code(call).value[0])
                span.set_attribute("batchmaker.request_id", call.request_id)

    @staticmethod
    def _log(call: RpcCall, seconds: float, level: int) -> None:
        detail = {
            "request_id": call.request_id, "method": "gRPC", "path": f"/{SERVICE}/{call.method}",
            "status": _code(call).name, "ms": round(1e3 * seconds, 3), "client": call.client, "caller": call.caller,
        }  # fmt: skip
        _LOG.log(level, "call", extra=detail)


def _code(call: RpcCall) -> grpc.StatusCode:
    return grpc.StatusCode.OK if call.fault is None else CODE[call.fault]


def _key(metadata: dict[str, str]) -> str | None:
    """Return the API key in a call's metadata."""
    bearer = metadata.get("authorization", "")
    if "x-api-key" not in metadata and bearer[:7].lower() == "bearer ":
        return bearer[7:].strip()
    return metadata.get("x-api-key")


def _noticed(future: asyncio.Future[Any]) -> None:
    """Consume the result of a read or write that nobody waits for any more."""
    if not future.cancelled():
        future.exception()
