"""Whether two results of one row differ by rounding alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Run = Callable[[], tuple[Tensor, ...]]
"""Computes the outputs of some rows."""

_TOLERANCE: Final = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Differences that are taken for rounding without a further look, as a share of the largest number of a row."""

_NOISE: Final = 8.0
"""Units of rounding by which each result is changed to see what rounding does."""
_PROBES: Final = 6
_MORE: Final = 8.0
"""A difference is rounding's if it is at most so many times what the noise does."""

_EXACT: Final = frozenset(
    """where gather index index_select embedding clone cat stack max min amax amin maximum minimum relu abs neg sort
    topk clamp round floor ceil trunc sign _to_copy constant_pad_nd flip roll arange zeros ones full empty_like
    zeros_like ones_like masked_fill scatter eq""".split()  # noqa: SIM905
)
"""Operations that choose or move numbers and round none."""


def tolerance(dtypes: Iterable[torch.dtype]) -> float:
    """Return the tolerance for a module that computes with these dtypes: that of the coarsest."""
    return max([_TOLERANCE.get(dtype, 0.0) for dtype in dtypes], default=_TOLERANCE[torch.float32])


def is_apart(one: Tensor, other: Tensor, within: float, scale: float = 0.0) -> bool:
    """Whether two results of one row differ by more than a share of the largest number in them, or of `scale`.

    Integers and bools differ if they are not equal.
    """
    difference = distance(one, other)
    if difference in (0.0, math.inf):
        return difference > 0
    return difference > within * max(largest(one), largest(other), scale)


def largest(values: Tensor) -> float:
    """Return the largest size of a finite number among some."""
    return float(values.double().abs().nan_to_num(0.0, 0.0, 0.0).amax()) if values.numel() else 0.0


def distance(one: Tensor, other: Tensor) -> float:
    """Return the largest distance between numbers of two results of one row.

    0 for equal results, where NaN equals NaN; infinite for numbers that are finite on one side only, for integers and
    bools that are not equal, and for other shapes.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    if torch.equal(one, other):
        return 0.0
    if not one.is_floating_point():
        return math.inf
    a, b = one.double(), other.double()
    same = (a == b) | (a.isnan() & b.isnan())
    if not bool((same | (a.isfinite() & b.isfinite())).all()):
        return math.inf
    return float((a - b).abs().masked_fill(same, 0.0).amax())


def is_rounding(difference: float, run: Run, output: int) -> bool:
    """Whether noise of a few units of rounding, in every operation, moves an output about as far as `difference`.

    run: computes the row alone. So a choice between nearly equal scores, or a cell that enlarges every difference, is
    not taken for one whose rows depend on each other.
    """
    return is_moved(difference, lambda: run()[output][:1])


def is_moved(difference: float, value: Callable[[], Tensor]) -> bool:
    """Whether noise, as in `is_rounding`, moves a value as far as about `difference`.

    value: computes it for one row.
    """
    before = value()
    for seed in range(_PROBES):
        with torch.no_grad(), _Noise(seed):
            after = value()
        noisy = distance(before, after)
        if noisy > 0 and difference <= _MORE * noisy:
            return True
    return False


@final
class _Noise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Changes the floating inputs and results of each operation that rounds, at random, by a few units of rounding."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func._schema.name).rpartition("::")[2] in _EXACT or any(
            value.alias_info is not None for value in func._schema.returns
        ):
            return func(*args, **(kwargs or {}))
        noisy = pytree.tree_map_only(Tensor, self._noisy, args)  # a sum of large numbers may be small, its rounding not
        return pytree.tree_map_only(Tensor, self._noisy, func(*noisy, **(kwargs or {})))

    def _noisy(self, value: Tensor) -> Tensor:
        if not value.is_floating_point() or value.device.type != "cpu" or value.dtype not in _TOLERANCE:
            return value
        noise = torch.randn(value.shape, generator=self._generator, dtype=torch.float64)
        return (value.double() * (1 + _NOISE * torch.finfo(value.dtype).eps * noise)).to(value.dtype)
