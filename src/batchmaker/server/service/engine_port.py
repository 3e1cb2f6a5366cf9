"""The only file of the server that calls the engine."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal, final

from batchmaker.clock import RealClock
from batchmaker.engine import Answer, DriverStats, Engine, StepsSeen, Ticket
from batchmaker.engine.cell_driver import CellDriver
from batchmaker.engine.heartbeat import Heartbeat
from batchmaker.engine.request import AnswerTaker, SequenceEnded
from batchmaker.engine.sequence import Sequence
from batchmaker.errors import BatchmakerError
from batchmaker.model.model import Model
from batchmaker.model.unfolding import takes_last
from batchmaker.server.formats.parameters import CallOptions


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of a model's engine; see Engine.

    sequences_only: requests outside sequences are refused, and Triton's clients are told so.
    """

    policy: str | None = None
    workers: int | Literal["auto"] = "auto"
    threads: int | None = None
    max_nodes: int = 100_000
    max_sequences: int = 1024
    device: str = "cpu"
    priorities: Literal["aged", "strict"] = "aged"
    deterministic: bool = False
    sequences_only: bool = False


@final
class EnginePort:
    """One engine with one model, started and proved."""

    def __init__(self, model: Model, options: EngineOptions) -> None:
        self._model = model
        self._engine = Engine(
            model,
            options.policy,
            workers=options.workers,
            threads=options.threads,
            max_nodes=options.max_nodes,
            max_sequences=options.max_sequences,
            device=options.device,
            priorities=options.priorities,
            deterministic=options.deterministic,
        )

    def start(self) -> tuple[Any, list[Any]]:
        """Start; return the result of the example request, and its values as they stream.

        Without an example request these are None and empty. Blocks while every cell runs at every batch size.
        """
        self._engine.start()
        if self.takes_sequences:
            self._engine.identity()  # reads all weights: not while requests wait
        example = self._model.example_request
        if example is None:
            return None, []
        result = self._engine.submit(example, deadline_ms=math.inf).result()
        return result, list(self._engine.submit(example, deadline_ms=math.inf, stream=True))

    def watch(
        self, on_settled: Callable[[Ticket, BaseException | None], None], on_steps: Callable[[StepsSeen], None] | None
    ) -> None:
        """From now on call these in the engine's thread, with every answer and all finished steps."""
        self._engine.on_settled = on_settled
        self._engine.observe_together(on_steps)

    def stop(self, *, drain: bool, within_s: float | None = None) -> bool:
        """Take no more requests; finish the accepted ones, or cancel them.

        Blocks until the engine has ended, or for `within_s`; returns whether it has ended. See Engine.stop.
        """
        return self._engine.stop(drain=drain, within_s=within_s)

    def responds_within(self, seconds: float) -> bool:
        """Whether the engine is alive and does not hang."""
        return self._engine.responds_within(seconds)

    @property
    def heartbeat(self) -> Heartbeat:
        """The present activity of the engine's thread."""
        return self._engine.heartbeat

    def submit(self, request: Any, options: CallOptions, sequence: Sequence | None) -> Answer:
        """Submit a request and await its answer. Cancelling the waiting task frees the request's rows.

        sequence: the sequence of the chunk. If it has ended, SequenceError is raised at once, before the engine gets
        the request.
        """
        if sequence is not None:
            return _chunk(sequence, request, options, stream=False)
        return self._engine.submit(request, deadline_ms=options.deadline_ms, priority=options.priority)

    def stream(self, request: Any, options: CallOptions, sequence: Sequence | None) -> AsyncGenerator[Any, None]:
        """Return a request's values as they come. Closing the iterator, once begun, frees the request's rows.

        Otherwise as `submit`.
        """
        if sequence is not None:
            return _values(_chunk(sequence, request, options, stream=True))
        deadline_ms, priority = options.deadline_ms, options.priority
        return _values(self._engine.submit(request, deadline_ms=deadline_ms, priority=priority, stream=True))

    def send_chunks(
        self, chunks: Iterable[tuple[Sequence, Any, float | None, Any]], answers: AnswerTaker
    ) -> list[tuple[Any, BatchmakerError]]:
        """Submit chunks of many sequences; see Engine.send_chunks. The answers come in the engine's thread."""
        return self._engine.send_chunks(chunks, answers)

    def is_request(self, options: CallOptions) -> bool:
        """Whether what comes without a chunk is a request to the model: the end of a sequence, if it wants to know."""
        return options.chunk is not None and options.chunk.end and takes_last(type(self._model))

    @property
    def takes_sequences(self) -> bool:
        """Whether requests may be chunks of sequences."""
        return self._model.takes_chunks and isinstance(self._engine.driver, CellDriver)

    def finish(self, sequence: Sequence, chunk: Any, deadline_ms: float | None) -> tuple[Answer, bool]:
        """Submit the last chunk, None for none; return its answer, and whether it is a request to the model."""
        counted = chunk is not None or takes_last(type(self._model))
        return sequence.finish(chunk, deadline_ms=deadline_ms), counted

    def open_sequence(
        self, priority: int, idle_s: float, on_ended: Callable[[SequenceEnded], None], state: bytes | None = None
    ) -> Sequence:
        """Begin a sequence, which ends when closed, or idle for `idle_s`. Raises as Engine.open_sequence does.

        on_ended: called in the engine's thread when it has. state: what it goes on from.
        """
        return self._engine.open_sequence(priority=priority, idle_timeout_s=idle_s, on_ended=on_ended, state=state)

    @property
    def num_sequences(self) -> int:
        """Number of open sequences."""
        return self._engine.num_sequences

    @property
    def clock(self) -> RealClock:
        """The clock of the times in tickets and steps."""
        return self._engine.clock

    @property
    def stats(self) -> DriverStats:
        """The engine's own counts."""
        return self._engine.stats


def _chunk(sequence: Sequence, request: Any, options: CallOptions, *, stream: bool) -> Answer:
    """Submit a chunk. request: None for an end, or a reset, without one."""
    chunk = options.chunk
    if chunk is not None and chunk.reset:
        sequence.reset()
    if request is None and chunk is not None and not chunk.end:
        return sequence.settled()
    if chunk is not None and chunk.end:
        return sequence.finish(request, deadline_ms=options.deadline_ms, stream=stream)
    return sequence.submit(request, deadline_ms=options.deadline_ms, stream=stream)


async def _values(answer: Answer) -> AsyncGenerator[Any, None]:
    async with aclosing(aiter(answer)) as values:
        async for value in values:
            yield value
