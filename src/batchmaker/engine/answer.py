"""The answer to a request: what `Engine.submit` returns. Threads, event loops and iterations wait for it.

An answer is made for every request. So the lock or future for a way of waiting is made only when somebody waits so.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NoReturn, Protocol, final

from batchmaker.core.events import RequestId
from batchmaker.engine.observers import call_quietly
from batchmaker.errors import CancelledError, OptionError

_END: Final = object()
"""Marks the end of the streamed values in a queue."""


class Handover(Protocol):
    """The part of the engine that an answer uses; see `batchmaker.engine.worker.Worker`."""

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller runs in the engine's thread, which must not wait for an answer."""
        ...

    def cancel(self, request_id: RequestId) -> None:
        """Give a request up, from any thread."""
        ...

    def release(self) -> None:
        """Hand over the requests that are held until the end of an event loop's turn."""
        ...


def waits_for_itself() -> OptionError:
    """Return the error of a caller in the engine's own thread that is about to wait for it."""
    return OptionError(
        "an answer was waited for in the engine's own thread (in an unfold function, a callback or the end of a loop), "
        "which would wait for itself. In an unfold function call cells, and `yield` a value that is needed; from a "
        "callback hand the work to another thread"
    )


@final
class Answer:
    """The answer to one request: its result or its error, which may not exist yet.

    Any number of threads and event loops may use it at the same time.

        await answer                       # in asyncio; cancelling the task that awaits it cancels the request
        answer.result(timeout=5.0)         # in a thread
        for value in answer: ...           # its values as they come, if submitted with stream=True; also `async for`

    Races: two kinds of threads meet here. The callers hold the answer. One thread answers: the engine's thread, or
    another one while the engine's thread hangs, but never both (see Worker._unanswered). A lock for each request would
    cost more than everything else in this class. Two rules replace it. They need only that one operation on a list
    (append, pop, remove) is never interrupted by another thread.

    Rule 1, who ends the request. A caller that cancels appends an error to `verdicts`; the thread that answers appends
    None, which is its claim (see Unanswered.claim). The first entry decides; later ones are ignored. Only the thread
    that appended the first entry writes the result or the error. After that it sets `_is_done`, which is never reset.
    So a thread that sees `_is_done` also sees the result. The engine counts requests between its claim and `settle`, so
    its counts agree with what callers get.

    Rule 2, who is woken. A thread that wants to wait first appends to `_waiting` and then reads `_is_done`. The thread
    that ends the request first sets `_is_done` and then empties `_waiting`. In every order of these four operations at
    least one of the two threads sees the other. If both do, a thread or task is woken that does not sleep, which does
    no harm. A callback is called by the thread that removes it from the list, so it is called once.
    """

    _is_done = False  # class defaults: few answers set all of these, and an answer must be cheap to make
    _result: Any = None
    _error: BaseException | None = None
    _values: Values | None = None

    def __init__(self, request_id: RequestId, handover: Handover, values: Values | None = None) -> None:
        self.request_id = request_id
        self.handover = handover
        self.verdicts: list[CancelledError | None] = []
        self._waiting: list[asyncio.Future[None] | Callable[[], object]] = []  # futures of event loops, or functions
        if values is not None:
            self._values = values

    # --- for the caller --------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether the result or the error exists. A cancelled request is done."""
        return self._is_done

    def result(self, timeout: float | None = None) -> Any:
        """Return the result, or raise the request's error. Blocks the calling thread for up to `timeout` seconds.

        Raises TimeoutError if there is neither by then; the request goes on. Do not call it in a coroutine: `await` the
        answer there. OptionError in the engine's own thread, such as in a callback or an unfold function, which would
        wait for itself.
        """
        if not self._is_done:
            self._wait(timeout)
        try:
            return self._result if self._error is None else self._failure()
        finally:
            del self  # otherwise a cycle: the answer holds the error, its traceback this frame, the frame the answer

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the request's error, or None if it has a result. Waits, and raises TimeoutError, as `result` does."""
        self._wait(timeout)
        return self._error

    def add_done_callback(self, function: Callable[[Answer], object]) -> None:
        """Call `function` with this answer once it is done.

        It is called in the thread that answers or cancels. This is usually the engine's thread, so it must be quick.
        What it raises goes to the log. If the answer is done already, `function` is called at once in this thread, and
        what it raises is raised here.
        """
        called = partial(call_quietly, partial(function, self), "a callback of a request's answer")
        self._waiting.append(called)
        if self._is_done:
            try:
                self._waiting.remove(called)
            except ValueError:  # the thread that ended the request has removed it, and calls it
                return
            function(self)

    def cancel(self) -> bool:
        """Give the request up, in whatever state it is. A request that has not begun is never unfolded.

        Returns True if the request is cancelled, by this call or an earlier one: everybody who waits gets
        CancelledError. Returns False if it was answered before. The engine may hold its values for a moment longer.
        """
        if self.verdicts:
            return self.is_cancelled
        error = CancelledError(f"request {self.request_id}: cancelled by the caller")
        self.verdicts.append(error)
        if self.verdicts[0] is not error:  # another caller, or the thread that answers, was faster
            return self.is_cancelled
        # From now on the thread that answers finds this error in `verdicts`, and counts the request as cancelled.
        self._error = error
        self._is_done = True
        for future in self._wake():
            call_soon(future.get_loop(), partial(wake_all, (future,)))
        # This comes last. The engine may not have the request yet (see Worker.hold). Then it ignores this call, and
        # reads `is_cancelled` before it unfolds the request.
        self.handover.cancel(self.request_id)
        return True

    def __await__(self) -> Generator[Any, None, Any]:
        """Return the result, or raise the request's error. Cancelling the task that awaits it cancels the request."""
        if not self._is_done:
            arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(arrived)  # only its own event loop may resolve it; see call_soon
            if not self._is_done:
                try:
                    yield from arrived
                except asyncio.CancelledError:
                    # The request may be answered already, and the task not woken yet. Then this does nothing.
                    self.cancel()
                    raise
        try:
            return self._result if self._error is None else self._failure()
        finally:
            del self  # as in `result`

    def __iter__(self) -> Generator[Any, None, None]:
        """Iterate over the request's values as they come. Leaving the iteration early cancels the request.

        Each value is given once, so a second iteration gets only the values that are left. The request's error is
        raised after the last value. Raises OptionError if the request was submitted without stream=True.
        """
        return self._iterate(self._streamed("for"))

    def __aiter__(self) -> AsyncGenerator[Any, None]:
        """As `__iter__`, for `async for`."""
        return self._iterate_async(self._streamed("async for"))

    def __repr__(self) -> str:
        """Show the request's number, and whether it is answered."""
        said = "is waited for" if not self._is_done else "was cancelled" if self.is_cancelled else "is there"
        return f"<Answer to request {self.request_id}: {said}>"

    # --- for the thread that answers -------------------------------------------------------------------------------

    @property
    def is_cancelled(self) -> bool:
        """Whether a caller cancelled the request before it was answered."""
        return bool(self.verdicts) and self.verdicts[0] is not None

    @staticmethod
    def settle(outcomes: Iterable[tuple[Answer, Any, BaseException | None]]) -> list[asyncio.Future[None]]:
        """Answer claimed requests: wake the threads that wait for them, and call their callbacks.

        Returns the futures of event loops. The thread that answers resolves them together; see wake_all. Those that
        were cancelled before the claim have their error already.
        """
        futures: list[asyncio.Future[None]] = []
        for answer, result, error in outcomes:
            if answer._is_done or answer.verdicts[0] is not None:
                continue
            if error is None:
                answer._result = result
            else:
                answer._error = error
            answer._is_done = True
            if answer._waiting or answer._values is not None:
                futures += answer._wake()
        return futures

    def abandon(self, error: BaseException) -> None:
        """Give an answer in a forked process this error. Those who waited for it are threads of the parent."""
        if self._is_done:
            return
        self.verdicts[:] = [None]
        self._waiting.clear()
        self._error = error
        self._is_done = True
        if self._values is not None:
            self._values.abandon()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _failure(self) -> NoReturn:
        error = self._error
        assert error is not None
        try:
            raise error
        finally:
            del self, error  # as in `result`

    def _wake(self) -> list[asyncio.Future[None]]:
        """Wake threads, call callbacks, and return the futures of event loops.

        Called by the thread that ended the request, after it has set `_is_done`.
        """
        if self._values is not None:
            self._values.end()
        futures: list[asyncio.Future[None]] = []
        while self._waiting:
            try:
                waiter = self._waiting.pop(0)
            except IndexError:  # the last waiter saw `_is_done` and has removed itself
                break
            if isinstance(waiter, asyncio.Future):
                futures.append(waiter)
            else:
                waiter()
        return futures

    def _wait(self, timeout: float | None) -> None:
        """Block until the request is done. Raises TimeoutError after `timeout` seconds."""
        if self._is_done:
            return
        if timeout != 0 and self.handover.is_own_thread:
            raise waits_for_itself()
        self.handover.release()  # an event loop's requests are held until its turn ends, but this call blocks the turn
        sleeping = threading.Lock()  # acquired twice here; the thread that ends the request releases it in between
        sleeping.acquire()
        self._waiting.append(sleeping.release)
        seconds = -1.0 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
        if self._is_done or sleeping.acquire(timeout=seconds):
            return
        with suppress(ValueError):  # the thread that ends the request has just removed it
            self._waiting.remove(sleeping.release)  # otherwise a caller that polls leaves one behind at each call
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
        if self.handover.is_own_thread:
            raise waits_for_itself()
        self.handover.release()  # as in _wait
        finished = False
        try:
            while (value := values.take()) is not _END:
                yield value
            finished = True
        finally:
            if not finished:
                self.cancel()
        if self._error is not None:  # the end is put into the queue only after the request is done
            raise self._error

    async def _iterate_async(self, values: Values) -> AsyncGenerator[Any, None]:
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        finished = False
        # From here on, this function is called after every value that is put. It sets the event in a later turn of this
        # loop.
        values.wakers[arrived] = lambda: call_soon(loop, arrived.set)
        try:
            while True:
                # Race: values are put meanwhile. So first clear the event, then look into the queue. A value that is
                # put after the look sets the event after the clear, so the wait below ends. A value that was put before
                # the look is found by the look.
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
    """The streamed values of one request. The engine's thread puts them; each is taken once, by one of the iterations.

    wakers: functions that are called after each value that is put. An event loop that iterates adds its own here.
    """

    __slots__ = ("_has_ended", "_queue", "wakers")

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._has_ended = False
        self.wakers: dict[asyncio.Event, Callable[[], None]] = {}

    def put(self, value: Any) -> None:
        """Add a value. Called by the engine's thread."""
        self._queue.put(value)
        # Race: event loops add and remove wakers meanwhile. The copy below is one operation, so it sees no half-changed
        # dict. An event loop that adds its waker after the copy finds the value, since it looks before it waits.
        for wake in list(self.wakers.values()):
            wake()

    def end(self) -> None:
        """Mark the end of the values. Called once the answer is done, by the thread that ended it.

        If that is a caller who cancels, the engine's thread may still put values. They come after the end, and no
        iteration gets them.
        """
        self.put(_END)

    def abandon(self) -> None:
        """Mark the end in a forked process, without a call of those who wait in the parent."""
        self.wakers = {}
        self._queue = queue.SimpleQueue()  # what waited for the old one waits in the parent
        self.end()

    def take(self) -> Any:
        """Return the next value; blocks until there is one. After the last value every call returns `_END`."""
        return self._taken(self._queue.get())

    def take_now(self) -> Any:
        """As `take`, but raise queue.Empty if there is nothing now."""
        return self._taken(self._queue.get_nowait())

    def _taken(self, value: Any) -> Any:
        if value is _END or self._has_ended:
            self._has_ended = True
            self.put(_END)  # for other iterations that wait, and for later calls
            return _END
        return value


def call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], Any]) -> None:
    """Schedule a callback on an event loop, from any thread. If the loop is closed, nobody waits: do nothing."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        return


def wake_all(futures: Sequence[asyncio.Future[None]]) -> None:
    """Resume the tasks that await answers through these futures. Runs in their event loop; skips cancelled futures."""
    for future in futures:
        if not future.done():
            future.set_result(None)
