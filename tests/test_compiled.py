"""Where compiled loops are kept."""

from __future__ import annotations

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
