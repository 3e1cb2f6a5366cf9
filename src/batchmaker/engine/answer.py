"""What `Engine.submit` returns: one object on which a thread, an event loop or an iteration waits for a request.

It is made for every request, so it makes nothing for a way of waiting before somebody waits in that way.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol, final

from batchmaker.engine.observers import call_quietly
from batchmaker.errors import CancelledError, OptionError
from batchmaker.scheduler.events import RequestId

_END: Final = object()
"""What comes after the last streamed value."""


class Handover(Protocol):
    """What an answer needs of the engine that has taken its request; see `batchmaker.engine.loop.Loop`."""

    def cancel(self, request_id: RequestId) -> None: ...

    def release(self) -> None: ...


@final
class Answer:
    """The answer to one request: its result or its error, which may still be to come. Safe to use from any thread or
    event loop, by several at once.

        await answer                       # in asyncio; cancelling the task that awaits it cancels the request
        answer.result(timeout=5.0)         # in a thread
        for value in answer: ...           # its values as they come, if submitted with stream=True; also `async for`

    Two threads meet here: whoever holds the answer (the callers, any number of them) and whoever answers (the engine's
    thread, or another in its place while it hangs; never both, see Loop._unanswered). A lock for each request would
    cost more than all else here, so two rules stand in its place. Each needs no more than that one operation on a list
    is never interrupted by another.

    Who ends it: callers who cancel append an error to `_verdicts`, the thread that answers appends None; the first one
    in it holds, whatever comes behind. Only who was first writes the result or the error, and then sets `_is_done`,
    which is never taken back. So who sees `_is_done` sees the result.

    Who is woken: who wants to wait appends to `_waiting` first and looks at `_is_done` second; who ends it sets
    `_is_done` first and takes out of `_waiting` second. So in whatever order the four happen, one of the two sees the
    other. If both do, a thread or task is woken that does not sleep, which is no harm; functions are called by who gets
    them out of the list.
    """

    _is_done = False  # what most answers do not need is set where it is needed
    _result: Any = None
    _error: BaseException | None = None
    _values: Values | None = None

    def __init__(self, request_id: RequestId, handover: Handover, values: Values | None = None) -> None:
        self.request_id = request_id
        self._handover = handover
        self._verdicts: list[CancelledError | None] = []
        self._waiting: list[asyncio.Future[None] | Callable[[], object]] = []  # futures of event loops; or to be called
        if values is not None:
            self._values = values

    # --- for who has submitted -------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether the result or the error is there; a request that was cancelled is done."""
        return self._is_done

    def result(self, timeout: float | None = None) -> Any:
        """Return the result, or raise the request's error. Blocks the calling thread for up to `timeout` seconds.

        TimeoutError if it is not there by then; the request goes on. Not for coroutines, which `await` the answer, nor
        for callbacks in the engine's own thread, which would wait for themselves.
        """
        self._wait(timeout)
        try:
            return self._outcome()
        finally:
            del self  # an error has this frame in its traceback, and the answer has the error: a circle otherwise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As `result`, but return the request's error instead of raising it; None if there is a result."""
        self._wait(timeout)
        return self._error

    def add_done_callback(self, function: Callable[[Answer], object]) -> None:
        """Call `function` with this answer once it is done: in the thread that answers or cancels, which is mostly the
        engine's, so it must be quick; what it raises goes to the log. If it is done already: at once, in this thread.
        """
        called = partial(call_quietly, partial(function, self), "a callback of a request's answer")
        self._waiting.append(called)
        if self._is_done:
            try:
                self._waiting.remove(called)
            except ValueError:  # who ended it has taken it out, and calls it
                return
            function(self)

    def cancel(self) -> bool:
        """Give the request up, wherever it is; one that has not begun is never unfolded. Once is enough.

        Returns whether it had not been answered; then, whoever waits gets CancelledError. Its values may be held by the
        engine for a moment longer.
        """
        if self._verdicts:
            return self.is_cancelled
        error = CancelledError(f"request {self.request_id}: cancelled by the caller")
        self._verdicts.append(error)
        if self._verdicts[0] is not error:  # another caller, or the thread that answers, was faster
            return self.is_cancelled
        # Now the thread that answers finds this when it claims the request, and counts it as cancelled.
        self._error = error
        self._is_done = True
        for future in self._wake():
            call_soon(future.get_loop(), partial(wake_all, (future,)))
        # Last, and perhaps before the request has left this side (see Loop.hold): an engine that does not know it yet
        # ignores this, and sees `is_cancelled` before it unfolds it.
        self._handover.cancel(self.request_id)
        return True

    def __await__(self) -> Generator[Any, None, Any]:
        """The result, or the request's error is raised. Cancelling the task that awaits it cancels the request."""
        if not self._is_done:
            arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(arrived)  # resolved in its loop, as no other thread may
            if not self._is_done:
                try:
                    yield from arrived
                except asyncio.CancelledError:
                    # Perhaps it has been answered, and the loop has not told the task yet: then this does nothing.
                    self.cancel()
                    raise
        try:
            return self._outcome()
        finally:
            del self  # as in `result`

    def __iter__(self) -> Generator[Any, None, None]:
        """The request's values as they come; leaving the iteration early cancels it. OptionError without stream=True.

        Each value is given once, so a second iteration has those that are left. An error follows the last value.
        """
        return self._iterate(self._streamed("for"))

    def __aiter__(self) -> AsyncGenerator[Any, None]:
        """As `__iter__`, for `async for`."""
        return self._iterate_async(self._streamed("async for"))

    def __repr__(self) -> str:
        """Show which request it belongs to, and whether it is there."""
        said = "is waited for" if not self._is_done else "was cancelled" if self.is_cancelled else "is there"
        return f"<Answer to request {self.request_id}: {said}>"

    # --- for who answers -------------------------------------------------------------------------------------------

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody wants the result any more."""
        return bool(self._verdicts) and self._verdicts[0] is not None

    def claim(self) -> bool:
        """Let nobody cancel the request any more; False if somebody has. `settle` must follow.

        Between the two, the engine counts the request; so the counts and what the caller gets agree.
        """
        self._verdicts.append(None)
        return self._verdicts[0] is None

    def settle(self, result: Any, error: BaseException | None) -> Sequence[asyncio.Future[None]]:
        """Answer a request that was claimed: wake its threads and call its callbacks; return what event loops wait for,
        which are woken together with others; see wake_all."""
        if error is None:
            self._result = result
        else:
            self._error = error
        self._is_done = True
        return self._wake() if self._waiting or self._values is not None else ()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _outcome(self) -> Any:
        error = self._error
        if error is None:
            return self._result
        try:
            raise error
        finally:
            del self, error  # as in `result`

    def _wake(self) -> list[asyncio.Future[None]]:
        """Wake threads, call callbacks, and return what event loops wait for. By who has ended it, once it is done."""
        if self._values is not None:
            self._values.end()
        futures: list[asyncio.Future[None]] = []
        while self._waiting:
            try:
                waiter = self._waiting.pop(0)
            except IndexError:  # the last one saw that it is done, and has taken itself out
                break
            if isinstance(waiter, asyncio.Future):
                futures.append(waiter)
            else:
                waiter()
        return futures

    def _wait(self, timeout: float | None) -> None:
        """Block until it is done. TimeoutError after `timeout` seconds."""
        if self._is_done:
            return
        self._handover.release()  # in an event loop's thread, what it has submitted in this turn would wait for its end
        sleeping = threading.Lock()  # taken twice by this thread, and let go in between by who ends it
        sleeping.acquire()
        self._waiting.append(sleeping.release)
        seconds = -1.0 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
        if self._is_done or sleeping.acquire(timeout=seconds):
            return
        with suppress(ValueError):  # taken out by who ends it, in this moment
            self._waiting.remove(sleeping.release)  # who polls would leave one behind at each call
        if not self._is_done:
            raise TimeoutError(f"request {self.request_id} was not answered within {timeout} s; it goes on")

    def _streamed(self, statement: str) -> Values:
        if self._values is None:
            raise OptionError(
                f"request {self.request_id}: `{statement}` takes each value as it comes, which costs the engine work "
                "for every value, so it must be asked for: submit(request, stream=True). For the result alone, call "
                "result() or await the answer"
            )
        return self._values

    def _iterate(self, values: Values) -> Generator[Any, None, None]:
        self._handover.release()  # as in _wait
        finished = False
        try:
            while (value := values.take()) is not _END:
                yield value
            finished = True
        finally:
            if not finished:
                self.cancel()
        if self._error is not None:  # it was done before the end was put
            raise self._error

    async def _iterate_async(self, values: Values) -> AsyncGenerator[Any, None]:
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        finished = False
        # From here on, every value that is put is followed by a call of this, which sets the event in a later turn of
        # this loop.
        values.wakers[arrived] = lambda: call_soon(loop, arrived.set)
        try:
            while True:
                # Clear first and look second: what is put after the look sets the event after the clearing, so the
                # wait below ends. What was put before the look is found by it.
                arrived.clear()
                try:
                    value = values.take_now()
                except queue.Empty:
                    await arrived.wait()
                    continue
                if value is _END:
                    break
                yield value
            finished = True
        finally:
            values.wakers.pop(arrived, None)
            if not finished:
                self.cancel()
        if self._error is not None:
            raise self._error


@final
class Values:
    """The values of one request as they come. The engine's thread puts them; each is taken once, by whoever iterates.

    wakers: called after each value is put, by the engine's thread; event loops that iterate add themselves.
    """

    __slots__ = ("_has_ended", "_queue", "wakers")

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._has_ended = False
        self.wakers: dict[asyncio.Event, Callable[[], None]] = {}

    def put(self, value: Any) -> None:
        """Add a value. Called by the engine's thread."""
        self._queue.put(value)
        # Loops add and remove themselves meanwhile. Copying the values is one operation, and who comes after it looks
        # into the queue before it waits.
        for wake in list(self.wakers.values()):
            wake()

    def end(self) -> None:
        """Nothing more will come; called once the answer is done, by whoever ended it.

        If that is a caller who cancels, the engine's thread may still put values: they come after the end, and nobody
        is given them.
        """
        self.put(_END)

    def take(self) -> Any:
        """Return the next value, after waiting for it; `_END` after the last one, however often one asks."""
        return self._taken(self._queue.get())

    def take_now(self) -> Any:
        """As `take`, but queue.Empty is raised if nothing is there."""
        return self._taken(self._queue.get_nowait())

    def _taken(self, value: Any) -> Any:
        if value is _END or self._has_ended:
            self._has_ended = True
            self.put(_END)  # for whoever waits beside this one, or asks again
            return _END
        return value


def call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], Any]) -> None:
    """Schedule a callback on a loop that may already be closed; then nobody waits any more."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        return


def wake_all(futures: Sequence[asyncio.Future[None]]) -> None:
    """Let the tasks go on that await answers by these. In their event loop; some of them may have been cancelled."""
    for future in futures:
        if not future.done():
            future.set_result(None)
