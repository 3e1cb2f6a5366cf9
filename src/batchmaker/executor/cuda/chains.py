"""Finds the chains of a task from the lanes of its steps. In one launch each chain is a row. Used by TaskProgram."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchmaker.scheduler.commands import Keep, Lanes, Rows, RowSource, Step, TableId


@dataclass(frozen=True, slots=True)
class Chains:
    """The chains of a task. Every chain is a row; the longest come first.

    length: [rows] number of steps of the chain in this task. row, number: for each step of the task, [batch] the row of
    each position, and which step of its chain this is, from 0. begin: for each state input, the sources of the first
    state; their positions are rows. lane, lane_row: the lanes that hold a state after the task, and the row of each.
    """

    length: Rows
    row: tuple[Rows, ...]
    number: tuple[Rows, ...]
    begin: tuple[tuple[RowSource, ...], ...]
    lane: Rows
    lane_row: Rows

    def is_last(self, step: int, positions: Rows | slice) -> bool:
        """Whether these positions of a step are the last steps of their chains in the task."""
        return bool((self.number[step][positions] + 1 == self.length[self.row[step][positions]]).all())


class _ForkedError(Exception):
    """The chains of the task branch, or it reads or writes again a row that it has written. See chains_of."""


def chains_of(steps: Sequence[Step]) -> Chains | None:
    """Return the chains of a task. All its steps must have lanes.

    None if they cannot be rows of one launch: a state has two successors, a chain begins from a row that the task
    itself writes, or a row is written twice.
    """
    entry = _Entry(steps)
    try:
        for step in steps:
            entry.add(step)
    except _ForkedError:
        return None
    return entry.chains()


class _Entry:
    """Follows which chain's state each lane holds, while steps are added. Chains are numbered as they appear."""

    def __init__(self, steps: Sequence[Step]) -> None:
        size = 1 + max(max(_highest(step.lanes) for step in steps), 0)
        self._owner = np.full(size, -1, np.int64)
        self._written = np.zeros(size, np.int64)  # how many steps the owner had done when it wrote
        self._done = np.zeros(sum(step.batch for step in steps), np.int64)
        self._num_chains = 0
        self._kept: list[Rows] = []
        self._kept_in: tuple[TableId, ...] = ()
        self._row: list[Rows] = []
        self._number: list[Rows] = []
        self._begin: list[list[RowSource]] = [[] for _ in _lanes(steps[0]).tables]

    def add(self, step: Step) -> None:
        """Add the next step. _ForkedError if its chains branch."""
        lanes = _lanes(step)
        rows = np.arange(lanes.count) if lanes.rows is None else lanes.rows
        parts = [self._whose(lanes, part, rows) for part in range(len(lanes.tables))]
        chain = parts[0]
        if any((other != chain).any() for other in parts[1:]):
            raise _ForkedError
        fresh = chain < 0
        count = int(fresh.sum())
        chain[fresh] = self._num_chains + np.arange(count)
        self._num_chains += count
        if count:
            for part, table in enumerate(lanes.tables):
                self._begin[part] += _beginnings(lanes.arriving[part], table, rows, chain, fresh)
        if len(np.unique(chain)) < len(chain):
            raise _ForkedError
        self._row.append(chain)
        self._number.append(self._done[chain])
        self._done[chain] += 1
        self._owner[rows], self._written[rows] = chain, self._done[chain]
        if step.keep is not None:
            self._keep(step.keep)

    def _whose(self, lanes: Lanes, part: int, rows: Rows) -> Rows:
        """Return the chain that each position continues; -1 for positions at which a chain begins."""
        at = rows.copy()
        for source in lanes.arriving[part]:
            positions = slice(None) if source.positions is None else source.positions
            if source.table == lanes.tables[part]:
                at[positions] = source.rows
            else:
                at[positions] = -1
                self._refuse_written(source)
        chain = np.where(at < 0, -1, self._owner[at])
        known = chain >= 0
        if (self._done[chain[known]] != self._written[at[known]]).any():
            raise _ForkedError
        return chain

    def _refuse_written(self, source: RowSource) -> None:
        """Raise _ForkedError if an earlier step of the task has written a row of this source."""
        if source.table in self._kept_in and any(np.isin(source.rows, rows).any() for rows in self._kept):
            raise _ForkedError

    def _keep(self, keep: Keep) -> None:
        """Note the rows that a step writes. _ForkedError if an earlier step has written one of them."""
        if any(np.isin(keep.rows, rows).any() for rows in self._kept):
            raise _ForkedError
        self._kept.append(keep.rows)
        self._kept_in = keep.tables

    def chains(self) -> Chains:
        """Return the chains of all added steps."""
        length = self._done[: self._num_chains]
        order = np.argsort(-length, kind="stable")
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        lane = np.flatnonzero(self._owner >= 0)
        owner = self._owner[lane]
        holds = self._written[lane] == length[owner]
        return Chains(
            length[order],
            tuple(rank[chain] for chain in self._row),
            tuple(self._number),
            tuple(tuple(RowSource(s.table, s.rows, rank[s.positions]) for s in part) for part in self._begin),
            lane[holds],
            rank[owner[holds]],
        )


def _beginnings(
    arriving: tuple[RowSource, ...], table: TableId, rows: Rows, chain: Rows, fresh: NDArray[np.bool_]
) -> list[RowSource]:
    """Return the sources of state of the chains that begin in a step. Their positions are numbers of chains."""
    found, stays = [], fresh.copy()
    for source in arriving:
        positions = np.arange(len(rows)) if source.positions is None else source.positions
        stays[positions] = False
        begins = fresh[positions]
        if begins.any():
            found.append(RowSource(source.table, source.rows[begins], chain[positions[begins]]))
    if stays.any():
        found.append(RowSource(table, rows[stays], chain[stays]))
    return found


def _lanes(step: Step) -> Lanes:
    assert step.lanes is not None
    return step.lanes


def _highest(lanes: Lanes | None) -> int:
    """Return the highest lane that a step names, -1 if there is none."""
    assert lanes is not None
    named = [
        source.rows
        for part, table in zip(lanes.arriving, lanes.tables, strict=True)
        for source in part
        if source.table == table
    ]
    if lanes.rows is not None:
        named.append(lanes.rows)
    return max([lanes.count - 1, *(int(rows.max(initial=-1)) for rows in named)])
