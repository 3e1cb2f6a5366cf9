"""`run` answers every line in its place."""

from __future__ import annotations

import json

import pytest

import batchmaker as bm
from batchmaker.errors import DataError, OptionError
from batchmaker.lab import zoo
from batchmaker.lab.zoo.reference import reference


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_line_of_text_gets_its_state(command, tmp_path, text_file):
    path = tmp_path / "out.jsonl"
    done = command("run", "lstm", "--input", text_file, "--output", path, "--hidden", 8)
    assert done.exit_code == 0, done.output
    lines = lines_of(path)
    assert [line["index"] for line in lines] == [0, 2, 3, 4]
    assert all(len(line["result"]) == 8 and line["latency_ms"] > 0 for line in lines)


def test_policies_agree(command, tmp_path, text_file):
    results = []
    for policy in ("cellular", "padded"):
        path = tmp_path / f"{policy}.jsonl"
        command("run", "gru", "--input", text_file, "--output", path, "--hidden", 8, "--policy", policy)
        results.append([line["result"] for line in lines_of(path)])
    for ours, theirs in zip(*results, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_lines_that_miss_their_deadline_are_given_up(command, tmp_path, text_file):
    path = tmp_path / "out.jsonl"
    lstm = ("run", "lstm", "--input", text_file, "--output", path, "--hidden", 8)
    missed = command(*lstm, "--deadline-ms", 0.001)
    assert (missed.exit_code, path.exists()) == (1, True), (missed.output, missed.exception)
    assert all("deadline" in line["error"] for line in lines_of(path))
    assert command(*lstm, "--deadline-ms", 60_000).exit_code == 0


def test_a_bad_line_fails_alone(command, tmp_path, tree_file):
    path = tmp_path / "out.jsonl"
    done = command("run", "treelstm", "--input", tree_file, "--output", path, "--hidden", 8)
    assert done.exit_code == 1
    assert "1 failed; the first: line 2" in done.output
    lines = lines_of(path)
    assert ["error" in line for line in lines] == [False, True, False, False]
    assert len(lines[2]["result"]) == 8


def test_dependencies_are_json_lines(command, tmp_path):
    source, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"words": [1, 2, 3], "edges": [[1, 0], [1, 2]]}\n{"words": [1], "edges": [[0, 0]]}\n')
    done = command("run", "treelstm-childsum", "--input", source, "--output", path, "--hidden", 8)
    assert done.exit_code == 1
    first, second = lines_of(path)
    assert len(first["result"]) == 8
    assert "are a cycle" in second["error"]


def test_a_folder_of_weights_is_a_model(command, tmp_path):
    bm.save(zoo.make("lstm", vocabulary_size=9, hidden=4, max_batch=4), tmp_path / "lstm", form="weights")
    source, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("[1, 2, 3]\n")
    done = command("run", tmp_path / "lstm", "--input", source, "--output", path)
    assert done.exit_code == 0, done.output
    expected = reference(bm.load(tmp_path / "lstm"), [1, 2, 3])
    assert lines_of(path)[0]["result"] == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.slow
def test_translations_are_written_as_words(command, tmp_path, text_file):
    path = tmp_path / "out.jsonl"
    done = command("run", "seq2seq", "--input", text_file, "--output", path, "--hidden", 8)
    assert done.exit_code == 0, done.output
    words = set(text_file.read_text().split()) | {"<unk>"}
    assert all(set(line["result"].split()) <= words for line in lines_of(path))


def test_what_is_missing_or_unknown_is_said(command, tmp_path, text_file):
    out = tmp_path / "out.jsonl"
    unknown = command("run", "lstn", "--input", text_file, "--output", out).exception
    assert isinstance(unknown, OptionError)
    assert "Did you mean 'lstm'" in str(unknown)
    missing = command("run", "lstm", "--input", tmp_path / "none.txt", "--output", out).exception
    assert isinstance(missing, DataError)
    assert "no such file" in str(missing)
    folder = command("run", "lstm", "--input", text_file, "--output", tmp_path / "none" / "out.jsonl").exception
    assert isinstance(folder, DataError)
