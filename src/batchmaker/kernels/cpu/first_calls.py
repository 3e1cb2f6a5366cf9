"""Calls every loop of a recurrent step once, without any work, so that it is compiled or loaded. Needs no torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from batchmaker.kernels.cpu.steps import (
    BLOCK,
    COPY_FIELDS,
    NUM_ADDRESSES,
    begin_step,
    begin_task,
    end_step,
    note_copy,
    run_steps,
)
from batchmaker.kernels.cpu.tile_steps import LSTM


def float32() -> None:
    """Compile or load the loops for states and weights in float32."""
    _call(np.float32)


def bfloat16() -> None:
    """Compile or load the loops for states and weights in bfloat16, whose bits are given as int16."""
    _call(np.int16)


def _call(dtype: Any) -> None:
    none, flags = np.zeros(0, np.int64), np.zeros(0, np.bool_)
    rows, floats, row = np.zeros((1, 1), dtype), np.zeros((1, 1), np.float32), np.zeros(1, np.float32)
    addresses, ways = np.zeros(NUM_ADDRESSES, np.int64), np.zeros(BLOCK + 1, np.int64)
    copies, keeps, moves = np.zeros((0, COPY_FIELDS), np.int64), (none,) * 4, (none,) * 5
    state, room, source = (rows, rows), (floats, floats, rows, row), (none, none, none)
    note_copy(np.zeros((1, COPY_FIELDS), np.int64), 0, 0, none, rows)
    run_steps(
        LSTM, (none, flags, none), source, rows, state, none, moves, keeps, copies, (rows, row, addresses, ways), room
    )
    begin_task(flags, source, 1, state, none, keeps, copies)
    begin_step(LSTM, 0, 0, 0, none, none, moves, state, rows)
    end_step(LSTM, 0, 0, none, none, rows, state, copies, row, rows, room)
