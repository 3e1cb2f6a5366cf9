"""A learned policy as a file: what is written is read again, and what cannot be used is refused with a reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchmaker import policies
from batchmaker.errors import OptionError, PolicyFileError
from batchmaker.graph.spec import CellType, TypeId, ValueSpec
from batchmaker.policies.learned import CellRow, LearntFrom, PolicyFile

NUMBER = ValueSpec((), "int64")
LEARNT = LearntFrom("trees.txt, requests 41 to 100", 60, 8, 2, 1000, 10, 0, 1.0, 0.25, "abc")
FILE = PolicyFile(
    "treelstm",
    "sort",
    (CellRow("leaf", 1, 2), CellRow("inner", 4, 2), CellRow("classify", 1, 1)),
    {(0,): 0, (2, 1): 1, (1, 2): 1, (2,): 2},
    LEARNT,
)


def cell(name: str, inputs: int, outputs: int, type_id: int = 0) -> CellType:
    return CellType(TypeId(type_id), name, (NUMBER,) * inputs, (NUMBER,) * outputs, (1, 4))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "policy.json"
    FILE.write(path)
    return path


def changed(path: Path, change: Any) -> None:
    content = json.loads(path.read_text("utf-8"))
    change(content)
    path.write_text(json.dumps(content), "utf-8")


@pytest.mark.parametrize("encoding", ["base", "max", "sort"])
def test_what_is_written_is_read_again(tmp_path, encoding):
    file = replace(FILE, encoding=encoding)
    file.write(tmp_path / "policy.json")
    assert PolicyFile.read(tmp_path / "policy.json") == file


def test_a_person_can_read_it_a_state_to_a_line(path):
    lines = path.read_text("utf-8").splitlines()
    assert '  {"state": ["classify", "inner"], "run": "inner"},' in lines
    assert '  {"name": "inner", "inputs": 4, "outputs": 2},' in lines


def test_a_model_with_the_same_cells_is_served_in_any_order_and_not_all_of_them(path):
    policy = policies.make(f"learned:file={path}")
    policy.check_cells([cell("inner", 4, 2), cell("leaf", 1, 2)])


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ([cell("lstm", 3, 2)], "model 'treelstm': got cell 'lstm' with 3 inputs.*one of leaf, inner, classify"),
        ([cell("leaf", 1, 2), cell("inner", 2, 1)], "got cell 'inner' with 2 inputs.*expected 4 inputs and 2 outputs"),
    ],
)
def test_a_model_that_it_was_not_learnt_for_is_refused(path, cells, says):
    with pytest.raises(PolicyFileError, match=says) as refused:
        policies.make(f"learned:file={path}").check_cells(cells)
    assert "batchmaker learn" in str(refused.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.update(version=2), "got version 2, expected 1; learn the policy again"),
        (lambda c: c.update(format="profile"), "content: got 'profile', expected batchmaker learned policy"),
        (lambda c: c.pop("cells"), "cells missing"),
        (lambda c: c.update(encoding="sorted"), "encoding: got 'sorted', expected one of base, max, sort"),
        (lambda c: c.update(model=3), "model: got 3, expected a name"),
        (lambda c: c.update(states=[]), "states: got .* expected a list with something in it"),
        (lambda c: c["cells"][0].pop("inputs"), "cell 0: .*expected an object with name, inputs, outputs"),
        (lambda c: c["cells"][0].update(inputs=True), "cell 0, inputs: got True, expected a value of type int"),
        (lambda c: c["cells"][0].update(name="inner"), "cells: .*expected names that differ"),
        (lambda c: c["learnt"].update(ratio="low"), "learnt, ratio: got 'low', expected a value of type float"),
        (lambda c: c["states"].append(c["states"][0]), "state 4: .*expected each state once"),
        (lambda c: c["states"][1].update(run="leaf"), "state 1, run: got 'leaf', expected one of its ready cells"),
        (lambda c: c["states"][1].update(state=["root"]), "state 1: got 'root', expected one of the cells leaf"),
        (lambda c: c["states"].append(7), "state 4: got 7, expected an object with state"),
    ],
)
def test_a_malformed_file_is_refused_by_name_and_place(path, change, says):
    changed(path, change)
    with pytest.raises(PolicyFileError, match=says) as refused:
        PolicyFile.read(path)
    assert str(refused.value).startswith(str(path))


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "\udcff"])
def test_what_is_no_policy_at_all_is_refused(path, text):
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(PolicyFileError, match="policy"):
        policies.make(f"learned:file={path}")


def test_a_missing_file_and_a_missing_option_are_refused(tmp_path):
    with pytest.raises(PolicyFileError, match="cannot be read"):
        policies.make("learned", file=str(tmp_path / "none.json"))
    with pytest.raises(PolicyFileError, match="cannot be written"):
        FILE.write(tmp_path / "none" / "policy.json")
    with pytest.raises(OptionError, match="file"):
        policies.make("learned")


def test_steps_per_task_are_an_option(path):
    assert policies.make(f"learned:file={path}").max_steps == 1
    assert policies.make(f"learned:file={path},max_steps=3").max_steps == 3
    with pytest.raises(OptionError, match="max_steps must be at least 1"):
        policies.make(f"learned:file={path},max_steps=0")
