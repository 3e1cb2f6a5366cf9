"""The compiled steps of a task of chains with any state: rows in from lanes, operations, rows out, stop tests.

Nothing of a step is written before all of it is computed: a step with a token that has no row, or with a call that
raised, leaves everything as the step before has left it.
"""

from __future__ import annotations

from batchmaker.arrays import Flags, Ints
from batchmaker.compile.node_steps import NO_ROW, Code, Scratch, operate
from batchmaker.compile.typed_steps import ADDRESS, FLOAT32, KIND, VALUE_BYTES, number_at
from batchmaker.compiled import compiled_arithmetic, compiled_part
from batchmaker.kernels.cpu.machine import call_with_number, copy_bytes, int64_at
from batchmaker.kernels.cpu.steps import (
    BEGIN,
    PART,
    ROW_BYTES,
    SET_THREADS,
    SOURCE,
    Keeps,
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


Inputs = tuple[Ints, Ints, Ints]
"""Addresses of the hoisted inputs' rows, by position, and of the state's, by lane; bytes of a row of each: [inputs]."""

StateMoves = tuple[Ints, Ints, Ints]
"""The positions whose state is not in its lane yet, ascending; and its tables and rows, [state inputs, moves]."""

Places = tuple[Ints, Ints, Ints]
"""Room for [positions]: those of a step that run; for each position its row among them, and its lane, or -1 if it does
not run."""

Tests = tuple[Ints, Ints, Ints, Flags, Ints]
"""test_of, last_of, output_of, ended and constants of StopTests."""


@compiled_part
def note_outputs(copies: Ints, tables: Ints, keeps: Keeps, made: Ints, values: Ints, inputs: Inputs) -> None:
    """Define the copies of outputs to rows of tables, and the sources of all copies."""
    _, state_at, row_bytes = inputs
    note_kept(copies, tables, keeps)
    hoisted = len(row_bytes) - len(state_at)
    for i in range(len(copies)):
        value = made[copies[i, PART]]
        copies[i, SOURCE] = values[value, ADDRESS] if value >= 0 else state_at[~value]
        copies[i, ROW_BYTES] = values[value, VALUE_BYTES] if value >= 0 else row_bytes[hoisted + ~value]


@compiled_part
def begin_step(
    first: int,
    last: int,
    move: int,
    lanes: Ints,
    nodes: Ints,
    ended: Flags,
    tables: Ints,
    moves: StateMoves,
    inputs: Inputs,
    room: Places,
    skipped: Flags,
) -> tuple[int, int]:
    """Bring the states that move, and collect the positions of a step that run; return the next move and their number.

    room, skipped: written.
    """
    move_at, move_tables, move_rows = moves
    _, state_at, row_bytes = inputs
    running, places, held = room
    states = len(row_bytes) - len(move_tables)
    while move < len(move_at) and move_at[move] < last:
        lane = lanes[move_at[move]]
        for port in range(len(move_tables)):
            size = row_bytes[states + port]
            bring(tables, move_tables[port, move], move_rows[port, move], state_at[port] + lane * size, size)
        move += 1
    count = 0
    for p in range(first, last):
        if len(ended) and ended[nodes[p]]:
            places[p] = held[p] = -1
            skipped[p] = True
        else:
            places[p], held[p] = count, lanes[p]
            running[count] = p
            count += 1
    return move, count


@compiled_part
def find_rows(n: int, done: int, running: Ints, lanes: Ints, inputs: Inputs, from_at: Ints) -> None:
    """Write the addresses of the inputs of n rows: hoisted values by position, then state by lane."""
    hoisted_at, state_at, row_bytes = inputs
    for port in range(len(hoisted_at)):
        for b in range(n):
            from_at[port, b] = hoisted_at[port] + running[done + b] * row_bytes[port]
    for port in range(len(state_at)):
        k = len(hoisted_at) + port
        for b in range(n):
            from_at[k, b] = state_at[port] + lanes[running[done + b]] * row_bytes[k]


@compiled_part
def keep_states(count: int, running: Ints, lanes: Ints, state_at: Ints, fed_by: Ints, values: Ints) -> None:
    """Write the new state of the rows that ran into their lanes. fed_by: [state] the value; below 0: unchanged."""
    for port in range(len(state_at)):
        value = fed_by[port]
        if value >= 0:
            size = values[value, VALUE_BYTES]
            for b in range(count):
                copy_bytes(state_at[port] + lanes[running[b]] * size, values[value, ADDRESS] + b * size, size)


@compiled_part
def holds(values: Ints, watched: int, row: int, constant: int) -> bool:
    """Whether a watched number is the integer at which a loop ends."""
    kind, at = values[watched, KIND], values[watched, ADDRESS]
    if kind >= FLOAT32:
        return bool(number_at(kind, at, row) == float(constant))
    return int(number_at(kind, at, row)) == constant if kind == 0 else int64_at(at, row) == constant


@compiled_part
def end_loops(
    count: int, running: Ints, nodes: Ints, values: Ints, watched: Ints, tests: Tests, stopped: Flags
) -> None:
    """Record the loops that end with a step. watched: [outputs] the value of each."""
    test_of, last_of, output_of, ended, constants = tests
    for b in range(count):
        p = running[b]
        node = nodes[p]
        test = test_of[node]
        if test < 0:
            continue
        if last_of[node] == node or holds(values, watched[output_of[test]], b, constants[test]):
            stopped[p] = True
            for after in range(node + 1, last_of[node] + 1):
                ended[after] = True


@compiled_arithmetic
def run_states(
    cursor: Ints,
    steps: tuple[Ints, Ints, Ints],
    tables: Ints,
    inputs: Inputs,
    moves: StateMoves,
    keeps: Keeps,
    copies: Ints,
    results: tuple[Ints, Ints],
    code: Code,
    scratch: Scratch,
    tests: Tests,
    by_python: bool,
    marks: tuple[Flags, Flags],
    room: Places,
    from_at: Ints,
    block: int,
) -> int:
    """Compute steps of a task from the cursor on, until all are done or Python has to do something.

    steps: ends, lanes and nodes of the StateTask. tables: addresses. copies: the fetches, with room before them for the
    kept outputs. results: the values that are the outputs, below 0, ~k for part k of the state, unchanged; and those
    that feed the state, below 0 if it is unchanged. by_python: whether Python applies the stop tests. marks:
    [positions] where loops stopped and what did not run. from_at: room for [inputs, block]. A step of more than `block`
    rows has no calls.
    """
    ends, lanes, nodes = steps
    made, fed_by = results
    values, operations, addresses = scratch[0], code[0], code[6]
    ended = tests[3]
    stopped, skipped = marks
    running, places, held = room
    if cursor[STEPS] == 0 and cursor[OPERATION] < 0:
        note_outputs(copies, tables, keeps, made, values, inputs)
    threads = call_with_number(addresses[SET_THREADS], 1) if addresses[SET_THREADS] else 0
    why = DONE
    step, move, k, count = cursor[STEPS], cursor[MOVE], cursor[OPERATION], cursor[RUNNING]
    while step < len(ends):
        first, last = ends[step - 1] if step else BEGIN, ends[step]
        if k < 0:
            k = BEGIN
            move, count = begin_step(first, last, move, lanes, nodes, ended, tables, moves, inputs, room, skipped)
        begun, after = k, len(operations)
        for done in range(BEGIN, count, block):
            n = min(count - done, block)
            find_rows(n, done, running, lanes, inputs, from_at)
            after = operate(begun, n, done, from_at, code, scratch)
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
        keep_states(count, running, lanes, inputs[1], fed_by, values)
        step += 1
        k = -1
        if by_python:
            why = AT_TEST
            break
        if len(ended):
            end_loops(count, running, nodes, values, made, tests, stopped)
    cursor[STEPS], cursor[MOVE], cursor[OPERATION], cursor[RUNNING] = step, move, k, count
    if addresses[SET_THREADS]:
        call_with_number(addresses[SET_THREADS], threads)
    return why
