"""Refuse a tag that is not the version of what it marks.

Usage: python3 .ci/tag.py v1.2.3

The version is in pyproject.toml, the package, CITATION.cff, the changelog, and papers/pyproject.toml if there is one.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def versions(root: Path = ROOT) -> dict[str, str | None]:
    """The version in each place; None where it is not found."""

    def found(path: str, pattern: str) -> str | None:
        match = re.search(pattern, (root / path).read_text(encoding="utf-8"), re.MULTILINE)
        return match and match[1]

    places = {
        "src/batchmaker/__init__.py": r'^__version__ = "(.+)"$',
        "CITATION.cff": r"^version: (\S+)$",
        "CHANGELOG.md": r"^## \[([^\]]+)\]",
    }
    projects = [path for path in ("pyproject.toml", "papers/pyproject.toml") if (root / path).is_file()]
    contents = {path: tomllib.loads((root / path).read_text("utf-8"))["project"] for path in projects}
    said = {path: content["version"] for path, content in contents.items()}
    for path, content in contents.items():
        for wanted in content["dependencies"]:
            if wanted.startswith("batchmaker=="):
                said[f"{wanted} of {path}"] = wanted.partition("==")[2]
    return {**said, **{path: found(path, pattern) for path, pattern in places.items()}}


if __name__ == "__main__":
    tag = sys.argv[1]
    wrong = {place: version for place, version in versions().items() if f"v{version}" != tag}
    if wrong:
        sys.exit(
            f"the tag is {tag}, and the version is " + ", ".join(f"{what} in {place}" for place, what in wrong.items())
        )
