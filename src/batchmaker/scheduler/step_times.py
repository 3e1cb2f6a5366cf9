"""How long a step of a cell type takes, by its number of rows: learnt from finished tasks.

`Batcher` uses these times to fill the budget of a task.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.scheduler.arena import UNKNOWN_S, Arena

WEIGHT: Final = 0.2
"""Weight of the newest report in the mean of a size."""
MOST: Final = 4.0
"""One report counts as at most so many times the mean. A page fault or another process is no property of the cell."""


@final
class StepTimes:
    """Seconds of a step of one cell type by number of rows: one mean for each doubling of the number.

    - seconds: [max_batch + 1]. A size that has not been measured takes as long as the next larger measured one. Above
      the largest measured size, the time is proportional to the rows. These two are computed whenever a doubling is
      measured for the first time, and not at later measurements.
    """

    __slots__ = ("_arena", "_known", "_max_batch", "_type_id")

    def __init__(self, arena: Arena, type_id: int, max_batch: int) -> None:
        self._arena = arena
        self._type_id = type_id
        self._max_batch = max_batch
        self._known: list[float | None] = [None] * max_batch.bit_length()
        self.seconds[:] = UNKNOWN_S

    @property
    def seconds(self) -> NDArray[np.float64]:
        return self._arena.seconds[self._type_id, : self._max_batch + 1]

    def add(self, num_steps: int, num_rows: int, busy_s: float) -> None:
        """Note that `num_steps` steps with `num_rows` rows in all took `busy_s` seconds."""
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
        """Write `seconds`: the measured doublings, and the others as derived from them."""
        last = max(size for size, known in enumerate(self._known) if known is not None)
        seconds = self._known[last]
        assert seconds is not None
        beyond = np.arange(2 << last, len(self.seconds))
        self.seconds[2 << last :] = seconds * beyond / (1 << last)
        for size in range(last, -1, -1):
            known = self._known[size]
            seconds = seconds if known is None else known
            self.seconds[1 << size : 2 << size] = seconds
