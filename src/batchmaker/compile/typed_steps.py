"""Pointwise operations on numbers of any dtype, compiled once for all cells: counters, flags, masks, temperatures.

Numbers are widened to int64 or float64, and the result is rounded once. So it is what torch gives, and a float32 is
rounded as if the operation had been done in float32. Long rows of float32 have passes (passes/interpreter.py), which
are faster.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from batchmaker.arrays import Floats, Ints
from batchmaker.compile.passes.interpreter import load, store
from batchmaker.compiled import compiled_exact
from batchmaker.kernels.cpu.machine import (
    byte_at,
    float64_at,
    int64_at,
    write_byte,
    write_float64,
    write_int64,
)

ADDRESS, VALUE_BYTES, STAYS, WIDTH, KIND, VALUE_FIELDS = range(6)
"""Fields of a value: its first row; bytes of a row; whether there is room for a whole step, not for a block alone;
numbers in a row; and their dtype."""

BOOL, INT64, FLOAT32, FLOAT64, OTHER = range(5)
"""Dtypes. Numbers of any other dtype are copied, but not computed with here."""

(
    ADD, SUB, MUL, DIV, REMAINDER, FLOOR_DIVIDE, NEGATIVE, ABS, MAXIMUM, MINIMUM, EQ, NE, LT, LE, GT, GE, AND, OR, XOR,
    NOT, WHERE, AS, EXP, LOG, SQRT, TANH, SIGMOID, RSQRT, ERF, FLOOR, CEIL, SIN, COS, LOG1P, EXPM1, LEFT_SHIFT,
    RIGHT_SHIFT,
) = range(37)  # fmt: skip
"""Operations of a record. WHERE: the first operand is a bool. AS: another dtype. Divisors of integers are not 0."""

CODE, RESULT, AS_KIND, NUM_OPERANDS, FIRST_OPERAND = range(5)
"""Fields of a record. AS_KIND: the dtype in which the operation is done. Its operands follow."""

VALUE, CONSTANT, OPERAND_BYTES, STEP, OPERAND_KIND, OPERAND_FIELDS = range(6)
"""Fields of an operand: a value, or -1 and the address of a constant; bytes from row to row, and 0 or 1 numbers from
column to column; its dtype."""

MAX_OPERANDS: Final = 3
RECORD_FIELDS: Final = FIRST_OPERAND + MAX_OPERANDS * OPERAND_FIELDS
CHUNK: Final = 256
"""Numbers that are computed together."""


@compiled_exact
def place(values: Ints, value: int, done: int) -> int:
    """Return the address of a value's rows in the block after `done` rows of the step."""
    address: int = values[value, ADDRESS] + values[value, STAYS] * done * values[value, VALUE_BYTES]
    return address


@compiled_exact
def bytes_of(kind: int) -> int:
    """Return the bytes of a number."""
    if kind == BOOL:
        return 1
    return 4 if kind == FLOAT32 else 8


@compiled_exact
def number_at(kind: int, at: int, index: int) -> Any:
    """Return a number as float64: exact unless it is a large integer."""
    if kind == FLOAT32:
        return np.float64(load(at, index))
    if kind == FLOAT64:
        return float64_at(at, index)
    return np.float64(int64_at(at, index)) if kind == INT64 else np.float64(byte_at(at, index))


@compiled_exact
def take_floats(to: Floats, kind: int, at: int, step: int, count: int, in_single: bool) -> None:
    """Read numbers as float64, rounded to float32 if the operation is done in it."""
    if step == 0:
        x = number_at(kind, at, 0)
        if in_single:
            x = np.float64(np.float32(x))
        for j in range(count):
            to[j] = x
    elif kind == FLOAT32:
        for j in range(count):
            to[j] = np.float64(load(at, j))
    else:
        for j in range(count):
            x = number_at(kind, at, j)
            to[j] = np.float64(np.float32(x)) if in_single else x


@compiled_exact
def take_integers(to: Ints, kind: int, at: int, step: int, count: int, in_bool: bool) -> None:
    """Read numbers as int64, floats without their fraction; as 0 or 1 if the operation is done in bool."""
    for j in range(count):
        if kind == INT64:
            x = int64_at(at, j * step)
        elif kind == BOOL:
            x = np.int64(byte_at(at, j * step))
        else:
            y = number_at(kind, at, j * step)
            x = np.int64(y != 0) if in_bool else np.int64(y)
        to[j] = np.int64(x != 0) if in_bool else x


@compiled_exact
def put_floats(of: Floats, kind: int, at: int, count: int) -> None:
    """Write float32 or float64 numbers."""
    if kind == FLOAT32:
        for j in range(count):
            store(at, j, np.float32(of[j]))
    else:
        for j in range(count):
            write_float64(at, j, of[j])


@compiled_exact
def put_integers(of: Ints, kind: int, at: int, count: int) -> None:
    """Write int64 or bool numbers."""
    if kind == INT64:
        for j in range(count):
            write_int64(at, j, of[j])
    else:
        for j in range(count):
            write_byte(at, j, of[j])


@compiled_exact
def remainder(x: float, y: float) -> float:
    """Return x - floor(x / y) y, with the sign of y, as torch does."""
    rest: float = np.fmod(x, y)
    return rest + y if rest != 0 and (y < 0) != (rest < 0) else rest


@compiled_exact
def work_in_floats(
    code: int, a: Floats, b: Floats, c: Floats, d: Floats, condition: Ints, made: Ints, count: int
) -> None:
    """d = a code b, or made for a comparison. WHERE: b where `condition`, else c. A NaN in an operand gives a NaN."""
    if code == ADD:
        for j in range(count):
            d[j] = a[j] + b[j]
    elif code == SUB:
        for j in range(count):
            d[j] = a[j] - b[j]
    elif code == MUL:
        for j in range(count):
            d[j] = a[j] * b[j]
    elif code == DIV:
        for j in range(count):
            d[j] = a[j] / b[j]
    elif code == WHERE:
        for j in range(count):
            d[j] = b[j] if condition[j] else c[j]
    elif code == AS:
        for j in range(count):
            d[j] = a[j]
    elif code == EQ:
        for j in range(count):
            made[j] = a[j] == b[j]
    elif code == NE:
        for j in range(count):
            made[j] = a[j] != b[j]
    elif code == LT:
        for j in range(count):
            made[j] = a[j] < b[j]
    elif code == LE:
        for j in range(count):
            made[j] = a[j] <= b[j]
    elif code == GT:
        for j in range(count):
            made[j] = a[j] > b[j]
    elif code == GE:
        for j in range(count):
            made[j] = a[j] >= b[j]
    elif code == MAXIMUM:
        for j in range(count):
            d[j] = a[j] if a[j] > b[j] or a[j] != a[j] else b[j]
    elif code == MINIMUM:
        for j in range(count):
            d[j] = a[j] if a[j] < b[j] or a[j] != a[j] else b[j]
    else:
        for j in range(count):
            x = a[j]
            if code == NEGATIVE:
                d[j] = -x
            elif code == ABS:
                d[j] = abs(x)
            elif code == EXP:
                d[j] = math.exp(x)
            elif code == LOG:
                d[j] = np.log(x)
            elif code == SQRT:
                d[j] = np.sqrt(x)
            elif code == TANH:
                d[j] = math.tanh(x)
            elif code == SIGMOID:
                d[j] = 1 / (1 + math.exp(-x))
            elif code == RSQRT:
                d[j] = 1 / np.sqrt(x)
            elif code == ERF:
                d[j] = math.erf(x)
            elif code == FLOOR:
                d[j] = np.floor(x)
            elif code == CEIL:
                d[j] = np.ceil(x)
            elif code == SIN:
                d[j] = np.sin(x)
            elif code == COS:
                d[j] = np.cos(x)
            elif code == LOG1P:
                d[j] = np.log1p(x)
            elif code == EXPM1:
                d[j] = np.expm1(x)
            else:
                d[j] = remainder(x, b[j])


@compiled_exact
def work_in_integers(code: int, a: Ints, b: Ints, c: Ints, d: Ints, in_bool: bool, count: int) -> None:
    """d = a code b, in int64 or, as 0 and 1, in bool. WHERE: b where a, else c."""
    for j in range(count):
        x, y = a[j], b[j]
        if code == ADD:
            d[j] = x + y
        elif code == SUB:
            d[j] = x - y
        elif code == MUL:
            d[j] = x * y
        elif code == REMAINDER:
            d[j] = x % y
        elif code == FLOOR_DIVIDE:
            d[j] = x // y
        elif code == NEGATIVE:
            d[j] = -x
        elif code == ABS:
            d[j] = abs(x)
        elif code == MAXIMUM:
            d[j] = max(x, y)
        elif code == MINIMUM:
            d[j] = min(x, y)
        elif code == EQ:
            d[j] = x == y
        elif code == NE:
            d[j] = x != y
        elif code == LT:
            d[j] = x < y
        elif code == LE:
            d[j] = x <= y
        elif code == GT:
            d[j] = x > y
        elif code == GE:
            d[j] = x >= y
        elif code == AND:
            d[j] = x & y
        elif code == OR:
            d[j] = x | y
        elif code == XOR:
            d[j] = x ^ y
        elif code == NOT:
            d[j] = 1 - x if in_bool else ~x
        elif code == WHERE:
            d[j] = y if x else c[j]
        elif code == LEFT_SHIFT:
            d[j] = x << y
        elif code == RIGHT_SHIFT:
            d[j] = x >> y
        else:
            d[j] = x


@compiled_exact
def work_on_each(record: Ints, n: int, done: int, values: Ints, floats: Floats, integers: Ints) -> None:
    """Do the operation of a record on n rows. floats, integers: room for [4, CHUNK] numbers."""
    code, kind = record[CODE], record[AS_KIND]
    result, in_floats, in_bool = record[RESULT], record[AS_KIND] >= FLOAT32, record[AS_KIND] == BOOL
    width, result_kind = values[result, WIDTH], values[result, KIND]
    size = bytes_of(result_kind)
    rows, columns = (1, n) if width == 1 else (n, width)
    for row in range(rows):
        for start in range(0, columns, CHUNK):
            count = min(CHUNK, columns - start)
            for i in range(record[NUM_OPERANDS]):
                f = FIRST_OPERAND + i * OPERAND_FIELDS
                value, step, its = record[f + VALUE], record[f + STEP], record[f + OPERAND_KIND]
                at = place(values, value, done) if value >= 0 else record[f + CONSTANT]
                at += row * record[f + OPERAND_BYTES] + start * step * bytes_of(its)
                if code == WHERE and i == 0:
                    take_integers(integers[0], its, at, step, count, True)
                elif in_floats:
                    take_floats(floats[i], its, at, step, count, kind == FLOAT32)
                else:
                    take_integers(integers[i], its, at, step, count, in_bool)
            if in_floats:
                work_in_floats(code, floats[0], floats[1], floats[2], floats[3], integers[0], integers[3], count)
            else:
                work_in_integers(code, integers[0], integers[1], integers[2], integers[3], in_bool, count)
            at = place(values, result, done) + row * values[result, VALUE_BYTES] + start * size
            if result_kind >= FLOAT32:
                put_floats(floats[3], result_kind, at, count)
            else:
                put_integers(integers[3], result_kind, at, count)
