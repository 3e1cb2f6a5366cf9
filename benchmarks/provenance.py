"""What a result was measured from: command, machine, and a digest of the code that it measures (decision 26).

A result file keeps the paths that its benchmark declares and their digest at that time. `is_current` computes the
digest again: no history is needed, so it works in a shallow clone. Comments, docstrings and blank lines do not count,
and neither does any file that was not declared.

    python benchmarks/provenance.py RESULT.json [...] --measures PATH [...]   # for results of the `batchmaker` command
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import os
import shlex
import sys
import tokenize
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from batchmaker.cli.bench.report import commit
from engine_cost.measuring import facts, load_average

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = tuple(ROOT / folder / "results" for folder in ("benchmarks", "papers/benchmarks"))
"""Of the product's benchmarks, and of those that reproduce papers or measure their systems."""
Result = dict[str, Any]
CPU_EXECUTOR: Final = tuple(
    f"src/batchmaker/executor/{name}.py"
    for name in ("base", "compute", "inline", "state_tables", "task_loop", "task_steps")
)
"""What computes steps on a CPU. The rest of that folder is for GPUs, or computes nothing."""


@cache  # many results measure the same files
def code_of(source: str) -> str:
    """Return a Python text without comments, docstrings, blank lines and spaces at the ends of lines."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            if text and isinstance(first.value.value, str):  # type: ignore[attr-defined]
                lines[first.lineno - 1 : first.end_lineno] = [""] * ((first.end_lineno or 0) - first.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def files_of(paths: Sequence[str], root: Path = ROOT) -> list[Path]:
    """Return the files that declared paths stand for; a folder is all of its Python files, in any depth.

    FileNotFoundError for a path that is not there: what was measured has moved, and the declaration is wrong.
    """
    found: set[Path] = set()
    for path in paths:
        whole = root / path
        if not whole.exists():
            raise FileNotFoundError(f"{path}: declared as measured, and not there; correct the benchmark's MEASURES")
        found.update(whole.rglob("*.py") if whole.is_dir() else (whole,))
    return sorted(found)


def digest(paths: Sequence[str], root: Path = ROOT) -> str:
    """Return the digest of all declared files, by name and code."""
    whole = hashlib.sha256()
    for path in files_of(paths, root):
        text = path.read_text("utf-8")
        whole.update(f"{path.relative_to(root).as_posix()}\n".encode())
        whole.update((code_of(text) if path.suffix == ".py" else text).encode())
    return whole.hexdigest()[:16]


def made_by(measures: Sequence[str], command: str | None = None) -> Result:
    """Return what every result begins with: command, commit, machine, load average, and what it measures.

    measures: the paths, relative to the repository, of the code whose behaviour or speed the result is about. command:
    in place of this process's own, without where its results go; for instance without folders of this machine.
    """
    return {
        "command": command or " ".join(["python", *map(shlex.quote, [_script(), *_places().parse_known_args()[1]])]),
        "commit": commit(),
        "machine": facts(),
        "load_average": load_average(),
        "measures": {"paths": list(measures), "digest": digest(measures)},
    }


def command_now(found: Result) -> str:
    """Return the command that made a result, with its script where that lies now: it may have moved since."""
    words = found["command"].split(" ")
    moved = {word for word in words if word.startswith("benchmarks/") and not (ROOT / word).exists()}
    return " ".join(f"papers/{word}" if word in moved and (ROOT / "papers" / word).exists() else word for word in words)


def result_path(name: str) -> Path:
    """Return where a result file lies. FileNotFoundError if nobody has made it."""
    found = next((folder / name for folder in RESULTS if (folder / name).exists()), None)
    if found is None:
        raise FileNotFoundError(f"no result {name} in {' or '.join(map(str, RESULTS))}")
    return found


def is_current(found: Any) -> bool | None:
    """Return whether the code that a result measures is as it was; None if the result does not say what it measures.

    A list of results is as current as its first.
    """
    if isinstance(found, list) and found:
        return is_current(found[0])
    if not isinstance(found, dict) or "measures" not in found:
        return None
    try:
        return digest(found["measures"]["paths"]) == found["measures"]["digest"]
    except FileNotFoundError:
        return False


def _script() -> str:
    return os.path.relpath(sys.argv[0], ROOT) if sys.argv[0] else "-"


def _places() -> argparse.ArgumentParser:
    """The options that say where results go."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--json", "--png", "--page"):
        parser.add_argument(option)
    return parser


def declare(path: Path, measures: Sequence[str]) -> None:
    """Write into a result file, or each result of its list, what it measures: the code that is here now."""
    found = json.loads(path.read_text("utf-8"))
    for result in found if isinstance(found, list) else [found]:
        result["measures"] = {"paths": list(measures), "digest": digest(measures)}
    path.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--measures", nargs="+", required=True, metavar="PATH", help="code that was measured just now")
    options = parser.parse_args()
    for path in options.results:
        declare(path, options.measures)


if __name__ == "__main__":
    main()
