"""States of a learned policy: its view of the ready nodes at a choice (ED-Batch, ICML 2023, 2.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal

Encoding = Literal["base", "max", "sort"]
State = tuple[int, ...]
"""Cell types, in the order of the encoding."""


def encode_base(counts: Sequence[int]) -> State:
    """Return the ready types, ascending (E_base). counts: [types] ready nodes of each type, here and below."""
    return tuple([kind for kind, count in enumerate(counts) if count])


def encode_max(counts: Sequence[int]) -> State:
    """Return the ready types, ascending, and then the type with the most ready nodes once more (E_max).

    A tie goes to the lowest id.
    """
    return (*encode_base(counts), counts.index(max(counts)))


def encode_sort(counts: Sequence[int]) -> State:
    """Return the ready types, those with more ready nodes first, the lower id first among equals (E_sort)."""
    ready = [kind for kind, count in enumerate(counts) if count]
    if len(ready) > 1:
        ready.sort(key=counts.__getitem__, reverse=True)  # stable: ties keep the lower id first
    return tuple(ready)


ENCODINGS: Final[dict[Encoding, Callable[[Sequence[int]], State]]] = {
    "base": encode_base,
    "max": encode_max,
    "sort": encode_sort,
}
