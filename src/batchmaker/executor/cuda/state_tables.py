"""State tables on devices. Every device has its own copy of a table, with the rows that were written or copied there.

Data that came with requests is in pinned host memory, where every device reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.arrays import Ints
from batchmaker.compile.export import row_bytes, torch_dtype
from batchmaker.compiled import compiled
from batchmaker.core.commands import ZERO_TABLE, Reserve, TableId
from batchmaker.errors import DeviceError
from batchmaker.executor.cuda.place import Place
from batchmaker.graph.spec import ValueSpec

_ZERO: Final = int(ZERO_TABLE)


@final
class DeviceTables:
    """The rows of all tables, as addresses on devices or in host memory.

    places: the devices, by number. With several devices, it is noted for each row which devices hold it. If a device
    needs a row that it does not hold, the row is copied there first. A row that only a lost device held is missing.
    row_bytes: [tables] the bytes of a row of each table.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self._lost: set[int] = set()
        self._specs: dict[TableId, ValueSpec] = {}
        self._num_rows: dict[TableId, int] = {}
        self._host: dict[TableId, Tensor] = {}
        self._parts: list[dict[TableId, Tensor]] = [{} for _ in places]
        self._holders: dict[TableId, NDArray[np.uint64]] = {}
        self._bases: list[Ints] = [np.zeros(1, np.int64) for _ in places]
        self.row_bytes: Ints = np.zeros(1, np.int64)

    @property
    def num_bytes(self) -> int:
        """Bytes of tables on all devices and in pinned memory."""
        return sum(tensor.nbytes for part in (*self._parts, self._host) for tensor in part.values())

    def reserve(self, command: Reserve) -> None:
        """Give tables at least `num_rows` rows, which keep their values. Memory is taken at the next use."""
        for spec in command.tables:
            table, old = spec.table, self._num_rows.get(spec.table, 0)
            if old >= command.num_rows:
                continue
            self._specs[table] = spec.spec
            self._num_rows[table] = command.num_rows
            self._note_growth(table)
            if table in self._holders:
                fresh = np.zeros(command.num_rows - old, np.uint64)
                self._holders[table] = np.concatenate((self._holders[table], fresh))

    def write(self, table: TableId, rows: slice | Ints, values: Any) -> None:
        """Write data of a request, [count, *shape], into rows that no submitted step reads."""
        if table not in self._host or len(self._host[table]) < self._num_rows[table]:
            self._grow_host(table)
        source = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
        self._host[table][rows] = source

    def bases(self, place: Place, *used: Ints) -> Ints:
        """Return the address of the first row of each table on a place, [tables].

        used: ids of tables, [n]; these have memory now. Only with one device is this all that there is to do.
        """
        bases = self._bases[place.number]
        for tables in used:
            while table := _without_memory(tables, bases, self.row_bytes):
                bases[table] = self._part(place, TableId(table)).data_ptr()
        return bases

    def sources(self, place: Place, table: TableId, rows: Ints) -> Ints:
        """Return the addresses of these rows for a place; 0 for missing rows. Rows that it lacks are copied there."""
        size = row_bytes(self._specs[table])
        if table in self._host:
            return self._host[table].data_ptr() + rows * size
        addresses = self._part(place, table).data_ptr() + rows * size
        if len(self._places) > 1:
            held = self._bring(place, table, rows)
            addresses[held == 0] = 0
        return addresses

    def targets(self, place: Place, table: TableId, rows: Ints) -> Ints:
        """Return the addresses to which a place writes these rows. From its next step on it alone holds them."""
        if len(self._places) > 1:
            self._holders_of(table)[rows] = self._bit(place)
        return self._part(place, table).data_ptr() + rows * row_bytes(self._specs[table])

    def put(self, table: TableId, row: int, value: Tensor, place: Place) -> None:
        """Write a value from the host into a row, which this place alone holds then."""
        self.targets(place, table, np.array([row]))
        part = self._part(place, table)
        place.device.compute(lambda: (part[row].copy_(value),))
        place.hold((part, value))

    def read(self, table: TableId, row: int) -> Tensor:
        """Return a copy of a row on the host. DeviceError if it is missing."""
        if table in self._host:
            return self._host[table][row].clone()
        for place in self._places:
            here = len(self._places) == 1 or self._holders_of(table)[row] & self._bit(place)
            if here and table in self._parts[place.number]:
                return place.device.read(self._parts[place.number][table][row])
        raise DeviceError("what was asked for was on a device that has been lost")

    def lose(self, place: Place) -> None:
        """Note that a place has failed. Rows that it alone held are missing from now on, and its steps never finish."""
        self._lost.add(place.number)
        place.abandon()
        for holders in self._holders.values():
            holders &= ~self._bit(place)
        self._parts[place.number].clear()
        self._bases[place.number][:] = 0

    # --- inside ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _bit(place: Place) -> np.uint64:
        return np.uint64(1 << place.number)

    def _note_growth(self, table: TableId) -> None:
        """A table has more rows than its memory on devices: it has no address there until this has grown."""
        self.row_bytes = _long_enough(self.row_bytes, table)
        self.row_bytes[table] = row_bytes(self._specs[table])
        self._bases = [_long_enough(bases, table) for bases in self._bases]
        if table not in self._host:
            for bases in self._bases:
                bases[table] = 0

    def _holders_of(self, table: TableId) -> NDArray[np.uint64]:
        if table not in self._holders:
            self._holders[table] = np.zeros(self._num_rows[table], np.uint64)
        return self._holders[table]

    def _part(self, place: Place, table: TableId) -> Tensor:
        part = self._parts[place.number].get(table)
        return self._grow(place, table) if part is None or len(part) < self._num_rows[table] else part

    def _grow(self, place: Place, table: TableId) -> Tensor:
        """Make room for all rows on a device. Steps submitted before still use the old memory, so it is held."""
        spec, part = self._specs[table], self._parts[place.number]
        new = place.device.zeros((self._num_rows[table], *spec.shape), torch_dtype(spec.dtype))
        old = part.get(table)
        if old is not None:
            place.device.compute(lambda: (new[: len(old)].copy_(old),))
            place.hold((old, new))
        part[table] = new
        self._bases[place.number][table] = new.data_ptr()
        return new

    def _grow_host(self, table: TableId) -> None:
        spec, num_rows = self._specs[table], self._num_rows[table]
        num_bytes = num_rows * row_bytes(spec)
        living = [place for place in self._places if place.number not in self._lost]
        block = living[0].device.pinned(num_bytes) if living else np.zeros(num_bytes, np.uint8)
        new = torch.from_numpy(block).view(torch_dtype(spec.dtype)).view(num_rows, *spec.shape)
        old = self._host.get(table)
        if old is not None:
            new[: len(old)] = old
            for place in living:
                place.hold(old)
        self._host[table] = new
        for bases in self._bases:
            bases[table] = new.data_ptr()

    def _bring(self, place: Place, table: TableId, rows: Ints) -> NDArray[np.uint64]:
        """Copy to a place the rows that it lacks and others hold. Returns the holders of each row: a bit per place."""
        holders = self._holders_of(table)
        held, bit = holders[rows], self._bit(place)
        lacking = np.unique(rows[(held != 0) & (held & bit == 0)])
        for other in self._places:
            if len(lacking) == 0:
                break
            there = holders[lacking] & self._bit(other) != 0
            if there.any():
                source, target = self._parts[other.number][table], self._part(place, table)
                place.device.copy_rows(other.device, source, lacking[there], target)
                place.hold(source)
                other.hold(source)
                holders[lacking[there]] |= bit
                lacking = lacking[~there]
        return holders[rows]


def _long_enough(values: Ints, table: TableId) -> Ints:
    """Return the values, one for each table, with room for this one."""
    return values if table < len(values) else np.concatenate((values, np.zeros(table + 1, np.int64)))


@compiled
def _without_memory(tables: Ints, bases: Ints, row_bytes: Ints) -> int:
    """Return the first of these tables that has no address and needs one, the zero table if there is none.

    What is below the zero table is no table. Rows of no bytes have no address.
    """
    for table in tables:
        if table > _ZERO and bases[table] == 0 and row_bytes[table] > 0:
            return int(table)
    return _ZERO
