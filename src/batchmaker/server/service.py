"""Handling of calls, independent of the protocol."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import final

from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.limits import Limits
from batchmaker.server.messages import InferRequest, InferResponse
from batchmaker.server.repository import Repository
from batchmaker.server.sequences import ConnectedSequence
from batchmaker.server.served_model import ServedModel

AnsweredCalls = Counter[tuple[str, str]]
"""How many calls were answered, by protocol ("http" or "grpc") and code: "200", "UNAVAILABLE"."""


@final
class Service:
    """Models behind limits. Used from one event loop."""

    def __init__(self, repository: Repository, limits: Limits, *, nulls: bool = False) -> None:
        """nulls: NaN and infinities become null in JSON; otherwise an answer with one is an error."""
        self.nulls = nulls
        self.repository = repository
        self.limits = limits
        self.num_streams = 0
        self.num_connected = 0
        self.answered: AnsweredCalls = Counter()
        self._draining = False

    def drain(self) -> None:
        """Refuse new requests from now on; accepted ones continue."""
        self._draining = True
        for model in self.repository.models():
            model.hang_up()

    @property
    def draining(self) -> bool:
        """Whether it was told to stop."""
        return self._draining

    @property
    def ready(self) -> bool:
        """Whether requests are taken, for every model."""
        return not self._draining and self.repository.ready

    def takes(self, model: ServedModel) -> bool:
        """Whether requests for a model are taken, independently of other models."""
        return not self._draining and model.ready

    def check_room(self, model: str, version: str | None) -> None:
        """Raise the ServiceError that a request for this model would get now, before the work of reading it."""
        served = self._served(model, version)
        try:
            served.check_room()
        except ServiceError as fault:
            served.statistics.refused[fault.kind] += 1
            raise

    def _served(self, model: str, version: str | None) -> ServedModel:
        if self._draining:
            raise ServiceError(FaultKind.UNAVAILABLE, "the server is shutting down", retry_after_s=1.0)
        return self.repository.get(model, version)

    @contextmanager
    def connected(
        self, model: str, version: str | None, caller: str, priority: int
    ) -> Iterator[tuple[ServedModel, ConnectedSequence]]:
        """Begin the sequence of one connection; the end of the block ends it and cancels unanswered chunks.

        Raises ServiceError as `infer` does, and if no more sequences may be open.
        """
        served = self._served(model, version)
        sequence = served.connect(caller, priority)
        self.num_connected += 1
        try:
            yield served, sequence
        finally:
            self.num_connected -= 1
            sequence.close()

    async def infer(self, model: str, version: str | None, request: InferRequest, caller: str = "") -> InferResponse:
        """Return a model's answer. Raises ServiceError. Cancelling the waiting task gives the request up.

        caller: the owner of sequence names, by the name of the API key's holder.
        """
        return await self._served(model, version).infer(request, caller)

    async def stream(
        self, model: str, version: str | None, request: InferRequest, caller: str = ""
    ) -> AsyncIterator[InferResponse]:
        """Yield a model's values as they are computed. Raises ServiceError. Closing the iterator gives it up."""
        self.check_room(model, version)
        if self.num_streams >= self.limits.max_streams:
            raise ServiceError(
                FaultKind.UNAVAILABLE, f"{self.limits.max_streams} streams are open; try again later", 1.0
            )
        self.num_streams += 1
        try:
            async with aclosing(self.repository.get(model, version).stream(request, caller)) as parts:  # type: ignore[type-var]
                async for part in parts:
                    yield part
        finally:
            self.num_streams -= 1
