"""The computation of one request: nodes and runs in arrays. A chain is one entry, at any length.

Node numbers are local to the request and ascend in the order of creation, so the sources of a node have smaller numbers
than the node. A run of n steps owns n consecutive numbers.

The parts of a graph and their arrays never change once the graph is taken; graphs may share arrays. Classes with
several objects in every request are not frozen, because that takes microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Ints
from batchmaker.graph.spec import TypeId

HOST = -1
"""A source: the value came with the request."""
ZERO = -2
"""A source of a run's initial state: zeros."""


@dataclass(slots=True)
class NodeBlock:
    """Consecutive single nodes.

    first: number of the first node. types: [count] cell types. sources: [num_inputs, count] the node that feeds each
    input, or HOST; HOST also beyond a node's own inputs. outputs: [num_inputs, count] the output number of the source.
    connected: all nodes are of one type and connected, so they are one subgraph.
    """

    first: int
    types: NDArray[np.int16]
    sources: Ints
    outputs: NDArray[np.int16]
    connected: bool = False

    @property
    def count(self) -> int:
        return len(self.types)


@dataclass(frozen=True, slots=True)
class Run:
    """A chain of nodes of one type as one entry: `length` steps from node `first` on.

    sequences: for each step input, None (it came with the request) or (source nodes [length], output). init: for
    each state input (source, output); source may be HOST or ZERO. The memories of the cell are step inputs that are
    None here: they are in the graph's `memories`. open_ended: the run may stop before `length`, at a
    value that the driver sees.
    """

    type_id: TypeId
    first: int
    length: int
    sequences: tuple[tuple[Ints, int] | None, ...]
    init: tuple[tuple[int, int], ...]
    open_ended: bool = False

    @property
    def last(self) -> int:
        """The node at which consumers find the run's final outputs."""
        return self.first + self.length - 1


@dataclass(slots=True)
class MemoryRead:
    """Nodes that read a memory: values of other nodes, in order, as one input.

    port: the input. first, count: the consecutive nodes that read it: single nodes, or the steps of a run. source,
    step, length, output: it is this output of `length` nodes, from `source` on, each `step` after the one before. own:
    these are the steps of the run itself, and each step reads those before it.
    """

    port: int
    first: int
    count: int
    source: int
    step: int
    length: int
    output: int
    is_run: bool = False
    own: bool = False

    @property
    def sources(self) -> Ints:
        """The nodes whose values it is, in order: [length]."""
        return self.source + self.step * np.arange(self.length)


@dataclass(slots=True)
class HostInput:
    """Values for one input of nodes of one type. values: [count, *shape], not looked at here.

    The nodes are `first` and its successors, or `nodes` [count] if they are not consecutive.
    """

    type_id: TypeId
    port: int
    first: int
    count: int
    values: Any
    nodes: Ints | None = None

    def rows(self, shift: int) -> slice | Ints:
        """Return the rows of the nodes in an array that has node n in row n + shift."""
        if self.nodes is not None:
            moved: Ints = self.nodes + shift
            return moved
        return slice(self.first + shift, self.first + shift + self.count)


@dataclass(slots=True)
class Fetch:
    """Outputs that must travel to the host: `output` of each of `nodes`."""

    nodes: Ints
    output: int


@dataclass(frozen=True, slots=True)
class Work:
    """Nodes and steps of each cell type in one graph.

    types: [num_types] type ids, ascending. nodes: [num_types] number of nodes of the type. steps: [num_types] the
    largest number of nodes of the type on any path: the batches that the request needs at least (ED-Batch, Equation 2).
    """

    types: NDArray[np.int64]
    nodes: NDArray[np.int64]
    steps: NDArray[np.int64]


@dataclass(slots=True)
class CellGraph:
    """A request's cell graph, or the part that a waiting unfold function has added to it.

    - first, num_nodes: number of the first node here, and count of the numbers used here. Blocks, runs and host inputs
      are inside this range; sources may be before it.
    - plain: edges between nodes of one type exist only inside blocks that are marked connected. Then subgraphs follow
      without a look at the edges.
    - memories: what is read as sequences; empty in most graphs.
    - known_work, known_fetches_earlier: caches of `work_of` and `fetches_earlier`.
    - kept_nodes: nodes whose outputs the request's sequence keeps after the answer, if known here; each once.
    - shared: many requests have this same object. It never changes, and does not contain their data.
    - region: the Region that the request is, if values decide what it computes; otherwise None. keeps: those of
      its outputs that the request's sequence keeps, behind `kept_nodes`.
    """

    first: int
    num_nodes: int
    blocks: list[NodeBlock] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    host_inputs: list[HostInput] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    plain: bool = True
    known_work: Work | None = None
    known_fetches_earlier: bool | None = None
    kept_nodes: Ints | None = None
    shared: bool = False
    region: Any = None
    keeps: tuple[int, ...] = ()
    memories: list[MemoryRead] = field(default_factory=list)

    @property
    def parts(self) -> list[NodeBlock | Run]:
        """Blocks and runs in the order of their nodes."""
        if not self.blocks:
            return list(self.runs)
        parts: list[NodeBlock | Run] = [*self.blocks, *self.runs]
        return sorted(parts, key=lambda part: part.first)

    @property
    def fetches_earlier(self) -> bool:
        """Whether outputs of nodes from before this graph are fetched."""
        if self.known_fetches_earlier is None:
            self.known_fetches_earlier = any((fetch.nodes < self.first).any() for fetch in self.fetches)
        return self.known_fetches_earlier

    def memory_edges(self) -> tuple[Ints, Ints]:
        """Return the nodes that each node of the graph waits for because of its memories.

        Those of node `first + i` are sources[starts[i] : starts[i + 1]]; a run waits at its first step. starts:
        [num_nodes + 1]. The sources may be before this graph.
        """
        starts = np.zeros(self.num_nodes + 1, np.int64)
        if not self.memories:
            return starts, starts[:0]
        readers, sources = [], []
        for read in self.memories:
            if not read.own:
                count = 1 if read.is_run else read.count
                readers.append(np.repeat(np.arange(read.first, read.first + count), read.length))
                sources.append(np.tile(read.sources, count))
        if not readers:
            return starts, starts[:0]
        of = np.concatenate(readers) - self.first
        np.cumsum(np.bincount(of, minlength=self.num_nodes), out=starts[1:])
        return starts, np.concatenate(sources)[np.argsort(of, kind="stable")]

    @property
    def num_work_units(self) -> int:
        """Nodes plus runs: the number of units that must finish before the request is done."""
        return sum([block.count for block in self.blocks]) + len(self.runs)
