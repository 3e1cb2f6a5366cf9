"""After `os.fork` the child's copy of a started engine says at once that the engine is in the parent, which goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).with_name("forked.py")
LIMIT_S = 300


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What the programs of forked.py have printed, by the words before the colon."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(PROGRAMS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    lines = [line.split(": ", 1) for line in done.stdout.splitlines()]
    assert [name for name, _ in lines].count("answered") == 2, "in the child and in the parent"
    return dict(lines)


STARTED = {
    "submit": "StoppedError True",
    "map": "StoppedError True",
    "open_sequence": "StoppedError True",
    "chunk": "StoppedError True",
    "answers": "StoppedError True StoppedError True",
    "stream": "StoppedError True",
    "before": "result (4,)",
    "cancel": "False close: None",
    "alive": "False stop: True True",
    "another": "(4,)",
    "parent": "(4,) (4,) (4,)",
    "parent stops": "True",
}
STOPPED = "the engine has been stopped and takes no more requests; make a new one"


def test_in_the_child_nothing_waits_and_the_parent_goes_on(printed: dict[str, str]) -> None:
    assert {name: printed.get(name) for name in STARTED} == STARTED


def test_an_engine_that_has_not_started_may_start_in_the_child(printed: dict[str, str]) -> None:
    assert printed["answered"] == "(4,)"


def test_a_stopped_engine_stays_stopped_in_the_child(printed: dict[str, str]) -> None:
    assert printed["stopped"] == STOPPED


def test_nothing_else_is_printed(printed: dict[str, str]) -> None:
    assert printed.keys() == {*STARTED, "answered", "stopped"}
