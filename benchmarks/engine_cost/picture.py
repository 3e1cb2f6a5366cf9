"""All ratios of a run beside what was asked for, as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib

from engine_cost.page import Result, commits, machine_line, rows_of

MET: Final = "#2da44e"
MISSED: Final = "#d9730d"
PLAIN: Final = "#57606a"
INK: Final = "#1f2328"
LEAST: Final = 0.05
"""Share of what was asked for below which a figure is drawn as this much."""
PANELS: Final = (
    ("throughput: batchmaker over the baseline, right is better", "higher", True),
    ("latency: batchmaker over the baseline, left is better", "lower", True),
    ("costs over what was asked for, left is better", "lower", False),
)


def panels_of(rows: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """Return titles and rows of the panels that have any. A figure without a baseline is shown over its target."""
    found = []
    for title, better, has_baseline in PANELS:
        mine = [row for row in rows if (row["theirs"] is not None) == has_baseline]
        mine = [row for row in mine if not has_baseline or row["better"] == better]
        if mine:
            found.append((title, mine))
    return found


def place(row: Result) -> tuple[float, float | None]:
    """Return where a row's dot and the mark of its target stand; costs are given over what was asked for."""
    if row["theirs"] is not None:
        return row["ratio"], row["target"]
    over = row["ratio"] / row["target"]
    return over if row["better"] == "lower" else 1 / max(over, LEAST), 1.0


def label(row: Result) -> str:
    """Return what stands beside a row."""
    return f"{row['work']}, {row['figure']}" + (f"\nover {row['baseline']}" if row["baseline"] else "")


def draw(path: Path, found: Result) -> None:
    """Write the picture as a PNG: a dot for each ratio, a black mark for what was asked, on logarithmic axes."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = panels_of(rows_of(found))
    heights = [len(rows) + 1.2 for _, rows in panels]
    figure, grid = plt.subplots(
        len(panels), 1, figsize=(11.5, 0.36 * sum(heights) + 1.2), squeeze=False, height_ratios=heights
    )
    for ax, (title, rows) in zip(grid.flat, panels, strict=True):
        _panel(ax, title, rows)
    figure.suptitle("What the engine costs beside batching by hand", x=0.012, ha="left", fontsize=14, fontweight="bold")
    about = found["machine"]
    note = f"{about['cpu']}, one compute thread, commit {commits(found)}; dot: measured, mark: asked for"
    if "Of a quick run" in machine_line(found):
        note += " (a quick run: the figures mean nothing)"
    figure.text(0.012, 1 - 0.5 / figure.get_figheight(), note, fontsize=9.5, color=PLAIN, va="top")
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.6 / figure.get_figheight()))
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


def _panel(ax: Any, title: str, rows: Sequence[Result]) -> None:
    ax.set_xscale("log")
    for height, row in enumerate(rows):
        at, asked = place(row)
        colour = {True: MET, False: MISSED, None: PLAIN}[row["met"]]
        if asked is not None:
            ax.plot([at, asked], [height, height], color=colour, lw=1.5, alpha=0.5)
            ax.plot([asked], [height], "|", color=INK, ms=12, mew=2)
        ax.plot([at], [height], "o", color=colour, ms=7)
        text = f"{row['ratio']:.3g}" + ("" if row["theirs"] is not None else f" {row['unit']}")
        ax.annotate(text, (at, height), (0, 6), textcoords="offset points", ha="center", fontsize=8, color=INK)
    ax.axvline(1.0, color="#d0d7de", lw=1, zorder=0)
    ax.set_yticks(range(len(rows)), [label(row) for row in rows], fontsize=7.5)
    ax.set_ylim(len(rows) - 0.4, -0.8)
    ax.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK)
    ax.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    ax.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    ax.grid(axis="x", which="both", color="#eceef1")
    ax.margins(x=0.08)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
