"""Rows of tables on devices: where they are, how they come to where they are read, what is left of a lost device."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import FakeDevice

from batchmaker.core.commands import Reserve, TableId, TableSpec
from batchmaker.errors import DeviceError
from batchmaker.executor.cuda.place import Place
from batchmaker.executor.cuda.state_tables import DeviceTables
from batchmaker.graph.spec import ValueSpec

TABLE = TableId(1)


def tables(num_devices: int, dtype: str = "float32", rows: int = 4) -> tuple[DeviceTables, list[Place]]:
    places = [Place(number, FakeDevice(f"fake {number}")) for number in range(num_devices)]
    made = DeviceTables(places)
    made.reserve(Reserve((TableSpec(TABLE, ValueSpec((2,), dtype)),), rows))
    return made, places


def put(made: DeviceTables, place: Place, row: int, values: list[float]) -> None:
    """Write a row as a step on the place would."""
    (address,) = made.targets(place, TABLE, np.array([row])).tolist()
    place.device.stop()
    ctypes.memmove(address, np.array(values, np.float32).ctypes.data, 8)


def seen(address: int) -> list[float]:
    return np.frombuffer((ctypes.c_char * 8).from_address(address), np.float32).tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64"])
def test_what_comes_with_requests_is_read_where_it_was_put(dtype: str) -> None:
    made, (place,) = tables(1, dtype)
    given: Any = torch.tensor([[1, 2], [3, 4]]).to(getattr(torch, dtype))
    made.write(TABLE, slice(1, 3), given if dtype == "bfloat16" else given.numpy())
    size = given[0].nbytes
    first, second = made.sources(place, TABLE, np.array([1, 2])).tolist()
    assert second - first == size
    assert made.read(TABLE, 2).tolist() == [3, 4]


def test_rows_keep_their_values_when_a_table_grows() -> None:
    made, (place,) = tables(1)
    put(made, place, 3, [5.0, 6.0])
    made.reserve(Reserve((TableSpec(TABLE, ValueSpec((2,), "float32")),), 400))
    (address,) = made.sources(place, TABLE, np.array([3])).tolist()
    place.device.stop()
    assert seen(address) == [5.0, 6.0]
    assert made.num_bytes == 400 * 8


def test_a_value_from_the_host_is_where_a_step_would_have_written_it() -> None:
    made, (one, other) = tables(2)
    put(made, one, 2, [7.0, 8.0])
    made.sources(other, TABLE, np.array([2]))
    made.put(TABLE, 2, torch.tensor([1.0, 2.0]), one)
    for place in (one, other):  # the other's copy is old now
        (address,) = made.sources(place, TABLE, np.array([2])).tolist()
        place.device.stop()
        assert seen(address) == [1.0, 2.0]
    assert made.read(TABLE, 2).tolist() == [1.0, 2.0]


def test_a_row_is_copied_to_a_device_that_lacks_it_and_only_then() -> None:
    made, (one, other) = tables(2)
    put(made, one, 2, [7.0, 8.0])
    for _ in range(2):
        (address,) = made.sources(other, TABLE, np.array([2])).tolist()
        other.device.stop()
        assert seen(address) == [7.0, 8.0]
    assert other.device.num_rows_copied == 1
    put(made, one, 2, [9.0, 9.0])  # the other's copy is old now
    (address,) = made.sources(other, TABLE, np.array([2])).tolist()
    other.device.stop()
    assert seen(address) == [9.0, 9.0]
    assert other.device.num_rows_copied == 2


def test_what_only_a_lost_device_held_is_missing_and_the_rest_is_not() -> None:
    made, (one, other) = tables(2)
    put(made, one, 0, [1.0, 1.0])
    put(made, one, 1, [2.0, 2.0])
    made.sources(other, TABLE, np.array([1]))
    other.device.stop()
    made.lose(one)
    assert (made.sources(other, TABLE, np.array([0, 1])) != 0).tolist() == [False, True]
    assert made.read(TABLE, 1).tolist() == [2.0, 2.0]
    with pytest.raises(DeviceError, match="lost"):
        made.read(TABLE, 0)


def test_tables_in_use_have_addresses_and_new_ones_when_they_have_grown() -> None:
    made, (place,) = tables(1)
    other, host = TableId(2), TableId(7)
    made.reserve(Reserve((TableSpec(other, ValueSpec((3,), "int64")), TableSpec(host, ValueSpec((), "int64"))), 4))
    made.write(host, slice(0, 1), np.array([5]))
    bases = made.bases(place, np.array([0, -1, int(TABLE)]))
    assert [bool(base) for base in bases[[0, 1, 2, 7]]] == [False, True, False, True]
    assert made.row_bytes[[0, 1, 2, 7]].tolist() == [0, 8, 24, 8]
    assert made.sources(place, TABLE, np.array([1])) == bases[1] + 8
    made.reserve(Reserve((TableSpec(TABLE, ValueSpec((2,), "float32")),), 400))
    before, bases = int(bases[1]), made.bases(place, np.array([1, 2]))
    assert bases[1] != before
    assert bases[2] != 0
    made.lose(place)
    assert made.bases(place).tolist() == [0] * len(bases)


def test_rows_of_no_bytes_need_no_address() -> None:
    made, (place,) = tables(1)
    made.reserve(Reserve((TableSpec(TableId(2), ValueSpec((0,), "float32")),), 4))
    assert made.bases(place, np.array([2]))[2] == 0


def test_held_memory_comes_back_when_its_step_has_finished_and_not_before() -> None:
    (place,) = (Place(0, FakeDevice()),)
    block = place.take(100)
    place.hold(block)
    place.release(place.num_finished)
    assert place.take(100).ctypes.data != block.ctypes.data
    place.num_submitted = 1
    ctypes.c_int64.from_address(place.counter_address).value = 1
    place.release(place.num_finished)
    assert place.take(100).ctypes.data == block.ctypes.data
