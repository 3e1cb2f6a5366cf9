"""ATen's pointwise operations as programs of the interpreter, and these programs as calls in a graph."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, fx

from batchmaker.arrays import Ints
from batchmaker.compile.passes import interpreter as machine
from batchmaker.compile.passes.nodes import width_of

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """A place that instructions read or write. argument: of the call, None for constants, results and registers.

    column: where it begins in the argument. row: a constant's numbers. num_bytes: of one number. step: what is added to
    the address for each column; by default, num_bytes. number: what an instruction gets in place of an address.
    """

    argument: int | None = None
    column: int = 0
    argument_width: int = 0
    row: Tensor | None = None
    num_bytes: int = 4
    step: int | None = None
    number: int | None = None

    @property
    def stride(self) -> int:
        return self.num_bytes if self.step is None else self.step


@dataclass(slots=True, eq=False)
class _Instruction:
    code: int
    result: _Slot
    operands: list[_Slot]


Writer: TypeAlias = Callable[["Assembler", Sequence[_Slot], fx.Node], _Slot]


@final
class Pass:
    """Several pointwise operations on rows [n, width] of float32 or bfloat16, done in one pass over the rows.

    Calls take the values that it reads, [n, any columns], and return fresh results [n, width], a tensor if there is
    only one.
    """

    __name__ = "pointwise_pass"
    __slots__ = ("_constants", "_dtype", "_like", "_program", "_results", "_slots", "_widths", "num_registers", "width")

    def __init__(
        self,
        width: int,
        dtype: torch.dtype,
        slots: Sequence[_Slot],
        results: Sequence[_Slot],
        instructions: Sequence[_Instruction],
    ) -> None:
        inputs = [slot for slot in slots if slot.argument is not None]
        rows = [slot for slot in slots if slot.row is not None]
        given = [slot for slot in slots if slot.number is not None]
        numbers, self.num_registers = _registers(instructions, results)
        place = {slot: index for index, slot in enumerate((*inputs, *rows, *given, *results, *numbers))}
        self.width = width
        self._dtype = dtype
        self._program = np.array(
            [
                [each.code, place[each.result], *_three([place[slot] for slot in each.operands])]
                for each in instructions
            ],
            np.int64,
        )
        self._results = len(results)
        self._like = next((slot.argument for slot in inputs if slot.argument_width == width), None)
        self._constants = [slot.row for slot in rows if slot.row is not None]
        arguments = 1 + max((slot.argument or 0 for slot in inputs), default=-1)
        widths = {slot.argument: slot.argument_width for slot in inputs}
        self._widths = [widths.get(number) or None for number in range(arguments)]
        first = arguments + len(results)  # the order of bases: arguments, results, zero for constants, registers
        block = min(width, machine.BLOCK) * 4
        self._slots = np.array(
            [
                *(
                    [
                        slot.argument,
                        slot.num_bytes * slot.column,
                        slot.num_bytes * slot.argument_width,
                        slot.stride,
                    ]
                    for slot in inputs
                ),
                *([first, row.data_ptr(), 0, 4] for row in self._constants),
                *([first, slot.number, 0, slot.stride] for slot in given),
                *([arguments + index, 0, slot.num_bytes * width, slot.num_bytes] for index, slot in enumerate(results)),
                *([first + 1, number * block, 0, 0] for number in numbers.values()),
            ],
            np.int64,
        )

    @property
    def num_instructions(self) -> int:
        return len(self._program)

    @property
    def for_machine(self) -> tuple[Ints, Ints, int, int] | None:
        """The program, its slots, and how many values it reads and returns; None but for float32.

        Slots refer to the values that are read, then those that are returned, zero, and the registers. They hold
        addresses of constants, which this object keeps alive.
        """
        if self._dtype is not torch.float32:
            return None
        return self._program, self._slots, len(self._widths), self._results

    def __call__(self, *values: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the results for a batch."""
        values = tuple([value if value.is_contiguous() else value.contiguous() for value in values])
        rows = len(values[0])
        # The machine reads and writes by address, and a saved graph may note another shape than its calls give.
        for value, width in zip(values, self._widths, strict=True):
            if width is not None and value.numel() != rows * width:
                raise RuntimeError(f"a pass over {rows} rows got a value {list(value.shape)}, expected rows of {width}")
        if self._like is None:
            results = [torch.empty((rows, self.width), dtype=self._dtype) for _ in range(self._results)]
        else:  # this takes half the time of a call
            like = values[self._like]
            results = [torch.empty_like(like) for _ in range(self._results)]
        bases = np.array([*[v.data_ptr() for v in values], *[r.data_ptr() for r in results], 0, 0], np.int64)
        machine.interpret(self._program, self._slots, bases, self.num_registers, rows, self.width)
        return results[0] if self._results == 1 else tuple(results)


def _three(operands: list[int]) -> list[int]:
    """Return slots for a, b and c. An instruction with fewer operands ignores the others."""
    return (operands + operands[:1] * 2)[:3]


def _registers(instructions: Sequence[_Instruction], results: Sequence[_Slot]) -> tuple[dict[_Slot, int], int]:
    """Return a register for each value that is not a result, and the number of registers.

    A register is free again after the last instruction that reads it. No instruction writes to a register that it
    reads.
    """
    last = {slot: index for index, each in enumerate(instructions) for slot in each.operands}
    final = set(results)
    numbers: dict[_Slot, int] = {}
    free: list[int] = []
    count = 0
    for index, each in enumerate(instructions):
        if each.result not in final:
            if not free:
                free.append(count)
                count += 1
            numbers[each.result] = free.pop()
        read = set(each.operands)
        free += [numbers[slot] for slot in read if slot in numbers and last[slot] == index]
    return numbers, count


@final
class Assembler:
    """Collects the operations of one pass over rows of `width` numbers of a dtype, in order of their dependencies."""

    def __init__(self, width: int, dtype: torch.dtype = torch.float32) -> None:
        self.width, self.dtype = width, dtype
        self._widened: dict[_Slot, _Slot] = {}
        self._slots: dict[fx.Node, _Slot] = {}
        self._instructions: list[_Instruction] = []
        self._extra: list[_Slot] = []
        self._numbers: dict[float, _Slot] = {}

    def knows(self, node: fx.Node) -> bool:
        return node in self._slots

    def argument(self, node: fx.Node, argument: int, source: fx.Node, column: int) -> None:
        """Define a node as columns, from `column` on, of argument number `argument` of the call."""
        self._slots[node] = _Slot(argument, column, width_of(source) or 0, num_bytes=self.dtype.itemsize)

    def constant(self, node: fx.Node, value: Tensor) -> None:
        self._slots[node] = _Slot(row=value.float().reshape(-1).expand(self.width).contiguous())

    def spread(self, node: fx.Node, argument: int, source: fx.Node, column: int) -> None:
        """Append one of `SPREADS`, of columns, from `column` on, of argument number `argument` of the call."""
        read = _Slot(argument, column, width_of(source) or 0, num_bytes=self.dtype.itemsize, step=0)
        given = [_Slot(number=_length_of_spread(node), step=0), _Slot(number=0, step=1)]
        self._extra += [read, *given]
        self._slots[node] = self.write(SPREADS[node.target], read, *given)

    def operation(self, node: fx.Node) -> None:
        """Append a node's operation. Its operands must be known."""
        operands = [self._operand(argument) for argument in node.args if argument is not None]
        self._slots[node] = _WRITERS[node.target](self, operands, node)

    def finished(self, results: Sequence[fx.Node]) -> Pass:
        """Return the program. results: the nodes whose values it returns."""
        wanted = [self._returned(self._slots[node]) for node in results]
        _join_products(self._instructions, set(wanted))
        read = {slot for each in self._instructions for slot in each.operands}
        slots = [slot for slot in (*self._slots.values(), *self._extra) if slot in read]
        return Pass(self.width, self.dtype, slots, wanted, self._instructions)

    def write(self, code: int, *operands: _Slot) -> _Slot:
        """Append an instruction and return the slot of its result."""
        result = _Slot()
        self._instructions.append(_Instruction(code, result, list(operands)))
        return result

    def number(self, value: float) -> _Slot:
        """Return a row of one number."""
        if value not in self._numbers:
            self._numbers[value] = _Slot(row=torch.full((self.width,), value, dtype=torch.float32))
            self._extra.append(self._numbers[value])
        return self._numbers[value]

    def _operand(self, argument: Any) -> _Slot:
        if not isinstance(argument, fx.Node):
            return self.number(float(argument))
        slot = self._slots[argument]
        if slot.num_bytes == 4:  # computed values, and float32 arguments
            return slot
        if slot not in self._widened:
            self._widened[slot] = self.write(machine.WIDEN, slot)
        return self._widened[slot]

    def _returned(self, slot: _Slot) -> _Slot:
        """Return the slot of a result in the pass's dtype."""
        if self.dtype is torch.float32:
            return slot
        rounded = _Slot(num_bytes=self.dtype.itemsize)
        self._instructions.append(_Instruction(machine.NARROW, rounded, [slot]))
        return rounded


def _join_products(instructions: list[_Instruction], wanted: set[_Slot]) -> None:
    """Replace, in place, a product that is only added or subtracted once by one instruction a + b c."""
    reads = Counter(slot for each in instructions for slot in each.operands)
    products = {
        each.result: each
        for each in instructions
        if each.code == machine.MUL and reads[each.result] == 1 and each.result not in wanted
    }
    for each in list(instructions):
        if each.code not in (machine.ADD, machine.SUB):
            continue
        first, second = each.operands
        if each.code == machine.ADD and second not in products:
            first, second = second, first
        if second in products:
            product = products[second]
            each.code = machine.MULTIPLY_ADD if each.code == machine.ADD else machine.MULTIPLY_SUB
            each.operands = [first, *product.operands]
            instructions.remove(product)


SPREADS: Final[dict[Any, int]] = {_aten.repeat_interleave.self_int: machine.REPEAT, _aten.repeat.default: machine.TILE}
"""Operations that make rows wider by repeating their numbers, each by itself or all in turn; see `is_spread`."""


def is_spread(node: fx.Node) -> bool:
    """Whether the node repeats the numbers of rows [n, columns] of float32, each by itself or all in turn."""
    source: Any = node.args[0] if node.target in SPREADS else None
    if source is None or not 0 < (width_of(source) or 0) < (width_of(node) or 0):
        return False
    if node.meta["val"].dtype is not torch.float32 or node.kwargs:
        return False
    times: Any = node.args[1]
    if node.target is _aten.repeat.default:
        return len(times) == 2 and times[0] == 1
    return isinstance(times, int) and node.args[2:] in ((1,), (-1,))


def _length_of_spread(node: fx.Node) -> int:
    """Return how often each number is repeated in turn, or how many numbers are repeated together."""
    each = node.target is _aten.repeat_interleave.self_int
    return node.args[1] if each else width_of(node.args[0])  # type: ignore[return-value, arg-type]


def can_be_assembled(node: fx.Node) -> bool:
    """Whether there is a program for the node's operation with these options."""
    if node.target in _WITH_OPTIONS:
        return _WITH_OPTIONS[node.target](node)
    if node.target not in _WRITERS or not all(isinstance(a, fx.Node | int | float) for a in node.args):
        return False
    return all(key in ("alpha", "value") and isinstance(value, int | float) for key, value in node.kwargs.items())


def _plain(code: int) -> Writer:
    return lambda assembler, operands, _: assembler.write(code, *operands)


def _sum(code: int) -> Writer:
    """Return a writer of a + alpha b or a - alpha b."""

    def write(assembler: Assembler, operands: Sequence[_Slot], node: fx.Node) -> _Slot:
        a, b = operands
        alpha: Any = node.kwargs.get("alpha", 1)
        return assembler.write(code, a, b if alpha == 1 else assembler.write(machine.MUL, b, assembler.number(alpha)))

    return write


def _reversed_sub(assembler: Assembler, operands: Sequence[_Slot], node: fx.Node) -> _Slot:
    """b - alpha a; alpha is the third argument, if it is there."""
    a, b = operands[:2]
    alpha: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)
    return assembler.write(
        machine.SUB, b, a if alpha == 1 else assembler.write(machine.MUL, a, assembler.number(alpha))
    )


def _add_product(assembler: Assembler, operands: Sequence[_Slot], node: fx.Node) -> _Slot:
    a, b, c = operands
    value: Any = node.kwargs.get("value", 1)
    scaled = b if value == 1 else assembler.write(machine.MUL, b, assembler.number(value))
    return assembler.write(machine.MULTIPLY_ADD, a, scaled, c)


def _negative(assembler: Assembler, operands: Sequence[_Slot], _: fx.Node) -> _Slot:
    return assembler.write(machine.MUL, operands[0], assembler.number(-1))


def _over_one_and_exp(assembler: Assembler, x: _Slot, exponent: _Slot) -> _Slot:
    """x / (1 + e^exponent). With a sigmoid, whose error is absolute, a large x would not become 0."""
    under = assembler.write(machine.ADD, assembler.write(machine.EXP, exponent), assembler.number(1))
    return assembler.write(machine.DIV, x, under)


def _silu(assembler: Assembler, operands: Sequence[_Slot], node: fx.Node) -> _Slot:
    return _over_one_and_exp(assembler, operands[0], _negative(assembler, operands, node))


def _squared(assembler: Assembler, operands: Sequence[_Slot], _: fx.Node) -> _Slot:
    return assembler.write(machine.MUL, operands[0], operands[0])


def _reciprocal(assembler: Assembler, operands: Sequence[_Slot], _: fx.Node) -> _Slot:
    return assembler.write(machine.DIV, assembler.number(1), operands[0])


def _inverse_root(assembler: Assembler, operands: Sequence[_Slot], node: fx.Node) -> _Slot:
    return _reciprocal(assembler, [assembler.write(machine.SQRT, operands[0])], node)


def _power(assembler: Assembler, operands: Sequence[_Slot], node: fx.Node) -> _Slot:
    return _POWERS[float(node.args[1])](assembler, operands[:1], node)  # type: ignore[arg-type]


def _gelu(assembler: Assembler, operands: Sequence[_Slot], node: fx.Node) -> _Slot:
    """x/2 (1 + erf(x / sqrt 2)), or x / (1 + e^-2y) with y = sqrt(2 / pi) (x + 0.044715 x^3)."""
    (x,), number, write = operands[:1], assembler.number, assembler.write
    if node.kwargs.get("approximate", "none") == "none":
        half, scaled = write(machine.MUL, x, number(0.5)), write(machine.MUL, x, number(math.sqrt(0.5)))
        return write(machine.MULTIPLY_ADD, half, half, write(machine.ERF, scaled))
    scaled = write(machine.MUL, x, number(-2 * math.sqrt(2 / math.pi)))
    cubed = write(machine.MUL, scaled, write(machine.MUL, write(machine.MUL, x, x), number(0.044715)))
    return _over_one_and_exp(assembler, x, write(machine.ADD, scaled, cubed))


def _bounds(node: fx.Node) -> tuple[Any, Any]:
    """Return the least and the greatest value of a clamp; None for no bound."""
    low, high = (*node.args[1:], None, None)[:2]
    if node.target is _aten.relu6.default:
        return 0, 6
    if node.target is _aten.hardtanh.default:
        low, high = -1 if low is None else low, 1 if high is None else high
        return low, high
    return node.kwargs.get("min", low), node.kwargs.get("max", high)


def _clamp(assembler: Assembler, operands: Sequence[_Slot], node: fx.Node) -> _Slot:
    low, high = _bounds(node)
    made = operands[0]
    if low is not None:
        made = assembler.write(machine.MAXIMUM, made, assembler.number(low))
    return made if high is None else assembler.write(machine.MINIMUM, made, assembler.number(high))


def _hard_sigmoid(assembler: Assembler, operands: Sequence[_Slot], _: fx.Node) -> _Slot:
    """x + 3 between 0 and 6, over 6."""
    number, write = assembler.number, assembler.write
    raised = write(machine.MAXIMUM, write(machine.ADD, operands[0], number(3)), number(0))
    return write(machine.DIV, write(machine.MINIMUM, raised, number(6)), number(6))


def _hard_swish(assembler: Assembler, operands: Sequence[_Slot], node: fx.Node) -> _Slot:
    return assembler.write(machine.MUL, operands[0], _hard_sigmoid(assembler, operands, node))


def _leaky(assembler: Assembler, operands: Sequence[_Slot], node: fx.Node) -> _Slot:
    x, slope = operands[0], float((*node.args, 0.01)[1])  # type: ignore[arg-type]
    zero = assembler.number(0)
    above, below = assembler.write(machine.MAXIMUM, x, zero), assembler.write(machine.MINIMUM, x, zero)
    return assembler.write(machine.MULTIPLY_ADD, above, below, assembler.number(slope))


def _softplus(assembler: Assembler, operands: Sequence[_Slot], _: fx.Node) -> _Slot:
    return assembler.write(machine.SOFTPLUS, operands[0])


def _log_sigmoid(assembler: Assembler, operands: Sequence[_Slot], node: fx.Node) -> _Slot:
    """-log(1 + e^-x)"""
    return _negative(assembler, [_softplus(assembler, [_negative(assembler, operands, node)], node)], node)


def _mish(assembler: Assembler, operands: Sequence[_Slot], node: fx.Node) -> _Slot:
    raised = assembler.write(machine.TANH, _softplus(assembler, operands, node))
    return assembler.write(machine.MUL, operands[0], raised)


_POWERS: Final[dict[float, Writer]] = {
    2.0: _squared,
    0.5: _plain(machine.SQRT),
    -0.5: _inverse_root,
    -1.0: _reciprocal,
}


def _are_numbers(values: Sequence[Any], *, or_none: bool = False) -> bool:
    return all(type(value) in (int, float) or (or_none and value is None) for value in values)


def _can_clamp(node: fx.Node) -> bool:
    bounds = _bounds(node)
    return _are_numbers(bounds, or_none=True) and bounds != (None, None) and node.kwargs.keys() <= {"min", "max"}


_WITH_OPTIONS: Final[dict[Any, Callable[[fx.Node], bool]]] = {
    _aten.pow.Tensor_Scalar: lambda node: node.args[1] in _POWERS and not node.kwargs,
    _aten.gelu.default: lambda node: len(node.args) == 1 and node.kwargs.keys() <= {"approximate"},
    _aten.softplus.default: lambda node: node.args[1:] in ((), (1,), (1, 20)) and not node.kwargs,
    _aten.leaky_relu.default: lambda node: _are_numbers(node.args[1:]) and not node.kwargs,
    **dict.fromkeys(
        (_aten.clamp.default, _aten.clamp_min.default, _aten.hardtanh.default, _aten.relu6.default), _can_clamp
    ),
}
"""Operations with other options than operands, and whether there is a program for those of a node."""

_WRITERS: Final[dict[Any, Writer]] = {
    _aten.add.Tensor: _sum(machine.ADD),
    _aten.sub.Tensor: _sum(machine.SUB),
    _aten.rsub.Scalar: _reversed_sub,
    _aten.mul.Tensor: _plain(machine.MUL),
    _aten.div.Tensor: _plain(machine.DIV),
    _aten.neg.default: _negative,
    _aten.addcmul.default: _add_product,
    _aten.lerp.Tensor: _plain(machine.LERP),
    _aten.lerp.Scalar: _plain(machine.LERP),
    _aten.sigmoid.default: _plain(machine.SIGMOID),
    _aten.tanh.default: _plain(machine.TANH),
    _aten.relu.default: _plain(machine.RELU),
    _aten.abs.default: _plain(machine.ABS),
    _aten.maximum.default: _plain(machine.MAXIMUM),
    _aten.minimum.default: _plain(machine.MINIMUM),
    _aten.silu.default: _silu,
    _aten.exp.default: _plain(machine.EXP),
    _aten.erf.default: _plain(machine.ERF),
    _aten.sqrt.default: _plain(machine.SQRT),
    _aten.square.default: _squared,
    _aten.reciprocal.default: _reciprocal,
    _aten.rsqrt.default: _inverse_root,
    _aten.pow.Tensor_Scalar: _power,
    _aten.gelu.default: _gelu,
    _aten.clamp.default: _clamp,
    _aten.clamp_min.default: _clamp,
    _aten.hardtanh.default: _clamp,
    _aten.relu6.default: _clamp,
    _aten.hardsigmoid.default: _hard_sigmoid,
    _aten.hardswish.default: _hard_swish,
    _aten.leaky_relu.default: _leaky,
    _aten.softplus.default: _softplus,
    _aten.log_sigmoid.default: _log_sigmoid,
    _aten.mish.default: _mish,
}
