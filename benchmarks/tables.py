"""Print the results in benchmarks/results as the Markdown table of policies in docs/benchmarks.md.

Usage: python benchmarks/tables.py [RESULTS]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def rows(results: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return (file, one result) in order of file name."""
    found = []
    for path in sorted(results.glob("*.json")):
        data = json.loads(path.read_text())
        if isinstance(data, list):
            found += [(path.stem, result) for result in data if "policy" in result]
    return found


def table(found: list[tuple[str, dict[str, Any]]]) -> str:
    """Return all results as one Markdown table."""
    columns = ("run", "policy", "threads", "offered/s", "served/s", "cells/s", "of reference", "p50 ms", "p90 ms")
    columns += ("p99 ms", "queue p99 ms", "task ms", "batch", "padding", "scheduler", "µs/node")
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for name, result in found:
        offered = result["offered_rps"]
        reference = result["reference_cells_per_s"]
        cells = (
            name, result["policy"], str(result["threads"]),
            "saturated" if offered is None else f"{offered:.0f}",
            f"{result['served_rps']:.0f}", f"{result['useful_cells_per_s']:,.0f}",
            f"{result['useful_cells_per_s'] / reference:.2f}" if reference else "",
            *(f"{result[key]:.0f}" for key in ("p50_ms", "p90_ms", "p99_ms")),
            f"{result['queue_p99_ms']:.1f}", f"{result['task_ms']:.1f}", f"{result['mean_batch']:.0f}",
            f"{100 * result['padding_share']:.0f} %", f"{100 * result['scheduler_share']:.1f} %",
            f"{result['scheduler_us_per_node']:.2f}",
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results"
    found = rows(results)
    print(table(found))
    machines = {
        (result["machine"] if isinstance(result["machine"], str) else json.dumps(result["machine"]))
        for _, result in found
    }
    print("\nmachine:", "; ".join(sorted(machines)))
    print("commit:", ", ".join(sorted({str(result["commit"]) for _, result in found})))


if __name__ == "__main__":
    main()
