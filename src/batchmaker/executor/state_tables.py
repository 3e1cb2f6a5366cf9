"""State tables on the CPU: one tensor for each table, addressed by row. Used by the CPU executors."""

from __future__ import annotations

import math
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.arrays import Ints, aligned_zeros
from batchmaker.compile.export import torch_dtype
from batchmaker.core.commands import Reserve, TableId

_BLOCK_BYTES = 1 << 20


class _Table:
    """One table as a tensor, and as an array of the same memory, which is faster to read and write.

    begin, end: the addresses of its memory.
    """

    __slots__ = ("array", "begin", "end", "rows")

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.array = as_array(rows)
        self.begin = rows.data_ptr()
        self.end = self.begin + rows.nbytes


@final
class StateTables:
    """Tables [num_rows, *shape]. A table takes memory only where rows have been written.

    This matters for large values. A table of images, for example, has a row for every node of a network, but only one
    of these rows is written.
    """

    def __init__(self) -> None:
        self._tables: dict[TableId, _Table] = {}
        self._facts = np.zeros((3, 16), np.int64)  # the address of row 0, the number of rows, and the bytes of one

    def must_move(self, command: Reserve) -> bool:
        """Whether `reserve` would copy rows that running steps may be using."""
        return any(spec.table in self._tables and len(self[spec.table]) < command.num_rows for spec in command.tables)

    def reserve(self, command: Reserve) -> None:
        """Create tables, or grow them to at least `num_rows`. Rows keep their values, new rows are zero."""
        for spec in command.tables:
            old = self._tables.get(spec.table)
            if old is not None and len(old.rows) >= command.num_rows:
                continue
            new = untouched_zeros((command.num_rows, *spec.spec.shape), torch_dtype(spec.spec.dtype))
            if old is not None:
                copy_used(old.rows, new)
            self._tables[spec.table] = table = _Table(new)
            if spec.table >= self._facts.shape[1]:
                self._facts = np.concatenate((self._facts, np.zeros((3, spec.table), np.int64)), axis=1)
            self._facts[:, spec.table] = table.begin, command.num_rows, new[:1].nbytes

    @property
    def addresses(self) -> Ints:
        """The address of row 0 of each table, by table number; 0 if there is no such table."""
        addresses: Ints = self._facts[0]
        return addresses

    @property
    def sizes(self) -> Ints:
        """The number of rows of each table."""
        sizes: Ints = self._facts[1]
        return sizes

    @property
    def row_bytes(self) -> Ints:
        """The bytes of a row of each table."""
        row_bytes: Ints = self._facts[2]
        return row_bytes

    def array(self, table: TableId) -> NDArray[Any]:
        """Return the memory of a table as an array, [num_rows, *shape]; bfloat16 as int16."""
        return self._tables[table].array

    def __getitem__(self, table: TableId) -> Tensor:
        return self._tables[table].rows

    @property
    def num_bytes(self) -> int:
        """Bytes of all tables, written or not."""
        return sum(table.rows.nbytes for table in self._tables.values())

    # --- rows in -------------------------------------------------------------------------------------------------

    def write(self, table: TableId, rows: slice | Ints, values: Any) -> None:
        """Write values [count, *shape], a NumPy array or tensor of the table's dtype, into these rows."""
        self._tables[table].array[rows] = values if isinstance(values, np.ndarray) else as_array(values)

    def put(self, table: TableId, rows: slice | Ints, values: NDArray[Any]) -> None:
        """Write values that come from `take` or `as_array`. Their memory must not overlap with these rows."""
        self._tables[table].array[rows] = values

    def clear(self, table: TableId, rows: Ints) -> None:
        """Set rows to zero."""
        self._tables[table].array[rows] = 0

    # --- rows out ------------------------------------------------------------------------------------------------

    def take(self, table: TableId, rows: Ints) -> NDArray[Any]:
        """Return a copy of these rows, for `put`."""
        copied: NDArray[Any] = self._tables[table].array.take(rows, 0)
        return copied

    def take_into(self, table: TableId, rows: Ints, values: NDArray[Any]) -> None:
        """Copy these rows [...] to values [..., *shape], in one pass."""
        self._tables[table].array.take(rows, 0, out=values, mode="clip")

    def copy(self, table: TableId, rows: Ints, padded: int) -> Tensor:
        """Return a copy of these rows as [padded, *shape]. The rows after them are arbitrary but valid."""
        if padded > len(rows):
            wider = np.zeros(padded, np.int64)
            wider[: len(rows)] = rows
            rows = wider
        table_memory = self._tables[table]
        values = torch.from_numpy(table_memory.array.take(rows, 0))
        return values.view(torch.bfloat16) if table_memory.rows.dtype == torch.bfloat16 else values

    def holds(self, table: TableId, values: Tensor) -> bool:
        """Whether these values are memory of a table. This is so if a cell returns one of its inputs unchanged."""
        table_memory = self._tables[table]
        return table_memory.begin <= values.data_ptr() < table_memory.end


def as_array(values: Tensor) -> NDArray[Any]:
    """Return the same memory as an array; of numbers that torch negates when it reads them (`Tensor.is_neg`), a copy.

    bfloat16, which NumPy lacks, becomes int16. No operation of torch, if none is needed: each gives up the interpreter.
    """
    values = values.detach() if values.requires_grad else values
    if values.dtype == torch.bfloat16:
        values = values.resolve_neg().view(torch.int16)
    try:
        array: NDArray[Any] = values.numpy()
    except RuntimeError:
        array = values.resolve_neg().numpy()
    return array


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros whose pages take no memory until they are written. torch.zeros would write all of them."""
    return torch.from_numpy(aligned_zeros((math.prod(shape) * dtype.itemsize,), np.uint8)).view(dtype).view(shape)


def copy_used(old: Tensor, new: Tensor) -> None:
    """Copy rows to the beginning of a larger table of zeros. Blocks of zeros are skipped, so they take no memory."""
    row_bytes = max(1, old[:1].nbytes)
    size = max(1, _BLOCK_BYTES // row_bytes)
    for at in range(0, len(old), size):
        block = old[at : at + size]
        if block.flatten().view(torch.uint8).numpy().any():
            new[at : at + size][: len(block)] = block
