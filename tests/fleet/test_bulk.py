"""Bulk work on Ray Data: in order, and after a crash only what is missing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from served_models import Counter, Scales

import batchmaker as bm
from batchmaker import fleet
from batchmaker.errors import DataError, InvalidRequestError, OptionError
from batchmaker.fleet.blocks import part_of
from waiting import wait_until

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("default")]
ROWS = [{"id": n, "numbers": [n % 9, 1, n % 3]} for n in range(95)]


def expected(row):
    return float(sum(number**2 for number in row["numbers"]))


@pytest.fixture(scope="module", autouse=True)
def cluster(models_in_reach):
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    bm.save(Counter(), folder / "counter")
    bm.save(Scales(), folder / "scales")
    return folder


def read_all(folder, form="jsonl"):
    rows = []
    for part in sorted(folder.glob(f"part-*.{form}")):
        if form == "jsonl":
            rows += [json.loads(line) for line in part.read_text().splitlines()]
        else:
            from pyarrow import parquet

            rows += parquet.read_table(part).to_pylist()
    return rows


def test_a_run_that_is_killed_goes_on_where_it_was(models, tmp_path):
    """A process of its own, killed in the middle: each block is a row that takes long."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps({"upto": 500 + n}) + "\n" for n in range(60)))
    asked = {"column": "upto", "block_rows": 1, "workers": 1, "progress": False}
    where = f"{str(source)!r}, {str(models / 'counter')!r}, {str(out)!r}"
    script = f"from batchmaker import fleet; fleet.map({where}, **{asked})"
    killed = subprocess.Popen([sys.executable, "-c", script], start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: killed.poll() is not None or len(list(out.glob("part-*"))) >= 3, 300.0)
        assert killed.poll() is None
    finally:
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
    finished = {part: part.stat().st_mtime_ns for part in out.glob("part-*")}
    done = fleet.map(source, str(models / "counter"), out, **asked)
    left = {part: part.stat().st_mtime_ns for part in finished}
    assert done.rows == 60
    assert left == finished, "what was finished before is not computed again"
    assert done.computed <= 60 - len(finished)
    assert read_all(out) == [{"upto": 500 + n, "result": list(range(1, 501 + n))} for n in range(60)]


def test_a_wrong_row_ends_it_and_finished_blocks_stay(models, tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    wrong = [*ROWS[:60], {"id": 60, "numbers": "no numbers"}, *ROWS[61:]]
    source.write_text("".join(json.dumps(row) + "\n" for row in wrong))
    options = {"column": "numbers", "block_rows": 10, "workers": 1, "progress": False}
    with pytest.raises(InvalidRequestError):
        fleet.map(source, str(models / "scales"), out, **options)
    assert not part_of(out, 6, "jsonl").exists()
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:60]))
    with pytest.raises(DataError, match="another input"):
        fleet.map(source, str(models / "scales"), out, **options)


def test_json_lines_come_out_in_order_and_missing_parts_are_computed_again(models, tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    options = {"column": "numbers", "block_rows": 10, "workers": 2, "progress": False}
    whole = fleet.map(source, str(models / "scales"), out, **options)
    assert (whole.blocks, whole.rows, whole.computed, whole.failed) == (10, 95, 95, 0)
    assert read_all(out) == [{**row, "result": [expected(row)]} for row in ROWS]
    kept = {part: part.stat().st_mtime_ns for part in out.glob("part-*")}
    for number in (3, 9):
        kept.pop(part_of(out, number, "jsonl"))
        part_of(out, number, "jsonl").unlink()
    (out / ".part-000003.jsonl.123").write_text("half of a fi")  # what a killed worker leaves
    again = fleet.map(source, str(models / "scales"), out, **options)
    assert again.computed == 15
    assert {part: part.stat().st_mtime_ns for part in kept} == kept
    assert read_all(out) == [{**row, "result": [expected(row)]} for row in ROWS]


def test_parquet_in_parquet_out_and_failing_rows_have_their_error(models, tmp_path):
    from pyarrow import Table, parquet

    rows = [*ROWS[:20], {"id": 20, "numbers": [77]}, *ROWS[21:30]]
    parquet.write_table(Table.from_pylist(rows), tmp_path / "in.parquet")
    out = tmp_path / "out"
    done = fleet.map(
        tmp_path / "in.parquet", str(models / "scales"), out, column="numbers", block_rows=12, on_error="column",
        progress=False,
    )  # fmt: skip
    assert (done.rows, done.failed) == (30, 1)
    computed = read_all(out, "parquet")
    assert [row["id"] for row in computed] == [row["id"] for row in rows]
    assert "CellError" in computed[20]["error"]
    assert computed[20]["result"] is None
    assert [row["result"] for row in computed[:20]] == [[expected(row)] for row in rows[:20]]


def test_a_ray_data_set_is_taken_in_its_order(models, tmp_path):
    data = ray.data.from_items(ROWS[:40])
    done = fleet.map(data, str(models / "scales"), tmp_path, column="numbers", block_rows=15, progress=False)
    assert (done.rows, done.blocks) == (40, 3)
    assert [row["result"] for row in read_all(tmp_path, "parquet")] == [[expected(row)] for row in ROWS[:40]]


def test_what_cannot_be_done_is_said_before_anything_runs(models, tmp_path):
    with pytest.raises(OptionError, match="on_error"):
        fleet.map(tmp_path, "lstm", tmp_path / "out", on_error="never")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="path or a ray"):
        fleet.map([1, 2], "lstm", tmp_path / "out")
