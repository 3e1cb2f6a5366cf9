"""The compiled steps of a task of LSTM, GRU or RNN chains, without Python between them or the interpreter's lock.

Rows of weights and projected inputs have the layout of `batchmaker.compile.projected_steps`: inputs of tanh are scaled
by two, so that every gate begins as tanh(x / 2). Sums, gates and c of a step are float32; bfloat16 state is rounded
when it is stored. bfloat16 arrays are int16 here.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from batchmaker.arrays import Flags, Float32s, Ints
from batchmaker.compiled import compiled, compiled_arithmetic, compiled_part, number
from batchmaker.kernels.cpu.machine import (
    call_brgemm,
    call_gemm_bf16,
    call_sgemm_compute,
    call_with_number,
    copy_bytes,
    int64_at,
    rounded,
    widened,
    zero_bytes,
)
from batchmaker.kernels.cpu.tile_steps import GRU, LSTM, RNN_RELU, Rows, run_tiles
from batchmaker.kernels.pointwise import tanh

OWN, PACKED, BF16, TILED, PANELS = map(number, range(5))
"""Ways to multiply: own loops, MKL's packed product, that of bfloat16 matrices, tile by tile with the gates, and
oneDNN's product, panel by panel."""

PANEL: Final = 64
"""The columns of a panel: these columns of all rows of weights, one row after the other, so that the cache holds them
while all rows of a block are multiplied."""

PANEL_ROWS: Final = 32
"""oneDNN compiles a product for each number of rows. So it gets a multiple of this, and then the others."""

BLOCK: Final = 256
"""Most rows that are multiplied at once: each block reads all weights again, and products of fewer rows are slower."""

NEXT_AT, COUNT, AT, ROWS, PART, TARGET, SOURCE, ROW_BYTES, COPY_FIELDS = range(9)
"""Fields of a copy, see below.

The next of its positions; the number of positions; the address of the positions; the address of their target rows (0:
consecutive); the part to copy (0: h, 1: c, 2: the chosen token); the address of target row 0; the address of the first
lane; the bytes of a row.
"""

BEGIN: Final = number(0)
H, C, TOKEN = map(number, range(3))
"""Where loops begin, and the parts of a copy, as `number`: otherwise what they are given to is compiled twice."""

SGEMM, BRGEMM, WEIGHTS, BF16_GEMM, BF16_WEIGHTS, SET_THREADS, TILES, NUM_ADDRESSES = range(8)
"""Addresses of functions and weights; 0 where there is none. WEIGHTS: panels for BRGEMM, or packed for SGEMM."""

LaneState = tuple[Rows, Rows]
"""h and c of all lanes, [lanes, hidden]; both are h unless the cell is an LSTM."""

Source = tuple[Ints, Ints, Ints]
"""The row of the projected inputs of each position; and the tables and rows where it is read first, if these are not
empty. All are empty if it is the position itself."""

Moves = tuple[Ints, Ints, Ints, Ints, Ints]
"""The positions whose state is not in its lane yet, ascending; table and row of its h, then of its c: [moves]."""

Keeps = tuple[Ints, Ints, Ints, Ints]
"""The positions whose outputs are kept, ascending, and the row of each; the table of each output that is kept, and the
part of the state that it is."""

Weights = tuple[Rows, Float32s, Ints, Ints]
"""The weights [hidden, gates * hidden]; the bias of their product; addresses; the way to multiply n rows, by n up to
BLOCK."""

GateRoom = tuple[Float32s, Float32s, Rows, Float32s]
"""Room for the gates of BLOCK rows; for their state or more in float32, and as stored; for the gates of one row."""


@compiled_part
def half_tanh(x: Any) -> Any:
    """Return tanh(x / 2) of a float32 within TANH_ERROR."""
    return tanh(np.float32(0.5) * x)


@compiled_part
def multiply_row(a: Float32s, w: Rows, g: Float32s, b: int) -> None:
    """g[b] = a[b] @ w, eight rows of weights at a time."""
    depth, width = w.shape
    whole = depth - depth % 8
    for j in range(width):
        g[b, j] = np.float32(0)
    for k in range(0, whole, 8):
        for j in range(width):
            g[b, j] += (
                (a[b, k] * widened(w[k, j]) + a[b, k + 1] * widened(w[k + 1, j]))
                + (a[b, k + 2] * widened(w[k + 2, j]) + a[b, k + 3] * widened(w[k + 3, j]))
            ) + (
                (a[b, k + 4] * widened(w[k + 4, j]) + a[b, k + 5] * widened(w[k + 5, j]))
                + (a[b, k + 6] * widened(w[k + 6, j]) + a[b, k + 7] * widened(w[k + 7, j]))
            )
    for k in range(whole, depth):
        for j in range(width):
            g[b, j] += a[b, k] * widened(w[k, j])


@compiled_part
def multiply_pair(a: Float32s, w: Rows, g: Float32s, b: int) -> None:
    """g[b] = a[b] @ w and the same for b + 1, reading the weights once, four rows at a time."""
    depth, width = w.shape
    whole = depth - depth % 4
    for j in range(width):
        g[b, j] = np.float32(0)
        g[b + 1, j] = np.float32(0)
    for k in range(0, whole, 4):
        for j in range(width):
            w0, w1, w2, w3 = widened(w[k, j]), widened(w[k + 1, j]), widened(w[k + 2, j]), widened(w[k + 3, j])
            g[b, j] += (a[b, k] * w0 + a[b, k + 1] * w1) + (a[b, k + 2] * w2 + a[b, k + 3] * w3)
            g[b + 1, j] += (a[b + 1, k] * w0 + a[b + 1, k + 1] * w1) + (a[b + 1, k + 2] * w2 + a[b + 1, k + 3] * w3)
    for k in range(whole, depth):
        for j in range(width):
            g[b, j] += a[b, k] * widened(w[k, j])
            g[b + 1, j] += a[b + 1, k] * widened(w[k, j])


@compiled_part
def multiply_panels(function: int, n: int, width: int, depth: int, a: int, stride: int, panels: int, g: int) -> None:
    """g [n, width] = a [n, depth] @ weights in panels, by address. stride: numbers from one row of `a` to the next."""
    several = n - n % PANEL_ROWS
    for j in range(0, width, PANEL):
        columns, panel, at = min(PANEL, width - j), panels + 4 * j * depth, g + 4 * j
        if several:
            call_brgemm(function, several, columns, depth, a, stride, panel, at, width)
        if several < n:
            rest, rest_at = a + 4 * several * stride, at + 4 * several * width
            call_brgemm(function, n - several, columns, depth, rest, stride, panel, rest_at, width)


@compiled_part
def multiply(how: int, n: int, a: Float32s, narrow: Rows, w: Rows, addresses: Ints, g: Float32s) -> None:
    """g[:n] = the states a[:n] (in bfloat16, narrow[:n]) @ the weights."""
    depth, width = w.shape
    if how == PACKED:
        call_sgemm_compute(
            addresses[SGEMM], n, width, depth, a.ctypes.data, a.shape[1], addresses[WEIGHTS], g.ctypes.data
        )
    elif how == PANELS:
        multiply_panels(
            addresses[BRGEMM], n, width, depth, a.ctypes.data, a.shape[1], addresses[WEIGHTS], g.ctypes.data
        )
    elif how == BF16:
        call_gemm_bf16(
            addresses[BF16_GEMM], n, width, depth, narrow.ctypes.data, addresses[BF16_WEIGHTS], g.ctypes.data
        )
    else:
        for b in range(0, n - 1, 2):
            multiply_pair(a, w, g, b)
        if n % 2:
            multiply_row(a, w, g, n - 1)


@compiled_part
def finish_lstm(g: Float32s, b: int, px: Rows, row: int, t: Float32s, h: Rows, c: Rows, lane: int) -> None:
    """Products of row b and projected inputs (i, f, o, 2g) -> h and c in their lane."""
    hidden = h.shape[1]
    half = np.float32(0.5)
    for j in range(4 * hidden):
        t[j] = half_tanh(g[b, j] + widened(px[row, j]))
    for j in range(hidden):
        i, f, o = half * t[j] + half, half * t[hidden + j] + half, half * t[2 * hidden + j] + half
        new = f * widened(c[lane, j]) + i * t[3 * hidden + j]
        c[lane, j] = rounded(new, c[lane, j])
        h[lane, j] = rounded(o * half_tanh(new + new), h[lane, j])


@compiled_part
def finish_gru(
    g: Float32s, b: int, px: Rows, row: int, bias: Float32s, before: Float32s, t: Float32s, h: Rows, lane: int
) -> None:
    """Products of row b, their bias, projected inputs (r, z, 2n) and h before -> h in its lane."""
    hidden = h.shape[1]
    half = np.float32(0.5)
    for j in range(2 * hidden):
        t[j] = half * half_tanh(g[b, j] + bias[j] + widened(px[row, j])) + half
    for j in range(hidden):
        k = 2 * hidden + j
        n = half_tanh(widened(px[row, k]) + t[j] * (g[b, k] + bias[k]))
        h[lane, j] = rounded(n + t[hidden + j] * (before[b, j] - n), h[lane, j])


@compiled_part
def finish_rnn(relu: bool, g: Float32s, b: int, px: Rows, row: int, h: Rows, lane: int) -> None:
    """Products of row b and projected inputs, doubled for tanh -> h in its lane."""
    if relu:
        for j in range(h.shape[1]):
            x = g[b, j] + widened(px[row, j])
            h[lane, j] = rounded(np.float32(0) if x < np.float32(0) else x, h[lane, j])
    else:
        for j in range(h.shape[1]):
            h[lane, j] = rounded(half_tanh(g[b, j] + widened(px[row, j])), h[lane, j])


@compiled_part
def finish(
    kind: int,
    n: int,
    first: int,
    lanes: Ints,
    tokens: Ints,
    px: Rows,
    bias: Float32s,
    g: Float32s,
    before: Float32s,
    t: Float32s,
    h: Rows,
    c: Rows,
) -> None:
    """Products of n positions from `first` on -> their new state in their lanes."""
    for b in range(n):
        lane = lanes[first + b]
        row = tokens[first + b] if len(tokens) else first + b
        if kind == LSTM:
            finish_lstm(g, b, px, row, t, h, c, lane)
        elif kind == GRU:
            finish_gru(g, b, px, row, bias, before, t, h, lane)
        else:
            finish_rnn(kind == RNN_RELU, g, b, px, row, h, lane)


@compiled_part
def bring(tables: Ints, table: int, row: int, target: int, row_bytes: int) -> None:
    """Write a state from a row of a table, or zeros (table 0), to its target."""
    if table:
        copy_bytes(target, tables[table] + row * row_bytes, row_bytes)
    else:
        zero_bytes(target, row_bytes)


@compiled_part
def enter(kind: int, move: int, last: int, lanes: Ints, tables: Ints, moves: Moves, state: LaneState) -> int:
    """Move the states of positions below `last` into their lanes, from move `move` on; return the next move."""
    move_at, h_from, h_rows, c_from, c_rows = moves
    h, c = state
    row_bytes = h.shape[1] * h.itemsize
    while move < len(move_at) and move_at[move] < last:
        at = lanes[move_at[move]] * row_bytes
        bring(tables, h_from[move], h_rows[move], h.ctypes.data + at, row_bytes)
        if kind == LSTM:
            bring(tables, c_from[move], c_rows[move], c.ctypes.data + at, row_bytes)
        move += 1
    return move


@compiled
def note_copy(copies: Ints, i: int, part: int, at: Ints, target: Rows) -> None:
    """Define copy i: a part of the state at positions `at`, to consecutive rows of the target.

    The copies hold only addresses and do not keep the arrays alive.
    """
    copies[i, NEXT_AT] = 0
    copies[i, COUNT] = len(at)
    copies[i, AT] = at.ctypes.data
    copies[i, ROWS] = 0
    copies[i, PART] = part
    copies[i, TARGET] = target.ctypes.data


@compiled_part
def note_kept(copies: Ints, tables: Ints, keeps: Keeps) -> None:
    """Define the first copies: outputs to rows of tables. There is room for them."""
    keep_at, keep_rows, keep_tables, parts = keeps
    for i in range(len(keep_tables)):
        copies[i, NEXT_AT] = 0
        copies[i, COUNT] = len(keep_at)
        copies[i, AT] = keep_at.ctypes.data
        copies[i, ROWS] = keep_rows.ctypes.data
        copies[i, PART] = parts[i]
        copies[i, TARGET] = tables[keep_tables[i]]


@compiled_part
def note_source(copies: Ints, part: int, state: Rows) -> None:
    """Set the source of the copies of a part of the state: these rows, one for each lane."""
    row_bytes = state.itemsize * (state.size // len(state))
    for i in range(len(copies)):
        if copies[i, PART] == part:
            copies[i, SOURCE] = state.ctypes.data
            copies[i, ROW_BYTES] = row_bytes


@compiled_part
def hand_out_one(copies: Ints, i: int, last: int, lanes: Ints) -> None:
    """As hand_out, for copy i."""
    k, row_bytes = copies[i, NEXT_AT], copies[i, ROW_BYTES]
    while k < copies[i, COUNT]:
        position = int64_at(copies[i, AT], k)
        if position >= last:
            break
        lane = lanes[position]
        if lane >= 0:
            row = int64_at(copies[i, ROWS], k) if copies[i, ROWS] else k
            copy_bytes(copies[i, TARGET] + row * row_bytes, copies[i, SOURCE] + lane * row_bytes, row_bytes)
        k += 1
    copies[i, NEXT_AT] = k


@compiled_part
def hand_out(copies: Ints, last: int, lanes: Ints) -> None:
    """Copy the outputs of positions below `last` to their targets, from the end of the previous call on.

    lanes: below 0 for positions that did not run; nothing is copied for them.
    """
    for i in range(len(copies)):
        hand_out_one(copies, i, last, lanes)


@compiled_part
def gather(how: int, n: int, lanes: Ints, first: int, h: Rows, a: Float32s, narrow: Rows) -> None:
    """Gather the states of n positions: in float32, and unchanged if bfloat16 is multiplied."""
    row_bytes = h.shape[1] * h.itemsize
    for b in range(n):
        lane = lanes[first + b]
        for j in range(h.shape[1]):
            a[b, j] = widened(h[lane, j])
        if how == BF16:
            copy_bytes(narrow.ctypes.data + b * row_bytes, h.ctypes.data + lane * row_bytes, row_bytes)


@compiled_part
def prepare(
    used: Flags,
    source: Source,
    num_rows: int,
    state: LaneState,
    tables: Ints,
    keeps: Keeps,
    copies: Ints,
) -> bool:
    """Read the tokens from their tables (0: zeros) and define the copies; False if the task cannot be computed here."""
    tokens, of, rows = source
    outside = 0
    for s in range(len(used)):
        outside += not used[s]
    for p in range(len(of)):
        tokens[p] = int64_at(tables[of[p]], rows[p]) if of[p] else 0
    for p in range(len(tokens)):
        outside += tokens[p] < 0 or tokens[p] >= num_rows
    note_kept(copies, tables, keeps)
    note_source(copies, H, state[0])
    note_source(copies, C, state[1])
    return outside == 0


@compiled_arithmetic
def run_steps(
    kind: int,
    steps: tuple[Ints, Flags, Ints],
    source: Source,
    px: Rows,
    state: LaneState,
    tables: Ints,
    moves: Moves,
    keeps: Keeps,
    copies: Ints,
    weights: Weights,
    room: GateRoom,
) -> bool:
    """Compute all steps of a task; False, with nothing written, if a token has no row or a step no lanes.

    steps: ends, used and lanes of the LoopTask. tables: addresses. copies: the fetches, with room before them for the
    kept outputs.
    """
    ends, used, lanes = steps
    tokens = source[0]
    h, c = state
    w, bias, addresses, ways = weights
    g, a, narrow, t = room
    if not prepare(used, source, len(px), state, tables, keeps, copies):
        return False
    threads = call_with_number(addresses[SET_THREADS], 1) if addresses[SET_THREADS] else 0
    first = move = blocks = BEGIN
    for last in ends:
        move = enter(kind, move, last, lanes, tables, moves, state)
        while first < last:
            n = min(last - first, BLOCK)
            how = ways[n]
            gather(how, n, lanes, first, h, a, narrow)
            if how == TILED:
                run_tiles(kind, n, first, blocks % 2 == 1, lanes, tokens, px, bias, addresses[TILES], a, g, state)
            else:
                multiply(how, n, a, narrow, w, addresses, g)
                finish(kind, n, first, lanes, tokens, px, bias, g, a, t, h, c)
            first += n
            blocks += 1
        hand_out(copies, last, lanes)
    if addresses[SET_THREADS]:
        call_with_number(addresses[SET_THREADS], threads)
    return True


@compiled
def begin_task(
    used: Flags,
    source: Source,
    num_rows: int,
    state: LaneState,
    tables: Ints,
    keeps: Keeps,
    copies: Ints,
) -> bool:
    """As `prepare`, if PyTorch multiplies for each step between begin_step and end_step."""
    return prepare(used, source, num_rows, state, tables, keeps, copies)


@compiled_arithmetic
def begin_step(
    kind: int, first: int, last: int, move: int, lanes: Ints, tables: Ints, moves: Moves, state: LaneState, states: Rows
) -> int:
    """Gather the states of positions first to last into `states`; return the next move.

    move: result of the step before.
    """
    move = enter(kind, move, last, lanes, tables, moves, state)
    h = state[0]
    row_bytes = h.shape[1] * h.itemsize
    for b in range(last - first):
        copy_bytes(states.ctypes.data + b * row_bytes, h.ctypes.data + lanes[first + b] * row_bytes, row_bytes)
    return move


@compiled_arithmetic
def end_step(
    kind: int,
    first: int,
    last: int,
    lanes: Ints,
    tokens: Ints,
    px: Rows,
    state: LaneState,
    copies: Ints,
    bias: Float32s,
    made: Rows,
    room: GateRoom,
) -> None:
    """Finish the step of positions first to last, whose products are the first rows of `made`."""
    h, c = state
    g, a, narrow, t = room
    for begin in range(first, last, BLOCK):
        n = min(last - begin, BLOCK)
        for b in range(n):
            for j in range(g.shape[1]):
                g[b, j] = widened(made[begin - first + b, j])
        gather(OWN, n, lanes, begin, h, a, narrow)
        finish(kind, n, begin, lanes, tokens, px, bias, g, a, t, h, c)
    hand_out(copies, last, lanes)
