"""gRPC's server in this process, with methods of the test's own, and a client that writes frames as it likes."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import Any

import grpc

from batchmaker.server.access.auth import KeyRing
from batchmaker.server.access.connections import Connections
from batchmaker.server.access.request_body import BodyBudget
from batchmaker.server.config import Config, GrpcConfig, TlsConfig
from batchmaker.server.limits import Limits
from batchmaker.server.observe.spans import Spans
from batchmaker.server.rpc import frames
from batchmaker.server.rpc.schema import MESSAGES, SERVICE
from batchmaker.server.rpc.server import RpcServer
from batchmaker.server.service.site import CallAccess
from insides import calls_of, idle

LIMIT_S = 120.0
HEALTH = "grpc.health.v1.Health"
WATCH, CHECK, INFER = f"/{HEALTH}/Watch", f"/{HEALTH}/Check", f"/{SERVICE}/ModelInfer"
LIVE, STREAM = f"/{SERVICE}/ServerLive", f"/{SERVICE}/ModelStreamInfer"
SERVING = b"\x08\x01"
PING, ACK = 6, 1


class RpcInProcess:
    """A server whose inference waits until `open` is set. num_begun: requests that it has got."""

    def __init__(self, limits: Limits, pings: GrpcConfig, keys: dict[str, str], tls: TlsConfig) -> None:
        self.bodies = BodyBudget(limits)
        self.connections = Connections(limits.max_connections, limits.max_client_connections)
        self.open = asyncio.Event()
        self.open.set()
        self.ready = True
        self.num_begun = 0
        config = Config(grpc_port=0, grpc=pings, limits=limits, tls=tls)
        self.keys = KeyRing(keys)
        access = CallAccess(self.keys, self.bodies, Counter())
        unary = {"ServerLive": self._live, "ModelInfer": self.whole}
        self.server = RpcServer(
            config, access, Spans(enabled=False), self.connections, unary, self, lambda: self.ready
        )  # fmt: skip
        self.answered = access.answered
        self.address = self.server.address.partition("://")[2]

    async def _live(self, asked: Any, call: Any) -> dict[str, Any]:
        return {"live": True}

    def conversation(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def whole(self, asked: Any, call: Any) -> Any:
        self.num_begun += 1
        await self.open.wait()
        return MESSAGES["ModelInferResponse"](model_name=asked.model_name, id=asked.id)

    async def parts(self, asked: Any, call: Any) -> AsyncIterator[Any]:
        yield await self.whole(asked, call)

    @property
    def calls(self) -> Any:
        """The calls that are open at the server."""
        return calls_of(self.server)

    @property
    def num_idle(self) -> int:
        """Connections without a call that has work."""
        return len(idle(self.calls))

    def connected(self, address: str = "127.0.0.1") -> RawClient:
        """A client of this address, all of which are this machine's."""
        host, _, port = self.address.rpartition(":")
        return RawClient(socket.create_connection((host, int(port)), LIMIT_S, source_address=(address, 0)))

    async def serves(self) -> None:
        """Another client is answered, and nothing is held but what is open."""
        async with grpc.aio.insecure_channel(self.address) as channel:
            assert await channel.unary_unary(LIVE)(b"", timeout=LIMIT_S)


@asynccontextmanager
async def running(
    *, pings: GrpcConfig | None = None, keys: dict[str, str] | None = None, tls: TlsConfig | None = None, **limits: Any
) -> AsyncIterator[RpcInProcess]:
    """Run a server with these limits."""
    made = RpcInProcess(Limits(**limits), pings or GrpcConfig(), keys or {}, tls or TlsConfig())
    await made.server.start()
    try:
        async with asyncio.timeout(LIMIT_S):
            yield made
    finally:
        await made.server.close(0.0)


class RawClient:
    """A connection on which any frames can be sent. It reads in threads, so that the server goes on."""

    def __init__(self, connection: socket.socket, *, begins: bool = True) -> None:
        self.socket = connection
        self._frames = frames.FrameScanner()
        self._came: list[tuple[int, int, int, bytes]] = []
        self._partial = b""
        if begins:
            self.send(frames.PREFACE, frames.frame(frames.SETTINGS, 0, 0), frames.frame(frames.SETTINGS, ACK, 0))

    def send(self, *parts: bytes) -> None:
        self.socket.sendall(b"".join(parts))

    def call(self, stream: int, path: str, message: bytes | None = None, **headers: str) -> None:
        """Begin a call; with a message it is whole."""
        self.send(head(stream, path, **headers))
        if message is not None:
            self.send(data(stream, framed(message), end=True))

    async def next(self, *kinds: int) -> tuple[int, int, int, bytes]:
        """Return the next frame of these kinds: kind, flags, stream, payload. EOFError at the end."""
        while True:
            while self._came:
                one = self._came.pop(0)
                if one[0] in kinds:
                    return one
            received = await asyncio.to_thread(self._receive)
            if not received:
                raise EOFError
            passed, pieces = self._frames.read(received)
            for piece in pieces:
                self._partial += passed[piece.begin : piece.end]
                if piece.ends:
                    self._came.append((piece.kind, piece.flags, piece.stream, self._partial[9:]))
                    self._partial = b""

    def _receive(self) -> bytes:
        try:
            return self.socket.recv(65536)
        except ConnectionError:
            return b""

    async def ended(self) -> bool:
        """Wait for the end of the connection."""
        try:
            await self.next()
        except EOFError:
            return True
        return False

    def close(self) -> None:
        self.socket.close()


@contextmanager
def closing(*clients: RawClient):
    """Close these clients at the end."""
    try:
        yield clients
    finally:
        for client in clients:
            client.close()


def head(stream: int, path: str, *, end: bool = False, flags: int = frames.END_HEADERS, **headers: str) -> bytes:
    """The frame that begins a call."""
    return frames.frame(frames.HEADERS, flags | end, stream, head_block(path, **headers))


def head_block(path: str, **headers: str) -> bytes:
    """The headers of a call."""
    standard = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "a", "te": "trailers"}
    standard["content-type"] = "application/grpc"
    more = {name.replace("_", "-"): value for name, value in headers.items()}
    return b"".join(frames.literal_header(name, value) for name, value in {**standard, **more}.items())


def framed(message: bytes, length: int | None = None) -> bytes:
    """A message as gRPC sends it; length: what it says it has."""
    return b"\0" + (len(message) if length is None else length).to_bytes(4, "big") + message


def data(stream: int, content: bytes, *, end: bool = False) -> bytes:
    """Frames with the content of a stream."""
    pieces = [content[at : at + 16_384] for at in range(0, len(content), 16_384)] or [b""]
    last = len(pieces) - 1
    return b"".join(
        frames.frame(frames.DATA, int(end and number == last), stream, piece) for number, piece in enumerate(pieces)
    )


def reset(stream: int) -> bytes:
    """The frame with which a client cancels a call."""
    return frames.frame(frames.RST_STREAM, 0, stream, (8).to_bytes(4, "big"))


def infer_message(size: int = 0, **fields: str) -> bytes:
    """A ModelInferRequest with about so many bytes of a tensor."""
    encoded: bytes = MESSAGES["ModelInferRequest"](
        model_name="m", raw_input_contents=[b"x" * size], **fields
    ).SerializeToString()
    return encoded
