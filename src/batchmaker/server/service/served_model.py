"""One version of one model, being served."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, nullcontext
from enum import StrEnum
from typing import Any, Final, TypeVar, final

from batchmaker.engine import StepsSeen, Ticket
from batchmaker.engine.request import SequenceEnd, SequenceEnded
from batchmaker.engine.sequence import Sequence
from batchmaker.errors import BatchmakerError, InvalidRequestError, OptionError, said_by
from batchmaker.model.model import Model
from batchmaker.server.access.sender import NOBODY, Sender
from batchmaker.server.faults import FaultKind, ServiceError, fault_of, invalid
from batchmaker.server.formats.chunk_form import ChunkForm
from batchmaker.server.formats.completions import completions_of
from batchmaker.server.formats.derived_signature import signature_of
from batchmaker.server.formats.messages import InferRequest, InferResponse
from batchmaker.server.formats.parameters import CallOptions, call_options, check_id, state_as_text
from batchmaker.server.formats.signature import Signature
from batchmaker.server.formats.tensors import Tensor
from batchmaker.server.formats.transcriptions import transcriber_of
from batchmaker.server.limits import Limits
from batchmaker.server.observe.chrome_trace import StepRing
from batchmaker.server.observe.statistics import ModelStatistics
from batchmaker.server.service.chunk_exchange import ChunkExchange
from batchmaker.server.service.engine_port import EngineOptions, EnginePort
from batchmaker.server.service.sequences import ONE_SEQUENCE, ConnectedSequence, OpenSequences, TakenChunk, Wording

_LOG = logging.getLogger("batchmaker.server")
RETRY_AFTER_S = 1.0
_END_S: Final = 5.0
"""Seconds for an idle engine to end; one that hangs is left behind."""

_MOST_FORMS: Final = 64
"""Queries whose form is kept for the next connection."""

_Work = TypeVar("_Work")
_Formed = TypeVar("_Formed")


class StopCause(StrEnum):
    """Why a model takes no more: it is unloaded, another was loaded in its place, or the server stops."""

    UNLOADED = "the model is being unloaded"
    REPLACED = "the model was loaded anew"
    SERVER = "the server is being stopped"


@final
class ServedModel:
    """A model version with its engine: takes requests until it is closed, and then finishes accepted ones."""

    def __init__(
        self, name: str, version: str, model: Model, options: EngineOptions, limits: Limits, trace_steps: int
    ) -> None:
        """Load: the engine starts and the example request is proved. Blocks. Raises every error of these."""
        self.name = name
        self.version = version
        self._limits = limits
        self.sequences_only = options.sequences_only
        self._port = EnginePort(model, options)
        try:
            self.signature: Signature = signature_of(model, *self._port.start())
            self.completions = completions_of(model, self.signature)
            self.transcriber = transcriber_of(model, self.signature, limits)
            if options.sequences_only and not self._port.takes_sequences:
                raise OptionError(
                    f"model {name!r} cannot be served with sequences_only: it has no unfold_chunk, or its policy "
                    "batches whole requests"
                )
        except BaseException:
            self._port.stop(drain=False, within_s=_END_S)
            raise
        self._single_outputs = self.signature.single_outputs
        self.statistics = ModelStatistics()
        self.sequences = OpenSequences(name, self._port, limits, self._sequence_ended)
        self.exchange = ChunkExchange(self._port, self.statistics)
        self.steps = StepRing(trace_steps)
        self.connected: set[Callable[[], None]] = set()
        """For each open connection with a sequence, a function that tells it to read no further."""
        self._forms: dict[tuple[tuple[str, str], ...], ChunkForm] = {}
        self._closing = False
        self.stop_cause: StopCause | None = None
        """Why connections with sequences were told to end, None while they were not."""
        self._port.watch(self._settled, self._stepped if trace_steps else None)

    def _settled(self, ticket: Ticket, error: BaseException | None) -> None:
        self.statistics.note_settled(ticket, error)

    def _sequence_ended(self, sender: Sender, ended: SequenceEnded) -> None:
        self.statistics.sequences_ended[ended.end] += 1
        as_asked = ended.end in (SequenceEnd.FINISHED, SequenceEnd.CLOSED)
        cause = self.stop_cause if ended.end is SequenceEnd.STOPPED else None
        _LOG.log(
            logging.DEBUG if as_asked else logging.INFO,
            "sequence ended",
            extra={
                "model": self.name,
                "client": sender.client,
                "why": cause or ended.said,
                "chunks": ended.num_chunks,
                "seconds": round(ended.lasted_s, 3),
            },
        )

    def _stepped(self, steps: StepsSeen) -> None:
        self.statistics.note_steps(steps)
        self.steps.add(steps)

    @property
    def ready(self) -> bool:
        """Whether it takes requests: it is not closing, and its engine responds."""
        return not self._closing and self.responds

    @property
    def responds(self) -> bool:
        """Whether its engine is alive and does not hang."""
        return self._port.responds_within(self._limits.hung_seconds)

    @property
    def port(self) -> EnginePort:
        """The engine, for monitoring."""
        return self._port

    def check_room(self) -> None:
        """Raise UNAVAILABLE, with when to try again, if no call for it would be accepted now, whatever it says.

        A chunk of an open sequence is never refused for want of room: there is a limit of sequences instead.
        """
        if not self.sequences.has_named:
            self._check_room()
        elif self._closing:
            self._check_ready()

    def _check_ready(self) -> None:
        if not self.ready:
            beat = self._port.heartbeat
            why = "is being stopped" if self._closing else "does not respond now" if beat.alive else "has failed"
            raise ServiceError(FaultKind.UNAVAILABLE, f"model {self.name!r} {why}", RETRY_AFTER_S)

    def _check_room(self) -> None:
        """Raise UNAVAILABLE if no more requests outside sequences are taken now, and no new sequences."""
        self._check_ready()
        if self.statistics.in_flight_alone >= self._limits.max_in_flight:
            raise ServiceError(
                FaultKind.UNAVAILABLE,
                f"model {self.name!r} has {self._limits.max_in_flight} requests in flight and takes no more now; "
                "try again later",
                RETRY_AFTER_S,
            )

    def check_kept(self) -> None:
        """Raise INVALID for a model without sequences, UNAVAILABLE if it takes no more now."""
        self._check_room()
        self.sequences.check_kept("ask it by infer or generate")

    def count_refusal(self, fault: ServiceError) -> None:
        """A call got this error before the engine had its request."""
        self.statistics.refused[fault.kind] += 1

    def connect(
        self, sender: Sender, priority: int, wording: Wording = ONE_SEQUENCE, state: bytes | None = None
    ) -> ConnectedSequence:
        """Begin a sequence of one connection. Raises ServiceError: see OpenSequences.connect, and check_room."""
        try:
            self._check_room()
            return self.sequences.connect(sender, priority, wording, state)
        except ServiceError as fault:
            self.count_refusal(fault)
            raise

    async def infer(self, request: InferRequest, sender: Sender = NOBODY) -> InferResponse:
        """Return a request's answer. Raises ServiceError; cancelling the caller's task frees the request's rows.

        sender: whose sequences it may go on with.
        """
        began_s = time.perf_counter()
        answer, chunk = self._accept(request, sender, self._port.submit)
        state = chunk.sequence.snapshot() if chunk is not None and chunk.wants_state else None
        submitted_s = time.perf_counter()
        with chunk or nullcontext():
            result = await self._guarded(answer)
            after = None if state is None else await self._guarded(state)
            answered_s = time.perf_counter()
            response = self.response(request, result, after)
        self.statistics.input_s += submitted_s - began_s
        self.statistics.note_answer(began_s, answered_s, time.perf_counter())
        return response

    def response(self, request: InferRequest, result: Any, state: bytes | None = None) -> InferResponse:
        """Return the response to a request with this result. INTERNAL if the result is not what the model declares.

        state: of its sequence after it, if it was asked for.
        """
        bare = result is None and not request.inputs  # the end of a sequence, or a reset
        outputs = () if bare else self._formed(self._outputs, result, request)
        parameters = {} if state is None else {"sequence_state": state_as_text(state)}
        return InferResponse(self.name, self.version, outputs, request.id, self._single_outputs, parameters)

    def chunk_form(self, query: Mapping[str, str], *, nulls: bool) -> ChunkForm:
        """Return the form of a connection's chunks, the same for all with this query. Raises as ChunkForm does."""
        key = tuple(query.items())
        form = self._forms.get(key)
        if form is None:
            form = ChunkForm(self.signature, query, self._limits, nulls=nulls)
            if len(self._forms) < _MOST_FORMS:
                self._forms[key] = form
        return form

    def values_of(self, write: Callable[[Any], bytes], result: Any) -> bytes:
        """Return what `write` makes of a result. INTERNAL if the result is not what the model declares."""
        return self._formed(write, result)

    def read_chunk(self, request: InferRequest, sequence: ConnectedSequence) -> tuple[CallOptions, Any]:
        """Return the options of a chunk of a connection, and the argument of `unfold_chunk`. ServiceError if wrong."""
        check_id(request.id)
        options = call_options(request.parameters)
        sequence.check(options)
        self.signature.check_outputs(request.outputs)
        return options, self._encoded(self.signature.to_request(request.inputs, self._limits))

    async def stream(self, request: InferRequest, sender: Sender = NOBODY) -> AsyncIterator[InferResponse]:
        """Yield a request's values as they are computed; see Signature.to_part. Otherwise as `infer`."""
        if self.signature.decode is not None or "sequence_state" in request.parameters:
            yield await self.infer(request, sender)
            return
        begin = time.perf_counter()
        work, chunk = self._accept(request, sender, self._port.stream)
        first, single = True, self.signature.single_parts
        with chunk or nullcontext():
            async with aclosing(work) as values:
                while True:
                    try:
                        value = await self._guarded(anext(values))
                    except StopAsyncIteration:
                        self.statistics.duration_s.add(time.perf_counter() - begin)
                        return
                    if first:
                        self.statistics.first_response_s.add(time.perf_counter() - begin)
                        first = False
                    outputs = self._formed(self.signature.to_part, value)
                    yield InferResponse(self.name, self.version, outputs, request.id, single)

    def _accept(
        self,
        request: InferRequest,
        sender: Sender,
        ask: Callable[[Any, CallOptions, Sequence | None], _Work],
    ) -> tuple[_Work, TakenChunk | None]:
        """Count a request as accepted; return the result of `ask` and its place in a sequence if it has one.

        Raises ServiceError for a refused request, which ends the sequence that it is a chunk of.
        """
        try:
            options, data = self._read(request, sender)
            chunk = self.sequences.take(options, sender)
            if chunk is not None and data is None and options.chunk is not None:
                chunk.only_asks = options.chunk.only_asks
            try:
                work = ask(data, options, None if chunk is None else chunk.sequence)
            except BatchmakerError as error:  # the engine has not got it
                fault = self.fault_of(error)
                raise (fault if chunk is None else chunk.refused(fault)) from error
        except ServiceError as fault:
            self.count_refusal(fault)
            raise
        if data is not None or chunk is None or self._port.is_request(options):
            self.statistics.accepted += 1
            self.statistics.accepted_chunks += chunk is not None
        return work, chunk

    def _read(self, request: InferRequest, sender: Sender) -> tuple[CallOptions, Any]:
        """Return a request's options and the argument of `unfold`. ServiceError if it is wrong or there is no room."""
        try:
            check_id(request.id)
            options = call_options(request.parameters)
            if self.sequences_only and options.chunk is None:
                raise invalid(
                    f"model {self.name!r} takes chunks of sequences alone: send sequence_id, with sequence_start in "
                    "the first request and sequence_end in the last"
                )
            if options.chunk is None or options.chunk.start:
                self._check_room()
            elif self._closing:
                self._check_ready()
            self.signature.check_outputs(request.outputs)
            of = options.chunk
            if of is not None and of.needs_no_input and not request.inputs:
                return options, None
            return options, self._encoded(self.signature.to_request(request.inputs, self._limits))
        except ServiceError as fault:
            raise self.sequences.refused(request.parameters, sender, fault) from fault.__cause__

    def _encoded(self, value: Any) -> Any:
        """Return the argument of the model's `unfold`. ServiceError if its `encode` raises."""
        if self.signature.encode is None:
            return value
        try:
            return self.signature.encode(value)
        except BatchmakerError as error:
            raise self.fault_of(error) from error
        except Exception as error:
            wrong = InvalidRequestError(f"encode raised {said_by(error)}")
            wrong.__cause__ = error  # for the log, not for the client
            raise self.fault_of(wrong) from error

    def _outputs(self, result: Any, request: InferRequest) -> tuple[Tensor, ...]:
        """Return the requested outputs. ValueError if the model's `decode` raises."""
        if self.signature.decode is not None:
            client_input = self.signature.to_request(request.inputs, self._limits) if request.inputs else None
            try:
                result = self.signature.decode(result, client_input)
            except Exception as error:
                raise ValueError(f"decode raised {said_by(error)}") from error
        return self.signature.to_outputs(result, request.outputs)

    async def _guarded(self, work: Any) -> Any:
        """Await the engine; its errors become faults, and details for the log only are logged."""
        try:
            return await work
        except (asyncio.CancelledError, StopAsyncIteration):
            raise
        except Exception as error:
            if not isinstance(error, BatchmakerError):
                self.statistics.accepted -= 1  # the engine has not got it
            raise self.fault_of(error) from error

    def fault_of(self, error: BaseException) -> ServiceError:
        """Return the fault that the client sees for an error of the engine."""
        fault = fault_of(error)
        if self._closing and fault.kind is FaultKind.CANCELLED:
            fault = ServiceError(FaultKind.UNAVAILABLE, "the server stopped before the request was done", RETRY_AFTER_S)
        if fault.kind is FaultKind.INTERNAL or error.__cause__ is not None:
            _LOG.warning("request failed", extra={"model": self.name, "error": f"{type(error).__name__}: {error}"})
        return fault

    def _formed(self, form: Callable[..., _Formed], *values: Any) -> _Formed:
        try:
            return form(*values)
        except (ValueError, TypeError, KeyError) as error:
            _LOG.warning("result does not fit the signature", extra={"model": self.name, "error": str(error)})
            raise ServiceError(FaultKind.INTERNAL, "the model's result does not fit its own signature") from error

    def refuse(self, cause: StopCause) -> None:
        """Refuse new requests from now on; accepted ones continue."""
        self._closing = self.sequences.stopping = True
        self.hang_up(cause)

    def hang_up(self, cause: StopCause) -> None:
        """Let every connection with a sequence answer the chunks it has read, and end."""
        self.stop_cause = self.stop_cause or cause
        for stop in tuple(self.connected):
            stop()

    async def close(self, within_s: float, cause: StopCause = StopCause.SERVER) -> bool:
        """Take no more requests, finish accepted ones, for `within_s` at most, and end.

        Returns whether all were finished.
        """
        self.refuse(cause)
        end = time.monotonic() + within_s
        while self.statistics.in_flight and self._port.heartbeat.alive and time.monotonic() < end:
            await asyncio.sleep(0.02)
        done = self.statistics.in_flight == 0
        if not await asyncio.to_thread(self._port.stop, drain=done, within_s=_END_S):
            _LOG.error("the model's engine hangs and is left behind", extra={"model": self.name})
        return done
