"""A block of rows through one recurrent step, tile by tile of the weights: the product of a tile, then its gates."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Float32s, Ints
from batchmaker.compiled import compiled_part, number
from batchmaker.kernels.cpu.tiles import (
    LANES,
    TILE_ROWS,
    finish_gru_tile,
    finish_lstm_tile,
    finish_rnn_tile,
    multiply_tile,
    prefetch,
)

Rows = NDArray[Any]
"""[n, width] float32, or int16 for bfloat16."""

LSTM: Final = 0
GRU: Final = 1
RNN_TANH: Final = 2
RNN_RELU: Final = 3

_DEPTH: Final = 128
"""Numbers of a state that are multiplied at once with many rows: the weights stay in the first cache."""
_NEAR, _FAR = 3, 2  # caches to prefetch into
_YES, _NO = map(number, (1, 0))
_VECTOR: Final = 4 * LANES  # bytes in float32


def vectors_of(gates: int) -> int:
    """Return the number of vectors of a tile: one for each gate, or four if there is one gate."""
    return 4 if gates == 1 else gates


def fits_tiles(hidden: int, gates: int) -> bool:
    """Whether weights [gates * hidden, hidden] divide into whole tiles."""
    return gates in (1, 3, 4) and hidden % (LANES * vectors_of(gates) // gates) == 0


def tiled(weights: Rows) -> Rows:
    """Return weights [gates * hidden, hidden] in tiles as described in `tiles`, with the same size and dtype."""
    width, hidden = weights.shape
    gates = width // hidden
    vectors = vectors_of(gates)
    parts = weights.reshape(gates, -1, vectors // gates, LANES, hidden)  # gate, tile, part of the tile, lane, k
    packed = parts.transpose(1, 4, 0, 2, 3).reshape(-1, hidden, vectors, LANES)
    if packed.dtype == np.int16:
        packed = packed.reshape(-1, hidden // 2, 2, vectors, LANES).transpose(0, 1, 3, 4, 2)
    return np.ascontiguousarray(packed).reshape(hidden, width)


@compiled_part
def ask_for(px: Rows, row: int, tile: int, gates: int, near: int) -> None:
    """Prefetch a row's projected inputs for a tile into the first cache, or the second."""
    size = px.itemsize
    count, units = (4, 4 * LANES) if gates == 1 else (gates, LANES)
    step = LANES if gates == 1 else px.shape[1] // gates
    at = px.ctypes.data + (row * px.shape[1] + tile * units) * size
    for v in range(count):
        if near:
            prefetch(at + v * step * size, _NEAR)
        else:
            prefetch(at + v * step * size, _FAR)


@compiled_part
def finish_tile(
    kind: int, tile: int, sums: int, x: int, before: int, bias: Float32s, h: int, c: int, stride: int, w: Rows
) -> None:
    """Products of a row and a tile at `sums` -> the new state of its units. All arguments but `bias` are addresses.

    x, h, c: of the row's first unit. before: h before the step, float32. stride: bytes of a state.
    """
    size = w.itemsize
    if kind == LSTM:
        at = tile * LANES * size
        finish_lstm_tile(sums, x + at, stride, h + at, c + at, w[0, 0])
    elif kind == GRU:
        at = tile * LANES * size
        finish_gru_tile(
            sums, x + at, stride, h + at, bias.ctypes.data + tile * _VECTOR, before + tile * _VECTOR, w[0, 0]
        )
    else:
        for v in range(4):
            at = (4 * tile + v) * LANES * size
            finish_rnn_tile(kind == RNN_RELU, sums + v * _VECTOR, x + at, h + at, w[0, 0])


@compiled_part
def run_tiles(
    kind: int,
    n: int,
    first: int,
    down: bool,
    lanes: Ints,
    tokens: Ints,
    px: Rows,
    bias: Float32s,
    weights: int,
    a: Float32s,
    t: Float32s,
    state: tuple[Rows, Rows],
) -> None:
    """States a[:n] of n positions from `first` on -> their new state in their lanes.

    down: from the last tile to the first. If consecutive blocks go in opposite directions, a block first finds the
    tiles that the previous block used last in the second cache. weights: the address of the tiles. t: room for n rows
    of a tile. state: h and c of all lanes, in the weights' dtype.
    """
    h, c = state
    hidden, size = h.shape[1], h.itemsize
    gates = px.shape[1] // hidden
    vectors = 3 if kind == GRU else 4
    row_bytes, a_bytes = vectors * _VECTOR, a.shape[1] * 4
    tiles = hidden // (LANES if gates > 1 else 4 * LANES)
    part = _DEPTH if n > TILE_ROWS else hidden
    for turn in range(tiles):
        tile = tiles - 1 - turn if down else turn
        for k in range(0, hidden, part):
            depth = min(part, hidden - k)
            these = weights + (tile * hidden + k) * vectors * LANES * size
            for b in range(0, n, TILE_ROWS):
                rows = min(n - b, TILE_ROWS)
                inputs, sums = a.ctypes.data + b * a_bytes, t.ctypes.data + b * row_bytes
                if kind == GRU:
                    multiply_tile(rows, 3, k > 0, depth, a.shape[1], inputs + k * 4, these, sums, h[0, 0])
                else:
                    multiply_tile(rows, 4, k > 0, depth, a.shape[1], inputs + k * 4, these, sums, h[0, 0])
                if k + depth < hidden:
                    continue
                for r in range(rows):
                    position = first + b + r
                    x = tokens[position] if len(tokens) else position
                    lane = lanes[position] * hidden * size
                    finish_tile(
                        kind,
                        tile,
                        sums + r * row_bytes,
                        px.ctypes.data + x * px.shape[1] * size,
                        inputs + r * a_bytes,
                        bias,
                        h.ctypes.data + lane,
                        c.ctypes.data + lane,
                        hidden * size,
                        h,
                    )
                    if b + r + TILE_ROWS < n:
                        soon = position + TILE_ROWS
                        ask_for(px, tokens[soon] if len(tokens) else soon, tile, gates, _YES)
                    if position + n < len(tokens):  # about the same row of the next block
                        ask_for(px, tokens[position + n], tile, gates, _NO)
