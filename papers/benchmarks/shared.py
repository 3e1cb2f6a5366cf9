"""What these scripts share with the product's own in `benchmarks/`: how results are described, and pages written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "benchmarks"))  # scripts there import each other by name

from intervals import interval  # noqa: E402
from pages import fill, number, table  # noqa: E402
from provenance import CPU_EXECUTOR, ROOT, Result, command_now, digest, made_by, result_path  # noqa: E402

RESULTS: Final = HERE / "results"
IMAGES: Final = ROOT / "papers" / "docs" / "images"

__all__ = [
    "CPU_EXECUTOR",
    "IMAGES",
    "RESULTS",
    "ROOT",
    "Result",
    "command_now",
    "digest",
    "fill",
    "interval",
    "made_by",
    "number",
    "result_path",
    "table",
]
