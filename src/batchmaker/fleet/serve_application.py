"""A fleet as an application of Ray Serve, for `serve run` and `serve deploy`.

Serve keeps the front alive and brings it new settings; the front keeps the replicas. Clients use the front's own ports
(HTTP, WebSockets, gRPC), or Serve's HTTP proxy if that runs, which adds a hop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchmaker.errors import OptionError
from batchmaker.fleet.on_ray import connect, import_ray, launcher_for
from batchmaker.fleet.server import FleetServer, check_fleet
from batchmaker.server.access.departure import DEPARTURE, Departure
from batchmaker.server.access.request_body import WHOLE
from batchmaker.server.config import Config, FleetConfig, ModelEntry, read_config
from batchmaker.server.observe import logs

_MORE_S: Final = 20.0
"""Seconds beside `drain_seconds` for Serve to wait for a front that ends."""

_FRONT: Final = "front"
_MOST_CALLS: Final = 10_000
"""Calls that Serve's proxy lets through at once: the front has limits of its own."""

_SERVERS: Final[list[FleetServer]] = []
"""The fleet of this process, for calls that come through Serve's proxy."""


def application(settings: Mapping[str, Any]) -> Any:
    """Return the application: `serve run batchmaker.fleet:application models="lstm treelstm" replicas=2`.

    settings: those of a server's TOML file, as `batchmaker serve --write-config` writes them. On a command line, where
    values are texts: models (separated by spaces), replicas, port, grpc_port, and config, the path of a TOML file. The
    front's port is any that is free unless given. None at all: they come as the deployment's `user_config`, as in a
    written file, where Serve takes changes for a rolling update. Raises OptionError.
    """
    import_ray()
    from ray import serve

    options: dict[str, Any] = {}
    if settings:
        config = read_settings(settings)
        check_fleet(config)
        options = {
            "user_config": msgspec.to_builtins(config),
            "graceful_shutdown_timeout_s": config.limits.drain_seconds + _MORE_S,
        }
    front = serve.deployment(
        name=_FRONT,
        num_replicas=1,
        max_ongoing_requests=_MOST_CALLS,
        ray_actor_options={"num_cpus": 0},
        **options,
    )(serve.ingress(_proxied)(FleetFront))
    return front.bind()


def read_settings(arguments: Mapping[str, Any]) -> Config:
    """Return the settings of an application. OptionError for what is unknown or wrong."""
    settings: dict[str, Any] = {"port": 0, **arguments}
    path = settings.pop("config", None)
    base = Config() if path is None else read_config(Path(path))
    if isinstance(settings.get("models"), str):
        entries = [ModelEntry(source=source) for source in settings["models"].split()]
        settings["models"] = msgspec.to_builtins(entries)
    for name in ("port", "grpc_port", "replicas"):
        if isinstance(settings.get(name), str) and settings[name].isdecimal():
            settings[name] = int(settings[name])
    if "replicas" in settings:
        settings["fleet"] = {**settings.get("fleet", {}), "replicas": settings.pop("replicas")}
    try:
        config = msgspec.convert({**msgspec.to_builtins(base), **settings}, Config)
    except msgspec.ValidationError as error:
        raise OptionError(f"the application's settings: {error}") from None
    if not config.models:
        raise OptionError('there is nothing to serve: give models="lstm", or config=FILE.toml with [[models]]')
    if config.fleet.replicas is None and config.fleet.autoscale is None:
        fleet = msgspec.structs.replace(config.fleet, replicas=1)
        config = msgspec.structs.replace(config, fleet=fleet)
    return config


def write_application(config: Config, path: Path) -> None:
    """Write settings as the YAML of `serve deploy`. Deployed again with other models, it is a rolling update."""
    check_fleet(config)
    if config.fleet.replicas is None and config.fleet.autoscale is None:
        config = msgspec.structs.replace(config, fleet=FleetConfig(replicas=1))
    models = [msgspec.structs.replace(model, source=_absolute(model.source)) for model in config.models]
    settings = msgspec.to_builtins(msgspec.structs.replace(config, models=models))
    content = {
        "proxy_location": "Disabled",
        "applications": [
            {
                "name": "batchmaker",
                "import_path": "batchmaker.fleet:application",
                "route_prefix": "/",
                "deployments": [
                    {
                        "name": _FRONT,
                        "graceful_shutdown_timeout_s": config.limits.drain_seconds + _MORE_S,
                        "user_config": settings,
                    }
                ],
            }
        ],
    }
    lines = [
        "# For Ray Serve: serve deploy FILE. Clients use the port below, not Serve's.",
        json.dumps(content, indent=2),
    ]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")  # JSON is YAML too
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error.strerror or error}") from None


def _absolute(source: str) -> str:
    """Return a model's source with the whole path, if it is one: Serve's processes have a folder of their own."""
    name, equals, rest = source.partition("=") if "=" in source.partition(":")[0] else ("", "", source)
    path, colon, options = rest.partition(":")
    return f"{name}{equals}{Path(path).resolve()}{colon}{options}" if Path(path).exists() else source


class FleetFront:
    """The deployment: one front. Serve calls these methods."""

    def __init__(self) -> None:
        self._server: FleetServer | None = None
        self._updating = asyncio.Lock()

    async def reconfigure(self, settings: dict[str, Any]) -> None:
        """Take settings: the first ones start the fleet, later ones are a rolling update. Raises OptionError."""
        config = msgspec.convert(settings, Config)
        async with self._updating:
            if self._server is not None:
                await self._server.update(config)
                return
            logs.configure(config.log.level)
            server = FleetServer(config, launcher_for(config, connect(None)))
            addresses = await server.start()
            self._server = server
            _SERVERS[:] = [server]
            print(f"ready: {' and '.join(addresses)} serves with {server.fleet.size} replicas", flush=True)

    async def check_health(self) -> None:
        """Raise if the front has to be started anew. Replicas are the front's own care."""
        if self._server is None:
            raise RuntimeError("no settings came: give models=... or config=FILE.toml, or a user_config")
        if not self._server.is_listening:
            raise RuntimeError("the front has stopped listening")

    async def addresses(self) -> list[str]:
        """Return the front's addresses."""
        return [] if self._server is None else self._server.addresses

    async def __del__(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop()


def _proxied() -> ASGIApp:
    """Return what answers calls that come through Serve's own proxy. Serve calls this in the front's process."""
    return _through_proxy


async def _through_proxy(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        for word in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{word}.complete"})
        return
    if not _SERVERS:
        raise RuntimeError("the fleet has not started")
    departure = Departure(lambda: None)
    scope["extensions"] = {**(scope.get("extensions") or {}), DEPARTURE: departure, WHOLE: False}

    async def heard() -> Message:
        message: Message = await receive()
        return message

    await _SERVERS[0].app(scope, heard, send)
