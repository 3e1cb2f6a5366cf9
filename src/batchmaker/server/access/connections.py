"""What is open: the number for each client, and the idle ones. Connections, and calls of gRPC."""

from __future__ import annotations

from collections import Counter
from typing import Protocol, final


class Connection(Protocol):
    """One connection or call, as seen by the counts."""

    def close_idle(self) -> None:
        """Close it; no work is in progress."""
        ...


@final
class Connections:
    """Counts connections by the client's address.

    When the limit is reached, a new connection replaces the one that has been idle longest, so idle connections keep
    nobody out. max_open: of all clients. max_of_client: of one address; more are refused. what: their name. Calls of
    gRPC, of which one connection may carry thousands, are counted in the same way.
    """

    def __init__(self, max_open: int, max_of_client: int, what: str = "connections") -> None:
        self._what = what
        self._max_open = max_open
        self._max_of_client = max_of_client
        self._clients: dict[Connection, str] = {}
        self._of_client: Counter[str] = Counter()
        self._idle: dict[Connection, None] = {}  # the longest idle one comes first
        self.num_refused = 0
        self.num_closed_idle = 0

    @property
    def num_open(self) -> int:
        return len(self._clients)

    def opened(self, connection: Connection, client: str) -> str | None:
        """Count a new, idle connection. Returns the reason if it must be refused, otherwise None."""
        if self._of_client[client] >= self._max_of_client:
            self.num_refused += 1
            return f"your address has as many {self._what} open as one may; close some"
        if len(self._clients) >= self._max_open:
            longest = next(iter(self._idle), None)
            if longest is None:
                self.num_refused += 1
                return f"as many {self._what} are open as may be; try again later"
            self.num_closed_idle += 1
            self.closed(longest)
            longest.close_idle()
        self._clients[connection] = client
        self._of_client[client] += 1
        self._idle[connection] = None
        return None

    def closed(self, connection: Connection) -> None:
        """Note the end of a connection, if it was counted."""
        client = self._clients.pop(connection, None)
        if client is None:
            return
        self._of_client[client] -= 1
        if not self._of_client[client]:
            del self._of_client[client]
        self._idle.pop(connection, None)

    def hand_over(self, connection: Connection, to: Connection) -> None:
        """Count another object in place of one, as the same connection, in which work is in progress."""
        client = self._clients.pop(connection, None)
        self._idle.pop(connection, None)
        if client is not None:
            self._clients[to] = client

    def busy(self, connection: Connection) -> None:
        """Note the beginning of a call."""
        self._idle.pop(connection, None)

    def idle(self, connection: Connection) -> None:
        """Note that no call is in progress."""
        if connection in self._clients:
            self._idle[connection] = None
