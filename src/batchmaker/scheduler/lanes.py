"""Lanes: the dense places in which running chains keep their state on one worker.

A batch that fills lanes 0 to n-1 is a slice of the state tables, so an unchanged batch copies nothing. When a chain
leaves, the chain in the last lane moves into the hole; one that joins takes the next free lane.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled
from batchmaker.scheduler.arena import NOWHERE, Arena
from batchmaker.scheduler.commands import Rows

NOBODY = -1


@dataclass(frozen=True, slots=True)
class Seats:
    """Where a batch of chains sits for one step.

    nodes, subgraphs: [batch], put in order of lane where they fill lanes 0 to n-1. rows: [batch] their lanes, None for
    0 to n-1. owners: [batch] the node under whose number others look for each one's outputs: of a run that may stop
    its last one, since any step may turn out to be it. finished: nodes that are done with the step; their chains have
    left their lanes, which are free from the next step on. open_ended: whether some may stop.
    shifted, before: positions of chains that had other lanes of this worker, and these. entering: positions of those
    that have no state yet. leasing, home, there: positions of those that come from other workers, from which, and from
    which of its lanes.
    """

    nodes: Rows
    subgraphs: Rows
    rows: Rows | None
    owners: Rows
    finished: Rows
    open_ended: bool
    shifted: Rows
    before: Rows
    entering: Rows
    leasing: Rows
    home: Rows
    there: Rows


@final
class LaneMap:
    """Who sits in which lane. Occupants are subgraph numbers. num_reserved: rows that the lane tables have.

    arena, worker: where the chains are, and whose lanes these are.
    """

    __slots__ = ("_arena", "_worker", "num_reserved", "occupant")

    def __init__(self, arena: Arena, worker: int) -> None:
        self._arena = arena
        self._worker = worker
        self.num_reserved = 0
        self.occupant: NDArray[np.int64] = np.full(64, NOBODY, np.int64)

    @property
    def capacity(self) -> int:
        return len(self.occupant)

    def seat(self, nodes: Rows) -> Seats:
        """Give every chain of a batch a lane, dense from 0 where chains outside the batch do not sit in the way.

        nodes: [batch] of distinct subgraphs; a single node is a chain of one. Where others are in the way everybody
        stays, and newcomers take free lanes.
        """
        if len(nodes) > self.capacity:
            self._grow(max(len(nodes), 2 * self.capacity))
        num_moving, seats = self._try_to_seat(nodes)
        if num_moving:
            self._grow(2 * self.capacity + num_moving)
            _, seats = self._try_to_seat(nodes)
        return seats

    def _try_to_seat(self, nodes: Rows) -> tuple[int, Seats]:
        """Seat the batch; if there are not enough lanes, return how many chains move and change nothing."""
        arena = self._arena
        num_moving, is_dense, some_open, ordered, subgraphs, rows, owners, *others = _seat(
            self.occupant, arena.subgraph, arena.end, arena.open_ended, arena.lane, arena.lane_worker, self._worker,
            nodes,
        )  # fmt: skip
        finished, shifted, before, entering, leasing, home, there = others
        return num_moving, Seats(
            ordered, subgraphs, None if is_dense else rows, owners, finished, some_open, shifted, before, entering,
            leasing, home, there,
        )  # fmt: skip

    def go_on(self, nodes: Rows) -> tuple[Rows, Rows, Rows, bool]:
        """The chains of the step of these nodes all go on in their lanes; those that come to their end leave them.

        Returns the next nodes and their subgraphs [batch], the nodes that are done then, and whether the unfold
        function may still use some.
        """
        arena = self._arena
        return _go_on(self.occupant, arena.held, arena.subgraph, arena.end, arena.lane, arena.lane_worker, nodes)

    def leave(self, lanes: Rows) -> None:
        """Empty these lanes: their chains have ended or gone to another worker."""
        self.occupant[lanes] = NOBODY

    def _grow(self, capacity: int) -> None:
        grown = np.full(capacity, NOBODY, np.int64)
        grown[: self.capacity] = self.occupant
        self.occupant = grown


@compiled
def _seat(
    occupant: Rows,
    subgraph: Rows,
    end: Rows,
    open_ended: NDArray[np.bool_],
    lane: Rows,
    lane_worker: NDArray[np.int16],
    worker: int,
    nodes: Rows,
) -> tuple[int, bool, bool, Rows, Rows, Rows, Rows, Rows, Rows, Rows, Rows, Rows, Rows, Rows]:
    """Seat a batch as `LaneMap.seat` says. Arrays as in Arena and LaneMap; all int64 but for flags and lane_worker.

    Returns, if there are not enough lanes, how many chains move; then nothing is changed and the rest means nothing.
    Else 0, whether the lanes are 0 to n-1, and the fields of Seats: open_ended, nodes, subgraphs, rows, owners,
    finished, shifted, before, entering, leasing, home, there.
    """
    count = len(nodes)
    here = np.empty(count, np.int64)  # the lane of each, by its place in `nodes`
    taken = np.zeros(count, np.bool_)
    for i in range(count):
        mine = subgraph[nodes[i]]
        here[i] = lane[mine] if lane_worker[mine] == worker else NOBODY
        if 0 <= here[i] < count:
            taken[here[i]] = True
    is_dense = True
    for k in range(count):
        is_dense &= taken[k] or occupant[k] == NOBODY
    new = np.empty(count, np.int64)
    num_moving = next_free = 0
    enough = True
    for i in range(count):
        new[i] = here[i]
        if here[i] == NOBODY or (is_dense and here[i] >= count):
            while next_free < len(occupant) and (taken[next_free] if is_dense else occupant[next_free] != NOBODY):
                next_free += 1
            enough &= next_free < len(occupant)
            new[i] = next_free
            next_free += 1
            num_moving += 1
    moved = np.empty((6, num_moving), np.int64)
    shifted, before, entering, leasing, home, there = moved[0], moved[1], moved[2], moved[3], moved[4], moved[5]
    batch = np.empty((5, count), np.int64)
    ordered, subgraphs, rows, owners, finished = batch[0], batch[1], batch[2], batch[3], batch[4]
    num_shifted = num_entering = num_leasing = num_finished = 0
    some_open = False
    if enough:
        num_moving = 0
        for i in range(count):
            mine = subgraph[nodes[i]]
            position = new[i] if is_dense else i
            ordered[position], subgraphs[position], rows[position] = nodes[i], mine, new[i]
            if new[i] == here[i]:
                continue
            if here[i] != NOBODY:
                shifted[num_shifted], before[num_shifted] = position, here[i]
                occupant[here[i]] = NOBODY
                num_shifted += 1
            elif lane_worker[mine] == NOWHERE:
                entering[num_entering] = position
                num_entering += 1
            else:
                leasing[num_leasing], home[num_leasing], there[num_leasing] = position, lane_worker[mine], lane[mine]
                num_leasing += 1
            occupant[new[i]] = mine
        for i in range(count):
            node, mine = ordered[i], subgraphs[i]
            lane[mine], lane_worker[mine] = rows[i], worker
            owners[i] = end[mine] - 1 if open_ended[mine] else node
            some_open |= open_ended[mine]
            if not open_ended[mine] and (end[mine] == 0 or node + 1 == end[mine]):
                finished[num_finished] = node
                num_finished += 1
                occupant[rows[i]] = NOBODY
                lane[mine], lane_worker[mine] = NOWHERE, NOWHERE
    return (
        num_moving, is_dense, some_open, ordered, subgraphs, rows, owners, finished[:num_finished],
        shifted[:num_shifted], before[:num_shifted], entering[:num_entering],
        leasing[:num_leasing], home[:num_leasing], there[:num_leasing],
    )  # fmt: skip


@compiled
def _go_on(
    occupant: Rows,
    held: NDArray[np.bool_],
    subgraph: Rows,
    end: Rows,
    lane: Rows,
    lane_worker: NDArray[np.int16],
    nodes: Rows,
) -> tuple[Rows, Rows, Rows, bool]:
    """Go on as `LaneMap.go_on` says. Arrays as in Arena and LaneMap."""
    following = np.empty(len(nodes), np.int64)
    subgraphs = np.empty(len(nodes), np.int64)
    finished = np.empty(len(nodes), np.int64)
    num_finished = 0
    some_held = False
    for i in range(len(nodes)):
        node = nodes[i] + 1
        mine = subgraph[node]
        following[i], subgraphs[i] = node, mine
        some_held |= held[node]
        if node + 1 == end[mine]:
            finished[num_finished] = node
            num_finished += 1
            occupant[lane[mine]] = NOBODY
            lane[mine], lane_worker[mine] = NOWHERE, NOWHERE
    return following, subgraphs, finished[:num_finished], some_held
