"""Numbers for the nodes and subgraphs of graphs that are admitted together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled
from batchmaker.graph.cell_graph import CellGraph, NodeBlock
from batchmaker.graph.subgraphs import split
from batchmaker.scheduler.arena import Arena

Ids = NDArray[np.int64]


@dataclass(slots=True)
class Extent:
    """Numbers that one graph or extension owns until its request ends."""

    first_local: int
    base: int
    num_nodes: int
    first_subgraph: int
    num_subgraphs: int
    first_edge: int = 0
    num_edges: int = 0


class SubgraphNumbers:
    """Numbers subgraphs and fills in what is known of them. One per scheduler.

    node_by_node: every single node is a subgraph of its own.
    """

    def __init__(self, arena: Arena, *, node_by_node: bool = False) -> None:
        self._arena = arena
        self._node_by_node = node_by_node

    def assign(
        self, graphs: Sequence[CellGraph], nodes: Ids, bases: list[int], places: list[int]
    ) -> tuple[list[Extent], Ids]:
        """Number the subgraphs of all graphs and fill in what is known of them.

        A graph is a list of segments: consecutive nodes that are one subgraph together, or one each.
        """
        arena = self._arena
        starts: list[int] = []  # place of each segment
        counts: list[int] = []
        together: list[bool] = []
        types: list[int] = []
        is_run: list[bool] = []
        open_ended: list[bool] = []
        num_subgraphs: list[int] = []
        split_by_edges: list[tuple[int, NDArray[np.int32]]] = []
        for i, graph in enumerate(graphs):
            shift = places[i] - graph.first
            if not graph.plain:
                numbers, count = split(graph, node_by_node=self._node_by_node)
                split_by_edges.append((i, numbers))
                num_subgraphs.append(count)
                continue
            count = 0
            for part in graph.parts:
                starts.append(part.first + shift)
                if isinstance(part, NodeBlock):
                    counts.append(part.count)
                    together.append(part.connected and not self._node_by_node)
                    types.append(int(part.types[0]))
                    is_run.append(False)
                    open_ended.append(False)
                else:
                    counts.append(part.length)
                    together.append(True)
                    types.append(part.type_id)
                    is_run.append(True)
                    open_ended.append(part.open_ended)
                count += 1 if together[-1] else counts[-1]
            num_subgraphs.append(count)
        firsts = [arena.subgraphs.allocate(count) for count in num_subgraphs]
        arena.fit_subgraphs()
        extents = [
            Extent(graph.first, base, graph.num_nodes, first, count)
            for graph, base, first, count in zip(graphs, bases, firsts, num_subgraphs, strict=True)
        ]
        numbers = np.array(num_subgraphs)
        offsets = np.cumsum(numbers) - numbers
        subgraphs: Ids = np.repeat(np.array(firsts) - offsets, numbers) + np.arange(numbers.sum())
        arena.clear_subgraphs(subgraphs)
        if starts:
            keep = np.ones(len(subgraphs), np.bool_)
            for i, _ in split_by_edges:
                keep[offsets[i] : offsets[i] + num_subgraphs[i]] = False
            self._fill_segments(
                subgraphs if not split_by_edges else subgraphs[keep], nodes, np.array(starts), np.array(counts),
                np.array(together), np.array(types), np.array(is_run), np.array(open_ended),
            )  # fmt: skip
        for i, by_edges in split_by_edges:
            self._fill_split(graphs[i], by_edges, firsts[i], bases[i])
        return extents, subgraphs

    def _fill_segments(
        self,
        subgraphs: Ids,
        nodes: Ids,
        starts: Ids,
        counts: Ids,
        together: NDArray[np.bool_],
        types: Ids,
        is_run: NDArray[np.bool_],
        open_ended: NDArray[np.bool_],
    ) -> None:
        """Fill in the subgraphs of segments, which stand in the same order as the subgraphs."""
        arena = self._arena
        per_segment = np.where(together, 1, counts)
        first = np.cumsum(per_segment) - per_segment
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        members = nodes[np.repeat(starts, counts) + within]
        arena.subgraph[members] = subgraphs[np.repeat(first, counts) + np.where(np.repeat(together, counts), 0, within)]
        segment = np.repeat(np.arange(len(starts)), per_segment)
        step = np.arange(len(subgraphs)) - first[segment]
        size = np.where(together, counts, 1)[segment]
        arena.head[subgraphs] = nodes[starts[segment] + step]
        arena.size[subgraphs] = size
        arena.span[subgraphs] = size
        arena.type[subgraphs] = types[segment]
        arena.end[subgraphs] = np.where(is_run[segment], nodes[starts[segment]] + size, 0)
        arena.open_ended[subgraphs] = open_ended[segment]

    def _fill_split(self, graph: CellGraph, numbers: NDArray[np.int32], first_subgraph: int, base: int) -> None:
        """Fill in the subgraphs of a graph that was split along its edges."""
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
def _fill_members(
    numbers: NDArray[np.int32], first_subgraph: int, base: int, subgraph: Ids, head: Ids, size: Ids, span: Ids
) -> None:
    """Write who is in which subgraph. numbers: [nodes] subgraph of each of a graph's nodes, from 0 on, as they come."""
    known = 0
    for i in range(len(numbers)):
        number = numbers[i]
        at = first_subgraph + number
        subgraph[base + i] = at
        if number == known:
            head[at] = base + i
            size[at] = 0
            known += 1
        size[at] += 1
        span[at] = base + i - head[at] + 1


@compiled
def _fill_types(first: int, types: NDArray[np.int16], subgraph: Ids, of_subgraph: Ids) -> None:
    """Write the types of subgraphs. types: of the nodes from `first` on."""
    for i in range(len(types)):
        of_subgraph[subgraph[first + i]] = types[i]


@final
class LocalNumbers:
    """From a request's own numbers to node numbers. Extents are added in the order of their local numbers.

    A look-up takes the logarithm of the number of extents, of which a function that waits has one for each wait.
    """

    __slots__ = ("_count", "_shifts", "_starts")

    def __init__(self) -> None:
        self._count = 0
        self._starts: Ids = np.zeros(4, np.int64)
        self._shifts: Ids = np.zeros(4, np.int64)

    def __len__(self) -> int:
        return self._count

    def add(self, extent: Extent) -> None:
        """Take the next extent."""
        if self._count == len(self._starts):
            self._starts = np.concatenate((self._starts, np.zeros_like(self._starts)))
            self._shifts = np.concatenate((self._shifts, np.zeros_like(self._shifts)))
        self._starts[self._count] = extent.first_local
        self._shifts[self._count] = extent.base - extent.first_local
        self._count += 1

    def of(self, local: Ids) -> Ids:
        """Return the numbers of these nodes."""
        place = self._starts[: self._count].searchsorted(local, side="right") - 1
        located: Ids = local + self._shifts[place]
        return located


class Locator:
    """Turns numbers local to a request into node numbers. earlier: per graph, the numbers before its own, if any."""

    __slots__ = ("_earlier", "_nodes", "_places")

    def __init__(self, nodes: Ids, places: list[int], earlier: Sequence[LocalNumbers | None]) -> None:
        self._nodes = nodes
        self._places = np.array(places)
        self._earlier = earlier

    def one(self, i: int, graph: CellGraph, local: int) -> int:
        """Return the number of a node of graph i itself."""
        return int(self._nodes[self._places[i] + local - graph.first])

    def of(self, i: int, graph: CellGraph, local: Ids) -> Ids:
        """Return the numbers of nodes of graph i or of the earlier extents that it extends."""
        if graph.first == 0:
            located: Ids = self._nodes[self._places[i] + local]
            return located
        return self._extended(i, local, graph.first)

    def many(self, local: Ids, owners: Ids, firsts: Ids) -> Ids:
        """Return the numbers of nodes of several graphs: `owners` says whose, `firsts` where that graph begins."""
        if not self._earlier:
            located: Ids = self._nodes[self._places[owners] + local - firsts]
            return located
        located = np.empty_like(local)
        for i in np.unique(owners).tolist():
            mine = owners == i
            located[mine] = self._extended(i, local[mine], int(firsts[mine][0]))
        return located

    def _extended(self, i: int, local: Ids, first: int) -> Ids:
        earlier = self._earlier[i]
        own = int(self._nodes[self._places[i]]) if self._places[i] < len(self._nodes) else 0
        located: Ids = local + (own - first)
        before = local < first
        if earlier is not None and before.any():
            located[before] = earlier.of(local[before])
        return located
