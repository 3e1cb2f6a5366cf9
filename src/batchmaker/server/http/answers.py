"""HTTP answers: JSON, errors with their status, and streams of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, final

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from batchmaker.server.access.departure import unless_gone
from batchmaker.server.faults import STATUS, FaultKind, ServiceError
from batchmaker.server.formats.openai_errors import OPENAI, openai_error


def encoded(body: bytes, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer whose body is already JSON."""
    return Response(body, media_type="application/json", headers=headers)


def as_json(content: Any) -> Response:
    """Return an answer in JSON."""
    return encoded(msgspec.json.encode(content))


def error_answer(status: int, message: str, path: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return {"error": message}, or OpenAI's form of an error for the paths of its API."""
    body = openai_error(status, message) if path.startswith(OPENAI) else msgspec.json.encode({"error": message})
    return Response(body, status, media_type="application/json", headers=headers)


def fault_answer(fault: ServiceError, path: str) -> Response:
    """Return the answer for a call to this path that was refused or has failed."""
    headers: dict[str, str] = {}
    if fault.retry_after_s is not None:
        headers["Retry-After"] = str(fault.retry_after)
    if fault.kind is FaultKind.UNAUTHENTICATED:
        headers["WWW-Authenticate"] = "Bearer"
    if fault.kind is FaultKind.TOO_SLOW:
        headers["Connection"] = "close"
    return error_answer(STATUS[fault.kind], str(fault), path, headers)


@final
class EventStream(Response):
    """Server-sent events: each part as one `data:` line of JSON; an error after the first part is an event too."""

    media_type = "text/event-stream"

    def __init__(self, parts: AsyncIterator[bytes], write_seconds: float) -> None:
        """parts: an async generator; closed when the client leaves. write_seconds: for the client to take sent data."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._parts: Any = parts
        self._write_seconds = write_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await unless_gone(scope, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._parts) as parts:
            try:
                async for part in parts:
                    await self._write(send, b"data: " + part + b"\n\n")
            except ServiceError as fault:
                await self._write(send, b"data: " + msgspec.json.encode({"error": str(fault)}) + b"\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, event: bytes) -> None:
        try:
            async with asyncio.timeout(self._write_seconds):
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except TimeoutError as error:
            raise ConnectionAbortedError("the client does not take what it asked for") from error
