"""The parts of a server that every protocol uses."""

from __future__ import annotations

from dataclasses import dataclass

from batchmaker.server.access.auth import KeyRing
from batchmaker.server.access.origins import Origins
from batchmaker.server.access.request_body import BodyBudget
from batchmaker.server.observe.metrics import Metrics
from batchmaker.server.service.service import AnsweredCalls, Service


@dataclass(frozen=True, slots=True)
class CallAccess:
    """Who may call, and how much: the same for a server and for the front of a fleet. answered: counts calls."""

    keys: KeyRing
    bodies: BodyBudget
    answered: AnsweredCalls


@dataclass(frozen=True, slots=True)
class Site:
    """The parts of one server, for routes and methods.

    origins: checked without keys. page: the operator's HTML.
    """

    service: Service
    keys: KeyRing
    origins: Origins
    metrics: Metrics
    bodies: BodyBudget
    page: bytes | None = None

    @property
    def access(self) -> CallAccess:
        """What a protocol needs of it."""
        return CallAccess(self.keys, self.bodies, self.service.answered)
