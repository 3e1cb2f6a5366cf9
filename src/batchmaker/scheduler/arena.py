"""The arena: nodes, subgraphs and edges of all requests in flight, as arrays. There is no object per node.

All files of the scheduler read it. Admission, `find_steps` and completion write it, mostly in compiled loops.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

NOWHERE = -1

# States of a node. It passes through them in this order only.
WAITING, READY, SUBMITTED, DONE = 0, 1, 2, 3

OVER = 2
"""Value of `open_ended` for a run that has ended. Steps of it that were submitted ahead compute nothing."""

# Rows of `Arena.of_nodes`.
STATE, SUBGRAPH, REQUEST, PENDING, USES, HELD, ROW, FETCH, FIRST_EDGE, NUM_EDGES, NODE_FIELDS = range(11)

# Rows of `Arena.of_subgraphs`.
TYPE, HEAD, SIZE, SPAN, EXTERNAL, PIN, IN_FLIGHT, SEQUENCE, END, OPEN_ENDED, LANE, LANE_WORKER, SUBGRAPH_FIELDS = range(
    13
)

Ids = NDArray[np.int64]


def size_class(count: int) -> int:
    """Round a count up to one of four sizes per doubling, so that later requests can use freed extents again."""
    if count <= 8:
        return count
    step = 1 << (count.bit_length() - 3)
    return -(-count // step) * step


@final
class Extents:
    """Gives out extents (consecutive numbers) and takes them back. Freed extents are used again, by size class."""

    __slots__ = ("_free", "num_used", "top")

    def __init__(self) -> None:
        self.top = 0
        self.num_used = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)

    def allocate(self, count: int) -> int:
        """Return the first of `count` consecutive numbers."""
        self.num_used += count
        size = size_class(count)
        free = self._free.get(size)
        if free:
            return free.pop()
        first = self.top
        self.top += size
        return first

    def allocate_each(self, counts: Sequence[int]) -> list[int]:
        """Return the result of `allocate` for each of these counts, in order."""
        if len(counts) > 1 and len(set(counts)) == 1:
            return self._allocate_alike(counts[0], len(counts))
        firsts = []
        for count in counts:
            size = count if count <= 8 else size_class(count)
            free = self._free.get(size)
            if free:
                firsts.append(free.pop())
            else:
                firsts.append(self.top)
                self.top += size
        self.num_used += sum(counts)
        return firsts

    def top_after(self, counts: Sequence[int]) -> int:
        """Return what `top` will be after `allocate_each(counts)`."""
        wanted = Counter(map(size_class, counts))
        return self.top + sum(size * max(0, number - len(self._free.get(size, ()))) for size, number in wanted.items())

    def _allocate_alike(self, count: int, number: int) -> list[int]:
        """Return the result of `number` calls of `allocate(count)`."""
        self.num_used += count * number
        size = size_class(count)
        free = self._free[size]
        num_fresh = max(0, number - len(free))
        firsts = free[: -(number - num_fresh) - 1 : -1]  # from the end, as `pop` takes them
        del free[len(free) - len(firsts) :]
        if num_fresh:
            firsts += range(self.top, self.top + num_fresh * size, size) if size else [self.top] * num_fresh
            self.top += num_fresh * size
        return firsts

    def release(self, first: int, count: int) -> None:
        """Give back the extent that `allocate(count)` returned as `first`."""
        self.num_used -= count
        self._free[count if count <= 8 else size_class(count)].append(first)

    def release_each(self, firsts: Sequence[int], counts: Sequence[int]) -> None:
        """Call `release` for each of these extents, in order."""
        if len(counts) > 1 and len(set(counts)) == 1:
            self._free[size_class(counts[0])] += firsts
            self.num_used -= sum(counts)
            return
        for first, count in zip(firsts, counts, strict=True):
            self.release(first, count)


def _grown(array: Ids, size: int) -> Ids:
    bigger = np.zeros((*array.shape[:-1], size), array.dtype)
    bigger[..., : array.shape[-1]] = array
    return bigger


@final
class Arena:
    """The arrays, indexed by node number, subgraph number or edge number. All are int64.

    For each node:

    - state: WAITING, READY, SUBMITTED or DONE.
    - subgraph: its subgraph.
    - request: the slot of its request.
    - pending: number of inputs from its own subgraph that are not submitted yet.
    - uses: number of reads by nodes that have not finished.
    - held: 1 if the unfold function may still use the node.
    - row: its row in the pool of its type; NOWHERE if it has none.
    - fetch: bit k is set if output k goes to the host.
    - first_edge, num_edges: its consumers.
    - source_table, source: [num_ports, nodes] for each input, its table and the node that computes it. `source` means
      nothing for host tables and ZERO_TABLE.

    For each subgraph:

    - type: its cell type.
    - head: its first node.
    - size: its number of nodes.
    - span: how many numbers there are from its first to its last node.
    - external: number of inputs from other subgraphs that are not done.
    - pin: the worker that runs steps of it, or NOWHERE.
    - in_flight: how many times a node of it is in a step that is submitted and not finished.
    - sequence: its place in the queue.
    - end: one past the last node of a run; 0 if it is not a run.
    - open_ended: 1 if a value may end the run; OVER if it has ended; otherwise 0.
    - lane, lane_worker: the lane of the chain and the worker of this lane, or NOWHERE.

    For each edge: consumer, the node that reads.

    The fields of nodes are the rows of `of_nodes` [NODE_FIELDS, nodes], and the fields of subgraphs are the rows of
    `of_subgraphs` [SUBGRAPH_FIELDS, subgraphs]. Compiled loops take these two whole, because each array argument costs
    time: in a call for a single node, counting references to arrays costs more than the work. Each row is also an
    attribute of the arena.
    """

    _NODE_ROWS = (
        "state", "subgraph", "request", "pending", "uses", "held", "row", "fetch", "first_edge", "num_edges",
    )  # fmt: skip
    _SUBGRAPH_ROWS = (
        "type", "head", "size", "span", "external", "pin", "in_flight", "sequence", "end", "open_ended", "lane",
        "lane_worker",
    )  # fmt: skip

    state: Ids
    subgraph: Ids
    request: Ids
    pending: Ids
    uses: Ids
    held: Ids
    row: Ids
    fetch: Ids
    first_edge: Ids
    num_edges: Ids
    type: Ids
    head: Ids
    size: Ids
    span: Ids
    external: Ids
    pin: Ids
    in_flight: Ids
    sequence: Ids
    end: Ids
    open_ended: Ids
    lane: Ids
    lane_worker: Ids

    def __init__(self) -> None:
        self.nodes = Extents()
        self.subgraphs = Extents()
        self.edges = Extents()
        n, s = 1024, 256
        self.of_nodes: Ids = np.zeros((NODE_FIELDS, n), np.int64)
        self.of_subgraphs: Ids = np.zeros((SUBGRAPH_FIELDS, s), np.int64)
        self.source: Ids = np.zeros((1, n), np.int64)
        self.source_table: Ids = np.zeros((1, n), np.int64)
        self.consumer: Ids = np.zeros(n, np.int64)
        self.place: Ids = np.full(n, -1, np.int64)  # scratch of admission, all -1 between calls
        self._name_rows()

    def _name_rows(self) -> None:
        for name, row in zip(self._NODE_ROWS, self.of_nodes, strict=True):
            setattr(self, name, row)
        for name, row in zip(self._SUBGRAPH_ROWS, self.of_subgraphs, strict=True):
            setattr(self, name, row)

    @property
    def node_capacity(self) -> int:
        return len(self.state)

    def need_ports(self, num_ports: int) -> None:
        """Make room for cells with this many inputs."""
        have = len(self.source)
        if num_ports > have:
            extra = np.zeros((num_ports - have, self.node_capacity), np.int64)
            self.source = np.concatenate((self.source, extra))
            self.source_table = np.concatenate((self.source_table, extra))

    def fit_nodes(self) -> bool:
        """Grow the arrays until they hold every node number that was given out; return whether they have grown."""
        if self.nodes.top <= self.node_capacity:
            return False
        self.grow_nodes(max(2 * self.node_capacity, self.nodes.top))
        return True

    def grow_nodes(self, size: int) -> None:
        """Make room for node numbers below `size`."""
        self.of_nodes, self.source = _grown(self.of_nodes, size), _grown(self.source, size)
        self.source_table = _grown(self.source_table, size)
        self._name_rows()

    def fit_subgraphs(self) -> None:
        """Grow the arrays until they hold every subgraph number that was given out."""
        if self.subgraphs.top > self.of_subgraphs.shape[1]:
            self.of_subgraphs = _grown(self.of_subgraphs, max(2 * self.of_subgraphs.shape[1], self.subgraphs.top))
            self._name_rows()

    def allocate_edges(self, count: int) -> int:
        """Return the first of `count` edge numbers; grow `consumer` if needed."""
        first = self.edges.allocate(count)
        if self.edges.top > len(self.consumer):
            self.consumer = _grown(self.consumer, max(2 * len(self.consumer), self.edges.top))
        return first
