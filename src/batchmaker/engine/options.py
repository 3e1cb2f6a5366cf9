"""Options are checked where they are given, in the caller's thread: what is wrong there never reaches the engine's."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, Final

from batchmaker.errors import OptionError

MAX_PRIORITY: Final = 1 << 32
"""Priorities are from its negative to it. Queues pack them into 64 bits, with marks beside them."""


def checked_priority(priority: Any) -> int:
    """Return a request's priority. OptionError unless it is a whole number within the range."""
    if type(priority) is int and -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        return priority
    if not _is_whole(priority) or not -MAX_PRIORITY <= int(priority) <= MAX_PRIORITY:
        raise OptionError(
            f"priority must be a whole number from -2**32 to 2**32, larger is served first; got {said_of(priority)}"
        )
    return int(priority)


def check_whole(name: str, value: Any, *, least: int, optional: bool = False) -> None:
    """OptionError unless an option is a whole number, no smaller than `least`; or None where it is optional."""
    if value is None and optional:
        return
    if not _is_whole(value) or int(value) < least:
        raise OptionError(f"{name} must be at least {least}, a whole number, got {said_of(value)}")


def check_choice(name: str, value: Any, *choices: str) -> None:
    """OptionError unless an option is one of the words that it may be."""
    if not isinstance(value, str) or value not in choices:
        raise OptionError(f"{name} must be {' or '.join(map(repr, choices))}, got {said_of(value)}")


def check_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    optional: bool = False,
    hint: str = "",
) -> None:
    """OptionError unless an option is a number, no NaN, within its bounds; or None where it is optional."""
    if value is None and optional:
        return
    number = _as_float(value)
    if number > (-math.inf if above is None else above) and number >= (-math.inf if least is None else least):
        return
    wanted = "a number" if above is None and least is None else f"above {above:g}" if least is None else (
        f"at least {least:g}"
    )  # fmt: skip
    raise OptionError(f"{name} must be {wanted}{hint}, got {said_of(value)}")


def _as_float(value: Any) -> float:
    """Return a number as a float, NaN for what is none or too large to be one."""
    try:
        return math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        return math.nan


def said_of(value: Any) -> str:
    """Return a value as a message shows it: its class and, where that is short, itself."""
    said = repr(value) if isinstance(value, int | float | str | None) else ""
    return f"{type(value).__name__} {said[:64]}".rstrip()


def _is_whole(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral)
