"""Looks up names as Python does, and notes each place that was looked at: instances, classes, modules."""

from __future__ import annotations

import abc
from collections.abc import Callable
from enum import Enum, EnumMeta
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, Final, NamedTuple, NoReturn, final

from batchmaker.model.cell import Cell
from batchmaker.model.guards import MISSING, Guard, UnprovenError
from batchmaker.model.known_kinds import (
    ARRAYS,
    CALLED_ON_CELLS,
    CONTAINERS,
    DATA,
    FACTS_OF_ARRAYS,
    ITERATORS,
    OF_ARRAYS,
    OWN,
    VIEWS,
    inherits,
)
from batchmaker.model.model import Model, cells_in

METACLASSES: Final = frozenset((type, abc.ABCMeta, EnumMeta))
STATIC: Final = 1 << 8
"""Py_TPFLAGS_IMMUTABLETYPE: nobody can change the class."""
_USUAL: Final = (object.__getattribute__, tuple.__getattribute__)
_FIELD: Final = type(vars(NamedTuple("_Named", [("field", int)]))["field"])


@final
class Lookups:
    """The look-ups of one run on a request. record: what was found. call: runs a function, such as a property.

    refused: why the run proves nothing, even if the function has caught the error.
    """

    def __init__(self, call: Callable[..., Any], request: Any) -> None:
        self.record = Guard()
        self.refused: str | None = None
        self._made: dict[int, Any] = {}
        self._parts: dict[int, Any] = {}
        self._add_parts(request)
        self._call = call

    def refuse(self, why: str) -> NoReturn:
        """Raise UnprovenError: the function may give another result next time."""
        self.refused = self.refused or why
        raise UnprovenError(why)

    def entered(self, value: Any) -> Any:
        """Note a value that was there before the function ran, with what is in it. Returns the value."""
        kind = type(value)
        try:
            if kind is list or kind is dict or kind is set:
                if self.record.container(value):
                    if kind is dict and not frozenset(map(type, value)) <= DATA:
                        self.refuse("it reads a dict whose keys are objects")
                    for part in value.values() if kind is dict else value:
                        self.entered(part)
            elif kind is frozenset or inherits(value, tuple):
                for part in (frozenset if kind is frozenset else tuple).__iter__(value):
                    self.entered(part)
            elif kind in ARRAYS:
                self.record.array(value)
            elif kind in ITERATORS or any("__next__" in vars(base) for base in kind.__mro__):
                self.refuse("it reads an iterator")
        except UnprovenError as error:
            self.refuse(str(error))
        return value

    def existed(self, value: Any) -> bool:
        """Whether a container, array or tensor was there before the function ran, or is part of the request."""
        return self.record.notes(value) or id(value) in self._parts

    def _add_parts(self, part: Any) -> None:
        if type(part) in (list, tuple, dict):
            self._parts[id(part)] = part
            for inner in part.values() if type(part) is dict else part:
                self._add_parts(inner)

    def made(self, value: Any) -> Any:
        """Note an object that the function itself has made. Returns it."""
        self._made[id(value)] = value
        return value

    def has_made(self, value: Any) -> bool:
        """Whether the function itself has made an object."""
        return id(value) in self._made

    def in_class(self, kind: type[Any], name: str) -> Any:
        """Return what a class or its bases have under a name; MISSING if nothing."""
        if type(kind) not in METACLASSES:
            self.refuse(f"the class {kind.__name__} has a metaclass of its own")
        return self._in_bases(kind.__mro__ if kind.__flags__ & STATIC else self.record.bases(kind), name)

    def _in_bases(self, bases: tuple[type[Any], ...], name: str) -> Any:
        for base in bases:
            has = vars(base).get(name, MISSING) if base.__flags__ & STATIC else self.record.name(base, name)
            if has is not MISSING:
                return has
        return MISSING

    def attribute(self, value: Any, name: str) -> Any:
        """value.name, as Python finds it."""
        kind = type(value)
        if kind in OWN:
            return getattr(value, name)
        if name.startswith("__") and name.endswith("__") and not (kind is ModuleType or name == "__class__"):
            self.refuse(f"it reads {name}")
        if kind in CONTAINERS or kind in DATA or kind in VIEWS:
            return getattr(value, name)
        if kind in ARRAYS:
            if name not in OF_ARRAYS and name not in FACTS_OF_ARRAYS:
                self.refuse(f"it reads {name} of an array")
            return getattr(value, name)
        if kind is ModuleType:
            return self._of_module(value, name)
        if kind is super:
            return self._of_super(value, name)
        return self._of_class(value, name) if inherits(value, type) else self._of_object(value, kind, name)

    def _of_module(self, module: ModuleType, name: str) -> Any:
        has = self.record.name(vars(module), name)
        if has is MISSING:
            self.refuse(f"the module {module.__name__} has no {name}")
        return self.entered(has)

    def _of_super(self, value: Any, name: str) -> Any:
        mine = self.record.bases(value.__self_class__)
        has = self._in_bases(mine[mine.index(value.__thisclass__) + 1 :], name)
        if has is MISSING:
            raise AttributeError(name)
        return self._bound(has, value.__self__, value.__self_class__)

    def _of_object(self, value: Any, kind: type[Any], name: str) -> Any:
        if self.in_class(kind, "__getattribute__") not in _USUAL or kind is MethodType:
            self.refuse(f"a {kind.__name__} has its own way to look up attributes")
        has = self.in_class(kind, name)
        if type(has) is _FIELD:  # of a named tuple
            return has.__get__(value, kind)
        if id(value) in self._made and name in self.in_class(kind, "__dataclass_fields__"):
            return object.__getattribute__(value, name)
        self.record.kind(value)
        if name == "__class__":
            if has is not vars(object)["__class__"]:
                self.refuse("it reads a class that is not the class")
            return kind
        if name == "cells" and has is vars(Model)["cells"]:
            return self._cells(value)
        if type(has) is property and kind is not Cell:
            return self._call(has.fget, value)
        if type(has) is MemberDescriptorType:
            return self.entered(self.record.slot(has, value))
        if inherits(value, Enum) and name in ("value", "name") and has is vars(Enum).get(name):
            name = f"_{name}_"
        elif has is not MISSING and any(
            self.in_class(type(has), part) is not MISSING for part in ("__set__", "__delete__")
        ):
            self.refuse(f"{name} is a descriptor")
        own = self._own(value, kind)
        if own is not None and (mine := self.record.name(own, name)) is not MISSING:
            return self.entered(mine)
        if has is not MISSING:
            if kind is Cell and name not in CALLED_ON_CELLS:
                self.refuse(f"it reads {name} of a cell")
            return self._bound(has, value, kind)
        if self.in_class(kind, "__getattr__") is not MISSING:
            self.refuse(f"a {kind.__name__} has its own way to look up attributes")
        raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")

    def _own(self, value: Any, kind: type[Any]) -> dict[str, Any] | None:
        """Return the dict of an object's own attributes, None if it has none."""
        if not kind.__dictoffset__:
            return None
        has = self.in_class(kind, "__dict__")
        if has is not MISSING and type(has) is not GetSetDescriptorType:
            self.refuse(f"a {kind.__name__} has its own way to look up attributes")
        return self.record.attributes(value)

    def _cells(self, model: Model) -> dict[str, Cell]:
        """Return the property `cells` of a model, for which all its attributes are read."""
        own = self.record.attributes(model)
        self.record.container(own)
        for value in own.values():
            if cells_in({"": value}):
                self._hold_cells(value)
        return cells_in(own)

    def _hold_cells(self, value: Any) -> None:
        if inherits(value, Model):
            self._cells(value)
        elif inherits(value, list, dict) and self.record.container(value):
            for part in value.values() if isinstance(value, dict) else value:
                self._hold_cells(part)
        elif inherits(value, tuple):
            for part in value:
                self._hold_cells(part)

    def _of_class(self, kind: type[Any], name: str) -> Any:
        meta = self.record.kind(kind)
        if inherits(kind, EnumMeta) and type(kind) in METACLASSES:
            members = self.record.name(kind, "_member_map_")
            if type(members) is dict and (member := self.record.name(members, name)) is not MISSING:
                return member
        of_meta = self.in_class(meta, name)
        if of_meta is not MISSING or name == "__class__":
            self.refuse(f"it reads {name} of a class")
        has = self.in_class(kind, name)
        if has is MISSING:
            if self.in_class(meta, "__getattr__") is not MISSING:
                self.refuse(f"{kind.__name__} has its own way to look up attributes")
            raise AttributeError(f"type object {kind.__name__!r} has no attribute {name!r}")
        return has if type(has) in (FunctionType, property) else self._bound(has, None, kind)

    def _bound(self, has: Any, value: Any, kind: type[Any]) -> Any:
        """Return what was found in a class, as an attribute of an object or, if value is None, of the class."""
        form = type(has)
        if form is FunctionType:
            return has if value is None else MethodType(has, value)
        if form is staticmethod:
            return self.entered(has.__func__)
        if form is classmethod:
            return MethodType(has.__func__, kind)
        if form is property and value is not None:  # of `super`
            return self._call(has.fget, value)
        is_plain = form is BuiltinFunctionType or inherits(has, type)
        if not is_plain and self.in_class(form, "__get__") is not MISSING:
            self.refuse("it reads a descriptor")
        return self.entered(has)
