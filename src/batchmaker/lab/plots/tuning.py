"""The picture of `batchmaker tune`: predicted and measured times of each configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from batchmaker.lab.plots.pictures import INK, _bare, _pyplot, _save
from batchmaker.lab.plots.sweeps import COLOURS


@dataclass(frozen=True, slots=True)
class TriedBar:
    """One configuration. predicted_ms: by phase, in the order drawn. measured_ms: None if it was not measured."""

    label: str
    predicted_ms: Mapping[str, float]
    measured_ms: float | None


def draw_tuning(path: Path, bars: Sequence[TriedBar], subtitle: str) -> None:
    """Write a PNG with a bar for each configuration, stacked by phase, and a mark where it was measured."""
    plt = _pyplot()
    height = 0.42 * len(bars) + 2.0
    figure, ax = plt.subplots(figsize=(10.5, height))
    places = range(len(bars))
    left = [0.0] * len(bars)
    for colour, phase in zip(COLOURS, bars[0].predicted_ms, strict=False):
        widths = [bar.predicted_ms[phase] for bar in bars]
        ax.barh(places, widths, left=left, height=0.66, color=colour, label=phase)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    measured = [
        (bar.measured_ms, place) for bar, place in zip(bars, places, strict=True) if bar.measured_ms is not None
    ]
    if measured:
        ax.plot(*zip(*measured, strict=True), "D", color=INK, ms=7, label="measured", ls="none")
    ax.set_yticks(list(places), [bar.label for bar in bars], fontsize=9)
    ax.invert_yaxis()
    ax.set_xlabel("ms of a call", color=INK)
    ax.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _bare(ax)
    what = "Predicted and measured" if measured else "Predicted"
    figure.suptitle(f"{what} time of the best configurations", x=0.012, ha="left", fontsize=13, color=INK)
    figure.text(0.012, 1 - 0.45 / height, subtitle, fontsize=9.5, color="#5b626e", va="top")
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.55 / height))
    _save(plt, figure, path)
