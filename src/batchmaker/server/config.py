"""The server's settings, from a TOML file."""

from __future__ import annotations

import tomllib
import typing
from pathlib import Path
from types import UnionType
from typing import Any, Literal

import msgspec

from batchmaker.errors import OptionError, unknown_name
from batchmaker.saved.sources import parse_source
from batchmaker.server.access.auth import read_keys
from batchmaker.server.limits import Limits
from batchmaker.server.observe.logs import Level
from batchmaker.server.service.engine_port import EngineOptions
from batchmaker.server.service.repository import Entry, VersionPolicy


class AuthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Authentication.

    keys: file with NAME:KEY on each line. rate: calls a second for each key; burst: at once, by default as many as in a
    second. control_keys: names of keys that may load and unload models; empty for all. origins: sites whose pages may
    call if there are no keys, besides the server's own: "https://example.org", "null" for files, "*" for all.
    """

    keys: str | None = None
    rate: float | None = None
    burst: float | None = None
    control_keys: list[str] = []
    origins: list[str] = []

    def keys_and_rates(self) -> tuple[dict[str, str], float | None, float | None, frozenset[str]]:
        """Return the arguments of a KeyRing, with the present keys of the file and the environment."""
        path = None if self.keys is None else Path(self.keys)
        return read_keys(path), self.rate, self.burst, frozenset(self.control_keys)


class TlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PEM files of the certificate (with its chain) and its private key; both or neither."""

    cert: str | None = None
    key: str | None = None


class LogConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Logging.

    level: of the log. access: one line for every call. spans: OpenTelemetry spans, sent to the address in its own
    environment variables (OTEL_...).
    """

    level: Level = "info"
    access: bool = False
    spans: bool = False


class GrpcConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pings of gRPC, named as Triton names them.

    - keepalive_time_ms, keepalive_timeout_ms: the server pings a client after this time, and waits so long for it.
    - keepalive_permit_without_calls: pings may also come while there is no call, from either side.
    - http2_max_pings_without_data: those that the server sends while it sends nothing else; 0 for any number.
    - http2_min_recv_ping_interval_without_data_ms: a client that pings more often, while it is sent nothing, makes a
      strike. Lower than Triton's, under which a client may ping every five minutes: many ping every 10 seconds.
    - http2_max_ping_strikes: after more strikes the connection ends (too_many_pings); 0 for any number.
    """

    keepalive_time_ms: int = 7_200_000
    keepalive_timeout_ms: int = 20_000
    keepalive_permit_without_calls: bool = True
    http2_max_pings_without_data: int = 2
    http2_min_recv_ping_interval_without_data_ms: int = 5_000
    http2_max_ping_strikes: int = 2


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model.

    source: as on the command line. options: of a built-in network. sequences_only: see EngineOptions. The others: see
    Engine.
    """

    source: str
    name: str | None = None
    options: dict[str, bool | int | float | str] = {}
    policy: str | None = None
    workers: int | Literal["auto"] = "auto"
    threads: int | None = None
    device: str = "cpu"
    priorities: Literal["aged", "strict"] = "aged"
    deterministic: bool = False
    sequences_only: bool = False


class FleetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Many replicas of the server, on Ray; see `batchmaker.fleet`.

    replicas: None for one server without Ray, "auto" for as many as the cluster has cores and memory for. router: see
    fleet.routing.RULES. autoscale: a rule of fleet.scaling. ray_address: of a cluster; None starts one on this machine,
    unless RAY_ADDRESS names one. cpus: reserved for a replica; None for as many as its engines have compute threads.
    """

    replicas: int | Literal["auto"] | None = None
    router: str = "least-work"
    autoscale: str | None = None
    ray_address: str | None = None
    cpus: float | None = None


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of the server.

    - grpc_port: None for HTTP alone.
    - admin_port: for probes, metrics, traces, loading and unloading, separate from calls of models; None for one port.
    - hosts: names by which browsers reach it, see Origins.
    - page: an HTML file, shown at /page.
    - replace_hung: whether a model whose engine hangs or has failed is loaded again, at most once a minute.
    - versions: serve each model's newest version or all.
    - json_nan: what NaN and infinities in a result are in JSON, which has neither: an error (501), or null.
    - trace_steps: finished steps kept for /v2/trace; 0 also leaves out metrics of single cells.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    admin_port: int | None = None
    replace_hung: bool = False
    hosts: list[str] = []
    page: str | None = None
    versions: VersionPolicy = "latest"
    json_nan: Literal["error", "null"] = "error"
    trace_steps: int = 20_000
    models: list[ModelEntry] = []
    grpc: GrpcConfig = GrpcConfig()
    limits: Limits = Limits()
    auth: AuthConfig = AuthConfig()
    tls: TlsConfig = TlsConfig()
    log: LogConfig = LogConfig()
    fleet: FleetConfig = FleetConfig()

    def entries(self) -> list[Entry]:
        """Return the models' sources. OptionError for a missing one."""
        return [
            Entry(
                parse_source(model.source, model.options, model.name),
                EngineOptions(
                    model.policy,
                    model.workers,
                    model.threads,
                    self.limits.max_nodes,
                    self.limits.max_sequences,
                    model.device,
                    model.priorities,
                    model.deterministic,
                    model.sequences_only,
                ),
            )
            for model in self.models
        ]


def read_config(path: Path, *, check: bool = True) -> Config:
    """Return the settings in a TOML file. For an unknown option OptionError names the nearest one.

    Paths in it are relative to the folder of the file. check: whether they are all, and must be valid together.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise OptionError(f"{path}: cannot be read as TOML: {error}") from None
    try:
        _check_names(content, Config, "")
        config = msgspec.convert(content, Config)
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from None
    except msgspec.ValidationError as error:
        raise OptionError(f"{path}: {error}") from None
    if check:
        check_config(config)
    return _resolved(config, path.parent)


def check_config(config: Config) -> None:
    """Raise OptionError for settings that are invalid, alone or together."""
    for name in ("port", "grpc_port", "admin_port"):
        port = getattr(config, name)
        if port is not None and not 0 <= port < 65536:
            raise OptionError(f"{name} must be 0 (any that is free) to 65535, got {port}")
    if (config.tls.cert is None) != (config.tls.key is None):
        raise OptionError("TLS needs both a certificate and its key (tls.cert and tls.key)")
    for name in Limits.__struct_fields__:
        if getattr(config.limits, name) <= 0 and name != "drain_seconds":
            raise OptionError(f"limits.{name} must be above 0, got {getattr(config.limits, name)}")
    for name in GrpcConfig.__struct_fields__:
        least, value = int(name.startswith("keepalive")), getattr(config.grpc, name)
        if not isinstance(value, bool) and not least <= value < 1 << 31:
            raise OptionError(f"grpc.{name} must be {least} or more, below 2**31, got {value}")
    for name in ("rate", "burst"):
        value = getattr(config.auth, name)
        if value is not None and value <= 0:
            raise OptionError(f"auth.{name} must be above 0, got {value}")
    if config.trace_steps < 0:
        raise OptionError(f"trace_steps must be at least 0, got {config.trace_steps}")


def _check_names(content: dict[str, Any], struct: type[msgspec.Struct], where: str) -> None:
    """Raise OptionError for a key that `struct`, or a struct in it, does not have."""
    types = {field.name: field.type for field in msgspec.structs.fields(struct)}
    for key, value in content.items():
        if key not in types:
            raise unknown_name("option", f"{where}{key}", [f"{where}{name}" for name in types])
        inner = _struct_in(types[key])
        if inner is None:
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                _check_names(item, inner, f"{where}{key}.")


def _struct_in(kind: Any) -> type[msgspec.Struct] | None:
    """Return the struct of a type: the type itself, or the items of a list."""
    if isinstance(kind, UnionType):
        return None
    candidate = next(iter(typing.get_args(kind)), kind) if typing.get_origin(kind) is list else kind
    return candidate if isinstance(candidate, type) and issubclass(candidate, msgspec.Struct) else None


def _resolved(config: Config, folder: Path) -> Config:
    def resolve(path: str | None) -> str | None:
        return None if path is None else str(folder / path)

    def source(text: str) -> str:
        return str(folder / text) if (folder / text).is_dir() else text

    return msgspec.structs.replace(
        config,
        page=resolve(config.page),
        auth=msgspec.structs.replace(config.auth, keys=resolve(config.auth.keys)),
        tls=TlsConfig(cert=resolve(config.tls.cert), key=resolve(config.tls.key)),
        models=[msgspec.structs.replace(model, source=source(model.source)) for model in config.models],
    )
