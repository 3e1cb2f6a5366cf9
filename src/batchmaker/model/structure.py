"""Nested containers and dataclasses with handles, tensors or other items: requests, arguments and results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
import torch

from batchmaker.errors import InvalidRequestError, ModelError
from batchmaker.graph.values import Value, ValueSequence

Handle = Value | ValueSequence

_CONSTANT: Final = frozenset((int, float, bool, complex, str, bytes, type(None), range))
_LEAVES: Final = _CONSTANT | {
    torch.Tensor, np.ndarray, FunctionType, MethodType, BuiltinFunctionType, ModuleType, CodeType,
}  # fmt: skip
_MOST_PARTS: Final = 1000
"""How many objects are looked through for handles that nobody can find."""


def handles(structure: Any) -> Iterator[Handle]:
    """Yield the handles in a structure, in order.

    ModelError for a handle that is a key of a dict, or inside an object of a class of its own.
    """
    kind = type(structure)
    if kind in _LEAVES:
        return
    if isinstance(structure, Value | ValueSequence):
        yield structure
    elif (parts := _parts(structure)) is not None:
        for part in parts:
            yield from handles(part)
        if isinstance(structure, Mapping):
            _refuse_hidden(structure, structure.keys())
    else:
        _refuse_hidden(structure, _attributes(structure))


def replaced(structure: Any, kinds: tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    """Return a copy of a structure with `change(item)` in place of every item of these kinds."""
    if isinstance(structure, kinds):
        return change(structure)
    if isinstance(structure, Mapping):
        return {key: replaced(item, kinds, change) for key, item in structure.items()}
    if isinstance(structure, list | tuple | set | frozenset):
        items = [replaced(item, kinds, change) for item in structure]
        return type(structure)(*items) if hasattr(structure, "_fields") else type(structure)(items)
    if isinstance(structure, deque):
        return type(structure)([replaced(item, kinds, change) for item in structure], structure.maxlen)
    if _is_dataclass(structure):
        return _changed(structure, lambda part: replaced(part, kinds, change))
    return structure


def owned(structure: Any) -> Any:
    """Return a copy whose containers, arrays and tensors nobody else has. Objects of other classes stay the same.

    What stands in several places stands there in the copy, too. Tensors are contiguous and arrays in C order in it.
    InvalidRequestError for a structure that is nested too deeply.
    """
    kind = type(structure)
    if kind in _CONSTANT:
        return structure
    if kind is list and _CONSTANT.issuperset(map(type, structure)):
        return structure.copy()
    try:
        return _owned(structure, {})
    except RecursionError:
        raise InvalidRequestError("the request is nested too deeply") from None


def _owned(structure: Any, made: dict[int, Any]) -> Any:
    """made: what was copied so far, by the id of what it is a copy of."""
    if type(structure) in _CONSTANT:
        return structure
    if (known := made.get(id(structure))) is not None:
        return known
    copied = made[id(structure)] = _copied(structure, made)
    return copied


def _copied(structure: Any, made: dict[int, Any]) -> Any:
    kind = type(structure)
    if kind is np.ndarray:
        return structure.copy()
    if kind is torch.Tensor:
        return _own_tensor(structure)
    if kind is list and _CONSTANT.issuperset(map(type, structure)):
        return structure.copy()
    if kind is dict:
        return dict(zip(structure, _owned_parts(structure.values(), made), strict=True))
    if kind is list or kind is tuple or kind is set or kind is frozenset:
        return kind(_owned_parts(structure, made))
    if kind is deque:
        return deque(_owned_parts(structure, made), structure.maxlen)
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return kind(*_owned_parts(structure, made))
    if _is_dataclass(structure):
        return _changed(structure, lambda part: _owned(part, made))
    return structure


def _owned_parts(parts: Iterable[Any], made: dict[int, Any]) -> list[Any]:
    copies = []
    for part in parts:  # a loop, because a comprehension would take a frame of the stack at each level
        copies.append(_owned(part, made))  # noqa: PERF401
    return copies


def _changed(structure: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a dataclass with other values in its fields."""
    changed = copy(structure)
    for name in _names(structure):
        object.__setattr__(changed, name, change(getattr(structure, name)))
    return changed


def _own_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor; of one whose layout torch cannot copy so, the tensor itself."""
    try:
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    except (RuntimeError, NotImplementedError):
        return tensor


def _parts(structure: Any) -> Iterable[Any] | None:
    """Return the parts of a structure that may be handles; None if it is an object of another kind."""
    if isinstance(structure, Mapping):
        return structure.values()
    if isinstance(structure, list | tuple | set | frozenset | deque):
        return structure
    return [getattr(structure, name) for name in _names(structure)] if _is_dataclass(structure) else None


def _is_dataclass(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _names(value: Any) -> list[str]:
    return [field.name for field in fields(value) if hasattr(value, field.name)]


def _attributes(value: Any) -> Iterator[Any]:
    """Yield what an object of a class of its own holds."""
    yield from getattr(value, "__dict__", {}).values()
    for base in type(value).__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            yield getattr(value, name, None)


def _refuse_hidden(structure: Any, parts: Iterable[Any]) -> None:
    """Raise ModelError if a handle is among parts of an object that nobody could put a value into."""
    seen, waiting = {id(structure)}, list(parts)
    while waiting and len(seen) < _MOST_PARTS:
        part = waiting.pop()
        if isinstance(part, Value | ValueSequence):
            where = "a key of a dict" if isinstance(structure, Mapping) else f"in a {type(structure).__name__}"
            raise ModelError(
                f"a handle is {where}, where its value cannot be put in its place; use lists, tuples, sets, deques, "
                "values of dicts, named tuples or dataclasses"
            )
        if type(part) in _LEAVES or isinstance(part, type) or id(part) in seen:
            continue
        seen.add(id(part))
        found = _parts(part)
        waiting += _attributes(part) if found is None else found
