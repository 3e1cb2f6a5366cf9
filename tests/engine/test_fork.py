"""After `os.fork` the child's copy of a started engine says at once that the engine is in the parent, which goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAMS = Path(__file__).with_name("forked.py")
LIMIT_S = 300


def printed(program: str) -> dict[str, str]:
    """What a program of forked.py has printed, by the words before the colon."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(PROGRAMS), program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    lines = [line.partition(": ") for line in done.stdout.splitlines()]
    return {name: value for name, _, value in lines}


def test_in_the_child_nothing_waits_and_the_parent_goes_on() -> None:
    assert printed("started") == {
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


def test_an_engine_that_has_not_started_may_start_in_the_child() -> None:
    assert printed("not_started") == {"answered": "(4,)"}


def test_a_stopped_engine_stays_stopped_in_the_child() -> None:
    assert printed("stopped") == {"stopped": "the engine has been stopped and takes no more requests; make a new one"}
