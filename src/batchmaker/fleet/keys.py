"""The keys between the front and its replicas. Clients' own keys stay at the front."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from typing import final

from batchmaker.server.access.auth import FRONT


@final
class FleetKeys:
    """A key for each holder of a client's key, so that replicas know whose sequence is whose; "" is for everybody else.

    They follow from a secret of this process, so a replica accepts calls of its own front only.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._keys: dict[str, str] = {}

    def of(self, holder: str) -> str:
        """Return the key for calls of this holder."""
        key = self._keys.get(holder)
        if key is None:
            key = hmac.new(self._secret, holder.encode(), hashlib.sha256).hexdigest()
            self._keys[holder] = key
        return key

    def ring(self, holders: Iterable[str]) -> dict[str, str]:
        """Return what a replica accepts, by name."""
        return {FRONT: self.of(""), **{holder: self.of(holder) for holder in holders}}
