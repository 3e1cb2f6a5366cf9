"""How long a step of a cell type takes, by its number of rows: learnt from steps that have finished.

`form` uses these times to fill the budget of a task.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from batchmaker.arrays import Floats
from batchmaker.compiled import compiled

WEIGHT: Final = 0.2
"""Weight of the newest report in the mean of a size."""
MOST: Final = 4.0
"""One report counts as at most so many times the mean. A page fault or another process is no property of the cell."""


@compiled
def learn_steps(
    seconds: Floats, known_s: Floats, type_id: int, most: int, num_steps: int, num_rows: int, busy_s: float
) -> None:
    """Note that `num_steps` steps of a type with `num_rows` rows in all took `busy_s` seconds.

    There is one mean for each doubling of the rows, in `known_s`. In `seconds` a size that has not been measured takes
    as long as the next larger measured one. Above the largest measured size, the time is proportional to the rows.
    These two are computed whenever a doubling is measured for the first time, and not at later measurements.

    seconds, known_s: see State. most: the largest batch of the type.
    """
    seen_s, rows, end, size = busy_s / num_steps, num_rows // num_steps, most + 1, 0
    while 2 << size <= rows:
        size += 1
    before = known_s[type_id, size]
    if not np.isnan(before):
        after = before + WEIGHT * (min(seen_s, MOST * before) - before)
        known_s[type_id, size] = after
        for row in range(1 << size, min(2 << size, end)):
            seconds[type_id, row] = after
        return
    known_s[type_id, size] = seen_s
    last = known_s.shape[1] - 1
    while np.isnan(known_s[type_id, last]):
        last -= 1
    taken_s = known_s[type_id, last]
    for row in range(2 << last, end):
        seconds[type_id, row] = taken_s * row / (1 << last)
    for smaller in range(last, -1, -1):
        if not np.isnan(known_s[type_id, smaller]):
            taken_s = known_s[type_id, smaller]
        for row in range(1 << smaller, min(2 << smaller, end)):
            seconds[type_id, row] = taken_s
