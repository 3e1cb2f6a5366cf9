"""Admission of a graph object that was admitted before: what was written then is written again, at new numbers.

Requests whose unfold functions look at no value share one graph, and simulations use a few graphs again and again. All
known graphs that arrive together are written in one compiled call. `GraphAdmission` uses this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled, compiled_inline, compiled_merged, compiled_within
from batchmaker.core.addresses import State, addresses_of, row_at, state_at, table_at
from batchmaker.core.arena import Arena
from batchmaker.core.commands import ZERO_TABLE, TableId
from batchmaker.core.events import RequestArrived
from batchmaker.core.layout import (
    BASE,
    DONE,
    EDGES,
    END,
    EXTENT_FIRST_EDGE,
    EXTENT_NUM_EDGES,
    EXTERNAL,
    FETCH,
    FIRST,
    FIRST_EDGE,
    FIRST_LOCAL,
    FIRST_SUBGRAPH,
    FIRST_TABLE,
    HEAD,
    HELD,
    IN_FLIGHT,
    LANE,
    LANE_WORKER,
    NEXT,
    NOWHERE,
    NUM_EDGES,
    NUM_NODES,
    NUM_SUBGRAPHS,
    OPEN_ENDED,
    PENDING,
    PIN,
    POOL,
    REQUEST,
    ROW,
    SIZE,
    SPAN,
    STATE,
    STORED,
    SUBGRAPH,
    SUBGRAPHS,
    TYPE,
    USES,
    WAITING,
)
from batchmaker.core.numbering import Extent, LocalNumbers
from batchmaker.graph.cell_graph import CellGraph

MAX_FORMS: Final = 8192
MAX_NODES: Final = 1 << 19
"""The most graphs that are remembered, and the most nodes of them all. At either limit all graphs are forgotten."""

_NO_SOURCE: Final = np.iinfo(np.int64).min
_UNSET: Final = -1

# Rows of the tables of nodes, of subgraphs and of sources; and of `where`, the numbers for one copy of a graph.
_SUBGRAPH, _PENDING, _USES, _FETCH, _NUM_EDGES, _FIRST_EDGE = range(6)
FORM_TYPE, _HEAD, FORM_SIZE, _SPAN, _EXTERNAL, FORM_END, _OPEN = range(7)
_PORT, _NODE, _SOURCE, _TABLE, _REACH = range(5)
FORM, SLOT, FORM_BASE, SUBGRAPHS_FROM, EDGES_FROM, COPY_FIELDS = range(6)
_COUNTS: Final = (FIRST_LOCAL, NUM_NODES, NUM_SUBGRAPHS, EXTENT_NUM_EDGES)  # of an extent, alike in all copies


class Forms(NamedTuple):
    """The tables of remembered graphs, for compiled loops. Form i has the columns of a table from begins[i] to before
    begins[i + 1]; `counts` has one for each form: FIRST_LOCAL, NUM_NODES, NUM_SUBGRAPHS and EXTENT_NUM_EDGES."""

    counts: Ints
    counts_begins: Ints
    nodes: Ints
    nodes_begins: Ints
    subgraphs: Ints
    subgraphs_begins: Ints
    edges: Ints
    edges_begins: Ints
    sources: Ints
    sources_begins: Ints
    ready: Ints
    ready_begins: Ints
    reads: Ints
    reads_begins: Ints


@compiled_merged
def forms_at(a: Ints) -> Forms:
    """Return the tables at these addresses; see `addresses_of`."""
    return Forms(
        table_at(a, 0),
        row_at(a, 1),
        table_at(a, 2),
        row_at(a, 3),
        table_at(a, 4),
        row_at(a, 5),
        table_at(a, 6),
        row_at(a, 7),
        table_at(a, 8),
        row_at(a, 9),
        table_at(a, 10),
        row_at(a, 11),
        table_at(a, 12),
        row_at(a, 13),
    )


@final
class _CopyTable:
    """A table to which columns are only added. Form i has the columns from `begins[i]` to before `begins[i + 1]`."""

    __slots__ = ("begins", "columns", "count")

    def __init__(self, num_rows: int) -> None:
        self.columns: Ints = np.zeros((num_rows, 256), np.int64)
        self.begins: Ints = np.zeros(64, np.int64)
        self.count = 0

    def add(self, form: int, added: Ints) -> None:
        """Add the columns of the next form."""
        end = self.count + added.shape[1]
        if end > self.columns.shape[1]:
            grown = np.zeros((len(self.columns), max(2 * self.columns.shape[1], end)), np.int64)
            grown[:, : self.count] = self.columns[:, : self.count]
            self.columns = grown
        self.columns[:, self.count : end] = added
        self.count = end
        if form + 1 >= len(self.begins):
            self.begins = np.concatenate((self.begins, np.zeros_like(self.begins)))
        self.begins[form + 1] = end


@final
@dataclass(frozen=True, slots=True)
class GraphForm:
    """A remembered graph. It is found by its identity, so it is kept alive here.

    - number: index of the form in the tables.
    - host_tables: see Admit.
    - reads_kept: whether the graph reads earlier nodes: those of the request's graphs before this one, and stored ones.
      Their local numbers and cell types are in the table `reads`.
    - fetches_earlier: whether outputs of such nodes go to the host.
    """

    number: int
    graph: CellGraph
    host_tables: tuple[TableId, ...]
    reads_kept: bool
    fetches_earlier: bool


@final
class GraphCopies:
    """Remembers graphs as they were first admitted. One per scheduler.

    keeps_sources: copies say where their inputs are computed. max_forms, max_nodes: see MAX_FORMS.
    """

    def __init__(self, arena: Arena, *, keeps_sources: bool) -> None:
        self._arena, self._keeps_sources = arena, keeps_sources
        self.max_forms, self.max_nodes = MAX_FORMS, MAX_NODES
        self._forget()

    def _forget(self) -> None:
        self._forms: dict[int, GraphForm] = {}
        self._counts = _CopyTable(len(_COUNTS))
        self._nodes = _CopyTable(6)
        self._subgraphs = _CopyTable(7)
        self._edges = _CopyTable(1)
        self._sources = _CopyTable(5)
        self._ready = _CopyTable(1)
        self._reads = _CopyTable(2)
        self._addresses: Ints | None = None

    @property
    def tables(self) -> Ints:
        """The addresses of all tables; see `forms_at`. Ask again after a graph was remembered."""
        if self._addresses is None:
            tables = (self._counts, self._nodes, self._subgraphs, self._edges, self._sources, self._ready, self._reads)
            self._addresses = addresses_of([array for table in tables for array in (table.columns, table.begins)])
        return self._addresses

    def forms_of(self, events: Sequence[RequestArrived]) -> list[GraphForm] | None:
        """Return the forms of these requests' graphs.

        None if one is not known or empty, if it may get more nodes, or if it fetches what its sequence has kept.
        """
        forms, matches = self._forms, list[GraphForm]()
        for event in events:
            form = forms.get(id(event.graph))
            if form is None or form.fetches_earlier or not event.graph.num_nodes or event.open:
                return None
            matches.append(form)
        return matches

    def number_of(self, graph: CellGraph) -> int:
        """Return the number of a known graph's form."""
        return self._forms[id(graph)].number

    def counts_of(self, form: int) -> list[int]:
        """Return, of a form, its first local number, and its numbers of nodes, subgraphs and edges."""
        counts: list[int] = self._counts.columns[:, form].tolist()
        return counts

    def forms_from(self, graphs: Sequence[CellGraph], slots: Ints, begin: int) -> list[GraphForm]:
        """Return the forms of the graphs from `begin` on, up to the first that must be admitted as a new one.

        The stored nodes of the request's sequence and its own earlier nodes must have the types that the form expects,
        and be done.
        """
        forms, matches = self._forms, list[GraphForm]()
        for graph in graphs[begin:]:
            form = forms.get(id(graph))
            if form is None:
                break
            matches.append(form)
        if any(form.reads_kept for form in matches):
            numbers = np.array([form.number for form in matches], np.int64)
            count = num_fitting(self._arena.tables, self.tables, numbers, slots[begin : begin + len(matches)])
            matches = matches[:count]
        return matches

    def begin(self, base: int, count: int) -> None:
        """Prepare to remember a graph: mark the inputs of its nodes as not written."""
        self._arena.source_table[:, base : base + count] = _UNSET

    def remember(
        self,
        graph: CellGraph,
        extent: Extent,
        host_tables: tuple[TableId, ...],
        is_host: NDArray[np.bool_],
        earlier: LocalNumbers | None,
    ) -> None:
        """Note what admission has just written for a graph. Nothing else may have been admitted since `begin`.

        None of its subgraphs may have been released yet. is_host: [tables]. earlier: the numbers of the nodes before
        its own, all of which are done.
        """
        if self._counts.count >= self.max_forms or self._nodes.count + graph.num_nodes > self.max_nodes:
            self._forget()
        self._addresses = None
        arena, number = self._arena, self._counts.count  # a graph may have been remembered before, with other types
        nodes = slice(extent.base, extent.base + extent.num_nodes)
        subgraphs = slice(extent.first_subgraph, extent.first_subgraph + extent.num_subgraphs)
        edges = slice(extent.first_edge, extent.first_edge + extent.num_edges)
        end, external = arena.end[subgraphs], arena.external[subgraphs]
        self._counts.add(
            number,
            np.array([[extent.first_local, extent.num_nodes, extent.num_subgraphs, extent.num_edges]], np.int64).T,
        )
        self._nodes.add(
            number,
            np.array(
                [
                    arena.subgraph[nodes] - extent.first_subgraph,
                    arena.pending[nodes],
                    arena.uses[nodes],
                    arena.fetch[nodes],
                    arena.num_edges[nodes],
                    arena.first_edge[nodes] - extent.first_edge,
                ]
            ),
        )
        self._subgraphs.add(
            number,
            np.array(
                [
                    arena.type[subgraphs],
                    arena.head[subgraphs] - extent.base,
                    arena.size[subgraphs],
                    arena.span[subgraphs],
                    external,
                    np.where(end > 0, end - extent.base, 0),
                    arena.open_ended[subgraphs],
                ],
                np.int64,
            ),
        )
        self._edges.add(number, arena.consumer[None, edges] - extent.base)
        self._ready.add(number, np.flatnonzero(external == 0)[None])
        sources, reads = self._known_sources(extent, is_host, earlier)
        self._sources.add(number, sources if self._keeps_sources or reads.size else sources[:, :0])
        self._reads.add(number, reads)
        self._forms[id(graph)] = GraphForm(
            number, graph, host_tables, bool(reads.size), graph.first > 0 and graph.fetches_earlier
        )

    def _known_sources(
        self, extent: Extent, is_host: NDArray[np.bool_], earlier: LocalNumbers | None
    ) -> tuple[Ints, Ints]:
        """Return the inputs that were written, and the earlier nodes among their sources with their types: [2, nodes].

        The inputs are [5, inputs]: port, node, source, table, reach. Nodes count from the graph's first node. An
        earlier node, with local number i, is source -(i+1). The source is _NO_SOURCE if no node computes the input.
        """
        arena = self._arena
        nodes = slice(extent.base, extent.base + extent.num_nodes)
        port, node = np.nonzero(arena.source_table[:, nodes] != _UNSET)
        table, source = arena.source_table[:, nodes][port, node], arena.source[:, nodes][port, node]
        is_own = (source >= extent.base) & (source < extent.base + extent.num_nodes)
        is_value = ~((table == ZERO_TABLE) | is_host[np.where(table < 0, 0, table)])
        is_earlier, local = is_value & ~is_own, source - extent.base
        distinct, reads = np.unique(source[is_earlier]), np.empty(0, np.int64)
        if len(distinct):
            assert earlier is not None
            reads, local[is_earlier] = earlier.locals_of(distinct), -1 - earlier.locals_of(source[is_earlier])
        types = arena.type[arena.subgraph[distinct]]
        reach, has_reach = np.zeros(len(port), np.int64), port < len(arena.reach)
        reach[has_reach] = arena.reach[:, nodes][port[has_reach], node[has_reach]]
        return np.array([port, node, np.where(is_value, local, _NO_SOURCE), table, reach]), np.stack((reads, types))

    def write(self, forms: Sequence[GraphForm], slots: Ints, bases: Ints, columns: Ints) -> Ints:
        """Write known graphs, each with the slot of its request and the first number of its nodes.

        Afterwards the arena is as after their first admission, but for the numbers, and `columns` [EXTENT_FIELDS,
        graphs] has their extents. Returns the subgraphs that wait for no other.
        """
        arena, numbers = self._arena, np.array([form.number for form in forms], np.int64)
        columns[_COUNTS, :] = self._counts.columns[:, numbers]
        for kind, first, count in (
            (SUBGRAPHS, FIRST_SUBGRAPH, NUM_SUBGRAPHS),
            (EDGES, EXTENT_FIRST_EDGE, EXTENT_NUM_EDGES),
        ):
            columns[first] = arena.allocate(kind, columns[count])
        columns[BASE] = bases
        where = np.stack((numbers, slots, bases, columns[FIRST_SUBGRAPH], columns[EXTENT_FIRST_EDGE]))
        return _write(arena.tables, self.tables, where)


@compiled_within
def earlier_node(state: State, slot: int, local: int) -> int:
    """Return the number of a local node of a request: its own, or a stored node of its sequence.

    Own local numbers begin with those of the first extent. What values have decided has extents that count from 0.
    """
    extent = state.requests[FIRST, slot]
    if extent != NOWHERE and local < state.extents[FIRST_LOCAL, extent]:
        return int(state.requests[STORED, slot] + local)
    while extent != NOWHERE:
        place = local - state.extents[FIRST_LOCAL, extent]
        if 0 <= place < state.extents[NUM_NODES, extent]:
            return int(state.extents[BASE, extent] + place)
        extent = state.extents[NEXT, extent]
    return int(state.requests[STORED, slot] + local)


@compiled
def earlier_nodes(addresses: Ints, places: Ints) -> Ints:
    """Return node numbers. places: [2 or more, nodes] slot, and local node."""
    state, numbers = state_at(addresses), np.empty(places.shape[1], np.int64)
    for i in range(places.shape[1]):
        numbers[i] = earlier_node(state, places[0, i], places[1, i])
    return numbers


@compiled
def fetch_late(addresses: Ints, places: Ints) -> Ints:
    """Let outputs of earlier nodes go to the host. places: [3, outputs] as in `earlier_nodes`, and the output.

    Returns [4, outputs] of each: its node; if that is done, its table and its row; and if that is on a worker, the node
    whose end it waits for. NOWHERE for what it does not have. Otherwise its step will fetch it.
    """
    state, answers = state_at(addresses), np.full((4, places.shape[1]), NOWHERE)
    for i in range(places.shape[1]):
        node = earlier_node(state, places[0, i], places[1, i])
        subgraph = state.nodes[SUBGRAPH, node]
        end = state.subgraphs[END, subgraph]
        tail = end - 1 if end > 0 else node
        answers[0, i], row = node, state.nodes[ROW, node]
        state.nodes[FETCH, node] |= 1 << places[2, i]
        if state.nodes[STATE, tail] == DONE:  # without a row if the run ended before this step
            pool = state.types[POOL, state.subgraphs[TYPE, subgraph]]
            answers[1, i], answers[2, i] = state.pools[FIRST_TABLE, pool] + places[2, i], row
        elif row != NOWHERE:  # submitted; it was held then, so it has a row
            answers[3, i] = tail
    return answers


@compiled_within
def _is_as_read(state: State, node: int, type_id: int) -> bool:
    """Whether an earlier node is done, and of the type that a form expects."""
    subgraph = state.nodes[SUBGRAPH, node]
    end = state.subgraphs[END, subgraph]
    is_done = state.nodes[STATE, end - 1 if end > 0 else node] == DONE
    return bool(is_done and state.subgraphs[TYPE, subgraph] == type_id)


@compiled_within
def all_fit(state: State, forms: Forms, numbers: Ints, stored: Ints) -> bool:
    """Whether these forms find nodes of the types that they read among stored nodes. stored: the first of each."""
    for i in range(len(numbers)):
        for j in range(forms.reads_begins[numbers[i]], forms.reads_begins[numbers[i] + 1]):
            if not _is_as_read(state, stored[i] + forms.reads[0, j], forms.reads[1, j]):
                return False
    return True


@compiled
def num_fitting(addresses: Ints, forms_addresses: Ints, numbers: Ints, slots: Ints) -> int:
    """Return how many of these forms, up to the first that does not, find done nodes of the types that they read."""
    state, forms = state_at(addresses), forms_at(forms_addresses)
    for i in range(len(numbers)):
        for j in range(forms.reads_begins[numbers[i]], forms.reads_begins[numbers[i] + 1]):
            if not _is_as_read(state, earlier_node(state, slots[i], forms.reads[0, j]), forms.reads[1, j]):
                return i
    return len(numbers)


@compiled
def _write(addresses: Ints, forms_addresses: Ints, where: Ints) -> Ints:
    """Write graphs from their forms; return the subgraphs that wait for no other, in order.

    where: [5, graphs] the rows are FORM to EDGES_FROM.
    """
    state, forms = state_at(addresses), forms_at(forms_addresses)
    for i in range(where.shape[1]):
        write_copy(
            state,
            forms,
            where[FORM, i],
            where[SLOT, i],
            where[FORM_BASE, i],
            where[SUBGRAPHS_FROM, i],
            where[EDGES_FROM, i],
        )
    return ready_of(forms, where[FORM], where[SUBGRAPHS_FROM])


@compiled_inline
def write_copy(state: State, forms: Forms, form: int, slot: int, base: int, first: int, consumers: int) -> None:
    """Write a graph from its form. base, first, consumers: its first node, its first subgraph and its first edge."""
    of_nodes, of_subgraphs, source, source_table = state.nodes, state.subgraphs, state.source, state.source_table
    nodes, subgraphs, sources = forms.nodes, forms.subgraphs, forms.sources
    at = forms.nodes_begins[form]
    for j in range(at, forms.nodes_begins[form + 1]):
        node = base + j - at
        of_nodes[STATE, node] = WAITING
        of_nodes[HELD, node] = 0
        of_nodes[ROW, node] = NOWHERE
        of_nodes[REQUEST, node] = slot
        of_nodes[SUBGRAPH, node] = first + nodes[_SUBGRAPH, j]
        of_nodes[PENDING, node] = nodes[_PENDING, j]
        of_nodes[USES, node] = nodes[_USES, j]
        of_nodes[FETCH, node] = nodes[_FETCH, j]
        of_nodes[NUM_EDGES, node] = nodes[_NUM_EDGES, j]
        of_nodes[FIRST_EDGE, node] = consumers + nodes[_FIRST_EDGE, j]
    at = forms.subgraphs_begins[form]
    for j in range(at, forms.subgraphs_begins[form + 1]):
        mine = first + j - at
        of_subgraphs[TYPE, mine] = subgraphs[FORM_TYPE, j]
        of_subgraphs[HEAD, mine] = base + subgraphs[_HEAD, j]
        of_subgraphs[SIZE, mine] = subgraphs[FORM_SIZE, j]
        of_subgraphs[SPAN, mine] = subgraphs[_SPAN, j]
        of_subgraphs[EXTERNAL, mine] = subgraphs[_EXTERNAL, j]
        of_subgraphs[END, mine] = base + subgraphs[FORM_END, j] if subgraphs[FORM_END, j] > 0 else 0
        of_subgraphs[OPEN_ENDED, mine] = subgraphs[_OPEN, j]
        of_subgraphs[PIN, mine] = NOWHERE
        of_subgraphs[IN_FLIGHT, mine] = 0
        of_subgraphs[LANE, mine] = NOWHERE
        of_subgraphs[LANE_WORKER, mine] = NOWHERE
    at = forms.edges_begins[form]
    for j in range(at, forms.edges_begins[form + 1]):
        state.consumer[consumers + j - at] = base + forms.edges[0, j]
    for j in range(forms.sources_begins[form], forms.sources_begins[form + 1]):
        port, node, local = sources[_PORT, j], base + sources[_NODE, j], sources[_SOURCE, j]
        source_table[port, node] = sources[_TABLE, j]
        if port < state.reach.shape[0]:
            state.reach[port, node] = sources[_REACH, j]
        if local >= 0:
            source[port, node] = base + local
        elif local != _NO_SOURCE:
            read = earlier_node(state, slot, -1 - local)
            source[port, node] = read
            of_nodes[USES, read] += 1


@compiled_inline
def ready_of(forms: Forms, numbers: Ints, firsts: Ints) -> Ints:
    """Return the subgraphs of copies that wait for no other, in order. [copies] their forms and first subgraphs."""
    num_ready = 0
    for i in range(len(numbers)):
        num_ready += forms.ready_begins[numbers[i] + 1] - forms.ready_begins[numbers[i]]
    ready = np.empty(num_ready, np.int64)
    num_ready = 0
    for i in range(len(numbers)):
        for j in range(forms.ready_begins[numbers[i]], forms.ready_begins[numbers[i] + 1]):
            ready[num_ready] = firsts[i] + forms.ready[0, j]
            num_ready += 1
    return ready
