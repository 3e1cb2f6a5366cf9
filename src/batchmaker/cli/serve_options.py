"""The options of `batchmaker serve`, in groups. None, or False: as the file of settings or the environment says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, final

import typer

from batchmaker.cli import options


@final
@dataclass(frozen=True, slots=True)
class AddressOptions:
    """Where the server listens, and the page that it shows."""

    host: Annotated[str | None, typer.Option(help="Address to listen at. Default: 127.0.0.1, this machine only.")] = (
        None
    )
    port: Annotated[int | None, typer.Option(help="Port for HTTP; 0 takes any that is free. Default: 8000.")] = None
    grpc_port: Annotated[
        int | None, typer.Option(help="Port for gRPC; 0 takes any that is free. Default: no gRPC.")
    ] = None
    admin_port: Annotated[
        int | None,
        typer.Option(help="Port for probes, metrics, loading and unloading, apart from calls. Default: the same port."),
    ] = None
    page: Annotated[Path | None, typer.Option(help="File of HTML to show at /page.")] = None


@final
@dataclass(frozen=True, slots=True)
class PingOptions:
    """Pings of gRPC, under its own names."""

    grpc_keepalive_time: Annotated[
        int | None, typer.Option(min=1, help="Milliseconds after which gRPC pings a client. Default: 7200000.")
    ] = None
    grpc_keepalive_timeout: Annotated[
        int | None, typer.Option(min=1, help="Milliseconds that it waits for the answer. Default: 20000.")
    ] = None
    grpc_keepalive_permit_without_calls: Annotated[
        bool | None, typer.Option(help="Pings may come while there is no call. Default: they may.")
    ] = None
    grpc_http2_max_pings_without_data: Annotated[
        int | None, typer.Option(min=0, help="Pings that gRPC sends while it sends nothing else. Default: 2.")
    ] = None
    grpc_http2_min_recv_ping_interval_without_data: Annotated[
        int | None, typer.Option(min=0, help="Milliseconds between a client's pings, at least. Default: 5000.")
    ] = None
    grpc_http2_max_ping_strikes: Annotated[
        int | None, typer.Option(min=0, help="Pings too many that are forgiven; 0 forgives all. Default: 2.")
    ] = None


@final
@dataclass(frozen=True, slots=True)
class AccessOptions:
    """Who may call, and over what."""

    api_keys: Annotated[
        Path | None, typer.Option(help="File with NAME:KEY on each line. Also: $BATCHMAKER_API_KEYS.")
    ] = None
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate (PEM), for https.")] = None
    tls_key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None


@final
@dataclass(frozen=True, slots=True)
class LimitOptions:
    """How much the server takes."""

    max_in_flight: Annotated[
        int | None, typer.Option(min=1, help="Requests of a model accepted and not answered. Default: 1024.")
    ] = None
    max_body_mb: Annotated[int | None, typer.Option(min=1, help="Megabytes of one request. Default: 16.")] = None
    max_sequences: Annotated[int | None, typer.Option(min=1, help="Open sequences of a model. Default: 1024.")] = None
    sequence_idle_seconds: Annotated[
        float | None, typer.Option(min=0, help="After which a sequence without a request ends. Default: 60.")
    ] = None
    drain_seconds: Annotated[
        float | None, typer.Option(min=0, help="Time to finish what was accepted, after SIGTERM. Default: 30.")
    ] = None


@final
@dataclass(frozen=True, slots=True)
class ComputeOptions:
    """How every model's engine computes."""

    policy: Annotated[
        str | None, typer.Option(help="What runs next: cellular, lazy, padded, ... Default: as the model asks.")
    ] = None
    threads: options.Threads = None
    workers: Annotated[
        int | None, typer.Option(min=1, help="Worker threads of each model. Default: all processors but one.")
    ] = None
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda for all GPUs, or some of them: cuda:0, cuda:0,1. Default: cpu.")
    ] = None
    priorities: Annotated[
        str | None, typer.Option(help="aged: no priority waits for ever; strict: it may. Default: aged.")
    ] = None
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The bits of an answer do not depend on other requests or the run.")
    ] = False


@final
@dataclass(frozen=True, slots=True)
class LogOptions:
    """What the server writes to its log."""

    access_log: Annotated[bool, typer.Option(help="Log every call.")] = False
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error. Default: info.")] = None


@final
@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Several servers behind one front."""

    replicas: Annotated[
        str | None, typer.Option(help="As many servers on Ray behind one front; auto: by cores and memory.")
    ] = None
    autoscale: Annotated[
        str | None, typer.Option(help="How many replicas there are: work:target=0.5,most=8 or sequences:target=40.")
    ] = None
    ray_address: Annotated[
        str | None, typer.Option(help="Ray cluster to join: auto, or HOST:PORT. Default: one on this machine.")
    ] = None
