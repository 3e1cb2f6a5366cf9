"""Constant arrays that many requests share, read-only.

Most requests are small, and looking up an array is faster than making one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Ints
from batchmaker.graph.cell_graph import HOST
from batchmaker.graph.values import ValueSequence

MAX_SHARED: Final = 512
"""Longer arrays are made each time. The number of shared ones is limited."""
_ASCENDING: Final = np.arange(1 << 14)


def ascending(first: int, count: int) -> Ints:
    """Return the numbers from `first` on: [count] int64, for reading."""
    end = first + count
    return _ASCENDING[first:end] if first >= 0 and end <= len(_ASCENDING) else np.arange(first, end)


def nodes_of(sequence: ValueSequence) -> Ints:
    """Return the nodes of a sequence: [count] int64, for reading."""
    numbers = sequence.numbers
    if type(numbers) is range and numbers.step == 1:
        return ascending(numbers.start, len(numbers))
    return sequence.nodes


def of_type(type_id: int, count: int) -> NDArray[np.int16]:
    """Return one cell type for each of `count` nodes: [count] int16."""
    return (_of_type if count <= MAX_SHARED else _of_type.__wrapped__)(type_id, count)


def from_host(num_ports: int, count: int) -> tuple[Ints, NDArray[np.int16]]:
    """Return sources and outputs of nodes without source nodes: [num_ports, count] int64, all HOST, and int16 zeros."""
    return (_from_host if count <= MAX_SHARED else _from_host.__wrapped__)(num_ports, count)


@lru_cache(maxsize=1024)
def numbers(values: tuple[int, ...]) -> NDArray[np.int64]:
    """Return numbers as an array [count] int64."""
    return np.array(values, np.int64)


@lru_cache(maxsize=1024)
def one_column(values: tuple[int, ...]) -> NDArray[np.int64]:
    """Return numbers as an array [count, 1] int64."""
    return np.array(values, np.int64).reshape(-1, 1)


@lru_cache(maxsize=4096)
def _of_type(type_id: int, count: int) -> NDArray[np.int16]:
    return np.full(count, type_id, np.int16)


@lru_cache(maxsize=2048)
def _from_host(num_ports: int, count: int) -> tuple[Ints, NDArray[np.int16]]:
    return np.full((num_ports, count), HOST), np.zeros((num_ports, count), np.int16)
