"""What a worker of bulk work does with one block, without Ray."""

from __future__ import annotations

import json

import msgspec
import pytest
import torch
from served_models import Scales

import batchmaker as bm
from batchmaker.fleet.blocks import cut_into_blocks, find_files, part_of
from batchmaker.fleet.bulk import BulkWorker
from insides import as_plain


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "scales"
    bm.save(Scales(), folder)
    return str(folder)


def computed(model, tmp_path, rows, **options):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files, form = find_files(tmp_path / "in.jsonl")
    (block,) = cut_into_blocks(files, form, 1000)
    asked = {"column": "numbers", "result": "result", "on_error": "raise", **options}
    plan = {"model": model, "form": form, "out": str(tmp_path), "folder": str(tmp_path), "options": {}, **asked}
    worker = BulkWorker(msgspec.json.encode(plan))
    try:
        counts = worker({"block": [msgspec.json.encode(block)]})
    finally:
        worker.close()
    part = part_of(tmp_path, 0, form)
    return counts, [json.loads(line) for line in part.read_text().splitlines()] if part.exists() else []


def test_a_block_is_computed_and_written(model, tmp_path):
    counts, rows = computed(model, tmp_path, [{"id": n, "numbers": [n, 1]} for n in range(9)])
    assert counts == {"rows": [9], "failed": [0], "error": [""]}
    assert rows == [{"id": n, "numbers": [n, 1], "result": [n * n + 1.0]} for n in range(9)]


def test_a_failing_row_fails_alone_or_ends_it(model, tmp_path):
    rows = [{"numbers": [1]}, {"numbers": [77]}, {"numbers": [2]}]
    counts, written = computed(model, tmp_path, rows)
    assert (counts["error"][0].partition(":")[0], written) == ("CellError", [])
    counts, written = computed(model, tmp_path, rows, on_error="column")
    assert counts == {"rows": [3], "failed": [1], "error": [""]}
    assert [(row["result"], row["error"] is None) for row in written] == [([1.0], True), (None, False), ([4.0], True)]


def test_missing_and_taken_columns_are_named(model, tmp_path):
    for wrong, message in (
        ({"column": "words"}, "no column 'words'; it has numbers"),
        ({"result": "numbers"}, "column 'numbers' already"),
    ):
        counts, written = computed(model, tmp_path, [{"numbers": [1]}], **wrong)
        assert counts["error"][0].startswith("DataError: ")
        assert message in counts["error"][0]
        assert written == []


def test_a_parameter_is_a_result_as_any_other_tensor():
    parameter = torch.nn.Parameter(torch.tensor([0.1, 2.0]))
    assert msgspec.json.encode(as_plain(parameter, "jsonl")) == b"[0.1,2.0]"
    assert as_plain(parameter.bfloat16(), "parquet") == [0.10009765625, 2.0]
