"""The arena: nodes, subgraphs, edges and requests in flight, ready nodes, rows and lanes, as a few tables of int64.

There is no object per node, and none per request. Compiled loops take the tables as one `State`. Only this file makes
them and lets them grow: a loop that lacks room changes nothing and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Ints
from batchmaker.core import extents
from batchmaker.core.addresses import State, addresses_of
from batchmaker.core.layout import (
    ALIVE,
    BASE,
    COUNTS,
    EDGES,
    END_TABLE,
    EXTENT_FIELDS,
    FIRST,
    FIRST_TABLE,
    HEAD_OF_QUEUE,
    KINDS,
    LANE_FIELDS,
    LANES_BEGIN,
    MAX_BATCH,
    MIN_BATCH,
    NEXT,
    NOBODY,
    NODE_FIELDS,
    NODES,
    NOWHERE,
    NUM_FREE,
    NUM_INPUTS,
    NUM_LANES,
    NUM_MEMORIES,
    NUM_NODES,
    NUM_OUTPUTS,
    NUM_PORTS,
    NUM_ROWS,
    NUM_STEP_INPUTS,
    OWN_MEMORY,
    PLACES,
    POOL,
    POOL_FIELDS,
    PRIORITY,
    QUEUE_BEGIN,
    QUEUE_END,
    QUEUE_FIELDS,
    REQUEST_FIELDS,
    ROWS_BEGIN,
    RULES,
    SIZE_CLASSES,
    SLOTS,
    SUBGRAPH_FIELDS,
    SUBGRAPHS,
    TAIL_OF_QUEUE,
    TYPE_FIELDS,
    USED,
    WORKER_FIELDS,
)
from batchmaker.graph.spec import GIVEN, CellType

FIRST_LANES: Final = 64
UNKNOWN_S: Final = 1e-4
"""Seconds of a step while nothing has been measured."""


def records(fields: int, size: int) -> Ints:
    """Return zeros [fields, size] of which each column is contiguous: what is known of one node is in one place."""
    return np.zeros((size, fields), np.int64).T


def _resized(table: Ints, fields: int, size: int) -> Ints:
    """Return records with more fields, or of more things."""
    grown = records(fields, size)
    grown[: table.shape[0], : table.shape[1]] = table
    return grown


def _wider(table: Ints, size: int) -> Ints:
    """Return an array, or records, of at least `size` things, and of at least twice as many as before."""
    size = max(size, 2 * table.shape[-1])
    if table.ndim == 2:
        return _resized(table, len(table), size)
    grown = np.zeros(size, np.int64)
    grown[: len(table)] = table
    return grown


@final
class Arena:
    """Makes the tables and lets them grow. Each table is an attribute; see State."""

    _NODE_ROWS = ("state", "subgraph", "request", "pending", "uses", "held", "row", "fetch", "first_edge", "num_edges")
    _SUBGRAPH_ROWS = (
        "type", "head", "size", "span", "external", "pin", "in_flight", "serial", "end", "open_ended", "lane",
        "lane_worker",
    )  # fmt: skip

    state: Ints
    subgraph: Ints
    request: Ints
    pending: Ints
    uses: Ints
    held: Ints
    row: Ints
    fetch: Ints
    first_edge: Ints
    num_edges: Ints
    type: Ints
    head: Ints
    size: Ints
    span: Ints
    external: Ints
    pin: Ints
    in_flight: Ints
    serial: Ints
    end: Ints
    open_ended: Ints
    lane: Ints
    lane_worker: Ints

    def __init__(self, num_workers: int = 1) -> None:
        n, s = 1024, 256
        self.nodes = records(NODE_FIELDS, n)
        self.subgraphs = records(SUBGRAPH_FIELDS, s)
        self.consumer: Ints = np.zeros(n, np.int64)
        self.source = records(2, n)  # of one field they would have another form for compiled loops
        self.source_table = records(2, n)
        self.reach = records(0, n)
        self.requests = records(REQUEST_FIELDS, s)
        self.extents = records(EXTENT_FIELDS, s)
        self.types: Ints = np.zeros((TYPE_FIELDS, 0), np.int64)
        self.ports: Ints = np.zeros((0, 1), np.int64)
        self._fed: NDArray[np.bool_] = np.zeros((0, 1), np.bool_)  # types and ports that `ports` has
        self.seconds: NDArray[np.float64] = np.zeros((0, 2))
        self.known_s: NDArray[np.float64] = np.zeros((0, 1))
        self.queue: Ints = np.zeros((QUEUE_FIELDS, n), np.int64)
        self.pools: Ints = np.zeros((POOL_FIELDS, 0), np.int64)
        self.free_rows: Ints = np.zeros(0, np.int64)
        self.is_host: NDArray[np.bool_] = np.zeros(64, np.bool_)
        self.workers: Ints = np.zeros((WORKER_FIELDS, num_workers), np.int64)
        self.lanes: Ints = np.zeros((LANE_FIELDS, num_workers, 0), np.int64)
        self.occupant: Ints = np.zeros(0, np.int64)
        self.lane_tables: Ints = np.zeros((0, num_workers, 1), np.int64)
        self.free: Ints = np.full((KINDS, SIZE_CLASSES), NOWHERE, np.int64)
        self.counts: Ints = np.zeros(COUNTS, np.int64)
        self.depth_of: Ints = np.zeros(0, np.int64)
        self.keeps: Ints = np.zeros(1024, np.int64)
        self.rules: Ints = np.zeros(RULES, np.int64)
        self.budget_s: NDArray[np.float64] = np.zeros((1, 1))
        self.place: Ints = np.full(n, -1, np.int64)  # scratch of admission, all -1 between calls
        self._num_queued = 0  # of `queue`, what types have
        self.keeps_sources = True  # whether there is a place for the inputs of every node
        self._tables: Ints | None = None
        self._name_rows()

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute. The addresses of the tables are not used any more once one of them is another array."""
        object.__setattr__(self, name, value)
        if name in State._fields:
            object.__setattr__(self, "_tables", None)

    def _name_rows(self) -> None:
        """Let the attributes of rows be those of the present tables."""
        for name, row in zip(self._NODE_ROWS, self.nodes, strict=True):
            setattr(self, name, row)
        for name, row in zip(self._SUBGRAPH_ROWS, self.subgraphs, strict=True):
            setattr(self, name, row)

    @property
    def tables(self) -> Ints:
        """The addresses of all tables, for compiled loops (see `tables`). Ask again after anything may have grown."""
        if self._tables is None:
            self._tables = addresses_of(State(*[getattr(self, name) for name in State._fields]))
        return self._tables

    @property
    def node_capacity(self) -> int:
        return len(self.request)

    # --- numbers that are given out ----------------------------------------------------------------------------------

    def _capacity(self, kind: int) -> int:
        """Return for how many numbers of a kind there is room."""
        tables = (self.nodes, self.subgraphs, self.consumer, self.requests, self.extents)
        return int(tables[kind].shape[-1])

    def num_used(self, kind: int) -> int:
        """Return how many numbers of a kind are in use."""
        return int(self.counts[USED + kind])

    def top_after(self, kind: int, wanted: Ints) -> int:
        """Return one past the highest number after `allocate(kind, wanted)`."""
        return extents.top_of_kind(self.tables, kind, wanted)

    def fit(self, kind: int, wanted: Ints) -> None:
        """Make room for `allocate(kind, wanted)`."""
        self.make_room(kind, self.top_after(kind, wanted))

    def make_room(self, kind: int, top: int) -> bool:
        """Have room for numbers below `top`; return whether the tables have grown."""
        capacity = self._capacity(kind)
        if top <= capacity:
            return False
        if kind == NODES:
            self.grow_nodes(max(2 * capacity, top))
        elif kind == SUBGRAPHS:
            self.subgraphs = _wider(self.subgraphs, top)
        elif kind == EDGES:
            self.consumer = _wider(self.consumer, top)
        elif kind == SLOTS:
            self.requests = _wider(self.requests, top)
        else:
            self.extents = _wider(self.extents, top)
        self._name_rows()
        return True

    def allocate(self, kind: int, wanted: Ints) -> Ints:
        """Return the first of so many consecutive numbers, for each of `wanted`. The tables may grow."""
        firsts = extents.allocate_each(self.tables, kind, wanted)
        if len(firsts) < len(wanted):
            self.fit(kind, wanted)
            firsts = extents.allocate_each(self.tables, kind, wanted)
        return firsts

    def release(self, kind: int, firsts: Ints, counts: Ints) -> None:
        """Give back what `allocate` has returned as `firsts` for `counts`."""
        extents.release_each(self.tables, kind, firsts, counts)

    def forget_numbers(self) -> None:
        """Take all numbers back at once, as if none had been given out. Nothing may be in flight."""
        self.counts[:], self.free[:], self.types[PLACES] = 0, NOWHERE, 0

    def fit_depths(self) -> None:
        """Have a depth for every node number."""
        if len(self.depth_of) < self.node_capacity:
            self.depth_of = _wider(self.depth_of, self.node_capacity)

    def grow_nodes(self, size: int) -> None:
        """Make room for node numbers below `size`."""
        for name in ("nodes", "source", "source_table", "reach") if self.keeps_sources else ("nodes",):
            table = getattr(self, name)
            setattr(self, name, _resized(table, len(table), size))
        self._name_rows()

    # --- cell types, pools, lanes -------------------------------------------------------------------------------------

    def add_type(self, cell: CellType, pool: int) -> None:
        """Add a cell type whose rows are in this pool."""
        number, (_, num_workers, _) = self.types.shape[1], self.lanes.shape
        facts = np.zeros((TYPE_FIELDS, 1), np.int64)
        facts[[MAX_BATCH, MIN_BATCH, NUM_INPUTS, NUM_OUTPUTS, POOL, NUM_STEP_INPUTS, PRIORITY], 0] = (
            cell.max_batch,
            cell.min_batch,
            len(cell.inputs),
            len(cell.outputs),
            pool,
            NOWHERE,
            cell.priority,
        )
        facts[[NUM_MEMORIES, OWN_MEMORY], 0] = len(cell.memories), any(output != GIVEN for output in cell.memories)
        if len(cell.memories) > len(self.reach):
            self.reach = _resized(self.reach, len(cell.memories), self.source.shape[1])
        self.types = np.concatenate((self.types, facts), axis=1)
        num_ports = max(len(self.source), len(cell.inputs))
        if num_ports > len(self.source):
            size = self.source.shape[1]
            self.source, self.source_table = (_resized(t, num_ports, size) for t in (self.source, self.source_table))
        ports = np.zeros((number + 1, num_ports), np.int64)
        ports[:number, : self.ports.shape[1]] = self.ports
        tables = np.zeros((number + 1, num_workers, num_ports), np.int64)
        tables[:number, :, : self.lane_tables.shape[2]] = self.lane_tables
        seconds = np.full((number + 1, max(self.seconds.shape[1], cell.max_batch + 1)), UNKNOWN_S)
        seconds[:number, : self.seconds.shape[1]] = self.seconds
        known_s = np.full((number + 1, (seconds.shape[1] - 1).bit_length()), np.nan)
        known_s[:number, : self.known_s.shape[1]] = self.known_s
        fed = np.zeros(ports.shape, np.bool_)
        fed[:number, : self._fed.shape[1]] = self._fed
        self._fed = fed
        self.ports, self.lane_tables, self.seconds, self.known_s = ports, tables, seconds, known_s
        self.lanes = np.concatenate((self.lanes, np.zeros((LANE_FIELDS, num_workers, 1), np.int64)), axis=2)

    def note_ports(self, fed: NDArray[np.bool_]) -> None:
        """Note that some node feeds these inputs. fed: [types, ports], or fewer ports."""
        known = self._fed[: fed.shape[0], : fed.shape[1]]
        for type_id in np.flatnonzero((fed > known).any(axis=1)).tolist():
            known[type_id] |= fed[type_id]
            ports = np.flatnonzero(self._fed[type_id])
            self.ports[type_id, : len(ports)], self.types[NUM_PORTS, type_id] = ports, len(ports)

    def note_port(self, type_id: int, port: int) -> None:
        """Note that some node feeds this input."""
        if not self._fed[type_id, port]:
            fed = np.zeros_like(self._fed)
            fed[type_id, port] = True
            self.note_ports(fed)

    def add_pool(self, tables: Sequence[int]) -> int:
        """Add a pool without rows; return its number."""
        facts = np.zeros((POOL_FIELDS, 1), np.int64)
        facts[FIRST_TABLE, 0], facts[END_TABLE, 0] = min(tables, default=0), max(tables, default=-1) + 1
        self.pools = np.concatenate((self.pools, facts), axis=1)
        return len(self.pools[0]) - 1

    def grow_pool(self, pool: int, num_rows: int) -> None:
        """Have so many rows. The new ones are taken after those that are free now, in ascending order."""
        begin, num_free, before = self.pools[[ROWS_BEGIN, NUM_FREE, NUM_ROWS], pool].tolist()
        free, fresh = self.free_rows[begin : begin + num_free].copy(), np.arange(num_rows - 1, before - 1, -1)
        others = np.delete(self.free_rows, np.s_[begin : begin + before])
        self.pools[ROWS_BEGIN, self.pools[ROWS_BEGIN] > begin] -= before
        self.pools[[ROWS_BEGIN, NUM_FREE, NUM_ROWS], pool] = len(others), num_free + len(fresh), num_rows
        self.free_rows = np.concatenate((others, fresh, free, np.zeros(before - num_free, np.int64)))

    def note_table(self, table: int, *, host: bool) -> None:
        """Note that a table exists, and whether its values come from the host."""
        if table >= len(self.is_host):
            self.is_host = np.concatenate((self.is_host, np.zeros_like(self.is_host)))
        self.is_host[table] = host

    def take_row(self, pool: int) -> int:
        """Take a free row of a pool. It must have one."""
        self.pools[NUM_FREE, pool] -= 1
        return int(self.free_rows[self.pools[ROWS_BEGIN, pool] + self.pools[NUM_FREE, pool]])

    def free_rows_of(self, pool: int) -> Ints:
        """Return the free rows of a pool."""
        begin, num_free = self.pools[[ROWS_BEGIN, NUM_FREE], pool].tolist()
        return self.free_rows[begin : begin + num_free]

    def occupants(self, worker: int, type_id: int) -> Ints:
        """Return the lanes of a cell type on a worker: the subgraph in each, or NOBODY."""
        begin, count = self.lanes[[LANES_BEGIN, NUM_LANES], worker, type_id].tolist()
        return self.occupant[begin : begin + count]

    def grow_lanes(self, worker: int, type_id: int, wanted: int) -> None:
        """Have at least so many lanes, and at least twice as many as before."""
        begin, before = self.lanes[[LANES_BEGIN, NUM_LANES], worker, type_id].tolist()
        mine, count = self.occupants(worker, type_id).copy(), max(wanted, 2 * before, FIRST_LANES)
        others = np.delete(self.occupant, np.s_[begin : begin + before])
        self.lanes[LANES_BEGIN][self.lanes[LANES_BEGIN] > begin] -= before
        self.lanes[LANES_BEGIN, worker, type_id], self.lanes[NUM_LANES, worker, type_id] = len(others), count
        self.occupant = np.concatenate((others, mine, np.full(count - before, NOBODY)))

    # --- ready nodes --------------------------------------------------------------------------------------------------

    def fit_queues(self) -> None:
        """Let each type's part of `queue` be at least twice as long as its nodes and runs in flight."""
        types = self.types
        for type_id in np.flatnonzero(types[QUEUE_END] - types[QUEUE_BEGIN] < 2 * types[PLACES]).tolist():
            begin, end, head, tail = types[[QUEUE_BEGIN, QUEUE_END, HEAD_OF_QUEUE, TAIL_OF_QUEUE], type_id].tolist()
            waiting, size = self.queue[:, head:tail].copy(), max(4 * int(types[PLACES, type_id]), 64)
            rest = np.delete(self.queue[:, : self._num_queued], np.s_[begin:end], axis=1)
            behind = types[QUEUE_BEGIN] > begin
            for field in (QUEUE_BEGIN, QUEUE_END, HEAD_OF_QUEUE, TAIL_OF_QUEUE):
                types[field, behind] -= end - begin
            first, self._num_queued = rest.shape[1], rest.shape[1] + size
            at = first + (size - waiting.shape[1]) // 2
            types[[QUEUE_BEGIN, QUEUE_END, HEAD_OF_QUEUE, TAIL_OF_QUEUE], type_id] = (
                first,
                first + size,
                at,
                at + waiting.shape[1],
            )
            self.queue = np.zeros((QUEUE_FIELDS, self._num_queued), np.int64)
            self.queue[:, :first], self.queue[:, at : at + waiting.shape[1]] = rest, waiting

    def num_ready(self, type_id: int) -> int:
        """Return how many nodes of a type are ready."""
        return int(self.types[TAIL_OF_QUEUE, type_id] - self.types[HEAD_OF_QUEUE, type_id])

    def ready_keys(self, type_id: int) -> Ints:
        """Return the ready nodes of a type, in the order of their queue, as keys."""
        head, tail = self.types[[HEAD_OF_QUEUE, TAIL_OF_QUEUE], type_id].tolist()
        return self.queue[0, head:tail]

    # --- requests -----------------------------------------------------------------------------------------------------

    def is_alive(self, slot: int) -> bool:
        """Whether a request has no Reply and no Fail yet."""
        return bool(self.requests[ALIVE, slot])

    def extents_of(self, slot: int) -> list[int]:
        """Return the numbers of a request's extents, in the order of its graphs."""
        extents, at = [], int(self.requests[FIRST, slot])
        while at != NOWHERE:
            extents.append(at)
            at = int(self.extents[NEXT, at])
        return extents

    def spans_of(self, slots: Sequence[int]) -> Ints:
        """Return the extents of these requests, one request after the other: [extents, 2] first node, and count."""
        extents = [extent for slot in slots for extent in self.extents_of(slot)]
        return self.extents[[BASE, NUM_NODES]][:, extents].T
