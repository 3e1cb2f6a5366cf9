"""Lanes: the dense places in which running chains keep their state on one worker.

A batch that fills lanes 0 to n-1 is a slice of the state tables, so an unchanged batch copies nothing. When a chain
leaves, the chain in the last lane moves into the hole; one that joins takes the next free lane.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.scheduler.commands import Rows

NOBODY = -1


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a batch of chains is placed for one step.

    order: [batch] permutation of the batch. rows: lane of each position after ordering, or None for lanes 0..n-1.
    moved: positions (after ordering) whose lane is new. old: the lane they had here before, or NOBODY.
    """

    order: Rows
    rows: Rows | None
    moved: Rows
    old: Rows


@final
class LaneMap:
    """Who sits in which lane. Occupants are subgraph numbers. num_reserved: rows that the lane tables have."""

    __slots__ = ("num_reserved", "occupant")

    def __init__(self) -> None:
        self.num_reserved = 0
        self.occupant: NDArray[np.int64] = np.full(64, NOBODY, np.int64)

    @property
    def capacity(self) -> int:
        return len(self.occupant)

    def place(self, chains: Rows, lane: Rows) -> Placement:
        """Give every chain of a batch a lane, dense from 0 where chains outside the batch do not sit in the way.

        chains: [batch] distinct subgraphs. lane: the lane each has here, or NOBODY.
        """
        count = len(chains)
        if count > self.capacity:
            grown = np.full(max(count, 2 * self.capacity), NOBODY, np.int64)
            grown[: self.capacity] = self.occupant
            self.occupant = grown
        inside = (lane >= 0) & (lane < count)
        mine = np.zeros(count, np.bool_)
        mine[lane[inside]] = True
        holes = np.flatnonzero(~mine)
        if (self.occupant[holes] != NOBODY).any():
            return self._place_around(chains, lane)
        moved = np.flatnonzero(~inside)
        new = lane.copy()
        new[moved] = holes
        old = lane[moved]
        self.occupant[old[old >= 0]] = NOBODY
        self.occupant[holes] = chains[moved]
        order = np.empty(count, np.int64)
        order[new] = np.arange(count)
        return Placement(order, None, holes, old)

    def _place_around(self, chains: Rows, lane: Rows) -> Placement:
        """Place a batch while other chains hold lanes below its size: everybody stays, newcomers take free lanes."""
        moved = np.flatnonzero(lane < 0)
        free = np.flatnonzero(self.occupant == NOBODY)
        if len(free) < len(moved):
            start = self.capacity
            grown = np.full(2 * self.capacity + len(moved), NOBODY, np.int64)
            grown[:start] = self.occupant
            self.occupant = grown
            free = np.flatnonzero(self.occupant == NOBODY)
        new = lane.copy()
        new[moved] = free[: len(moved)]
        self.occupant[new[moved]] = chains[moved]
        return Placement(np.arange(len(chains)), new, moved, np.full(len(moved), NOBODY, np.int64))

    def leave(self, lanes: Rows) -> None:
        """Empty these lanes: their chains have ended or gone to another worker."""
        self.occupant[lanes] = NOBODY
