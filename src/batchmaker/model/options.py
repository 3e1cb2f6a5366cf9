"""Checks of options. They run in the caller's thread, so a wrong option never reaches the engine's thread."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, Final

from batchmaker.errors import OptionError

MAX_PRIORITY: Final = 1 << 32
"""Priorities are from -MAX_PRIORITY to MAX_PRIORITY. Queues pack a priority and other marks into 64 bits."""


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
    """Raise OptionError unless an option is a whole number of at least `least`. optional: None is allowed as well."""
    if value is None and optional:
        return
    if not _is_whole(value) or int(value) < least:
        raise OptionError(f"{name} must be at least {least}, a whole number, got {said_of(value)}")


def check_flag(name: str, value: Any) -> None:
    """Raise OptionError unless an option is True or False."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be True or False, got {said_of(value)}")


def check_choice(name: str, value: Any, *choices: str) -> None:
    """Raise OptionError unless an option is one of the words in `choices`."""
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
    """Raise OptionError unless an option is a number within its bounds, and not NaN.

    above, least: the bounds; None for none. optional: None is allowed as well. hint: follows what was wanted, in the
    message.
    """
    if value is None and optional:
        return
    number = _as_float(value)
    if number > (-math.inf if above is None else above) and number >= (-math.inf if least is None else least):
        return
    wanted = "a number"
    if least is not None:
        wanted = f"at least {least:g}"
    elif above is not None:
        wanted = f"above {above:g}"
    raise OptionError(f"{name} must be {wanted}{hint}, got {said_of(value)}")


def _as_float(value: Any) -> float:
    """Return a number as a float; NaN if it is not a number, or too large for a float."""
    try:
        return math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        return math.nan


def said_of(value: Any) -> str:
    """Describe a value for a message: its class, and up to 64 characters of a number or text."""
    said = repr(value) if isinstance(value, int | float | str | None) else ""
    return f"{type(value).__name__} {said[:64]}".rstrip()


def _is_whole(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral)
