"""What the steps of one task are, as arrays, and what bounds them and says where rows lie."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchmaker.scheduler.ready import Keys

Ids = NDArray[np.int64]

# Rows of `Steps.at`, before those of inputs: what is said of each position.
AT_NODE: Final = 0
AT_SUBGRAPH: Final = 1
AT_LANE: Final = 2
NUM_FACTS: Final = 3

# Rows of `Steps.ends`: how many there are of each up to the end of a step.
POSITIONS: Final = 0
DONE: Final = 1
ENTERING: Final = 2
LEFT: Final = 3
NUM_ENDS: Final = 4

# Rows of `Steps.flags`.
HAS_LANES: Final = 0
IS_DENSE: Final = 1
MAY_STOP: Final = 2
STEERS: Final = 3
NUM_FLAGS: Final = 4


class TaskLimits(NamedTuple):
    """What bounds a task.

    max_batch, min_batch: rows of a step; a smaller one than min_batch begins no further step. max_steps: at least 1.
    budget_s: a further step must fit into so many seconds. more: whether the queue holds more than the candidates, so
    that a step which is not full could have been. loops_ahead: whether runs that a value may end are taken to go on
    within the task; what becomes ready after it is known when it has run.
    """

    max_batch: int
    min_batch: int
    max_steps: int
    budget_s: float
    more: bool
    loops_ahead: bool


class Places(NamedTuple):
    """Where rows of the cell type lie on one worker.

    plan_rows: whether to say so at all. worker: which one. num_free: free rows of the type's pool. first_table,
    end_table: the pool's. num_inputs, num_sequence: inputs of the cell, and of those one per step of a run.
    """

    plan_rows: bool
    worker: int
    num_free: int
    first_table: int
    end_table: int
    num_inputs: int
    num_sequence: int


class Steps(NamedTuple):
    """What the steps of a task are. Positions of all steps lie one after the other.

    num_steps: 0 where not even one could be formed for want of lanes or rows. lanes_wanted: so many lanes there must
    be, if it was for them. largest: rows of the largest step. ends: [NUM_ENDS, steps]. flags: [NUM_FLAGS, steps], 0 or
    1. at: [NUM_FACTS + 2 * inputs, positions] node, subgraph, lane, and of each input table and row. done: nodes that
    are done with their step. entering: nodes whose state inputs are read (where a step has no lanes, all). moves:
    [1 + 2 * state inputs, moves] position, and of each state input table and row. left: [2, ...] worker and lane that
    chains have left. kept: [2, kept] position and row. marks: [positions] of outputs that go to the host; all_marks: of
    any. num_used: candidates that were taken. ready: nodes that are ready now and were not taken. num_free: rows that
    are free now.
    """

    num_steps: int
    lanes_wanted: int
    largest: int
    ends: Ids
    flags: Ids
    at: Ids
    done: Ids
    entering: Ids
    moves: Ids
    left: Ids
    kept: Ids
    marks: Ids
    all_marks: int
    num_used: int
    ready: Keys
    num_free: int
