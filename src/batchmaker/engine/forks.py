"""What becomes of an engine in a forked process: its threads are not there, and its locks may be held for ever.

After `os.fork` the child has a copy of every object, and one thread: the one that forked. An object that has threads or
locks registers here, and puts itself right in the child. So nobody there waits for a thread that does not exist.

This is done at the fork, rather than by comparing process ids at each call: a call costs nothing then, and answers that
were taken before the fork are answered too. The parent is not touched.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """An object that knows what to do in a forked process."""

    def after_fork(self) -> None:
        """Put this copy right. Called in the child, in its only thread, before `os.fork` returns there."""


_registered: weakref.WeakSet[Forked] = weakref.WeakSet()


def register(one: Forked) -> None:
    """Call `one.after_fork()` in every process that is forked from this one, as long as the object lives."""
    _registered.add(one)


def _put_right() -> None:
    for one in list(_registered):
        one.after_fork()


os.register_at_fork(after_in_child=_put_right)
