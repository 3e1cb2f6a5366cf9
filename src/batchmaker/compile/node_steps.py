"""The compiled steps of a task of single nodes: rows in, look-ups, products and passes over the rows, rows out.

A step is computed in blocks of rows, so that what one operation writes the next one reads from a near cache. Values are
found by address, as in passes (passes/interpreter.py).
"""

from __future__ import annotations

from batchmaker.compile.passes.interpreter import Words, interpret, load, store
from batchmaker.compiled import compiled_arithmetic, compiled_part
from batchmaker.kernels.cpu.machine import call_sgemm_compute, call_with_number, copy_bytes, int64_at, write_int64
from batchmaker.kernels.cpu.steps import PART, ROW_BYTES, SET_THREADS, SGEMM, SOURCE, bring, hand_out, note_kept

GATHER, LOOKUP, PRODUCT, PASS, BEST = range(5)
"""Operations, [code, result, a, b, c].

Rows of input a; rows of the table at address b by the tokens of input a; value a times the packed weights at address b,
plus the bias at address c (0: none); pass number a; the place of the greatest of each row of value a.
"""

ADDRESS, VALUE_BYTES, STAYS, WIDTH, VALUE_FIELDS = range(5)
"""Fields of a value: its first row; bytes of a row; whether there is room for a whole step, not for a block alone; and
numbers in a row."""

PROGRAM, PROGRAM_END, SLOT, SLOT_END, BASE, BASE_END, REGISTERS, PASS_WIDTH, PASS_FIELDS = range(9)
"""Fields of a pass: where its instructions, its slots and its bases are, its registers, and numbers in a row."""


@compiled_part
def place(values: Words, value: int, done: int) -> int:
    """Return the address of a value's rows in the block after `done` rows of the step."""
    address: int = values[value, ADDRESS] + values[value, STAYS] * done * values[value, VALUE_BYTES]
    return address


@compiled_part
def have_rows(of: Words, rows: Words, tables: Words, limits: Words) -> bool:
    """Whether all tokens have a row. limits: [inputs] the number of tokens; 0 for inputs that are no tokens."""
    outside = 0
    for port in range(len(limits)):
        if limits[port]:
            for p in range(of.shape[1]):
                token = int64_at(tables[of[port, p]], rows[port, p]) if of[port, p] else 0
                outside += token < 0 or token >= limits[port]
    return outside == 0


@compiled_part
def look_up(
    of: Words, rows: Words, tables: Words, port: int, first: int, n: int, table: int, at: int, size: int
) -> None:  # fmt: skip
    """Copy the rows of a table, `size` bytes each, that the tokens of n positions name."""
    for b in range(n):
        source = of[port, first + b]
        token = int64_at(tables[source], rows[port, first + b]) if source else 0
        copy_bytes(at + b * size, table + token * size, size)


@compiled_part
def add_bias(at: int, n: int, width: int, bias: int) -> None:
    """Add one row to n rows."""
    for b in range(n):
        row = at + b * width * 4
        for j in range(width):
            store(row, j, load(row, j) + load(bias, j))


@compiled_part
def write_best(at: int, scores: int, n: int, width: int) -> None:
    """Write the place of the greatest number of each row, the first of them; of a NaN, if there is one."""
    for b in range(n):
        row = scores + b * width * 4
        best, most = 0, load(row, 0)
        for j in range(1, width):
            score = load(row, j)
            if score > most or (score != score and most == most):
                best, most = j, score
        write_int64(at, b, best)


@compiled_arithmetic
def run_nodes(
    ends: Words, of: Words, rows: Words, tables: Words, limits: Words, operations: Words, values: Words, passes: Words,
    programs: Words, slots: Words, base_values: Words, bases: Words, addresses: Words, made: Words, parts: Words,
    keep_at: Words, keep_rows: Words, keep_tables: Words, copies: Words, places: Words, block: int,
) -> bool:  # fmt: skip
    """Compute all steps of a task of single nodes; False, with nothing written, if a token has no row.

    of, rows: [inputs, positions] tables and rows of the inputs. tables: addresses. made: [outputs] the values that are
    the outputs, and parts: their numbers. They have room for a whole step, and are handed out at its end, since a row
    that is written may be one that a node of the step reads. base_values: the values that passes read and write, below
    0 for none; bases: room for their addresses. copies, keep_at, keep_rows, keep_tables: as for recurrent steps.
    places: room for [positions]. block: rows that are computed together.
    """
    if not have_rows(of, rows, tables, limits):
        return False
    note_kept(copies, tables, parts, keep_at, keep_rows, keep_tables)
    for i in range(len(copies)):
        copies[i, SOURCE] = values[made[copies[i, PART]], ADDRESS]
        copies[i, ROW_BYTES] = values[made[copies[i, PART]], VALUE_BYTES]
    threads = call_with_number(addresses[SET_THREADS], 1) if addresses[SET_THREADS] else 0
    begin = 0
    for end in ends:
        for p in range(begin, end):
            places[p] = p - begin
        for first in range(begin, end, block):
            n, done = min(end - first, block), first - begin
            for k in range(len(operations)):
                code, result, a = operations[k, 0], operations[k, 1], operations[k, 2]
                if code == PASS:
                    low = passes[a, BASE]
                    for i in range(low, passes[a, BASE_END]):
                        bases[i] = place(values, base_values[i], done) if base_values[i] >= 0 else 0
                    interpret(
                        programs[passes[a, PROGRAM] : passes[a, PROGRAM_END]],
                        slots[passes[a, SLOT] : passes[a, SLOT_END]], bases[low : passes[a, BASE_END]],
                        passes[a, REGISTERS], n, passes[a, PASS_WIDTH],
                    )  # fmt: skip
                    continue
                at, size, width = place(values, result, done), values[result, VALUE_BYTES], values[result, WIDTH]
                if code == GATHER:
                    for b in range(n):
                        bring(tables, of[a, first + b], rows[a, first + b], at + b * size, size)
                elif code == LOOKUP:
                    look_up(of, rows, tables, a, first, n, operations[k, 3], at, size)
                elif code == PRODUCT:
                    depth = values[a, WIDTH]
                    call_sgemm_compute(
                        addresses[SGEMM], n, width, depth, place(values, a, done), depth, operations[k, 3], at
                    )
                    if operations[k, 4]:
                        add_bias(at, n, width, operations[k, 4])
                else:
                    write_best(at, place(values, a, done), n, values[a, WIDTH])
        hand_out(copies, end, places)
        begin = end
    if addresses[SET_THREADS]:
        call_with_number(addresses[SET_THREADS], threads)
    return True
