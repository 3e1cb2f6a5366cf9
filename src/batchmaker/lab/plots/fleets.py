"""Pictures of fleets over time: who serves, what waits, how long answers take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from batchmaker.lab.plots.pictures import INK, _number_axes, _pyplot, _save
from batchmaker.lab.plots.sweeps import COLOURS


@dataclass(frozen=True, slots=True)
class TimeLine:
    """One number over time. style: of the line, as matplotlib writes it."""

    name: str
    at_s: Sequence[float]
    y: Sequence[float]
    style: str = "-"


@dataclass(frozen=True, slots=True)
class TimePanel:
    """One of several pictures above each other, over the same time. log: y has a logarithmic axis."""

    title: str
    unit: str
    lines: Sequence[TimeLine]
    log: bool = False


def draw_over_time(path: Path, panels: Sequence[TimePanel], title: str, subtitle: str) -> None:
    """Write a PNG; lines of one name have one colour in all panels. DataError if it cannot be written."""
    plt = _pyplot()
    height = 2.5 * len(panels) + 1.4
    figure, axes = plt.subplots(len(panels), 1, figsize=(11, height), sharex=True, squeeze=False)
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    colour = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    for ax, panel in zip(axes.flat, panels, strict=True):
        for line in panel.lines:
            ax.plot(line.at_s, line.y, line.style, color=colour[line.name], lw=1.7, label=line.name)
        ax.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", color=INK)
        _number_axes(ax, panel.unit, log=panel.log)
    axes[-1][0].set_xlabel("seconds", color=INK)
    shown = {
        line.name: handle
        for ax, panel in zip(axes.flat, panels, strict=True)
        for line, handle in zip(panel.lines, ax.get_lines(), strict=True)
    }
    figure.suptitle(title, x=0.012, ha="left", fontsize=15, fontweight="bold", color=INK)
    figure.text(0.012, 1 - 0.5 / height, subtitle, fontsize=9.5, color="#5b626e", va="top")
    figure.legend(
        list(shown.values()), list(shown), loc="lower left", bbox_to_anchor=(0.01, 0.005), ncols=4, frameon=False
    )
    figure.tight_layout(rect=(0, 0.3 * -(-len(names) // 4) / height + 0.02, 1, 1 - 0.62 / height))
    _save(plt, figure, path)
