"""`batchmaker profile --out` writes what a scheduler needs to know of time and lengths."""

from __future__ import annotations

import pytest

from batchmaker.cost import CostProfile
from batchmaker.errors import DataError, OptionError

QUICK = ("--hidden", 16, "--max", 4, "--seconds", 0.005, "--threads", 1)


@pytest.fixture
def pairs(tmp_path):
    """Fifty sentences of 2 to 6 words, and translations twice as long."""
    source, target = tmp_path / "train.en", tmp_path / "train.de"
    lengths = [2 + i % 5 for i in range(50)]
    source.write_text("".join("a " * n + "\n" for n in lengths), encoding="utf-8")
    target.write_text("".join("ein " * 2 * n + "\n" for n in lengths), encoding="utf-8")
    return "--data", source, "--data", target


def test_times_of_every_cell_are_stored(command, tmp_path, read_json):
    done = command("profile", "treelstm", *QUICK, "--out", tmp_path / "profile.json", "--json", tmp_path / "n.json")
    assert done.exit_code == 0, done.output
    profile = CostProfile.read(tmp_path / "profile.json")
    assert (profile.model, profile.options.hidden, profile.options.dtype) == ("treelstm", 16, "float32")
    assert profile.options.threads == 1
    assert [cell.name for cell in profile.latency.cells] == ["leaf", "inner"]
    assert profile.lengths == ()
    for stored, shown in zip(profile.latency.cells, read_json(tmp_path / "n.json")["cells"], strict=True):
        assert stored.batch == (1, 2, 4)
        assert [1e3 * s for s in stored.median_s] == shown["step_ms"]
        assert [1e3 * s for s in stored.p95_s] == shown["p95_ms"]
    assert "p95 ms" in done.output


def test_lengths_of_a_decoder_are_learnt_from_data(command, tmp_path, pairs):
    done = command("profile", "seq2seq", *QUICK, *pairs, "--out", tmp_path / "profile.json")
    assert done.exit_code == 0, done.output
    profile = CostProfile.read(tmp_path / "profile.json")
    assert [cell.name for cell in profile.latency.cells] == ["encoder", "decoder"]
    length = profile.length_of("decoder")
    assert length is not None
    assert length.given == "encoder"
    assert length.profile.num_samples == 50
    assert length.profile.fixed(0.9) == 12


@pytest.mark.parametrize(
    ("model", "needs_out", "what"),
    [("lstm", True, "leave it out for lstm"), ("seq2seq", False, "give --out profile.json too")],
)
def test_data_that_would_not_be_used_is_refused(command, tmp_path, pairs, model, needs_out, what):
    out = ("--out", tmp_path / "profile.json") if needs_out else ()
    done = command("profile", model, *QUICK, *pairs, *out)
    assert isinstance(done.exception, OptionError)
    assert what in str(done.exception)
    assert not (tmp_path / "profile.json").exists()


def test_an_output_file_without_a_folder_is_refused_before_measuring(command, tmp_path):
    done = command("profile", "lstm", "--out", tmp_path / "nowhere" / "profile.json")
    assert isinstance(done.exception, DataError)
    assert "there is no folder" in str(done.exception)


def test_lengths_need_a_source_and_a_target(command, tmp_path, pairs):
    done = command("profile", "seq2seq", *QUICK, *pairs[:2], "--out", tmp_path / "profile.json")
    assert isinstance(done.exception, OptionError)
    assert "two aligned files" in str(done.exception)


def test_what_the_engine_needs_beside_its_cells_is_stored(command, tmp_path):
    done = command("profile", "lstm", *QUICK, "--overhead", "--out", tmp_path / "profile.json")
    assert done.exit_code == 0, done.output
    overhead = CostProfile.read(tmp_path / "profile.json").overhead
    assert overhead is not None
    assert overhead.turn_s + overhead.request_s > 0


def test_overhead_needs_a_file_to_be_stored_in(command):
    done = command("profile", "lstm", *QUICK, "--overhead")
    assert isinstance(done.exception, OptionError)
