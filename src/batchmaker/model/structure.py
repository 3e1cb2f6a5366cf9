"""Nested lists, tuples and dicts with handles or other items: arguments and results of unfold functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from batchmaker.graph.values import Value, ValueSequence

Handle = Value | ValueSequence


def handles(structure: Any) -> Iterator[Handle]:
    """Yield the handles in a structure, in order."""
    if isinstance(structure, Value | ValueSequence):
        yield structure
    elif isinstance(structure, Mapping):
        for item in structure.values():
            yield from handles(item)
    elif isinstance(structure, list | tuple):
        for item in structure:
            yield from handles(item)


def replaced(structure: Any, kinds: tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    """Return a copy of a structure with `change(item)` in place of every item of these kinds."""
    if isinstance(structure, kinds):
        return change(structure)
    if isinstance(structure, Mapping):
        return {key: replaced(item, kinds, change) for key, item in structure.items()}
    if isinstance(structure, list | tuple):
        items = [replaced(item, kinds, change) for item in structure]
        return type(structure)(*items) if hasattr(structure, "_fields") else type(structure)(items)
    return structure
