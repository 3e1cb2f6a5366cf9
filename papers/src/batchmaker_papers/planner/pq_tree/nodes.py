"""The nodes of a PQ-tree and their links.

The children of a Q-node are a chain without a stored direction: each child knows its neighbours, not which is left or
right. So two chains can be joined in constant time. Only the two children at the ends know their parent; updating all
others whenever chains are joined would cost too much.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import final


class Kind(Enum):
    """The allowed arrangements of a node's children."""

    LEAF = "leaf"
    P = "P"
    """Any order."""
    Q = "Q"
    """One order and its reverse."""


@final
class Node:
    """One node. A Q-node has at least three children, except while a set is being reduced; a P-node at least two.

    children: of a P-node, without order, as the keys of a dict; else empty. ends: of a Q-node, its first and last
    child. near: among a Q-node's children, the neighbours; both None for any other node. parent: None in the root and
    in a child of a Q-node that is not at an end, see `is_inner`.
    """

    __slots__ = ("children", "element", "ends", "kind", "near", "parent")

    def __init__(self, kind: Kind, element: int = -1) -> None:
        self.kind = kind
        self.element = element
        self.parent: Node | None = None
        self.children: dict[Node, None] = {}
        self.ends: list[Node] = []
        self.near: list[Node | None] = [None, None]

    @property
    def is_inner(self) -> bool:
        """Whether this is a child of a Q-node and not at an end of it, so that its parent is unknown."""
        return self.near[0] is not None and self.near[1] is not None

    def listed(self) -> Iterator[Node]:
        """Yield the children; those of a Q-node from the first end to the last."""
        if self.kind is Kind.Q:
            yield from chain(self.ends[0], None)
        else:
            yield from self.children

    def adopt(self, child: Node) -> None:
        """Add a loose node as a child of this P-node."""
        self.children[child] = None
        child.parent = self
        child.near = [None, None]

    def begin(self, first: Node, last: Node) -> None:
        """Make two loose nodes the first children of this new Q-node, which will get more."""
        self.ends = [first, last]
        first.near, last.near = [None, last], [first, None]
        first.parent = last.parent = self

    def append(self, end: int, child: Node) -> None:
        """Add a loose node at an end (0 or 1) of this Q-node, which has two children or more."""
        child.near = [None, None]
        self._connect(end, child)
        child.parent = self
        self.ends[end] = child

    def extend(self, end: int, other: Node) -> None:
        """Move the children of another Q-node to an end (0 or 1) of this one, beginning with the other's same end."""
        first, last = other.ends[end], other.ends[1 - end]
        self._connect(end, first)
        first.parent = None
        last.parent = self
        self.ends[end] = last

    def _connect(self, end: int, child: Node) -> None:
        last = self.ends[end]
        last.near[last.near.index(None)] = child
        last.parent = None
        child.near[child.near.index(None)] = last


def chain(start: Node, before: Node | None) -> Iterator[Node]:
    """Yield `start` and the nodes after it in its chain, away from its neighbour `before` (None: from an end)."""
    node: Node | None = start
    while node is not None:
        yield node
        before, node = node, beyond(node, before)


def beyond(node: Node, before: Node | None) -> Node | None:
    """Return the neighbour of `node` that is not `before`, None at the end of the chain."""
    return node.near[1] if node.near[0] is before else node.near[0]


def substitute(old: Node, new: Node) -> None:
    """Put the loose node `new` in the place of `old`, under the same parent and between the same neighbours.

    `old` is loose afterwards. A root has no place: the caller tells the tree.
    """
    parent = old.parent
    new.near, new.parent = old.near, parent
    for neighbour in new.near:
        if neighbour is not None:
            neighbour.near[neighbour.near.index(old)] = new
    if parent is not None and parent.kind is Kind.P:
        del parent.children[old]
        parent.children[new] = None
    elif parent is not None:
        parent.ends[parent.ends.index(old)] = new
    old.near, old.parent = [None, None], None
