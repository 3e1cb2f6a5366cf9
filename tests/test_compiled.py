"""Where compiled loops are kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchmaker.compiled import config, directory_of


def package_in(folder: Path) -> Path:
    (folder / "rooms").mkdir()
    (folder / "rooms" / "one.py").write_text("first = 1\n")
    (folder / "two.py").write_text("second = 2\n")
    return folder


def test_the_same_sources_keep_their_loops_in_the_same_place(tmp_path: Path) -> None:
    package = package_in(tmp_path)
    assert directory_of(package, "") == directory_of(package, "")
    assert Path(directory_of(package, "")).parent == package / "__pycache__"


def test_any_file_that_changes_gives_all_loops_another_place(tmp_path: Path) -> None:
    package = package_in(tmp_path)
    before = directory_of(package, "")
    (package / "rooms" / "one.py").write_text("first = 11\n")
    assert directory_of(package, "") != before


def test_loops_are_kept_where_numba_is_told_to_keep_them(tmp_path: Path) -> None:
    package = package_in(tmp_path)
    assert Path(directory_of(package, "/somewhere")).parent == Path("/somewhere")


def test_loops_that_check_bounds_have_a_place_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = package_in(tmp_path)
    places = []
    for checks in (None, 1, 0):
        monkeypatch.setattr(config, "BOUNDSCHECK", checks)
        places.append(directory_of(package, ""))
    assert places[0] == places[2] != places[1]


LOOP = """
import sys
import numpy as np
from batchmaker.compiled import compiled, compiled_inline

@compiled_inline
def add(sums, value):
    sums[0] += value

@compiled
def total(values):
    sums = np.zeros(1, values.dtype)
    for value in values:
        add(sums, value)
    return sums[0]

given = np.arange(5)
assert total(given) == 10
print("hit" if sum(total.stats.cache_hits.values()) else "miss", "numba.np.linalg" in sys.modules)
if len(sys.argv) > 1:
    assert total(given.astype(np.float64)) == 10.0
    assert sum(total.stats.cache_misses.values()) == 1
"""


def run_alone(script: str, *arguments: str, folder: Path, **environment: str) -> list[str]:
    """Run a script of a folder with machine code kept in the folder; return the words that it prints.

    -S: without what an environment adds to Python's start, which could keep the code elsewhere.
    """
    done = subprocess.run(
        [sys.executable, "-S", script, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "NUMBA_CACHE_DIR": str(folder / "kept"),
            **environment,
        },
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_kept_loop_is_loaded_without_what_compiling_needs_and_others_are_compiled_still(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    assert run_alone("loop.py", folder=tmp_path) == ["miss", "True"]
    assert run_alone("loop.py", folder=tmp_path) == ["hit", "False"]
    assert run_alone("loop.py", "another form", folder=tmp_path) == ["hit", "False"]


READERS = """
import numpy as np
from batchmaker.compiled import compiled, compiled_arithmetic, compiled_inline, compiled_part

@compiled
def read(values, at):
    return values[at]

@compiled
def write(values, at):
    values[at] = 1.0
    return 1.0

@compiled
def read_of_two(values, at):
    return values.reshape(1, -1)[0, at]

@compiled_arithmetic
def add_up(values, at):
    total = 0.0
    for i in range(at + 1):
        total += values[i]
    return total

@compiled_part
def read_part(values, at):
    return values[at]

@compiled_arithmetic
def call_part(values, at):
    return read_part(values, at)

@compiled_inline
def read_inline(values, at):
    return values[at]

@compiled
def call_inline(values, at):
    return read_inline(values, at)

memory = np.ones(8)
for loop in (read, write, read_of_two, add_up, call_part, call_inline):
    try:
        print(loop.__name__, float(loop(memory[:4], 3)) > 0, float(loop(memory[:4], 5)) > 0)
    except IndexError:
        print(loop.__name__, "IndexError")
"""


@pytest.mark.slow
def test_every_kind_of_loop_finds_an_index_beyond_the_end_if_it_is_told_to_check(tmp_path: Path) -> None:
    (tmp_path / "readers.py").write_text(READERS)
    loops = ("read", "write", "read_of_two", "add_up", "call_part", "call_inline")
    unchecked = run_alone("readers.py", folder=tmp_path, NUMBA_BOUNDSCHECK="0")
    assert unchecked == [word for loop in loops for word in (loop, "True", "True")]
    for _ in range(2):  # compiled, though it is kept unchecked; then loaded
        checked = run_alone("readers.py", folder=tmp_path, NUMBA_BOUNDSCHECK="1")
        assert checked == [word for loop in loops for word in (loop, "IndexError")]
