"""Limits for one client, and for all clients together."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits that hold for any input. They bound the server's memory.

    - max_body_bytes: of one request.
    - max_total_body_bytes: of all requests that arrive or are not answered. One client may hold as many as are free.
    - max_in_flight: requests of one model, outside sequences, accepted and not answered; more are refused with "try
      again".
    - max_streams: open streams, all models.
    - max_sequences: open sequences of one model.
    - max_key_sequences: those begun with one API key.
    - sequence_idle_seconds: an open sequence ends after this time without a request.
    - max_chunks_ahead: chunks of one connection that are read before they are answered.
    - max_connections: of HTTP and gRPC; beyond it the one idle longest is closed. Also the most calls of gRPC.
    - max_client_connections: of one client's address. Also the most calls of gRPC of one.
    - max_head_bytes: of a request's line and headers.
    - max_sequence: elements along any variable dimension of an input.
    - max_tensors: inputs of one request.
    - max_nodes: cells of one request.
    - body_seconds: to send a whole request, from its first byte.
    - write_seconds: for a client to take sent data.
    - drain_seconds: to finish accepted requests at shutdown or unloading, and conversations at shutdown.
    - hung_seconds: a model counts as hung after this time in one turn of its engine's thread.
    """

    max_body_bytes: int = 16 << 20
    max_total_body_bytes: int = 256 << 20
    max_in_flight: int = 1024
    max_streams: int = 512
    max_sequences: int = 1024
    max_key_sequences: int = 256
    sequence_idle_seconds: float = 60.0
    max_chunks_ahead: int = 16
    max_connections: int = 4096
    max_client_connections: int = 1024
    max_head_bytes: int = 64 << 10
    max_sequence: int = 100_000
    max_tensors: int = 64
    max_nodes: int = 100_000
    body_seconds: float = 30.0
    write_seconds: float = 30.0
    drain_seconds: float = 30.0
    hung_seconds: float = 5.0
