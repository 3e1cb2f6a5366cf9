"""Common handling of every HTTP call: its id, its key, its span, its log line, and the answer to its errors."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, final

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchmaker.server.access.auth import KeyRing
from batchmaker.server.access.origins import Origins
from batchmaker.server.faults import STATUS, FaultKind, ServiceError
from batchmaker.server.http.answers import error_answer, fault_answer
from batchmaker.server.observe.request_ids import RequestIds
from batchmaker.server.observe.spans import Spans
from batchmaker.server.service.service import AnsweredCalls

_LOG = logging.getLogger("batchmaker.server")
OPEN_PATHS: Final = frozenset({"/", "/page", "/v2/health/live", "/v2/health/ready"})
"""Calls without a key: probes, and a browser's request for a page. The page's later calls need one."""

_FREE_PATHS: Final = frozenset({"/metrics"})
"""Calls that do not count towards the rate of their key, so that monitoring works when the rate is used up."""

_REFUSED: Final = STATUS[FaultKind.UNAVAILABLE]
"""Counted and not logged: an overloaded server must not spend time on a log line for each."""

_STARTS: Final = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})
_UPGRADED: Final = 101
_LAST_WORD_S: Final = 1.0
_KEY_PROTOCOL: Final = "batchmaker.key."
"""The prefix of an API key in base64url, as a subprotocol of a WebSocket: pages cannot set headers."""

_OPENAI_KEY_PROTOCOL: Final = "openai-insecure-api-key."
"""The same in OpenAI's realtime API, whose clients send the key as it is."""


@final
class CallMiddleware:
    """An ASGI application around another. It handles all exceptions of the inner one."""

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        origins: Origins,
        spans: Spans,
        *,
        log_access: bool,
        open_paths: frozenset[str] = OPEN_PATHS,
        answered: AnsweredCalls | None = None,
    ) -> None:
        """origins: asked while there are no keys. open_paths: what anybody may call. answered: counts calls."""
        self._app = app
        self._open_paths = open_paths
        self._keys = keys
        self._origins = origins
        self._spans = spans
        self._log_access = log_access
        self._answered: AnsweredCalls = Counter() if answered is None else answered
        self._ids = RequestIds()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return
        scope.setdefault("method", "GET")  # a WebSocket begins as a GET
        call = _Call(scope, send, self._ids.of(sent_id_in(scope["headers"])))
        begin = time.perf_counter()
        if self._spans.enabled:
            carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            attributes = {"http.request.method": scope["method"], "url.path": scope["path"]}
            with self._spans.call(f"{scope['method']} {scope['path']}", carrier, attributes) as span:
                await self._answer(call, receive)
                span.set_attribute("http.response.status_code", call.status)
                span.set_attribute("batchmaker.request_id", call.request_id)
        else:
            await self._answer(call, receive)
        if call.status:
            self._answered["http", str(call.status)] += 1
        if self._log_access or (call.status >= 500 and call.status != _REFUSED):
            self._log(call, time.perf_counter() - begin)

    async def _answer(self, call: _Call, receive: Receive) -> None:
        path, headers = call.scope["path"], call.scope["headers"]
        try:
            if path not in self._open_paths:
                if self._keys.open:
                    self._origins.check(headers)
                else:
                    call.key = key_in(headers) or key_in_protocols(call.scope.get("subprotocols", ()))
                    call.caller = self._keys.caller(call.key, counted=path not in _FREE_PATHS)
            call.scope["app"] = self  # so that the router raises when it finds no route
            call.scope["state"] = {"request_id": call.request_id, "caller": call.caller, "key": call.key}
            await self._app(call.scope, receive, call.send)
        except ServiceError as fault:
            if fault.kind is FaultKind.CANCELLED:
                call.status = STATUS[fault.kind]  # nobody is there to receive an answer
            else:
                await call.fail(receive, fault_answer(fault, path))
        except HTTPException as error:
            await call.fail(receive, _routing_error(call.scope, error))
        except asyncio.CancelledError:  # the server stops, and the time of this call is over
            await call.fail(
                receive, fault_answer(ServiceError(FaultKind.UNAVAILABLE, "the server is shutting down", 1.0), path)
            )
        except Exception as error:
            if not isinstance(error, ConnectionError):
                _LOG.exception("call failed", extra={"request_id": call.request_id, "path": call.scope["path"]})
            await call.fail(
                receive, error_answer(500, "the server failed; its log says more under this request's id", path)
            )

    def _log(self, call: _Call, seconds: float) -> None:
        level = logging.WARNING if call.status >= 500 else logging.INFO
        client = call.scope.get("client")
        detail = {
            "request_id": call.request_id,
            "method": call.scope["method"],
            "path": call.scope["path"],
            "status": call.status,
            "ms": round(1e3 * seconds, 3),
            "client": client[0] if client else "",
            "caller": call.caller,
        }
        _LOG.log(level, "call", extra=detail)


@final
class _Call:
    """One call, and the progress of its answer."""

    __slots__ = ("_closed", "_send", "caller", "key", "request_id", "scope", "status")

    def __init__(self, scope: Scope, send: Send, request_id: str) -> None:
        self.scope = scope
        self.request_id = request_id
        self.caller = ""
        self.key: str | None = None
        self.status = 0
        self._closed = False
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] in _STARTS:
            self.status = message.get("status", _UPGRADED)
            message["headers"] = [*message["headers"], (b"x-request-id", self.request_id.encode("ascii"))]
        self._closed = self._closed or message["type"] == "websocket.close"
        await self._send(message)

    async def fail(self, receive: Receive, answer: Any) -> None:
        """Answer with an error. If an answer has begun, break it off, so that it does not look complete."""
        if self.status == _UPGRADED:
            await self._hang_up(answer.status_code)
            return
        if self.status:
            raise ConnectionAbortedError("an answer that had begun could not be finished")
        await answer(self.scope, receive, self.send)

    async def _hang_up(self, status: int) -> None:
        """Close an open WebSocket. A client that is connecting gets the reason."""
        if self._closed:
            return
        code, reason = (1001, "the server is being stopped") if status == _REFUSED else (1011, "the server failed")
        with contextlib.suppress(OSError):
            async with asyncio.timeout(_LAST_WORD_S):
                await self.send({"type": "websocket.close", "code": code, "reason": reason})


def sent_id_in(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """Return the id in a call's headers."""
    for name, value in headers:
        if name == b"x-request-id":
            return str(value.decode("latin-1"))
    return None


def key_in(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """Return the API key in a call's headers."""
    for name, value in headers:
        if name == b"x-api-key":
            return str(value.decode("latin-1"))
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return str(value[7:].strip().decode("latin-1"))
    return None


def key_in_protocols(protocols: Sequence[str]) -> str | None:
    """Return the API key among the subprotocols that a WebSocket offers."""
    for protocol in protocols:
        if protocol.startswith(_OPENAI_KEY_PROTOCOL):
            return protocol.removeprefix(_OPENAI_KEY_PROTOCOL)
        if protocol.startswith(_KEY_PROTOCOL):
            coded = protocol.removeprefix(_KEY_PROTOCOL)
            with contextlib.suppress(binascii.Error, ValueError):
                return base64.urlsafe_b64decode(coded + "=" * (-len(coded) % 4)).decode()
    return None


def _routing_error(scope: Scope, error: HTTPException) -> Any:
    path = scope["path"]
    if error.status_code == 404:
        return error_answer(404, f"there is no {scope['method']} {scope['path'][:128]} here; see GET /v2", path)
    if error.status_code == 405:
        return error_answer(405, f"{scope['method']} is not allowed here", path, error.headers)
    return error_answer(error.status_code, str(error.detail), path, error.headers)
