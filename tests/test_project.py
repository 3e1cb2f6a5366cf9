"""The project keeps its own conventions: sizes, names, glossary, and one test command."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCES = sorted([*(REPOSITORY / "src").rglob("*.py"), *(REPOSITORY / "papers" / "src").rglob("*.py")])
MAX_LINES = 700
NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "misc", "common"}


def test_every_source_file_can_be_held_in_the_head():
    assert SOURCES
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    too_long = [f"{path.relative_to(REPOSITORY)}: {n}" for path, n in lengths.items() if n > MAX_LINES]
    assert too_long == []


def test_every_source_file_is_named_for_what_it_holds():
    assert [str(path) for path in SOURCES if path.stem in NAMES_THAT_SAY_NOTHING] == []


def glossary_entries() -> dict[str, str]:
    """Term to definition, in the order of docs/glossary.md. Refuses a term that is defined twice."""
    text = (REPOSITORY / "docs" / "glossary.md").read_text(encoding="utf-8")
    entries: dict[str, str] = {}
    for term, definition in re.findall(r"^\*\*(.+?)\*\*(.*(?:\n(?!\n).*)*)", text, re.MULTILINE):
        assert term not in entries, f"{term!r} is defined twice"
        entries[term] = definition.strip()
    return entries


def test_glossary_is_sorted_and_defines_each_term_once():
    terms = list(glossary_entries())
    assert len(terms) > 20
    assert terms == sorted(terms, key=str.casefold)


def test_glossary_says_something_of_each_term():
    short = [term for term, definition in glossary_entries().items() if len(definition.split()) < 5]
    assert short == []


@pytest.fixture(scope="module")
def command_in():
    return runpy.run_path(str(REPOSITORY / ".ci" / "readme_command.py"))["command_in"]


TEST_BLOCK = "```bash\npython3 -m venv .venv && .venv/bin/python -m pytest\n```\n"
DEMO_BLOCK = "```bash\npython3 -m venv .venv && .venv/bin/batchmaker demo\n```\n"


def test_test_command_is_found_wherever_it_stands(command_in):
    readme = f"# batchmaker\n{DEMO_BLOCK}\n```python\nimport batchmaker\n```\nTests:\n\n{TEST_BLOCK}\nmore\n"
    assert command_in(readme) == "python3 -m venv .venv && .venv/bin/python -m pytest"


@pytest.mark.parametrize("blocks", [[], [DEMO_BLOCK], [TEST_BLOCK, TEST_BLOCK]])
def test_no_or_two_test_commands_are_refused(command_in, blocks):
    with pytest.raises(ValueError, match="expected exactly one"):
        command_in("\n".join(["# batchmaker", *blocks]))


def test_this_readme_has_one_test_command(command_in):
    command = command_in((REPOSITORY / "README.md").read_text(encoding="utf-8"))
    assert ".[dev]" in command


def test_a_class_has_a_name_of_its_own():
    """But for the layers of the papers' networks, whose papers call them alike."""
    homes: dict[str, list[str]] = {}
    for path in SOURCES:
        if path.parent.name == "zoo":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(REPOSITORY)))
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}
