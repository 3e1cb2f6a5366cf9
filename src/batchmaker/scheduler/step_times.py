"""How long a step of so many rows takes, learnt from the tasks that have run: what the budget of a task is spent on."""

from __future__ import annotations

from typing import Final, final

import numpy as np
from numpy.typing import NDArray

UNKNOWN_S: Final = 1e-4
"""Seconds of a step before any has been measured."""
WEIGHT: Final = 0.2
"""Of the newest task in the mean of a size."""
MOST: Final = 4.0
"""Times the mean that one task may count: a page fault or another process is no property of the cell."""


@final
class StepTimes:
    """Seconds of a step of one cell type by batch, one number for each doubling.

    seconds: [max_batch + 1]. Sizes that have not been seen take as long as the next larger one that has; beyond the
    largest, in proportion to their rows.
    """

    __slots__ = ("_known", "seconds")

    def __init__(self, max_batch: int) -> None:
        self._known: list[float | None] = [None] * max_batch.bit_length()
        self.seconds: NDArray[np.float64] = np.full(max_batch + 1, UNKNOWN_S)

    def add(self, num_steps: int, num_rows: int, busy_s: float) -> None:
        """So many steps with so many rows in all took so long."""
        seen_s = busy_s / num_steps
        size = (num_rows // num_steps).bit_length() - 1
        before = self._known[size]
        if before is None:
            self._known[size] = seen_s
            self._fill()
            return
        after = self._known[size] = before + WEIGHT * (min(seen_s, MOST * before) - before)
        self.seconds[1 << size : 2 << size] = after

    def _fill(self) -> None:
        """Write what is known of each doubling, and what follows for those of which nothing is."""
        last = max(size for size, known in enumerate(self._known) if known is not None)
        seconds = self._known[last]
        assert seconds is not None
        beyond = np.arange(2 << last, len(self.seconds))
        self.seconds[2 << last :] = seconds * beyond / (1 << last)
        for size in range(last, -1, -1):
            known = self._known[size]
            seconds = seconds if known is None else known
            self.seconds[1 << size : 2 << size] = seconds
