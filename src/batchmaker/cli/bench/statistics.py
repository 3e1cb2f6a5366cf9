"""Statistics over many requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Milliseconds that 50, 90 and 99 % of the values do not exceed; NaN where there are no values."""

    p50_ms: float
    p90_ms: float
    p99_ms: float


def percentiles(values_s: Sequence[float] | NDArray[np.float64]) -> Percentiles:
    """Return percentiles by linear interpolation. values_s: seconds, any order."""
    values = np.asarray(values_s, np.float64)
    if not values.size:
        return Percentiles(float("nan"), float("nan"), float("nan"))
    p50, p90, p99 = (1e3 * np.percentile(values, (50, 90, 99))).tolist()
    return Percentiles(p50, p90, p99)


def whole_steps(steps: Sequence[float], warm: int) -> tuple[int, int]:
    """Return two settled requests after which a step ended: the first one from number `warm` on, and the last one.

    steps: the count of steps when each request was settled. All requests of a graph batch, which is one step, are
    settled at once, so a window of whole steps has no partial batches. Without two such requests: all after the first.
    """
    ends = np.flatnonzero(np.diff(np.asarray(steps)))
    chosen = ends[ends >= warm]
    if len(chosen) < 2:
        chosen = ends
    if len(chosen) < 2:
        return 0, len(steps) - 1
    return int(chosen[0]), int(chosen[-1])
