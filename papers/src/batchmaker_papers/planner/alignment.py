"""An order of variables in which batches read and write slices (ED-Batch 3.2 and appendix B).

The columns of a batch are its results and the operands that must be slices. Each column must be consecutive, and all
columns of a batch must have the same order of positions. A PQ-tree holds the orders in which the columns are
consecutive. Its knowledge about one column is passed to the others of the batch, position by position, until all agree.
Then the trees of the columns differ only in the arrangement of their nodes, and `Turns` finds out whether they can be
made equal. So the answer is exact: there is no order if none is found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import final

from batchmaker_papers.planner.pq_tree.nodes import Node
from batchmaker_papers.planner.pq_tree.tree import Order, Part, PQTree
from batchmaker_papers.planner.turns import Turns

Column = tuple[int, ...]
"""Variables by position of the batch, without repeats."""


def aligned_order(
    num_variables: int, together: Sequence[Column], batches: Sequence[Sequence[Column]]
) -> list[int] | None:
    """Return an order in which every column is a slice and all columns of a batch agree; None if none exists.

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
    """Pass the tree's knowledge about one column of a batch to the others; return False on conflict."""
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
    """Yield consecutive sets of a part.

    Together with the whole they exclude every order that the part excludes.
    """
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
    """Ties parts of a tree that no longer changes."""

    __slots__ = ("_parents", "_place", "_turns")

    def __init__(self, tree: PQTree) -> None:
        self._parents = tree.parents()
        self._place = {variable: number for number, variable in enumerate(tree.frontier())}
        self._turns = Turns()

    def tie(self, first: Part, second: Part, image: dict[int, int]) -> bool:
        """Demand that two parts of the same shape are arranged alike; return whether that is possible.

        image: the variable of `second` for each variable of `first`.
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
        """Return arrangements of the tied nodes."""
        return self._turns.orders()

    def _as_they_lie(self, part: Part) -> list[Part]:
        return sorted(part.parts, key=lambda below: self._place[below.elements[0]])
