"""`batchmaker npu` counts cycles."""

from __future__ import annotations

import pytest

from batchmaker.errors import OptionError


@pytest.mark.parametrize(
    ("dataflow", "cycles"),
    [(["--dataflow", "ws"], 62_063), ([], 62_063), (["--dataflow", "os"], 19_447), (["--dataflow", "tpu"], 7342)],
)
def test_the_last_line_is_the_number_of_cycles(command, dataflow, cycles):
    done = command("npu", 49, 4608, 512, *dataflow)
    assert done.exit_code == 0, done.output
    assert done.stdout.endswith(f"\n{cycles}\n")


def test_numbers_are_written_for_programs(command, tmp_path, read_json):
    done = command("npu", 64, 300, 200, "--dataflow", "tpu", "--rho", 2, "--array", 64, "--json", tmp_path / "npu.json")
    assert done.exit_code == 0, done.output
    found = read_json(tmp_path / "npu.json")
    assert (found["m"], found["k"], found["n"], found["array"], found["rho"]) == (64, 300, 200, 64, 2)
    assert found["cycles"] == 32 + 20 * 64 + 126 == int(done.stdout.splitlines()[-1])
    assert found["seconds"] == found["cycles"] / 700e6
    assert 0 < found["used"] <= 1


def test_the_table_says_what_was_counted(command):
    done = command("npu", 49, 4608, 512)
    assert "[49, 4608] x [4608, 512] on 128 x 128, ws" in done.output
    assert "62,063" in done.output


def test_wrong_input_is_answered_in_one_line(command):
    error = command("npu", 1, 2, 3, "--dataflow", "is").exception
    assert isinstance(error, OptionError)
    assert str(error) == "unknown dataflow 'is'; known: os, tpu, ws."


def test_sizes_of_nothing_and_weights_that_never_load_are_refused(command):
    assert command("npu", 1, 0, 3).exit_code == 2
    assert "rho" in str(command("npu", 1, 2, 3, "--dataflow", "tpu", "--rho", 0).exception)
