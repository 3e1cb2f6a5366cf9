"""Room for the chunks of one connection: in memory, and in the rate of its key."""

from __future__ import annotations

from asyncio import get_running_loop
from typing import Final, final

from batchmaker.server.access.auth import KnownKey
from batchmaker.server.access.request_body import HeldBytes
from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.service.site import Site

_LOOK_S: Final = 0.05
"""Seconds between two looks whether there is room in memory: mostly others make it."""


@final
class ChunkRoom:
    """Lets chunks in, one by one. held: their bytes until they are answered. retry_s: when to try again with one.

    The first chunk's key was counted when the connection was made.
    """

    __slots__ = ("_bodies", "_is_first", "_key", "_patience_s", "_since_s", "held", "retry_s")

    def __init__(self, site: Site, key: str | None, client: str) -> None:
        """client: whose the bytes are."""
        self._bodies = site.bodies
        self._key = KnownKey(site.keys, key)
        self._patience_s = site.service.limits.write_seconds
        self._is_first = True
        self._since_s: float | None = None  # since when the present chunk has waited
        self.retry_s = 0.0
        self.held = HeldBytes(site.bodies, client)

    def enter(self, size: int) -> bool:
        """Count a chunk, if there is room. False if it has to wait until `retry_s`.

        Raises the ServiceError of one that waits for too long, or whose key is gone.
        """
        try:
            if not self._bodies.fits(self.held.client, size):
                if self._may_wait(_LOOK_S):
                    return False
                self._bodies.check(self.held.client, size)
            if not self._is_first:
                try:
                    self._key.count()
                except ServiceError as fault:
                    if fault.kind is FaultKind.TOO_MANY and self._may_wait(fault.retry_after_s or 0.0):
                        return False
                    raise
        except ServiceError:
            self._since_s = None
            raise
        self._since_s = None
        self._is_first = False
        self.held.resize(self.held.size + size)
        return True

    def _may_wait(self, wait_s: float) -> bool:
        now_s = get_running_loop().time()
        if self._since_s is None:
            self._since_s = now_s
        if now_s + wait_s > self._since_s + self._patience_s:
            return False
        self.retry_s = now_s + wait_s
        return True
