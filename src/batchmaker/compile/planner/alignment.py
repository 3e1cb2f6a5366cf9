"""An order of variables in which batches find what they read and write as slices (ED-Batch 3.2 and appendix B).

The columns of a batch, its results and the operands that shall be slices, must each be consecutive, all in the same
order of positions. A PQ-tree holds the orders in which they are consecutive. What it says of one column is told to
the others of the batch, position by position, until all say the same. Then the trees of the columns differ only in how
their nodes are turned, and `Turns` finds out whether they can be turned to agree. So the answer is exact: there is no
order if none is found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import final

from batchmaker.compile.planner.pq_tree.nodes import Node
from batchmaker.compile.planner.pq_tree.tree import Order, Part, PQTree
from batchmaker.compile.planner.turns import Turns

Column = tuple[int, ...]
"""Variables by the position of the batch, without repeats."""


def aligned_order(
    num_variables: int, together: Sequence[Column], batches: Sequence[Sequence[Column]]
) -> list[int] | None:
    """Return an order in which every column is a slice and all columns of a batch have one order; None if none exists.

    together: further sets that must be consecutive.
    """
    tree = PQTree(num_variables)
    if not all(tree.reduce(column) for column in [*together, *(column for batch in batches for column in batch)]):
        return None
    wide = [batch for batch in batches if len(batch) > 1 and len(batch[0]) > 1]
    if not _agree(tree, wide):
        return None
    turning = _Turning(tree)
    for first, *others in wide:
        for other in others:
            if not turning.tie(tree.part(first), tree.part(other), dict(zip(first, other, strict=True))):
                return None
    return tree.frontier(turning.orders())


def _agree(tree: PQTree, batches: Sequence[Sequence[Column]]) -> bool:
    """Tell all columns of a batch what the tree says of one of them, until nothing is new; return whether it can be."""
    readers: dict[int, set[int]] = defaultdict(set)
    for number, batch in enumerate(batches):
        for column in batch:
            for variable in column:
                readers[variable].add(number)
    waiting = dict.fromkeys(range(len(batches)))
    while waiting:
        number = next(iter(waiting))
        del waiting[number]
        for column in batches[number]:
            position = {variable: place for place, variable in enumerate(column)}
            for subset in _consecutive(tree.part(column)):
                places = [position[variable] for variable in subset]
                for other in batches[number]:
                    before = tree.changes
                    image = [other[place] for place in places]
                    if other is not column and not tree.reduce(image):
                        return False
                    if tree.changes > before:
                        waiting.update(dict.fromkeys(sorted({n for variable in image for n in readers[variable]})))
    return True


def _consecutive(whole: Part) -> Iterator[tuple[int, ...]]:
    """Yield sets that are consecutive in a part; together with the whole they rule out all that the part does."""
    stack = [whole]
    while stack:
        part = stack.pop()
        if part.in_chain:
            for left, right in zip(part.parts, part.parts[1:], strict=False):
                yield left.elements + right.elements
        elif part.parts and part is not whole:
            yield part.elements
        stack += part.parts


@final
class _Turning:
    """Ties the parts of a tree that does not change any more."""

    __slots__ = ("_parents", "_place", "_turns")

    def __init__(self, tree: PQTree) -> None:
        self._parents = tree.parents()
        self._place = {variable: number for number, variable in enumerate(tree.frontier())}
        self._turns = Turns()

    def tie(self, first: Part, second: Part, image: dict[int, int]) -> bool:
        """Demand that two parts of the same shape are arranged alike; return whether that is possible.

        image: the variable of `second` that belongs to each one of `first`.
        """
        stack = [(first, second)]
        while stack:
            one, other = stack.pop()
            if not one.parts:
                continue
            ones, others = self._as_they_lie(one), self._as_they_lie(other)
            owner = {element: number for number, part in enumerate(others) for element in part.elements}
            corresponding = tuple(owner[image[part.elements[0]]] for part in ones)
            stack += [(part, others[number]) for part, number in zip(ones, corresponding, strict=True)]
            if one.in_chain:
                corresponding = (0, 1) if corresponding[0] == 0 else (1, 0)
            if not self._turns.tie(self._parents[ones[0].node], self._parents[others[0].node], corresponding):
                return False
        return True

    def orders(self) -> dict[Node, Order]:
        """Return how to arrange the nodes that were tied."""
        return self._turns.orders()

    def _as_they_lie(self, part: Part) -> list[Part]:
        return sorted(part.parts, key=lambda below: self._place[below.elements[0]])
