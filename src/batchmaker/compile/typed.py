"""ATen's pointwise operations as records for typed_steps.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, fx

from batchmaker.compile import typed_steps as steps
from batchmaker.compile.dataflow import TracedCell, TracedValue, is_symbolic

_aten = torch.ops.aten

KINDS: Final = {
    torch.bool: steps.BOOL,
    torch.int64: steps.INT64,
    torch.float32: steps.FLOAT32,
    torch.float64: steps.FLOAT64,
}
"""The dtypes that are computed with."""

Operand: TypeAlias = "fx.Node | Tensor | bool | int | float"


@dataclass(frozen=True, slots=True)
class Typed:
    """One operation: its code, the dtype in which it is done, and its operands; numbers and tensors are constants.

    then: an operation on its result, and on further operands.
    """

    code: int
    dtype: torch.dtype
    operands: tuple[Any, ...]
    then: tuple[int, Any] | None = None


def typed(cell: TracedCell, node: fx.Node) -> Typed | None:
    """Return a node's operation; None if there is none for it."""
    make = _MAKERS.get(node.target)
    value = node.meta.get("val")
    if make is None or not isinstance(value, TracedValue) or value.dtype not in KINDS:
        return None
    made = make(cell, node, value.dtype)
    if made is None or made.dtype not in KINDS:
        return None
    return made if all(_is_known(cell, operand) for operand in made.operands) else None


def dtype_of(cell: TracedCell, operand: Any) -> torch.dtype | None:
    """Return the dtype of an operand's numbers; None for a number of Python."""
    if isinstance(operand, fx.Node):
        constant = cell.value(operand)
        value: TracedValue | Tensor = operand.meta["val"] if constant is None else constant
        return value.dtype
    return operand.dtype if isinstance(operand, Tensor) else None


def _is_known(cell: TracedCell, operand: Any) -> bool:
    if isinstance(operand, fx.Node):
        if is_symbolic(operand) or (
            cell.value(operand) is None and not isinstance(operand.meta.get("val"), TracedValue)
        ):
            return False
        return dtype_of(cell, operand) in KINDS
    return isinstance(operand, bool | int | float)


def _common(cell: TracedCell, operands: tuple[Any, ...]) -> torch.dtype:
    """Return the dtype to which torch brings the operands."""

    def as_example(operand: Any) -> Any:
        if not isinstance(operand, fx.Node):
            return operand
        constant = cell.value(operand)
        dims = len(operand.meta["val"].shape) if constant is None else constant.dim()
        return torch.empty((1,) * dims, dtype=dtype_of(cell, operand))

    examples = [as_example(operand) for operand in operands]
    if len(examples) == 1:
        return torch.result_type(examples[0], examples[0])
    return torch.result_type(*examples)


_Maker: TypeAlias = Callable[[TracedCell, fx.Node, torch.dtype], "Typed | None"]


def _arithmetic(code: int, count: int = 2, *, backwards: bool = False) -> _Maker:
    """The operation is done in the dtype of the result."""

    def make(_: TracedCell, node: fx.Node, dtype: torch.dtype) -> Typed | None:
        if len(node.args) != count or node.kwargs or dtype is torch.bool:
            return None
        return Typed(code, dtype, node.args[::-1] if backwards else node.args)

    return make


def _quotient(code: int) -> _Maker:
    """As arithmetic; integers are divided by a constant other than 0 and -1, which may have no result."""

    def make(cell: TracedCell, node: fx.Node, dtype: torch.dtype) -> Typed | None:
        if len(node.args) != 2 or node.kwargs:
            return None
        divisor: Any = node.args[1]
        if not dtype.is_floating_point and (type(divisor) is not int or divisor in (0, -1)):
            return None
        if dtype is torch.bool or (code == steps.FLOOR_DIVIDE and dtype.is_floating_point):
            return None
        return Typed(code, dtype, node.args)

    return make


def _comparison(code: int) -> _Maker:
    def make(cell: TracedCell, node: fx.Node, _: torch.dtype) -> Typed | None:
        if len(node.args) != 2 or node.kwargs or not all(_is_known(cell, operand) for operand in node.args):
            return None
        return Typed(code, _common(cell, node.args), node.args)

    return make


def _logical(code: int) -> _Maker:
    return lambda _cell, node, _dtype: None if node.kwargs else Typed(code, torch.bool, node.args)


def _bitwise(code: int) -> _Maker:
    def make(_: TracedCell, node: fx.Node, dtype: torch.dtype) -> Typed | None:
        return None if dtype.is_floating_point or node.kwargs else Typed(code, dtype, node.args)

    return make


def _function(code: int) -> _Maker:
    def make(_: TracedCell, node: fx.Node, dtype: torch.dtype) -> Typed | None:
        return Typed(code, dtype, node.args) if dtype.is_floating_point and len(node.args) == 1 else None

    return make


def _shift(code: int) -> _Maker:
    """A shift by a constant from 0 to 62."""

    def make(_: TracedCell, node: fx.Node, dtype: torch.dtype) -> Typed | None:
        count: Any = node.args[1]
        return Typed(code, dtype, node.args) if dtype is torch.int64 and count in range(63) else None

    return make


def _power(_: TracedCell, node: fx.Node, dtype: torch.dtype) -> Typed | None:
    """A square, or for floats the root or one over it."""
    base, exponent = (*node.args, 2)[:2]
    if exponent == 2 and dtype is not torch.bool:
        return Typed(steps.MUL, dtype, (base, base))
    codes: dict[Any, int] = {0.5: steps.SQRT, -0.5: steps.RSQRT}
    return Typed(codes[exponent], dtype, (base,)) if dtype.is_floating_point and exponent in codes else None


def _relu(_: TracedCell, node: fx.Node, dtype: torch.dtype) -> Typed | None:
    return None if dtype is torch.bool else Typed(steps.MAXIMUM, dtype, (node.args[0], 0))


def _reciprocal(_: TracedCell, node: fx.Node, dtype: torch.dtype) -> Typed | None:
    return Typed(steps.DIV, dtype, (1, node.args[0])) if dtype.is_floating_point else None


def _choice(_: TracedCell, node: fx.Node, dtype: torch.dtype) -> Typed | None:
    return Typed(steps.WHERE, dtype, node.args) if len(node.args) == 3 and not node.kwargs else None


def _fill(_: TracedCell, node: fx.Node, dtype: torch.dtype) -> Typed | None:
    value, mask, number = node.args
    return Typed(steps.WHERE, dtype, (mask, number, value)) if not node.kwargs else None


def _clamp(cell: TracedCell, node: fx.Node, dtype: torch.dtype) -> Typed | None:
    value, low, high = (*node.args, None, None)[:3]
    low, high = node.kwargs.get("min", low), node.kwargs.get("max", high)
    if dtype is torch.bool or not all(bound is None or type(bound) in (int, float) for bound in (low, high)):
        return None
    if low is None:
        return None if high is None else Typed(steps.MINIMUM, dtype, (value, high))
    return Typed(steps.MAXIMUM, dtype, (value, low), None if high is None else (steps.MINIMUM, high))


def _cast(_: TracedCell, node: fx.Node, dtype: torch.dtype) -> Typed | None:
    """A conversion, or a value that is repeated: to.dtype, type_as, expand."""
    return Typed(steps.AS, dtype, node.args[:1])


def _same(_: TracedCell, node: fx.Node, dtype: torch.dtype) -> Typed | None:
    """A value filled with one number."""
    targets: tuple[Any, ...] = (_aten.zeros_like.default, _aten.ones_like.default)
    number = targets.index(node.target) if node.target in targets else node.args[1]
    return Typed(steps.AS, dtype, (number,)) if isinstance(number, bool | int | float) else None


_COMPARISONS: Final = {"eq": steps.EQ, "ne": steps.NE, "lt": steps.LT, "le": steps.LE, "gt": steps.GT, "ge": steps.GE}

_MAKERS: Final[dict[Any, _Maker]] = {
    _aten.add.Tensor: _arithmetic(steps.ADD),
    _aten.sub.Tensor: _arithmetic(steps.SUB),
    _aten.rsub.Scalar: _arithmetic(steps.SUB, backwards=True),
    _aten.mul.Tensor: _arithmetic(steps.MUL),
    _aten.div.Tensor: _quotient(steps.DIV),
    _aten.remainder.Scalar: _quotient(steps.REMAINDER),
    _aten.remainder.Tensor: _quotient(steps.REMAINDER),
    _aten.floor_divide.default: _quotient(steps.FLOOR_DIVIDE),
    _aten.neg.default: _arithmetic(steps.NEGATIVE, 1),
    _aten.abs.default: _arithmetic(steps.ABS, 1),
    _aten.maximum.default: _arithmetic(steps.MAXIMUM),
    _aten.minimum.default: _arithmetic(steps.MINIMUM),
    _aten.clamp.default: _clamp,
    _aten.clamp_min.default: _clamp,
    _aten.clamp_max.default: lambda cell, node, dtype: Typed(steps.MINIMUM, dtype, node.args),
    **{
        getattr(getattr(_aten, name), form): _comparison(code)
        for name, code in _COMPARISONS.items()
        for form in ("Tensor", "Scalar")
    },
    _aten.logical_and.default: _logical(steps.AND),
    _aten.logical_or.default: _logical(steps.OR),
    _aten.logical_xor.default: _logical(steps.XOR),
    _aten.logical_not.default: _logical(steps.NOT),
    _aten.__and__.Tensor: _bitwise(steps.AND),
    _aten.__or__.Tensor: _bitwise(steps.OR),
    _aten.__xor__.Tensor: _bitwise(steps.XOR),
    _aten.bitwise_and.Tensor: _bitwise(steps.AND),
    _aten.bitwise_or.Tensor: _bitwise(steps.OR),
    _aten.bitwise_xor.Tensor: _bitwise(steps.XOR),
    _aten.bitwise_not.default: _bitwise(steps.NOT),
    _aten.__and__.Scalar: _bitwise(steps.AND),
    _aten.__or__.Scalar: _bitwise(steps.OR),
    _aten.__xor__.Scalar: _bitwise(steps.XOR),
    _aten.__lshift__.Scalar: _shift(steps.LEFT_SHIFT),
    _aten.__rshift__.Scalar: _shift(steps.RIGHT_SHIFT),
    _aten.bitwise_left_shift.Tensor_Scalar: _shift(steps.LEFT_SHIFT),
    _aten.bitwise_right_shift.Tensor_Scalar: _shift(steps.RIGHT_SHIFT),
    _aten.where.self: _choice,
    _aten.where.ScalarSelf: _choice,
    _aten.where.ScalarOther: _choice,
    _aten.where.Scalar: _choice,
    _aten.masked_fill.Scalar: _fill,
    _aten.to.dtype: _cast,
    _aten._to_copy.default: _cast,
    _aten.type_as.default: _cast,
    _aten.expand.default: _cast,
    _aten.expand_as.default: _cast,
    _aten.clone.default: _cast,
    _aten.zeros_like.default: _same,
    _aten.ones_like.default: _same,
    _aten.full_like.default: _same,
    _aten.exp.default: _function(steps.EXP),
    _aten.log.default: _function(steps.LOG),
    _aten.sqrt.default: _function(steps.SQRT),
    _aten.tanh.default: _function(steps.TANH),
    _aten.sigmoid.default: _function(steps.SIGMOID),
    _aten.rsqrt.default: _function(steps.RSQRT),
    _aten.erf.default: _function(steps.ERF),
    _aten.floor.default: _function(steps.FLOOR),
    _aten.ceil.default: _function(steps.CEIL),
    _aten.sin.default: _function(steps.SIN),
    _aten.cos.default: _function(steps.COS),
    _aten.log1p.default: _function(steps.LOG1P),
    _aten.expm1.default: _function(steps.EXPM1),
    _aten.reciprocal.default: _reciprocal,
    _aten.square.default: _power,
    _aten.pow.Tensor_Scalar: _power,
    _aten.relu.default: _relu,
}
