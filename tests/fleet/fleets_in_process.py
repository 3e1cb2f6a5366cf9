"""Fleets whose replicas are real servers in threads of this process, each behind a cable that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec

from batchmaker.fleet.server import FleetServer
from batchmaker.server.config import Config, FleetConfig, ModelEntry
from batchmaker.server.limits import Limits
from batchmaker.server.thread import ServerThread
from waiting import until

LIMIT_S = 120.0


class Cable:
    """Carries bytes to a server. Cut, it looks like a process that was killed: connections end, and none is made."""

    def __init__(self, host: str, port: int) -> None:
        self._to = host, port
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._is_cut = False
        self.num_connections = 0

    async def open(self) -> tuple[str, int]:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[:2]

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self.num_connections += 1
        try:
            there, back = await asyncio.open_connection(*self._to)
        except OSError:
            self._writers.discard(writer)
            writer.transport.abort()
            return
        self._writers.add(back)
        if self._is_cut:
            self.cut()
        await asyncio.gather(self._pipe(reader, back), self._pipe(there, writer))
        for end in (writer, back):
            self._writers.discard(end)
            end.transport.abort()

    @staticmethod
    async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    def cut(self) -> None:
        self._is_cut = True
        if self._server is not None:  # asyncio leaves open what is just being accepted where the server closes
            loop = asyncio.get_running_loop()
            for listener in self._server.sockets:
                loop.remove_reader(listener.fileno())
            loop.call_soon(self._server.close)
        for writer in self._writers:
            writer.transport.abort()

    def hang_up(self) -> None:
        """End all connections; new ones can be made."""
        for writer in self._writers:
            writer.transport.abort()

    async def over(self) -> None:
        """Wait until nothing is carried any more."""
        for _ in range(10):  # who was just accepted is carried, too, a few turns later
            await asyncio.sleep(0)
        await until(lambda: not self._writers)


class ThreadReplica:
    """A replica in this process: Running."""

    def __init__(self, thread: ServerThread, cables: list[Cable]) -> None:
        self.config: Config
        self.thread = thread
        self.cables = cables
        self.http = ("", 0)
        self.grpc: str | None = None
        self._over = asyncio.Event()
        self._told = False

    async def ended(self) -> None:
        await self._over.wait()

    def stop_once(self) -> None:
        if not self._told:
            self._told = True
            self.thread.stop()

    async def stop(self) -> None:
        self.stop_once()
        await asyncio.to_thread(self.thread.join)

    def kill(self) -> None:
        for cable in self.cables:
            cable.cut()
        self.stop_once()

    def die(self, *, silently: bool = False) -> None:
        """Cut it off; silently: whoever started it is not told."""
        for cable in self.cables:
            cable.cut()
        if not silently:
            self._over.set()


class ThreadLauncher:
    """Starts them: FleetLauncher. started: all so far, by number. hold: new ones wait for it."""

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}
        self.started: dict[int, ThreadReplica] = {}
        self.hold = asyncio.Event()
        self._one = asyncio.Lock()  # torch.export reads one model at a time in a process
        self.hold.set()

    async def launch(self, number: int, config: Config) -> ThreadReplica:
        await self.hold.wait()
        thread = ServerThread(config, self.keys)
        async with self._one:
            addresses = await asyncio.to_thread(thread.start)
        cables, at = [], []
        for address in addresses:
            host, _, port = address.partition("://")[2].rpartition(":")
            cables.append(Cable(host, int(port)))
            at.append(await cables[-1].open())
        replica = self.started[number] = ThreadReplica(thread, cables)
        replica.config = config
        replica.http = at[0]
        replica.grpc = f"grpc://{at[1][0]}:{at[1][1]}" if len(at) > 1 else None
        return replica

    async def room(self, config: Config) -> int:
        return 2


class RunningFleet:
    """A fleet that takes requests, and a plain client for it."""

    def __init__(self, server: FleetServer, launcher: ThreadLauncher, addresses: list[str]) -> None:
        self.server = server
        self.launcher = launcher
        self.http = addresses[0]
        self.grpc = addresses[1].removeprefix("grpc://") if len(addresses) > 1 else ""
        self.client = httpx.AsyncClient(base_url=self.http, timeout=LIMIT_S, limits=httpx.Limits(max_connections=200))

    @property
    def replicas(self) -> dict[int, ThreadReplica]:
        """The processes of those that take requests."""
        return {number: self.launcher.started[number] for number in self.server.balancer.replicas}

    async def generate(self, model: str, given: object, **parameters: object) -> httpx.Response:
        body = {"input_0": given, "parameters": parameters}
        return await self.client.post(f"/v2/models/{model}/generate", json=body)

    async def wait_for(self, holds: Callable[[], bool]) -> None:
        await until(holds, LIMIT_S)


def fleet_config(
    *models: object, fleet: FleetConfig | None = None, limits: Limits | None = None, **more: object
) -> Config:
    entries = [ModelEntry(source=str(model), threads=1) for model in models]
    limits = limits or Limits(drain_seconds=LIMIT_S, sequence_idle_seconds=3600)
    config = Config(port=0, models=entries, limits=limits, fleet=fleet or FleetConfig(replicas=2))
    return msgspec.structs.replace(config, **more)


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[RunningFleet]:
    """Start a fleet; end it, and what it has started, afterwards."""
    launcher = ThreadLauncher()
    server = FleetServer(config, launcher)
    fleet = RunningFleet(server, launcher, await server.start())
    try:
        yield fleet
    finally:
        await fleet.client.aclose()
        launcher.hold.set()
        await server.stop()
        for replica in launcher.started.values():
            for cable in replica.cables:
                cable.cut()
                await cable.over()
            replica.stop_once()
            await asyncio.to_thread(replica.thread.join)


def played(scenario: Callable[[RunningFleet], Awaitable[Any]], config: Config) -> Any:
    """Run a scenario with a running fleet, and return its result."""

    async def play() -> Any:
        async with running(config) as fleet:
            async with asyncio.timeout(2 * LIMIT_S):
                return await scenario(fleet)

    return asyncio.run(play())
