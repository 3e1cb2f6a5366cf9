"""Numbers: of the nodes and subgraphs of admitted graphs, and the map from local numbers to node numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled
from batchmaker.core.arena import Arena
from batchmaker.core.layout import (
    END,
    EXTERNAL,
    HEAD,
    IN_FLIGHT,
    LANE,
    LANE_WORKER,
    NOWHERE,
    OPEN_ENDED,
    PIN,
    SIZE,
    SPAN,
    SUBGRAPH,
    SUBGRAPHS,
    TYPE,
)
from batchmaker.graph.cell_graph import CellGraph, NodeBlock
from batchmaker.graph.subgraphs import split


@dataclass(slots=True)
class Extent:
    """The numbers that one graph (or extension) has until its request ends.

    Local nodes `first_local` to `first_local + num_nodes - 1` are nodes from `base` on. Its subgraphs and edges are
    consecutive numbers, too.
    """

    first_local: int
    base: int
    num_nodes: int
    first_subgraph: int
    num_subgraphs: int
    first_edge: int = 0
    num_edges: int = 0


class SubgraphNumbers:
    """Numbers subgraphs and writes their fields in the arena. One per scheduler.

    node_by_node: every single node is a subgraph of its own.
    """

    def __init__(self, arena: Arena, *, node_by_node: bool = False) -> None:
        self._arena = arena
        self.node_by_node = node_by_node

    def assign(
        self, graphs: Sequence[CellGraph], nodes: Ints, bases: list[int], places: list[int]
    ) -> tuple[list[Extent], Ints]:
        """Number the subgraphs of all graphs and write their fields. Returns the extents and all subgraphs, in order.

        - nodes: node numbers of all graphs, one graph after the other.
        - bases: [graphs] first node number of each. places: [graphs] its first place in `nodes`.

        A plain graph is a list of segments. A segment is consecutive nodes that are one subgraph together, or one
        subgraph each. Other graphs are split along their edges.
        """
        arena = self._arena
        segments: list[tuple[int, ...]] = []
        num_subgraphs: list[int] = []
        split_by_edges: list[tuple[int, NDArray[np.int32]]] = []
        for i, graph in enumerate(graphs):
            shift = places[i] - graph.first
            if not graph.plain:
                of_nodes, count = split(graph, node_by_node=self.node_by_node)
                split_by_edges.append((i, of_nodes))
                num_subgraphs.append(count)
                continue
            count = 0
            for part in graph.parts:
                at = part.first + shift
                if isinstance(part, NodeBlock):
                    size, together = len(part.types), part.connected and not self.node_by_node
                    segments.append((at, size, together, int(part.types[0]), False, False))
                else:
                    size, together = part.length, True
                    segments.append((at, size, together, part.type_id, True, part.open_ended))
                count += 1 if together else size
            num_subgraphs.append(count)
        numbers = np.array(num_subgraphs)
        firsts = arena.allocate(SUBGRAPHS, numbers).tolist()
        extents = [
            Extent(graph.first, base, graph.num_nodes, first, count)
            for graph, base, first, count in zip(graphs, bases, firsts, num_subgraphs, strict=True)
        ]
        offsets = np.cumsum(numbers) - numbers
        subgraphs: Ints = np.repeat(np.array(firsts) - offsets, numbers) + np.arange(numbers.sum())
        _clear(subgraphs, arena.subgraphs)
        if segments:
            keep = np.ones(len(subgraphs), np.bool_)
            for i, _ in split_by_edges:
                keep[offsets[i] : offsets[i] + num_subgraphs[i]] = False
            _fill_segments(
                subgraphs if not split_by_edges else subgraphs[keep],
                nodes,
                np.array(segments, np.int64),
                arena.nodes,
                arena.subgraphs,
            )
        for i, numbers_of in split_by_edges:
            self._fill_split(graphs[i], numbers_of, firsts[i], bases[i])
        return extents, subgraphs

    def _fill_split(self, graph: CellGraph, numbers: NDArray[np.int32], first_subgraph: int, base: int) -> None:
        """Write the subgraphs of a graph that was split along its edges."""
        arena = self._arena
        if len(numbers) == 0:
            return
        _fill_members(numbers, first_subgraph, base, arena.subgraph, arena.head, arena.size, arena.span)
        for block in graph.blocks:
            _fill_types(block.first - graph.first + base, block.types, arena.subgraph, arena.type)
        for run in graph.runs:
            at = run.first - graph.first + base
            subgraph = arena.subgraph[at]
            arena.type[subgraph] = run.type_id
            arena.end[subgraph] = at + run.length
            arena.open_ended[subgraph] = run.open_ended


@compiled
def _clear(subgraphs: Ints, of_subgraphs: Ints) -> None:
    """Write the first values of subgraphs: not pinned, without a lane, no run."""
    for mine in subgraphs:
        for field in (EXTERNAL, IN_FLIGHT, END, OPEN_ENDED):
            of_subgraphs[field, mine] = 0
        for field in (PIN, LANE, LANE_WORKER):
            of_subgraphs[field, mine] = NOWHERE


@compiled
def _fill_segments(subgraphs: Ints, nodes: Ints, segments: Ints, of_nodes: Ints, of_subgraphs: Ints) -> None:
    """Write the subgraphs of segments. `subgraphs` has the order of the segments.

    - nodes: [places] node numbers.
    - segments: [segments, 6] place of the first node, number of nodes, 1 if they are one subgraph, type, 1 if they are
      a run, 1 if a value may end it.
    """
    num_filled = 0
    for k in range(len(segments)):
        start, count, together = segments[k, 0], segments[k, 1], segments[k, 2] > 0
        size = count if together else 1
        for at in range(start, start + count, size):
            mine, head = subgraphs[num_filled], nodes[at]
            of_subgraphs[TYPE, mine], of_subgraphs[HEAD, mine] = segments[k, 3], head
            of_subgraphs[SIZE, mine] = of_subgraphs[SPAN, mine] = size
            of_subgraphs[END, mine] = head + size if segments[k, 4] > 0 else 0
            of_subgraphs[OPEN_ENDED, mine] = segments[k, 5]
            for i in range(at, at + size):
                of_nodes[SUBGRAPH, nodes[i]] = mine
            num_filled += 1


@compiled
def _fill_members(
    numbers: NDArray[np.int32], first_subgraph: int, base: int, subgraph: Ints, head: Ints, size: Ints, span: Ints
) -> None:
    """Write the subgraph of each node, and head, size and span of each subgraph.

    numbers: [nodes of the graph] subgraph of each node. Numbers start at 0, in the order of first appearance.
    """
    num_seen = 0
    for i in range(len(numbers)):
        number = numbers[i]
        at = first_subgraph + number
        subgraph[base + i] = at
        if number == num_seen:
            head[at] = base + i
            size[at] = 0
            num_seen += 1
        size[at] += 1
        span[at] = base + i - head[at] + 1


@compiled
def _fill_types(first: int, types: NDArray[np.int16], subgraph: Ints, of_subgraph: Ints) -> None:
    """Write the types of subgraphs. types: [nodes] of the nodes from `first` on."""
    for i in range(len(types)):
        of_subgraph[subgraph[first + i]] = types[i]


@final
class LocalNumbers:
    """Maps the local numbers of a request to node numbers. Extents are added in the order of their local numbers.

    A look-up is a binary search over the extents. A function that waits has one extent for each wait.
    """

    __slots__ = ("_count", "_shifts", "_starts")

    def __init__(self) -> None:
        self._count = 0
        self._starts: Ints = np.zeros(4, np.int64)
        self._shifts: Ints = np.zeros(4, np.int64)

    def __len__(self) -> int:
        return self._count

    def add(self, extent: Extent) -> None:
        """Add the next extent."""
        if self._count == len(self._starts):
            self._starts = np.concatenate((self._starts, np.zeros_like(self._starts)))
            self._shifts = np.concatenate((self._shifts, np.zeros_like(self._shifts)))
        self._starts[self._count] = extent.first_local
        self._shifts[self._count] = extent.base - extent.first_local
        self._count += 1

    def of(self, local: Ints) -> Ints:
        """Return the node numbers of local nodes."""
        place = self._starts[: self._count].searchsorted(local, side="right") - 1
        located: Ints = local + self._shifts[place]
        return located

    def locals_of(self, nodes: Ints) -> Ints:
        """Return the local numbers of nodes, the inverse of `of`."""
        shifts = self._shifts[: self._count]
        starts = self._starts[: self._count]
        possible = nodes[:, None] - shifts  # [nodes, extents]
        ends = np.append(starts[1:], np.iinfo(np.int64).max)
        place = ((possible >= starts) & (possible < ends)).argmax(axis=1)
        located: Ints = possible[np.arange(len(nodes)), place]
        return located


class Locator:
    """Turns the local numbers of several graphs into node numbers.

    bases: [graphs] first node number of each. earlier: [graphs] the numbers before its own or None; may be empty.
    """

    __slots__ = ("_bases", "_earlier")

    def __init__(self, bases: Sequence[int], earlier: Sequence[LocalNumbers | None]) -> None:
        self._bases = bases
        self._earlier = earlier

    def shift(self, i: int, graph: CellGraph) -> int:
        """Return node number minus local number, for the own nodes of graph i."""
        return self._bases[i] - graph.first

    def of(self, i: int, graph: CellGraph, local: Ints) -> Ints:
        """Return the numbers of local nodes of graph i: its own, or those of earlier extents."""
        located: Ints = local + self.shift(i, graph)
        earlier = self._earlier[i] if self._earlier else None
        if earlier is not None and (before := local < graph.first).any():
            located[before] = earlier.of(local[before])
        return located

    def sources(self, i: int, graph: CellGraph, local: Ints) -> tuple[Ints, int]:
        """Return the sources of a block of graph i, and what to add to them to get node numbers.

        Negative sources are no nodes and stay negative.
        """
        if graph.first == 0:
            return local, self.shift(i, graph)
        return np.where(local < 0, local, self.of(i, graph, local)), 0
