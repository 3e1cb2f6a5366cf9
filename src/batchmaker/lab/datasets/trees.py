"""Labelled binary trees in a compact form: arrays from which the cells of a tree network can be made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchmaker.errors import DataError
from batchmaker.graph.trees import tree_fault


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """One binary tree over a sentence. Nodes are numbered leaves first, then internal nodes.

    words: the leaves, left to right. children: [num_internal, 2] int32, left and right child of internal node j, whose
    own number is num_leaves + j; children come before their parents and the root is last. A tree of one leaf has
    children of shape [0, 2]. labels: [num_leaves + num_internal] int64, in order of node number. Raises DataError if
    shapes or dtypes disagree, a node comes after its parent, or a node does not have exactly one parent.
    """

    words: tuple[str, ...]
    children: NDArray[np.int32]
    labels: NDArray[np.int64]

    def __post_init__(self) -> None:
        num_leaves, num_internal = len(self.words), len(self.words) - 1
        if num_leaves == 0:
            raise DataError("tree: got no leaves, expected at least one.")
        if self.children.shape != (num_internal, 2) or self.children.dtype != np.int32:
            raise DataError(
                f"tree, children: got {self.children.dtype}{list(self.children.shape)}, "
                f"expected int32[{num_internal}, 2] for {num_leaves} leaves."
            )
        if self.labels.shape != (self.num_nodes,) or self.labels.dtype != np.int64:
            raise DataError(
                f"tree, labels: got {self.labels.dtype}{list(self.labels.shape)}, "
                f"expected int64[{self.num_nodes}] for {num_leaves} leaves."
            )
        own = np.arange(num_leaves, self.num_nodes)
        once = np.array_equal(np.sort(self.children, axis=None), np.arange(self.num_nodes - 1))
        if not once or (self.children >= own[:, None]).any():
            raise DataError(f"tree, {tree_fault(self.children, num_leaves)}.")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tree):
            return NotImplemented
        return (
            self.words == other.words
            and np.array_equal(self.children, other.children)
            and np.array_equal(self.labels, other.labels)
        )

    @property
    def num_leaves(self) -> int:
        return len(self.words)

    @property
    def num_internal(self) -> int:
        return len(self.words) - 1

    @property
    def num_nodes(self) -> int:
        return 2 * len(self.words) - 1


def tree_depth(tree: Tree) -> int:
    """Return the number of nodes on the longest path from the root to a leaf; 1 for a single leaf."""
    depths = [1] * tree.num_leaves
    for left, right in tree.children.tolist():
        depths.append(1 + max(depths[left], depths[right]))
    return depths[-1]
