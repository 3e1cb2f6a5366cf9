"""The notebook: well formed, without outputs, and its cells run from the first to the last."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NOTEBOOK = EXAMPLES / "quickstart.ipynb"


def book() -> dict[str, Any]:
    return json.loads(NOTEBOOK.read_text("utf-8"))


def code() -> dict[str, str]:
    """The code of each cell, by the cell's id."""
    return {cell["id"]: "".join(cell["source"]) for cell in book()["cells"] if cell["cell_type"] == "code"}


def test_it_is_a_notebook_of_format_4_without_outputs():
    found = book()
    assert found.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    assert found["metadata"]["kernelspec"].keys() >= {"name", "display_name"}
    assert found["metadata"]["language_info"]["name"] == "python"
    names = [cell["id"] for cell in found["cells"]]
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in names)
    assert len(set(names)) == len(names)
    for cell in found["cells"]:
        assert isinstance(cell["metadata"], dict)
        assert all(isinstance(line, str) for line in cell["source"])
        assert all(line.endswith("\n") for line in cell["source"][:-1])
        if cell["cell_type"] == "markdown":
            assert cell.keys() == {"cell_type", "id", "metadata", "source"}
        else:
            assert cell.keys() == {"cell_type", "execution_count", "id", "metadata", "outputs", "source"}
            assert (cell["cell_type"], cell["execution_count"], cell["outputs"]) == ("code", None, [])
            ast.parse("".join(cell["source"]))


def test_its_links_lead_to_pages():
    text = "".join(line for cell in book()["cells"] if cell["cell_type"] == "markdown" for line in cell["source"])
    links = re.findall(r"\]\(([^)#]+)", text)
    assert links
    assert [link for link in links if not (EXAMPLES / link).is_file()] == []


@pytest.mark.slow
def test_its_cells_run_and_the_words_are_those_of_one_by_one(capsys):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        for name, text in code().items():
            exec(compile(text, f"{NOTEBOOK.name}:{name}", "exec"), names)
    finally:
        if "engine" in names:
            names["engine"].stop()
        matplotlib.pyplot.close("all")
    said = capsys.readouterr().out
    (same,) = re.findall(r"^(\d+) of 64 are the same words$", said, re.MULTILINE)
    assert int(same) >= 60  # two words may score alike to within the last bit
    assert {step.cell for step in names["steps"]} == {"encoder", "decoder"}
    assert len(names["axes"].patches) == sum(len(step.requests) for step in names["steps"])
