"""Figures of one offered load, and result files that name machine, commit and command."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from generator import Outcome
from numpy.typing import NDArray

from batchmaker.cli.bench.report import commit, machine

BENCHMARKS = Path(__file__).resolve().parent.parent
sys.path.append(str(BENCHMARKS))

from provenance import made_by  # noqa: E402

RESULTS = BENCHMARKS / "results"
WARM_SHARE = 0.15
"""The part of a run at its beginning that is not counted."""


def percentile_ms(seconds: NDArray[np.float64], percent: float) -> float | None:
    """Return a percentile in milliseconds."""
    return round(float(np.percentile(seconds, percent)) * 1e3, 3) if len(seconds) else None


def figures(outcome: Outcome, seconds: float) -> dict[str, Any]:
    """Return throughput, and latency of good answers: from when a request was due, and from when it was sent."""
    due, sent, done, status = (outcome.array(name) for name in ("due_s", "sent_s", "done_s", "status"))
    begin = WARM_SHARE * seconds
    good = status == 200
    ended = good & (done >= begin) & (done < seconds)
    counted = good & (due >= begin)
    window = seconds - begin
    return {
        "offered_rps": round(float(np.sum(due >= begin)) / window, 1),
        "served_rps": round(float(ended.sum()) / window, 1),
        "refused_rps": round(float(np.sum((status == 503) & (done >= begin) & (done < seconds))) / window, 1),
        "other": int(np.sum((status != 200) & (status != 503) & (status != 0))),
        "unanswered": int(np.sum(status == 0)),
        **{f"p{p}_ms": percentile_ms((done - due)[counted], p) for p in (50, 90, 99)},
        **{f"sent_p{p}_ms": percentile_ms((done - sent)[counted], p) for p in (50, 90, 99)},
        "generator_share": round(outcome.processor_s / seconds, 3),
    }


def write(name: str, settings: dict[str, Any], results: Any, measures: Sequence[str] = ()) -> None:
    """Write benchmarks/results/serving-NAME.json and print it. A + after the commit: the source had changes since.

    measures: the paths whose behaviour or speed the result is about (provenance.made_by).
    """
    command = " ".join(["python", *map(_shown, sys.argv)])
    about: dict[str, Any] = {"command": command, "machine": machine(), "load_average": _load()}
    if measures:
        about = made_by(measures, command)
    content = {
        **about,
        "commit": commit() + ("+" if _is_changed() else ""),
        "python": platform.python_version(),
        "settings": settings,
        "results": results,
    }
    text = json.dumps(content, indent=1) + "\n"
    (RESULTS / f"serving-{name}.json").write_text(text)
    print(text)


def _load() -> float:
    """Return the mean number of runnable processes in the last minute, the benchmark's own (about 2) included."""
    return round(os.getloadavg()[0], 1)


def _is_changed() -> bool:
    done = subprocess.run(["git", "-C", str(RESULTS), "status", "--porcelain", ":/src"], capture_output=True)
    return done.returncode == 0 and bool(done.stdout.strip())


def _shown(argument: str) -> str:
    """Return an argument without the folders of this machine."""
    path = Path(argument)
    return "/".join(path.parts[-2:]) if path.is_absolute() else argument
