"""Nodes, subgraphs and edges of all requests in flight, as arrays. Nothing here is an object per node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

NOWHERE = -1

# States of a node, in the only order in which it passes through them.
WAITING, READY, SUBMITTED, DONE = 0, 1, 2, 3


def _size_class(count: int) -> int:
    """Round up to one of four sizes per doubling, so that freed extents fit later requests."""
    if count <= 8:
        return count
    step = 1 << (count.bit_length() - 3)
    return -(-count // step) * step


@final
class Extents:
    """Consecutive numbers handed out and taken back; freed extents are used again by size class."""

    __slots__ = ("_free", "num_used", "top")

    def __init__(self) -> None:
        self.top = 0
        self.num_used = 0
        self._free: dict[int, list[int]] = {}

    def allocate(self, count: int) -> int:
        """Return the first of `count` consecutive numbers."""
        self.num_used += count
        size = _size_class(count)
        free = self._free.get(size)
        if free:
            return free.pop()
        first = self.top
        self.top += size
        return first

    def allocate_each(self, counts: Sequence[int]) -> list[int]:
        """Return what `allocate` returns for each of these counts, in their order."""
        firsts = []
        for count in counts:
            size = count if count <= 8 else _size_class(count)
            free = self._free.get(size)
            if free:
                firsts.append(free.pop())
            else:
                firsts.append(self.top)
                self.top += size
        self.num_used += sum(counts)
        return firsts

    def release(self, first: int, count: int) -> None:
        """Give back what `allocate(count)` returned."""
        self.num_used -= count
        self._free.setdefault(_size_class(count), []).append(first)


def _grown(array: NDArray[np.generic], size: int) -> NDArray[np.generic]:
    shape = (*array.shape[:-1], size)
    bigger = np.zeros(shape, array.dtype)
    bigger[..., : array.shape[-1]] = array
    return bigger


class NodeArrays(NamedTuple):
    """The arrays of nodes that steps read and write; see Arena."""

    state: NDArray[np.int8]
    subgraph: NDArray[np.int64]
    request: NDArray[np.int64]
    pending: NDArray[np.int64]
    uses: NDArray[np.int64]
    held: NDArray[np.bool_]
    row: NDArray[np.int64]
    fetch: NDArray[np.int64]
    first_edge: NDArray[np.int64]
    num_edges: NDArray[np.int64]
    source: NDArray[np.int64]
    source_table: NDArray[np.int64]


class SubgraphArrays(NamedTuple):
    """The arrays of subgraphs that steps read and write; see Arena."""

    external: NDArray[np.int64]
    pin: NDArray[np.int16]
    in_flight: NDArray[np.int64]
    sequence: NDArray[np.int64]
    end: NDArray[np.int64]
    open_ended: NDArray[np.bool_]
    lane: NDArray[np.int64]
    lane_worker: NDArray[np.int16]


@final
class Arena:
    """The arrays. Index by node number, subgraph number or edge number.

    Nodes: state; subgraph; request (slot); pending (inputs from its own subgraph not yet submitted); uses (references
    by nodes that have not finished); held (the unfold function may still use it); row (of its pool, NOWHERE if none);
    fetch (bit k: output k goes to the host); source_table and source [num_ports, nodes] (the table in which an input is
    found and, unless that is a host table or ZERO_TABLE, the node whose output it is); first_edge, num_edges (its
    consumers).
    Subgraphs: type; head (first node); size (nodes); span (from its first to its last node); external (inputs from
    other subgraphs that are not done); pin; in_flight (its node-steps submitted and not finished); sequence (place in
    the queue); end (one past a run's last node, 0 for single nodes); open_ended; lane, lane_worker.
    Edges: consumer (node).
    """

    def __init__(self) -> None:
        # Counters and indices are int64: NumPy's ufunc.at is forty times slower where it must cast.
        self.nodes = Extents()
        self.subgraphs = Extents()
        self.edges = Extents()
        n, s = 1024, 256
        self.state = np.zeros(n, np.int8)
        self.subgraph = np.zeros(n, np.int64)
        self.request = np.zeros(n, np.int64)
        self.pending = np.zeros(n, np.int64)
        self.uses = np.zeros(n, np.int64)
        self.held = np.zeros(n, np.bool_)
        self.row = np.full(n, NOWHERE, np.int64)
        self.fetch = np.zeros(n, np.int64)
        self.first_edge = np.zeros(n, np.int64)
        self.num_edges = np.zeros(n, np.int64)
        self.source = np.zeros((1, n), np.int64)
        self.source_table = np.zeros((1, n), np.int64)
        self.type = np.zeros(s, np.int16)
        self.head = np.zeros(s, np.int64)
        self.size = np.zeros(s, np.int64)
        self.span = np.zeros(s, np.int64)
        self.place = np.full(n, -1, np.int64)  # admission's scratch
        self.external = np.zeros(s, np.int64)
        self.pin = np.full(s, NOWHERE, np.int16)
        self.in_flight = np.zeros(s, np.int64)
        self.sequence = np.zeros(s, np.int64)
        self.end = np.zeros(s, np.int64)
        self.open_ended = np.zeros(s, np.bool_)
        self.lane = np.full(s, NOWHERE, np.int64)
        self.lane_worker = np.full(s, NOWHERE, np.int16)
        self.consumer = np.zeros(n, np.int64)

    _NODE_ARRAYS = (
        "state", "subgraph", "request", "pending", "uses", "held", "row", "fetch", "first_edge", "num_edges",
        "source", "source_table",
    )  # fmt: skip
    _SUBGRAPH_ARRAYS = (
        "type", "head", "size", "span", "external", "pin", "in_flight", "sequence", "end", "open_ended", "lane",
        "lane_worker",
    )  # fmt: skip

    @property
    def node_arrays(self) -> NodeArrays:
        """The arrays of nodes, as they are until the arena grows."""
        return NodeArrays(
            self.state, self.subgraph, self.request, self.pending, self.uses, self.held, self.row, self.fetch,
            self.first_edge, self.num_edges, self.source, self.source_table,
        )  # fmt: skip

    @property
    def subgraph_arrays(self) -> SubgraphArrays:
        """The arrays of subgraphs, as they are until the arena grows."""
        return SubgraphArrays(
            self.external, self.pin, self.in_flight, self.sequence, self.end, self.open_ended, self.lane,
            self.lane_worker,
        )  # fmt: skip

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

    def allocate_nodes(self, count: int) -> tuple[int, bool]:
        """Return the first of `count` node numbers, all WAITING, and whether the arrays have grown."""
        first = self.nodes.allocate(count)
        grown = self.fit_nodes()
        self.clear_nodes(slice(first, first + count))
        return first, grown

    def fit_nodes(self) -> bool:
        """Make the arrays hold every node number given out; return whether they have grown."""
        if self.nodes.top <= self.node_capacity:
            return False
        size = max(2 * self.node_capacity, self.nodes.top)
        for name in self._NODE_ARRAYS:
            setattr(self, name, _grown(getattr(self, name), size))
        return True

    def clear_nodes(self, where: slice | NDArray[np.int64]) -> None:
        """Give nodes their first state."""
        self.state[where] = WAITING
        self.uses[where] = 0
        self.fetch[where] = 0
        self.num_edges[where] = 0
        self.row[where] = NOWHERE
        self.pending[where] = 0
        self.held[where] = False

    def allocate_subgraphs(self, count: int) -> int:
        """Return the first of `count` subgraph numbers, unpinned and without a lane."""
        first = self.subgraphs.allocate(count)
        self.fit_subgraphs()
        self.clear_subgraphs(slice(first, first + count))
        return first

    def fit_subgraphs(self) -> None:
        """Make the arrays hold every subgraph number given out."""
        if self.subgraphs.top > len(self.type):
            size = max(2 * len(self.type), self.subgraphs.top)
            for name in self._SUBGRAPH_ARRAYS:
                setattr(self, name, _grown(getattr(self, name), size))

    def clear_subgraphs(self, where: slice | NDArray[np.int64]) -> None:
        """Give subgraphs their first state."""
        self.external[where] = 0
        self.pin[where] = NOWHERE
        self.in_flight[where] = 0
        self.end[where] = 0
        self.open_ended[where] = False
        self.lane[where] = NOWHERE
        self.lane_worker[where] = NOWHERE

    def allocate_edges(self, count: int) -> int:
        """Return the first of `count` edge numbers."""
        first = self.edges.allocate(count)
        if self.edges.top > len(self.consumer):
            self.consumer = np.concatenate(
                (
                    self.consumer,
                    np.zeros(max(len(self.consumer), self.edges.top - len(self.consumer)), np.int64),
                )
            )
        return first
