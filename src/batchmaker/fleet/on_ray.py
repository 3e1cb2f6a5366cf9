"""Replicas as actors of Ray: it places them, counts their cores and says when one has ended."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import resource
from collections.abc import Callable
from typing import Any, Final, final

import msgspec

from batchmaker.errors import OptionError, StoppedError, needing
from batchmaker.fleet.fleet import Running
from batchmaker.fleet.server import check_fleet, serve_fleet
from batchmaker.server.config import Config, ModelEntry

_LOG = logging.getLogger("batchmaker.fleet")
_START_S: Final = 900.0
"""Seconds for a replica to be placed and to load its models; the first start on a machine compiles for a minute."""

_SAY_S: Final = 30.0
_MORE_S: Final = 10.0
"""Seconds after `drain_seconds`, after which a replica that does not end is killed."""

_MEMORY_SHARE: Final = 0.8
"""How much of the free memory replicas may fill, with `replicas="auto"`."""


def import_ray() -> Any:
    """Return the package. MissingExtraError without it."""
    with needing("ray", "A fleet"):
        return importlib.import_module("ray")


def connect(address: str | None) -> Any:
    """Return Ray, joined to a cluster; without an address (RAY_ADDRESS counts as one) a cluster on this machine."""
    ray = import_ray()
    if not ray.is_initialized():
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        at_hand = {"include_dashboard": False} if address == "local" else {}
        os.environ.setdefault("RAY_worker_niceness", "0")  # else replicas, at 15, starve beside the front
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, **at_hand)
        except ConnectionError as error:
            raise OptionError(f"no Ray cluster answers at {address!r}: {error}") from None
    return ray


def cpus_of(config: Config) -> float:
    """Return the cores of one replica: its engines' compute threads, unless the settings say otherwise."""
    return config.fleet.cpus or float(max(_threads(model) for model in config.models))


def _threads(model: ModelEntry) -> int:
    """Return the compute threads of a model's engine in a replica, where "auto" makes use of what is reserved."""
    return (1 if model.workers == "auto" else model.workers) * (model.threads or 1)


@final
class ReplicaProcess:
    """The actor: one server, in a thread of the process that Ray has started for it.

    content: the settings, as JSON. keys: what it accepts. folder: in which paths of the settings are, if it exists.
    """

    def __init__(self, content: bytes, keys: dict[str, str], folder: str) -> None:
        with contextlib.suppress(OSError):
            os.chdir(folder)
        from batchmaker.server.observe import logs
        from batchmaker.server.thread import ServerThread

        ray = import_ray()
        config = msgspec.structs.replace(msgspec.json.decode(content, type=Config), host=ray.util.get_node_ip_address())
        logs.configure(config.log.level)
        self._server = ServerThread(config, keys)

    def start(self) -> tuple[list[str], int]:
        """Return the addresses, and the bytes of memory of this process, when requests are taken."""
        addresses = self._server.start()
        return addresses, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    def wait(self) -> bool:
        """Return when the server has ended, whether it has finished all that it had accepted."""
        return self._server.join()

    def stop(self) -> None:
        """Have it end in order."""
        self._server.stop()

    def node(self) -> str:
        """Return the id of the node where it runs."""
        return str(import_ray().get_runtime_context().get_node_id())


@final
class RayReplica:
    """One actor that takes requests: Running."""

    def __init__(self, ray: Any, actor: Any, addresses: list[str], drain_s: float) -> None:
        self._ray = ray
        self.actor = actor
        self._drain_s = drain_s
        self._end: asyncio.Future[None] = asyncio.ensure_future(self._wait())
        host, _, port = addresses[0].removeprefix("http://").rpartition(":")
        self.http = (host.strip("[]"), int(port))
        self.grpc = addresses[1] if len(addresses) > 1 else None

    async def _wait(self) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            await self.actor.wait.remote()

    async def ended(self) -> None:
        """Return when the process has ended, or its server."""
        await asyncio.shield(self._end)

    async def stop(self) -> None:
        """End in order."""
        with contextlib.suppress(self._ray.exceptions.RayError, TimeoutError):
            async with asyncio.timeout(self._drain_s + _MORE_S):
                await self.actor.stop.remote()
                await self.ended()

    async def node(self) -> str:
        """Return the id of the node where it runs."""
        return str(await self.actor.node.remote())

    def kill(self) -> None:
        """End at once."""
        self._end.cancel()
        self._ray.kill(self.actor)


@final
class RayLauncher:
    """Starts replicas on a Ray cluster: FleetLauncher. Settings' paths are looked for on the node of each replica."""

    def __init__(self, ray: Any, cpus: float, size: int | None = None) -> None:
        """cpus: of each replica. size: how many there will be, to be refused here if the cluster is too small."""
        self.keys: dict[str, str] = {}
        self._ray = ray
        self._cpus = cpus
        self._replica_bytes = 0
        total = float(ray.cluster_resources().get("CPU", 0))
        if size is not None and size * cpus > total:
            raise OptionError(
                f"{size} replicas of {cpus:g} cores each need {size * cpus:g}; the Ray cluster has {total:g}. Ask for "
                "fewer, or say --replicas auto, or set fleet.cpus (a part of a core) in the settings"
            )

    async def launch(self, number: int, config: Config) -> Running:
        """Return a replica that takes requests. Raises OptionError for settings, StoppedError if it does not start."""
        ray = self._ray
        threads = str(max(1, int(self._cpus)))
        kind = ray.remote(ReplicaProcess).options(
            num_cpus=self._cpus,
            max_concurrency=4,
            max_restarts=0,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": {"OMP_NUM_THREADS": threads}},
        )
        models = [msgspec.structs.replace(model, threads=model.threads or 1) for model in config.models]
        content = msgspec.json.encode(msgspec.structs.replace(config, models=models))
        actor = kind.remote(content, self.keys, os.getcwd())
        try:
            addresses, self._replica_bytes = await self._started(actor, number)
        except ray.exceptions.RayTaskError as error:
            ray.kill(actor)
            raise (error.cause if isinstance(error.cause, Exception) else StoppedError(str(error))) from None
        except ray.exceptions.RayError as error:
            ray.kill(actor)
            raise StoppedError(f"replica {number} ended before it was ready: {error}") from None
        except BaseException:
            ray.kill(actor)
            raise
        return RayReplica(ray, actor, addresses, config.limits.drain_seconds)

    async def _started(self, actor: Any, number: int) -> tuple[list[str], int]:
        ref = actor.start.remote()
        starting = asyncio.ensure_future(_awaited(ref))
        waited_s = 0.0
        try:
            while True:
                done, _ = await asyncio.wait((starting,), timeout=_SAY_S)
                if done:
                    result: tuple[list[str], int] = starting.result()
                    return result
                waited_s += _SAY_S
                if waited_s >= _START_S:
                    raise StoppedError(f"replica {number} has not started within {_START_S:g} seconds")
                _LOG.warning("replica is not ready yet", extra={"replica": number, "cpus_wanted": self._cpus})
        finally:
            starting.cancel()

    async def room(self, config: Config) -> int:
        """Return how many replicas fit: by cores, and by the memory that the first one took."""
        total = self._ray.cluster_resources()
        by_workers = int(float(total.get("CPU", 1)) // self._cpus)
        memory = float(total.get("memory", 0.0)) * _MEMORY_SHARE
        by_memory = int(memory // self._replica_bytes) if memory and self._replica_bytes else by_workers
        room = max(1, min(by_workers, by_memory))
        _LOG.info("replicas by room", extra={"replicas": room, "by_workers": by_workers, "by_memory": by_memory})
        return room


def launcher_for(config: Config, ray: Any) -> RayLauncher:
    """Return the launcher of a fleet with these settings. OptionError if they do not fit the cluster."""
    size = config.fleet.replicas
    return RayLauncher(ray, cpus_of(config), size if isinstance(size, int) else None)


def serve_on_ray(config: Config, on_ready: Callable[[list[str], int], None], read: Callable[[], Config]) -> bool:
    """Start or join a Ray cluster and serve there; see `serve_fleet`."""
    check_fleet(config)
    started_here = not import_ray().is_initialized()
    ray = connect(config.fleet.ray_address)
    try:
        return serve_fleet(config, launcher_for(config, ray), on_ready, read)
    finally:
        if started_here:
            ray.shutdown()


async def _awaited(ref: Any) -> Any:
    return await ref
