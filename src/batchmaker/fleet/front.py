"""The front of a fleet as an ASGI application: each call goes to a replica, and its answer comes back as it is."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple, TypeVar, final
from urllib.parse import quote

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from batchmaker.fleet.balancer import Balancer, Lease, Replica
from batchmaker.fleet.front_metrics import front_metrics
from batchmaker.fleet.links import Link
from batchmaker.fleet.routed_request import RoutedRequest, request_of_generate, request_of_infer
from batchmaker.fleet.sockets import relay_socket
from batchmaker.fleet.upstream import Headers, NoAnswerError, UpstreamAnswer
from batchmaker.server.access.departure import unless_gone
from batchmaker.server.access.sender import HEADER as SENDER
from batchmaker.server.access.sender import Sender, sender_of
from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.formats.infer_body import HEADER_LENGTH
from batchmaker.server.http.answers import as_json
from batchmaker.server.http.shared_connection import MOST_BODY_BYTES
from batchmaker.server.observe.request_ids import HEADER
from batchmaker.server.service.site import CallAccess

_MODEL: Final = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/(infer|generate|generate_stream|sequences?)")
_OPENAI: Final = frozenset({"/v1/completions", "/v1/audio/transcriptions"})
_REALTIME: Final = "/v1/realtime"
_BYTES_AN_ELEMENT: Final = 4
_ONE: Final = re.compile(r"/v2/replicas/([0-9]{1,12})(/.*)")
_OF_ONE: Final = re.compile(r"/|/v2/live|/v2/trace|/v2/models/(?:.*/)?stats")
"""What each replica has of its own."""

_LOADS: Final = re.compile(r"/v2/repository/models/.*")
_LENGTH: Final = HEADER_LENGTH.encode()
_KEPT: Final = frozenset({b"content-type", b"accept", b"traceparent", b"tracestate", _LENGTH})
"""Headers of a call that replicas get."""

_DROPPED: Final = frozenset({b"connection", b"keep-alive", b"transfer-encoding", HEADER.encode()})
"""Headers of an answer that clients do not get from the replica: the front has its own."""

_Given = TypeVar("_Given")

TRIES: Final = 2
"""A request that its replica has not answered is sent to one other replica, where that is safe; see `ask_one`."""

_JUDGED_S: Final = 10.0
"""Seconds to find out whether a replica whose connection failed has ended."""


@final
class Front:
    """Routes calls. It belongs behind a `CallMiddleware`, which checks keys and answers errors.

    on_suspect: called with a replica that did not answer. page: shown at /page.
    """

    def __init__(
        self,
        balancer: Balancer,
        access: CallAccess,
        on_suspect: Callable[[Replica], None],
        page: bytes | None = None,
    ) -> None:
        self.balancer = balancer
        self.access = access
        self.on_suspect = on_suspect
        self.draining = False
        self.num_retried = 0
        self.num_active = 0
        self.num_open = 0
        self._page = page

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return not self.draining and self.balancer.work.num_open > 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_active += 1
        try:
            await self._answer(scope, receive, send)
        finally:
            self.num_active -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if not path.isprintable():
            raise HTTPException(404)  # "$" in a replica's routes lets a line end pass, which the patterns here do not
        match = _MODEL.fullmatch(path)
        if scope["type"] == "websocket" and (path == _REALTIME or (match and match[3] in ("sequence", "sequences"))):
            with self.conversation():
                await relay_socket(self.balancer, self.on_suspect, scope, receive, send)
        elif scope["type"] != "http":
            raise HTTPException(404)
        elif match is not None and scope["method"] == "POST":
            await self._infer(scope, receive, send, match)
        elif path in _OPENAI and scope["method"] == "POST":
            await self._openai(scope, receive, send)
        elif (own := self._own(path)) is not None:
            await own(scope, receive, send)
        else:
            await self._other(scope, receive, send, path)

    @contextmanager
    def conversation(self) -> Iterator[None]:
        """Count a WebSocket or a stream as open. UNAVAILABLE if the fleet is shutting down."""
        self._check_open()
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    def check_taken(self, request: RoutedRequest, *, goes_on: bool = False) -> None:
        """Raise UNAVAILABLE for a new request if the fleet is shutting down. goes_on: in an open conversation."""
        if not goes_on and (request.chunk is None or request.chunk.start):
            self._check_open()

    async def hang_up(self) -> None:
        """Close the WebSockets that are still open, and tell why."""
        links: list[Link] = [replica.link for replica in self.balancer.replicas.values()]
        sockets = [socket for link in links for socket in link.sockets]
        await asyncio.gather(*(socket.close(1001, "the server is being stopped") for socket in sockets))

    def _check_open(self) -> None:
        if self.draining:
            raise ServiceError(FaultKind.UNAVAILABLE, "the server is shutting down", 1.0)

    # --- inference ----------------------------------------------------------------------------------------------------

    async def _infer(self, scope: Scope, receive: Receive, send: Send, match: re.Match[str]) -> None:
        model, version, kind = match.groups()
        if not self.balancer.has_named:
            self._check_open()  # before the body is read
        with self.access.bodies.holding(sender_of(scope, self.access.keys).client) as held:
            body = await held.read(Request(scope, receive, send))
            if kind == "infer":
                request = request_of_infer(model, version, body, _header_length(scope))
            else:
                request = request_of_generate(model, version, body)
            self.check_taken(request)
            onward, caller = _onward(scope), scope["state"]["caller"]
            if request.chunk is not None:
                onward.headers.append((SENDER.encode(), sender_of(scope, self.access.keys).forwarded.encode("latin-1")))
            alone = kind == "generate_stream" or len(body) > MOST_BODY_BYTES

            async def ask(lease: Lease) -> UpstreamAnswer:
                link: Link = lease.replica.link
                headers = onward.headers_with(link.key_of(caller))
                if alone:
                    return await link.http.call(onward.head(headers, len(body)), body)
                return await link.shared.call(onward.target, headers, body)

            await unless_gone(scope, self._relayed(request, ask, scope, send))

    async def _openai(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have a replica answer a call in the form of OpenAI's API. Which model it names, the replica reads."""
        self._check_open()
        with self.access.bodies.holding(sender_of(scope, self.access.keys).client) as held:
            body = await held.read(Request(scope, receive, send))
            request = RoutedRequest(scope["path"], None, max(1, len(body) // _BYTES_AN_ELEMENT), None)
            onward, caller = _onward(scope), scope["state"]["caller"]

            async def ask(lease: Lease) -> UpstreamAnswer:
                link: Link = lease.replica.link
                return await link.http.call(onward.head(onward.headers_with(link.key_of(caller)), len(body)), body)

            await unless_gone(scope, self._relayed(request, ask, scope, send))

    async def _relayed(
        self, request: RoutedRequest, ask: Callable[[Lease], Awaitable[UpstreamAnswer]], scope: Scope, send: Send
    ) -> None:
        """Send the answer on; while it is a stream, its request is one of its replica's."""
        lease, answer = await self.ask_one(request, ask, sender_of(scope, self.access.keys))
        if answer.parts is None:
            lease.end(answered=answer.status < 400)  # the replica has done with it, however long the client reads
            await _start(answer, send)
            await send({"type": "http.response.body", "body": answer.body or b""})
            return
        answered = False
        try:
            await _start(answer, send)
            answered = await _send_events(answer.parts, send, self.access.bodies.limits.write_seconds)
        finally:
            lease.end(answered=answered)

    async def ask_one(
        self, request: RoutedRequest, ask: Callable[[Lease], Awaitable[_Given]], sender: Sender
    ) -> tuple[Lease, _Given]:
        """Return the place and the answer of a request: of another replica if the first one has not got it, or goes on.

        A replica that has ended may have ended because of one of the requests that it had, which must not end others
        too. A chunk of a sequence is not tried again: its state has gone with the replica. Raises ServiceError. The
        caller ends the lease.
        """
        for number in range(1, TRIES + 1):
            lease = await self.balancer.take(request, sender)
            try:
                return lease, await ask(lease)
            except NoAnswerError as error:
                lease.end(answered=False)
                self.on_suspect(lease.replica)
                sent = error.sent
            except BaseException:
                lease.end(answered=False)
                raise
            if request.chunk is not None:
                raise ServiceError(
                    FaultKind.UNAVAILABLE,
                    "the replica that computed this request has ended, and the sequence with it; begin anew with "
                    "sequence_start",
                    1.0,
                )
            if sent and not await _goes_on(lease.replica):
                raise ServiceError(
                    FaultKind.UNAVAILABLE,
                    "the replica has ended while it had this request, which may be the cause: no other one gets it",
                )
            self.num_retried += number < TRIES
        raise ServiceError(FaultKind.UNAVAILABLE, "no replica could be reached with this request; try again", 1.0)

    # --- other calls --------------------------------------------------------------------------------------------------

    def _own(self, path: str) -> Response | None:
        """Return the answer to a call about the fleet itself, None for all others."""
        if path == "/v2/health/live":
            return Response()
        if path == "/v2/health/ready":
            return Response(status_code=200 if self.ready else 503)
        if path == "/v2/replicas":
            return as_json([_described(replica) for replica in self.balancer.replicas.values()])
        if path == "/metrics":
            return Response(front_metrics(self.balancer, self), media_type="text/plain; version=0.0.4")
        if path == "/page" and self._page is not None:
            return Response(self._page, media_type="text/html")
        return None

    async def _other(self, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        """Have one replica answer: the one that is named, or any."""
        if scope["method"] not in ("GET", "POST"):
            raise HTTPException(405, headers={"Allow": "GET, POST"})
        one, target = _ONE.fullmatch(path), _target(scope)
        if one is None:
            if _OF_ONE.fullmatch(path):
                raise ServiceError(
                    FaultKind.UNSUPPORTED,
                    f"each replica has its own {path}: GET /v2/replicas, then /v2/replicas/NUMBER{path}",
                )
            if _LOADS.fullmatch(path):
                raise unsupported_load()
            replica = self.balancer.any_open()
        else:
            named_replica = self.balancer.replicas.get(int(one[1]))
            if named_replica is None:
                raise ServiceError(FaultKind.NOT_FOUND, f"there is no replica {one[1]}; see GET /v2/replicas")
            if _LOADS.fullmatch(one[2]):
                raise unsupported_load()
            query: bytes = scope["query_string"]  # written anew: what was decoded here is what the replica must see
            replica, target = named_replica, quote(one[2]).encode() + (b"?" + query if query else b"")
        with replica.questioned(), self.access.bodies.holding(sender_of(scope, self.access.keys).client) as held:
            body = await held.read(Request(scope, receive, send))
            link: Link = replica.link
            onward = _onward(scope, target)
            head = onward.head(onward.headers_with(link.key_of(scope["state"]["caller"])), len(body))
            try:
                answer = await unless_gone(scope, link.http.call(head, body))
            except NoAnswerError:
                self.on_suspect(replica)
                raise ServiceError(FaultKind.UNAVAILABLE, "the replica has ended; try again", 1.0) from None
        await _start(answer, send)
        await send({"type": "http.response.body", "body": answer.body or b""})


async def _goes_on(replica: Replica) -> bool:
    """Return whether a replica takes requests after its connection has failed, once that is known."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_JUDGED_S):
            await replica.judged.wait()
    return replica.state == "open"


def unsupported_load() -> ServiceError:
    """Return the error for loading and unloading in a fleet."""
    return ServiceError(
        FaultKind.UNSUPPORTED,
        "a fleet's models change by a rolling update: change the settings and send SIGHUP, or deploy anew",
    )


def _described(replica: Replica) -> dict[str, object]:
    link: Link = replica.link
    return {
        "replica": replica.number,
        "state": replica.state,
        "address": f"http://{link.http.host}:{link.http.port}",
        "requests": replica.num_requests,
        "sequences": replica.num_sequences,
        "waiting_s": round(replica.work_us / 1e6, 6),
        "routed": replica.routed,
    }


def _target(scope: Scope) -> bytes:
    path: bytes = scope.get("raw_path") or scope["path"].encode("ascii", "replace")
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path


def _header_length(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == _LENGTH:
            return str(value.decode("latin-1"))
    return None


@final
class _Onward(NamedTuple):
    """What a replica gets of a call, without a key."""

    method: str
    target: bytes
    headers: Headers

    def headers_with(self, key: str) -> Headers:
        """Return the headers, with the key for calls of its holder."""
        return [*self.headers, (b"x-api-key", key.encode("latin-1"))]

    def head(self, headers: Headers, size: int) -> bytes:
        """Return the head of an HTTP request with a body of so many bytes."""
        lines = [
            b"%s %s HTTP/1.1\r\nhost: replica\r\ncontent-length: %d" % (self.method.encode(), self.target, size),
            *(b"%s: %s" % pair for pair in headers),
        ]
        return b"\r\n".join(lines) + b"\r\n\r\n"


def _onward(scope: Scope, target: bytes | None = None) -> _Onward:
    headers = [pair for pair in scope["headers"] if pair[0] in _KEPT]
    headers.append((HEADER.encode(), scope["state"]["request_id"].encode("ascii")))
    return _Onward(scope["method"], target or _target(scope), headers)


async def _start(answer: UpstreamAnswer, send: Send) -> None:
    headers: Headers = [(name, value) for name, value in answer.headers if name not in _DROPPED]
    if answer.body is not None and all(name != b"content-length" for name, _ in headers):
        headers.append((b"content-length", b"%d" % len(answer.body)))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})


async def _send_events(parts: AsyncGenerator[bytes], send: Send, write_seconds: float) -> bool:
    """Send a stream of events on, as they come. Returns whether the replica ended it; its loss is an event too."""
    answered = True
    try:
        async for part in parts:
            await _write(send, part, write_seconds)
    except NoAnswerError:
        answered = False
        error = {"error": "the replica that computed this request has ended; try again"}
        await _write(send, b"data: " + msgspec.json.encode(error) + b"\n\n", write_seconds)
    finally:
        await parts.aclose()
    await send({"type": "http.response.body", "body": b""})
    return answered


async def _write(send: Send, part: bytes, write_seconds: float) -> None:
    try:
        async with asyncio.timeout(write_seconds):
            await send({"type": "http.response.body", "body": part, "more_body": True})
    except TimeoutError as error:
        raise ConnectionAbortedError("the client does not take what it asked for") from error
