"""The only file of the server that calls the engine."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, final

from batchmaker.clock import RealClock
from batchmaker.engine import Answer, DriverStats, Engine, StepSeen, Ticket
from batchmaker.engine.cell_driver import CellDriver
from batchmaker.engine.heartbeat import Heartbeat
from batchmaker.engine.sequence import Sequence
from batchmaker.model.model import Model
from batchmaker.server.parameters import CallOptions


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the engine of a model is made with; see Engine."""

    policy: str | None = None
    workers: int = 1
    threads: int | None = None
    max_nodes: int = 100_000
    max_sequences: int = 1024
    device: str = "cpu"


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
        )

    def start(self) -> tuple[Any, list[Any]]:
        """Start, and return what becomes of the example request: its result, and its values as they stream.

        Both are None and empty where the model has no example request. Blocks while cells are materialised.
        """
        self._engine.start()
        example = self._model.example_request
        if example is None:
            return None, []
        result = self._engine.submit(example, deadline_ms=math.inf).result()
        return result, list(self._engine.submit(example, deadline_ms=math.inf, stream=True))

    def watch(
        self, on_settled: Callable[[Ticket, BaseException | None], None], on_step: Callable[[StepSeen], None] | None
    ) -> None:
        """Call these from now on, in the engine's thread, with every answer and every finished step."""
        self._engine.on_settled = on_settled
        self._engine.observe(on_step)

    def stop(self, *, drain: bool, within_s: float | None = None) -> bool:
        """Take no more requests; finish those accepted, or cancel them. Blocks until the engine has ended, or for
        `within_s`; returns whether it has. See Engine.stop."""
        return self._engine.stop(drain=drain, within_s=within_s)

    @property
    def heartbeat(self) -> Heartbeat:
        """What the engine's thread does now."""
        return self._engine.heartbeat

    def submit(self, request: Any, options: CallOptions, sequence: Sequence | None) -> Answer:
        """Hand a request over; await its answer. Cancelling the task that waits for it frees the request's rows.

        sequence: of which it is a chunk. If that has ended, SequenceError comes at once, and the engine had nothing.
        """
        if sequence is not None:
            return sequence.submit(request, deadline_ms=options.deadline_ms)
        return self._engine.submit(request, deadline_ms=options.deadline_ms, priority=options.priority)

    def stream(self, request: Any, options: CallOptions, sequence: Sequence | None) -> AsyncGenerator[Any, None]:
        """Return a request's values, as they come. Closing the iterator, once it is begun, frees the request's rows.

        Otherwise as `submit`.
        """
        if sequence is not None:
            return _values(sequence.submit(request, deadline_ms=options.deadline_ms, stream=True))
        deadline_ms, priority = options.deadline_ms, options.priority
        return _values(self._engine.submit(request, deadline_ms=deadline_ms, priority=priority, stream=True))

    @property
    def takes_sequences(self) -> bool:
        """Whether requests may be chunks of sequences."""
        return self._model.takes_chunks and isinstance(self._engine.driver, CellDriver)

    def open_sequence(self, priority: int, idle_s: float) -> Sequence:
        """Begin a sequence, which ends when closed, or idle for `idle_s`. Raises what Engine.open_sequence does."""
        return self._engine.open_sequence(priority=priority, idle_timeout_s=idle_s)

    @property
    def num_sequences(self) -> int:
        """Sequences that are open."""
        return self._engine.num_sequences

    @property
    def clock(self) -> RealClock:
        """What the times of tickets and steps refer to."""
        return self._engine.clock

    @property
    def stats(self) -> DriverStats:
        """The engine's own counts."""
        return self._engine.stats


async def _values(answer: Answer) -> AsyncGenerator[Any, None]:
    async with aclosing(aiter(answer)) as values:
        async for value in values:
            yield value
