"""The stop tests of loops, applied to all loops of a batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Watched:
    """The value that a loop's stop test looks at. position: the loop's place in the batch. until: see Cell.loop."""

    position: int
    until: Any
    value: Any


def apply_stop_tests(
    watched: Sequence[Watched], batch: int, cell: str
) -> tuple[NDArray[np.bool_], tuple[tuple[int, str], ...]]:
    """Return which positions of the batch stop, [batch], and those at which the test raised, with the reason.

    Equal tests are called once. Where a test raises, it is tried again value by value, so that only the loops at fault
    fail. cell: its name, for messages.
    """
    stopped = np.zeros(batch, np.bool_)
    groups: dict[Any, list[Watched]] = {}
    for loop in watched:
        groups.setdefault(_group(loop.until), []).append(loop)
    failed: list[tuple[int, str]] = []
    for members in groups.values():
        until = members[0].until
        try:
            stopped[[loop.position for loop in members]] = _holds(until, [loop.value for loop in members])
        except Exception:  # the model's own test; find the values that make it raise
            for loop in members:
                try:
                    stopped[loop.position : loop.position + 1] = _holds(until, [loop.value])
                except Exception as error:
                    reason = f"until of cell {cell!r} raised {type(error).__name__}: {error}"
                    failed.append((loop.position, reason))
    return stopped, tuple(failed)


def _group(until: Any) -> Any:
    """Return a key under which equal stop tests meet."""
    try:
        hash(until)
    except TypeError:
        return id(until)
    return until


def _holds(until: Any, values: list[Any]) -> Any:
    array = np.asarray(values)
    return until(array) if callable(until) else array == until
