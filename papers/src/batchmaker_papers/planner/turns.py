"""Relative arrangements of nodes of a PQ-tree: a union-find whose edges carry permutations."""

from __future__ import annotations

from typing import final

from batchmaker_papers.planner.pq_tree.nodes import Node
from batchmaker_papers.planner.pq_tree.tree import Order


def composed(outer: Order, inner: Order) -> Order:
    """Return the permutation that applies `inner` and then `outer`."""
    return tuple(outer[place] for place in inner)


def inverted(order: Order) -> Order:
    """Return the inverse permutation."""
    places = [0] * len(order)
    for place, image in enumerate(order):
        places[image] = place
    return tuple(places)


@final
class Turns:
    """The arrangement of each node, as it follows from that of its deciding node.

    The arrangement of a node is `composed(turn, arrangement of its decider)`.
    """

    __slots__ = ("_decider",)

    def __init__(self) -> None:
        self._decider: dict[Node, tuple[Node, Order]] = {}

    def tie(self, first: Node, second: Node, image: Order) -> bool:
        """Demand that the same places of `first` and `second` hold corresponding children.

        image: for each child of `first`, the corresponding child of `second`; for the direction of a chain (0, 1) or
        (1, 0). Returns False, and demands nothing, if it contradicts an earlier demand.
        """
        first_root, first_turn = self._find(first, len(image))
        second_root, second_turn = self._find(second, len(image))
        wanted = composed(image, first_turn)
        if first_root is second_root:
            return wanted == second_turn
        self._decider[second_root] = first_root, composed(inverted(second_turn), wanted)
        return True

    def orders(self) -> dict[Node, Order]:
        """Return an arrangement of every tied node that meets all demands."""
        return {node: self._find(node, len(turn))[1] for node, (_, turn) in list(self._decider.items())}

    def _find(self, node: Node, degree: int) -> tuple[Node, Order]:
        """Return the deciding node of `node` and the turn from it, and shorten the path to it."""
        way = []
        root = node
        while root in self._decider and self._decider[root][0] is not root:
            way.append(root)
            root = self._decider[root][0]
        turn = tuple(range(degree))
        self._decider.setdefault(root, (root, turn))
        for passed in reversed(way):
            turn = composed(self._decider[passed][1], turn)
            self._decider[passed] = root, turn
        return root, turn
