"""Which functions and kinds of values are known: what they do depends on nothing but what they are given.

A function in `PURE` is called with data only (see `Reads.known`), so no code of a user runs inside it.
"""

from __future__ import annotations

import builtins
import collections.abc
import dataclasses
import itertools
import math
import numbers
import operator
from types import EllipsisType, FunctionType, NoneType, NotImplementedType
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from batchmaker import errors
from batchmaker.graph import recorder, values
from batchmaker.graph.recorder import Recorder
from batchmaker.graph.spec import CellType, ValueSpec
from batchmaker.graph.values import HostValues, Output, Value, ValueSequence
from batchmaker.model import arguments, cell, decisions, host_values, scope, stand_ins, trees
from batchmaker.model.scope import UnfoldingScope
from batchmaker.model.stand_ins import StandIn
from batchmaker.model.trees import TreeCalls

NUMBERS: Final = frozenset((bool, int, float, complex, str, bytes, NoneType, EllipsisType, NotImplementedType))
DATA: Final = NUMBERS | {range, slice, torch.dtype, torch.Size, torch.device}
ARRAYS: Final = frozenset((np.ndarray, torch.Tensor, nn.Parameter))
CONTAINERS: Final = frozenset((list, tuple, dict, set, frozenset))
VIEWS: Final = frozenset((type({}.keys()), type({}.values()), type({}.items())))
HANDLES: Final = frozenset((Value, ValueSequence, HostValues, TreeCalls))
"""What cells give and take."""
OWN: Final = HANDLES | {Output, ValueSpec, CellType, UnfoldingScope, Recorder, StandIn}
"""Objects of this request alone, and constants, whose attributes are known."""
ITERATORS: Final[frozenset[Any]] = frozenset((
    enumerate, zip, reversed, map, filter, type(iter(())), type(iter([])), type(iter("")), type(iter({})),
    type(iter({}.values())), type(iter({}.items())), type(iter(set())), type(iter(range(0))), type(reversed([])),
    type(reversed({})), type(letter for letter in ""), itertools.chain, itertools.islice, itertools.repeat,
    itertools.product, itertools.pairwise, itertools.count, itertools.zip_longest, itertools.permutations,
    itertools.combinations,
))  # fmt: skip
"""Made by the function itself: one that was there before is refused."""

OURS: Final = frozenset(
    [
        id(vars(module))
        for module in (arguments, cell, decisions, host_values, recorder, scope, stand_ins, trees, values)
    ]
)
"""The globals of functions that unfold functions call, and that read nothing but their arguments and the registry."""
CALLED_ON_CELLS: Final = frozenset(("__call__", "run", "loop", "map", "tree", "at"))

STRUCTURAL: Final[frozenset[Any]] = frozenset((
    len, list, tuple, zip, enumerate, reversed, iter, next, itertools.chain, itertools.islice, itertools.repeat,
    itertools.product, itertools.pairwise, itertools.count, itertools.zip_longest, itertools.permutations,
    itertools.combinations,
))  # fmt: skip
"""They go over their arguments, and look at no element."""
WITH_KEY: Final = frozenset((sorted, min, max))
PURE: Final[frozenset[Any]] = frozenset((
    sum, any, all, abs, int, float, bool, complex, str, round, divmod, pow, range, set, frozenset, slice, chr, ord,
    dict, *WITH_KEY,
    *[function for function in vars(math).values() if callable(function)],
    *[vars(operator)[name] for name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "index")],
    np.zeros, np.ones, np.full, np.arange, np.array, np.asarray, np.stack, np.concatenate, np.eye, np.zeros_like,
    np.ones_like, np.full_like, np.repeat, np.tile, np.flip, np.linspace, np.where, np.cumsum, np.flatnonzero,
    np.float16, np.float32, np.float64, np.int8, np.int16, np.int32, np.int64, np.uint8, np.bool_,
    torch.zeros, torch.ones, torch.full, torch.arange, torch.tensor, torch.as_tensor, torch.stack, torch.cat,
    torch.eye, torch.zeros_like, torch.ones_like, torch.full_like, torch.linspace, torch.from_numpy, torch.flip,
))  # fmt: skip
FACTORIES: Final = frozenset(
    (torch.zeros, torch.ones, torch.full, torch.arange, torch.tensor, torch.as_tensor, torch.eye, torch.linspace)
)
"""They look at torch's default dtype."""

MUTATES: Final[dict[Any, frozenset[str]]] = {
    list: frozenset(("append", "extend", "insert", "pop", "reverse", "clear")),
    dict: frozenset(("pop", "setdefault", "update", "clear", "popitem")),
    set: frozenset(("add", "discard", "remove", "clear", "update")),
}
COMPARES: Final[dict[Any, frozenset[str]]] = {
    list: frozenset(("index", "count", "remove", "sort")),
    tuple: frozenset(("index", "count")),
}
"""They compare elements."""
OF_ARRAYS: Final = frozenset((
    "astype", "reshape", "tolist", "item", "copy", "max", "min", "sum", "any", "all", "argmax", "argmin", "transpose",
    "squeeze", "repeat", "cumsum", "clone", "view", "unsqueeze", "flip", "expand", "float", "double", "half", "long",
    "int", "bool", "size", "dim", "numel", "detach", "permute", "contiguous", "flatten", "t", "unbind", "chunk",
    "split", "narrow", "select",
))  # fmt: skip
"""Methods and attributes of arrays and tensors that depend on their values alone."""
FACTS_OF_ARRAYS: Final = frozenset(("shape", "ndim", "dtype", "T", "mT", "size", "nbytes", "itemsize"))

COLLECTIONS: Final = frozenset((
    collections.abc.Mapping, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection,
    collections.abc.Sized, collections.abc.Container, collections.abc.MutableSequence, collections.abc.MutableMapping,
    collections.abc.Set, numbers.Number, numbers.Integral, numbers.Real,
))  # fmt: skip
"""Abstract classes that may be asked about values of known kinds."""


def inherits(value: Any, *kinds: type[Any]) -> bool:
    """Whether a value is of one of these classes, whatever it says itself."""
    return not frozenset(kinds).isdisjoint(type(value).__mro__)


def is_known_error(kind: Any) -> bool:
    """Whether a class of errors is Python's or this library's."""
    return (
        type(kind) is type
        and any(vars(module).get(kind.__name__) is kind for module in (builtins, errors))
        and (BaseException in kind.__mro__)
    )


def is_written_init(init: FunctionType, fields: tuple[Any, ...], frozen: bool) -> bool:
    """Whether a function is the `__init__` that `dataclass` writes for these fields, without default factories."""
    if not all(one.init and one.default_factory is dataclasses.MISSING for one in fields):
        return False
    same = [
        (one.name, Any, dataclasses.field(default=one.default, kw_only=one.kw_only))
        for one in sorted(fields, key=lambda one: one.kw_only)
    ]
    try:
        written: Any = vars(dataclasses.make_dataclass("Same", same, frozen=frozen))["__init__"]
    except (TypeError, ValueError):  # a class that has changed since
        return False
    one, other = [function.__code__.replace(co_firstlineno=1) for function in (init, written)]
    bound = all(cell.cell_contents is object for cell in init.__closure__ or ())
    return one == other and bound
