"""Numbers about many requests."""

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


def quiet_moment(times: NDArray[np.float64], first: int, last: int) -> int:
    """Return the index in [first, last) after which there is the longest gap before the next time.

    times: ascending. Graph batches end many requests at one time: a window that begins and ends in a gap holds whole
    batches, so that its throughput is not off by parts of them.
    """
    if last <= first or last >= len(times):
        return min(first, len(times) - 1)
    return first + int(np.argmax(np.diff(times[first : last + 1])))
