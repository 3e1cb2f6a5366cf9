"""What an unfold function has read besides its request, with a quick comparison: is all of it unchanged?"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from itertools import repeat
from operator import attrgetter, call, is_
from types import CellType, FunctionType
from typing import Any, Final, NoReturn, final

import numpy as np
import torch
from numpy.typing import NDArray

MAX_ITEMS: Final = 4096
MAX_BYTES: Final = 1 << 16
"""Limits of what a function may read: items, and bytes of an array. Beyond them a template costs more than it saves."""

MISSING: Final = object()
"""Stands for a name that is not in a dict, and for what an empty closure cell holds."""

_OF_FUNCTION: Final = tuple([attrgetter(name) for name in ("__code__", "__defaults__", "__kwdefaults__")])
_ATTRIBUTES: Final = attrgetter("__dict__")
_BASES: Final = attrgetter("__mro__")


class UnprovenError(Exception):
    """It is unknown whether the function gives the same result next time."""


@final
class Guard:
    """A record of reads. What was read is kept alive and compared by identity, and the values of arrays by their bytes.

    key: equal for two guards of the same reads, if both hold.
    """

    __slots__ = ("_arrays", "_checks", "_containers", "_count", "_facts", "_names", "key")

    def __init__(self) -> None:
        self._names: dict[tuple[int, str], tuple[Callable[..., Any], str, Any, Any]] = {}
        self._facts: dict[Hashable, tuple[Callable[[Any], Any], Any, Any]] = {}
        self._containers: dict[int, tuple[Any, tuple[tuple[Any, ...], ...]]] = {}
        self._arrays: dict[int, tuple[Any, Hashable]] = {}
        self._checks: tuple[tuple[tuple[Any, ...], ...], ...] = ()
        self._count = 0
        self.key: Hashable = None

    # --- notes a read, and returns what was read -------------------------------------------------------------------

    def name(self, owner: Mapping[str, Any] | type[Any], name: str) -> Any:
        """What a dict, or a class itself, has under a name; MISSING if nothing."""
        entry = self._names.get((id(owner), name))
        if entry is None:
            self._count_items(1)
            get: Callable[..., Any] = (owner.__dict__ if isinstance(owner, type) else owner).get
            entry = self._names[id(owner), name] = (get, name, get(name, MISSING), owner)
        return entry[2]

    def kind(self, value: Any) -> Any:
        """The class of an object."""
        return self._fact((id(value), "type"), type, value)

    def bases(self, kind: type[Any]) -> tuple[type[Any], ...]:
        """A class and its bases, in the order in which names are looked up."""
        self.kind(kind)
        bases: tuple[type[Any], ...] = self._fact((id(kind), "bases"), _BASES, kind)
        return bases

    def attributes(self, value: Any) -> dict[str, Any]:
        """The dict of an object's own attributes. Its class must have no other `__dict__`."""
        own: dict[str, Any] = self._fact((id(value), "dict"), _ATTRIBUTES, value)
        return own

    def slot(self, descriptor: Any, value: Any) -> Any:
        """What an object has in a slot. AttributeError if the slot is empty."""
        return self._fact((id(value), id(descriptor)), descriptor.__get__, value)

    def function(self, function: FunctionType) -> None:
        """The code of a function and its defaults."""
        for place, get in enumerate(_OF_FUNCTION):
            self._fact((id(function), place), get, function)

    def cell(self, cell: CellType) -> Any:
        """What a name of a closure is bound to; MISSING if to nothing."""
        return self._fact((id(cell), "cell"), _held, cell)

    def answer(self, question: Callable[[], Hashable]) -> None:
        """The answer of a function without arguments, which is compared by value."""
        value = question()
        self._fact((id(question), "answer"), lambda ask: ask() == value, question)

    def container(self, container: list[Any] | set[Any] | dict[Any, Any]) -> bool:
        """What is in a list, set or dict, in order. Returns False if it is noted already."""
        if id(container) in self._containers:
            return False
        self._count_items(len(container))
        self._containers[id(container)] = (container, _content(container))
        return True

    def array(self, array: NDArray[Any] | torch.Tensor) -> None:
        """The values of an array or a tensor on the CPU. UnprovenError for many of them, or others than numbers."""
        if id(array) in self._arrays:
            return
        try:
            if array.nbytes > MAX_BYTES:
                _refuse("it reads a large array")
            self._arrays[id(array)] = (array, _values(array))
        except (RuntimeError, TypeError, ValueError) as error:  # sparse, quantized, or on a device
            _refuse(f"it reads an array of another kind: {error}")

    def notes(self, value: Any) -> bool:
        """Whether a container, array or tensor was there before the function ran."""
        return id(value) in self._containers or id(value) in self._arrays

    # --- compares --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The record is complete."""
        missing: dict[int, tuple[Any, list[str]]] = {}  # by dict or class
        there = []
        for get, name, value, owner in self._names.values():
            if value is MISSING:
                missing.setdefault(id(owner), (owner, []))[1].append(name)
            else:
                there.append((get, name, value))
        absent = [
            ((owner.__dict__ if isinstance(owner, type) else owner).keys().isdisjoint, frozenset(names))
            for owner, names in missing.values()
        ]
        self._checks = (_columns(absent, 2), _columns(there, 3), _columns(list(self._facts.values()), 3))
        self.key = tuple([frozenset(one) for one in (self._names, self._facts, self._containers, self._arrays)])

    def holds(self) -> bool:
        """Whether everything that was read is unchanged. This takes a few microseconds. The record is complete."""
        (have_none, absent), (gets, names, values_then), (asks, owners, facts) = self._checks
        try:
            if not all(map(call, have_none, absent)):
                return False
            if not all(map(is_, map(call, gets, names, repeat(MISSING)), values_then)):
                return False
            if not all(map(is_, map(call, asks, owners), facts)):
                return False
        except AttributeError:  # a slot was emptied
            return False
        for container, before in self._containers.values():
            for now, then in zip(_content(container), before, strict=True):
                if len(now) != len(then) or not all(map(is_, now, then)):
                    return False
        return not self._arrays or all(_values(array) == values for array, values in self._arrays.values())

    def _fact(self, key: Hashable, get: Callable[[Any], Any], owner: Any) -> Any:
        entry = self._facts.get(key)
        if entry is None:
            self._count_items(1)
            entry = self._facts[key] = (get, owner, get(owner))
        return entry[2]

    def _count_items(self, count: int) -> None:
        self._count += count
        if self._count > MAX_ITEMS:
            _refuse("it reads too much besides the request")


def _refuse(why: str) -> NoReturn:
    raise UnprovenError(why)


def _columns(rows: list[tuple[Any, ...]], width: int) -> tuple[tuple[Any, ...], ...]:
    return tuple(zip(*rows, strict=True)) if rows else ((),) * width


def _held(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _content(container: Any) -> tuple[tuple[Any, ...], ...]:
    return (tuple(container), tuple(container.values())) if isinstance(container, dict) else (tuple(container),)


def _values(array: Any) -> Hashable:
    """Return all that can be seen of an array's or a tensor's values."""
    if isinstance(array, np.ndarray):
        if array.dtype.hasobject:
            raise TypeError("of objects")
        return array.shape, array.dtype.str, array.tobytes()
    plain = array.detach().resolve_neg().contiguous().view(-1) if array.ndim else array.detach().view(1)
    return array.shape, array.dtype, array.device, plain.view(torch.uint8).numpy().tobytes()
