"""NumPy arrays by their dtype, for annotations, whose shapes are said where they are used; and what makes arrays."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Float32s = NDArray[np.float32]
Floats = NDArray[np.float64]

LINE: Final = 64
"""Bytes of a cache line, and of the widest vector."""


def aligned_zeros(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return zeros that begin at a cache line; pages take no memory until they are written.

    NumPy's own begin 16 bytes into one where they are large, so that every second vector of 32 bytes lies in two lines.
    """
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(num_bytes + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    zeros: NDArray[Any] = memory[start : start + num_bytes].view(dtype).reshape(shape)
    return zeros


def spans(firsts: Ints, counts: Ints) -> Ints:
    """Return counts[i] numbers from firsts[i] on for each i, one after the other: [sum of counts]. Both are [spans]."""
    numbers: Ints = np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
    return numbers
