"""Rows of state tables, grouped by table."""

from __future__ import annotations

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled


@compiled
def by_table(tables: Ints, rows: Ints) -> tuple[Ints, Ints, Ints]:
    """Group rows by table. In each group they keep their order.

    tables, rows: [n]. Returns positions and rows, [n], group after group; and [groups, 3]: table, begin and end.
    """
    count = len(tables)
    parts = np.empty((count, 3), np.int64)
    group = np.empty(count, np.int64)
    num_parts = part = 0
    for i in range(count):
        if num_parts == 0 or parts[part, 0] != tables[i]:
            part = 0
            while part < num_parts and parts[part, 0] != tables[i]:
                part += 1
            if part == num_parts:
                parts[part, 0], parts[part, 2] = tables[i], 0
                num_parts += 1
        group[i] = part
        parts[part, 2] += 1
    begin = 0
    for k in range(num_parts):
        size = parts[k, 2]
        parts[k, 1] = parts[k, 2] = begin
        begin += size
    positions, grouped = np.empty(count, np.int64), np.empty(count, np.int64)
    for i in range(count):
        at = parts[group[i], 2]
        positions[at], grouped[at] = i, rows[i]
        parts[group[i], 2] = at + 1
    return positions, grouped, parts[:num_parts]


def prepare() -> None:
    """Compile the loop, or load it."""
    by_table(np.zeros(2, np.int64), np.zeros(2, np.int64))
