"""A closed mini-batch: the graphs of requests that are computed together, merged into one, node by node.

What batching policies are learnt on and compared with (ED-Batch, ICML 2023). A live engine never builds one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.errors import InvalidRequestError
from batchmaker.graph.cell_graph import HOST, CellGraph, NodeBlock, Run
from batchmaker.graph.kin import Family

Nodes = NDArray[np.int64]


@final
@dataclass(frozen=True, eq=False)
class MiniBatch:
    """Nodes with what feeds them. Every node comes after its sources.

    types: [nodes] cell types. sources: [edges] the nodes that feed node i, each once, are
    sources[starts[i] : starts[i + 1]]; starts: [nodes + 1]. kin: [kin edges], with kin_starts [nodes + 1], the nearest
    ancestors of the same type: those from which no way leads to the node by another of them. So a node has an ancestor
    of its type that has not run exactly while one of its kin has not. num_types: how many cell types there are.
    """

    types: Nodes
    starts: Nodes
    sources: Nodes
    kin_starts: Nodes
    kin: Nodes
    num_types: int

    def __len__(self) -> int:
        return len(self.types)

    @cached_property
    def depths(self) -> Nodes:
        """How many nodes must run one after another before each: [nodes], 0 without sources."""
        return _longest(self.starts, self.sources)

    @cached_property
    def kin_depths(self) -> Nodes:
        """The most nodes of a node's own type on any way to it, itself left out: [nodes]."""
        return _longest(self.kin_starts, self.kin)

    @cached_property
    def fed(self) -> tuple[list[int], ...]:
        """The nodes that each node feeds: [nodes]."""
        return _turned(self.starts, self.sources)

    @cached_property
    def kin_after(self) -> tuple[list[int], ...]:
        """The nodes that each node is kin of: [nodes]."""
        return _turned(self.kin_starts, self.kin)

    @cached_property
    def turned(self) -> MiniBatch:
        """The same nodes with every edge turned round and numbered from the last: node i is `len - 1 - i`."""
        last = len(self) - 1
        starts, sources = _columns([[last - node for node in reversed(self.fed[i])] for i in range(last, -1, -1)])
        kin_starts, kin = _columns([[last - node for node in reversed(self.kin_after[i])] for i in range(last, -1, -1)])
        return MiniBatch(self.types[::-1], starts, sources, kin_starts, kin, self.num_types)


def mini_batch(types: Sequence[int], sources: Sequence[Iterable[int]], num_types: int) -> MiniBatch:
    """Return the mini-batch of these nodes; what feeds a node more than once counts once.

    types: [nodes], below num_types. sources: per node the nodes that feed it. Raises InvalidRequestError if a node
    is fed by itself or a later one, as in every cyclic graph, or is of no known type. Needs nodes^2 / 8 bytes for a
    moment.
    """
    distinct = [sorted(set(fed)) for fed in sources]
    if len(distinct) != len(types):
        raise InvalidRequestError(f"got the types of {len(types)} nodes and the sources of {len(distinct)}")
    for node, (kind, fed) in enumerate(zip(types, distinct, strict=True)):
        if fed and (fed[-1] >= node or fed[0] < 0):
            wrong = fed[-1] if fed[-1] >= node else fed[0]
            raise InvalidRequestError(
                f"node {node} is fed by node {wrong}, expected one from 0 to {node - 1}: a graph without cycles, with "
                "its nodes in an order in which they can run"
            )
        if not 0 <= kind < num_types:
            raise InvalidRequestError(f"node {node} is of type {kind}, expected one from 0 to {num_types - 1}")
    starts, edges = _columns(distinct)
    kin_starts, kin = _kin(types, distinct)
    return MiniBatch(np.array(types, np.int64), starts, edges, kin_starts, kin, num_types)


def unrolled(graph: CellGraph, num_types: int) -> MiniBatch:
    """Return a request's graph node by node: each step of a run is a node, fed by the step before it."""
    types = [0] * graph.num_nodes
    sources: list[list[int]] = [[] for _ in range(graph.num_nodes)]
    for part in graph.parts:
        if isinstance(part, Run):
            _unroll_run(part, graph.first, types, sources)
        else:
            _unroll_block(part, graph.first, types, sources)
    return mini_batch(types, sources, num_types)


def merged(requests: Sequence[MiniBatch]) -> MiniBatch:
    """Return requests of one model as one mini-batch, their nodes one after another."""
    sizes = [len(request) for request in requests]
    first = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))[:-1]
    starts, sources = _joined([(r.starts, r.sources) for r in requests], first.tolist())
    kin_starts, kin = _joined([(r.kin_starts, r.kin) for r in requests], first.tolist())
    types = np.concatenate([np.empty(0, np.int64), *(r.types for r in requests)])
    return MiniBatch(types, starts, sources, kin_starts, kin, max((r.num_types for r in requests), default=0))


def _unroll_run(run: Run, before: int, types: list[int], sources: list[list[int]]) -> None:
    first = run.first - before
    types[first : first + run.length] = [int(run.type_id)] * run.length
    columns = [column[0] - before for column in run.sequences if column is not None]
    for step, fed in enumerate(np.stack(columns, axis=1).tolist() if columns else [[]] * run.length):
        sources[first + step] = [source for source in fed if source >= 0]
        if step and run.init:
            sources[first + step].append(first + step - 1)
    sources[first] += [source - before for source, _ in run.init if source >= before]


def _unroll_block(block: NodeBlock, before: int, types: list[int], sources: list[list[int]]) -> None:
    first = block.first - before
    types[first : first + block.count] = block.types.tolist()
    for position, fed in enumerate((block.sources - before).T.tolist()):
        sources[first + position] = [source for source in fed if source >= 0]


def _kin(types: Sequence[int], sources: Sequence[Sequence[int]]) -> tuple[Nodes, Nodes]:
    """Return where each node's kin start, and the kin."""
    ports = np.full((max(map(len, sources), default=0), len(types)), HOST, np.int64)
    for node, fed in enumerate(sources):
        ports[: len(fed), node] = fed
    block = NodeBlock(0, np.array(types, np.int16), ports, np.zeros(ports.shape, np.int16))
    kin = Family().add(CellGraph(0, len(types), [block] if types else []))
    of_group: list[list[int]] = [[] for _ in range(kin.num_groups)]
    for feeder, group in zip(kin.feeders.tolist(), kin.fed.tolist(), strict=True):
        of_group[group].append(feeder)
    return _columns([of_group[group] if group >= 0 else [] for group in kin.group.tolist()])


def _longest(starts: Nodes, sources: Nodes) -> Nodes:
    longest = [0] * (len(starts) - 1)
    bounds, fed = starts.tolist(), sources.tolist()
    for node in range(len(longest)):
        for source in fed[bounds[node] : bounds[node + 1]]:
            if longest[source] >= longest[node]:
                longest[node] = longest[source] + 1
    return np.array(longest, np.int64)


def _turned(starts: Nodes, sources: Nodes) -> tuple[list[int], ...]:
    after: tuple[list[int], ...] = tuple([] for _ in range(len(starts) - 1))
    node_of_edge = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    for node, source in zip(node_of_edge.tolist(), sources.tolist(), strict=True):
        after[source].append(node)
    return after


def _columns(rows: Sequence[Sequence[int]]) -> tuple[Nodes, Nodes]:
    starts = np.concatenate(([0], np.cumsum([len(row) for row in rows], dtype=np.int64)))
    return starts, np.array([entry for row in rows for entry in row], np.int64)


def _joined(parts: Sequence[tuple[Nodes, Nodes]], first: Sequence[int]) -> tuple[Nodes, Nodes]:
    counts = [np.diff(starts) for starts, _ in parts]
    edges = [sources + number for (_, sources), number in zip(parts, first, strict=True)]
    starts = np.concatenate(([0], *counts)).cumsum(dtype=np.int64)
    return starts, np.concatenate([np.empty(0, np.int64), *edges])
