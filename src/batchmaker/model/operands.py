"""The operands of an unfold function's operations: each is of a kind whose behaviour is known, or it is refused.

These are hooks of `observed_code`: each is given an operand, and returns it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from enum import Enum
from types import FunctionType, ModuleType, UnionType
from typing import Any, Final, final

import numpy as np

from batchmaker.model.cell import Cell
from batchmaker.model.guards import MISSING
from batchmaker.model.known_kinds import (
    ARRAYS,
    CONTAINERS,
    DATA,
    HANDLES,
    ITERATORS,
    NUMBERS,
    OWN,
    VIEWS,
    inherits,
    is_known_error,
)
from batchmaker.model.lookups import METACLASSES, STATIC, Lookups
from batchmaker.model.model import Model
from batchmaker.model.stand_ins import StandIn

_PLAIN_ENUM: Final = frozenset((object.__eq__, Enum.__hash__))
_AUGMENTED: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "Add": operator.iadd, "Sub": operator.isub, "Mult": operator.imul, "Div": operator.itruediv,
    "FloorDiv": operator.ifloordiv, "Mod": operator.imod, "Pow": operator.ipow, "LShift": operator.ilshift,
    "RShift": operator.irshift, "BitOr": operator.ior, "BitXor": operator.ixor, "BitAnd": operator.iand,
    "MatMult": operator.imatmul,
}  # fmt: skip


@final
class Operands:
    """Hooks for operands."""

    def __init__(self, lookups: Lookups) -> None:
        self._lookups = lookups

    def _is_data(self, value: Any, atoms: bool, inside: bool = False) -> bool:
        """Whether operations on a value run code that is known. atoms: so are handles, cells, classes and enums."""
        kind = type(value)
        if kind in DATA:
            return True
        if kind in CONTAINERS:
            parts = (*value.keys(), *value.values()) if kind is dict else value
            return all(self._is_data(part, atoms, True) for part in parts)
        if kind is StandIn:
            return not (inside and atoms)
        if kind is np.ndarray:
            return not value.dtype.hasobject
        if kind in ARRAYS or inherits(value, np.dtype) or (inherits(value, np.generic) and kind.__flags__ & STATIC):
            return True
        if not atoms:
            return False
        if kind in HANDLES or kind is Cell or (inherits(value, type) and type(value) in METACLASSES):
            return True
        if inherits(value, Enum):
            return all(self._lookups.in_class(kind, name) in _PLAIN_ENUM for name in ("__eq__", "__hash__"))
        return kind is object

    def known(self, value: Any) -> Any:
        """An operand of arithmetic, or a part of a text."""
        if not self._is_data(value, atoms=False):
            self._lookups.refuse(f"it computes with a {type(value).__name__}")
        return value

    def joined(self, value: Any) -> Any:
        """An operand of + or *."""
        return value if type(value) is list or type(value) is tuple else self.known(value)

    def united(self, value: Any) -> Any:
        """An operand of |."""
        return value if type(value) is UnionType or type(value) in METACLASSES else self.known(value)

    def compared(self, value: Any) -> Any:
        """An operand of a comparison."""
        if type(value) in VIEWS:
            self.compared(list(value))
        elif not self._is_data(value, atoms=True):
            self._lookups.refuse(f"it compares a {type(value).__name__}")
        return value

    key = compared

    def same(self, one: Any, other: Any) -> bool:
        """Identity. One of the two must be an object of which there is one."""
        if not (self._is_single(one) or self._is_single(other)):
            self._lookups.refuse("it asks whether two values are the same object")
        return one is other

    def _is_single(self, value: Any) -> bool:
        if value is None or value is True or value is False or value is ... or value is NotImplemented:
            return True
        kind = type(value)
        if kind in DATA | ARRAYS | CONTAINERS | VIEWS | ITERATORS | OWN:
            return False
        return inherits(value, Enum, type, Cell, Model, ModuleType) or kind is object

    def truth(self, value: Any) -> Any:
        """An operand of a test."""
        kind = type(value)
        if kind in CONTAINERS or kind in VIEWS or kind in OWN or inherits(value, type, FunctionType, Cell):
            return value
        if self._is_data(value, atoms=False):
            return value
        if any(self._lookups.in_class(kind, name) is not MISSING for name in ("__bool__", "__len__")):
            self._lookups.refuse(f"it tests a {kind.__name__}")
        self._lookups.record.kind(value)
        return value

    def iterated(self, value: Any) -> Any:
        """What is gone over."""
        kind = type(value)
        if kind in CONTAINERS or kind in VIEWS or kind in ITERATORS or kind in OWN or kind in ARRAYS or kind in DATA:
            return value
        if not (inherits(value, tuple) and self._lookups.in_class(kind, "__iter__") is tuple.__iter__):
            self._lookups.refuse(f"it goes over a {kind.__name__}")
        return value

    def each(self, values: Any, pattern: Any) -> Iterator[Any]:
        """What is gone over, and unpacked."""
        return (self.unpacked(value, pattern) for value in self.iterated(values))

    def unpacked(self, value: Any, pattern: Any) -> Any:
        """What is unpacked. pattern: see observed_code."""
        self.iterated(value)
        if all(part is None or part == "*" for part in pattern):
            return value
        parts, rest = list(value), len(pattern)
        if "?" in pattern:
            self._lookups.refuse("it unpacks what is left over")
        if "*" in pattern:
            star = pattern.index("*")
            pattern = (*pattern[:star], *(None,) * (len(parts) - rest + 1), *pattern[star + 1 :])
        if len(pattern) != len(parts):
            return parts  # which raises
        return [part if form is None else self.unpacked(part, form) for part, form in zip(parts, pattern, strict=True)]

    def mapping(self, value: Any) -> Any:
        """What is unpacked by `**`."""
        if type(value) is not dict:
            self._lookups.refuse(f"it unpacks a {type(value).__name__}")
        return value

    def item(self, value: Any, index: Any) -> Any:
        """value[index]."""
        kind = type(value)
        plain = kind in CONTAINERS or kind in DATA or kind in OWN or kind in ARRAYS
        if not plain and not (
            inherits(value, tuple) and self._lookups.in_class(kind, "__getitem__") is tuple.__getitem__
        ):
            self._lookups.refuse(f"it takes an item of a {kind.__name__}")
        return value[self.compared(index)]

    def target(self, value: Any) -> Any:
        """What an item is set in, or deleted from: only what the function itself has made."""
        fresh = type(value) in (list, dict) or (type(value) is np.ndarray and value.base is None)
        if not fresh or self._lookups.existed(value):
            self._lookups.refuse("it changes what it has not made")
        return value

    def augmented(self, name: str, value: Any, other: Any) -> Any:
        """value += other, and the like."""
        kind = type(value)
        if kind is list and name == "Add":
            self.target(value).extend(self.iterated(other))
            return value
        if kind not in NUMBERS and kind is not tuple and kind is not StandIn:
            self._lookups.refuse(f"it changes a {kind.__name__}")
        return _AUGMENTED[name](self.joined(value), self.joined(other))

    def augmented_item(self, owner: Any, index: Any, name: str, other: Any) -> None:
        """owner[index] += other, and the like."""
        self.target(owner)[index] = self.augmented(name, self.item(owner, index), other)

    def raised(self, error: Any) -> Any:
        """What is raised."""
        kind = error if type(error) is type else type(error)
        if not is_known_error(kind):
            self._lookups.refuse(f"it raises {kind.__name__}")
        return error

    def bounds(self, *bounds: Any) -> slice:
        """A slice."""
        return slice(*[self.known(bound) for bound in bounds])
