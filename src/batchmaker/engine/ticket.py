"""One submitted request on its way through the engine, and how its answer reaches whoever waits."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, final

from batchmaker.cells.model import Model
from batchmaker.engine.chunks import Chunk
from batchmaker.scheduler.events import RequestId


@final
class Ticket:
    """A request, its times (engine seconds) and its answer.

    priority: larger is served first. trial: the engine's own, to prove a model; it is not counted. chunk: what makes it
    one of a sequence.
    future: resolves to the result or raises. on_value: called by the engine thread with each streamed value, then
    `on_end` once; both must return at once.
    """

    __slots__ = (
        "arrived_s", "chunk", "deadline_s", "finished_s", "future", "loop", "model", "model_id", "num_cells",
        "on_value", "priority", "request", "request_id", "started_s", "trial",
    )  # fmt: skip

    def __init__(
        self,
        request_id: RequestId,
        request: Any,
        arrived_s: float,
        deadline_s: float | None,
        *,
        model: Model,
        model_id: int = 0,
        priority: int = 0,
        trial: bool = False,
    ) -> None:
        self.request_id = request_id
        self.request = request
        self.arrived_s = arrived_s
        self.deadline_s = deadline_s
        self.model = model
        self.model_id = model_id
        self.priority = priority
        self.trial = trial
        self.chunk: Chunk | None = None
        self.started_s: float | None = None
        self.finished_s: float | None = None
        self.num_cells = 0
        self.future: Future[Any] | asyncio.Future[Any] | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.on_value: Callable[[Any], None] | None = None

    @property
    def is_urgent(self) -> bool:
        """Whether it should not wait for others to come before it is looked at."""
        return self.deadline_s is not None or self.priority != 0

    @property
    def is_late(self) -> bool:
        """Whether it was settled after its deadline."""
        return self.deadline_s is not None and self.finished_s is not None and self.finished_s > self.deadline_s

    @property
    def latency_s(self) -> float | None:
        """Seconds from arrival to answer, None while in flight."""
        return None if self.finished_s is None else self.finished_s - self.arrived_s

    @property
    def queue_s(self) -> float | None:
        """Seconds from arrival until the first cell began to run, None if none has."""
        return None if self.started_s is None else self.started_s - self.arrived_s


class Stream:
    """Values of one request as they come; iterate it with `async for` or `for`. Leaving early cancels the request."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._values: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._cancel = cancel
        self._wake: Callable[[], None] | None = None

    def put(self, value: Any) -> None:
        """Add a value. Called by the engine thread."""
        self._values.put(value)
        if self._wake is not None:
            self._wake()

    def end(self, error: BaseException | None) -> None:
        """End the stream, with an error or without. Called by the engine thread."""
        self._values.put(_End(error))
        if self._wake is not None:
            self._wake()

    def __iter__(self) -> Iterator[Any]:
        done = False
        try:
            while True:
                value = self._values.get()
                if isinstance(value, _End):
                    done = True
                    if value.error is not None:
                        raise value.error
                    return
                yield value
        finally:
            if not done:
                self._cancel()

    async def __aiter__(self) -> AsyncIterator[Any]:
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        self._wake = lambda: _call_soon(loop, arrived.set)
        done = False
        try:
            while True:
                try:
                    value = self._values.get_nowait()
                except queue.Empty:
                    arrived.clear()
                    if self._values.empty():
                        await arrived.wait()
                    continue
                if isinstance(value, _End):
                    done = True
                    if value.error is not None:
                        raise value.error
                    return
                yield value
        finally:
            self._wake = None
            if not done:
                self._cancel()


class _End:
    __slots__ = ("error",)

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], Any]) -> None:
    """Schedule a callback on a loop that may already be closed; then nobody waits any more."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        return


@final
class Outbox:
    """Answers collected during one turn of the engine and delivered together: one wake-up per event loop."""

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any, BaseException | None]]] = {}

    def deliver(self, ticket: Ticket, result: Any, error: BaseException | None) -> None:
        """Resolve the ticket's future, now or at the next flush."""
        future = ticket.future
        if isinstance(future, Future):
            if future.set_running_or_notify_cancel():
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)
        elif future is not None and ticket.loop is not None:
            self._by_loop.setdefault(ticket.loop, []).append((future, result, error))

    def flush(self) -> None:
        """Wake every loop that has answers waiting."""
        for loop, answers in self._by_loop.items():
            _call_soon(loop, partial(_resolve_all, answers))
        self._by_loop.clear()


def _resolve_all(answers: list[tuple[asyncio.Future[Any], Any, BaseException | None]]) -> None:
    for future, result, error in answers:
        if future.done():
            continue
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
