"""The server process, from its settings to its last answer."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, final

import torch
import uvloop

from batchmaker.errors import OptionError, needing
from batchmaker.executor.processors import found_processors
from batchmaker.server.access.auth import KeyRing
from batchmaker.server.access.connections import Connections
from batchmaker.server.access.origins import Origins
from batchmaker.server.access.request_body import BodyBudget
from batchmaker.server.config import Config, check_config
from batchmaker.server.http.app import make_admin_app, make_app
from batchmaker.server.http.listener import HttpListener, http_listener
from batchmaker.server.http.protocol import limited_protocol
from batchmaker.server.http.refusals import Refusals
from batchmaker.server.listening import LAST_ANSWERS_S, LAST_WRITES_S, LOOPBACK, address_of, bind
from batchmaker.server.observe import logs
from batchmaker.server.observe.metrics import Metrics
from batchmaker.server.observe.spans import Spans
from batchmaker.server.observe.systemd import tell_systemd
from batchmaker.server.reload import Reload
from batchmaker.server.service.memory import leave_models_alone
from batchmaker.server.service.repository import Repository
from batchmaker.server.service.service import Service
from batchmaker.server.service.site import Site
from batchmaker.server.service.turns import keep_turns

if TYPE_CHECKING:
    from batchmaker.server.rpc.server import RpcServer

_LOG = logging.getLogger("batchmaker.server")
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_AT_ONCE_S: Final = 2.0
"""Seconds for an orderly end after a second signal; code that hangs then, in a model or in loading one, is cut off."""
_ADMIN_CONNECTIONS: Final = 64

OnReady = Callable[[list[str], list[str]], None]
"""Called with the server's addresses and the names of its models when requests are taken."""


class Sources(NamedTuple):
    """What the server's own metrics are read from, besides its models; None where a server has no such part."""

    connections: Connections
    log: logs.LogQueue | None = None
    reload: Reload | None = None


def serve(config: Config, on_ready: OnReady, read: Callable[[], Config] | None = None) -> bool:
    """Serve until SIGTERM or SIGINT, then finish accepted requests. Returns whether all were finished.

    read: reads the settings again, at SIGHUP; see Reload. Without it only keys and models are reloaded. Raises
    OptionError for invalid settings, and every error of loading a model.
    """
    gc.freeze()  # see leave_models_alone: so it looks at what loading makes alone
    check_config(config)
    keys = KeyRing(*config.auth.keys_and_rates())
    repository = Repository(config.entries(), config.limits, config.versions, config.trace_steps)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(bind(config, config.port)))
        admin = None
        if config.admin_port is not None:
            admin = stack.enter_context(contextlib.closing(bind(config, config.admin_port)))
        log = logs.configure(config.log.level)
        stack.callback(log.end)
        set_threads(config)
        reload = Reload(config, read or (lambda: config), keys, repository)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            sources = Sources(connections_of(config), log, reload)
            work = serve_on(config, repository, keys, (listener, admin), sources, on_ready, Stop.on_signals)
            return runner.run(work)


async def serve_on(
    config: Config,
    repository: Repository,
    keys: KeyRing,
    listeners: tuple[socket.socket, socket.socket | None],
    sources: Sources,
    on_ready: OnReady,
    control: Callable[[Stop], None],
) -> bool:
    """Serve on bound sockets, for calls and for operators, until `control` ends it. Returns whether all was finished.

    control: gets, in this event loop, what ends the server.
    """
    only_this_machine = config.host in LOOPBACK
    if keys.open and not only_this_machine:
        _LOG.warning("anybody who reaches this address may call; set API keys", extra={"host": config.host})
    service = Service(repository, config.limits, nulls=config.json_nan == "null")
    origins = Origins(config.hosts, config.auth.origins, only_this_machine=only_this_machine)
    metrics, bodies = Metrics(service, *sources), BodyBudget(config.limits)
    site = Site(service, keys, origins, metrics, bodies, _page(config))
    spans = Spans(enabled=config.log.spans)
    listener, admin_listener = listeners
    server = _make_server(config, site, spans, sources.connections)
    admin = None if admin_listener is None else _make_admin_server(config, site, spans)
    rpc = None if config.grpc_port is None else _make_rpc(config, site, spans, sources.connections)
    if sources.reload is not None:
        for one in (server, admin):
            sources.reload.with_certificate(None if one is None else one.config.ssl)
        if rpc is not None:
            sources.reload.with_certificate(rpc.tls)
    background: list[asyncio.Task[None]] = []
    try:
        await repository.load_all()
        stop = Stop(service, server, sources.reload, rpc, is_replica=keys.is_of_fleet)
        control(stop)
        addresses = [address_of(config, listener)]
        if rpc is not None:
            await rpc.start()
            addresses.append(rpc.address)
        if admin is not None and admin_listener is not None:
            serving = asyncio.create_task(admin.serve(sockets=[admin_listener]))
            background.append(serving)
            while not (admin.started or serving.done()):
                await asyncio.sleep(0.001)
            addresses.append(address_of(config, admin_listener))
        if config.replace_hung:
            background.append(asyncio.create_task(repository.replace_hung()))
        background.append(asyncio.create_task(keep_turns(repository)))
        leave_models_alone()

        def started() -> None:
            on_ready(addresses, sorted({model.name for model in repository.models()}))
            tell_systemd("READY=1")

        server.on_started = started
        await server.serve(sockets=[listener])
        return stop.finished
    finally:
        if rpc is not None:
            await rpc.close(0.0 if server.force_exit else LAST_WRITES_S)
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await repository.close(0.0)


def set_threads(config: Config) -> None:
    """Have torch use the default number of threads outside engines too, and say the number and its reason."""
    processors = found_processors()
    torch.set_num_threads(processors.threads())
    for line in sorted(
        {processors.explained(one.workers, one.threads) for one in config.models if one.device == "cpu"}
    ):
        _LOG.info(line)


def connections_of(config: Config) -> Connections:
    """Return the counts of a server's connections, with its limits."""
    return Connections(config.limits.max_connections, config.limits.max_client_connections)


def _page(config: Config) -> bytes | None:
    """Return the operator's page. OptionError if it cannot be read."""
    try:
        return None if config.page is None else Path(config.page).read_bytes()
    except OSError as error:
        raise OptionError(f"{config.page}: the page cannot be read ({error.strerror or error})") from None


def _make_rpc(config: Config, site: Site, spans: Spans, connections: Connections) -> RpcServer:
    """Return the gRPC server, which is imported only if it is needed."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its core would write lines between those of the log
    with needing("grpc", "gRPC (grpc_port)"):
        from batchmaker.server.rpc.methods import EngineAnswers, unary_methods
        from batchmaker.server.rpc.server import RpcServer

    unary, streamed = unary_methods(site), EngineAnswers(site)
    return RpcServer(config, site.access, spans, connections, unary, streamed, lambda: site.service.ready)


def _make_server(config: Config, site: Site, spans: Spans, connections: Connections) -> HttpListener:
    app = make_app(site, spans, admin_apart=config.admin_port is not None, log_access=config.log.access)
    every_call_is_told = config.log.access or spans.enabled
    refusals = None if every_call_is_told else Refusals(site.service.repository.get, site.service.answered, site.keys)
    return http_listener(config, app, limited_protocol(site.bodies, connections, refusals, site.keys))


def _make_admin_server(config: Config, site: Site, spans: Spans) -> HttpListener:
    app = make_admin_app(site, spans, log_access=config.log.access)
    protocol = limited_protocol(site.bodies, Connections(_ADMIN_CONNECTIONS, _ADMIN_CONNECTIONS))
    return http_listener(config, app, protocol)


def _end_now() -> None:
    _LOG.error("something hangs and is cut off")
    os._exit(1)


@final
class Stop:
    """At a signal refuses new requests, finishes accepted ones and ends. A second signal ends at once.

    Open conversations go on meanwhile, for `drain_seconds` at most. Those that are open then are told, and read no
    further. SIGHUP does not end it; it reloads the settings.
    """

    def __init__(
        self,
        service: Service,
        server: HttpListener,
        reload: Reload | None,
        rpc: RpcServer | None = None,
        *,
        is_replica: bool = False,
    ) -> None:
        """is_replica: of a fleet, which has let conversations go on before it stops a replica."""
        self._service = service
        self._rpc = rpc
        self._is_replica = is_replica
        self._reload = reload
        self._server = server
        self._draining: asyncio.Task[None] | None = None
        self.finished = True

    def on_signals(self) -> None:
        """Handle SIGTERM, SIGINT and SIGHUP from now on."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.begin)
        if self._reload is not None:
            loop.add_signal_handler(signal.SIGHUP, self._reload.begin)

    def begin(self) -> None:
        """End in order, as at a signal; called again, end at once."""
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())
            return
        if not self._server.force_exit:
            self.finished = False
            self._service.hang_up()
            self._server.should_exit = self._server.force_exit = True
            end = threading.Timer(_AT_ONCE_S, _end_now)  # not on the loop, which ends before the threads are joined
            end.daemon = True
            end.start()

    async def _drain(self) -> None:
        repository = self._service.repository
        self._service.drain()
        tell_systemd("STOPPING=1")
        detail = {"in_flight": repository.in_flight, "conversations": self._service.num_conversations}
        _LOG.info("stopping", extra=detail)
        patience_s = self._service.limits.drain_seconds
        if not self._is_replica:
            await self._until(lambda: not (repository.in_flight or self._service.num_conversations), patience_s)
            patience_s = LAST_ANSWERS_S
        if self._service.num_conversations:
            _LOG.info("conversations are ended", extra={"conversations": self._service.num_conversations})
            self._service.hang_up()
            if self._rpc is not None:
                self._rpc.hang_up()
        await self._until(lambda: not (repository.in_flight or self._service.num_open), patience_s)
        if repository.in_flight:
            _LOG.warning("gave up on requests", extra={"in_flight": repository.in_flight})
            self.finished = False
            await repository.close(0.0)
        self._server.should_exit = True

    @staticmethod
    async def _until(holds: Callable[[], bool], within_s: float) -> None:
        end = time.monotonic() + within_s
        while not holds() and time.monotonic() < end:
            await asyncio.sleep(0.02)
