"""Finds the chains of a task from the lanes of its steps. In one launch each chain is a row. Used by TaskProgram."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled, int64s
from batchmaker.core.commands import RunTask


@dataclass(frozen=True, slots=True)
class Chains:
    """The chains of a task. Every chain is a row; the longest come first.

    length: [rows] number of steps of the chain in this task. row, number: [positions] the row of each position, and
    which step of its chain this is, from 0. begin_tables, begin_rows: [state inputs, rows] where the first state is.
    lane, lane_row: the lanes that hold a state after the task, and the row of each.
    """

    length: Ints
    row: Ints
    number: Ints
    begin_tables: Ints
    begin_rows: Ints
    lane: Ints
    lane_row: Ints

    def is_last(self, positions: Ints | slice) -> bool:
        """Whether these positions are the last steps of their chains in the task."""
        return bool((self.number[positions] + 1 == self.length[self.row[positions]]).all())


def chains_of(task: RunTask) -> Chains | None:
    """Return the chains of a task. All its steps must have lanes.

    None if they cannot be rows of one launch: a state has two successors, a chain begins from a row that the task
    itself writes, or a row is written twice.
    """
    lanes, keep = task.lanes, task.keep
    assert lanes is not None
    tables = np.array(lanes.tables, np.int64)
    targets = np.zeros(0, np.int64) if keep is None else np.sort(keep.rows)
    if (targets[1:] == targets[:-1]).any():
        return None
    moved = lanes.move_rows[lanes.move_tables == tables[:, None]]  # from lane to lane
    owner = np.full(1 + max(lanes.rows.max(initial=-1), moved.max(initial=-1)), -1)
    written = np.zeros(len(owner), np.int64)
    chain, number, done = np.zeros((3, len(task.nodes)), np.int64)
    begin_tables, begin_rows = np.zeros((2, len(tables), len(task.nodes)), np.int64)
    count = _follow(
        int64s(task.ends),
        int64s(lanes.rows),
        tables,
        int64s(lanes.move_at),
        int64s(lanes.move_tables),
        int64s(lanes.move_rows),
        np.array(() if keep is None else keep.tables, np.int64),
        targets,
        owner,
        written,
        chain,
        number,
        done,
        begin_tables,
        begin_rows,
    )
    if count < 0:
        return None
    length = done[:count]
    order = np.argsort(-length, kind="stable")
    rank = np.empty(count, np.int64)
    rank[order] = np.arange(count)
    lane = np.flatnonzero(owner >= 0)
    lane = lane[written[lane] == length[owner[lane]]]
    return Chains(
        length[order], rank[chain], number, begin_tables[:, order], begin_rows[:, order], lane, rank[owner[lane]]
    )


@compiled
def _follow(
    ends: Ints,
    rows: Ints,
    tables: Ints,
    move_at: Ints,
    move_tables: Ints,
    move_rows: Ints,
    kept_tables: Ints,
    targets: Ints,
    owner: Ints,
    written: Ints,
    chain: Ints,
    number: Ints,
    done: Ints,
    begin_tables: Ints,
    begin_rows: Ints,
) -> int:
    """Follow which chain's state each lane holds, step by step. Returns the number of chains, -1 if chains_of refuses.

    Chains are numbered as they appear. targets: rows that the task writes, ascending. owner, written: [lanes] the chain
    whose state a lane holds, and how many steps that had done when it wrote. chain, number: [positions]. done: [chains]
    steps. begin_tables, begin_rows: [state inputs, chains].
    """
    count = begin = move = 0
    last = np.full(len(rows), -1)  # the step in which each chain went on
    for step in range(len(ends)):
        for position in range(begin, ends[step]):
            moves = move < len(move_at) and move_at[move] == position
            mine = -1
            for part in range(len(tables)):
                at = rows[position]
                if moves and move_tables[part, move] == tables[part]:
                    at = move_rows[part, move]
                elif moves:
                    at = -1
                    for table in kept_tables:
                        if table == move_tables[part, move]:
                            place = np.searchsorted(targets, move_rows[part, move])
                            if place < len(targets) and targets[place] == move_rows[part, move]:
                                return -1
                writer = -1 if at < 0 else owner[at]
                if writer >= 0 and done[writer] != written[at]:
                    return -1
                if part > 0 and writer != mine:
                    return -1
                mine = writer
            if mine < 0:
                mine = count
                count += 1
                for part in range(len(tables)):
                    begin_tables[part, mine] = move_tables[part, move] if moves else tables[part]
                    begin_rows[part, mine] = move_rows[part, move] if moves else rows[position]
            if last[mine] == step:
                return -1
            last[mine] = step
            chain[position] = mine
            number[position] = done[mine]
            move += moves
        for position in range(begin, ends[step]):  # all states of a step are read before any is written
            mine = chain[position]
            done[mine] += 1
            owner[rows[position]] = mine
            written[rows[position]] = done[mine]
        begin = ends[step]
    return count


def prepare() -> None:
    """Compile the loop, or load it from the disk cache, so that no request waits for it."""
    none, nothing = np.zeros(0, np.int64), np.zeros((0, 0), np.int64)
    _follow(none, none, none, none, nothing, nothing, none, none, none, none, none, none, none, nothing, nothing)
