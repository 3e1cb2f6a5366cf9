"""What one request computes: nodes and runs in arrays. A chain is one entry, however long.

Node numbers are local to the request and count up in the order of creation, so every node's sources have
smaller numbers than the node. A run of n steps owns n consecutive numbers.

Nobody changes the parts of a graph once it is taken, nor the arrays in them, which graphs may share. What every request
has several of is not frozen all the same, for that takes microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchmaker.graph.spec import TypeId
from batchmaker.graph.values import NodeArray

HOST = -1
"""As a source: the value came with the request."""
ZERO = -2
"""As a source of a run's initial state: zeros."""


@dataclass(slots=True)
class NodeBlock:
    """Consecutive single nodes.

    first: number of the first node. types: [count] cell types. sources: [num_inputs, count] the node that feeds each
    input, or HOST, also beyond a node's own inputs. outputs: [num_inputs, count] which output of the source.
    connected: all nodes are of one type and hang together, so they are one subgraph.
    """

    first: int
    types: NDArray[np.int16]
    sources: NodeArray
    outputs: NDArray[np.int16]
    connected: bool = False

    @property
    def count(self) -> int:
        return len(self.types)


@dataclass(frozen=True, slots=True)
class Run:
    """A chain of nodes of one type as one entry: `length` steps from node `first` on.

    sequences: per sequence input None (it came with the request) or (source nodes [length], output).
    init: per state input (source, output); source may be HOST or ZERO.
    open_ended: the run may stop before `length`, when the driver sees the value that ends it.
    """

    type_id: TypeId
    first: int
    length: int
    sequences: tuple[tuple[NodeArray, int] | None, ...]
    init: tuple[tuple[int, int], ...]
    open_ended: bool = False

    @property
    def last(self) -> int:
        """The node at which consumers find the run's final outputs."""
        return self.first + self.length - 1


@dataclass(slots=True)
class HostInput:
    """Values for one input of nodes of one type. values: [count, *shape], opaque here.

    The nodes are `first` and those after it, or, where they do not follow each other, `nodes` [count].
    """

    type_id: TypeId
    port: int
    first: int
    count: int
    values: Any
    nodes: NodeArray | None = None

    def rows(self, shift: int) -> slice | NodeArray:
        """Return which rows belong to the nodes in an array that has node n in row n + shift."""
        if self.nodes is not None:
            moved: NodeArray = self.nodes + shift
            return moved
        return slice(self.first + shift, self.first + shift + self.count)


@dataclass(slots=True)
class Fetch:
    """Outputs that must travel to the host: `output` of each of `nodes`."""

    nodes: NodeArray
    output: int


@dataclass(frozen=True, slots=True)
class Work:
    """Nodes and steps of each cell type in one graph.

    types: [num_types] type ids, ascending. nodes: [num_types] how many nodes of the type. steps: [num_types] the most
    nodes of the type on any path: batches that the request needs of it, however much is computed together (ED-Batch,
    Equation 2).
    """

    types: NDArray[np.int64]
    nodes: NDArray[np.int64]
    steps: NDArray[np.int64]


@dataclass(slots=True)
class CellGraph:
    """A request's cell graph, or what an unfold function that waited has added to it.

    first: number of the first node here; num_nodes: how many numbers are used here. Blocks, runs and host inputs
    lie inside that range; sources may lie before it. plain: no edge joins nodes of one type but inside blocks that are
    marked connected, so that its subgraphs can be told without following edges. known_work: kept by
    `work_of`. kept: nodes whose outputs the request's sequence keeps once it is answered, where it is known here; each
    once. shared: many requests have this very object, which nobody changes, and their data is not in it.
    """

    first: int
    num_nodes: int
    blocks: list[NodeBlock] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    host_inputs: list[HostInput] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    plain: bool = True
    known_work: Work | None = None
    kept: NodeArray | None = None
    shared: bool = False

    @property
    def parts(self) -> list[NodeBlock | Run]:
        """Blocks and runs in the order of their nodes."""
        if not self.blocks:
            return list(self.runs)
        parts: list[NodeBlock | Run] = [*self.blocks, *self.runs]
        return sorted(parts, key=lambda part: part.first)

    @property
    def num_work_units(self) -> int:
        """Nodes plus runs: what must finish before the request is done."""
        return sum([block.count for block in self.blocks]) + len(self.runs)
