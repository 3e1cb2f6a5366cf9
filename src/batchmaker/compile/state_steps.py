"""The compiled steps of a task of chains with any state: rows in from lanes, operations, rows out, stop tests.

Nothing of a step is written before all of it is computed: a step with a token that has no row, or with a call that
raised, leaves everything as the step before has left it.
"""

from __future__ import annotations

from batchmaker.compile.node_steps import NO_ROW, operate
from batchmaker.compile.passes.interpreter import Words
from batchmaker.compile.typed_steps import ADDRESS, FLOAT32, KIND, VALUE_BYTES, Floats, number_at
from batchmaker.compiled import compiled_arithmetic, compiled_part
from batchmaker.kernels.cpu.machine import call_with_number, copy_bytes, int64_at
from batchmaker.kernels.cpu.steps import (
    BEGIN,
    PART,
    ROW_BYTES,
    SET_THREADS,
    SGEMM,
    SOURCE,
    Flags,
    bring,
    hand_out_one,
    note_kept,
)

STEPS, MOVE, OPERATION, RUNNING, CURSOR_FIELDS = range(5)
"""Fields of a cursor, the place in a task: steps that are done, the next move, the next operation of the step (below 0:
the step has not begun), and the rows of the step that run."""

DONE, AT_CALL, AT_TEST, AT_NO_ROW = range(4)
"""Why `run_states` returns: all steps are done; Python is to make call number cursor[OPERATION] of the operations, or
to apply the stop tests of the step that has just ended; a token has no row."""


@compiled_part
def note_outputs(
    copies: Words, tables: Words, parts: Words, keep_at: Words, keep_rows: Words, keep_tables: Words, made: Words,
    values: Words, state_at: Words, row_bytes: Words,
) -> None:  # fmt: skip
    """Define the copies of outputs to rows of tables, and the sources of all copies."""
    note_kept(copies, tables, parts, keep_at, keep_rows, keep_tables)
    hoisted = len(row_bytes) - len(state_at)
    for i in range(len(copies)):
        value = made[copies[i, PART]]
        copies[i, SOURCE] = values[value, ADDRESS] if value >= 0 else state_at[~value]
        copies[i, ROW_BYTES] = values[value, VALUE_BYTES] if value >= 0 else row_bytes[hoisted + ~value]


@compiled_part
def begin_step(
    first: int, last: int, move: int, lanes: Words, nodes: Words, over: Flags, tables: Words, move_at: Words,
    move_tables: Words, move_rows: Words, state_at: Words, row_bytes: Words, running: Words, places: Words, held: Words,
    skipped: Flags,
) -> tuple[int, int]:  # fmt: skip
    """Bring the states that move, and collect the positions of a step that run; return the next move and their number.

    running: written. places, held: [positions] for each position its row among those that run, and its lane; -1 if it
    does not run.
    """
    states = len(row_bytes) - len(move_tables)
    while move < len(move_at) and move_at[move] < last:
        lane = lanes[move_at[move]]
        for port in range(len(move_tables)):
            size = row_bytes[states + port]
            bring(tables, move_tables[port, move], move_rows[port, move], state_at[port] + lane * size, size)
        move += 1
    count = 0
    for p in range(first, last):
        if len(over) and over[nodes[p]]:
            places[p] = held[p] = -1
            skipped[p] = True
        else:
            places[p], held[p] = count, lanes[p]
            running[count] = p
            count += 1
    return move, count


@compiled_part
def find_rows(
    n: int, done: int, running: Words, lanes: Words, hoisted_at: Words, state_at: Words, row_bytes: Words,
    from_at: Words,
) -> None:  # fmt: skip
    """Write the addresses of the inputs of n rows: hoisted values by position, then state by lane."""
    for port in range(len(hoisted_at)):
        for b in range(n):
            from_at[port, b] = hoisted_at[port] + running[done + b] * row_bytes[port]
    for port in range(len(state_at)):
        k = len(hoisted_at) + port
        for b in range(n):
            from_at[k, b] = state_at[port] + lanes[running[done + b]] * row_bytes[k]


@compiled_part
def keep_states(count: int, running: Words, lanes: Words, state_at: Words, fed_by: Words, values: Words) -> None:
    """Write the new state of the rows that ran into their lanes. fed_by: [state] the value; below 0: unchanged."""
    for port in range(len(state_at)):
        value = fed_by[port]
        if value >= 0:
            size = values[value, VALUE_BYTES]
            for b in range(count):
                copy_bytes(state_at[port] + lanes[running[b]] * size, values[value, ADDRESS] + b * size, size)


@compiled_part
def holds(values: Words, watched: int, row: int, constant: int) -> bool:
    """Whether a watched number is the integer at which a loop ends."""
    kind, at = values[watched, KIND], values[watched, ADDRESS]
    if kind >= FLOAT32:
        return bool(number_at(kind, at, row) == float(constant))
    return int(number_at(kind, at, row)) == constant if kind == 0 else int64_at(at, row) == constant


@compiled_part
def end_loops(
    count: int, running: Words, nodes: Words, values: Words, watched: Words, test_of: Words, last_of: Words,
    output_of: Words, over: Flags, constants: Words, stopped: Flags,
) -> None:  # fmt: skip
    """Record the loops that end with a step. watched: [outputs] the value of each. The rest is as in StopTests."""
    for b in range(count):
        p = running[b]
        node = nodes[p]
        test = test_of[node]
        if test < 0:
            continue
        if last_of[node] == node or holds(values, watched[output_of[test]], b, constants[test]):
            stopped[p] = True
            for after in range(node + 1, last_of[node] + 1):
                over[after] = True


@compiled_arithmetic
def run_states(
    cursor: Words, ends: Words, lanes: Words, nodes: Words, tables: Words, hoisted_at: Words, state_at: Words,
    row_bytes: Words, move_at: Words, move_tables: Words, move_rows: Words, keep_at: Words, keep_rows: Words,
    keep_tables: Words, copies: Words, made: Words, parts: Words, fed_by: Words, operations: Words, values: Words,
    passes: Words, programs: Words, slots: Words, base_values: Words, records: Words, bases: Words, floats: Floats,
    integers: Words, addresses: Words, test_of: Words, last_of: Words, output_of: Words, over: Flags, constants: Words,
    by_python: bool, stopped: Flags, skipped: Flags, running: Words, places: Words, held: Words, from_at: Words,
    block: int,
) -> int:  # fmt: skip
    """Compute steps of a task from the cursor on, until all are done or Python has to do something.

    hoisted_at, state_at: addresses of the inputs' rows, by position and by lane; row_bytes: [inputs]. made: [outputs]
    the values that are the outputs; below 0, ~k for part k of the state, unchanged. parts: [outputs] their numbers.
    copies: the fetches, with room before them for the kept outputs. by_python: whether Python applies the stop tests.
    running, places, held: room for [positions]; from_at: for [inputs, block]. A step of more than `block` rows has no
    calls. The rest is as in LoopTask, `operate` and StopTests.
    """
    if cursor[STEPS] == 0 and cursor[OPERATION] < 0:
        note_outputs(copies, tables, parts, keep_at, keep_rows, keep_tables, made, values, state_at, row_bytes)
    threads = call_with_number(addresses[SET_THREADS], 1) if addresses[SET_THREADS] else 0
    why = DONE
    step, move, k, count = cursor[STEPS], cursor[MOVE], cursor[OPERATION], cursor[RUNNING]
    while step < len(ends):
        first, last = ends[step - 1] if step else BEGIN, ends[step]
        if k < 0:
            k = BEGIN
            move, count = begin_step(
                first, last, move, lanes, nodes, over, tables, move_at, move_tables, move_rows, state_at, row_bytes,
                running, places, held, skipped,
            )  # fmt: skip
        begun, after = k, len(operations)
        for done in range(BEGIN, count, block):
            n = min(count - done, block)
            find_rows(n, done, running, lanes, hoisted_at, state_at, row_bytes, from_at)
            after = operate(
                begun, n, done, from_at, operations, values, passes, programs, slots, base_values, bases, records,
                floats, integers, addresses[SGEMM],
            )  # fmt: skip
            if after < len(operations):
                break
        k = after
        if k == NO_ROW:
            why = AT_NO_ROW
            break
        if k < len(operations):
            why = AT_CALL
            break
        for i in range(len(copies)):
            hand_out_one(copies, i, last, places if made[copies[i, PART]] >= 0 else held)
        keep_states(count, running, lanes, state_at, fed_by, values)
        step += 1
        k = -1
        if by_python:
            why = AT_TEST
            break
        if len(over):
            end_loops(count, running, nodes, values, made, test_of, last_of, output_of, over, constants, stopped)
    cursor[STEPS], cursor[MOVE], cursor[OPERATION], cursor[RUNNING] = step, move, k, count
    if addresses[SET_THREADS]:
        call_with_number(addresses[SET_THREADS], threads)
    return why
