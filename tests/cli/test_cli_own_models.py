"""`run` and `profile` take a model of one's own in the forms that `serve` takes, and `bench` says that it does not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from own_models import own_model, request_file

import batchmaker as bm
from batchmaker.cost import CostProfile
from batchmaker.errors import DataError, OptionError
from batchmaker.lab.zoo.reference import reference
from batchmaker.saved.sources import one_model, parse_source

__all__ = ["own_model", "request_file"]

QUICK = ("--max", 2, "--seconds", 0.005, "--threads", 1)


def lines_of(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def said_by(done, kind):
    assert isinstance(done.exception, kind), (done.output, done.exception)
    return str(done.exception)


def test_run_answers_json_requests_with_a_model_of_a_python_file(command, tmp_path, own_model, request_file):
    out = tmp_path / "out.jsonl"
    done = command("run", f"{own_model}:hidden=6", "--input", request_file, "--output", out, "--threads", 1)
    assert done.exit_code == 0, (done.output, done.exception)
    model = one_model(parse_source(f"{own_model}:hidden=6"))
    expected = [[value.tolist() for value in reference(model, one)] for one in ([1, 2, 3], [4])]
    assert [line["index"] for line in lines_of(out)] == [0, 2]
    for line, one in zip(lines_of(out), expected, strict=True):
        for got, wanted in zip(line["result"], one, strict=True):
            assert got == pytest.approx(wanted, abs=1e-5)


@pytest.mark.slow
def test_run_takes_the_newest_version_of_a_saved_model(command, tmp_path, own_model, request_file):
    for version, hidden in ((2, 3), (10, 5)):
        bm.save(one_model(parse_source(f"{own_model}:hidden={hidden},example=true")), tmp_path / "kept" / str(version))
    out = tmp_path / "out.jsonl"
    done = command("run", tmp_path / "kept", "--input", request_file, "--output", out, "--threads", 1)
    assert done.exit_code == 0, (done.output, done.exception)
    expected = reference(one_model(parse_source(f"{own_model}:hidden=5")), [4])
    assert lines_of(out)[1]["result"][1] == pytest.approx(expected[1].tolist(), abs=1e-5)


def test_a_folder_of_several_models_is_not_one_model(command, tmp_path, own_model, request_file):
    model = one_model(parse_source(f"{own_model}:example=true"))
    for name in ("a", "b"):
        bm.save(model, tmp_path / "kept" / name)
    done = command("run", tmp_path / "kept", "--input", request_file, "--output", tmp_path / "out.jsonl")
    assert f"name one of them: {tmp_path / 'kept' / 'a'}" in said_by(done, OptionError)


def test_flags_of_built_in_models_are_refused_for_a_model_of_ones_own(command, tmp_path, own_model, request_file):
    ends = ("--input", request_file, "--output", tmp_path / "out.jsonl", "--hidden", 8)
    assert f"after a colon: {own_model}:hidden=8" in said_by(command("run", own_model, *ends), OptionError)
    bm.save(one_model(parse_source(f"{own_model}:example=true")), tmp_path / "kept")
    assert "has its options in it" in said_by(command("run", tmp_path / "kept", *ends), OptionError)


def test_options_of_a_built_in_model_follow_a_colon_too(command, tmp_path, text_file):
    out = tmp_path / "out.jsonl"
    done = command("run", "lstm:hidden=6", "--input", text_file, "--output", out)
    assert done.exit_code == 0, (done.output, done.exception)
    assert len(lines_of(out)[0]["result"]) == 6
    twice = command("run", "lstm:hidden=6", "--hidden", 8, "--input", text_file, "--output", out)
    assert "hidden is given twice" in said_by(twice, OptionError)
    words = command("run", "lstm:vocabulary_size=9", "--input", text_file, "--output", out)
    assert "vocabulary_size is found in the file" in said_by(words, OptionError)


def test_profile_measures_every_cell_that_the_requests_use(command, tmp_path, own_model, request_file):
    out = tmp_path / "profile.json"
    done = command("profile", own_model, *QUICK, "--requests", request_file, "--out", out, "--overhead")
    assert done.exit_code == 0, (done.output, done.exception)
    profile = CostProfile.read(out)
    assert (profile.model, profile.options.hidden) == ("own_model_of_a_test", None)
    assert [cell.name for cell in profile.latency.cells] == ["step", "score", "more"]  # `more` after a computed value
    assert profile.overhead is not None


def test_profile_uses_the_example_request_if_no_others_are_given(command, tmp_path, own_model):
    done = command("profile", f"{own_model}:example=true", *QUICK, "--out", tmp_path / "profile.json")
    assert done.exit_code == 0, (done.output, done.exception)
    assert len(CostProfile.read(tmp_path / "profile.json").latency.cells) == 3


def test_profile_says_which_cells_no_request_uses(command, tmp_path, own_model, request_file):
    request_file.write_text(f"{[1] * 9}\n", "utf-8")
    done = command("profile", own_model, *QUICK, "--requests", request_file)
    assert done.exit_code == 0, (done.output, done.exception)
    assert "not measured, because no request uses them: more; give --requests" in done.output


def test_profile_without_a_request_says_how_to_give_one(command, own_model):
    said = said_by(command("profile", own_model, *QUICK), OptionError)
    assert "--requests FILE" in said
    assert "example_request" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [("[1]\nnot json\n", "line 2: not JSON"), ("[1]\n\n[99]\n", "line 3: "), ("\n", "nothing in this file")],
)
def test_profile_names_the_line_of_a_bad_request(command, own_model, request_file, text, said):
    request_file.write_text(text, "utf-8")
    assert said in said_by(command("profile", own_model, *QUICK, "--requests", request_file), DataError)


def test_bench_says_that_it_has_built_in_models_only(command, own_model):
    assert "`batchmaker profile` measures the cells of a model of your own" in said_by(
        command("bench", own_model), OptionError
    )


@pytest.mark.parametrize("name", ["run", "profile"])
def test_help_shows_a_model_of_ones_own(command, name):
    assert "translator.py:hidden=64" in command(name, "--help").output


def test_naming_a_model_loads_no_server():
    code = (
        "import sys, batchmaker.cli.run, batchmaker.cli.profile; "
        "assert not [m for m in sys.modules if m.startswith(('batchmaker.server', 'starlette'))]"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode == 0
