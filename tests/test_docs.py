"""What the documentation says is true: its code runs, its links resolve, and what it names exists."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import batchmaker
from batchmaker.cli.main import COMMANDS
from batchmaker.extensions import commands

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "src" / "batchmaker"
README = REPOSITORY / "README.md"
ARCHITECTURE = REPOSITORY / "docs" / "architecture.md"
PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "papers").rglob("*.md")])

LONG = {"live-audio.md", "models.md", "networks.md", "recurrent-checkpoints.md"}
"""Pages whose code takes ten seconds or so."""

NEEDED = {"onnx.md": ("onnx", "onnxruntime")}
"""Optional packages that the code of a page imports."""

BLOCK = re.compile(r"^```(\w*)[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose_of(page: Path) -> str:
    """A page without its code blocks."""
    return BLOCK.sub("", text_of(page))


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """First line number and code of each python block of a page."""
    text = text_of(page)
    found = [match for match in BLOCK.finditer(text) if match[1] == "python"]
    return [(text.count("\n", 0, match.start(2)), match[2]) for match in found]


def name_of(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


@pytest.fixture
def module_for_page() -> Iterator[types.ModuleType]:
    """A module that can be imported by name while a page's code runs in it, as a reader's own file would be."""
    module = types.ModuleType("code_of_a_page")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=[pytest.mark.slow] * (page.name in LONG))
        for page in PAGES
        if python_blocks(page)
    ],
)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, module_for_page, tmp_path, monkeypatch):
    for package in NEEDED.get(page.name, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    for first_line, code in python_blocks(page):
        numbered = "\n" * first_line + code
        exec(compile(numbered, str(page), "exec"), module_for_page.__dict__)


def test_the_code_in_the_readme_translates(module_for_page, capsys):
    ((_, code),) = python_blocks(README)
    exec(compile(code, str(README), "exec"), module_for_page.__dict__)
    translations = module_for_page.translations
    assert all(1 <= len(words) <= 2 * n + 10 for words, n in zip(translations, (3, 5, 1), strict=True))
    assert 1 <= len(capsys.readouterr().out.split()) <= 14


def anchor(heading: str) -> str:
    """The fragment under which a heading is found on the page."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_of_a_page_resolves(page):
    broken = []
    for target in LINK.findall(prose_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        anchors = (
            {anchor(h) for h in HEADING.findall(text_of(there))} if there.suffix == ".md" and there.is_file() else ()
        )
        if not there.exists() or (fragment and fragment not in anchors):
            broken.append(target)
    assert broken == []


def test_the_readme_says_what_it_is_in_two_sentences():
    _, what_it_is, *_ = text_of(README).split("\n\n")
    assert len(re.findall(r"[.!?](?:\s|$)", what_it_is)) == 2


def test_the_readme_has_two_commands_to_copy():
    assert len([match for match in BLOCK.finditer(text_of(README)) if match[1] == "bash"]) == 2


def test_every_page_of_the_docs_can_be_reached_from_the_readme():
    reached: set[Path] = set()
    waiting = [README]
    while waiting:
        page = waiting.pop()
        if page in reached or not page.is_file():
            continue
        reached.add(page)
        links = (target.partition("#")[0] for target in LINK.findall(prose_of(page)) if "://" not in target)
        waiting.extend((page.parent / link).resolve() for link in links if link.endswith(".md"))
    assert [name_of(page) for page in PAGES if page not in reached] == []


def test_architecture_names_every_room_of_the_package():
    text = text_of(ARCHITECTURE)
    rooms = sorted(folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").is_file())
    assert rooms
    assert [room for room in rooms if f"`{room}/`" not in text] == []


def test_every_file_and_room_that_architecture_names_exists():
    named = set(re.findall(r"`((?:[\w.]+/)+(?:[\w]+\.\w+)?|\w+\.py)`", text_of(ARCHITECTURE)))
    assert len(named) > 15
    assert sorted(name for name in named if not ((PACKAGE / name).exists() or (REPOSITORY / name).exists())) == []


def test_every_class_that_architecture_names_is_defined_in_the_package():
    known = set(re.findall(r"^(?:class )?([A-Z]\w+)\b", "\n".join(map(text_of, PACKAGE.rglob("*.py"))), re.MULTILINE))
    named = re.findall(r"`([A-Z][a-z]\w*)(?:\.\w+)?(?:\([^`]*\))?`", text_of(ARCHITECTURE))
    assert len(set(named)) > 15
    assert sorted(set(named) - known) == []


def test_every_public_name_that_the_docs_use_exists():
    used = {name for page in PAGES for name in re.findall(r"\bbm\.(\w+)", text_of(page))}
    assert {"Cell", "Engine", "Model"} <= used
    assert sorted(used - set(batchmaker.__all__)) == []


def test_every_command_that_the_docs_name_exists():
    named = {name for page in PAGES for name in re.findall(r"`(?:\.venv/bin/)?batchmaker ([a-z]\w*)", text_of(page))}
    known = {*COMMANDS, *commands()}
    assert {"demo", "run", "bench", "profile"} <= named
    assert sorted(named - known) == []
