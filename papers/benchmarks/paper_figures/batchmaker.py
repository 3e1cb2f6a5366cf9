"""BatchMaker (EuroSys 2018)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

from paper_figures.entry import Figure, first, result
from shared import number

TITLE: Final = "BatchMaker: Low Latency RNN Inference with Cellular Batching (EuroSys 2018)"
GPU: Final = (
    "The paper has V100s; here cells cost what they cost on one thread of a CPU, so rates are lower and steps longer. "
)
SAME_CELLS: Final = "Padded batches get the same cells, so only who runs together differs. "


def curve(case: str, way: str, load: float) -> dict[str, Any]:
    """Return one point of the simulated curves."""
    return first(first(result("curves.json")["cases"], case=case)["points"], way=way, load=load)


def with_interval(value: list[float], unit: str = "") -> str:
    """Return a mean over seeds and its 95 % interval."""
    return f"{number(value[0])} ± {number(value[1])}{unit}"


def both(
    case: str, load: float, ours: str, theirs: str, figure: str = "p90_ms", unit: str = " ms"
) -> Callable[[], str]:
    """Return what says two lines of a case at one load."""

    def said() -> str:
        a, b = (with_interval(curve(case, way, load)[figure], unit) for way in (ours, theirs))
        return f"at {load:g} of the capacity: {ours} {a}, {theirs} {b}"

    return said


def most(case: str, way: str) -> list[float]:
    """Return the highest rate that a line was seen to serve, with its interval."""
    points = first(result("curves.json")["cases"], case=case)["points"]
    return max((point["served_rps"] for point in points if point["way"] == way), key=lambda value: value[0])


def peaks(case: str, *ways: str) -> Callable[[], str]:
    """Return what says how much each line served at most."""
    return lambda: "at most, requests/s: " + ", ".join(f"{way} {with_interval(most(case, way))}" for way in ways)


def joined(*parts: Callable[[], str]) -> Callable[[], str]:
    """Return what says all parts whose results are there; it raises KeyError without any."""

    def said() -> str:
        found = []
        for part in parts:
            with contextlib.suppress(KeyError):
                found.append(part())
        if not found:
            raise KeyError("no part has been made")
        return "; ".join(found)

    return said


def _step_times() -> str:
    cell = result("profile-lstm.json")["cells"][0]
    times = dict(zip(cell["batch"], cell["step_ms"], strict=True))
    return (
        f"{times[64]:.2f} ms at 64, {times[512]:.1f} ms at 512: {times[512] / times[64]:.1f} times for 8 times the rows"
    )


def _fixed() -> str:
    ours, theirs = most("fixed-24", "cellular"), most("fixed-24", "padded, width 10")
    return f"fixed 24: cellular serves {ours[0] / theirs[0]:.2f} of padded's most"


def _variance() -> str:
    parts = []
    for case in ("fixed-24", "clip-50", "clip-100"):
        a, b = (curve(case, way, 0.5)["p90_ms"][0] for way in ("cellular", "padded, width 10"))
        parts.append(f"{case} {b / a:.1f}")
    return "p90 of padded over cellular at 0.5: " + ", ".join(parts)


def _breakdown() -> str:
    ours, theirs = (curve("lstm-512", way, 0.2) for way in ("cellular", "padded, width 10"))
    return (
        f"queueing p99 {with_interval(ours['queue_p99_ms'], ' ms')} and "
        f"{with_interval(theirs['queue_p99_ms'], ' ms')}, "
        f"computing p50 {with_interval(ours['compute_p50_ms'], ' ms')} and "
        f"{with_interval(theirs['compute_p50_ms'], ' ms')} (cellular, padded)"
    )


PADDED: Final = "padded, width 10"
FIGURES: Final = (
    Figure(
        "Figures 1, 2, 12", "unfolded LSTM, TreeLSTM, Seq2Seq", "explanation", where="[models](../../docs/models.md)"
    ),
    Figure(
        "Figure 3",
        "time of an LSTM step against batch size",
        "in part",
        "185 µs at 64, 784 µs at 512 (V100): 4.2 times for 8 times the rows; best batch 512",
        _step_times,
        "step-times",
        "A CPU is busy with few rows, so throughput gains little above 16 rows; a GPU needs 512.",
    ),
    Figure(
        "Figures 4, 5",
        "graph and cellular batching over time",
        "reproduced",
        "requests leave at 2, 3, 3, 5",
        "the same times, step by step",
        where="`tests/core/test_golden_timelines.py`",
        picture="../../../docs/images/timeline.png",
    ),
    Figure(
        "Figure 6, Algorithm 1",
        "the system, the scheduler",
        "explanation",
        where="[architecture](../../docs/architecture.md), `policies/cellular.py`",
    ),
    Figure(
        "Figure 7 (a)",
        "LSTM, maximum batch 512: latency against throughput",
        "in part",
        "p90 12 ms up to 8,000/s, peak 20,000/s; MXNet and TensorFlow 25 ms and more, peak 16,000/s",
        joined(both("lstm-512", 0.5, "cellular", PADDED), peaks("lstm-512", "cellular", "closed, width 10", PADDED)),
        "curves",
        GPU + SAME_CELLS + "Simulated: only steps take time.",
        picture="curves-lstm-512.png",
    ),
    Figure(
        "Figure 7 (b)",
        "the same with maximum batch 64",
        "in part",
        "latency as with 512 at low load, lower peaks",
        joined(both("lstm-64", 0.5, "cellular", PADDED), peaks("lstm-64", "cellular", PADDED)),
        "curves",
        GPU + "On this CPU 64 rows are as good as 512: the peak does not fall.",
        picture="curves-lstm-64.png",
    ),
    Figure(
        "Figure 8",
        "bucket widths of the padded baseline",
        "in part",
        "width 40 best at low load, 1 best at the peak, 10 a good trade-off",
        joined(
            both("widths", 0.2, "padded, width 40", "padded, width 1"),
            peaks("widths", *(f"padded, width {width}" for width in (1, 5, 10, 20, 40))),
        ),
        "curves",
        SAME_CELLS + "Width 1 is not the best at the peak here: served in turn, most of its buckets are not full.",
        picture="curves-widths.png",
    ),
    Figure(
        "Figure 9",
        "queueing and computing at a quarter of the peak",
        "in part",
        "queueing p99 1.38 ms against over 100 ms",
        _breakdown,
        "curves",
        GPU
        + "A newcomer waits for a task of 4 ms here, in the paper for five steps of 0.25 ms. Both distributions are "
        "in the result (`queue_cdf_ms`, `compute_cdf_ms`).",
        picture="curves-lstm-512.png",
    ),
    Figure(
        "Figure 10",
        "lengths of Europarl's sentences",
        "reproduced",
        "mean 24, 99 % below 100, at most 330",
        "a clipped lognormal with these figures; live runs use the sentences themselves",
        where="`tests/lab/datasets/test_generators.py`",
    ),
    Figure(
        "Figure 11",
        "variance of length: fixed 24, clipped at 50 and at 100",
        "in part",
        "fixed: cellular reaches 87 % of the ideal, padded all of it; the gain grows with the variance",
        joined(_fixed, _variance),
        "curves",
        "In the simulator scheduling and gathering take no time, so nothing is lost at fixed length; on the engine the "
        "loss is in [benchmarks](benchmarks-in-full.md).",
        picture="curves-clip-100.png",
    ),
    Figure(
        "Figure 13",
        "Seq2Seq on 2 and 4 GPUs",
        "in part",
        "8,500 and 17,000/s, 60 % above the baselines; 512 for the encoder gains 3.5 to 6 %",
        joined(
            peaks("seq2seq-1", "cellular, 512 and 256", "cellular, 256 and 256", PADDED),
            lambda: "two workers: " + peaks("seq2seq-2", "cellular, 512 and 256", PADDED)(),
            lambda: "decoder twice as long: " + peaks("seq2seq-long", "cellular, 512 and 256", PADDED)(),
        ),
        "curves",
        GPU + "One and two workers, not two and four. The decoder is over 90 % of the work on a CPU (75 % in the "
        "paper), so the encoder's maximum matters less. Padded batches decode until the longest ends.",
        picture="curves-seq2seq-1.png",
    ),
    Figure(
        "Figure 14",
        "TreeLSTM on the treebank",
        "in part",
        "p90 6.8 ms against DyNet's 9.5 at 1,000/s; peak 3,100/s against 2,100/s; four times Fold",
        joined(
            both("treebank", 0.35, "cellular, 64", "DyNet, measured"),
            peaks(
                "treebank",
                "cellular, 64",
                "cellular, 512",
                "like DyNet, 64 trees",
                "like Fold, 64 trees",
                "DyNet, measured",
            ),
        ),
        "curves",
        "Hidden 256. *Like DyNet* and *like Fold* are their orders with our cells and "
        "no cost of merging graphs. Then closed batches have up to 17 % more latency than cellular below four fifths "
        "of the capacity, less above, and serve 3 % less at most: what the paper gains is mostly DyNet's cost. "
        "*DyNet, measured* has that cost.",
        picture="curves-treebank.png",
    ),
    Figure(
        "Figure 15",
        "complete trees of 16 leaves",
        "in part",
        "cellular 30 % below the ideal's peak",
        peaks(
            "complete-trees", "cellular, 64", "cellular, 512", "like DyNet, 64 trees", "ideal, node by node, 64 trees"
        ),
        "curves",
        "The ideal runs the 31 nodes one after another, each over 64 trees. Only steps take time here, so "
        "cellular loses nothing to scheduling.",
        picture="curves-complete-trees.png",
    ),
)
