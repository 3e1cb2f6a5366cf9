"""The rows of a step, each way in one compiled call: its inputs out of state tables, its outputs into them."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from batchmaker.arrays import Ints
from batchmaker.compile.export import row_bytes, torch_dtype
from batchmaker.compiled import compiled, config
from batchmaker.core.commands import ZERO_TABLE, TableId
from batchmaker.executor.state_tables import StateTables
from batchmaker.graph.spec import ValueSpec
from batchmaker.kernels.cpu import machine

MOST_COPIED: Final = 1 << 20
"""Bytes. Inputs of a step that take more are not copied if they stand together in a table, and have room of their own
in each step. Smaller ones are copied: a view costs as much, and their room is used again."""

ZERO: Final = int(ZERO_TABLE)
_COPIED: Final = -1

copy_bytes: Any = machine.copy_bytes
zero_bytes: Any = machine.zero_bytes
if config.DISABLE_JIT:  # the same without a compiler

    def copy_bytes(target: int, source: int, count: int) -> None:
        ctypes.memmove(int(target), int(source), int(count))

    def zero_bytes(target: int, count: int) -> None:
        ctypes.memset(int(target), 0, int(count))


@final
@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of a step, [padded, *shape] each. room: the memory of those that are copies, with its addresses."""

    values: tuple[Tensor, ...]
    room: tuple[tuple[Tensor, ...], Ints]


@final
class InputReader:
    """Reads inputs of the steps of a cell. Threads may read at once.

    specs: of one row of each. first: the number of the first of these inputs among all of the cell.
    """

    def __init__(self, specs: Sequence[ValueSpec], first: int = 0) -> None:
        self._first = first
        self._forms = [(spec.shape, torch_dtype(spec.dtype)) for spec in specs]
        self._row_bytes = np.array([row_bytes(spec) for spec in specs], np.int64)
        self._num_bytes = int(self._row_bytes.sum())
        self._rooms: defaultdict[int, list[tuple[tuple[Tensor, ...], Ints]]] = defaultdict(list)  # by padded rows

    def read(self, tables: StateTables, of: Ints, rows: Ints, begin: int, end: int, padded: int) -> Inputs:
        """Return the inputs of some positions. Rows after theirs repeat the first. `leave` follows, if ever.

        of, rows: [inputs of the cell, positions] the table and the row of each. padded: rows of the result. IndexError
        if a table lacks a row.
        """
        is_large = padded * self._num_bytes > MOST_COPIED
        try:
            room = self._rooms[padded].pop()  # in one operation
        except IndexError:
            values = tuple([torch.empty((padded, *shape), dtype=dtype) for shape, dtype in self._forms])
            room = values, np.array([one.data_ptr() for one in values], np.int64)
        firsts = bring(
            np.ascontiguousarray(of),
            np.ascontiguousarray(rows),
            self._first,
            begin,
            end,
            padded,
            self._row_bytes,
            tables.addresses,
            tables.sizes,
            room[1],
            is_large,
        )
        if not is_large:
            return Inputs(room[0], room)
        together = [
            copy if first < 0 else tables[TableId(of.item(port, begin))].narrow(0, first, padded)
            for port, (copy, first) in enumerate(zip(room[0], firsts.tolist(), strict=True), start=self._first)
        ]
        return Inputs(tuple(together), room)

    def leave(self, inputs: Inputs) -> None:
        """Let other steps have the memory of inputs, which nobody may look at any more."""
        padded = len(inputs.room[0][0]) if self._forms else 0
        if self._forms and padded * self._num_bytes <= MOST_COPIED:
            self._rooms[padded].append(inputs.room)


@compiled
def bring(
    of: Ints,
    rows: Ints,
    first: int,
    begin: int,
    end: int,
    padded: int,
    row_bytes: Ints,
    tables: Ints,
    sizes: Ints,
    room: Ints,
    may_stay: bool,
) -> Ints:
    """Copy the rows of inputs from tables to their room; those after `end` repeat the one of `begin`.

    of, rows: [inputs of the cell, positions]. first: the first of the inputs that are read, of which row_bytes and room
    [inputs] have the bytes of a row, and the address. tables, sizes: of each table the address and the
    number of rows. may_stay: leave rows where they are that stand together in one table.

    Returns, of each input, the first row if they stay; otherwise a number below 0.
    """
    stay = np.full(len(row_bytes), _COPIED)
    for k in range(len(row_bytes)):
        port, size = first + k, row_bytes[k]
        table, row = of[port, begin], rows[port, begin]
        if may_stay and table != ZERO and row + padded <= sizes[table]:
            together = True
            for p in range(begin + 1, end):
                together &= of[port, p] == table and rows[port, p] == row + p - begin
            if together:
                stay[k] = row
                continue
        for i in range(padded):
            p = begin + i if begin + i < end else begin
            table, row = of[port, p], rows[port, p]
            if table == ZERO:
                zero_bytes(room[k] + i * size, size)
                continue
            if table < 0 or table >= len(sizes) or row < 0 or row >= sizes[table]:
                raise IndexError("a step reads a row that its table does not have")
            copy_bytes(room[k] + i * size, tables[table] + row * size, size)
    return stay


def keep_rows(
    tables: StateTables, numbers: tuple[TableId, ...], outputs: Sequence[Tensor], at: Ints, rows: Ints
) -> None:
    """Write rows `at` of each output into these rows of its table. An output may be memory of a table itself.

    outputs: [n, *shape] each. at, rows: [rows]. IndexError if an output or a table lacks a row.
    """
    own = [values.to(tables[of].dtype).resolve_neg().contiguous() for of, values in zip(numbers, outputs, strict=True)]
    if not _keep(tables, numbers, own, at, rows):
        _keep(tables, numbers, [values.clone() for values in own], at, rows)


def _keep(tables: StateTables, numbers: tuple[TableId, ...], outputs: Sequence[Tensor], at: Ints, rows: Ints) -> bool:
    facts = [(number, values.data_ptr(), values.nbytes) for number, values in zip(numbers, outputs, strict=True)]
    of, addresses, sizes = np.array(facts, np.int64).reshape(-1, 3).T.copy()
    return keep(of, addresses, sizes, at, rows, tables.addresses, tables.sizes, tables.row_bytes)


@compiled
def keep(
    of: Ints, values: Ints, num_bytes: Ints, at: Ints, rows: Ints, tables: Ints, sizes: Ints, row_bytes: Ints
) -> bool:
    """Copy rows `at` of outputs to `rows` of their tables. False, with nothing copied, if one lies in such a table.

    of, values, num_bytes: [outputs] table, address, and size. tables, sizes, row_bytes: of each table its address, its
    number of rows, and the bytes of one.
    """
    for k in range(len(of)):
        for other in of:
            if tables[other] <= values[k] < tables[other] + sizes[other] * row_bytes[other]:
                return False
    for k in range(len(of)):
        table, size = of[k], row_bytes[of[k]]
        for i in range(len(at)):
            if at[i] < 0 or (at[i] + 1) * size > num_bytes[k] or rows[i] < 0 or rows[i] >= sizes[table]:
                raise IndexError("a step writes a row that its table, or its output, does not have")
            copy_bytes(tables[table] + rows[i] * size, values[k] + at[i] * size, size)
    return True


def prepare() -> None:
    """Compile the loops, or load them."""
    none, tables = np.zeros(0, np.int64), np.zeros((1, 1), np.int64)
    bring(tables, tables, 0, 0, 1, 1, none, none, none, none, False)
    keep(none, none, none, none, none, none, none, none)
