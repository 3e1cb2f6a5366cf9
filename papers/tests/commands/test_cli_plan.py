"""`batchmaker plan` says what planning does to a cell."""

from __future__ import annotations

import pytest

import batchmaker as bm
from batchmaker.errors import DataError, OptionError
from batchmaker_papers.gatewise import CELLS, GatewiseModel

QUICK = ("--hidden", 8, "--batch", 2, "--seconds", 0.01)


def test_the_plan_of_one_cell_is_shown_batch_by_batch_and_drawn(command, tmp_path, read_json):
    done = command(
        "plan", "gatewise", "--cell", "lstm", *QUICK, "--json", tmp_path / "n.json", "--png", tmp_path / "n.png"
    )
    assert done.exit_code == 0, done.output
    assert "memory kernels" in done.output
    assert (tmp_path / "n.png").stat().st_size > 1000
    content = read_json(tmp_path / "n.json")
    assert (content["model"], content["hidden"], content["batch"], content["threads"]) == ("gatewise", 8, 2, 1)
    assert {"machine", "commit", "torch"} <= content.keys()
    (cell,) = content["cells"]
    assert cell["name"] == "lstm"
    assert cell["before"]["kernels"] > cell["after"]["kernels"]
    assert min(cell["eager_us"], cell["bound_us"], cell["planned_us"]) > 0
    assert sorted(cell["written"]) == sorted(cell["planned"])
    for batch in cell["batches"]:
        assert f"{len(batch['results'])} x  {' | '.join(batch['results'])}" in done.output


def test_without_a_name_all_cells_are_planned(command, tmp_path, read_json):
    done = command("plan", "treelstm", *QUICK, "--json", tmp_path / "n.json")
    assert done.exit_code == 0, done.output
    assert [cell["name"] for cell in read_json(tmp_path / "n.json")["cells"]][:2] == ["leaf", "inner"]


def test_a_saved_model_can_be_planned(command, tmp_path):
    bm.save(GatewiseModel("treegru_leaf", 8), tmp_path / "model")
    done = command("plan", tmp_path / "model", "--seconds", 0.01)
    assert done.exit_code == 0, done.output
    assert "treegru_leaf" in done.output


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("gatwise",), "Did you mean 'gatewise'?"),
        (("gatewise", "--cell", "lsm"), "Did you mean 'lstm'?"),
        (("treelstm", "--cell", "iner"), "Did you mean 'inner'?"),
    ],
)
def test_names_that_are_not_known_are_refused_with_the_nearest(command, arguments, what):
    done = command("plan", *arguments)
    assert isinstance(done.exception, OptionError)
    assert what in str(done.exception)


def test_a_folder_that_is_not_there_is_refused_before_anything_is_measured(command, tmp_path):
    done = command("plan", "gatewise", "--png", tmp_path / "nowhere" / "n.png")
    assert isinstance(done.exception, DataError)


def test_more_rows_than_memory_holds_are_refused_at_once(command):
    done = command("plan", "lstm", "--batch", 100_000_000)
    assert isinstance(done.exception, OptionError)
    assert "--batch 100000000: at most 65536" in str(done.exception)


def test_help_names_the_cells_and_says_what_a_memory_kernel_is(command):
    text = " ".join(command("plan", "--help").output.split())
    assert "gatewise" in text
    assert "memory kernel" in text
    assert "cores less one" not in text
    assert len(CELLS) == 7
