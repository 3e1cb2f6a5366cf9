"""What one sequence of a connection is sent: each handed to the engine, each answered, in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, NamedTuple, final

from batchmaker.engine import Answer
from batchmaker.errors import BatchmakerError, SequenceStateError
from batchmaker.server.access.request_body import HeldBytes
from batchmaker.server.faults import ServiceError
from batchmaker.server.formats.chunk_form import ChunkForm
from batchmaker.server.formats.messages import InferRequest
from batchmaker.server.service.chunk_exchange import LaneOwner
from batchmaker.server.service.sequences import ConnectedSequence
from batchmaker.server.service.served_model import ServedModel


class AnswerKind(Enum):
    """What an answer holds. The values are those of frames; see `sequence_frames`."""

    VALUES = 0
    NOTHING = 1
    STATE = 2
    FAULT = 3


class LaneAnswer(NamedTuple):
    """data: values, text or bytes. about: the control that it answers, "" for a chunk. is_last: none comes after it."""

    kind: AnswerKind
    data: bytes | str
    about: str
    is_last: bool


@final
class LaneChunk:
    """A chunk, or something else that a sequence is sent, that is not answered.

    about: "" for a chunk, otherwise what it is. is_last: the sequence is finished with it. request: None for plain
    values. fault: why it has no result, if that is known already.
    """

    __slots__ = (
        "about", "accepted", "began_s", "done", "error", "fault", "is_last", "lane", "request", "result", "size",
    )  # fmt: skip

    def __init__(self, lane: Lane, size: int, about: str = "") -> None:
        self.lane = lane
        self.size = size
        self.about = about
        self.began_s = time.perf_counter()
        self.is_last = False
        self.request: InferRequest | None = None
        self.fault: ServiceError | None = None
        self.error: BaseException | None = None
        self.result: Any = None
        self.accepted = True
        self.done = False

    def settle(self, result: Any, error: BaseException | None, *, accepted: bool) -> None:
        """Take the engine's answer."""
        self.result, self.error, self.accepted, self.done = result, error, accepted, True


@final
class Lane:
    """What one sequence was sent and has not answered.

    A chunk without an answer is the last one: the sequence has ended, and what was sent after it is not computed.

    owner: told when chunks have their answers. number: what it knows the lane by. held: the bytes of its chunks.
    """

    __slots__ = ("_chunks", "_form", "_held", "_served", "has_failed", "is_finished", "number", "owner", "sequence")

    def __init__(
        self,
        served: ServedModel,
        sequence: ConnectedSequence,
        form: ChunkForm,
        held: HeldBytes,
        owner: LaneOwner,
        number: int = 0,
    ) -> None:
        self._served = served
        self._form = form
        self._held = held
        self.sequence = sequence
        self.owner = owner
        self.number = number
        self.is_finished = False
        """Whether the last chunk was taken, or one was refused."""
        self.has_failed = False
        """Whether one was refused."""
        self._chunks: list[LaneChunk] = []

    @property
    def num_waiting(self) -> int:
        """Chunks that were taken and are not answered."""
        return len(self._chunks)

    # --- what it is sent, whose bytes are counted already; `is_done` tells whether there is an answer at once ------

    def take(self, message: bytes | memoryview | str, *, last: bool = False) -> None:
        """Hand a chunk to the engine. last: finish the sequence with it."""
        chunk = self._entered(len(message))
        served, sequence = self._served, self.sequence
        try:
            if not isinstance(message, str) and self._form.takes_values:
                data, deadline_ms = self._form.read_values(message), self._form.deadline_ms
            else:
                whole = bytes(message) if isinstance(message, memoryview) else message
                chunk.request, marked = self._form.read_chunk(whole)
                options, data = served.read_chunk(chunk.request, sequence)
                deadline_ms, last = options.deadline_ms, last or marked
        except ServiceError as fault:
            self._refuse(chunk, fault)
        else:
            if last:
                self._finish(chunk, data, deadline_ms)
            else:
                served.exchange.send(sequence.sequence, data, deadline_ms, chunk)

    def finish(self) -> None:
        """Finish the sequence without a further chunk."""
        self._finish(self._entered(0), None, self._form.deadline_ms)

    def reset(self, *, answered: bool = True) -> None:
        """Have the chunks that come next begin from no state. answered: as a chunk is."""
        if answered:
            self._ask(self._entered(0, "reset"), self.sequence.sequence.reset)
        else:
            self._served.exchange.hand_over()
            if self.sequence.is_open:  # otherwise the next chunk says so
                self.sequence.sequence.reset()

    def ask_state(self) -> None:
        """Ask for the state after what was sent before."""
        self._ask(self._entered(0, "state"), self.sequence.sequence.snapshot)

    def confirm(self, about: str) -> None:
        """Answer, in order, that something was done."""
        self._entered(0, about).done = True

    def refuse(self, size: int, fault: ServiceError) -> None:
        """Answer a chunk with an error, which ends the sequence."""
        self._refuse(self._entered(size), fault)

    def _entered(self, size: int, about: str = "") -> LaneChunk:
        chunk = LaneChunk(self, size, about)
        self._chunks.append(chunk)
        return chunk

    def _finish(self, chunk: LaneChunk, data: Any, deadline_ms: float | None) -> None:
        exchange, port = self._served.exchange, self._served.port

        def ask() -> Answer:
            answer, counted = port.finish(self.sequence.sequence, data, deadline_ms)
            if counted:
                exchange.count()
            return answer

        self.is_finished = chunk.is_last = True
        chunk.about = "end"
        self._ask(chunk, ask)

    def _ask(self, chunk: LaneChunk, ask: Callable[[], Answer]) -> None:
        try:
            self._served.exchange.ask(ask, chunk)
        except BatchmakerError as error:
            chunk.settle(None, error, accepted=False)

    def _refuse(self, chunk: LaneChunk, fault: ServiceError) -> None:
        self._served.count_refusal(fault)
        self._served.exchange.hand_over()  # first those that were taken before it
        self.has_failed = self.is_finished = True
        chunk.fault, chunk.done = self.sequence.refused(fault), True

    # --- what it answers ---------------------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        """Whether the first chunk can be answered."""
        return bool(self._chunks) and self._chunks[0].done

    def answers(self) -> Iterator[LaneAnswer]:
        """Yield the answers that there are, up to the last one of the sequence."""
        chunks, answered_s = self._chunks, time.perf_counter()
        while chunks and chunks[0].done:
            chunk = chunks.pop(0)
            self._held.resize(self._held.size - chunk.size)
            answer = self._answer(chunk)
            if answer.kind is AnswerKind.VALUES:
                self._served.statistics.note_answer(chunk.began_s, answered_s, time.perf_counter())
            yield answer
            if answer.is_last:
                return

    def _answer(self, chunk: LaneChunk) -> LaneAnswer:
        if chunk.fault is not None:
            return self._fault(chunk, chunk.fault, is_last=True)
        served, sequence, form = self._served, self.sequence, self._form
        if chunk.error is not None:
            fault = served.fault_of(chunk.error)
            if not chunk.accepted:
                served.count_refusal(fault)
            if chunk.about == "state" and isinstance(chunk.error, SequenceStateError):  # nothing was lost
                return self._fault(chunk, fault, is_last=False)
            return self._fault(chunk, sequence.failed(chunk.error, fault), is_last=True)
        if chunk.about == "state":
            return LaneAnswer(AnswerKind.STATE, chunk.result, "state", is_last=False)
        if chunk.about and chunk.result is None:
            return LaneAnswer(AnswerKind.NOTHING, b"", chunk.about, chunk.is_last)
        try:
            if chunk.request is None and form.gives_values:
                values = served.values_of(form.write_values, chunk.result)
                return LaneAnswer(AnswerKind.VALUES, values, chunk.about, chunk.is_last)
            response = served.response(chunk.request or form.plain, chunk.result)
        except ServiceError as error:
            return self._fault(chunk, sequence.failed(error, error), is_last=True)
        try:
            return LaneAnswer(AnswerKind.VALUES, form.write(response), chunk.about, chunk.is_last)
        except ServiceError as error:  # what the form cannot hold; the sequence goes on
            return self._fault(chunk, error, is_last=chunk.is_last)

    def _fault(self, chunk: LaneChunk, fault: ServiceError, *, is_last: bool) -> LaneAnswer:
        request_id = "" if chunk.request is None else chunk.request.id
        return LaneAnswer(AnswerKind.FAULT, self._form.write_fault(fault, request_id), chunk.about, is_last)

    def close(self, *, stopped: bool = False) -> None:
        """Give up what is not answered, and end the sequence. stopped: the server ends it, not its client."""
        for chunk in self._chunks:
            self._held.resize(self._held.size - chunk.size)
        self._chunks = []
        self.sequence.close(stopped=stopped)
