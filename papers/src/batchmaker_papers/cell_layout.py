"""A picture of the places of values inside a cell, before and after planning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchmaker.lab.plots.pictures import GREY, INK, _colour, _pyplot, _save


@dataclass(frozen=True, slots=True)
class CellStrips:
    """One cell. written, planned: names of its values in program order and in memory order.

    widths: columns by name. batches: names of values that are computed together, in memory order.
    """

    title: str
    written: Sequence[str]
    planned: Sequence[str]
    widths: Mapping[str, int]
    batches: Sequence[Sequence[str]]


def draw_cell_layouts(path: Path, cells: Sequence[CellStrips], subtitle: str) -> None:
    """Write a PNG with two strips of memory for each cell: values of one batch have one colour, lone ones are grey."""
    plt = _pyplot()
    height = 2.1 * len(cells) + 0.8
    figure, axes = plt.subplots(len(cells), 1, figsize=(13, height), squeeze=False)
    for ax, cell in zip(axes[:, 0], cells, strict=True):
        colours: dict[str, Any] = {
            name: _colour(number) for number, batch in enumerate(cell.batches) if len(batch) > 1 for name in batch
        }
        for y, names in ((1, cell.written), (0, cell.planned)):
            _strip(ax, y, names, cell.widths, colours)
        ax.set_yticks([1, 0], ["as written", "planned"])
        ax.set_title(cell.title, loc="left", fontsize=11, color=INK)
        ax.set_xticks([])
        for spine in ax.spines.values():
            spine.set_visible(False)
    figure.suptitle("Memory of a cell's values", x=0.012, ha="left", fontsize=15, fontweight="bold", color=INK)
    figure.text(0.012, 1 - 0.5 / height, subtitle, fontsize=10, color="#5b626e", va="top")
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.7 / height))
    _save(plt, figure, path)


def _strip(ax: Any, y: int, names: Sequence[str], widths: Mapping[str, int], colours: Mapping[str, Any]) -> None:
    largest = max((widths[name] for name in names), default=1)
    left = 0.0
    for name in names:
        width = max(widths[name] / largest, 0.15)
        ax.barh([y], [width], left=[left], height=0.8, color=[colours.get(name, GREY)], edgecolor="white")
        ax.text(left + width / 2, y, name, ha="center", va="center", fontsize=7, color=INK, rotation=90)
        left += width
