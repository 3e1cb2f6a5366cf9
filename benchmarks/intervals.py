"""Confidence intervals of means over seeds or runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Final

STUDENT: Final = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262, 20: 2.093}
"""97.5 % of Student's t for so many values."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean over seeds, and half of the width of its 95 % interval; NaN for a single value."""
    if len(values) < 2:
        return fmean(values), math.nan
    known = max(n for n in STUDENT if n <= len(values))
    return fmean(values), STUDENT[known] * stdev(values) / math.sqrt(len(values))
