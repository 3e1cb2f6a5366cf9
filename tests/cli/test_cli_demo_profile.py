"""`demo` and `profile` measure, print and draw."""

from __future__ import annotations

import pytest

from batchmaker.cli.demo.command import overloaded

PNG = b"\x89PNG\r\n"


def test_demo_draws_and_tells(command, tmp_path, read_json):
    picture, numbers = tmp_path / "timeline.png", tmp_path / "demo.json"
    done = command("demo", "--seconds", 1, "--hidden", 16, "--rate", 100, "--png", picture, "--json", numbers)
    assert done.exit_code == 0, done.output
    assert picture.read_bytes().startswith(PNG)
    cellular, padded = read_json(numbers)
    assert (cellular["policy"], padded["policy"]) == ("cellular", "padded")
    assert cellular["offered_rps"] == padded["offered_rps"] == 100
    assert "cellular" in done.output
    assert "p99" in done.output


def test_demo_says_that_a_load_was_not_held_and_its_figures_mislead():
    held, slow = {"policy": "cellular", "served_rps": 96.0}, {"policy": "padded", "served_rps": 60.0}
    assert overloaded([held], 100.0, 8.0) == ""
    note = overloaded([held, slow], 100.0, 8.0)
    assert note.startswith("note: padded could not hold 100 requests a second")
    assert "give a lower --rate" in note
    assert overloaded([slow], 100.0, 0.5) == ""  # which chance explains in so short a time


@pytest.mark.slow
def test_demo_finds_a_rate_by_itself(command, tmp_path):
    done = command("demo", "--seconds", 0.5, "--hidden", 64, "--png", tmp_path / "timeline.png")
    assert done.exit_code == 0, done.output
    assert "requests a second" in done.output


def test_profile_chooses_a_batch_for_each_cell(command, tmp_path, read_json):
    picture, numbers = tmp_path / "profile.png", tmp_path / "profile.json"
    done = command(
        "profile", "treelstm", "--hidden", 16, "--max", 8, "--seconds", 0.01, "--json", numbers, "--png", picture
    )
    assert done.exit_code == 0, done.output
    assert picture.read_bytes().startswith(PNG)
    found = read_json(numbers)
    assert [cell["name"] for cell in found["cells"]] == ["leaf", "inner"]
    for cell in found["cells"]:
        assert cell["batch"] == [1, 2, 4, 8]
        assert cell["max_batch"] in cell["batch"]
        assert all(ms > 0 for ms in cell["step_ms"])
    assert "within 5% of the best" in done.output
