"""Handling of calls, independent of the protocol."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any, final

from batchmaker.server.access.sender import NOBODY, Sender
from batchmaker.server.faults import FaultKind, ServiceError, invalid
from batchmaker.server.formats.messages import InferRequest, InferResponse
from batchmaker.server.formats.parameters import named_sequence
from batchmaker.server.formats.transcriptions import Transcriber
from batchmaker.server.limits import Limits
from batchmaker.server.service.repository import Repository
from batchmaker.server.service.served_model import ServedModel, StopCause

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
        self.num_open = 0
        self.answered: AnsweredCalls = Counter()
        self._draining = False

    def drain(self) -> None:
        """Refuse new requests and conversations from now on. Accepted ones continue, and open conversations too.

        A conversation is an open WebSocket, an open stream of gRPC or an open sequence: its further requests are taken.
        """
        self._draining = True

    def hang_up(self) -> None:
        """Let every connection with a sequence answer the chunks that it has read, and end: the server stops."""
        for model in self.repository.models():
            model.hang_up(StopCause.SERVER)

    @property
    def num_conversations(self) -> int:
        """How many conversations are open; a WebSocket is one connection and one sequence."""
        return self.num_open + sum(model.port.num_sequences for model in self.repository.models())

    @contextmanager
    def conversation(self) -> Iterator[None]:
        """Count a WebSocket or a stream as open. UNAVAILABLE if the server was told to stop."""
        self.check_open()
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

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

    def check_open_for(self, model: str, version: str | None) -> None:
        """Raise NOT_FOUND, or UNAVAILABLE if the server was told to stop, before the work of reading a request.

        It may go on with a sequence of the model, which is taken still.
        """
        if not self.repository.get(model, version).sequences.has_named:
            self.check_open()

    def check_open(self) -> None:
        """Raise UNAVAILABLE if the server was told to stop."""
        if self._draining:
            raise ServiceError(FaultKind.UNAVAILABLE, "the server is shutting down", retry_after_s=1.0)

    def _served(self, model: str, version: str | None, request: InferRequest, *, goes_on: bool) -> ServedModel:
        """Return the model of a request. goes_on: it came in an open conversation."""
        chunk = named_sequence(request.parameters) is not None and not request.parameters.get("sequence_start")
        if not goes_on and not chunk:
            self.check_open()
        return self.repository.get(model, version)

    def refused(
        self, model: str, version: str | None, parameters: Mapping[str, Any], sender: Sender, fault: ServiceError
    ) -> ServiceError:
        """Return what a client is told whose request could not be read; see OpenSequences.refused."""
        try:
            served = self.repository.get(model, version)
        except ServiceError:
            return fault
        return served.sequences.refused(parameters, sender, fault)

    def connect(self, model: str, version: str | None) -> ServedModel:
        """Begin a conversation of sequences: see `disconnect`. Raises ServiceError as `infer` does."""
        self.check_open()
        served = self.repository.get(model, version)
        self.num_open += 1
        return served

    def disconnect(self) -> None:
        """End a conversation that `connect` has begun."""
        self.num_open -= 1

    def transcriber(self, model: str) -> Transcriber:
        """Return how a model writes what it hears. NOT_FOUND if there is none of the name, INVALID if it does not."""
        transcriber = self.repository.get(model, None).transcriber
        if transcriber is None:
            raise invalid(f"the model {model[:64]!r} writes nothing that it hears: it has no serving_transcriptions()")
        return transcriber

    def infer(
        self,
        model: str,
        version: str | None,
        request: InferRequest,
        sender: Sender = NOBODY,
        *,
        goes_on: bool = False,
    ) -> Awaitable[InferResponse]:
        """Await a model's answer. Raises ServiceError. Cancelling the waiting task gives the request up.

        sender: whose sequences it may go on with. goes_on: it came in a conversation that is open.
        """
        return self._served(model, version, request, goes_on=goes_on).infer(request, sender)

    async def stream(
        self,
        model: str,
        version: str | None,
        request: InferRequest,
        sender: Sender = NOBODY,
        *,
        goes_on: bool = False,
    ) -> AsyncIterator[InferResponse]:
        """Yield a model's values as they are computed. Raises ServiceError. Closing the iterator gives it up."""
        served = self._served(model, version, request, goes_on=goes_on)
        if self.num_streams >= self.limits.max_streams:
            fault = ServiceError(
                FaultKind.UNAVAILABLE, f"{self.limits.max_streams} streams are open; try again later", 1.0
            )
            raise served.sequences.refused(request.parameters, sender, fault)
        self.num_streams += 1
        try:
            async with aclosing(served.stream(request, sender)) as parts:  # type: ignore[type-var]
                async for part in parts:
                    yield part
        finally:
            self.num_streams -= 1
