"""Taking a cell graph into the arena: numbers for its nodes, edges between them, its subgraphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from batchmaker.graph.cell_graph import HOST, ZERO, CellGraph, NodeBlock, Run
from batchmaker.graph.spec import CellType
from batchmaker.graph.subgraphs import split
from batchmaker.scheduler.arena import DONE, Arena
from batchmaker.scheduler.commands import ZERO_TABLE, Reserve, TableId
from batchmaker.scheduler.rows import Tables

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Extent:
    """Numbers that one graph or extension owns until its request ends."""

    first_local: int
    base: int
    num_nodes: int
    first_subgraph: int
    num_subgraphs: int
    first_edge: int
    num_edges: int


@dataclass(slots=True)
class Admitted:
    """What admission found: the extent and the host tables that the driver fills."""

    extent: Extent
    host_tables: list[TableId] = field(default_factory=list)
    reserves: list[Reserve] = field(default_factory=list)
    waiting_sources: list[tuple[int, int]] = field(default_factory=list)  # (unfinished node, new consumer)


class Admission:
    """Writes graphs into the arena. One per scheduler."""

    def __init__(self, arena: Arena, tables: Tables) -> None:
        self._arena = arena
        self._tables = tables
        self._cells: list[CellType] = []
        self._value_tables: NDArray[np.int32] = np.zeros((0, 0), np.int32)

    def add_type(self, cell: CellType) -> int:
        """Learn a cell type and return the index of its row pool."""
        pool = self._tables.pool(cell)
        self._cells.append(cell)
        width = max(len(c.outputs) for c in self._cells)
        self._value_tables = np.zeros((len(self._cells), width), np.int32)
        for i, known in enumerate(self._cells):
            specs = self._tables.pools[self._tables.pool(known)].tables
            self._value_tables[i, : len(specs)] = [spec.table for spec in specs]
        self._arena.need_ports(len(cell.inputs))
        return pool

    def admit(self, graph: CellGraph, slot: int, earlier: list[Extent]) -> Admitted:
        """Take a graph (or an extension of one whose earlier extents are given) into the arena.

        Afterwards every node has its sources, uses, pending and fetch marks, and every subgraph its count of external
        inputs that are not done. Nothing is ready yet.
        """
        arena = self._arena
        base, grown = arena.allocate_nodes(graph.num_nodes)
        numbers, count = split(graph)
        first_subgraph = arena.allocate_subgraphs(count)
        span = slice(base, base + graph.num_nodes)
        arena.subgraph[span] = numbers + first_subgraph
        self._measure(numbers, count, first_subgraph, base)
        arena.request[span] = slot
        to_node = _Locator(graph, base, earlier)
        result = Admitted(Extent(graph.first, base, graph.num_nodes, first_subgraph, count, 0, 0))
        if grown:
            result.reserves.append(Reserve(self._tables.all_host(), arena.node_capacity))
        self._host_tables(graph, result)
        for block in graph.blocks:
            at = block.first - graph.first + base
            arena.type[arena.subgraph[at : at + block.count]] = block.types
        for run in graph.runs:
            subgraph = arena.subgraph[run.first - graph.first + base]
            arena.type[subgraph] = run.type_id
            arena.end[subgraph] = run.first - graph.first + base + run.length
            arena.open_ended[subgraph] = run.open_ended
        edges: list[tuple[Ids, Ids]] = []
        for block in graph.blocks:
            self._block_sources(block, to_node, edges)
        for run in graph.runs:
            self._run_sources(run, to_node, edges)
        first_edge, num_edges = self._edges(edges, base, graph.num_nodes, result)
        for fetch in graph.fetches:
            bit = np.uint16(1 << fetch.output)
            arena.fetch[to_node(fetch.nodes)] |= bit
        extent = result.extent
        result.extent = Extent(extent.first_local, base, graph.num_nodes, first_subgraph, count, first_edge, num_edges)
        return result

    def admit_chains(self, graphs: Sequence[CellGraph], slots: Sequence[int]) -> tuple[list[Admitted], Ids]:
        """Take many graphs that are lone chains at once: the same outcome as one by one, in array operations.

        Returns what `admit` returns for each, and their subgraphs.
        """
        arena = self._arena
        runs = [graph.runs[0] for graph in graphs]
        lengths = np.array([graph.num_nodes for graph in graphs])
        bases = np.array([arena.nodes.allocate(graph.num_nodes) for graph in graphs])
        subgraphs = np.array([arena.subgraphs.allocate(1) for _ in graphs])
        grown = arena.fit_nodes()
        arena.fit_subgraphs()
        nodes = np.repeat(bases - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
        arena.clear_nodes(nodes)
        arena.clear_subgraphs(subgraphs)
        arena.subgraph[nodes] = np.repeat(subgraphs, lengths)
        arena.request[nodes] = np.repeat(np.array(slots), lengths)
        arena.head[subgraphs] = bases
        arena.size[subgraphs] = lengths
        arena.end[subgraphs] = bases + lengths
        arena.type[subgraphs] = [run.type_id for run in runs]
        arena.open_ended[subgraphs] = [run.open_ended for run in runs]
        arena.source_table[:, bases] = ZERO_TABLE
        results = []
        fetched: list[Ids] = []
        bits: list[int] = []
        for graph, base, subgraph in zip(graphs, bases.tolist(), subgraphs.tolist(), strict=True):
            result = Admitted(Extent(0, base, graph.num_nodes, subgraph, 1, 0, 0))
            self._host_tables(graph, result)
            for fetch in graph.fetches:
                fetched.append(fetch.nodes + base)
                bits.append(1 << fetch.output)
            results.append(result)
        if fetched:
            marks = np.repeat(np.array(bits, np.uint16), [len(part) for part in fetched])
            np.bitwise_or.at(arena.fetch, np.concatenate(fetched), marks)
        if grown:
            results[0].reserves.insert(0, Reserve(self._tables.all_host(), arena.node_capacity))
        return results, subgraphs

    def release(self, extent: Extent) -> None:
        """Give back an extent's numbers."""
        self._arena.nodes.release(extent.base, extent.num_nodes)
        self._arena.subgraphs.release(extent.first_subgraph, extent.num_subgraphs)
        if extent.num_edges:
            self._arena.edges.release(extent.first_edge, extent.num_edges)

    def _measure(self, numbers: NDArray[np.int32], count: int, first_subgraph: int, base: int) -> None:
        arena = self._arena
        if count == 1:
            arena.head[first_subgraph] = base
            arena.size[first_subgraph] = len(numbers)
            return
        _, heads, sizes = np.unique(numbers, return_index=True, return_counts=True)
        arena.head[first_subgraph : first_subgraph + count] = heads + base
        arena.size[first_subgraph : first_subgraph + count] = sizes

    def _host_tables(self, graph: CellGraph, result: Admitted) -> None:
        arena = self._arena
        for host in graph.host_inputs:
            table, new = self._tables.host(self._cells[host.type_id], host.port)
            if new:
                result.reserves.append(Reserve((table,), arena.node_capacity))
            result.host_tables.append(table.table)
            at = host.first - graph.first + result.extent.base
            arena.source_table[host.port, at : at + host.count] = table.table

    def _block_sources(self, block: NodeBlock, to_node: _Locator, edges: list[tuple[Ids, Ids]]) -> None:
        arena = self._arena
        at = to_node.one(block.first)
        consumers = np.arange(at, at + block.count)
        for port in range(len(block.sources)):
            local = block.sources[port]
            from_node = local != HOST
            if not from_node.any():
                continue
            if from_node.all():
                consumer, outputs, sources = consumers, block.outputs[port], to_node(local)
            else:
                consumer, outputs = consumers[from_node], block.outputs[port][from_node]
                sources = to_node(local[from_node])
            arena.source[port, consumer] = sources
            arena.source_table[port, consumer] = self._value_tables[arena.type[arena.subgraph[sources]], outputs]
            edges.append((sources, consumer))

    def _run_sources(self, run: Run, to_node: _Locator, edges: list[tuple[Ids, Ids]]) -> None:
        arena = self._arena
        at = to_node.one(run.first)
        for port, column in enumerate(run.sequences):
            if column is None:
                continue
            sources = to_node(column[0])
            arena.source[port, at : at + run.length] = sources
            arena.source_table[port, at : at + run.length] = self._value_tables[
                arena.type[arena.subgraph[sources]], column[1]
            ]
            edges.append((sources, np.full(run.length, at)))
        for i, (local, output) in enumerate(run.init):
            port = len(run.sequences) + i
            if local == ZERO:
                arena.source_table[port, at] = ZERO_TABLE
            elif local != HOST:
                source = to_node.one(local)
                arena.source[port, at] = source
                arena.source_table[port, at] = self._value_tables[arena.type[arena.subgraph[source]], output]
                edges.append((np.array([source]), np.array([at])))

    def _edges(self, edges: list[tuple[Ids, Ids]], base: int, num_nodes: int, result: Admitted) -> tuple[int, int]:
        """Count uses and unmet inputs and store each node's consumers, grouped by the node.

        A run is done as a whole: an edge from any of its steps counts as one from its last step.
        """
        if not edges:
            return 0, 0
        arena = self._arena
        sources = np.concatenate([s for s, _ in edges])
        consumers = np.concatenate([c for _, c in edges])
        np.add.at(arena.uses, sources, 1)
        source_subgraph = arena.subgraph[sources]
        ends = arena.end[source_subgraph]
        producers = np.where(ends > 0, ends - 1, sources)
        unmet = arena.state[producers] != DONE
        internal = source_subgraph == arena.subgraph[consumers]
        np.add.at(arena.pending, consumers[unmet & internal], 1)
        np.add.at(arena.external, arena.subgraph[consumers[unmet & ~internal]], 1)
        mine = (producers >= base) & (producers < base + num_nodes)
        earlier = unmet & ~mine
        if earlier.any():
            result.waiting_sources = list(zip(producers[earlier].tolist(), consumers[earlier].tolist(), strict=True))
        producers, consumers = producers[mine], consumers[mine]
        if len(producers) == 0:
            return 0, 0
        order = np.argsort(producers, kind="stable")
        counts = np.bincount(producers - base, minlength=num_nodes)
        first = arena.allocate_edges(len(order))
        arena.consumer[first : first + len(order)] = consumers[order]
        arena.num_edges[base : base + num_nodes] = counts
        arena.first_edge[base : base + num_nodes] = first + np.cumsum(counts) - counts
        return first, len(order)


class _Locator:
    """Turns numbers local to a request into node numbers, across its extents."""

    __slots__ = ("_extents", "_first", "_shift")

    def __init__(self, graph: CellGraph, base: int, earlier: list[Extent]) -> None:
        self._first = graph.first
        self._shift = base - graph.first
        self._extents = earlier

    def one(self, local: int) -> int:
        """Return the node number of one local node."""
        if local >= self._first:
            return local + self._shift
        extent = next(e for e in self._extents if e.first_local <= local < e.first_local + e.num_nodes)
        return local - extent.first_local + extent.base

    def __call__(self, local: Ids) -> Ids:
        if len(local) == 0 or int(local.min()) >= self._first:
            return local + self._shift
        starts = np.array([e.first_local for e in self._extents] + [self._first])
        shifts = np.array([e.base - e.first_local for e in self._extents] + [self._shift])
        located: Ids = local + shifts[np.searchsorted(starts, local, side="right") - 1]
        return located
