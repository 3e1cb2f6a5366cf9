"""Tables and pictures of papers/docs/ed-batch-throughput.md, from what ed_batch_throughput.py has measured.

    python papers/benchmarks/throughput_page.py    # draws what ed_batch_sizes.py has measured

A result is one workload: a row for each order and kind of cells (`bound`, `planned`, or `gates`: gate by gate).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import matplotlib

from batchmaker.cli.requests import LATTICES, TAGGERS, TREES
from batchmaker.lab.plots.sweeps import Line, Panel, draw_panels
from shared import IMAGES, RESULTS, Result, fill, table

SIZES: Final = (1, 8, 16, 32, 64, 128, 256)
HEURISTICS: Final = ("agenda", "depth")
"""What DyNet has; the better of them is what ratios are over."""
TASKS: Final = "learned, 5 steps"
POLICIES: Final = (*HEURISTICS, "agenda-remaining", "sufficient", "learned")
PLANNED: Final = (*HEURISTICS, "learned")
OURS: Final = ("learned", TASKS, "sufficient")
COLUMNS: Final = {"bound": (*POLICIES, TASKS), "planned": (*PLANNED, TASKS), "gates": HEURISTICS}
RATIOS: Final = (
    "learned", "best of ours", "best of ours, both planned", "planning alone", "ours planned over theirs not",
    "ours planned over theirs gate by gate",
)  # fmt: skip
BARS: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "agenda": (("agenda",), "bound"),
    "depth": (("depth",), "bound"),
    "learned": (("learned",), "bound"),
    "best of ours": (OURS, "bound"),
    "best of ours, planned": (OURS, "planned"),
    "agenda or depth, gate by gate": (HEURISTICS, "gates"),
}
WANTED: Final = {
    **dict.fromkeys(TREES, 1.3), **dict.fromkeys((*TAGGERS, "lstm-nmt"), 1.1), **dict.fromkeys(LATTICES, 1.5),
}  # fmt: skip


def find(result: Result, order: str, cells: str) -> Result | None:
    """Return the row of an order with cells of this kind, if it was measured."""
    return next((o for o in result["orders"] if o["order"] == order and o["cells"] == cells), None)


def best(result: Result, orders: Sequence[str], cells: str) -> float:
    """Return the most requests per second of these orders; 0 if there is none."""
    return max((o["per_s"] for o in result["orders"] if o["order"] in orders and o["cells"] == cells), default=0.0)


def ratio(ours: float, theirs: float) -> float:
    """Return how often theirs goes into ours; NaN where one of them was not measured."""
    return ours / theirs if ours and theirs else math.nan


def rates_table(results: list[Result], cells: str) -> str:
    """Return requests per second (size of the mini-batch) of every order, a workload to a row."""
    columns = COLUMNS[cells]
    rows = []
    for result in results:
        found = [find(result, order, cells) for order in columns]
        rows.append([result["workload"], *("-" if o is None else f"{o['per_s']:,.0f} ({o['size']})" for o in found)])
    return table(["workload", *columns], rows)


def ratios(result: Result) -> dict[str, float]:
    """Return how much faster ours is than the better of DyNet's orders, by what is compared; see RATIOS."""
    bound, planned, gates = (best(result, HEURISTICS, cells) for cells in ("bound", "planned", "gates"))
    ours = best(result, OURS, "planned")
    found = (
        ratio(best(result, ("learned",), "bound"), bound), ratio(best(result, OURS, "bound"), bound),
        ratio(ours, planned), ratio(planned, bound), ratio(ours, bound), ratio(ours, gates),
    )  # fmt: skip
    return dict(zip(RATIOS, found, strict=True))


def ratios_table(results: list[Result]) -> str:
    """Return the ratios, a workload to a row, and what was wanted; "-" where something was not measured."""
    rows = []
    for result in results:
        found = ["-" if math.isnan(value) else f"{value:.2f}" for value in ratios(result).values()]
        rows.append([result["workload"], *found, f"{WANTED[result['workload']]:.1f}"])
    return table(["workload", *RATIOS, "wanted"], rows)


def sizes_table(results: list[Result]) -> str:
    """Return the learnt order's rate over that of the better of DyNet's, at each size of mini-batch."""
    rows = []
    for result in results:
        bound = [row for row in result["orders"] if row["cells"] == "bound"]
        seen = {row["order"]: {int(size): rate for size, rate in row["seen"].items()} for row in bound}
        theirs = {size: max(seen[order][size] for order in HEURISTICS) for size in seen["learned"]}
        ratios = [f"{seen['learned'][size] / theirs[size]:.2f}" if size in theirs else "-" for size in SIZES]
        rows.append([result["workload"], *ratios])
    return table(["workload", *map(str, SIZES)], rows)


def shares_table(results: list[Result]) -> str:
    """Return where the time goes, for the better of DyNet's orders and the learnt one."""
    rows = []
    for result in results:
        theirs = max((o for order in HEURISTICS if (o := find(result, order, "bound"))), key=lambda o: o["per_s"])
        for found in (theirs, find(result, "learned", "bound")):
            if found is not None:
                shares = [f"{found['shares'][part]:.0%}" for part in ("busy_s", "scheduler_s", "unfold_s")]
                counts = (str(found["size"]), str(found["steps"]), f"{found['cells_per_step']:.0f}")
                us = f"{found['scheduler_us_per_step']:.0f}"
                rows.append([result["workload"], found["order"], *counts, *shares, us])
    columns = "order | mini-batch | steps | cells a step | cells | scheduler | unfolding | scheduler, us a step"
    return table(["workload", *columns.split(" | ")], rows)


def peer_table(found: Result) -> str:
    """Return DyNet's best and ours on the same inputs."""
    rows = []
    for ours in found["ours"]:
        for row in ours["orders"]:
            how = f"here, {row['order']}{', planned' if row['cells'] == 'planned' else ''}"
            rows.append([how, ours["workload"], str(row["size"]), f"{row['per_s']:,.0f}", ""])
        theirs = [row for row in found["dynet"] if row["workload"] == ours["workload"]]
        for build, strategy in dict.fromkeys((row["build"], row["strategy"]) for row in theirs):
            mine = [row for row in theirs if (row["build"], row["strategy"]) == (build, strategy)]
            row, alone = (max(mine, key=lambda row: row[key]) for key in ("per_s", "per_s_without_building"))
            rates = [f"{row['per_s']:,.0f}", f"{alone['per_s_without_building']:,.0f}"]
            rows.append([f"{build}, {strategy}", ours["workload"], str(row["size"]), *rates])
    return table(("what", "workload", "mini-batch", "requests/s", "without building graphs"), rows)


def draw(path: Path, results: list[Result], about: str) -> None:
    """Draw requests per second over those of the better of DyNet's orders, a group of bars to a workload."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(12.5, 4.8))
    width = 0.8 / len(BARS)
    for number, (label, (orders, cells)) in enumerate(BARS.items()):
        rates = [best(result, orders, cells) for result in results]
        over = [ratio(rate, best(result, HEURISTICS, "bound")) for rate, result in zip(rates, results, strict=True)]
        places = [group + (number + 0.5) * width - 0.4 for group in range(len(results))]
        ax.bar(places, over, width, label=label)
        for place, height, rate in zip(places, over, rates, strict=True):
            if not math.isnan(height):
                ax.text(place, height, f" {rate:,.0f}", rotation=90, ha="center", va="bottom", fontsize=7)
    ax.axhline(1.0, color="#5b626e", linewidth=1)
    ax.set_xticks(range(len(results)), [result["workload"] for result in results], rotation=15)
    ax.set_ylabel("over the better of agenda and depth")
    ax.margins(y=0.18)
    ax.legend(frameon=False, ncols=len(BARS), loc="upper left", bbox_to_anchor=(0, 1.12), fontsize=9)
    figure.suptitle(f"Requests per second (numbers: as they are); {about}", x=0.012, ha="left", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=140)
    plt.close(figure)


def show(found: Result, page: Path, png: Path) -> None:
    """Put all tables into the page and draw the picture that stands in it."""
    results, about = found["results"], found["machine"]
    made = f"{about['cpu']}, {about['cores']} cores, commit {found['commit']}, medians of {found['rounds']}."
    sections = {
        "ratios": ratios_table(results), "rates": rates_table(results, "bound"),
        "rates-planned": rates_table(results, "planned"), "rates-gates": rates_table(results, "gates"),
        "shares": shares_table(results), "sizes": sizes_table(results), "machine": made,
    }  # fmt: skip
    if "peer" in found:
        sections["peer"] = peer_table(found["peer"])
    fill(page, sections)
    draw(png, results, made)


def draw_sizes(found: Result, path: Path) -> None:
    """Draw how much faster a learnt order is than DyNet's orders in this engine, and than DyNet, by hidden size."""
    dynet = {
        key: max(row["per_s"] for row in found["dynet"] if (row["workload"], row["hidden"]) == key)
        for key in {(row["workload"], row["hidden"]) for row in found["dynet"]}
    }
    lines: tuple[list[Line], list[Line]] = ([], [])
    for name in dict.fromkeys(row["workload"] for row in found["sizes"]):
        rows = [row for row in found["sizes"] if row["workload"] == name and (name, row["hidden"]) in dynet]
        places = [math.log2(row["hidden"]) for row in rows]
        over = ([row["learned"] / row["best"] for row in rows],
                [row["learned"] / dynet[name, row["hidden"]] for row in rows])  # fmt: skip
        for drawn, ratios_ in zip(lines, over, strict=True):
            drawn.append(Line(name, places, ratios_, ratios_, ratios_))
    titles = ("over the better of agenda and depth, in this engine", "over the better strategy of DyNet itself")
    panels = [Panel(title, "log2 of the hidden size", "ratio", each) for title, each in zip(titles, lines, strict=True)]
    about = f"{found['machine']['cpu']}, one thread, mini-batches of 64, commit {found['commit']}"
    draw_panels(path, panels, "Requests per second of the learnt order", about)


if __name__ == "__main__":
    measured = json.loads((RESULTS / "ed-batch-sizes.json").read_text("utf-8"))
    draw_sizes(measured, IMAGES / "ed-batch-sizes.png")
