"""Where the real data sets lie, for tests that read them where they are at hand."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def real_data(shared_data: Path) -> Callable[[str], Path]:
    """Return the path of a real data file; the test is skipped where it is not there."""

    def find(name: str) -> Path:
        if not (shared_data / name).exists():
            pytest.skip(f"no {name} at hand")
        return shared_data / name

    return find


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Return the path of a new file with the given content."""

    def to_file(content: str | bytes, name: str = "data.txt") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return to_file
