"""The chunks of one sequence of a connection: each handed to the engine, each answered, in order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, final

from batchmaker.server.chunk_exchange import LaneOwner
from batchmaker.server.chunk_form import ChunkForm
from batchmaker.server.faults import ServiceError
from batchmaker.server.messages import InferRequest
from batchmaker.server.request_body import HeldBytes
from batchmaker.server.sequences import ConnectedSequence
from batchmaker.server.served_model import ServedModel


@final
class LaneChunk:
    """A chunk that was read and is not answered. request: None for plain values. fault: why it has no result."""

    __slots__ = ("accepted", "began_s", "done", "error", "fault", "lane", "request", "result", "size")

    def __init__(self, lane: Lane, size: int) -> None:
        self.lane = lane
        self.size = size
        self.began_s = time.perf_counter()
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
    """The chunks of one sequence that are not answered.

    A chunk without an answer is the last one: the sequence has ended, and what was sent after it is not computed.

    owner: told when chunks have their answers. number: what it knows the lane by. held: the bytes of its chunks.
    """

    __slots__ = ("_chunks", "_form", "_held", "_served", "number", "owner", "sequence")

    def __init__(
        self, served: ServedModel, sequence: ConnectedSequence, form: ChunkForm, held: HeldBytes, owner: LaneOwner,
        number: int = 0,
    ) -> None:  # fmt: skip
        self._served = served
        self._form = form
        self._held = held
        self.sequence = sequence
        self.owner = owner
        self.number = number
        self._chunks: list[LaneChunk] = []

    @property
    def num_waiting(self) -> int:
        """Chunks that were taken and are not answered."""
        return len(self._chunks)

    def take(self, message: bytes | memoryview | str) -> None:
        """Hand a chunk to the engine, whose bytes are counted already. `is_done` tells whether it was refused."""
        chunk = LaneChunk(self, len(message))
        self._chunks.append(chunk)
        served, sequence = self._served, self.sequence
        try:
            if not isinstance(message, str) and self._form.takes_values:
                data, deadline_ms = self._form.read_values(message), self._form.deadline_ms
            else:
                chunk.request = request = self._form.read(
                    bytes(message) if isinstance(message, memoryview) else message
                )
                options, data = served.read_chunk(request, sequence)
                deadline_ms = options.deadline_ms
        except ServiceError as fault:
            self._refuse(chunk, fault)
        else:
            served.exchange.send(sequence.sequence, data, deadline_ms, chunk)

    def refuse(self, size: int, fault: ServiceError) -> None:
        """Answer a chunk with an error, which ends the sequence."""
        chunk = LaneChunk(self, size)
        self._chunks.append(chunk)
        self._refuse(chunk, fault)

    def _refuse(self, chunk: LaneChunk, fault: ServiceError) -> None:
        self._served.count_refusal(fault)
        self._served.exchange.hand_over()  # first those that were taken before it
        chunk.fault, chunk.done = self.sequence.refused(fault), True

    @property
    def is_done(self) -> bool:
        """Whether the first chunk can be answered."""
        return bool(self._chunks) and self._chunks[0].done

    def answers(self) -> Iterator[tuple[bytes | str, bool]]:
        """Yield the messages for the chunks that can be answered, and whether the sequence has ended with each."""
        chunks, answered_s = self._chunks, time.perf_counter()
        while chunks and chunks[0].done:
            chunk = chunks.pop(0)
            self._held.resize(self._held.size - chunk.size)
            try:
                said = self._said(chunk)
            except ServiceError as fault:
                request_id = "" if chunk.request is None else chunk.request.id
                yield self._form.write_fault(fault, request_id), not self.sequence.is_open
            else:
                self._served.statistics.note_answer(chunk.began_s, answered_s, time.perf_counter())
                yield said, False

    def _said(self, chunk: LaneChunk) -> bytes | str:
        """Return the message for a chunk. Raises ServiceError if it has no result."""
        if chunk.fault is not None:
            raise chunk.fault
        served, sequence = self._served, self.sequence
        if chunk.error is not None:
            fault = served.fault_of(chunk.error)
            if not chunk.accepted:
                served.count_refusal(fault)
            raise sequence.failed(chunk.error, fault) from chunk.error
        try:
            if chunk.request is None and self._form.gives_values:
                return served.values_of(self._form.write_values, chunk.result)
            response = served.response(chunk.request or self._form.plain, chunk.result)
        except ServiceError as fault:
            raise sequence.failed(fault, fault) from fault
        return self._form.write(response)

    def close(self) -> None:
        """Give up what is not answered, and end the sequence."""
        for chunk in self._chunks:
            self._held.resize(self._held.size - chunk.size)
        self._chunks = []
        self.sequence.close()
