"""Taking a graph into the arena that has been there before: what was written then is written again, at new numbers.

Simulations offer the same few graphs again and again. Nothing of where values lie is copied, so it is for schedulers
that do not plan rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.graph.cell_graph import CellGraph
from batchmaker.scheduler.arena import NOWHERE, WAITING, Arena
from batchmaker.scheduler.numbering import Extent

Ids = NDArray[np.int64]

MAX_FORMS: Final = 8192
"""Graphs that are remembered; beyond it all are forgotten."""


@dataclass(frozen=True, slots=True)
class _Form:
    """What the arena says of a fresh graph, with numbers counted from its own first node, subgraph and edge.

    graph: kept alive, since forms are found by its identity. is_run: [subgraphs] 1 for runs, whose `end` moves along.
    """

    graph: CellGraph
    subgraph: Ids
    pending: Ids
    num_edges: Ids
    first_edge: Ids
    type: NDArray[np.int16]
    head: Ids
    size: Ids
    span: Ids
    external: Ids
    end: Ids
    is_run: Ids
    open_ended: NDArray[np.bool_]
    consumer: Ids


@final
class GraphCopies:
    """Remembers graphs as they were admitted first. One per scheduler."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._forms: dict[int, _Form] = {}

    def knows(self, graph: CellGraph) -> bool:
        return id(graph) in self._forms

    def remember(self, graph: CellGraph, extent: Extent) -> None:
        """Note what admission has just written about a graph. None of its nodes may have been released yet."""
        arena = self._arena
        if len(self._forms) >= MAX_FORMS:
            self._forms.clear()
        nodes = slice(extent.base, extent.base + extent.num_nodes)
        subgraphs = slice(extent.first_subgraph, extent.first_subgraph + extent.num_subgraphs)
        edges = slice(extent.first_edge, extent.first_edge + extent.num_edges)
        is_run = (arena.end[subgraphs] > 0).astype(np.int64)
        self._forms[id(graph)] = _Form(
            graph,
            arena.subgraph[nodes] - extent.first_subgraph,
            arena.pending[nodes].copy(),
            arena.num_edges[nodes].copy(),
            arena.first_edge[nodes] - extent.first_edge,
            arena.type[subgraphs].copy(),
            arena.head[subgraphs] - extent.base,
            arena.size[subgraphs].copy(),
            arena.span[subgraphs].copy(),
            arena.external[subgraphs].copy(),
            arena.end[subgraphs] - is_run * extent.base,
            is_run,
            arena.open_ended[subgraphs].copy(),
            arena.consumer[edges] - extent.base,
        )

    def write(self, graph: CellGraph, slot: int) -> Extent:
        """Take a known graph in, into its request's slot. Afterwards all is as after its first admission."""
        arena, form = self._arena, self._forms[id(graph)]
        num_nodes, num_subgraphs, num_edges = len(form.subgraph), len(form.type), len(form.consumer)
        base = arena.nodes.allocate(num_nodes)
        arena.fit_nodes()
        first_subgraph = arena.subgraphs.allocate(num_subgraphs)
        arena.fit_subgraphs()
        first_edge = arena.allocate_edges(num_edges) if num_edges else 0
        nodes = slice(base, base + num_nodes)
        arena.state[nodes] = WAITING
        arena.held[nodes] = False
        arena.row[nodes] = NOWHERE
        arena.request[nodes] = slot
        arena.subgraph[nodes] = form.subgraph + first_subgraph
        arena.pending[nodes] = form.pending
        arena.num_edges[nodes] = form.num_edges
        arena.first_edge[nodes] = form.first_edge + first_edge
        subgraphs = slice(first_subgraph, first_subgraph + num_subgraphs)
        arena.clear_subgraphs(subgraphs)
        arena.type[subgraphs] = form.type
        arena.head[subgraphs] = form.head + base
        arena.size[subgraphs] = form.size
        arena.span[subgraphs] = form.span
        arena.external[subgraphs] = form.external
        arena.end[subgraphs] = form.end + form.is_run * base
        arena.open_ended[subgraphs] = form.open_ended
        arena.consumer[first_edge : first_edge + num_edges] = form.consumer + base
        return Extent(graph.first, base, num_nodes, first_subgraph, num_subgraphs, first_edge, num_edges)
