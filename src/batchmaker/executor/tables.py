"""State tables on the CPU: one tensor per table, addressed by row."""

from __future__ import annotations

import math
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.cells.export import torch_dtype
from batchmaker.graph.spec import ValueSpec
from batchmaker.scheduler.commands import ZERO_TABLE, Reserve, Source, TableId

Rows = NDArray[np.int64]

_ALIGNMENT = 64
_BLOCK_BYTES = 1 << 20


@final
class StateTables:
    """Tables [num_rows, *shape]. Room is made once per doubling, and takes memory only where rows have been written.

    An image has a row for every node of its network, of which one is written.
    """

    def __init__(self) -> None:
        self._tensors: dict[TableId, Tensor] = {}
        self._arrays: dict[TableId, NDArray[Any]] = {}

    def must_move(self, command: Reserve) -> bool:
        """Whether serving the command copies rows that running steps may be using."""
        return any(
            spec.table in self._tensors and len(self._tensors[spec.table]) < command.num_rows for spec in command.tables
        )

    def reserve(self, command: Reserve) -> None:
        """Create or grow tables to at least `num_rows`; rows keep their values, new ones are zero."""
        for spec in command.tables:
            old = self._tensors.get(spec.table)
            if old is not None and len(old) >= command.num_rows:
                continue
            new = untouched_zeros((command.num_rows, *spec.spec.shape), torch_dtype(spec.spec.dtype))
            if old is not None:
                copy_used(old, new)
            self._tensors[spec.table] = new
            if new.dtype != torch.bfloat16:
                self._arrays[spec.table] = new.numpy()

    def __getitem__(self, table: TableId) -> Tensor:
        return self._tensors[table]

    @property
    def num_bytes(self) -> int:
        """Bytes allocated, touched or not."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def write(self, table: TableId, first_row: int, values: Any) -> None:
        """Write values [count, *shape], a NumPy array or tensor of the table's dtype, into consecutive rows."""
        if isinstance(values, np.ndarray):
            self._arrays[table][first_row : first_row + len(values)] = values
        else:
            self._tensors[table][first_row : first_row + len(values)] = values

    def gather(self, sources: tuple[Source, ...], count: int, padded: int, spec: ValueSpec) -> Tensor:
        """Return one input of a batch as [padded, *shape]; rows from `count` on are arbitrary but valid.

        Consecutive rows of one table come back as a view of it, anything else as a copy.
        """
        if len(sources) == 1 and sources[0].positions is None:
            source = sources[0]
            if source.table != ZERO_TABLE:
                return self._rows(source.table, source.rows, padded)
        batch = torch.zeros((padded, *spec.shape), dtype=torch_dtype(spec.dtype))
        for source in sources:
            if source.table != ZERO_TABLE and source.positions is not None:
                values = self._tensors[source.table].index_select(0, torch.from_numpy(source.rows))
                batch.index_copy_(0, torch.from_numpy(source.positions), values)
        return batch

    def _rows(self, table: TableId, rows: Rows, padded: int) -> Tensor:
        tensor = self._tensors[table]
        first, count = int(rows[0]), len(rows)
        if int(rows[-1]) - first == count - 1 and first + padded <= len(tensor) and _ascending(rows):
            return tensor.narrow(0, first, padded)
        if padded > count:
            wider = np.zeros(padded, np.int64)
            wider[:count] = rows
            rows = wider
        return tensor.index_select(0, torch.from_numpy(rows))


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros whose pages take no memory before they are written; torch.zeros writes them all."""
    num_bytes = math.prod(shape) * dtype.itemsize
    block = torch.from_numpy(np.zeros(num_bytes + _ALIGNMENT, np.uint8))
    start = -block.data_ptr() % _ALIGNMENT
    return block[start : start + num_bytes].view(dtype).view(shape)


def copy_used(old: Tensor, new: Tensor) -> None:
    """Copy rows to the beginning of a larger table of zeros, but for blocks of zeros: they would take memory."""
    row_bytes = max(1, old[:1].nbytes)
    size = max(1, _BLOCK_BYTES // row_bytes)
    for at in range(0, len(old), size):
        block = old[at : at + size]
        if block.flatten().view(torch.uint8).numpy().any():
            new[at : at + size][: len(block)] = block


def _ascending(rows: Rows) -> bool:
    """Whether rows count up by one; the caller knows that the ends fit."""
    return len(rows) < 3 or bool((rows[1:] - rows[:-1] == 1).all())
