"""What parts written by hand cost beside the libraries that could replace them (decision 6).

    python benchmarks/hand_written.py --json FILE     # five minutes; --quick shows only that it works

Three comparisons: HTTP from a front to a replica beside aiohttp, the calls of front and replica over one connection
beside grpc.aio, and spans beside OpenTelemetry's ASGI middleware. The last needs opentelemetry-instrumentation-asgi and
opentelemetry-sdk. What is not installed is skipped.

One process serves all sides, on uvicorn and grpc.aio, and answers each call with its body; another one calls. All
figures but the last are processor time for each call, because it depends less than the last on what else the machine
does:

- `loop`: of the thread of the caller's event loop.
- `client`: of the caller's whole process. gRPC has threads of its own.
- `server`: of the server's whole process.
- `wall`: time that passed, divided by the number of calls.

Sides are measured in turn, and each figure is the median over rounds. Where the sides do not do the same, the library
has less to do: aiohttp gets its headers ready made, and a call of gRPC goes to a bare function that returns bytes, not
through an ASGI application with status and headers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

from batchmaker.cli.bench.load import quiet_interpreter
from batchmaker.fleet.shared_upstream import SharedUpstream
from batchmaker.fleet.upstream import Upstream
from batchmaker.server.access.auth import FRONT, KeyRing
from batchmaker.server.access.connections import Connections
from batchmaker.server.access.origins import Origins
from batchmaker.server.access.request_body import BodyBudget
from batchmaker.server.config import Config
from batchmaker.server.http.listener import http_listener
from batchmaker.server.http.middleware import CallMiddleware
from batchmaker.server.http.protocol import limited_protocol
from batchmaker.server.limits import Limits
from batchmaker.server.observe.spans import Spans
from engine_cost.measuring import say
from provenance import made_by

MEASURES: Final = (
    "src/batchmaker/fleet/upstream.py",
    "src/batchmaker/fleet/shared_upstream.py",
    "src/batchmaker/server/http/shared_connection.py",
    "src/batchmaker/server/http/joined_writes.py",
    "src/batchmaker/server/observe/spans.py",
    "benchmarks/hand_written.py",
)
PACKAGES: Final = ("aiohttp", "grpcio", "opentelemetry-sdk", "opentelemetry-instrumentation-asgi", "uvicorn", "uvloop")
FIGURES: Final = ("loop", "client", "server", "wall")
BODIES: Final = {"1 kB": 1 << 10, "64 kB": 1 << 16}
IN_FLIGHT: Final = (1, 64)
KEY: Final = "the key of the fleet itself"
TARGET: Final = "/v2/models/lstm/infer"
METHOD: Final = "/batchmaker.Calls/Post"
HEADERS: Final = {
    "content-type": "application/json",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "x-request-id": "0a1b2c3d-17",
    "x-api-key": "the key of a client of the fleet",
}
PAIRS: Final = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
Call = Callable[[bytes], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured: calls in a round, and rounds."""

    calls: int
    rounds: int


# --- the server -------------------------------------------------------------------------------------------------------


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the body."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def middleware(spans: Spans) -> CallMiddleware:
    """Return the project's handling of all calls, around an echo."""
    return CallMiddleware(echo, KeyRing({}), Origins((), only_this_machine=False), spans, log_access=False)


def apps() -> dict[str, ASGIApp]:
    """Return an application for each path: with no spans, the project's, and the library's, if it is installed.

    The exporter is the same: spans are made, and a processor that does nothing gets them.
    """
    found: dict[str, ASGIApp] = {"/none": middleware(Spans(enabled=False))}
    with contextlib.suppress(ImportError):
        from opentelemetry import trace
        from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
        from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

        provider = TracerProvider()
        provider.add_span_processor(SpanProcessor())
        trace.set_tracer_provider(provider)
        found["/own"] = middleware(Spans(enabled=True))
        found["/library"] = OpenTelemetryMiddleware(middleware(Spans(enabled=False)), exclude_spans=["receive", "send"])
        found["/library-as-it-comes"] = OpenTelemetryMiddleware(middleware(Spans(enabled=False)))
    return found


async def start_grpc() -> tuple[Any, int]:
    """Return a gRPC server with one method, and its port; None and 0 if gRPC is not installed."""
    try:
        import grpc
    except ImportError:
        return None, 0

    async def echoed(body: bytes, context: Any) -> bytes:
        return body

    service, _, method = METHOD[1:].partition("/")
    handler = grpc.unary_unary_rpc_method_handler(echoed)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


async def served(pipe: Connection) -> None:
    """Serve until the pipe is closed. It sends the two ports and the paths, then the processor time when asked."""
    by_path = apps()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await by_path.get(scope["path"], echo)(scope, receive, send)

    limits = Limits()
    connections = Connections(limits.max_connections, limits.max_client_connections)
    protocol = limited_protocol(BodyBudget(limits), connections, None, KeyRing({FRONT: KEY}))
    listener = http_listener(Config(port=0), app, protocol)
    bound = socket.create_server(("127.0.0.1", 0))
    rpc, rpc_port = await start_grpc()
    loop = asyncio.get_running_loop()

    def asked() -> None:
        try:
            pipe.recv()
            pipe.send(time.process_time())
        except (EOFError, OSError):
            loop.remove_reader(pipe.fileno())
            listener.should_exit = True

    loop.add_reader(pipe.fileno(), asked)
    pipe.send((bound.getsockname()[1], rpc_port, tuple(by_path)))
    gc.freeze()
    await listener.serve([bound])
    if rpc is not None:
        await rpc.stop(None)


def serve(pipe: Connection) -> None:
    """The server's process."""
    uvloop.run(served(pipe))


@dataclass(frozen=True, slots=True)
class Server:
    """The running server. paths: of its applications."""

    pipe: Connection
    port: int
    rpc_port: int
    paths: tuple[str, ...]

    def cpu_s(self) -> float:
        """Return the processor time that it has had."""
        self.pipe.send(None)
        return float(self.pipe.recv())


@contextlib.contextmanager
def running() -> Iterator[Server]:
    """Run the server in a process of its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,), daemon=True)
    process.start()
    there.close()
    try:
        yield Server(here, *here.recv())
    finally:
        here.close()
        process.join(10)


# --- the sides --------------------------------------------------------------------------------------------------------


def over_http(http: Upstream, target: str) -> Call:
    """Return a call as the front of a fleet makes it, its head included."""

    async def call(body: bytes) -> bytes:
        lines = [
            b"%s %s HTTP/1.1\r\nhost: replica\r\ncontent-length: %d" % (b"POST", target.encode(), len(body)),
            *(b"%s: %s" % pair for pair in PAIRS),
        ]
        return (await http.call(b"\r\n".join(lines) + b"\r\n\r\n", body)).body or b""

    return call


@contextlib.asynccontextmanager
async def upstream(server: Server) -> AsyncIterator[Call]:
    http = Upstream("127.0.0.1", server.port)
    yield over_http(http, TARGET)
    http.close()


@contextlib.asynccontextmanager
async def aiohttp_client(server: Server) -> AsyncIterator[Call]:
    """aiohttp without what a front has no use for: cookies, decompression, timers, headers of its own, redirects."""
    import aiohttp
    from yarl import URL

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
        skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
        auto_decompress=False,
    ) as session:
        url = URL(f"http://127.0.0.1:{server.port}{TARGET}")

        async def call(body: bytes) -> bytes:
            async with session.post(url, data=body, headers=HEADERS, allow_redirects=False) as answer:
                return await answer.read()

        yield call


@contextlib.asynccontextmanager
async def shared_upstream(server: Server) -> AsyncIterator[Call]:
    shared = SharedUpstream("127.0.0.1", server.port, lambda: KEY)

    async def call(body: bytes) -> bytes:
        return (await shared.call(TARGET.encode(), PAIRS, body)).body or b""

    yield call
    shared.close()


@contextlib.asynccontextmanager
async def grpc_aio(server: Server) -> AsyncIterator[Call]:
    from batchmaker.fleet.front_rpc import open_channel

    async with open_channel(f"grpc://127.0.0.1:{server.rpc_port}") as channel:
        method, metadata = channel.unary_unary(METHOD), (("target", TARGET), *HEADERS.items())

        async def call(body: bytes) -> bytes:
            return bytes(await method(body, metadata=metadata))

        yield call


# --- measuring --------------------------------------------------------------------------------------------------------


async def spent_us(call: Call, body: bytes, num_calls: int, in_flight: int, server: Server) -> list[float]:
    """Return the FIGURES of a call in microseconds, over so many calls with so many in flight."""

    async def one_after_another() -> None:
        for _ in range(num_calls // in_flight):
            if len(await call(body)) != len(body):
                raise RuntimeError("an answer is not the body that was sent")

    with quiet_interpreter():
        begun = (time.thread_time(), time.process_time(), server.cpu_s(), time.perf_counter())
        await asyncio.gather(*(one_after_another() for _ in range(in_flight)))
        ended = (time.thread_time(), time.process_time(), server.cpu_s(), time.perf_counter())
    return [1e6 * (end - begin) / num_calls for begin, end in zip(begun, ended, strict=True)]


async def in_turn(
    comparison: str, sides: dict[str, Call], body: str, in_flight: int, sizes: Sizes, server: Server
) -> list[dict[str, Any]]:
    """Return a row for each side: the medians over rounds, and the range of each figure."""
    found: dict[str, list[list[float]]] = {name: [] for name in sides}
    for number in range(sizes.rounds + 1):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            one = await spent_us(sides[name], bytes(BODIES[body]), sizes.calls, in_flight, server)
            if number:  # the round before the first warms up
                found[name].append(one)
    rows = []
    for name, rounds in found.items():
        least, middle, most = np.percentile(np.array(rounds), (0, 50, 100), axis=0).round(1).tolist()
        row: dict[str, Any] = {"comparison": comparison, "side": name, "body": body, "in_flight": in_flight}
        row["us"] = dict(zip(FIGURES, middle, strict=True))
        row["range_us"] = dict(zip(FIGURES, zip(least, most, strict=True), strict=True))
        rows.append(row)
        say(f"{comparison}, {body}, {in_flight} in flight, {name}: {row['us']}")
    return rows


async def compared(comparison: str, ways: dict[str, Any], sizes: Sizes, server: Server) -> list[dict[str, Any]]:
    """Measure sides at all sizes of a body and numbers in flight. ways: what opens each side. [] if one is missing."""
    rows: list[dict[str, Any]] = []
    async with contextlib.AsyncExitStack() as stack:
        try:
            sides = {name: await stack.enter_async_context(way(server)) for name, way in ways.items()}
        except ImportError as error:
            say(f"{comparison}: skipped, {error}")
            return []
        for body in BODIES:
            for in_flight in IN_FLIGHT:
                rows += await in_turn(comparison, sides, body, in_flight, sizes, server)
    return rows


async def spans(sizes: Sizes, server: Server) -> list[dict[str, Any]]:
    """Measure what a request costs the server with spans of each kind, and with none."""
    if "/library" not in server.paths:
        say("spans: skipped, they need opentelemetry-sdk and opentelemetry-instrumentation-asgi")
        return []
    http, rows = Upstream("127.0.0.1", server.port), []
    sides = {path[1:]: over_http(http, path) for path in server.paths}
    for in_flight in IN_FLIGHT:
        rows += await in_turn("spans", sides, "1 kB", in_flight, sizes, server)
    http.close()
    return rows


async def measure(sizes: Sizes) -> list[dict[str, Any]]:
    """Return the rows of all comparisons."""
    with running() as server:
        http = {"fleet/upstream.py": upstream, "aiohttp": aiohttp_client}
        shared = {"shared_connection.py": shared_upstream, "grpc.aio": grpc_aio}
        return [
            *await compared("HTTP to a replica", http, sizes, server),
            *await compared("calls over one connection", shared, sizes, server),
            *await spans(sizes, server),
        ]


def versions() -> dict[str, str | None]:
    """Return the versions of what was compared, None for what is not installed."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        found[name] = None
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--quick", action="store_true", help="so little that it only shows that it works")
    settings = parser.parse_args()
    torch.set_num_threads(1)
    sizes = Sizes(64, 1) if settings.quick else Sizes(2048, 7)
    result = {**made_by(MEASURES), "versions": versions(), "calls": sizes.calls, "rounds": sizes.rounds}
    result |= {"rows": uvloop.run(measure(sizes)), "load_average_after": round(os.getloadavg()[0], 2)}
    text = json.dumps(result, indent=1)
    if settings.json is None:
        print(text)
    else:
        settings.json.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
