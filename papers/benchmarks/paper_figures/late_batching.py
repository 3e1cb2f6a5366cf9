"""Late Batching (AISys 2017)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from paper_figures.batchmaker import GPU, PADDED, both, curve, joined, peaks
from paper_figures.entry import Figure

TITLE: Final = "Late Batching: Low Latency Model Serving with Late Batching (AISys 2017)"


def _lower(case: str, figure: str, load: float) -> Callable[[], str]:
    def said() -> str:
        ours, theirs = (curve(case, way, load)[figure][0] for way in ("cellular", PADDED))
        gain = 1 - ours / theirs
        return f"{figure[:3]} at {load:g}: {abs(gain):.1%} {'lower' if gain >= 0 else 'higher'}"

    return said


FIGURES: Final = (
    Figure(
        "Figures 1, 2",
        "timeline, architecture",
        "explanation",
        where="[architecture](../../docs/architecture.md)",
        picture="../../../docs/images/timeline.png",
    ),
    Figure(
        "Figure 3",
        "p50 against throughput, WMT-15",
        "in part",
        "much lower; no number in the text",
        both("lstm-512", 0.5, "cellular", PADDED, "p50_ms"),
        "curves",
        GPU + "The same runs as BatchMaker's Figure 7.",
        picture="curves-lstm-512.png",
    ),
    Figure(
        "Figure 4",
        "p99 against throughput, WMT-15",
        "in part",
        "much lower; no number in the text",
        both("lstm-512", 0.5, "cellular", PADDED, "p99_ms"),
        "curves",
        GPU,
        picture="curves-lstm-512.png",
    ),
    Figure(
        "Figure 5",
        "throughput against load",
        "in part",
        "25 to 33 % more at full load",
        peaks("lstm-512", "cellular", PADDED),
        "curves",
        GPU,
        picture="curves-lstm-512.png",
    ),
    Figure(
        "Figures 6, 7",
        "p50 and p99 with fixed length 20",
        "other outcome",
        "25 to 40 % lower below saturation",
        joined(
            _lower("fixed-20", "p50_ms", 0.2),
            _lower("fixed-20", "p50_ms", 0.5),
            _lower("fixed-20", "p99_ms", 0.2),
            _lower("fixed-20", "p99_ms", 0.5),
        ),
        "curves",
        "With one length a padded batch wastes nothing; what is left is the wait for the batch that runs. A step of "
        "few rows costs as much as many on a GPU; on a CPU joining makes everybody's steps longer.",
        picture="curves-fixed-20.png",
    ),
)
