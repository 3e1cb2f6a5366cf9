"""The columns of the scheduler's tables, and the values that stand for something.

All tables are int64 and have the fields as rows: `nodes[ROW, node]`. `State` says what each table has a column for.
"""

from __future__ import annotations

from typing import Final

from batchmaker.compiled import number

NOWHERE: Final = number(-1)
NOBODY: Final = -1
"""No occupant of a lane."""

# --- nodes ------------------------------------------------------------------------------------------------------------

STATE, SUBGRAPH, REQUEST, PENDING, USES, HELD, ROW, FETCH, FIRST_EDGE, NUM_EDGES, NODE_FIELDS = range(11)
"""
- STATE: one of the four below. SUBGRAPH, REQUEST: its subgraph, and the slot of its request.
- PENDING: inputs from its own subgraph that are not submitted yet.
- USES: reads of its outputs by nodes that have not finished. HELD: 1 if a waiting unfold function may still use the
  node; of a request that decides by values, how many slots hold it (see `decide`).
- ROW: its row in the pool of its type; NOWHERE if it has none.
- FETCH: bit k is set if output k goes to the host.
- FIRST_EDGE, NUM_EDGES: its consumers. Of a free extent, FIRST_EDGE of its first node is the next free one; of a node
  that a sequence keeps (see SequenceStore), the node that had its row before.
"""
OUTPUTS: Final = number(1024)
"""A node with one of its outputs is one number: `node * OUTPUTS + output`."""
WAITING, READY, SUBMITTED, DONE = range(4)
"""States of a node. It passes through them in this order only."""

# --- subgraphs --------------------------------------------------------------------------------------------------------

(TYPE, HEAD, SIZE, SPAN, EXTERNAL, PIN, IN_FLIGHT, SERIAL, END, OPEN_ENDED, LANE, LANE_WORKER, SUBGRAPH_FIELDS) = range(
    13
)
"""
- TYPE: its cell type. HEAD: its first node; of a free extent, the next free one. SIZE: its number of nodes. SPAN: how
  many numbers there are from its first to its last node.
- EXTERNAL: inputs from other subgraphs that are not done.
- PIN: the worker that runs steps of it, or NOWHERE. IN_FLIGHT: how many times a node of it is in a step that is
  submitted and not finished.
- SERIAL: its serial number, which is its place in the queue.
- END: one past the last node of a run; 0 if it is not a run. OPEN_ENDED: 1 if a value may end the run; OVER if it has
  ended; otherwise 0.
- LANE, LANE_WORKER: the lane of the chain and the worker of this lane, or NOWHERE.
"""
OVER: Final = 2
"""OPEN_ENDED of a run that has ended. Steps of it that were submitted ahead compute nothing."""

# --- requests, by slot, and their extents -----------------------------------------------------------------------------

ID, IN_USE, ALIVE, OPEN, OWNS, LEFT, RANK, FIRST, LAST, NEXT_SLOT, STORED, KEEPS, REQUEST_FIELDS = range(13)
"""
- ID: the request's number. IN_USE: 1 while the slot is a request's: until it has its Reply or Fail, and no worker has
  steps of it. ALIVE: 1 until it has its Reply or Fail. OPEN: its unfold function waits and may add nodes.
- OWNS: it may still have rows when it ends, because its unfold function could have used them, or because it or one of
  its runs ends early.
- LEFT: its units that are not done (see `CellGraph.num_work_units`). RANK: see `priorities.py`.
- FIRST, LAST: its first and last extent, or NOWHERE. NEXT_SLOT: of a free slot, the next free one.
- STORED: the first of the nodes that its sequence kept when it arrived, which are its local nodes from 0 on; 0 if none.
- KEEPS: where in `State.keeps` the nodes are listed that its sequence will keep.
"""

(
    FIRST_LOCAL, BASE, NUM_NODES, FIRST_SUBGRAPH, NUM_SUBGRAPHS, EXTENT_FIRST_EDGE, EXTENT_NUM_EDGES, NEXT,
    EXTENT_FIELDS,
) = range(9)  # fmt: skip
"""An extent is the numbers that one graph, or extension, has until its request ends. Local nodes from FIRST_LOCAL on
are NUM_NODES nodes from BASE on; its subgraphs and edges are consecutive numbers, too. NEXT: the request's next extent,
or the next free one."""

# --- cell types, pools, workers ---------------------------------------------------------------------------------------

(
    MAX_BATCH, MIN_BATCH, NUM_INPUTS, NUM_STEP_INPUTS, NUM_OUTPUTS, POOL, NUM_PORTS, NUM_RUNNING, NUM_PASSED, PLACES,
    QUEUE_BEGIN, QUEUE_END, HEAD_OF_QUEUE, TAIL_OF_QUEUE, PRIORITY, JUST_RAN, PASSED_OVER, INDEPENDENT,
    NUM_MEMORIES, OWN_MEMORY, MINI_BATCH_DEPTHS, LEFT_DEPTHS, TYPE_FIELDS,
) = (*range(21), 22, 24)  # fmt: skip
"""
- MAX_BATCH, MIN_BATCH, NUM_INPUTS, NUM_OUTPUTS: of the cell. NUM_STEP_INPUTS: how many inputs a run takes anew at each
  step, the others being its state; NOWHERE until the type is used in a run.
- POOL: of its rows. NUM_PORTS: inputs that some node has fed so far (`State.ports`).
- NUM_RUNNING: its steps on workers. NUM_PASSED: batches in a row of another depth than the first node in the queue.
- PLACES: single nodes and runs in flight, which is the most that can be ready at once.
- QUEUE_BEGIN, QUEUE_END: its part of `State.queue`. HEAD_OF_QUEUE, TAIL_OF_QUEUE: where its ready nodes are in it.
- PRIORITY: of the cell. JUST_RAN: 1 if it counts as running because it ran last (see Scheduler, `take_turns`).
- PASSED_OVER: see `overdue_first`. INDEPENDENT: see `Frontiers`.
- NUM_MEMORIES: how many of its first inputs are memories (see CellType). OWN_MEMORY: 1 if one of them is the run's own.
- MINI_BATCH_DEPTHS, LEFT_DEPTHS: two rows each, a number of nodes and the sum of their depths; see `Depths`.
"""

STEP_SHIFT: Final = 32
"""State.reach: above so many bits the step from one node of a memory to the next, below the number of its nodes."""
LENGTH_MASK: Final = (1 << STEP_SHIFT) - 1

ROWS_BEGIN, NUM_FREE, NUM_ROWS, FIRST_TABLE, END_TABLE, POOL_FIELDS = range(6)
"""ROWS_BEGIN: the pool's part of `State.free_rows`, NUM_ROWS long. NUM_FREE: free rows, at its beginning; rows are
taken from the end of these. FIRST_TABLE, END_TABLE: the pool's tables, one per output."""

STEPS_ON, STEERING_ON, TASKS_ON, TYPES_PASSED, WORKER_FIELDS = range(5)
"""STEPS_ON: steps that are submitted and not finished. STEERING_ON: those whose values decide which nodes come next.
TASKS_ON: tasks that are submitted and not finished. TYPES_PASSED: tasks since the oldest node's type had its turn in
which a higher priority went first (see `Urgency`)."""

LANES_BEGIN, NUM_LANES, NUM_RESERVED, TURNS_PASSED, LANE_FIELDS = range(5)
"""Of a worker and a cell type. LANES_BEGIN, NUM_LANES: its part of `State.occupant`. NUM_RESERVED: rows of the lane
tables. TURNS_PASSED: tasks since the oldest had its turn in which a higher priority went first (see AgeTurns)."""

# --- counts -----------------------------------------------------------------------------------------------------------

NODES, SUBGRAPHS, EDGES, SLOTS, EXTENTS = map(number, range(5))
KINDS: Final = 5
"""Kinds of numbers that are given out in extents."""
USED: Final = KINDS
NEXT_SERIAL, NUM_RANKED, GAVE_WAY, COUNTS = range(2 * KINDS, 2 * KINDS + 4)
"""State.counts: for each kind one past the highest number given out, and from USED on how many are in use; then the
next place in the queues for a released subgraph; how many requests have a rank other than 0; and 1 if the last task was
a full batch of others than the cohort (see `Urgency`)."""
SIZE_CLASSES: Final = 9 + 4 * 48

# --- ready nodes ------------------------------------------------------------------------------------------------------

NODE_BITS: Final = 36
NODE_MASK: Final = (1 << NODE_BITS) - 1
"""A ready node is a sortable number, its key: the serial number of its subgraph, then the 36 bits of its own."""
SERIAL_LIMIT: Final = 1 << 62 - NODE_BITS
"""Serial numbers are below this: half of what fits above the bits of a node."""
KEY, KEY_RANK, QUEUE_FIELDS = range(3)
"""State.queue: a ready node and the rank of its request."""

# --- tasks ------------------------------------------------------------------------------------------------------------

(
    PLAN_ROWS, OWN_TYPE_FOLLOWS, LOOPS_AHEAD, SHARE_WORKERS, MAX_STEPS, WEIGHS_TASKS, PATIENCE, AGED_EVERY,
    RUN_AHEAD, COUNTS_TASKS, TAKES_TURNS, ORDER, TYPE_PATIENCE, URGENT_FIRST, SHORT_TASKS, ASKS_POLICY, RULES,
) = range(17)  # fmt: skip
"""State.rules: who gets tasks, of which type, and how they are formed.

- PLAN_ROWS, OWN_TYPE_FOLLOWS, LOOPS_AHEAD: 1 or 0; see Scheduler and SchedulerState.
- SHARE_WORKERS: 1 if there are several workers, so that nodes may be pinned to another one.
- MAX_STEPS: the most steps of a task; see CellPolicy. WEIGHS_TASKS: 1 if its length follows from its own cost.
- PATIENCE: how many batches in a row may have another depth than the first node in the queue, where a batch holds only
  nodes of one depth and a task has one step; NOWHERE elsewhere.
- AGED_EVERY: of the tasks of one type on one worker in which a higher priority goes first while a lower one waits, one
  of so many takes the nodes that have been ready longest, whatever their priority; 0: none does.
- SHORT_TASKS: 1 while live streams are served; see LiveStreams. ASKS_POLICY: 1 if the policy ranks the types where
  several are ready.
"""
