"""Nested containers and dataclasses with handles, tensors or other items: requests, arguments and results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, cast

import numpy as np
import torch

from batchmaker.errors import ModelError
from batchmaker.graph.values import Value, ValueSequence

Handle = Value | ValueSequence

_CONSTANT: Final = frozenset((int, float, bool, complex, str, bytes, type(None), range))
_LEAVES: Final = _CONSTANT | {
    torch.Tensor, np.ndarray, FunctionType, MethodType, BuiltinFunctionType, ModuleType, CodeType,
}  # fmt: skip
_CONTAINERS: Final = frozenset((list, tuple, set, frozenset, deque))
_MOST_PARTS: Final = 1000
"""How many objects are looked through for handles that nobody can find."""


def handles(structure: Any) -> Iterator[Handle]:
    """Yield the handles in a structure, in order.

    ModelError for a handle that is a key of a dict, or inside an object of a class of its own; and for an iterator,
    in which nobody can look for handles.
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
    elif isinstance(structure, Iterator):
        raise ModelError(
            f"got an iterator ({kind.__name__}), in which values cannot be put in the places of handles; return or "
            "yield a list"
        )
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

    What stands in several places stands there in the copy, too. Tensors are contiguous and arrays in C order in it. A
    structure that contains itself is returned as it is.
    """
    kind = type(structure)
    if kind in _CONSTANT:
        return structure
    if kind is np.ndarray or (kind is list and _CONSTANT.issuperset(map(type, structure))):
        return structure.copy()
    made: dict[int, Any] = {}  # copies, by the id of what they are copies of
    begun: set[int] = set()
    waiting = [structure]  # a list and no recursion: a request may be nested deeper than Python calls
    while waiting:
        whole = waiting[-1]
        missing = [part for part in _copied_parts(whole) if type(part) not in _CONSTANT and id(part) not in made]
        if not missing:
            made[id(whole)] = _copied(whole, made)
            waiting.pop()
        elif id(whole) in begun:
            return structure
        else:
            begun.add(id(whole))
            waiting += missing
    return made[id(structure)]


def _copied_parts(whole: Any) -> Iterable[Any]:
    kind = type(whole)
    if kind is dict:
        return list(whole.values())
    if kind in _CONTAINERS or (isinstance(whole, tuple) and hasattr(whole, "_fields")):
        return cast(Iterable[Any], whole)
    return [getattr(whole, name) for name in _names(whole)] if _is_dataclass(whole) else ()


def _copied(whole: Any, made: dict[int, Any]) -> Any:
    """Return a copy of an object of whose parts `made` has the copies."""

    def copy_of(part: Any) -> Any:
        return part if type(part) in _CONSTANT else made[id(part)]

    kind = type(whole)
    if kind is np.ndarray:
        return whole.copy()
    if kind is torch.Tensor:
        return _own_tensor(whole)
    if kind is dict:
        return {key: copy_of(part) for key, part in whole.items()}
    if kind is deque:
        return deque(map(copy_of, whole), whole.maxlen)
    if kind in _CONTAINERS:
        return kind(map(copy_of, whole))
    if isinstance(whole, tuple) and hasattr(whole, "_fields"):
        return kind(*map(copy_of, whole))
    return _changed(whole, copy_of) if _is_dataclass(whole) else whole


def _changed(structure: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a dataclass with other values in its fields."""
    changed = copy(structure)
    for name in _names(structure):
        object.__setattr__(changed, name, change(getattr(structure, name)))
    return changed


def _own_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor; of one whose layout torch cannot copy so, the tensor itself.

    NumPy copies what it can: each operation of torch gives up the interpreter, for which a thread that submits requests
    beside a worker waits anew each time.
    """
    try:
        return torch.from_numpy(np.array(tensor.numpy(), order="C"))
    except (RuntimeError, TypeError):  # it has a gradient, is not on the CPU, or is of a dtype that NumPy lacks
        pass
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
        inner = _parts(part)
        waiting += _attributes(part) if inner is None else inner
