"""A fleet's front as a server: its ports, keys and limits, and its life from start to end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, final

import msgspec
import uvloop

from batchmaker.errors import BatchmakerError, OptionError, needing
from batchmaker.fleet.balancer import Balancer
from batchmaker.fleet.fleet import Fleet, Launcher
from batchmaker.fleet.front import Front
from batchmaker.fleet.keys import FleetKeys
from batchmaker.fleet.scaling import ScalingRule
from batchmaker.server.access.auth import FRONT, KeyRing
from batchmaker.server.access.connections import Connections
from batchmaker.server.access.origins import Origins
from batchmaker.server.access.request_body import BodyBudget
from batchmaker.server.config import AuthConfig, Config, FleetConfig, TlsConfig, check_config
from batchmaker.server.http.listener import HttpListener, http_listener
from batchmaker.server.http.middleware import CallMiddleware
from batchmaker.server.http.protocol import limited_protocol
from batchmaker.server.http.refusals import Refusals
from batchmaker.server.listening import LAST_ANSWERS_S, LAST_WRITES_S, LOOPBACK, address_of, bind
from batchmaker.server.observe import logs
from batchmaker.server.observe.spans import Spans
from batchmaker.server.reload import use_certificate
from batchmaker.server.run import connections_of
from batchmaker.server.service.site import CallAccess

if TYPE_CHECKING:
    from batchmaker.server.rpc.server import RpcServer

_LOG = logging.getLogger("batchmaker.fleet")
_AT_ONCE_S: Final = 2.0


class FleetLauncher(Launcher, Protocol):
    """A launcher that knows how many replicas there is room for, and what they accept."""

    keys: dict[str, str]

    async def room(self, config: Config) -> int:
        """Return how many replicas fit in all, once one runs."""


def check_fleet(config: Config) -> ScalingRule | None:
    """Return the rule of scaling in the settings. OptionError for settings that a fleet cannot have."""
    check_config(config)
    fleet = config.fleet
    if isinstance(fleet.replicas, int) and fleet.replicas < 1:
        raise OptionError(f"a fleet has at least 1 replica, got {fleet.replicas}")
    if fleet.cpus is not None and fleet.cpus <= 0:
        raise OptionError(f"fleet.cpus must be above 0, got {fleet.cpus:g}")
    if config.admin_port is not None:
        raise OptionError("a fleet has no admin port: its front serves /metrics and /v2/replicas on its own port")
    return None if fleet.autoscale is None else ScalingRule.read(fleet.autoscale)


def replica_config(config: Config, *, has_keys: bool) -> Config:
    """Return the settings of one replica. What faces clients is the front's: its address, TLS, keys and page."""
    limits = config.limits
    of_one_caller = limits.max_key_sequences if has_keys else limits.max_sequences
    return msgspec.structs.replace(
        config,
        port=0,
        grpc_port=None if config.grpc_port is None else 0,
        hosts=[],
        page=None,
        replace_hung=False,
        auth=AuthConfig(),
        tls=TlsConfig(),
        fleet=FleetConfig(),
        limits=msgspec.structs.replace(
            limits,
            max_client_connections=limits.max_connections,
            max_total_body_bytes=2 * limits.max_total_body_bytes,  # the front, as one client, may hold half
            max_key_sequences=of_one_caller,
        ),
    )


@final
class FleetServer:
    """The front and its fleet. Used from one event loop; `app` is the front behind its middleware."""

    def __init__(self, config: Config, launcher: FleetLauncher) -> None:
        """Bind to the addresses. OptionError for settings that cannot be used."""
        rule = check_fleet(config)
        self._config = config
        self._launcher = launcher
        self._fleet_keys = FleetKeys()
        self._holders = config.auth.keys_and_rates()
        self._common_names = set(self._holders[0])  # to all replicas
        self._keys = KeyRing(*self._holders)
        access = CallAccess(self._keys, BodyBudget(config.limits), Counter())
        self.balancer = Balancer(
            config.fleet.router,
            config.limits.sequence_idle_seconds,
            most_requests=config.limits.max_in_flight,
        )
        self._is_auto = config.fleet.replicas == "auto"
        self.fleet = Fleet(
            self.balancer,
            launcher,
            self._for_replicas(config),
            self._fleet_keys.of,
            size=config.fleet.replicas if isinstance(config.fleet.replicas, int) else (rule.least if rule else 1),
            rule=rule,
            open_channel=None if config.grpc_port is None else _channels(),
        )
        page = None if config.page is None else Path(config.page).read_bytes()
        self.front = Front(self.balancer, access, self.fleet.suspect, page)
        only_this_machine = config.host in LOOPBACK
        if self._keys.open and not only_this_machine:
            _LOG.warning("anybody who reaches this address may call; set API keys", extra={"host": config.host})
        origins = Origins(config.hosts, config.auth.origins, only_this_machine=only_this_machine)
        spans = Spans(enabled=config.log.spans)
        open_paths = frozenset({"/page", "/v2/health/live", "/v2/health/ready"})
        self.app = CallMiddleware(
            self.front,
            self._keys,
            origins,
            spans,
            log_access=config.log.access,
            open_paths=open_paths,
            answered=access.answered,
        )
        self._socket: socket.socket = bind(config, config.port)
        every_call_is_told = config.log.access or spans.enabled
        refusals = None if every_call_is_told else Refusals(self.balancer.room_of, access.answered, self._keys)
        connections = connections_of(config)
        protocol = limited_protocol(access.bodies, connections, refusals)
        self.listener: HttpListener = http_listener(config, self.app, protocol)
        self._rpc = None if config.grpc_port is None else _make_rpc(config, access, spans, connections, self.front)
        self._serving: asyncio.Task[None] | None = None
        self.addresses: list[str] = []

    def _for_replicas(self, config: Config) -> Config:
        """Return the settings of replicas; what they accept is the launcher's from now on."""
        self._launcher.keys = self._fleet_keys.ring(self._holders[0])
        return replica_config(config, has_keys=bool(self._holders[0]))

    async def start(self) -> list[str]:
        """Start the replicas; return the front's addresses when it takes requests. Raises what starting raises."""
        try:
            await self.fleet.start()
            if self._is_auto and self._config.fleet.autoscale is None:
                self.fleet.resize(await self._launcher.room(self.fleet.config))
                await self.fleet.ready()
        except BaseException:
            self._socket.close()
            raise
        addresses = [address_of(self._config, self._socket)]
        if self._rpc is not None:
            await self._rpc.start()
            addresses.append(self._rpc.address)
        started = asyncio.Event()
        self.listener.on_started = started.set
        self._serving = asyncio.create_task(self.listener.serve(sockets=[self._socket]))
        await started.wait()
        self.addresses = addresses
        return addresses

    @property
    def is_listening(self) -> bool:
        """Whether the front takes calls."""
        return self._serving is not None and not self._serving.done()

    async def update(self, config: Config) -> None:
        """Have other models, keys and engines from now on, without a lost request: replicas are replaced one by one.

        Keys that are gone, or have changed, are so at once; those of new holders are taken when all replicas know
        them. A new certificate counts for new connections. Addresses, limits of the front and the router stay until the
        next start. Raises OptionError, and OSError for a certificate without use.
        """
        rule = check_fleet(config)
        new = config.auth.keys_and_rates()
        if self._keys.open and new[0]:
            raise OptionError("a fleet without API keys gets them at its next start, not while it serves")
        self._take_over_certificate(config)
        self._holders = new
        self._common_names &= new[0].keys()
        if new[0]:
            stay = {name: key for name, key in new[0].items() if name in self._common_names}
            stay = stay or {FRONT: secrets.token_hex()}  # without keys everybody might call
            self._keys.replace(stay, new[1], new[2], new[3] & stay.keys())
        if isinstance(config.fleet.replicas, int) and rule is None:
            self.fleet.resize(config.fleet.replicas)
        await self.fleet.update(self._for_replicas(config))
        if self._holders is new:  # no other update has begun meanwhile
            self._common_names = set(new[0])
            self._keys.replace(*new)
            _LOG.info("fleet is updated")

    def _take_over_certificate(self, config: Config) -> None:
        if config.tls.cert is None or self._config.tls.cert is None:
            return
        use_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), config)  # one whose key does not fit does no harm
        for context in (self.listener.config.ssl, None if self._rpc is None else self._rpc.tls):
            if context is not None:
                use_certificate(context, config)

    async def stop(self) -> bool:
        """Refuse new requests, finish those accepted, end the replicas. Returns whether all requests were finished.

        Open conversations go on meanwhile, as in one server.
        """
        self.front.draining = True
        await self._idle(self._config.limits.drain_seconds)
        if self._num_conversations():
            if self._rpc is not None:
                self._rpc.hang_up()
            await self.front.hang_up()
            await self._idle(LAST_ANSWERS_S)
        finished = not self._num_requests()
        await self.fleet.stop()
        if self._rpc is not None:
            await self._rpc.close(LAST_WRITES_S)
        self.listener.should_exit = True
        if self._serving is not None:
            await self._serving
        self._socket.close()
        return finished

    async def _idle(self, within_s: float) -> None:
        """Wait until nothing is in flight and no conversation is open, for `within_s` at most."""
        end = time.monotonic() + within_s
        while (self._num_requests() or self._num_conversations()) and time.monotonic() < end:
            await asyncio.sleep(0.02)

    def _num_conversations(self) -> int:
        """Open WebSockets, streams and sequences; see Service.drain."""
        return self.front.num_open + self.balancer.num_sequences

    def _num_requests(self) -> int:
        return sum(replica.num_requests for replica in self.balancer.replicas.values())


def serve_fleet(
    config: Config,
    launcher: FleetLauncher,
    on_ready: Callable[[list[str], int], None],
    read: Callable[[], Config],
) -> bool:
    """Serve until SIGTERM or SIGINT, then finish accepted requests. Returns whether all were finished.

    on_ready: called with the addresses and the number of replicas. read: reads the settings again, at SIGHUP, for a
    rolling update. Raises OptionError for settings that cannot be used, and every error of starting replicas.
    """
    log = logs.configure(config.log.level)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve_fleet(config, launcher, on_ready, read))
    finally:
        log.end()


async def _serve_fleet(
    config: Config,
    launcher: FleetLauncher,
    on_ready: Callable[[list[str], int], None],
    read: Callable[[], Config],
) -> bool:
    loop, stop_event, updates = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def stop() -> None:
        if stop_event.is_set():  # a second signal: replicas end with this process
            end = threading.Timer(_AT_ONCE_S, os._exit, (1,))
            end.daemon = True
            end.start()
        stop_event.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, updates.set)
    server = FleetServer(config, launcher)
    starting, stopping = asyncio.ensure_future(server.start()), asyncio.ensure_future(stop_event.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return True
    addresses = starting.result()
    gc.collect()
    gc.freeze()  # a pass over torch takes 0.2 s, in which nobody is answered
    on_ready(addresses, server.fleet.size)
    updating = asyncio.create_task(_update_again(server, updates, read))
    await stopping
    updating.cancel()
    await asyncio.gather(updating, return_exceptions=True)
    return await server.stop()


async def _update_again(server: FleetServer, updates: asyncio.Event, read: Callable[[], Config]) -> None:
    """Update at each signal. An update that waits for replicas which do not start gives way to the next."""
    updating: asyncio.Task[None] | None = None
    try:
        while True:
            await updates.wait()
            updates.clear()
            if updating is not None:
                updating.cancel()
                await asyncio.gather(updating, return_exceptions=True)
            updating = asyncio.create_task(_update_once(server, read))
    finally:
        if updating is not None:
            updating.cancel()
            await asyncio.gather(updating, return_exceptions=True)


async def _update_once(server: FleetServer, read: Callable[[], Config]) -> None:
    try:
        await server.update(await asyncio.to_thread(read))
    except (BatchmakerError, OSError) as error:
        _LOG.error("not updated", extra={"error": str(error)})
    except Exception:
        _LOG.exception("not updated")


def _channels() -> Callable[[str], Any]:
    from batchmaker.fleet.front_rpc import open_channel

    return open_channel


def _make_rpc(config: Config, access: CallAccess, spans: Spans, connections: Connections, front: Front) -> RpcServer:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    with needing("grpc", "gRPC (grpc_port)"):
        from batchmaker.fleet.front_rpc import FleetAnswers, fleet_methods
        from batchmaker.server.rpc.server import RpcServer

    answers = FleetAnswers(front)
    methods = fleet_methods(front, answers)
    return RpcServer(config, access, spans, connections, methods, answers, lambda: front.ready)
