"""State tables: rows in, rows out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from batchmaker.core.commands import Reserve, TableId, TableSpec
from batchmaker.executor.state_tables import StateTables
from batchmaker.graph.spec import ValueSpec

TABLE = TableId(1)


def tables(dtype: str = "float32", num_rows: int = 8) -> StateTables:
    made = StateTables()
    made.reserve(Reserve((TableSpec(TABLE, ValueSpec((2,), dtype)),), num_rows))
    made.write(TABLE, slice(0, num_rows), torch.arange(2.0 * num_rows).reshape(num_rows, 2).to(getattr(torch, dtype)))
    return made


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_what_was_taken_can_be_put_elsewhere(dtype: str) -> None:
    made = tables(dtype)
    made.put(TABLE, rows(0, 7), made.take(TABLE, rows(7, 3)))
    made.clear(TABLE, rows(1))
    assert made[TABLE].tolist() == [[14, 15], [0, 0], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [6, 7]]


def test_a_copy_has_valid_rows_where_it_is_padded_and_a_table_knows_its_own() -> None:
    made = tables("bfloat16")
    batch = made.copy(TABLE, rows(3, 4), 4)
    assert batch.dtype == torch.bfloat16
    assert batch.tolist() == [[6, 7], [8, 9], [0, 1], [0, 1]]
    assert not made.holds(TABLE, batch)
    assert made.holds(TABLE, made[TABLE][7:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "float64"])
def test_growth_keeps_every_value_and_adds_zeros(dtype: str) -> None:
    made = tables(dtype)
    before = made[TABLE].clone()
    grow = Reserve((TableSpec(TABLE, ValueSpec((2,), dtype)),), 20)
    assert made.must_move(grow)
    made.reserve(grow)
    assert not made.must_move(grow)
    assert torch.equal(made[TABLE][:8], before)
    assert not made[TABLE][8:].any()
    assert made.num_bytes == made[TABLE].nbytes
    made.reserve(Reserve((TableSpec(TABLE, ValueSpec((2,), dtype)),), 4))
    assert len(made[TABLE]) == 20


def test_arrays_are_written_into_the_grown_table() -> None:
    made = tables()
    made.reserve(Reserve((TableSpec(TABLE, ValueSpec((2,), "float32")),), 16))
    made.write(TABLE, slice(14, 16), np.array([[5, 6], [7, 8]], np.float32))
    assert made[TABLE][14:].tolist() == [[5, 6], [7, 8]]


@pytest.mark.parametrize("values", [np.array([[5, 6], [7, 8]], np.float32), torch.tensor([[5.0, 6.0], [7.0, 8.0]])])
def test_rows_that_do_not_follow_each_other_are_written_at_once(values: Any) -> None:
    made = tables()
    made.write(TABLE, rows(1, 6), values)
    assert made[TABLE].tolist() == [[0, 1], [5, 6], [4, 5], [6, 7], [8, 9], [10, 11], [7, 8], [14, 15]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_large_tables_take_memory_only_where_rows_are_written(dtype: str) -> None:
    made, spec = StateTables(), TableSpec(TABLE, ValueSpec((1 << 20,), dtype))
    made.reserve(Reserve((spec,), 64))
    ones = torch.ones((1, 1 << 20), dtype=getattr(torch, dtype))
    made.write(TABLE, slice(40, 41), ones)
    before = resident_bytes()
    made.reserve(Reserve((spec,), 512))
    assert resident_bytes() - before < 64 << 20
    assert torch.equal(made[TABLE][40:41], ones)
    assert made[TABLE].data_ptr() % 64 == 0
    assert not made[TABLE][41].any()


def resident_bytes() -> int:
    """Memory that this process has now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
