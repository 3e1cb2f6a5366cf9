"""Records what an unfold function reads besides its request, and checks later that it is unchanged.

While a template is made, the function runs on a model that records which of its attributes are read, under a hook that
sees which other functions run. All values that it reads must be of kinds that can be compared. Changes that it makes
are detected.
"""

from __future__ import annotations

import dis
import gc
import random
import sys
from abc import ABCMeta
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import lru_cache, wraps
from operator import is_
from types import BuiltinFunctionType, CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Final, NoReturn, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from batchmaker.model.cell import Cell
from batchmaker.model.model import Model, cells_in

MAX_ITEMS: Final = 4096
MAX_BYTES: Final = 1 << 20
"""Limits of what a function may read: items, and bytes of an array. Beyond them a template costs more than it saves."""

_CONSTANT: Final = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type(...), type(NotImplemented), torch.dtype,
    torch.Size, np.dtype, np.generic, BuiltinFunctionType, Cell, Enum, np.ufunc,
)  # fmt: skip
_TRUSTED: Final = frozenset((
    "numpy", "torch", "math", "itertools", "operator", "functools", "collections", "typing", "abc", "enum",
    "contextlib", "dataclasses", "types", "numbers", "cmath", "bisect", "heapq", "copy", "string",
))  # fmt: skip
"""Modules whose functions return equal results for equal arguments. Random numbers are detected separately."""
_ACTS: Final = frozenset((
    "print", "open", "input", "exec", "eval", "compile", "setattr", "delattr", "globals", "locals", "vars", "id", "dir",
    "__import__",
))  # fmt: skip
_FOREIGN: Final = (frozenset(sys.stdlib_module_names) - {"__main__"}) | {"numpy", "torch"}


class UnprovenError(Exception):
    """It is unknown whether the function gives the same result next time."""


@final
class Guard:
    """A record of reads: names in dicts with their values, containers and arrays with contents, tensors with versions.

    key: equal for two guards of the same reads.
    """

    __slots__ = ("_arrays", "_cells", "_containers", "_names", "_tensors", "key")

    def __init__(self) -> None:
        self._names: dict[int, tuple[Callable[[str], Any], dict[str, Any]]] = {}
        self._containers: dict[int, tuple[Any, tuple[tuple[Any, ...], ...]]] = {}
        self._tensors: dict[int, tuple[torch.Tensor, int]] = {}
        self._arrays: dict[int, tuple[NDArray[Any], NDArray[Any]]] = {}
        self._cells: dict[int, tuple[CellType, Any]] = {}
        self.key: Hashable = None

    def close(self) -> None:
        """The record is complete."""
        self.key = (
            tuple(
                [
                    (owner, tuple([(name, id(value)) for name, value in read.items()]))
                    for owner, (_, read) in self._names.items()
                ]
            ),
            tuple(self._containers),
        )

    def holds(self) -> bool:
        """Whether everything that was read is unchanged. This takes a few microseconds."""
        for get, read in self._names.values():
            if not all(map(is_, map(get, read), read.values())):
                return False
        for container, then in self._containers.values():
            for now, before in zip(_content(container), then, strict=True):
                if len(now) != len(before) or not all(map(is_, now, before)):
                    return False
        for cell, value in self._cells.values():
            if cell.cell_contents is not value:
                return False
        for array, values in self._arrays.values():
            if array.shape != values.shape or array.dtype != values.dtype or array.tobytes() != values.tobytes():
                return False
        return all(tensor._version == version for tensor, version in self._tensors.values())


def _content(container: Any) -> tuple[tuple[Any, ...], ...]:
    if isinstance(container, type):
        container = container.__dict__
    if not isinstance(container, list | set):
        return tuple(container), tuple(container.values())
    return (tuple(container),)


@final
class Reads:
    """Records reads. Raises UnprovenError for a value of a kind that could change unnoticed."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._guard = Guard()
        self._codes: set[CodeType] = set()
        self._functions: set[int] = set()
        self._count = 0
        self._refused: str | None = None

    def guard(self) -> Guard:
        """Return the record. UnprovenError if a value in it has changed since, or may change unnoticed."""
        if self._refused is not None:
            raise UnprovenError(self._refused)
        if not self._guard.holds():
            raise UnprovenError("it changes what it reads")
        self._guard.close()
        return self._guard

    def name(self, owner: Any, name: str, value: Any) -> None:
        """Record the look-up of a name. owner: the dict or the class in which it was found."""
        _, read = self._guard._names.setdefault(
            id(owner), (owner.get if isinstance(owner, dict) else owner.__dict__.get, {})
        )
        if name not in read:
            read[name] = value
            self.value(value)

    def value(self, value: Any) -> None:
        """Record a value that the function can see."""
        self._count += 1
        if self._count > MAX_ITEMS:
            self.refuse("it reads too much besides the request")
        if isinstance(value, type):
            self._class(value)
        elif isinstance(value, _CONSTANT) or value is self._model:
            return
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, property):
            self.value(value.fget)
        elif isinstance(value, classmethod | staticmethod):
            self.value(value.__func__)
        elif isinstance(value, ModuleType):
            root = _root(value.__name__)
            if root not in _TRUSTED and root != "batchmaker":
                self.refuse(f"it uses the module {value.__name__}")
        elif type(value) in (tuple, frozenset):
            for part in value:
                self.value(part)
        elif type(value) in (list, set, dict):
            self._container(value)
        elif isinstance(value, torch.Tensor) and not value.is_inference():
            self._guard._tensors[id(value)] = (value, value._version)
        elif type(value) is np.ndarray and value.nbytes <= MAX_BYTES and not value.dtype.hasobject:
            self._guard._arrays[id(value)] = (value, value.copy())
        elif _root(type(value).__module__) in _FOREIGN or isinstance(value, nn.Module):
            self.refuse(f"it reads a {type(value).__name__}")
        elif type(getattr(value, "__dict__", None)) is dict:
            self._container(value.__dict__)
        else:
            self.refuse(f"it reads a {type(value).__name__}")

    def code(self, code: CodeType, names: dict[str, Any]) -> None:
        """Record that a function outside the trusted modules runs."""
        if code in self._codes:
            return
        self._codes.add(code)
        found, acts = _globals_of(code)
        if acts:
            self.refuse("it imports, or sets a global")
        for name in found:
            if name in names:  # otherwise it is built in
                self.name(names, name, names[name])

    def refuse(self, why: str) -> NoReturn:
        """Raise UnprovenError: the function may give another result next time."""
        self._refused = self._refused or why
        raise UnprovenError(why)

    def _function(self, function: FunctionType) -> None:
        if id(function) in self._functions or is_trusted(function.__globals__):
            return
        self._functions.add(id(function))
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.value(value)
        for cell in function.__closure__ or ():
            try:
                found = cell.cell_contents
            except ValueError:  # the cell is still empty
                self.refuse("it uses a name that is not bound yet")
            self._guard._cells[id(cell)] = (cell, found)
            self.value(found)

    def _class(self, value: type) -> None:
        """Record all attributes of a user's class with the class."""
        if _root(value.__module__) in _FOREIGN | {"batchmaker"} or id(value) in self._guard._containers:
            return
        self._guard._containers[id(value)] = (value, _content(value))
        for part in vars(value).values():
            if type(part) in (list, set, dict, FunctionType):
                self.value(part)

    def _container(self, value: Any) -> None:
        if id(value) in self._guard._containers:
            return
        if len(value) > MAX_ITEMS:
            self.refuse("it reads too much besides the request")
        self._guard._containers[id(value)] = (value, _content(value))
        for part in value.values() if isinstance(value, dict) else value:
            self.value(part)


@contextmanager
def noting(model: Model, function: str, reads: Reads) -> Iterator[Callable[..., Any]]:
    """Give the model's function in a form that records its reads, and watch which code runs meanwhile.

    UnprovenError if a function of the model's class cannot be watched, or random numbers were drawn.
    """
    if sys.getprofile() is not None:
        raise UnprovenError("somebody else looks at what runs")
    watched = _watched(model, reads)
    drawn = _random_states()
    user_codes: dict[CodeType, bool] = {}

    def seen(frame: FrameType, event: str, called: Any) -> None:
        code = frame.f_code
        is_users = user_codes.get(code)
        if is_users is None:
            is_users = user_codes[code] = code.co_name != "__del__" and not is_trusted(frame.f_globals)
            if is_users:
                root = _root(str(frame.f_globals.get("__name__")))
                if root in _FOREIGN:
                    reads.refuse(f"it calls into the module {root}")
                reads.code(code, frame.f_globals)
        if event == "c_call" and is_users:
            module = _root(getattr(called, "__module__", None) or "builtins")
            if called.__name__ in _ACTS if module == "builtins" else module not in _TRUSTED and module in _FOREIGN:
                reads.refuse(f"it calls {called.__name__}")

    call = getattr(watched, function)

    @wraps(call)
    def watched_call(*given: Any, **named: Any) -> Any:
        collects = gc.isenabled()
        gc.disable()  # finalisers that it calls are not part of the function
        sys.setprofile(seen)
        try:
            return call(*given, **named)
        finally:
            sys.setprofile(None)
            if collects:
                gc.enable()

    yield watched_call
    if drawn != _random_states():
        raise UnprovenError("it draws random numbers")


def is_trusted(names: Mapping[str, Any]) -> bool:
    """Whether functions with these globals belong to this library or to modules that are known to keep no state."""
    module = str(names.get("__name__"))
    if module.startswith("batchmaker."):
        return not module.startswith("batchmaker.lab.zoo.")
    return _root(module) in _TRUSTED


def _root(module: str) -> str:
    return module.partition(".")[0]


def _watched(model: Model, reads: Reads) -> Any:
    """Return the same model, with the same attributes, in a form that records reads of them."""
    cls: Any = type(model)
    plain = cls.__getattribute__ is object.__getattribute__ and not hasattr(cls, "__getattr__")
    if type(cls) not in (type, ABCMeta) or not plain or cls.__setattr__ is not Model.__setattr__:
        raise UnprovenError("its class has its own way to look up attributes")
    if any("__init_subclass__" in vars(base) for base in cls.__mro__ if base is not object):
        raise UnprovenError("its class wants to know of its subclasses")
    own = model.__dict__

    def get(self: Any, name: str) -> Any:
        if name in ("__class__", "__dict__"):
            if name == "__class__":
                return cls
            reads.refuse("it looks at all attributes at once")
        if name == "cells" and cls.cells is Model.cells:
            for attribute, value in own.items():
                if cells_in({attribute: value}):
                    reads.name(own, attribute, value)
            return cells_in(own)
        if name in own:
            reads.name(own, name, own[name])
        else:
            for base in cls.__mro__:
                if name in base.__dict__:
                    if base is not object and base is not Model:
                        reads.name(base, name, base.__dict__[name])
                        reads.name(own, name, None)  # nor may an attribute of the model itself hide it
                    break
        return object.__getattribute__(self, name)

    def set_(self: Any, name: str, value: Any = None) -> NoReturn:
        reads.refuse(f"it sets {name}")

    subclass = type(cls)(cls.__name__, (cls,), {"__getattribute__": get, "__setattr__": set_, "__delattr__": set_})
    watched = object.__new__(subclass)
    object.__setattr__(watched, "__dict__", own)
    return watched


def _random_states() -> tuple[Any, ...]:
    of_numpy: Any = np.random.get_state(legacy=True)
    kind, keys, *others = of_numpy
    return random.getstate(), kind, keys.tobytes(), *others, torch.get_rng_state().numpy().tobytes()


@lru_cache(maxsize=1024)
def _globals_of(code: CodeType) -> tuple[tuple[str, ...], bool]:
    """Return the global names that a function looks up, and whether it imports or sets any."""
    found, acts = [], False
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found.append(str(instruction.argval))
        elif instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME"):
            acts = True
    return tuple(dict.fromkeys(found)), acts
