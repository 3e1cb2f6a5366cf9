"""The compiled steps of a task of single nodes, and the operations that loops of any graph share.

A step is computed in blocks of rows, so that what one operation writes the next one reads from a near cache. Values are
found by address, as in passes (passes/interpreter.py).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from batchmaker.arrays import Floats, Ints
from batchmaker.compile.passes.interpreter import interpret, load, store
from batchmaker.compile.row_steps import work_on_rows
from batchmaker.compile.typed_steps import ADDRESS, VALUE_BYTES, WIDTH, place, work_on_each
from batchmaker.compiled import compiled_arithmetic, compiled_part
from batchmaker.kernels.cpu.machine import (
    call_sgemm_compute,
    call_with_number,
    copy_bytes,
    int64_at,
    zero_bytes,
)
from batchmaker.kernels.cpu.steps import (
    BEGIN,
    BLOCK,
    BRGEMM,
    PART,
    ROW_BYTES,
    SET_THREADS,
    SGEMM,
    SOURCE,
    Keeps,
    hand_out,
    multiply_panels,
    note_kept,
)

GATHER, LOOKUP, PRODUCT, PASS, ROWS, EACH, COLUMNS, CALL = range(8)
"""Operations, [kind, result, a, b, c, d].

Rows of input a; rows of the table of c rows at address b by the tokens of value a; value a times weights, at address b
prepared for a library (0: not) and at d as they are, plus the bias at address c (0: none); pass number a; record number
a of row_steps; the same of typed_steps; from byte d of the result's rows on, b bytes of value a's from byte c on; what
compiled code does not know, for Python to call.
"""

OPERATION_FIELDS: Final = 6

PROGRAM, PROGRAM_END, SLOT, SLOT_END, BASE, BASE_END, REGISTERS, PASS_WIDTH, PASS_FIELDS = range(9)
"""Fields of a pass: where its instructions, its slots and its bases are, its registers, and numbers in a row."""

Code = tuple[Ints, Ints, Ints, Ints, Ints, Ints, Ints]
"""Operations, and what they refer to: passes; their programs, slots and base values (the values that passes read and
write, below 0 for none); records; and addresses of functions."""

Scratch = tuple[Ints, Ints, Floats, Ints]
"""Values, with their addresses; room for the addresses of base values, and for the numbers of records."""

NO_ROW: Final = -1
"""The operation at which `operate` stops if a token has no row."""


@compiled_part
def gather_rows(from_at: Ints, port: int, n: int, at: int, size: int) -> None:
    """Copy rows of an input from their addresses; address 0 stands for zeros."""
    for b in range(n):
        source = from_at[port, b]
        if source:
            copy_bytes(at + b * size, source, size)
        else:
            zero_bytes(at + b * size, size)


@compiled_part
def look_up(tokens: int, n: int, table: int, num_rows: int, at: int, size: int) -> bool:
    """Copy the rows of a table, `size` bytes each, that n tokens name. False if one has no row."""
    for b in range(n):
        token = int64_at(tokens, b)
        if token < 0 or token >= num_rows:
            return False
        copy_bytes(at + b * size, table + token * size, size)
    return True


@compiled_part
def multiply_one(a: int, w: int, g: int, depth: int, width: int) -> None:
    """g [width] = a [depth] @ w [depth, width], by address, eight rows of weights at a time."""
    whole = depth - depth % 8
    for j in range(width):
        store(g, j, np.float32(0))
    for k in range(0, whole, 8):
        x0, x1, x2, x3 = load(a, k), load(a, k + 1), load(a, k + 2), load(a, k + 3)
        x4, x5, x6, x7 = load(a, k + 4), load(a, k + 5), load(a, k + 6), load(a, k + 7)
        r = w + k * width * 4
        for j in range(width):
            first = (x0 * load(r, j) + x1 * load(r, j + width)) + (
                x2 * load(r, j + 2 * width) + x3 * load(r, j + 3 * width)
            )
            second = (x4 * load(r, j + 4 * width) + x5 * load(r, j + 5 * width)) + (
                x6 * load(r, j + 6 * width) + x7 * load(r, j + 7 * width)
            )
            store(g, j, load(g, j) + (first + second))
    for k in range(whole, depth):
        x, r = load(a, k), w + k * width * 4
        for j in range(width):
            store(g, j, load(g, j) + x * load(r, j))


@compiled_part
def multiply_rows(n: int, a: int, g: int, depth: int, width: int, prepared: int, plain: int, addresses: Ints) -> None:
    """g [n, width] = a [n, depth] @ weights: one row, or all without a library, in an own loop. prepared: for it."""
    if n == 1 or not prepared:
        for b in range(n):
            multiply_one(a + b * depth * 4, plain, g + b * width * 4, depth, width)
        return
    brgemm, sgemm = addresses[BRGEMM], addresses[SGEMM]
    for b in range(0, n, BLOCK):
        rows, source, target = min(BLOCK, n - b), a + b * depth * 4, g + b * width * 4
        if brgemm:
            multiply_panels(brgemm, rows, width, depth, source, depth, prepared, target)
        else:
            call_sgemm_compute(sgemm, rows, width, depth, source, depth, prepared, target)


@compiled_part
def add_bias(at: int, n: int, width: int, bias: int) -> None:
    """Add one row to n rows."""
    for b in range(n):
        row = at + b * width * 4
        for j in range(width):
            store(row, j, load(row, j) + load(bias, j))


@compiled_part
def operate(k: int, n: int, done: int, from_at: Ints, code: Code, scratch: Scratch) -> int:
    """Do the operations from k on for n rows, after `done` rows of the step.

    from_at: [inputs, n] addresses of the rows of the inputs. Returns len(operations); before, the number of an
    operation that Python calls; NO_ROW if a token has no row.
    """
    operations, passes, programs, slots, base_values, records, addresses = code
    values, bases, floats, integers = scratch
    while k < len(operations):
        kind, result, a, b = operations[k, 0], operations[k, 1], operations[k, 2], operations[k, 3]
        if kind == CALL:
            return k
        if kind == PASS:
            low = passes[a, BASE]
            for i in range(low, passes[a, BASE_END]):
                bases[i] = place(values, base_values[i], done) if base_values[i] >= 0 else 0
            interpret(
                programs[passes[a, PROGRAM] : passes[a, PROGRAM_END]],
                slots[passes[a, SLOT] : passes[a, SLOT_END]],
                bases[low : passes[a, BASE_END]],
                passes[a, REGISTERS],
                n,
                passes[a, PASS_WIDTH],
            )
            k += 1
            continue
        if kind == EACH:
            work_on_each(records[a], n, done, values, floats, integers)
            k += 1
            continue
        if kind == ROWS:
            work_on_rows(records[a], n, done, values)
            k += 1
            continue
        at, size, width = place(values, result, done), values[result, VALUE_BYTES], values[result, WIDTH]
        if kind == GATHER:
            gather_rows(from_at, a, n, at, size)
        elif kind == LOOKUP:
            if not look_up(place(values, a, done), n, b, operations[k, 4], at, size):
                return NO_ROW
        elif kind == PRODUCT:
            multiply_rows(n, place(values, a, done), at, values[a, WIDTH], width, b, operations[k, 5], addresses)
            if operations[k, 4]:
                add_bias(at, n, width, operations[k, 4])
        else:
            source, step = place(values, a, done) + operations[k, 4], values[a, VALUE_BYTES]
            for row in range(n):
                copy_bytes(at + row * size + operations[k, 5], source + row * step, b)
        k += 1
    return k


@compiled_arithmetic
def run_nodes(
    ends: Ints,
    inputs: tuple[Ints, Ints, Ints],
    tables: Ints,
    code: Code,
    scratch: Scratch,
    made: Ints,
    keeps: Keeps,
    copies: Ints,
    places: Ints,
    from_at: Ints,
    block: int,
) -> int:
    """Compute the steps of a task of single nodes; return how many: all, or those before a token without a row.

    inputs: tables and rows [inputs, positions], and bytes of a row [inputs]. tables: addresses. made: [outputs] the
    values that are the outputs. They have room for a whole step, and are handed out at its end, since a row that is
    written may be one that a node of the step reads. copies: as for recurrent steps. places: room for [positions].
    block: rows that are computed together; from_at: room for [inputs, block].
    """
    of, rows, row_bytes = inputs
    values, addresses = scratch[0], code[6]
    note_kept(copies, tables, keeps)
    for i in range(len(copies)):
        copies[i, SOURCE] = values[made[copies[i, PART]], ADDRESS]
        copies[i, ROW_BYTES] = values[made[copies[i, PART]], VALUE_BYTES]
    threads = call_with_number(addresses[SET_THREADS], 1) if addresses[SET_THREADS] else 0
    begin = steps = BEGIN
    for end in ends:
        all_have_rows = True
        for p in range(begin, end):
            places[p] = p - begin
        for first in range(begin, end, block):
            n = min(end - first, block)
            for port in range(len(row_bytes)):
                for b in range(n):
                    table = of[port, first + b]
                    from_at[port, b] = tables[table] + rows[port, first + b] * row_bytes[port] if table else 0
            k = operate(BEGIN, n, first - begin, from_at, code, scratch)
            if k == NO_ROW:
                all_have_rows = False
                break
        if not all_have_rows:
            break
        hand_out(copies, end, places)
        begin = end
        steps += 1
    if addresses[SET_THREADS]:
        call_with_number(addresses[SET_THREADS], threads)
    return steps
