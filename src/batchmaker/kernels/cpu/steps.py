"""The steps of a task of LSTM, GRU or RNN chains, compiled: no Python between them, and no lock of the interpreter.

Rows of weights and projected inputs come as `batchmaker.cells.recurrent` lays them out: what goes through tanh is
scaled by two, so that every gate is tanh(x / 2) first. Sums, gates and c of a step are float32; bfloat16 state is
rounded when it is stored. bfloat16 arrays are int16 here.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled, compiled_arithmetic, compiled_part
from batchmaker.kernels.cpu.machine import (
    call_gemm_bf16,
    call_sgemm_compute,
    call_with_number,
    copy_bytes,
    int64_at,
    rounded,
    widened,
    zero_bytes,
)
from batchmaker.kernels.pointwise import tanh

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Rows = NDArray[Any]
"""[n, width] float32, or int16 for bfloat16."""

LSTM: Final = 0
GRU: Final = 1
RNN_TANH: Final = 2
RNN_RELU: Final = 3

OWN: Final = 0
PACKED: Final = 1
BF16: Final = 2
GIVEN: Final = 3
"""Ways to multiply: own loops, MKL's packed product, that of bfloat16 matrices, and by somebody else."""

ALL, BEGIN, END = range(3)
"""What run_steps does: all steps, or one half of one."""

BLOCK: Final = 64
"""Most rows that are multiplied at once: their gates stay in the second cache."""

NEXT_AT, COUNT, AT, ROWS, PART, TARGET, COPY_FIELDS = range(7)
"""Fields of a copy: the next of its positions, how many there are, the address of the positions, that of the rows that
they go to (0: one after the other), what is copied (0: h, 1: c), and the address that row 0 goes to."""

SGEMM, WEIGHTS, BF16_GEMM, BF16_WEIGHTS, SET_THREADS, NUM_ADDRESSES = range(6)
"""Addresses of functions and weights; 0 where there is none."""


@compiled_part
def half_tanh(x: Any) -> Any:
    """Return tanh(x / 2) of a float32 within TANH_ERROR."""
    return tanh(np.float32(0.5) * x)


@compiled_part
def multiply_row(a: Floats, w: Rows, g: Floats, b: int) -> None:
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
def multiply_pair(a: Floats, w: Rows, g: Floats, b: int) -> None:
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
def multiply(
    how: int, n: int, a: Floats, narrow: Rows, w: Rows, addresses: Ints, made: Rows, begin: int, g: Floats
) -> None:  # fmt: skip
    """g[:n] = the states a[:n] (in bfloat16, narrow[:n]) @ the weights, or rows of `made` from `begin` on."""
    width, depth = g.shape[1], a.shape[1]
    if how == PACKED:
        call_sgemm_compute(addresses[SGEMM], n, width, depth, a.ctypes.data, addresses[WEIGHTS], g.ctypes.data)
    elif how == BF16:
        call_gemm_bf16(
            addresses[BF16_GEMM], n, width, depth, narrow.ctypes.data, addresses[BF16_WEIGHTS], g.ctypes.data
        )
    elif how == GIVEN:
        for b in range(n):
            for j in range(width):
                g[b, j] = widened(made[begin + b, j])
    else:
        for b in range(0, n - 1, 2):
            multiply_pair(a, w, g, b)
        if n % 2:
            multiply_row(a, w, g, n - 1)


@compiled_part
def finish_lstm(g: Floats, b: int, px: Rows, row: int, t: Floats, h: Rows, c: Rows, lane: int) -> None:
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
    g: Floats, b: int, px: Rows, row: int, bias: Floats, before: Floats, t: Floats, h: Rows, lane: int
) -> None:  # fmt: skip
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
def finish_rnn(relu: bool, g: Floats, b: int, px: Rows, row: int, h: Rows, lane: int) -> None:
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
    kind: int, n: int, first: int, lanes: Ints, tokens: Ints, px: Rows, bias: Floats, g: Floats, before: Floats,
    t: Floats, h: Rows, c: Rows,
) -> None:  # fmt: skip
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
def bring(source: int, lane: int, table: Rows, entering: Rows) -> None:
    """Write the state that comes from elsewhere into its lane; see LoopTask.move_from."""
    row_bytes = table.shape[1] * table.itemsize
    target = table.ctypes.data + lane * row_bytes
    if source >= 0:
        copy_bytes(target, table.ctypes.data + source * row_bytes, row_bytes)
    elif source == -1:
        zero_bytes(target, row_bytes)
    else:
        copy_bytes(target, entering.ctypes.data + (-2 - source) * row_bytes, row_bytes)


@compiled
def note_copy(copies: Ints, i: int, part: int, at: Ints, rows: Ints, target: Rows) -> None:
    """Let copy i be that of h (part 0) or c (1) at positions `at` to these rows of the target; all there are if empty.

    Nothing keeps the arrays alive: copies hold their addresses.
    """
    copies[i, NEXT_AT] = 0
    copies[i, COUNT] = len(at)
    copies[i, AT] = at.ctypes.data
    copies[i, ROWS] = rows.ctypes.data if len(rows) else 0
    copies[i, PART] = part
    copies[i, TARGET] = target.ctypes.data


@compiled_part
def hand_out(copies: Ints, last: int, lanes: Ints, h: Rows, c: Rows) -> None:
    """Copy the outputs of positions below `last` to where they are wanted, from where the last call left off."""
    row_bytes = h.shape[1] * h.itemsize
    for i in range(len(copies)):
        k = copies[i, NEXT_AT]
        begin = c.ctypes.data if copies[i, PART] else h.ctypes.data
        while k < copies[i, COUNT]:
            position = int64_at(copies[i, AT], k)
            if position >= last:
                break
            row = int64_at(copies[i, ROWS], k) if copies[i, ROWS] else k
            copy_bytes(copies[i, TARGET] + row * row_bytes, begin + lanes[position] * row_bytes, row_bytes)
            k += 1
        copies[i, NEXT_AT] = k


@compiled_part
def gather(how: int, n: int, lanes: Ints, first: int, h: Rows, a: Floats, narrow: Rows) -> None:
    """Bring the state of n positions together: in float32, and as it is where bfloat16 is multiplied."""
    row_bytes = h.shape[1] * h.itemsize
    for b in range(n):
        lane = lanes[first + b]
        for j in range(h.shape[1]):
            a[b, j] = widened(h[lane, j])
        if how == BF16:
            copy_bytes(narrow.ctypes.data + b * row_bytes, h.ctypes.data + lane * row_bytes, row_bytes)


@compiled_part
def enter(
    kind: int, move: int, last: int, lanes: Ints, move_at: Ints, move_from: Ints, h: Rows, c: Rows, entering_h: Rows,
    entering_c: Rows,
) -> int:  # fmt: skip
    """Bring the states of positions below `last` into their lanes, from move `move` on; return the next move."""
    while move < len(move_at) and move_at[move] < last:
        lane, source = lanes[move_at[move]], move_from[move]
        bring(source, lane, h, entering_h)
        if kind == LSTM:
            bring(source, lane, c, entering_c)
        move += 1
    return move


@compiled_part
def copy_rows(h: Rows, lanes: Ints, first: int, last: int, states: Rows) -> None:
    """Let the first rows of `states` be the states of positions first to last."""
    row_bytes = h.shape[1] * h.itemsize
    for b in range(last - first):
        copy_bytes(states.ctypes.data + b * row_bytes, h.ctypes.data + lanes[first + b] * row_bytes, row_bytes)


@compiled_part
def all_have_rows(tokens: Ints, num_rows: int) -> bool:
    """Whether all tokens are rows of a table of so many."""
    outside = 0
    for p in range(len(tokens)):
        outside += tokens[p] < 0 or tokens[p] >= num_rows
    return outside == 0


@compiled_arithmetic
def run_steps(
    kind: int, ends: Ints, lanes: Ints, tokens: Ints, px: Rows, h: Rows, c: Rows, move_at: Ints, move_from: Ints,
    entering_h: Rows, entering_c: Rows, copies: Ints, w: Rows, bias: Floats, addresses: Ints, ways: Ints, g: Floats,
    a: Floats, narrow: Rows, t: Floats, phase: int, step: int, first: int, move: int, states: Rows, made: Rows,
) -> int:  # fmt: skip
    """Compute all steps of a task; -1, with nothing written, if a token has no row.

    tokens: of each position its row of px; empty if that is the position itself. c, entering_c: those of h but for an
    LSTM. w: [hidden, gates * hidden]. ways: how to multiply so many rows, up to BLOCK. g, a, narrow: room for BLOCK
    rows of gates and of state, in float32 and as stored. t: room for the gates of a row. The rest is as in LoopTask and
    above. For phase ALL, step, first and move are 0.

    Or half of a step that somebody else multiplies for, whose tokens have rows: BEGIN lets `states` be the state of its
    positions, END takes their products from `made`, both [positions or more, width]. step, first: which step it is, and
    its first position. move: what BEGIN returned for the step before, the next move.
    """
    if phase == ALL and not all_have_rows(tokens, len(px)):
        return -1
    if phase == BEGIN:
        move = enter(kind, move, ends[step], lanes, move_at, move_from, h, c, entering_h, entering_c)
        copy_rows(h, lanes, first, ends[step], states)
        return move
    threads = call_with_number(addresses[SET_THREADS], 1) if addresses[SET_THREADS] else 0
    for now in range(step, step + 1 if phase == END else len(ends)):
        begin, last = first, ends[now]
        if phase == ALL:
            move = enter(kind, move, last, lanes, move_at, move_from, h, c, entering_h, entering_c)
        while first < last:
            n = min(last - first, BLOCK)
            how = GIVEN if phase == END else ways[n]
            gather(how, n, lanes, first, h, a, narrow)
            multiply(how, n, a, narrow, w, addresses, made, first - begin, g)
            finish(kind, n, first, lanes, tokens, px, bias, g, a, t, h, c)
            first += n
        hand_out(copies, last, lanes, h, c)
    if addresses[SET_THREADS]:
        call_with_number(addresses[SET_THREADS], threads)
    return move


@compiled_arithmetic
def largest_step(ends: Ints, tokens: Ints, num_rows: int) -> int:
    """Return the most positions that a step has; -1 if a token has no row."""
    if not all_have_rows(tokens, num_rows):
        return -1
    first = most = 0
    for end in ends:
        most = max(most, end - first)
        first = end
    return most
