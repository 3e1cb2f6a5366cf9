"""One thread in which torch traces, for as long as the process lives.

torch 2.11 with CUDA libraries on a machine without a GPU keeps a pointer into the thread that traced first, and reads
it at every later trace. When that thread has ended, the process dies of SIGSEGV; an engine's own thread ends with it.
"""

from __future__ import annotations

import contextvars
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar, final

from batchmaker.compiled import NOT_COMPILING

Value = TypeVar("Value")


@final
class _PendingCall(Generic[Value]):
    """A call for the thread, and then its outcome."""

    def __init__(self, call: Callable[[], Value]) -> None:
        self._call: Callable[[], Value] | None = call
        self._context = contextvars.copy_context()
        self._done = threading.Event()
        self._value: Value
        self._error: BaseException | None = None

    def run(self) -> None:
        """Called by the thread. Keeps the value, or what was raised: SystemExit too is the caller's."""
        assert self._call is not None
        try:
            self._value = self._context.run(self._call)
        except BaseException as error:
            self._error = error
        finally:
            self._call = None  # the thread waits for its next call and holds nobody's module meanwhile
            self._done.set()

    def outcome(self) -> Value:
        """Called by who asked. Waits, then returns the value or raises what was raised."""
        self._done.wait()
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # else the error and its traceback hold each other
        return self._value


@final
class _TracingThread:
    """Runs calls one at a time, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_PendingCall[Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def run(self, call: Callable[[], Value]) -> Value:
        if threading.current_thread() is self._thread:  # a module that is traced has asked for another trace
            return call()
        pending = _PendingCall(call)
        with self._lock:  # race: two first callers would both start a thread
            if self._thread is None:
                # A daemon, so that code that hangs while it is traced does not keep the process from ending.
                self._thread = threading.Thread(target=self._turn, name="batchmaker-tracing", daemon=True)
                self._thread.start()
        self._calls.put(pending)
        return pending.outcome()

    def _turn(self) -> None:
        while True:
            pending = self._calls.get()
            with NOT_COMPILING:  # torch replaces min, max and math.pow for all threads meanwhile
                pending.run()


_thread = _TracingThread()


def _forked() -> None:
    """In a child process after `fork` no thread but the one that forked goes on, so there is a new one."""
    global _thread
    _thread = _TracingThread()


os.register_at_fork(after_in_child=_forked)


def in_tracing_thread(function: Callable[..., Value], *args: Any, **kwargs: Any) -> Value:
    """Call the function in the process's tracing thread; return its value, or raise what it raises.

    The function sees the caller's context variables. It does not see what torch keeps for each thread (grad mode,
    autocast, a default device): a trace is the same whoever asks for it.
    """
    return _thread.run(partial(function, *args, **kwargs))
