"""Calls of users' functions whose results the engine does not need. Their errors go to the log, not to the engine.

Also what an error that was logged may still hold.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Generic, ParamSpec, final

from batchmaker.errors import RAISED_BY_USERS, said_by

P = ParamSpec("P")
_LOG = logging.getLogger("batchmaker.engine")


@final
class Onlooker(Generic[P]):
    """Wraps a user's function that observes the engine. Its first error is logged, and later ones are dropped.

    The function is still called after an error, so one bad value does not end the observation. what: its name in the
    log.
    """

    __slots__ = ("_call", "_has_raised", "_what")

    def __init__(self, call: Callable[P, object], what: str) -> None:
        self._call = call
        self._what = what
        self._has_raised = False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            self._call(*args, **kwargs)
        except RAISED_BY_USERS as error:
            if not self._has_raised:
                self._has_raised = True
                _LOG.error(
                    "%s raised %s; it is called on, and what else it raises is not logged",
                    self._what,
                    said_by(error),
                    exc_info=error,
                )


def call_quietly(call: Callable[[], object], what: str) -> None:
    """Call a user's function whose result nobody waits for. What it raises goes to the log."""
    try:
        call()
    except RAISED_BY_USERS as error:
        _LOG.error("%s raised %s", what, said_by(error), exc_info=error)


def release_frames(error: BaseException) -> None:
    """Let go of what the functions held that an exception has left, and those before it. The tracebacks stay."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
