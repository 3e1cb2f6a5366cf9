"""Admission: writes cell graphs into the arena. It numbers their nodes, and makes their edges and subgraphs.

`Scheduler` calls it for new requests and for extensions. Graphs that arrive together are admitted together. A
graph object that was admitted before is copied from what was noted then (`copies`). The arrays of the other graphs are
joined end to end, and compiled loops (`edges`) work on the joined arrays. So a graph costs a few microseconds, and each
of its nodes a fraction of one.

There are two numberings. A *place* is a position in the joined arrays. A node number is the position of the node in the
arena.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled, compiled_inline
from batchmaker.core.arena import Arena
from batchmaker.core.commands import ZERO_TABLE, Grow, Reserve, TableId
from batchmaker.core.copies import GraphCopies
from batchmaker.core.edges import count_edges, enter, feed, write_edges
from batchmaker.core.layout import (
    EDGES,
    END,
    EXTENT_FIELDS,
    EXTENTS,
    FIRST,
    FIRST_SUBGRAPH,
    LAST,
    LEFT,
    NEXT,
    NODES,
    NOWHERE,
    NUM_SUBGRAPHS,
    OPEN_ENDED,
    OWNS,
    PLACES,
    SIZE,
    STEP_SHIFT,
    TYPE,
)
from batchmaker.core.numbering import Extent, LocalNumbers, Locator, SubgraphNumbers
from batchmaker.core.rows import NoMemoryError, RowPool, Tables
from batchmaker.graph.cell_graph import HOST, ZERO, CellGraph, NodeBlock
from batchmaker.graph.spec import CellType


@dataclass(slots=True)
class Admitted:
    """The result of one call of `GraphAdmission.admit`. Lists have one entry per graph, unless stated otherwise.

    - extents: [EXTENT_FIELDS, graphs] the numbers of each graph.
    - host_tables: the tables that the driver fills, one per host input of the graph.
    - reserves: tables that must exist or grow; any number.
    - waiting_sources: (node of an earlier extent that is not done, new consumer); any number.
    - ready: arrays of the new subgraphs that wait for no other, in the order of the graphs; an array may be for several
      graphs.
    """

    extents: Ints
    host_tables: list[tuple[TableId, ...]] = field(default_factory=list)
    reserves: list[Reserve] = field(default_factory=list)
    waiting_sources: list[tuple[int, int]] = field(default_factory=list)
    ready: list[Ints] = field(default_factory=list)


@compiled_inline
def enter_extent(extents: Ints, requests: Ints, subgraphs: Ints, types: Ints, extent: int, slot: int) -> None:
    """Give a new extent, all of whose columns but NEXT are written, to a request: its units, and places in queues."""
    extents[NEXT, extent] = NOWHERE
    if requests[FIRST, slot] == NOWHERE:
        requests[FIRST, slot] = extent
    else:
        extents[NEXT, requests[LAST, slot]] = extent
    requests[LAST, slot] = extent
    first = extents[FIRST_SUBGRAPH, extent]
    for mine in range(first, first + extents[NUM_SUBGRAPHS, extent]):
        units = 1 if subgraphs[END, mine] > 0 else subgraphs[SIZE, mine]
        requests[LEFT, slot] += units
        requests[OWNS, slot] |= subgraphs[OPEN_ENDED, mine] > 0
        types[PLACES, subgraphs[TYPE, mine]] += units


@compiled
def enter_extents(
    columns: Ints, numbers: Ints, slots: Ints, extents: Ints, requests: Ints, subgraphs: Ints, types: Ints
) -> None:
    """Give new extents to their requests, in order.

    columns: [EXTENT_FIELDS, graphs]. numbers, slots: [graphs]. The others are the tables of the arena.
    """
    for i in range(len(numbers)):
        for column in range(EXTENT_FIELDS):
            extents[column, numbers[i]] = columns[column, i]
        enter_extent(extents, requests, subgraphs, types, numbers[i], slots[i])


class GraphAdmission:
    """Writes graphs into the arena. One per scheduler.

    - plan_rows: note the table of each input.
    - node_by_node: see CellPolicy. own_type_follows: see SchedulerState.
    """

    def __init__(
        self,
        arena: Arena,
        tables: Tables,
        *,
        plan_rows: bool = True,
        node_by_node: bool = False,
        own_type_follows: bool = False,
    ) -> None:
        self._arena = arena
        self._own_type_follows = own_type_follows
        self._tables = tables
        self._plan_rows = plan_rows
        self._cells: list[CellType] = []
        self._value_tables: Ints = np.zeros((0, 0), np.int64)
        self._numbers = SubgraphNumbers(arena, node_by_node=node_by_node)
        self._copies = GraphCopies(arena, keeps_sources=plan_rows)

    def elsewhere(self, arena: Arena) -> GraphAdmission:
        """Return an admission by the same rules into another arena, without cell types."""
        return GraphAdmission(
            arena,
            self._tables,
            plan_rows=self._plan_rows,
            node_by_node=self._numbers.node_by_node,
            own_type_follows=self._own_type_follows,
        )

    def add_type(self, cell: CellType) -> RowPool:
        """Add a cell type; return its row pool."""
        pool = self._tables.pool(cell)
        self._cells.append(cell)
        width = max(len(c.outputs) for c in self._cells)
        self._value_tables = np.zeros((len(self._cells), width), np.int64)
        for i, other in enumerate(self._cells):
            ids = self._tables.pool(other).table_ids
            self._value_tables[i, : len(ids)] = ids
        self._arena.add_type(cell, pool.number)
        return pool

    @property
    def copies(self) -> GraphCopies:
        """The graphs that are known."""
        return self._copies

    def make_room(self, graphs: Sequence[CellGraph], grow: Grow) -> list[Reserve]:
        """Make room for the nodes of graphs, before they are admitted.

        Returns how host tables must grow first. If there is no memory for that, NoMemoryError is raised, and nothing
        has changed.
        """
        if not self._plan_rows:
            return []
        arena, tables = self._arena, self._tables
        inputs = {(host.type_id, host.port): None for graph in graphs for host in graph.host_inputs}  # in this order
        new = [(self._cells[type_id], port) for type_id, port in inputs if not tables.knows_host(type_id, port)]
        capacity, counts = arena.node_capacity, np.array([graph.num_nodes for graph in graphs], np.int64)
        top = int(arena.counts[NODES] + 2 * counts.sum())  # at most
        if top > capacity:
            top = arena.top_after(NODES, counts)
        if top <= capacity and not new:
            return []
        specs = tuple([tables.host(cell, port)[0] for cell, port in new])
        for size in sorted({max(2 * capacity, top), top}, reverse=True) if top > capacity else [capacity]:
            command = Reserve(tables.all_host() if size > capacity else specs, size)
            if grow(command):
                if size > capacity:
                    arena.grow_nodes(size)
                return [command]
        for cell, port in new:
            tables.forget_host(cell, port)
        raise NoMemoryError(command)

    def admit(
        self,
        graphs: Sequence[CellGraph],
        slots: Sequence[int],
        earlier: Callable[[int], LocalNumbers | None] = lambda _: None,
    ) -> Admitted:
        """Write graphs into the arena, each with the slot of its request.

        earlier: for a graph, by its place in `graphs`, the numbers of the nodes before its own, or None. They may be
        unfinished only if there is a single graph. It is not called for a known graph.

        Afterwards every node has its sources, uses, pending and fetch bits; the request's sequence is a reader of those
        of these nodes that it keeps. Every subgraph has its count of external
        inputs that are not done. No node is in a queue yet. Numbers are given in the order of the graphs, whether
        they are known or new.
        """
        arena, count = self._arena, len(graphs)
        result = Admitted(np.zeros((EXTENT_FIELDS, count), np.int64))
        sizes = np.array([graph.num_nodes for graph in graphs], np.int64)
        capacity, at = arena.node_capacity, 0
        bases, of = arena.allocate(NODES, sizes), np.array(slots, np.int64)
        if arena.node_capacity > capacity and self._plan_rows:
            result.reserves.append(Reserve(self._tables.all_host(), arena.node_capacity))
        while at < count:
            begin = at
            forms = self._copies.forms_from(graphs, of, begin)
            if forms:
                at += len(forms)
                mine = slice(begin, at)
                result.ready.append(self._copies.write(forms, of[mine], bases[mine], result.extents[:, mine]))
                result.host_tables += [form.host_tables for form in forms]
                continue
            remember = self._is_shared(graphs[at])
            at += 1
            while not remember and at < count and not self._is_shared(graphs[at]):
                at += 1
            mine = slice(begin, at)
            if remember:
                self._copies.begin(int(bases[begin]), graphs[begin].num_nodes)
            before, num_waiting = [earlier(i) for i in range(begin, at)], len(result.waiting_sources)
            extents = self._take(graphs[mine], of[mine], before, bases[mine].tolist(), result)
            for i, extent in enumerate(extents, begin):
                result.extents[: EXTENT_FIELDS - 1, i] = (
                    extent.first_local,
                    extent.base,
                    extent.num_nodes,
                    extent.first_subgraph,
                    extent.num_subgraphs,
                    extent.first_edge,
                    extent.num_edges,
                )
            if remember and len(result.waiting_sources) == num_waiting:
                self._copies.remember(graphs[begin], extents[0], result.host_tables[-1], arena.is_host, before[0])
        enter_extents(
            result.extents,
            arena.allocate(EXTENTS, np.ones(count, np.int64)),
            of,
            arena.extents,
            arena.requests,
            arena.subgraphs,
            arena.types,
        )
        arena.fit_queues()
        return result

    def _is_shared(self, graph: CellGraph) -> bool:
        """Whether the same graph object may come again. In simulations (no plan_rows) all that begin requests may."""
        return graph.shared or not (self._plan_rows or graph.first)

    def _take(
        self,
        graphs: Sequence[CellGraph],
        slots: Ints,
        earlier: Sequence[LocalNumbers | None],
        bases: list[int],
        result: Admitted,
    ) -> list[Extent]:
        """Write graphs that are not known; return their extents. bases: the first numbers of their nodes."""
        arena = self._arena
        lengths = np.array([graph.num_nodes for graph in graphs])
        places = np.cumsum(lengths) - lengths
        nodes = np.repeat(np.array(bases) - places, lengths) + np.arange(lengths.sum())
        enter(nodes, lengths, slots, arena.nodes)
        extents, subgraphs = self._numbers.assign(graphs, nodes, bases, places.tolist())
        to_node = Locator(bases, earlier if any(earlier) else ())
        for graph, base in zip(graphs, bases, strict=True):
            tables = self._host_tables(graph, base - graph.first, result.reserves) if self._plan_rows else ()
            result.host_tables.append(tables)
        edges: list[Ints] = []
        self._block_sources(graphs, to_node, edges)
        self._run_sources(graphs, to_node, edges)
        own = self._memory_sources(graphs, to_node, edges)
        if edges:
            self._edges(edges, nodes, lengths, extents, result)
        for steps in own:  # until the run has ended
            arena.uses[steps] += 1
        for graph, base in zip(graphs, bases, strict=True):
            if graph.kept_nodes is not None:
                arena.uses[graph.kept_nodes[graph.kept_nodes >= graph.first] + base - graph.first] += 1
        if self._plan_rows:
            self._fetches(graphs, to_node)
        result.ready.append(subgraphs[arena.external[subgraphs] == 0])
        return extents

    # --- sources -----------------------------------------------------------------------------------------------

    def _host_tables(self, graph: CellGraph, shift: int, reserves: list[Reserve]) -> tuple[TableId, ...]:
        """Note the tables of a graph's host inputs and return them. shift: node number minus local number."""
        arena = self._arena
        tables = []
        for host in graph.host_inputs:
            table, new = self._tables.host(self._cells[host.type_id], host.port)
            if new:
                reserves.append(Reserve((table,), arena.node_capacity))
            tables.append(table.table)
            arena.source_table[host.port, host.rows(shift)] = table.table
        return tuple(tables)

    def _tables_of(self, sources: Ints, outputs: int) -> Ints:
        """Return the value table of output `outputs` of each source node: [sources]."""
        tables: Ints = self._value_tables[self._arena.type[self._arena.subgraph[sources]], outputs]
        return tables

    def _block_sources(self, graphs: Sequence[CellGraph], to_node: Locator, edges: list[Ints]) -> None:
        """Write the sources of all blocks and add their edges; blocks with equally many inputs together."""
        arena = self._arena
        groups: dict[int, list[tuple[int, NodeBlock]]] = {}
        for i, graph in enumerate(graphs):
            for block in graph.blocks:
                if _reads_nodes(block.sources):
                    groups.setdefault(len(block.sources), []).append((i, block))
        for num_ports, members in groups.items():
            counts = np.array([len(block.types) for _, block in members])
            begins = np.array([to_node.shift(i, graphs[i]) + block.first for i, block in members])
            readers = np.repeat(begins - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
            read = [to_node.sources(i, graphs[i], block.sources) for i, block in members]
            outputs = [block.outputs for _, block in members]
            fed = np.zeros((len(self._cells), num_ports), np.bool_)
            edges.append(
                feed(
                    np.ascontiguousarray(np.concatenate([local for local, _ in read], axis=1)),
                    np.repeat(np.array([shift for _, shift in read]), counts),
                    np.ascontiguousarray(np.concatenate(outputs, axis=1)),
                    readers,
                    self._value_tables,
                    fed,
                    arena.nodes,
                    arena.subgraphs,
                    arena.source,
                    arena.source_table,
                )
            )
            if self._plan_rows:
                arena.note_ports(fed)

    def _note_value_port(self, type_id: int, port: int) -> None:
        if self._plan_rows:
            self._arena.note_port(type_id, port)

    def _run_sources(self, graphs: Sequence[CellGraph], to_node: Locator, edges: list[Ints]) -> None:
        """Write the sources of all runs and add their edges."""
        arena = self._arena
        zeros: list[tuple[int, int]] = []
        for i, graph in enumerate(graphs):
            for run in graph.runs:
                at = to_node.shift(i, graph) + run.first
                for port, column in enumerate(run.sequences):
                    if column is None:
                        continue
                    sources = to_node.of(i, graph, column[0])
                    arena.source[port, at : at + run.length] = sources
                    arena.source_table[port, at : at + run.length] = self._tables_of(sources, column[1])
                    edges.append(np.stack((sources, np.full(run.length, at))))
                    self._note_value_port(run.type_id, port)
                for k, (local, output) in enumerate(run.init):
                    port = len(run.sequences) + k
                    if local == ZERO:
                        zeros.append((port, at))
                    elif local != HOST:
                        sources = to_node.of(i, graph, np.array([local]))
                        arena.source[port, at] = sources[0]
                        arena.source_table[port, at] = self._tables_of(sources, output)[0]
                        edges.append(np.stack((sources, np.array([at]))))
                        self._note_value_port(run.type_id, port)
        if zeros:
            ports, heads = np.array(zeros).T
            arena.source_table[ports, heads] = ZERO_TABLE

    def _memory_sources(self, graphs: Sequence[CellGraph], to_node: Locator, edges: list[Ints]) -> list[slice]:
        """Write where the memories of all nodes are, and add their edges. Returns the steps that their own run reads.

        A run waits for its memories at its first step, and reads them until its last.
        """
        arena, own = self._arena, list[slice]()
        for i, graph in enumerate(graphs):
            for read in graph.memories:
                at = to_node.shift(i, graph) + read.first
                readers, lengths = slice(at, at + read.count), np.full(read.count, read.length)
                table, first = int(ZERO_TABLE), at
                if read.own:
                    own.append(readers)
                    lengths = np.arange(read.count)
                    table = int(self._tables_of(np.array([at]), read.output)[0])
                elif read.length:
                    sources = to_node.of(i, graph, read.sources)
                    waiting = np.arange(at, at + (1 if read.is_run else read.count))
                    edges.append(np.stack((np.tile(sources, len(waiting)), np.repeat(waiting, len(sources)))))
                    table, first = int(self._tables_of(sources[:1], read.output)[0]), int(sources[0])
                if self._plan_rows:
                    arena.source[read.port, readers] = first
                    arena.source_table[read.port, readers] = table
                    arena.reach[read.port, readers] = lengths + (read.step << STEP_SHIFT)
        return own

    def _fetches(self, graphs: Sequence[CellGraph], to_node: Locator) -> None:
        """Set the fetch bits of the nodes whose outputs go to the host."""
        fetches = [(i, graph, fetch) for i, graph in enumerate(graphs) for fetch in graph.fetches]
        if fetches:
            nodes = np.concatenate([to_node.of(i, graph, fetch.nodes) for i, graph, fetch in fetches])
            bits = np.array([1 << fetch.output for _, _, fetch in fetches])
            np.bitwise_or.at(self._arena.fetch, nodes, np.repeat(bits, [len(fetch.nodes) for _, _, fetch in fetches]))

    def _edges(self, parts: list[Ints], nodes: Ints, lengths: Ints, extents: list[Extent], result: Admitted) -> None:
        """Count uses and unmet inputs, and store the consumers of each node."""
        arena = self._arena
        if len(arena.place) < arena.node_capacity:
            arena.place = np.full(arena.node_capacity, -1, np.int64)
        edges = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        producers, per_graph, waiting = count_edges(
            edges, nodes, lengths, arena.place, arena.nodes, arena.subgraphs, self._own_type_follows
        )
        result.waiting_sources += zip(*waiting.tolist(), strict=True)
        firsts = arena.allocate(EDGES, per_graph)
        for extent, first, num_edges in zip(extents, firsts.tolist(), per_graph.tolist(), strict=True):
            extent.first_edge, extent.num_edges = first, num_edges
        write_edges(edges, producers, firsts, nodes, lengths, arena.nodes, arena.consumer)


@compiled
def _reads_nodes(sources: Ints) -> bool:
    """Whether any of the sources [inputs, nodes] is a node."""
    for port in range(sources.shape[0]):
        for i in range(sources.shape[1]):
            if sources[port, i] >= 0:
                return True
    return False
