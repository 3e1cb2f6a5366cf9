"""A runner for the command line, and small files to feed it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from batchmaker.cli.bench import reference
from batchmaker.cli.main import app

Command = Callable[..., Result]


@pytest.fixture(autouse=True)
def short_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """What plain torch does is measured in no time: tests look at no speed."""
    monkeypatch.setattr(reference, "SECONDS_EACH", 0.005)


@pytest.fixture
def command() -> Command:
    """Run `batchmaker ARGUMENTS` in this process."""
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def program() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `batchmaker ARGUMENTS` as a user does."""
    start = [sys.executable, "-c", "from batchmaker.cli.main import main; main()"]
    return lambda *arguments: subprocess.run(
        [*start, *map(str, arguments)], capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the cat sat\n\non the mat\na dog\nthe end of it all\n", encoding="utf-8")
    return path


@pytest.fixture
def tree_file(tmp_path: Path) -> Path:
    path = tmp_path / "trees.txt"
    path.write_text("(3 (2 a) (1 b))\n(2 (2 not closed)\n(1 word)\n(3 (2 (1 a) (2 c)) (1 b))\n", encoding="utf-8")
    return path


@pytest.fixture
def read_json() -> Callable[[Path], Any]:
    return lambda path: json.loads(path.read_text(encoding="utf-8"))
