"""Trees and other graphs without cycles as arrays of children: their parts, and checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled
from batchmaker.errors import InvalidRequestError, ShapeError
from batchmaker.graph.cell_graph import HOST
from batchmaker.graph.constants import ascending, numbers, one_column
from batchmaker.graph.spec import CellType, ValueSpec
from batchmaker.graph.values import HostValues, ValueSequence

SequenceArgument = ValueSequence | HostValues
Places = slice | Ints
"""Nodes of a block: their positions, or a slice for all."""


@dataclass(slots=True)
class TreePart:
    """The nodes of a tree that are calls of one cell.

    places: [count] positions among the nodes of the tree, in any order; a slice of all if they are the whole tree.
    children: [count, arity]; an entry below the number of leaves is a leaf, any other is node `entry - leaves` of the
    tree, which must come before its parent. inputs: the inputs of each call before its children's states.
    """

    cell: CellType
    places: Places
    children: Ints
    inputs: Sequence[SequenceArgument]

    @property
    def count(self) -> int:
        return len(self.children)

    @property
    def numbers(self) -> Ints:
        """The positions of the nodes, as numbers."""
        return ascending(0, self.count) if isinstance(self.places, slice) else self.places

    def fault(self, row: int, num_nodes: int, num_leaves: int) -> InvalidRequestError:
        """Return the error of a row with an impossible place or child, in a tree of this size."""
        name, place = self.cell.name, int(self.numbers[row])
        limit = num_leaves + place
        wrong = (self.children[row] < 0) | (self.children[row] >= limit)
        if not 0 <= place < num_nodes or not wrong.any():
            return InvalidRequestError(
                f"cell {name!r}: place {place} of a tree of {num_nodes} nodes is given twice or outside 0 to "
                f"{num_nodes - 1}; each is given once"
            )
        child = int(np.argmax(wrong))
        return InvalidRequestError(
            f"cell {name!r}: child {child} of tree node {place} is {self.children[row, child]}; allowed are 0 to "
            f"{limit - 1} (leaves 0 to {num_leaves - 1}, then nodes that come before their parent)"
        )

    def check_inputs(self) -> None:
        """InvalidRequestError unless children are [count, arity] and places and inputs have as many elements."""
        name = self.cell.name
        if self.children.ndim != 2:
            raise InvalidRequestError(
                f"cell {name!r}: children must be an array [num_nodes, arity], got shape {self.children.shape}"
            )
        if not isinstance(self.places, slice) and self.places.shape != (self.count,):
            raise InvalidRequestError(
                f"cell {name!r}: got places of shape {self.places.shape} for {self.count} tree nodes, expected one for "
                "each"
            )
        for sequence in self.inputs:
            if len(sequence) != self.count:
                raise InvalidRequestError(f"cell {name!r}: {len(sequence)} inputs for {self.count} tree nodes")

    def child_outputs(self, leaves: Sequence[SequenceArgument]) -> range:
        """Return the indices of the outputs that a node's parent reads. Raises if they differ from the leaves."""
        cell, arity = self.cell, self.children.shape[1]
        expected = len(self.inputs) + arity * len(leaves)
        own = range(len(cell.outputs) - len(leaves), len(cell.outputs))
        if expected == len(cell.inputs) and own.start >= 0 and cell.outputs[own.start :] == specs_of(leaves):
            return own
        if expected != len(cell.inputs):
            raise InvalidRequestError(
                f"cell {cell.name!r}: {len(self.inputs)} inputs and {arity} children with {len(leaves)} values each "
                f"make {expected} arguments, the cell takes {len(cell.inputs)}"
            )
        if len(leaves) > len(cell.outputs):
            raise InvalidRequestError(
                f"cell {cell.name!r}: leaves have {len(leaves)} values, the cell gives {len(cell.outputs)}"
            )
        for leaf, output in zip(leaves, own, strict=True):
            if not leaf.spec.is_like(cell.outputs[output]):
                raise ShapeError(
                    f"cell {cell.name!r}: leaves give {leaf.spec}, output {output} of the cell gives "
                    f"{cell.outputs[output]}; a node's children must look alike"
                )
        return own


@dataclass(slots=True)
class Leaves:
    """The positions of a tree's leaves, in the form for the loops below.

    nodes: [parts of a state, leaves] the node of each leaf, or HOST; if the leaves are consecutive, [parts of a state,
    1], the first node. outputs: [parts of a state] the output number. count: number of leaves. has_data: whether parts
    of them came with the request.
    """

    nodes: Ints
    outputs: Ints
    count: int
    has_data: bool


def specs_of(leaves: Sequence[SequenceArgument]) -> tuple[ValueSpec, ...]:
    """Return the specs of the parts of a state."""
    return tuple([leaf.spec for leaf in leaves])


def leaves_at(leaves: Sequence[SequenceArgument]) -> Leaves:
    """Return the positions of leaves that were checked."""
    firsts, outputs, count, has_data = [], [], len(leaves[0]), False
    for leaf in leaves:
        if isinstance(leaf, HostValues):
            firsts.append(HOST)
            outputs.append(0)
            has_data = True
            continue
        outputs.append(leaf.of.index)
        node_numbers = leaf.numbers
        if type(node_numbers) is range and node_numbers.step == 1:
            firsts.append(node_numbers.start)
    if len(firsts) == len(leaves):
        return Leaves(one_column(tuple(firsts)), numbers(tuple(outputs)), count, has_data)
    nodes = [np.full(count, HOST) if isinstance(leaf, HostValues) else leaf.nodes for leaf in leaves]
    return Leaves(np.array(nodes), numbers(tuple(outputs)), count, has_data)


@compiled
def fill_children(
    block: tuple[NDArray[np.int16], NDArray[np.int64], NDArray[np.int16]],
    is_child: NDArray[np.bool_],
    places: NDArray[np.int64],
    children: NDArray[np.int64],
    leaves: tuple[NDArray[np.int64], NDArray[np.int64], int],
    first: int,
    type_id: int,
    port: int,
    output: int,
) -> int:
    """Write types, sources and outputs of the nodes of a part; return how many children are leaves.

    block: types [nodes], sources and outputs [ports, nodes] of the tree's block, whose first node is `first`; types are
    -1 where no part has written. is_child: [nodes], marked here. places: [count] the positions of the part's nodes.
    children: [count, arity]. leaves: nodes, outputs and count, see Leaves. port: the first input for a child's state;
    output: the first output that is a node's state. Returns -1 - row if a place is invalid or taken, or a child is
    neither a leaf nor a node before its parent.
    """
    types, sources, outputs = block
    leaf_nodes, leaf_outputs, num_leaves = leaves
    num_parts, dense = len(leaf_nodes), leaf_nodes.shape[1] == num_leaves
    uses = 0
    for row in range(len(places)):
        place = places[row]
        if place < 0 or place >= len(types) or types[place] >= 0:
            return -1 - row
        types[place] = type_id
        at = port
        for child in children[row]:
            if child < 0 or child >= num_leaves + place:
                return -1 - row
            is_leaf = child < num_leaves
            uses += is_leaf
            if not is_leaf:
                is_child[child - num_leaves] = True
            for part in range(num_parts):
                if not is_leaf:
                    sources[at, place] = first + child - num_leaves
                    outputs[at, place] = output + part
                else:
                    sources[at, place] = _leaf(leaf_nodes, part, child, dense)
                    outputs[at, place] = leaf_outputs[part]
                at += 1
    return uses


@compiled
def _leaf(leaf_nodes: NDArray[np.int64], part: int, leaf: int, dense: bool) -> int:
    """Return the node of one part of a leaf's state, or HOST. dense: whether there is a column for each leaf."""
    node: int = leaf_nodes[part, leaf if dense else 0]
    return node if dense or node == HOST else node + leaf


def check_parts(parts: Sequence[TreePart]) -> int:
    """Return the number of nodes of a tree.

    InvalidRequestError if it has none, or if the arrays of a part differ in length. ShapeError if the cells return
    different outputs, because each output of all nodes is one sequence.
    """
    count, first = 0, parts[0].cell
    for part in parts:
        part.check_inputs()
        count += len(part.children)
    if count == 0:
        raise InvalidRequestError(f"cell {first.name!r}: a tree needs at least one inner node")
    for part in parts[1:]:
        _check_alike(first, part.cell)
    return count


def _check_alike(first: CellType, other: CellType) -> None:
    if len(first.outputs) != len(other.outputs) or not all(map(ValueSpec.is_like, first.outputs, other.outputs)):
        raise ShapeError(
            f"cell {first.name!r} gives {', '.join(map(str, first.outputs))} and cell {other.name!r} "
            f"{', '.join(map(str, other.outputs))}; the cells of one tree must give alike"
        )


def tree_fault(children: NDArray[np.integer], num_leaves: int) -> str:
    """Return the entry that prevents children [num_leaves - 1, 2] from being one binary tree, and its valid range.

    Nodes are numbered leaves first; inner node i, counted from 0, is node num_leaves + i. Only for children that are
    known to be wrong: it checks them one by one.
    """
    parent: dict[int, int] = {}
    for node, row in enumerate(children.tolist()):
        for side, child in zip(("left", "right"), row, strict=True):
            where = f"children: the {side} child of inner node {node} is {child}"
            if not 0 <= child < num_leaves + node:
                return (
                    f"{where}, expected 0 to {num_leaves + node - 1}: a leaf, or an inner node before it; "
                    "children come first, the root is last"
                )
            if child in parent:
                return (
                    f"{where}, which is a child of inner node {parent[child]} already; every node but the last is a "
                    "child exactly once"
                )
            parent[child] = node
    return "children make one tree"
