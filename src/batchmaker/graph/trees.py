"""What is wrong with an array that should be a binary tree, in words."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def tree_fault(children: NDArray[np.integer], num_leaves: int) -> str:
    """Return which entry keeps children [num_leaves - 1, 2] from being one binary tree, and what it may be.

    Nodes are numbered leaves first; inner node i, counted from 0, is node num_leaves + i. For children that are known
    to be wrong: it looks at one after the other.
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
