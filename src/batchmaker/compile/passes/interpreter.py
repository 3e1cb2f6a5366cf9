"""Pointwise operations of a cell in one pass over its rows: an interpreter, compiled once for all cells.

Each operation of eager PyTorch reads and writes whole batches. Here all of them are done for one row before the next
row, so that intermediate values stay in the first-level cache and only one call starts. The interpreter computes in
float32; bfloat16 is widened when it is read and rounded when a result is written.

Values are found by address, because the result of a product for several gates is read in slices. The offset of each
slot, and its steps to the next row and column, are computed once for a program. A call supplies the addresses of its
arguments.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import config, types

from batchmaker.arrays import LINE, Ints
from batchmaker.compiled import compiled_arithmetic, machine_code
from batchmaker.kernels.pointwise import erf, exp, sigmoid, softplus, tanh

ADD: Final = 0
"""a + b. The other codes are described in the same way, as the value written to the first operand of an instruction."""
SUB: Final = 1
MUL: Final = 2
DIV: Final = 3
MULTIPLY_ADD: Final = 4
"""a + b c"""
MULTIPLY_SUB: Final = 5
"""a - b c"""
LERP: Final = 6
"""a + c (b - a)"""
SIGMOID: Final = 7
TANH: Final = 8
"""With the error of kernels/pointwise.py."""
RELU: Final = 9
MAXIMUM: Final = 10
MINIMUM: Final = 11
ABS: Final = 12
WIDEN: Final = 13
"""a, which is bfloat16, as float32."""
NARROW: Final = 14
"""a, as bfloat16."""
EXP: Final = 15
ERF: Final = 16
SOFTPLUS: Final = 17
"""log(1 + e^a)"""
SQRT: Final = 18
REPEAT: Final = 19
"""Number (c + j) // b of row a for each column j. The operands b and c are no addresses but numbers."""
TILE: Final = 20
"""Number (c + j) % b of row a, in the same way."""

BLOCK: Final = 512
"""Columns that are processed together: a dozen registers of so many numbers fit the first-level cache."""

_ZERO: Final = np.float32(0)
_NAN: Final = 0x7FC0  # of bfloat16


def is_available() -> bool:
    """Whether loops are compiled here: the interpreter is useless in pure Python."""
    return not getattr(config, "DISABLE_JIT", False)


@machine_code
def load(_typing: Any, address: Any, index: Any) -> Any:
    """Return float32 number `index` from an address on."""

    def write(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], context.get_value_type(types.float32).as_pointer())
        return builder.load(builder.gep(pointer, [arguments[1]]), align=4)

    return types.float32(types.int64, types.int64), write


@machine_code
def store(_typing: Any, address: Any, index: Any, value: Any) -> Any:
    """Store a float32 number as number `index` from an address on."""

    def write(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], context.get_value_type(types.float32).as_pointer())
        builder.store(arguments[2], builder.gep(pointer, [arguments[1]]), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), write


@machine_code
def _load_short(_typing: Any, address: Any, index: Any) -> Any:
    """Return bfloat16 number `index` from an address on, as float32."""

    def write(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], context.get_value_type(types.int16).as_pointer())
        bits = builder.load(builder.gep(pointer, [arguments[1]]), align=2)
        wide = builder.zext(bits, context.get_value_type(types.int32))
        high = builder.shl(wide, wide.type(16))
        return builder.bitcast(high, context.get_value_type(types.float32))

    return types.float32(types.int64, types.int64), write


@machine_code
def _store_short(_typing: Any, address: Any, index: Any, value: Any) -> Any:
    """Store a float32 number as bfloat16 number `index` from an address on, rounded to nearest even."""

    def write(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], context.get_value_type(types.int16).as_pointer())
        bits = builder.bitcast(arguments[2], context.get_value_type(types.int32))
        odd = builder.and_(builder.lshr(bits, bits.type(16)), bits.type(1))
        rounded = builder.lshr(builder.add(builder.add(bits, odd), bits.type(0x7FFF)), bits.type(16))
        is_nan = builder.fcmp_unordered("uno", arguments[2], arguments[2])
        short = builder.trunc(builder.select(is_nan, bits.type(_NAN), rounded), context.get_value_type(types.int16))
        builder.store(short, builder.gep(pointer, [arguments[1]]), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), write


@compiled_arithmetic
def _work(code: int, d: int, a: int, b: int, c: int, count: int) -> None:
    """Do one operation on `count` numbers. The result must not overlap the operands."""
    if code == ADD:
        for j in range(count):
            store(d, j, load(a, j) + load(b, j))
    elif code == SUB:
        for j in range(count):
            store(d, j, load(a, j) - load(b, j))
    elif code == MUL:
        for j in range(count):
            store(d, j, load(a, j) * load(b, j))
    elif code == DIV:
        for j in range(count):
            store(d, j, load(a, j) / load(b, j))
    elif code == MULTIPLY_ADD:
        for j in range(count):
            store(d, j, load(b, j) * load(c, j) + load(a, j))
    elif code == MULTIPLY_SUB:
        for j in range(count):
            store(d, j, load(a, j) - load(b, j) * load(c, j))
    elif code == LERP:
        for j in range(count):
            store(d, j, load(c, j) * (load(b, j) - load(a, j)) + load(a, j))
    elif code == SIGMOID:
        for j in range(count):
            store(d, j, sigmoid(load(a, j)))
    elif code == TANH:
        for j in range(count):
            store(d, j, tanh(load(a, j)))
    else:
        _work_seldom(code, d, a, b, c, count)


@compiled_arithmetic
def _work_seldom(code: int, d: int, a: int, b: int, c: int, count: int) -> None:
    """As `_work`, for the other operations. A NaN in either operand gives a NaN."""
    if code == RELU:
        for j in range(count):
            x = load(a, j)
            store(d, j, _ZERO if x < _ZERO else x)
    elif code == MAXIMUM:
        for j in range(count):
            x, y = load(a, j), load(b, j)
            store(d, j, y if x < y or y != y else x)
    elif code == MINIMUM:
        for j in range(count):
            x, y = load(a, j), load(b, j)
            store(d, j, y if y < x or y != y else x)
    elif code == ABS:
        for j in range(count):
            store(d, j, abs(load(a, j)))
    elif code == WIDEN:
        for j in range(count):
            store(d, j, _load_short(a, j))
    elif code == NARROW:
        for j in range(count):
            _store_short(d, j, load(a, j))
    elif code == EXP:
        for j in range(count):
            store(d, j, exp(load(a, j)))
    elif code == ERF:
        for j in range(count):
            store(d, j, erf(load(a, j)))
    elif code == SOFTPLUS:
        for j in range(count):
            store(d, j, softplus(load(a, j)))
    elif code == SQRT:
        for j in range(count):
            store(d, j, np.sqrt(load(a, j)))
    elif code == REPEAT:
        _repeat(d, a, b, c, count)
    elif code == TILE:
        _tile(d, a, b, c, count)


@compiled_arithmetic
def _repeat(d: int, a: int, times: int, first: int, count: int) -> None:
    """Write `count` numbers from column `first` on of a row that has each number of another one so many times."""
    i, j, end = first // times, 0, times - first % times
    while j < count:
        x, end_here = load(a, i), min(end, count)
        for k in range(j, end_here):
            store(d, k, x)
        i, j, end = i + 1, end_here, end + times


@compiled_arithmetic
def _tile(d: int, a: int, length: int, first: int, count: int) -> None:
    """Write `count` numbers from column `first` on of a row that has another one of `length` again and again."""
    i, j = first % length, 0
    while j < count:
        together = min(length - i, count - j)
        for k in range(together):
            store(d, j + k, load(a, i + k))
        i, j = 0, j + together


@compiled_arithmetic
def _address(slots: Ints, bases: Ints, slot: int, row: int, column: int) -> int:
    return bases[slots[slot, 0]] + slots[slot, 1] + row * slots[slot, 2] + column * slots[slot, 3]  # type: ignore[no-any-return]


@compiled_arithmetic
def interpret(program: Ints, slots: Ints, bases: Ints, registers: int, rows: int, width: int) -> None:
    """Run a program on rows of `width` numbers.

    program: [instructions, 5], code, slot of the result, slots of a, b and c. slots: [slots, 4], the base (the last is
    that of the registers), bytes from it, bytes to the next row and to the next column. bases: addresses; the last is
    filled in here. No instruction may write to its operands. The caller keeps the memory behind the addresses alive.
    """
    block = min(width, BLOCK)
    memory = np.empty(registers * block + LINE, np.float32)
    bases[bases.shape[0] - 1] = (memory.ctypes.data + LINE - 1) // LINE * LINE
    for row in range(rows):
        for start in range(0, width, block):
            count = min(block, width - start)
            for k in range(program.shape[0]):
                _work(
                    program[k, 0],
                    _address(slots, bases, program[k, 1], row, start),
                    _address(slots, bases, program[k, 2], row, start),
                    _address(slots, bases, program[k, 3], row, start),
                    _address(slots, bases, program[k, 4], row, start),
                    count,
                )
    memory[0] = 0  # keeps the array alive: the compiler does not see that an address points to it


def prepare() -> None:
    """Compile the interpreter, or load it from disk if an earlier process could store it."""
    interpret(np.zeros((0, 5), np.int64), np.zeros((0, 4), np.int64), np.zeros(1, np.int64), 0, 0, 1)
