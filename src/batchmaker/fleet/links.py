"""What carries requests to one replica."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

from batchmaker.fleet.shared_upstream import SharedUpstream
from batchmaker.fleet.upstream import Upstream


@final
@dataclass(slots=True)
class Link:
    """The ways to one replica.

    http: a connection for each call. shared: one for all that are small and have no streams. key_of: the key for calls
    of a holder of a client's key. rpc: None without gRPC. sockets, relays: of the WebSockets that it has.
    """

    http: Upstream
    shared: SharedUpstream
    key_of: Callable[[str], str]
    rpc: Any = None
    sockets: set[Any] = field(default_factory=set)
    relays: set[Any] = field(default_factory=set)
    _closing: asyncio.Future[None] | None = None

    def close(self) -> None:
        """End what is in progress: calls and WebSockets find that the replica has ended."""
        self.http.close()
        self.shared.close()
        for socket in tuple(self.sockets):
            socket.transport.abort()
        if self.rpc is not None:
            self._closing = asyncio.ensure_future(self.rpc.close())
