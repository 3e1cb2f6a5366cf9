"""A PQ-tree over the numbers from 0: sets go in, an order comes out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from batchmaker_papers.planner.pq_tree.marks import Label, Marks, climb, label, run_of
from batchmaker_papers.planner.pq_tree.nodes import Kind, Node
from batchmaker_papers.planner.pq_tree.templates import rearrange

Order = tuple[int, ...]
"""The arrangement of a node's children.

Of a P-node, their present places; of a Q-node (0, 1), or (1, 0) for the reverse.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The tree's knowledge about some consecutive elements.

    node: the node in the tree; for some, but not all, of the children of a Q-node it may be a temporary node that is in
    no tree. parts: its components, in the order of the tree or its reverse; empty for a single element. in_chain: only
    this order of them and its reverse are possible; else any. elements: all below, in order.
    """

    node: Node
    in_chain: bool
    parts: tuple[Part, ...]
    elements: tuple[int, ...]


@final
class PQTree:
    """All orders of `range(num_elements)` in which each set that was accepted is consecutive.

    A set is reduced in time proportional to its size, taken over all sets (Booth & Lueker, theorem 6).
    """

    __slots__ = ("_leaves", "_top", "changes")

    def __init__(self, num_elements: int) -> None:
        self.changes = 0
        """The number of sets that have excluded orders."""
        self._leaves = [Node(Kind.LEAF, element) for element in range(num_elements)]
        self._top = Node(Kind.P)  # above the root, so that the root has a place like any other node
        root = Node(Kind.P) if num_elements > 1 else self._top
        if root is not self._top:
            self._top.adopt(root)
        for leaf in self._leaves:
            root.adopt(leaf)

    def reduce(self, elements: Iterable[int]) -> bool:
        """Exclude all orders in which these elements are not consecutive and return True.

        If no order would be left, nothing changes and False is returned. Raises IndexError if an element is not in the
        tree.
        """
        leaves = self._leaves_of(elements)
        if len(leaves) < 2:
            return True
        marks = climb(leaves)
        touched = None if marks is None else label(leaves, marks)
        if marks is None or touched is None:
            return False
        self.changes += rearrange(touched, marks)
        return True

    def frontier(self, orders: Mapping[Node, Order] | None = None) -> list[int]:
        """Return one of the remaining orders: that of the tree, or with some nodes rearranged."""
        orders = orders or {}
        elements = []
        stack = [self._root]
        while stack:
            node = stack.pop()
            if node.kind is Kind.LEAF:
                elements.append(node.element)
                continue
            children = list(node.listed())
            order = orders.get(node)
            if order is not None and node.kind is Kind.P:
                children = [children[place] for place in order]
            elif order is not None and order[0] == 1:
                children.reverse()
            stack.extend(reversed(children))
        return elements

    def parents(self) -> dict[Node, Node]:
        """Return the parent of each node except the root. A change of the tree makes the result invalid."""
        parents: dict[Node, Node] = {}
        stack = [self._root]
        while stack:
            node = stack.pop()
            children = list(node.listed())
            parents.update(dict.fromkeys(children, node))
            stack += children
        return parents

    def part(self, elements: Iterable[int]) -> Part:
        """Return the tree's knowledge about these elements. An accepted set must have made them consecutive."""
        leaves = self._leaves_of(elements)
        if len(leaves) == 1:
            return _single(leaves[0])
        marks = climb(leaves)
        touched = None if marks is None else label(leaves, marks)
        part = None if marks is None or touched is None else _part(touched, marks)
        if part is None:
            raise ValueError(f"{sorted(leaf.element for leaf in leaves)} is not consecutive in {self!r}")
        return part

    def __repr__(self) -> str:
        """Return the tree as text: (a P-node) and [a Q-node]."""
        pieces: list[str] = []
        stack: list[Node | str] = [self._root]
        while stack:
            item = stack.pop()
            if isinstance(item, str):
                pieces.append(item)
            elif item.kind is Kind.LEAF:
                pieces.append(str(item.element))
            else:
                opening, closing = "()" if item.kind is Kind.P else "[]"
                pieces.append(opening)
                children = [piece for child in item.listed() for piece in (" ", child)][1:]
                stack += [closing, *reversed(children)]
        return f"PQTree {''.join(pieces)}"

    @property
    def _root(self) -> Node:
        return next(iter(self._top.children), self._top)

    def _leaves_of(self, elements: Iterable[int]) -> list[Node]:
        wanted = dict.fromkeys(elements)
        for element in wanted:
            if not 0 <= element < len(self._leaves):
                raise IndexError(f"element {element} is not in range({len(self._leaves)})")
        return [self._leaves[element] for element in wanted]


def _part(touched: Sequence[Node], marks: Marks) -> Part | None:
    """Combine the parts below the labelled nodes; None if other leaves may come between."""
    parts: dict[Node, Part] = {}
    for node in touched:
        mark = marks[node]
        if mark.partial or (node.kind is Kind.P and mark.label is not Label.FULL):
            return None
        children = run_of(mark, marks) if node.kind is Kind.Q else node.children
        below = tuple(parts.get(child) or _single(child) for child in children)
        elements = tuple(element for part in below for element in part.elements)
        parts[node] = Part(node, node.kind is Kind.Q or len(below) == 2, below, elements)
    return parts[touched[-1]]


def _single(leaf: Node) -> Part:
    return Part(leaf, False, (), (leaf.element,))
