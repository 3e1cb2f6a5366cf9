"""What a PQ-tree costs by its number of elements.

    python papers/benchmarks/pq_tree.py [--repeat 9] [--json FILE] [--png FILE]

Over n elements in random order, three families of sets that hold together, each in random order: all pairs of
neighbours, windows of 2 to 16 elements, and blocks of 2, 4, 8, ... elements. Timed is the whole: making the tree,
reducing all sets, reading off an order. The size of a family is n plus the elements of its sets; where time grows as
that to the power of 1, it is linear. The garbage collector is off, since what it costs depends on what else is alive.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from batchmaker.cli.bench.report import commit, machine
from batchmaker.lab.plots.sweeps import Line, Panel, draw_panels
from batchmaker_papers.planner.pq_tree import PQTree
from shared import RESULTS, made_by

SIZES = (100, 200, 500, 1000, 2000, 5000, 10_000)
FAMILIES = ("pairs", "windows", "blocks")
MEASURES: Final = ("papers/benchmarks/pq_tree.py", "papers/src/batchmaker_papers/planner/pq_tree")


def sets_of(family: str, num_elements: int) -> list[list[int]]:
    """Return the sets of a family, the same ones every time."""
    random_ = random.Random(num_elements)
    hidden = random_.sample(range(num_elements), num_elements)
    if family == "pairs":
        sets = [hidden[begin : begin + 2] for begin in range(num_elements - 1)]
    elif family == "windows":
        sets = [hidden[begin : begin + random_.randint(2, 16)] for begin in range(0, num_elements - 16, 3)]
    else:
        widths = [2**power for power in range(1, num_elements.bit_length())]
        sets = [hidden[begin : begin + width] for width in widths for begin in range(0, num_elements, width)]
    random_.shuffle(sets)
    return sets


def seconds_of(num_elements: int, sets: list[list[int]]) -> float:
    """Return the seconds of this process from no tree to an order in which all sets hold."""
    gc.collect()
    gc.disable()
    begin_s = time.process_time()
    tree = PQTree(num_elements)
    held = all(map(tree.reduce, sets))
    tree.frontier()
    took_s = time.process_time() - begin_s
    gc.enable()
    if not held:
        raise SystemExit("sets that hold together were refused")
    return took_s


def measured(family: str, num_elements: int, repeat: int) -> dict[str, Any]:
    """Return the row of one family and size: quartiles over the repetitions."""
    sets = sets_of(family, num_elements)
    size = num_elements + sum(map(len, sets))
    low, middle, high = np.percentile([seconds_of(num_elements, sets) for _ in range(repeat)], (25, 50, 75)).tolist()
    print(f"{family:8} {num_elements:6} elements  {1e3 * middle:8.1f} ms  {1e6 * middle / size:5.1f} us per element")
    return {
        "family": family, "elements": num_elements, "sets": len(sets), "size": size,
        "p25_ms": 1e3 * low, "median_ms": 1e3 * middle, "p75_ms": 1e3 * high, "us_per_size": 1e6 * middle / size,
    }  # fmt: skip


def exponent(rows: list[dict[str, Any]]) -> float:
    """Return the power of the size that fits the medians best."""
    sizes, times = (np.log([row[key] for row in rows]) for key in ("size", "median_ms"))
    return float(np.polyfit(sizes, times, 1)[0])


def draw(path: Path, rows: list[dict[str, Any]], exponents: dict[str, float], repeat: int) -> None:
    """Draw time against elements, and per element of the sets."""
    panels = []
    for title, unit, scale in (
        ("Time of the whole", "ms", lambda row: 1.0),
        ("Time per element of the tree and its sets", "us", lambda row: 1e3 / row["size"]),
    ):
        lines = []
        for family, power in exponents.items():
            mine = [row for row in rows if row["family"] == family]
            low, middle, high = ([row[key] * scale(row) for row in mine] for key in ("p25_ms", "median_ms", "p75_ms"))
            name = f"{family}: size to the power of {power:.2f}"
            lines.append(Line(name, [row["elements"] for row in mine], middle, low, high))
        panels.append(Panel(title, "elements", unit, lines))
    about = f"{machine()['cpu']}, one thread, commit {commit()}; median and quartiles of {repeat} repetitions"
    draw_panels(path, panels, "A PQ-tree's cost by its number of elements", about)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="up to 1,000 columns, once each")
    parser.add_argument("--json", type=Path, default=RESULTS / "pq-tree.json")
    parser.add_argument("--png", type=Path, default=RESULTS / "pq-tree.png")
    options = parser.parse_args()
    sizes = [size for size in SIZES if size <= 1000 or not options.quick]
    options.repeat = 1 if options.quick else options.repeat
    rows = [measured(family, size, options.repeat) for family in FAMILIES for size in sizes]
    exponents = {family: exponent([row for row in rows if row["family"] == family]) for family in FAMILIES}
    print("time grows as the size to the power of", {family: round(power, 3) for family, power in exponents.items()})
    content = {
        **made_by(MEASURES, "python papers/benchmarks/pq_tree.py"),
        "quick": options.quick,
        "exponents": exponents,
        "rows": rows,
    }
    options.json.write_text(json.dumps(content, indent=1) + "\n")
    draw(options.png, rows, exponents, options.repeat)


if __name__ == "__main__":
    main()
