"""Pictures of measurements. matplotlib is loaded when the first one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchmaker.engine.timeline import Span
from batchmaker.errors import DataError, needing

INK = "#22252b"
GREY = "#d9dce1"
BLUE = "#1f6feb"
ORANGE = "#d9730d"


@dataclass(frozen=True, slots=True)
class DrawnLanes:
    """One policy's stretch of time. title: its name and its results; note: an explanation."""

    title: str
    note: str
    spans: Sequence[Span]


@dataclass(frozen=True, slots=True)
class Curve:
    """Step time and throughput of one cell against its batch size. best: the size chosen."""

    name: str
    sizes: Sequence[int]
    step_ms: Sequence[float]
    cells_per_s: Sequence[float]
    best: int


def check_drawing() -> None:
    """Raise MissingExtraError unless pictures can be drawn."""
    _matplotlib()


def draw_timeline(
    path: Path, lanes: Sequence[DrawnLanes], begin_s: Sequence[float], seconds: float, subtitle: str
) -> None:
    """Write a PNG of the requests in each row over time, after figure 5 of BatchMaker: one colour per request.

    begin_s: start of the stretch drawn, for each of `lanes`. Grey, hatched: the row is held by a finished request.
    """
    plt = _pyplot()
    figure, axes = plt.subplots(len(lanes), 1, figsize=(13, 3.7 * len(lanes) + 1), sharex=True)
    for ax, lane, start_s in zip([axes] if len(lanes) == 1 else axes, lanes, begin_s, strict=True):
        rows = max((span.row for span in lane.spans), default=0) + 1
        height, edge = (0.84, 0.5) if rows < 40 else (1.0, 0.25)
        done = [span for span in lane.spans if span.end_s > span.used_s]
        if done:
            ax.barh(
                [span.row for span in done],
                [1e3 * (span.end_s - span.used_s) for span in done],
                left=[1e3 * (span.used_s - start_s) for span in done],
                height=0.84,
                color=GREY,
                hatch="////",
                edgecolor="#b4b9c2",
                linewidth=0,
            )
        ax.barh(
            [span.row for span in lane.spans],
            [1e3 * (span.used_s - span.begin_s) for span in lane.spans],
            left=[1e3 * (span.begin_s - start_s) for span in lane.spans],
            height=height,
            color=[_colour(span.request) for span in lane.spans],
            edgecolor="white",
            linewidth=edge,
        )
        ax.set_title(lane.title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=22)
        ax.text(0, 1.025, lane.note, transform=ax.transAxes, fontsize=9.5, color="#5b626e")
        ax.set_ylabel("row of the batch", color=INK)
        ax.yaxis.get_major_locator().set_params(integer=True)
        ax.set_ylim(rows - 0.4, -0.6)
        ax.set_xlim(0, 1e3 * seconds)
        _bare(ax)
    ax.set_xlabel("time (ms)", color=INK)
    figure.suptitle("Requests in the batch over time", x=0.012, ha="left", fontsize=16, fontweight="bold", color=INK)
    figure.text(0.012, 0.945, subtitle, fontsize=10.5, color="#5b626e", va="top")
    figure.tight_layout(rect=(0, 0, 1, 0.965), h_pad=1.2)
    _save(plt, figure, path)


def draw_profile(path: Path, curves: Sequence[Curve], subtitle: str) -> None:
    """Write a PNG of step time and throughput against batch size, after figure 3 of BatchMaker: one row per cell."""
    plt = _pyplot()
    from matplotlib import ticker

    figure, grid = plt.subplots(len(curves), 2, figsize=(11.5, 3.6 * len(curves) + 1.1), squeeze=False)
    for (left, right), curve in zip(grid, curves, strict=True):
        left.loglog(curve.sizes, curve.step_ms, "o-", color=ORANGE, lw=2, ms=4.5)
        right.semilogx(curve.sizes, curve.cells_per_s, "o-", color=BLUE, lw=2, ms=4.5)
        left.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        left.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        left.yaxis.set_minor_locator(ticker.NullLocator())
        left.set_title(f"{curve.name}: time of one step", loc="left", fontsize=11.5, fontweight="bold", color=INK)
        right.set_title(f"{curve.name}: throughput", loc="left", fontsize=11.5, fontweight="bold", color=INK)
        left.set_ylabel("ms", color=INK)
        right.set_ylabel("cells per second", color=INK)
        right.set_ylim(0, 1.18 * max(curve.cells_per_s))
        right.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.0f}"))
        for ax in (left, right):
            ax.set_xticks(curve.sizes, [str(size) for size in curve.sizes], fontsize=9)
            ax.xaxis.set_minor_locator(ticker.NullLocator())
            ax.axvline(curve.best, color="#8a919e", lw=1, ls="--")
            ax.grid(axis="y", color="#eceef1")
            ax.set_axisbelow(True)
            ax.set_xlabel("batch size", color=INK)
            _bare(ax)
        at = list(curve.sizes).index(curve.best)
        right.plot([curve.best], [curve.cells_per_s[at]], "o", ms=10, mfc="none", mec=INK, mew=1.5)
        right.text(
            curve.best,
            1.12 * max(curve.cells_per_s),
            f"max_batch {curve.best} ",
            ha="right",
            va="center",
            fontsize=10,
            color=INK,
        )
    height = 3.6 * len(curves) + 1.1
    figure.suptitle("Batch size against speed", x=0.012, ha="left", fontsize=15, fontweight="bold", color=INK)
    figure.text(0.012, 1 - 0.5 / height, subtitle, fontsize=10, color="#5b626e", va="top")
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.7 / height))
    _save(plt, figure, path)


def _colour(request: int) -> Any:
    """Return a colour unlike those of the requests before and after: hues step by the golden ratio."""
    from matplotlib.colors import hsv_to_rgb

    return tuple(hsv_to_rgb(((request * 0.618034) % 1.0, 0.42 + 0.2 * (request % 3) / 2, 0.9 - 0.12 * (request % 2))))


def _number_axes(ax: Any, unit: str, *, log: bool) -> None:
    """Dress the axes of a picture of numbers: what y counts, from 0 or logarithmic, over light lines."""
    ax.set_ylabel(unit, color=INK)
    if log:
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0)
    ax.grid(axis="y", color="#eceef1")
    ax.set_axisbelow(True)
    _bare(ax)


def _bare(ax: Any) -> None:
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color("#a9b0bb")
    ax.tick_params(colors="#5b626e")


def _matplotlib() -> Any:
    with needing("plots", "A picture"):
        import matplotlib
    return matplotlib


def _pyplot() -> Any:
    _matplotlib().use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(plt: Any, figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=140)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: the picture cannot be written ({error}).") from error
    finally:
        plt.close(figure)
