"""Files of rows, cut into blocks."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from batchmaker.errors import DataError, OptionError
from batchmaker.fleet.blocks import cut_into_blocks, find_files, json_text, part_of, read_block, write_part


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4), block_rows=st.integers(1, 5))
def test_blocks_of_json_lines_hold_all_rows_in_their_order(tmp_path_factory, sizes, block_rows):
    folder, rows = tmp_path_factory.mktemp("in"), []
    for number, size in enumerate(sizes):
        mine = [{"n": len(rows) + n, "text": "ä" * n} for n in range(size)]
        (folder / f"{number}.jsonl").write_text(lines(mine).replace("\n", "\n\n", number))
        rows += mine
    files, form = find_files(folder)
    blocks = cut_into_blocks(files, form, block_rows)
    assert [block.number for block in blocks] == list(range(len(blocks)))
    assert all(0 < block.num_rows <= block_rows for block in blocks)
    assert [row for block in blocks for row in read_block(block, form)] == rows


def test_blocks_of_parquet_hold_all_rows_in_their_order(tmp_path):
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    rows = [{"n": n, "words": list(range(n % 4))} for n in range(50)]
    parquet.write_table(arrow.Table.from_pylist(rows[:30]), tmp_path / "a.parquet", row_group_size=7)
    parquet.write_table(arrow.Table.from_pylist(rows[30:]), tmp_path / "b.parquet")
    files, form = find_files(tmp_path)
    blocks = cut_into_blocks(files, form, 8)
    assert [block.num_rows for block in blocks] == [8, 8, 8, 6, 8, 8, 4]
    assert [row for block in blocks for row in read_block(block, form)] == rows
    write_part(tmp_path, 3, form, rows)
    assert parquet.read_table(part_of(tmp_path, 3, form)).to_pylist() == rows


def test_a_part_is_there_only_when_it_is_whole(tmp_path):
    with pytest.raises(TypeError):
        write_part(tmp_path, 0, "jsonl", [{"n": 1}, {"n": object()}])
    assert not part_of(tmp_path, 0, "jsonl").exists()
    write_part(tmp_path, 0, "jsonl", [{"n": 1}])
    assert part_of(tmp_path, 0, "jsonl").read_text() == '{"n":1}\n'


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        find_files(tmp_path / "nothing")
    with pytest.raises(DataError, match="expected one of"):
        find_files(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"n": 1}\nnonsense\n')
    files, form = find_files(tmp_path / "a.jsonl")
    with pytest.raises(OptionError, match="block_rows"):
        cut_into_blocks(files, form, 0)
    (block,) = cut_into_blocks(files, form, 10)
    with pytest.raises(DataError, match="not JSON lines"):
        read_block(block, form)


@given(
    arrays(st.sampled_from(["f2", "f4", "f8", "i1", "i8", "u1", "?"]), array_shapes(min_dims=0, max_dims=3, min_side=0))
)
def test_an_array_as_json_is_read_back_as_the_same_numbers(array):
    for seen in (array, array.T):
        read = np.array(msgspec.json.decode(msgspec.json.encode([json_text(seen)]))[0], dtype=seen.dtype)
        finite = np.isfinite(seen)
        assert np.array_equal(read.reshape(seen.shape)[finite], seen[finite])


def test_numbers_that_are_not_finite_are_null():
    assert (
        msgspec.json.encode({"n": json_text(np.array([np.nan, 0.1, -np.inf], np.float32))}) == b'{"n":[null,0.1,null]}'
    )
