"""`batchmaker serve`."""

from __future__ import annotations

import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from batchmaker.cli.imports import collector_paused
from batchmaker.cli.policy_model import warn_of_another_model
from batchmaker.cli.serve_options import (
    AccessOptions,
    AddressOptions,
    ComputeOptions,
    FleetOptions,
    LimitOptions,
    LogOptions,
    PingOptions,
)
from batchmaker.errors import OptionError, needing
from batchmaker.lab.zoo import MODELS


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL_OR_DIR",
            help=f"{', '.join(MODELS)}; the directory of a saved model; a folder of them; a Python file "
            "with a function build(); or NAME= one of these. Options of a built-in model or of build() follow a colon.",
        ),
    ] = None,
    *,
    addresses: AddressOptions,
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with all of this and more. Before it goes the environment (BATCHMAKER_PORT, "
            "BATCHMAKER_LOG__LEVEL, ...), and before both what is given here."
        ),
    ] = None,
    pings: PingOptions,
    access: AccessOptions,
    limits: LimitOptions,
    engine: ComputeOptions,
    all_versions: Annotated[bool, typer.Option(help="Serve all versions of a model, not only the newest.")] = False,
    log: LogOptions,
    fleet: FleetOptions,
    write_config: Annotated[
        Path | None, typer.Option(help="Write these settings as YAML for `serve deploy` of Ray Serve, and end.")
    ] = None,
) -> None:
    """Serve models over HTTP and gRPC (Open Inference Protocol v2), all requests batched together.

    Prints a line with its addresses when requests are taken. After SIGTERM (or Ctrl-C) it finishes accepted requests
    and ends; the exit status is 1 if they did not finish within --drain-seconds. SIGHUP reloads keys, certificate,
    models and --config.

    [bold]Examples[/bold]

    batchmaker serve lstm

    batchmaker serve translator=seq2seq:hidden=512,vocabulary_size=8000 treelstm --port 9000 --grpc-port 9001

    batchmaker serve saved/translator models/ --config server.toml

    batchmaker serve translator.py

    batchmaker serve lstm --replicas 4

    [bold]Then[/bold]

    curl localhost:8000/v2/models/lstm/generate -d '{"input_0": [3, 4, 5]}'

    curl -N localhost:8000/v2/models/translator/generate_stream -d '{"source": [3, 4, 5]}'
    """
    with collector_paused():
        from batchmaker.server import serve as run_server

    sections = {
        "grpc": _without_none(
            keepalive_time_ms=pings.grpc_keepalive_time,
            keepalive_timeout_ms=pings.grpc_keepalive_timeout,
            keepalive_permit_without_calls=pings.grpc_keepalive_permit_without_calls,
            http2_max_pings_without_data=pings.grpc_http2_max_pings_without_data,
            http2_min_recv_ping_interval_without_data_ms=pings.grpc_http2_min_recv_ping_interval_without_data,
            http2_max_ping_strikes=pings.grpc_http2_max_ping_strikes,
        ),
        "limits": _without_none(
            max_in_flight=limits.max_in_flight,
            max_body_bytes=None if limits.max_body_mb is None else limits.max_body_mb << 20,
            drain_seconds=limits.drain_seconds,
            max_sequences=limits.max_sequences,
            sequence_idle_seconds=limits.sequence_idle_seconds,
        ),
        "auth": _without_none(keys=_text(access.api_keys)),
        "tls": _without_none(cert=_text(access.tls_cert), key=_text(access.tls_key)),
        "log": _without_none(level=log.log_level, access=log.access_log or None),
        "fleet": _without_none(**asdict(fleet) | {"replicas": _replicas(fleet.replicas)}),
    }
    of_engines = _without_none(**asdict(engine) | {"deterministic": engine.deterministic or None})
    others = _without_none(
        **asdict(addresses) | {"page": _text(addresses.page)}, versions="all" if all_versions else None
    )
    read = partial(_settings, config, models or [], of_engines, sections, others)
    settings = read()
    _warn_of_policies(settings)
    if write_config is not None:
        with needing("ray", "A fleet"):
            from batchmaker.fleet.serve_application import write_application

        write_application(settings, write_config)
        typer.echo(f"{write_config} is written: serve deploy {write_config}")
        return
    if settings.fleet.replicas is None and settings.fleet.autoscale is None:
        finished = run_server(settings, _say_ready, read)
    else:
        with needing("ray", "A fleet"):
            from batchmaker.fleet.on_ray import serve_on_ray

        finished = serve_on_ray(settings, _say_fleet_ready, read)
    if not finished:
        raise typer.Exit(1)


def _settings(
    config: Path | None,
    models: list[str],
    engine: dict[str, Any],
    sections: dict[str, dict[str, Any]],
    others: dict[str, Any],
) -> Any:
    """Return the server's Config: of the file, then of the environment, then of the command line, the last before all.

    engine: options of every model's engine. sections: options of sections of the file, by the section's name. others:
    options outside sections. Raises OptionError without a model to serve.
    """
    from batchmaker.server import Config, read_config
    from batchmaker.server.config import check_config
    from batchmaker.server.environment import with_environment

    settings = with_environment(Config() if config is None else read_config(config, check=False), os.environ)
    entries = [*settings.models, *_entries(models)]
    if not entries:
        raise OptionError(
            "there is nothing to serve. Name a model (batchmaker serve lstm), or a --config with [[models]], or set "
            "BATCHMAKER_MODELS."
        )
    changed = {name: _replaced(getattr(settings, name), **section) for name, section in sections.items()}
    settings = _replaced(settings, models=[_replaced(entry, **engine) for entry in entries], **changed, **others)
    check_config(settings)
    return settings


def _say_ready(addresses: list[str], served: list[str]) -> None:
    typer.echo(f"ready: {' and '.join(addresses)} serves {', '.join(served)}")


def _say_fleet_ready(addresses: list[str], replicas: int) -> None:
    typer.echo(f"ready: {' and '.join(addresses)} serves with {replicas} replicas")


def _replicas(text: str | None) -> int | str | None:
    """Return the option's number, or "auto". OptionError for anything else."""
    if text is None or text == "auto":
        return text
    if not text.isdecimal() or not int(text):
        raise OptionError(f"--replicas must be a whole number above 0, or auto, got {text!r}")
    return int(text)


def _warn_of_policies(settings: Any) -> None:
    """Warn of learned policies that were learnt for other models than those that use them."""
    from batchmaker.saved.sources import BuiltIn, SavedDirectory

    for entry in settings.entries():
        if isinstance(entry.source, BuiltIn):
            warn_of_another_model(entry.options.policy, entry.source.network)
        elif isinstance(entry.source, SavedDirectory):
            warn_of_another_model(entry.options.policy, str(entry.source.path))


def _entries(sources: list[str]) -> list[Any]:
    from batchmaker.server.config import ModelEntry

    return [ModelEntry(source=source) for source in sources]


def _without_none(**values: Any) -> dict[str, Any]:
    """Return the options that were given."""
    return {name: value for name, value in values.items() if value is not None}


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _replaced(struct: Any, **values: Any) -> Any:
    """Return a struct of settings with other values, after checking them."""
    try:
        return msgspec.convert(msgspec.structs.asdict(msgspec.structs.replace(struct, **values)), type(struct))
    except msgspec.ValidationError as error:
        raise OptionError(f"an option cannot be used: {error}") from None
