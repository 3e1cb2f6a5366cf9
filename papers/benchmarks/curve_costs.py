"""What the cells of the curves' networks cost on a CPU, measured: `curves.py --measure`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from batchmaker.cli import options as cli_options
from batchmaker.cli.cell_times import bound_registry, measured_cells
from shared import RESULTS

COSTS: Final = RESULTS / "curves-costs.json"
SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
NETWORKS: Final[dict[str, dict[str, Any]]] = {
    "lstm": {"hidden": 1024, "dtype": "bfloat16", "max_batch": 512},
    "seq2seq": {"hidden": 1024, "dtype": "bfloat16", "max_batch": 512, "vocabulary_size": 30_000},
    "treelstm": {"hidden": 256, "max_batch": 512},
}  # fmt: skip
MEASURES: Final = ("papers/benchmarks/curve_costs.py", "src/batchmaker/compile", "src/batchmaker/cli/cell_times.py")


def measure(sizes: Sequence[int], seconds: float, rounds: int = 3) -> dict[str, Any]:
    """Return the time of every cell at each size: the least of the rounds' medians, because others use the machine."""
    found = {}
    for name, options in NETWORKS.items():
        registry = bound_registry(cli_options.make_model(name, **options))
        seen = [measured_cells(registry, sizes, seconds, 1) for _ in range(rounds)]
        found[name] = {
            cells[0].name: np.min([cell.median_s for cell in cells], axis=0).tolist()
            for cells in zip(*seen, strict=True)
        }
    return {"sizes": list(sizes), "cells": found}
