"""Who has sent a request: whose names of sequences it uses, and over which connection it came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from starlette.types import Scope

from batchmaker.server.access.auth import FRONT, KeyRing
from batchmaker.server.access.departure import DEPARTURE

HEADER: Final = "x-batchmaker-sender"
"""The header, and metadata of gRPC, in which the front of a fleet tells a replica the address and the connection."""

_SENDER: Final = HEADER.encode()


@final
@dataclass(frozen=True, slots=True)
class Sender:
    """holder: the name of the API key's holder, "" without keys. address: the client's. connection: its name."""

    holder: str = ""
    address: str = ""
    connection: str = ""

    @property
    def owner(self) -> tuple[str, str]:
        """Whose sequences it may go on with: those of its key or, without keys, of its address."""
        return ("key", self.holder) if self.holder else ("address", self.address)

    @property
    def client(self) -> str:
        """Whose the bytes of its requests are: the key's holder or, without keys, the address."""
        return self.holder or self.address

    @property
    def forwarded(self) -> str:
        """What the front of a fleet writes into HEADER: a replica sees the front's own address and connection."""
        return f"{self.address} {self.connection}"

    @classmethod
    def read(cls, holder: str, forwarded: str) -> Sender:
        """Return the sender whose address and connection the front of a fleet has written."""
        address, _, connection = forwarded.partition(" ")
        return cls(holder, address, connection)


NOBODY: Final = Sender()
"""For requests that this process makes itself."""


def sender_of(scope: Scope, keys: KeyRing) -> Sender:
    """Return who sends a call that has passed the middleware."""
    if keys.is_of_fleet:
        for name, value in scope["headers"]:
            if name == _SENDER:
                return forwarded_sender(scope["state"]["caller"], value.decode("latin-1"))
    client, departure = scope.get("client"), scope.get("extensions", {}).get(DEPARTURE)
    connection = "" if departure is None else f"http {departure.connection}"
    return Sender(scope["state"]["caller"], client[0] if client else "", connection)


def forwarded_sender(holder: str, forwarded: str) -> Sender:
    """Return the sender of a call that the front of a fleet has sent on."""
    return Sender.read("" if holder == FRONT else holder, forwarded)
