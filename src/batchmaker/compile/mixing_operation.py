"""The first operation of a module at which a row has other results among other rows than alone."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from batchmaker.compile.rounding import Run, distance, is_apart, is_moved


@dataclass(frozen=True, slots=True)
class _Called:
    """One operation that a module called. values: its results, tensors and numbers. said: its name and place."""

    func: Any
    values: tuple[Any, ...]
    said: str


@final
class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation that runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Called] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in pytree.tree_leaves(made)]
        self.calls.append(_Called(func, tuple(leaves), _said(func, args, kwargs or {})))
        return made


@final
class NoChance(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets every operation that draws random numbers give the same number for all, so that rows can be compared."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return made
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), made[1].fill_(1)
        return pytree.tree_map_only(Tensor, lambda values: values.fill_(0.5 if values.is_floating_point() else 0), made)


def mixing_operation(alone: Run, num_alone: int, together: Run, num_together: int, place: int, tol: float) -> str:
    """Return the first operation at which a row has other results among others than alone; "" if none is found.

    alone: runs `num_alone` rows, of which the first is the row. together: runs more, among them the row at `place`.
    """
    said = ""
    for one, other in zip(_watched(alone), _watched(together), strict=False):
        if one.func is not other.func:
            return f"a branch in Python after {said}" if said else "a branch in Python"
        said = other.said
        for a, b in zip(one.values, other.values, strict=False):
            if _is_other(a, num_alone, b, num_together, place, tol):
                return said
    return ""


def is_mixed(alone: Run, num_alone: int, together: Run, num_together: int, place: int, tol: float) -> bool:
    """Whether a row depends on others where its results first differ, and not by rounding: noise moves them less there.

    For rows whose outputs differ as noise would make them differ. So `x >= x.mean(0)` is found: alone a row is its own
    mean, and any noise decides. For the arguments see `mixing_operation`. Results that may be several rows' are passed
    over.
    """
    if num_alone == num_together:
        return False
    first, second = _watched(alone), _watched(together)
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if one.func is not other.func:
            return False
        for part, (a, b) in enumerate(zip(one.values, other.values, strict=False)):
            if not _is_other(a, num_alone, b, num_together, place, tol):
                continue
            if not isinstance(a, Tensor):  # a number taken out of a tensor that did not differ
                continue
            dims = [d for d in range(a.dim()) if a.shape[d] != b.shape[d]]
            if dims and a.shape[dims[0]] != num_alone:
                continue
            mine, its = (a, b) if not dims else (a.narrow(dims[0], 0, 1), b.narrow(dims[0], place, 1))
            at = partial(_value_of, alone, one.func, number, part, None if not dims else dims[0])
            return not is_moved(distance(mine, its), at)
    return False


def _value_of(run: Run, func: Any, number: int, part: int, rows: int | None) -> Tensor:
    """Return a result of an operation that a module calls; of its first row, if a dimension has the rows."""
    calls = _watched(run)
    if number >= len(calls) or calls[number].func is not func:  # noise has led to another branch
        return torch.full((), torch.nan)
    value: Tensor = calls[number].values[part]
    return value if rows is None else value.narrow(rows, 0, 1)


def _watched(run: Run) -> list[_Called]:
    """Return the operations that run, in order."""
    watch = _Watch()
    with torch.no_grad(), watch:
        run()
    return watch.calls


def _is_other(a: Any, num_alone: int, b: Any, num_together: int, place: int, tol: float) -> bool:
    """Whether a result differs for the row. Results in which the row is not found are taken for equal."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and isinstance(a, bool | int | float) and a != b and not (a != a and b != b)
    if a.dim() != b.dim() or a.dtype != b.dtype or a.dtype.is_complex:
        return False
    if a.shape == b.shape:
        return bool(a.numel()) and is_apart(a, b, tol)
    dims = [d for d in range(a.dim()) if a.shape[d] != b.shape[d]]
    if len(dims) != 1 or a.shape[dims[0]] * num_together != b.shape[dims[0]] * num_alone:
        return False
    each = a.shape[dims[0]] // num_alone
    mine, its = a.narrow(dims[0], 0, each), b.narrow(dims[0], place * each, each)
    return bool(mine.numel()) and is_apart(mine, its, tol)


_WORDS: Final = {"_local_scalar_dense": "a number taken out of a tensor (.item(), bool(), int() or float())"}


def _said(func: Any, args: Any, kwargs: Any) -> str:
    """Return an operation in words: its name, its dimension, and the line that called it."""
    name = str(func._schema.name).rpartition("::")[2]
    said = _WORDS.get(name, name.strip("_"))
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("dim", "dims"):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            number = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
            said += f" over dimension {number}" if isinstance(number, int) and not isinstance(number, bool) else ""
    return said + _line()


def _line() -> str:
    """Return the innermost line of the stack that is neither torch's nor of this package; "" if there is none."""
    here, torchs = str(Path(__file__).parent), str(Path(torch.__file__).parent)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and file.startswith(here):
            return ""  # the caller of the module: nobody's code was between
        if file != __file__ and not file.startswith((torchs, "<")):
            return f" at {Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
