"""Pictures of many simulations or measurements: one line per policy, quartiles over seeds as a band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from batchmaker.lab.plots.pictures import INK, _number_axes, _pyplot, _save

COLOURS: Final = ("#1f6feb", "#d9730d", "#2da44e", "#8250df", "#bf3989", "#9a6700", "#57606a", "#0b7285", "#e5484d")


@dataclass(frozen=True, slots=True)
class Line:
    """One policy's numbers y at the places x, with quartiles low and high over seeds."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True, slots=True)
class Panel:
    """One of several pictures. log: y has a logarithmic axis."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    log: bool = False


def draw_panels(path: Path, panels: Sequence[Panel], title: str, subtitle: str) -> None:
    """Write a PNG with all panels, two a row; a policy has one colour in all. DataError if it cannot be written."""
    plt = _pyplot()
    rows = -(-len(panels) // 2)
    height = 3.9 * rows + 1.3
    figure, grid = plt.subplots(rows, 2, figsize=(12.5, height), squeeze=False)
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    colour = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    for ax in grid.flat[len(panels) :]:
        ax.set_visible(False)
    for ax, panel in zip(grid.flat, panels, strict=False):
        for line in panel.lines:
            ax.plot(line.x, line.y, "o-", color=colour[line.name], lw=2, ms=4.5, label=line.name, clip_on=False)
            ax.fill_between(line.x, line.low, line.high, color=colour[line.name], alpha=0.15, lw=0)
        ax.set_title(panel.title, loc="left", fontsize=11.5, fontweight="bold", color=INK)
        ax.set_xlabel(panel.x, color=INK)
        _number_axes(ax, panel.y, log=panel.log)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.suptitle(title, x=0.012, y=1 - 0.12 / height, ha="left", fontsize=15, fontweight="bold", color=INK)
    figure.text(0.012, 1 - 0.5 / height, subtitle, fontsize=10, color="#5b626e", va="top")
    figure.legend(
        handles, labels, loc="lower left", bbox_to_anchor=(0.01, 0.005), ncols=min(4, len(names)), frameon=False
    )
    figure.tight_layout(rect=(0, 0.3 * -(-len(names) // 4) / height + 0.02, 1, 1 - 0.62 / height))
    _save(plt, figure, path)
