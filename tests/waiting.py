"""Waiting in tests: for what a thread, a task or a process does in its own time, and for what time alone brings.

A wait ends as soon as what it waits for is so, and only a defect makes it reach its limit: no test passes or fails by
the speed of the machine.
"""

from __future__ import annotations

import asyncio
import inspect
import selectors
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from batchmaker.clock import VirtualClock

LIMIT_S = 60.0
_SOON_S, _LATER_S = 0.001, 0.05
"""Looks are as far apart at first, and in the end."""


def wait_until(holds: Callable[[], Any], limit_s: float = LIMIT_S, *, told: Callable[[], str] = str) -> None:
    """Wait for what a thread or a process does. told: what is known of it, for the error if it never comes."""
    end, pause_s = time.monotonic() + limit_s, _SOON_S
    while not holds():
        assert time.monotonic() < end, f"waited {limit_s:g} s in vain for {_source(holds)}\n{told()}"
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, _LATER_S)


async def until(holds: Callable[[], Any | Awaitable[Any]], limit_s: float = LIMIT_S) -> None:
    """As `wait_until`, while the event loop goes on. What is waited for may be a call that is awaited."""
    end, pause_s = time.monotonic() + limit_s, _SOON_S
    while not (await found if inspect.isawaitable(found := holds()) else found):
        assert time.monotonic() < end, f"waited {limit_s:g} s in vain for {_source(holds)}"
        await asyncio.sleep(pause_s)
        pause_s = min(1.2 * pause_s, _LATER_S)


def _source(holds: Callable[[], Any]) -> str:
    try:
        return inspect.getsource(holds).strip()
    except (OSError, TypeError):  # made by no source, or in C
        return repr(holds)


class _NoWait(selectors.DefaultSelector):
    """Moves a clock to where the wait for files would have ended."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(timeout and 0.0)
        if not ready and timeout:
            self._clock.advance(timeout)
        return ready


class _VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while nothing else can go on, and then at once as far as the next timer."""

    def __init__(self) -> None:
        self._clock = VirtualClock()
        super().__init__(_NoWait(self._clock))

    def time(self) -> float:
        return self._clock.now_s()


def run_in_virtual_time(body: Coroutine[Any, Any, Any]) -> Any:
    """As `asyncio.run`, but no timer waits, and none is late: for tests without other threads, files or processes."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(body)


async def pass_time(seconds: float) -> None:
    """Let virtual time pass; all timers until then have run."""
    assert isinstance(asyncio.get_running_loop(), _VirtualLoop)
    await asyncio.sleep(seconds)
