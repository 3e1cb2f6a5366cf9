"""The compiled steps of a task of greedy decoders: a recurrent step, the scores of all tokens, the choice of the best.

Loops that reach their end token are left out of later steps, as with stop tests between steps.
"""

from __future__ import annotations

from typing import Any

from batchmaker.arrays import Flags, Float32s, Ints
from batchmaker.compiled import compiled_arithmetic, compiled_part
from batchmaker.kernels.cpu.machine import call_with_number, int64_at, rounded, widened, zero_bytes
from batchmaker.kernels.cpu.steps import (
    AT,
    BEGIN,
    BLOCK,
    COUNT,
    ROW_BYTES,
    ROWS,
    SET_THREADS,
    TARGET,
    TILED,
    TILES,
    TOKEN,
    C,
    GateRoom,
    H,
    Keeps,
    Moves,
    Weights,
    enter,
    finish,
    gather,
    hand_out,
    multiply,
    note_kept,
    note_source,
)
from batchmaker.kernels.cpu.tile_steps import Rows, run_tiles

Tests = tuple[Ints, Ints, Flags, Ints, Flags, Ints]
"""test_of, last_of and ended by node, constants, is_constant and output_of by test, as in StopTests; all empty if no
loop ends at a value here."""


@compiled_part
def best(scores: Float32s, b: int, bias: Float32s, like: Any) -> int:
    """Return the index of the greatest scores[b] + bias, rounded to the type of `like`.

    It is the first such index, or that of a NaN.
    """
    place = 0
    most = widened(rounded(scores[b, 0] + bias[0], like))
    for j in range(1, len(bias)):
        score = widened(rounded(scores[b, j] + bias[j], like))
        if score > most or (score != score and most == most):
            place, most = j, score
    return place


@compiled_part
def can_decode(
    used: Flags, nodes: Ints, num_tokens: int, tables: Ints, said_moves: tuple[Ints, Ints], tests: Tests, outputs: Ints
) -> bool:
    """Whether every step has lanes, every token from outside has a row, and every stop test is a token."""
    said_from, said_rows = said_moves
    test_of, _, _, _, is_constant, output_of = tests
    outside = 0
    for s in range(len(used)):
        outside += not used[s]
    for i in range(len(said_from)):
        token = int64_at(tables[said_from[i]], said_rows[i]) if said_from[i] else 0
        outside += token < 0 or token >= num_tokens
    if len(test_of):
        for node in nodes:
            test = test_of[node]
            outside += test >= 0 and not (is_constant[test] and outputs[output_of[test]] == TOKEN)
    return outside == 0


@compiled_part
def enter_tokens(
    first: int, last: int, lanes: Ints, tables: Ints, move_at: Ints, said_moves: tuple[Ints, Ints], said: Ints
) -> None:
    """Write the tokens of moves first to before last into their lanes. Table 0 stands for token 0."""
    said_from, said_rows = said_moves
    for move in range(first, last):
        source = said_from[move]
        said[lanes[move_at[move]]] = int64_at(tables[source], said_rows[move]) if source else 0


@compiled_part
def next_block(
    p: int,
    last: int,
    lanes: Ints,
    nodes: Ints,
    said: Ints,
    ended: Flags,
    places: Ints,
    skipped: Flags,
    now: Ints,
    read: Ints,
) -> tuple[int, int]:
    """Collect up to BLOCK positions from p to before last; return the position after them, and their number.

    Positions of ended loops are skipped. places, skipped: [positions], written. now, read: [BLOCK] the lanes and the
    tokens of the collected positions, written.
    """
    n = 0
    while n < BLOCK and p < last:
        places[p] = lanes[p]
        if len(ended) and ended[nodes[p]]:
            places[p] = -1
            skipped[p] = True
        else:
            now[n], read[n] = lanes[p], said[lanes[p]]
            n += 1
        p += 1
    return p, n


@compiled_part
def clear_skipped(copies: Ints, lanes: Ints) -> None:
    """Set the fetched values of positions that did not run to zero."""
    for i in range(len(copies)):
        row_bytes = copies[i, ROW_BYTES]
        if not copies[i, ROWS]:
            for k in range(copies[i, COUNT]):
                if lanes[int64_at(copies[i, AT], k)] < 0:
                    zero_bytes(copies[i, TARGET] + k * row_bytes, row_bytes)


@compiled_part
def end_loops(first: int, last: int, nodes: Ints, places: Ints, said: Ints, tests: Tests, stopped: Flags) -> None:
    """Record the loops that end with the step of positions first to last, of which those with a place ran."""
    test_of, last_of, ended, constants, _, _ = tests
    for p in range(first, last):
        node = nodes[p]
        if places[p] < 0 or test_of[node] < 0:
            continue
        if last_of[node] == node or said[places[p]] == constants[test_of[node]]:
            stopped[p] = True
            for after in range(node + 1, last_of[node] + 1):
                ended[after] = True


@compiled_arithmetic
def run_greedy(
    kind: int,
    steps: tuple[Ints, Flags, Ints],
    nodes: Ints,
    px: Rows,
    state: tuple[Rows, Rows, Ints],
    tables: Ints,
    moves: Moves,
    said_moves: tuple[Ints, Ints],
    keeps: Keeps,
    copies: Ints,
    weights: Weights,
    room: GateRoom,
    choice: tuple[Rows, Float32s, Ints, int, Float32s],
    places: Ints,
    tests: Tests,
    marks: tuple[Flags, Flags],
) -> bool:
    """Compute all steps of a task; False, with nothing written, if it must be computed step by step.

    nodes: [positions]. state: h, c and the token of each lane, [lanes]. said_moves: the table and row of the token of
    each move. choice: weights [hidden, tokens] and bias [tokens] of the scores, addresses, the way to multiply, and
    room for the scores of BLOCK rows. places: room for [positions + 2 * BLOCK]. marks:
    [positions] where loops stopped and what did not run; false, written. The rest is as in run_steps.
    """
    ends, used, lanes = steps
    h, c, said = state
    w, bias, addresses, ways = weights
    g, a, narrow, t = room
    out_w, out_bias, out_addresses, out_way, scores = choice
    ended = tests[2]
    stopped, skipped = marks
    if not can_decode(used, nodes, len(px), tables, said_moves, tests, keeps[3]):
        return False
    note_kept(copies, tables, keeps)
    note_source(copies, H, h)
    note_source(copies, C, c)
    note_source(copies, TOKEN, said)
    threads = call_with_number(addresses[SET_THREADS], 1) if addresses[SET_THREADS] else 0
    now, read = places[len(lanes) :], places[len(lanes) + BLOCK :]
    first = move = blocks = BEGIN
    for last in ends:
        entered = move
        move = enter(kind, entered, last, lanes, tables, moves, (h, c))
        enter_tokens(entered, move, lanes, tables, moves[0], said_moves, said)
        p = first
        while p < last:
            p, n = next_block(p, last, lanes, nodes, said, ended, places, skipped, now, read)
            if n == 0:
                continue
            how = ways[n]
            gather(how, n, now, BEGIN, h, a, narrow)
            if how == TILED:
                run_tiles(kind, n, BEGIN, blocks % 2 == 1, now, read[:n], px, bias, addresses[TILES], a, g, (h, c))
            else:
                multiply(how, n, a, narrow, w, addresses, g)
                finish(kind, n, BEGIN, now, read, px, bias, g, a, t, h, c)
            gather(out_way, n, now, BEGIN, h, a, narrow)
            multiply(out_way, n, a, narrow, out_w, out_addresses, scores)
            for b in range(n):
                said[now[b]] = best(scores, b, out_bias, h[0, 0])
            blocks += 1
        hand_out(copies, last, places)
        if len(ended):
            end_loops(first, last, nodes, places, said, tests, stopped)
        first = last
    clear_skipped(copies, places)
    if addresses[SET_THREADS]:
        call_with_number(addresses[SET_THREADS], threads)
    return True
