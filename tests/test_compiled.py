"""Where compiled loops are kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from batchmaker.compiled import directory_of


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


def test_a_kept_loop_is_loaded_without_what_compiling_needs_and_others_are_compiled_still(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kept")}

    def run(*arguments: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "loop.py", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert run() == ["miss", "True"]
    assert run() == ["hit", "False"]
    assert run("another form") == ["hit", "False"]
