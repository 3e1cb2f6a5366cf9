"""The steps of one task as arrays, and the limits and places with which `find_steps` forms them.

`form` calls `find_steps`, and `Batcher` makes a RunTask of the result. Numba takes only NamedTuples, so these are no
dataclasses.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Flags, Ints
from batchmaker.compiled import compiled, compiled_within, number

# First rows of `Steps.at`: facts about each position. The tables and rows of inputs follow.
AT_NODE, AT_SUBGRAPH, AT_LANE = map(number, range(3))
NUM_FACTS: Final = 3

# Rows of `Steps.ends`: how many of each there are up to the end of a step.
POSITIONS, DONE, ENTERING, VACATED = map(number, range(4))
NUM_ENDS: Final = 4

# Rows of `Steps.flags`.
HAS_LANES, IS_DENSE, MAY_STOP, STEERS = map(number, range(4))
NUM_FLAGS: Final = 4


class TaskArrays(NamedTuple):
    """The arrays from which the steps of a task are formed. The loops change nodes and subgraphs.

    - nodes to is_host: see State.
    - value_ports: inputs of the type that some node has fed so far, ascending.
    - free: [num_free or more] free rows of the type's pool; rows are taken from the end.
    - occupant: [lanes] of the worker.
    - lane_tables: [workers, state inputs].
    - seconds: [max_batch + 1] duration of a step by its number of rows.
    """

    nodes: Ints
    subgraphs: Ints
    source: Ints
    source_table: Ints
    reach: Ints
    consumer: Ints
    is_host: Flags
    value_ports: Ints
    free: Ints
    occupant: Ints
    lane_tables: Ints
    seconds: NDArray[np.float64]


class TaskLimits(NamedTuple):
    """The limits of a task.

    - max_batch: the most rows of a step.
    - min_batch: no further step begins with fewer rows than this. The first step may have fewer.
    - max_steps: the most steps, at least 1.
    - budget_s: further steps are added only while all steps together take at most so many seconds. The first step may
      take longer.
    - more: the queue holds more nodes than the candidates. So a step that is not full could have been larger.
    - loops_ahead: the task may hold several steps of a run that a value may end, as if it went on. Otherwise the next
      step of such a run is known only when the task has run.
    - own_type_follows: single nodes follow those of their own type within the task; see `follows`.
    """

    max_batch: int
    min_batch: int
    max_steps: int
    budget_s: float
    more: bool
    loops_ahead: bool
    own_type_follows: bool


class Places(NamedTuple):
    """Where rows of the cell type are on one worker.

    - plan_rows: whether to plan rows and lanes at all.
    - worker: the worker that runs the task.
    - num_free: number of free rows in the type's pool.
    - first_table, end_table: tables of the pool, from the first to before the end.
    - num_inputs: number of inputs of the cell.
    - num_step_inputs: how many of them a run takes anew at each step. The others are its state.
    - num_memories: how many of its first inputs are memories.
    - rows_each: the most rows that a position takes: two if it may be a step of a run that may stop and that reads its
      own steps, one for these and one for the run's result.
    """

    plan_rows: bool
    worker: int
    num_free: int
    first_table: int
    end_table: int
    num_inputs: int
    num_step_inputs: int
    num_memories: int
    rows_each: int


class Steps(NamedTuple):
    """The steps of a task, in the order of their positions: one step after the other.

    - num_steps: 0 if lanes or rows did not suffice for even one step.
    - lanes_wanted: the number of lanes that is needed; 0 if lanes sufficed.
    - rows_wanted, rows_needed: the free rows with which the task could have all its steps, and its first, if the pool
      has too few; else 0.
    - largest: rows of the largest step.
    - ends: [NUM_ENDS, steps].
    - flags: [NUM_FLAGS, steps], 0 or 1.
    - at: [NUM_FACTS + 2 * inputs + memories, positions] node, subgraph and lane, then the table of each input, then the
      row of each, then how many rows each memory has. The row of a memory is its first place in `members`.
    - done: nodes that are done with their step.
    - entering: nodes whose state inputs are read from rows, not from a lane. In a step without lanes: all its nodes.
    - moves: [1 + 2 * state inputs, moves] position, then the table of each state input, then the row of each.
    - vacated: [2, lanes] worker and lane that chains have left.
    - keeps: [2, kept] position and row; a position may come twice.
    - members: [1, members] the rows of memories, those of one reader together. Steps of a run that are taken at once
      share them.
    - marks: [positions] bits of the outputs that go to the host; all_marks: bits of any position.
    - num_used: number of candidates that were taken.
    - ready: nodes that have become ready and were not taken.
    - num_free: free rows afterwards.
    """

    num_steps: int
    lanes_wanted: int
    rows_wanted: int
    rows_needed: int
    largest: int
    ends: Ints
    flags: Ints
    at: Ints
    done: Ints
    entering: Ints
    moves: Ints
    vacated: Ints
    keeps: Ints
    members: Ints
    marks: Ints
    all_marks: int
    num_used: int
    ready: Ints
    num_free: int


# A task as one array: some numbers, where each part begins with its rows and columns, and the parts.
(NUM_STEPS, LANES_WANTED, ROWS_WANTED, ROWS_NEEDED, LARGEST, ALL_MARKS, ALL_FLAGS, OF_TYPE, ON_WORKER, FIRST_PART) = (
    range(10)
)
(
    PART_ENDS, PART_FLAGS, PART_AT, PART_DONE, PART_ENTERING, PART_VACATED, PART_MOVES, PART_KEPT, PART_MARKS,
    PART_MEMBERS, PARTS,
) = map(number, range(11))  # fmt: skip
HEADER: Final = number(FIRST_PART + 3 * PARTS)


@compiled_within
def _add(task: Ints, part: int, values: Ints, end: int) -> int:
    """Write a part [rows, columns] from `end` on; return where it ends."""
    rows, columns = values.shape
    at = FIRST_PART + 3 * part
    task[at], task[at + 1], task[at + 2] = end, rows, columns
    for row in range(rows):
        for column in range(columns):
            task[end] = values[row, column]
            end += 1
    return end


@compiled_within
def _add_row(task: Ints, part: int, values: Ints, end: int) -> int:
    """As `_add`, for a part of one row."""
    at = FIRST_PART + 3 * part
    task[at], task[at + 1], task[at + 2] = end, 1, len(values)
    for value in values:
        task[end] = value
        end += 1
    return end


@compiled_within
def packed(steps: Steps, type_id: int, worker: int) -> Ints:
    """Return all that is known of a task but for `ready` as one array, which crosses to Python in less time."""
    rows, num_moves = steps.at.shape[0], steps.moves.shape[1]
    num_kept, num_vacated = steps.keeps.shape[1], steps.vacated.shape[1]
    size = HEADER + (NUM_ENDS + NUM_FLAGS) * steps.num_steps + (rows + 1) * steps.at.shape[1] + len(steps.done)
    size += len(steps.entering) + 2 * num_vacated + steps.moves.shape[0] * num_moves + 2 * num_kept
    size += steps.members.shape[1]
    task = np.empty(size, np.int64)
    task[NUM_STEPS], task[LANES_WANTED], task[LARGEST] = steps.num_steps, steps.lanes_wanted, steps.largest
    task[ROWS_WANTED], task[ROWS_NEEDED], task[ALL_MARKS] = steps.rows_wanted, steps.rows_needed, steps.all_marks
    task[ALL_FLAGS], task[OF_TYPE], task[ON_WORKER] = 0, type_id, worker
    for flag in range(NUM_FLAGS):
        for step in range(steps.num_steps):
            task[ALL_FLAGS] |= steps.flags[flag, step] << flag
    end = _add(task, PART_ENDS, steps.ends, HEADER)
    end = _add(task, PART_FLAGS, steps.flags, end)
    end = _add(task, PART_AT, steps.at, end)
    end = _add_row(task, PART_DONE, steps.done, end)
    end = _add_row(task, PART_ENTERING, steps.entering, end)
    end = _add(task, PART_VACATED, steps.vacated, end)
    end = _add(task, PART_MOVES, steps.moves, end)
    end = _add(task, PART_KEPT, steps.keeps, end)
    end = _add_row(task, PART_MARKS, steps.marks, end)
    _add(task, PART_MEMBERS, steps.members, end)
    return task


@compiled_within
def without_steps(type_id: int, worker: int, lanes_wanted: int) -> Ints:
    """Return a task that has no steps."""
    task = np.zeros(HEADER, np.int64)
    task[OF_TYPE], task[ON_WORKER], task[LANES_WANTED] = type_id, worker, lanes_wanted
    return task


@compiled_within
def part_of(task: Ints, part: int, row: int) -> Ints:
    """Return a row of a part of a packed task."""
    at = FIRST_PART + 3 * part
    begin = task[at] + row * task[at + 2]
    return task[begin : begin + task[at + 2]]


@compiled
def marked(marks: Ints, output: int) -> Ints:
    """Return the positions at which this output goes to the host. marks: [positions] bits of outputs."""
    positions = np.empty(len(marks), np.int64)
    count = 0
    for i in range(len(marks)):
        if marks[i] >> output & 1:
            positions[count] = i
            count += 1
    return positions[:count]
