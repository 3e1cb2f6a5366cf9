"""Pointwise operations of a cell in one walk over its rows: a small machine, compiled once for all cells.

Each operation of eager PyTorch reads and writes whole batches. Here all of them are done for one row before the next,
so that what lies between them stays in the first-level cache: at 64 rows of 256 the gates of an LSTM take 37 us instead
of 59, and a call starts once. The machine knows float32.

Values are found by address, since what a product has made for several gates is read in slices. Row r of an operand,
from column c on, lies at `addresses[slot] + r * row_bytes[slot] + c * column_bytes[slot]`: a constant has row_bytes 0,
a register both 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba import config, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from batchmaker.compiled import compiled

Words = NDArray[np.int64]

ADD: Final = 0
"""a + b. The numbers of the other codes follow this form: what is written to the first operand of an instruction."""
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
"""Absolute error below 2e-7, as in rewriting.py."""
RELU: Final = 9
MAXIMUM: Final = 10
MINIMUM: Final = 11
ABS: Final = 12

BLOCK: Final = 512
"""Columns that are worked on together: a dozen registers of so many numbers fit the first-level cache."""
LINE: Final = 64

# exp(x) = 2^n p(r), x = n log 2 + r: the polynomial and the two parts of log 2 are those of Cephes' expf.
_ONE, _TWO, _ZERO = np.float32(1), np.float32(2), np.float32(0)
_LOG2_E, _LOG_2_HIGH, _LOG_2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
_ROUND = np.float32(1.5 * 2**23)
"""Added to a small number it rounds it to an integer, which then stands in the lowest bits."""
_LARGEST = np.float32(88)
_P0, _P1, _P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P3, _P4, _P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_MANTISSA_BITS, _BITS_OF_ONE = np.int32(23), np.int32(0x3F800000)


def is_available() -> bool:
    """Whether loops are compiled here: in Python the machine would be of no use."""
    return not getattr(config, "DISABLE_JIT", False)


def _machine_code(write: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of compiled loops out of one that writes LLVM's instructions for it."""
    made: Callable[..., Any] = intrinsic(write)
    return made


@_machine_code
def _load(_typing: Any, address: Any, index: Any) -> Any:
    """Return float32 number `index` from an address on."""

    def write(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], context.get_value_type(types.float32).as_pointer())
        return builder.load(builder.gep(pointer, [arguments[1]]), align=4)

    return types.float32(types.int64, types.int64), write


@_machine_code
def _store(_typing: Any, address: Any, index: Any, value: Any) -> Any:
    """Put a float32 number at place `index` from an address on."""

    def write(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], context.get_value_type(types.float32).as_pointer())
        builder.store(arguments[2], builder.gep(pointer, [arguments[1]]), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), write


@_machine_code
def _multiply_add(_typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a b + c, rounded once."""
    three = (types.float32, types.float32, types.float32)
    return types.float32(*three), lambda _context, builder, _signature, arguments: builder.fma(*arguments)


@_machine_code
def _divided(_typing: Any, a: Any, b: Any) -> Any:
    """Return a / b as IEEE 754 has it, without Python's test for zero."""
    return types.float32(types.float32, types.float32), lambda _context, builder, _sig, args: builder.fdiv(*args)


@_machine_code
def _bits(_typing: Any, x: Any) -> Any:
    """Return the 32 bits of a number as an integer."""
    return types.int32(types.float32), _same_bits


@_machine_code
def _from_bits(_typing: Any, x: Any) -> Any:
    """Return the number that has these bits."""
    return types.float32(types.int32), _same_bits


def _same_bits(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))


@compiled
def _exp(x: Any) -> Any:
    """Return e^x within 2 units of the last place, held within e^88 and e^-88; NaN stays NaN."""
    x = _LARGEST if x > _LARGEST else x  # min and max would lose a NaN
    x = -_LARGEST if x < -_LARGEST else x
    rounded = _multiply_add(x, _LOG2_E, _ROUND)
    n = rounded - _ROUND
    r = _multiply_add(-n, _LOG_2_LOW, _multiply_add(-n, _LOG_2_HIGH, x))
    p = _multiply_add(_multiply_add(_multiply_add(_P0, r, _P1), r, _P2), r, _P3)
    p = _multiply_add(_multiply_add(p, r, _P4), r, _P5)
    p = _multiply_add(p, r * r, r) + _ONE
    return p * _from_bits((_bits(rounded) << _MANTISSA_BITS) + _BITS_OF_ONE)


@compiled
def _work(code: int, d: int, a: int, b: int, c: int, count: int) -> None:
    """Do one operation on `count` numbers; the result lies apart from the operands."""
    if code == ADD:
        for j in range(count):
            _store(d, j, _load(a, j) + _load(b, j))
    elif code == SUB:
        for j in range(count):
            _store(d, j, _load(a, j) - _load(b, j))
    elif code == MUL:
        for j in range(count):
            _store(d, j, _load(a, j) * _load(b, j))
    elif code == DIV:
        for j in range(count):
            _store(d, j, _divided(_load(a, j), _load(b, j)))
    elif code == MULTIPLY_ADD:
        for j in range(count):
            _store(d, j, _multiply_add(_load(b, j), _load(c, j), _load(a, j)))
    elif code == MULTIPLY_SUB:
        for j in range(count):
            _store(d, j, _multiply_add(-_load(b, j), _load(c, j), _load(a, j)))
    elif code == LERP:
        for j in range(count):
            _store(d, j, _multiply_add(_load(c, j), _load(b, j) - _load(a, j), _load(a, j)))
    elif code == SIGMOID:
        for j in range(count):
            _store(d, j, _divided(_ONE, _ONE + _exp(-_load(a, j))))
    elif code == TANH:
        for j in range(count):
            _store(d, j, _ONE - _divided(_TWO, _ONE + _exp(_TWO * _load(a, j))))
    else:
        _work_seldom(code, d, a, b, count)


@compiled
def _work_seldom(code: int, d: int, a: int, b: int, count: int) -> None:
    """As `_work`, for the other operations. A NaN in either operand is one in the result."""
    if code == RELU:
        for j in range(count):
            x = _load(a, j)
            _store(d, j, _ZERO if x < _ZERO else x)
    elif code == MAXIMUM:
        for j in range(count):
            x, y = _load(a, j), _load(b, j)
            _store(d, j, y if x < y or y != y else x)
    elif code == MINIMUM:
        for j in range(count):
            x, y = _load(a, j), _load(b, j)
            _store(d, j, y if y < x or y != y else x)
    elif code == ABS:
        for j in range(count):
            x = _load(a, j)
            _store(d, j, _from_bits(_bits(x) & np.int32(0x7FFFFFFF)))


@compiled
def interpret(
    program: Words, addresses: Words, row_bytes: Words, column_bytes: Words, registers: int, rows: int, width: int
) -> None:
    """Run a program on float32 rows of `width` numbers.

    program: [instructions, 5], code, slot of the result, slots of a, b and c. addresses: [slots]; the last `registers`
    are filled in here. No instruction may write to what it reads. Whoever calls keeps alive what addresses point to.
    """
    block = min(width, BLOCK)
    memory = np.empty(registers * block + LINE, np.float32)
    first = (memory.ctypes.data + LINE - 1) // LINE * LINE
    for number in range(registers):
        addresses[addresses.shape[0] - registers + number] = first + number * block * 4
    for row in range(rows):
        for start in range(0, width, block):
            count = min(block, width - start)
            for k in range(program.shape[0]):
                s, t, u, v = program[k, 1], program[k, 2], program[k, 3], program[k, 4]
                _work(
                    program[k, 0],
                    addresses[s] + row * row_bytes[s] + start * column_bytes[s],
                    addresses[t] + row * row_bytes[t] + start * column_bytes[t],
                    addresses[u] + row * row_bytes[u] + start * column_bytes[u],
                    addresses[v] + row * row_bytes[v] + start * column_bytes[v],
                    count,
                )
    memory[0] = 0  # the compiler frees an array after its last use, and does not see that addresses are one
