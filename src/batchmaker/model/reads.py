"""Runs an unfold function so that all that it reads is seen, or refused.

The function runs in a form in which each operation asks first (`observed_code`), and so do the functions of the user
that it calls. What it reads besides its request goes into a `Guard`. An operation on anything whose behaviour is not
known raises UnprovenError before it happens, so nothing acts twice.
"""

from __future__ import annotations

import abc
import functools
import sys
from collections.abc import Callable
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any, Final, cast, final

import torch

from batchmaker.model import decisions
from batchmaker.model.cell import Cell
from batchmaker.model.guards import MISSING, Guard, UnprovenError
from batchmaker.model.known_kinds import (
    ARRAYS,
    COLLECTIONS,
    COMPARES,
    CONTAINERS,
    DATA,
    FACTORIES,
    ITERATORS,
    MUTATES,
    OF_ARRAYS,
    OURS,
    OWN,
    PURE,
    STRUCTURAL,
    VIEWS,
    WITH_KEY,
    inherits,
    is_known_error,
    is_written_init,
)
from batchmaker.model.lookups import METACLASSES, Lookups
from batchmaker.model.model import Model
from batchmaker.model.observed_code import hook, observed_code
from batchmaker.model.operands import Operands
from batchmaker.model.stand_ins import StandIn, kind_of

_FOREIGN: Final = (frozenset(sys.stdlib_module_names) - {"__main__"}) | {"numpy", "torch"}
_BUILT_IN: Final = frozenset(
    (BuiltinFunctionType, MethodWrapperType, WrapperDescriptorType, *[type(one) for one in PURE])
) - {FunctionType, type}
_NEVER: Final = 0x80 | 0x100 | 0x200
"""The flags of code of coroutines and asynchronous generators."""


@final
class _Globals(dict[str, Any]):
    """The globals of a function that asks: the hooks, and the names of the function's own globals, as they are read."""

    def __init__(self, lookups: Lookups, function: FunctionType, hooks: dict[str, Any]) -> None:
        super().__init__(hooks)
        self._lookups = lookups
        self._names: dict[str, Any] = function.__globals__
        self._built_in: dict[str, Any] = cast(Any, function).__builtins__
        super().__setitem__("__builtins__", self._built_in)  # Python reads it when a function is made

    def __getitem__(self, name: str) -> Any:
        if name == "__builtins__":
            self._lookups.refuse("it reads __builtins__")
        if name in self:
            return super().__getitem__(name)
        value = self._lookups.record.name(self._names, name)
        if value is MISSING:
            value = self._lookups.record.name(self._built_in, name)
        if value is MISSING:
            raise KeyError(name)
        return self._lookups.entered(value)


@final
class Reads:
    """The reads of one run of a function of a model on a request."""

    def __init__(self, model: Model, request: Any) -> None:
        self.model = model
        self._lookups = lookups = Lookups(self.call, request)
        self._operands = operands = Operands(lookups)
        self._globals: dict[int, _Globals] = {}
        self._observed: dict[int, FunctionType] = {}
        hooks: tuple[Callable[..., Any], ...] = (
            lookups.refuse,
            lookups.attribute,
            self.call,
            operands.known,
            operands.joined,
            operands.united,
            operands.compared,
            operands.same,
            operands.truth,
            operands.iterated,
            operands.each,
            operands.unpacked,
            operands.mapping,
            operands.item,
            operands.target,
            operands.augmented,
            operands.augmented_item,
            operands.raised,
        )
        self._hooks = {hook(one.__name__): one for one in hooks}
        self._hooks |= {hook("key"): operands.compared, hook("slice"): operands.bounds}

    def guard(self) -> Guard:
        """Return the record. UnprovenError if something was refused, or has changed meanwhile."""
        if self.refused is not None:
            raise UnprovenError(self.refused)
        record = self._lookups.record
        record.close()
        if not record.holds():
            raise UnprovenError("what it reads has changed meanwhile")
        return record

    @property
    def refused(self) -> str | None:
        """Why the run proves nothing, even if the function has caught the error."""
        return self._lookups.refused

    def function(self, name: str) -> Callable[..., Any]:
        """Return a function of the model, by name, in the form that is recorded."""
        function = self._lookups.attribute(self.model, name)
        if not inherits(function, FunctionType, MethodType):
            self._lookups.refuse(f"{name} is a {type(function).__name__}")

        @functools.wraps(function)
        def called(*arguments: Any, **named: Any) -> Any:
            return self.call(function, *arguments, **named)

        return called

    def has_made(self, function: FunctionType) -> bool:
        """Whether a function was made by those that ran."""
        return type(function.__globals__) is _Globals

    # --- calls -----------------------------------------------------------------------------------------------------

    def call(self, function: Any, /, *arguments: Any, **named: Any) -> Any:
        """function(*given, **named)."""
        kind = type(function)
        if kind is FunctionType:
            return self._of_python(function, arguments, named)
        if kind is MethodType:
            return self.call(function.__func__, function.__self__, *arguments, **named)
        if kind is Cell:
            return function(*map(self._for_cells, arguments), **named)
        if kind is functools.partial:
            return self._of_partial(function, arguments, named)
        if kind in _BUILT_IN:
            return self._built_in(function, arguments, named)
        if kind in METACLASSES:
            return self._made(function, arguments, named)
        called = self._lookups.in_class(kind, "__call__")
        if type(called) is not FunctionType:
            self._lookups.refuse(f"it calls a {kind.__name__}")
        self._lookups.record.kind(function)
        return self._of_python(called, (function, *arguments), named)

    def _of_python(self, function: FunctionType, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        names = function.__globals__
        if type(names) is _Globals:
            return function(*arguments, **named)
        if function in PURE:
            return self._pure(function, arguments, named)
        if id(names) in OURS:
            return self._of_ours(function, arguments, named)
        observed = self._observed.get(id(function))
        if observed is None:
            observed = self._observed[id(function)] = self._asking(function)
        return observed(*arguments, **named)

    def _asking(self, function: FunctionType) -> FunctionType:
        """Return the form of a function that asks, and note the function, its defaults and its closure."""
        root = str(function.__globals__.get("__name__")).partition(".")[0]
        if root in _FOREIGN:
            self._lookups.refuse(f"it calls into the module {root}")
        code = observed_code(function.__code__)
        if code is None or code.co_flags & _NEVER:
            self._lookups.refuse(f"the source of {function.__name__} is not known")
        record, names = self._lookups.record, function.__globals__
        record.function(function)
        for default in function.__defaults__ or ():
            self._lookups.entered(default)
        self._lookups.entered(function.__kwdefaults__)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for cell in cells.values():
            self._lookups.entered(record.cell(cell))
        if id(names) not in self._globals:
            self._globals[id(names)] = _Globals(self._lookups, function, self._hooks)
        closure: tuple[CellType, ...] = tuple([cells[name] for name in code.co_freevars])
        observed = FunctionType(
            code, self._globals[id(names)], function.__name__, function.__defaults__, closure or None
        )
        observed.__kwdefaults__ = function.__kwdefaults__
        return observed

    def _of_ours(self, function: FunctionType, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a function of this library that reads nothing but what it is given."""
        if id(function.__globals__) == id(vars(decisions)):
            parts = [self._for_decisions(part) for part in arguments]
            return function(*parts, **{name: self._for_decisions(part) for name, part in named.items()})
        if type(arguments[0]) is Cell and function.__name__ == "loop":
            self._lookups.record.name(vars(arguments[0]), "host_outputs")
            if inherits(named.get("until"), FunctionType, MethodType):
                return function(*map(self._for_cells, arguments), **named)  # a loop's end is looked at later
        named = {name: self._for_cells(part) for name, part in named.items()}
        return function(*map(self._for_cells, arguments), **named)

    def _for_decisions(self, value: Any) -> Any:
        """An argument of `cond`, `switch` or `while_loop`: a function, several, or a state."""
        kind = type(value)
        if kind in (FunctionType, MethodType, functools.partial, Cell):
            return functools.partial(self.call, value)
        if kind is list or kind is tuple:
            return kind(map(self._for_decisions, value))
        if kind is dict:
            return {name: self._for_decisions(part) for name, part in value.items()}
        if inherits(value, tuple):
            tuple(map(self._for_decisions, tuple.__iter__(value)))
            return value
        return value if self._lookups.has_made(value) else self._for_cells(value)

    def _for_cells(self, value: Any) -> Any:
        """An argument of a cell."""
        kind = type(value)
        if kind in OWN:
            return value
        if kind is list or kind is tuple:
            for part in value:
                self._for_cells(part)
            return value
        return self._operands.compared(value)

    def _of_partial(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self._lookups.has_made(function):
            return self.call(function.func, *function.args, *arguments, **{**function.keywords, **named})
        record = self._lookups.record
        inner, before, names = [
            self._lookups.entered(record.slot(vars(functools.partial)[name], function))
            for name in ("func", "args", "keywords")
        ]
        return self.call(inner, *before, *arguments, **{**names, **named})

    # --- what is built in ------------------------------------------------------------------------------------------

    def _built_in(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if function in _SPECIAL:
            return _SPECIAL[function](self, *arguments, **named)
        if function in STRUCTURAL:
            return self._structural(function, arguments, named)
        if function in PURE:
            return self._pure(function, arguments, named)
        owner = getattr(function, "__self__", None)
        kind = type(owner)
        if kind in CONTAINERS or kind in VIEWS or kind in DATA or kind in ARRAYS:
            return self._method(function, owner, kind, arguments, named)
        return self._lookups.refuse(f"it calls {function.__name__}")

    def _made(self, kind: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a class."""
        if kind in _SPECIAL:
            return _SPECIAL[kind](self, *arguments, **named)
        if kind in STRUCTURAL:
            return self._structural(kind, arguments, named)
        if kind in PURE:
            return self._pure(kind, arguments, named)
        if kind is functools.partial and arguments and type(arguments[0]) is not kind:
            # of another one it takes the parts unseen
            return self._lookups.made(functools.partial(arguments[0], *arguments[1:], **named))
        if is_known_error(kind):
            return kind(*map(self._operands.known, arguments), **named)
        if kind is super:
            return kind(*arguments)
        if self._is_named_tuple(kind):
            return kind(*arguments, **named)
        if self._is_dataclass(kind):
            return self._lookups.made(kind(*arguments, **named))
        return self._lookups.refuse(f"it makes a {kind.__name__}")

    def _is_named_tuple(self, kind: Any) -> bool:
        """Whether a class is a named tuple that is made as they all are."""
        new = self._lookups.in_class(kind, "__new__")
        new = new.__func__ if type(new) is staticmethod else new
        if tuple not in kind.__mro__ or type(new) is not FunctionType:
            return False
        self._lookups.record.function(new)
        made = new.__code__.co_names == ("_tuple_new",) and new.__globals__.get("_tuple_new") == tuple.__new__
        return made and self._lookups.in_class(kind, "__init__") is object.__init__

    def _is_dataclass(self, kind: Any) -> bool:
        """Whether a class is a dataclass that is made as they all are, by a function that the decorator wrote."""
        fields, in_class = self._lookups.in_class(kind, "__dataclass_fields__"), self._lookups.in_class
        init = in_class(kind, "__init__")
        if type(fields) is not dict or type(init) is not FunctionType or type(kind) not in (type, abc.ABCMeta):
            return False
        self._lookups.record.function(init)
        for name in fields:
            has = in_class(kind, name)
            if not (has is MISSING or type(has) is MemberDescriptorType or in_class(type(has), "__set__") is MISSING):
                return False
        return (
            is_written_init(
                init, tuple(fields.values()), frozen := in_class(kind, "__setattr__") is not object.__setattr__
            )
            and in_class(kind, "__new__") is object.__new__
            and in_class(kind, "__post_init__") is MISSING
            and (not frozen or kind.__dataclass_params__.frozen)
        )

    def _structural(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        for part in arguments:
            if type(part) not in DATA:
                self._operands.iterated(part)
        return function(*arguments, **{name: self._operands.known(part) for name, part in named.items()})

    def _pure(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if function in WITH_KEY and (key := named.pop("key", None)) is not None:
            named["key"] = None
            values = list(self._operands.iterated(arguments[0])) if len(arguments) == 1 else list(arguments)
            keys = [self._operands.compared(self.call(key, value)) for value in values]
            places = {id(value): made for value, made in zip(values, keys, strict=True)}
            return function(values, **{**named, "key": lambda value: places[id(value)]})
        if function in FACTORIES:
            self._lookups.record.answer(torch.get_default_dtype)
        data = [
            self._operands.known(list(part) if type(part) in ITERATORS or type(part) in VIEWS else part)
            for part in arguments
        ]
        return function(*data, **{name: self._operands.known(part) for name, part in named.items()})

    def _method(
        self, function: Any, owner: Any, kind: type[Any], arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Call a method of a container, a number, a text or an array."""
        name, operands = function.__name__, self._operands
        if kind in ARRAYS:
            if name not in OF_ARRAYS:
                self._lookups.refuse(f"it calls {name} of an array")
            return function(
                *map(operands.known, arguments), **{key: operands.known(part) for key, part in named.items()}
            )
        if name.startswith("__"):
            self._lookups.refuse(f"it calls {name}")
        if name in COMPARES.get(kind, ()):
            operands.compared(owner)
            if named:
                self._lookups.refuse(f"it calls {name} with a function")
        elif name not in _OF_CONTAINERS.get(kind, ()) and kind in CONTAINERS - {frozenset}:
            self._lookups.refuse(f"it calls {name} of a {kind.__name__}")
        changes = name in MUTATES.get(kind, ()) or name in ("remove", "sort")
        if changes and self._lookups.existed(owner):
            self._lookups.refuse("it changes what it has not made")
        if kind is list or kind is tuple:
            if name == "extend":
                operands.iterated(arguments[0])
        elif kind is dict:
            for part in arguments[:1]:
                operands.mapping(part) if name == "update" else operands.compared(part)
        else:
            ask = operands.compared if kind in CONTAINERS else operands.known
            arguments = tuple([ask(list(part) if type(part) in ITERATORS else part) for part in arguments])
        return function(*arguments, **{key: operands.known(part) for key, part in named.items()})

    # --- functions that are told apart from others -----------------------------------------------------------------

    def _type(self, value: Any) -> Any:
        if type(value) is StandIn:
            return kind_of(value)
        self._lookups.record.kind(value)
        return type(value)

    def _isinstance(self, value: Any, kinds: Any) -> bool:
        kind: type[Any] = kind_of(value) if type(value) is StandIn else type(value)
        is_known = kind in OWN or kind in CONTAINERS or kind in ARRAYS or kind in DATA
        if not is_known:
            self._lookups.record.kind(value)
            if self._lookups.in_class(kind, "__class__") is not vars(object)["__class__"]:
                self._lookups.refuse("it asks for the class of an object that has another")
        for one in kinds if type(kinds) is tuple else kinds.__args__ if type(kinds) is UnionType else (kinds,):
            is_base = type(one) is abc.ABCMeta and one in kind.__mro__
            if is_base and self._lookups.in_class(one, "__subclasshook__") is vars(object)["__subclasshook__"]:
                return True
            if type(one) is not type and not (is_known and one in COLLECTIONS):
                self._lookups.refuse("it asks for a class that decides itself what belongs to it")
            if type(one) is not type:
                self._lookups.record.answer(abc.get_cache_token)
            if issubclass(kind, one):
                return True
        return False

    def _getattr(self, value: Any, name: Any, *default: Any) -> Any:
        if type(name) is not str:
            self._lookups.refuse("it reads an attribute of an unknown name")
        try:
            return self._lookups.attribute(value, name)
        except AttributeError:
            if not default:
                raise
            return default[0]

    def _hasattr(self, value: Any, name: Any) -> bool:
        return self._getattr(value, name, MISSING) is not MISSING

    def _map(self, function: Any, *values: Any) -> Any:
        return map(functools.partial(self.call, function), *map(self._operands.iterated, values))

    def _filter(self, function: Any, values: Any) -> Any:
        test = self._operands.truth if function is None else functools.partial(self.call, function)
        return (value for value in self._operands.iterated(values) if self._operands.truth(test(value)))

    def _reduce(self, function: Any, values: Any, *first: Any) -> Any:
        return functools.reduce(functools.partial(self.call, function), self._operands.iterated(values), *first)


_SPECIAL: Final[dict[Any, Callable[..., Any]]] = {
    type: Reads._type, isinstance: Reads._isinstance, getattr: Reads._getattr, hasattr: Reads._hasattr,
    map: Reads._map, filter: Reads._filter, functools.reduce: Reads._reduce,
}  # fmt: skip
_OF_CONTAINERS: Final[dict[Any, frozenset[str]]] = {
    list: frozenset(("append", "extend", "insert", "pop", "reverse", "clear", "copy")),
    dict: frozenset(("get", "items", "keys", "values", "pop", "setdefault", "update", "clear", "copy")),
    set: frozenset((
        "add", "discard", "remove", "clear", "update", "union", "intersection", "difference", "issubset",
        "issuperset", "isdisjoint", "copy",
    )),
}  # fmt: skip
