"""The open HTTP connections: how many each client has, and which of them are idle."""

from __future__ import annotations

from collections import Counter
from typing import Protocol, final


class Connection(Protocol):
    """One connection, as far as it is counted."""

    def close_idle(self) -> None:
        """Close it; no call is under way."""


@final
class Connections:
    """Counts connections by the client's address. When there are as many as may be, who comes takes the place of the
    one that has been idle longest: connections that do nothing keep nobody out.

    max_open: of all clients. max_of_client: of one address; more are refused.
    """

    def __init__(self, max_open: int, max_of_client: int) -> None:
        self._max_open = max_open
        self._max_of_client = max_of_client
        self._clients: dict[Connection, str] = {}
        self._of_client: Counter[str] = Counter()
        self._idle: dict[Connection, None] = {}  # the one idle longest comes first
        self.num_refused = 0
        self.num_closed_idle = 0

    @property
    def num_open(self) -> int:
        return len(self._clients)

    def opened(self, connection: Connection, client: str) -> str | None:
        """Count a new connection, idle as yet. Returns why it may not stay, None if it may."""
        if self._of_client[client] >= self._max_of_client:
            self.num_refused += 1
            return "your address has as many connections open as one may; close some"
        if len(self._clients) >= self._max_open:
            longest = next(iter(self._idle), None)
            if longest is None:
                self.num_refused += 1
                return "as many connections are open as may be; try again later"
            self.num_closed_idle += 1
            self.closed(longest)
            longest.close_idle()
        self._clients[connection] = client
        self._of_client[client] += 1
        self._idle[connection] = None
        return None

    def closed(self, connection: Connection) -> None:
        """A connection has ended, if it was counted."""
        client = self._clients.pop(connection, None)
        if client is None:
            return
        self._of_client[client] -= 1
        if not self._of_client[client]:
            del self._of_client[client]
        self._idle.pop(connection, None)

    def busy(self, connection: Connection) -> None:
        """A call has begun."""
        self._idle.pop(connection, None)

    def idle(self, connection: Connection) -> None:
        """No call is under way, and none has begun."""
        if connection in self._clients:
            self._idle[connection] = None
