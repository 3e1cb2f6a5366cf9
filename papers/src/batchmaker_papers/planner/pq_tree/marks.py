"""Finds the nodes of a PQ-tree that a set of leaves touches, and whether the set can be made consecutive.

Changes nothing. `climb` is Booth & Lueker's bubbling: from the leaves upward, until all paths have met. It finds
parents that are not stored: a child of a Q-node learns its parent from a neighbour. `label` then decides bottom-up for
each node whether its leaves are all in the set (full), or can be ordered so that those in the set are at one side
(partial). Both visit only nodes that have leaves in the set, and at most as many nodes above them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from batchmaker_papers.planner.pq_tree.nodes import Kind, Node, beyond, chain


class Label(Enum):
    """The part of the leaves below a node that is in the set. Nodes without a label have no leaf in it."""

    FULL = "full"
    PARTIAL = "partial"


@dataclass(slots=True)
class Mark:
    """The state of one node while one set is reduced.

    parent: as found by climbing; None while blocked and in the root. pending: number of children with leaves in the set
    whose label is unknown. leaves: leaves of the set counted below. full, partial: children, by label.
    """

    blocked: bool = False
    parent: Node | None = None
    pending: int = 0
    leaves: int = 0
    label: Label | None = None
    full: list[Node] = field(default_factory=list)
    partial: list[Node] = field(default_factory=list)


Marks = dict[Node, Mark]


def climb(leaves: Sequence[Node]) -> Marks | None:
    """Return a mark for each node on the paths from the leaves to their meeting point; None if they cannot meet.

    If they meet among the inner children of a Q-node whose parent remained unknown, these children get a temporary
    Q-node as parent, which is not in the tree. leaves: two or more, without repeats.
    """
    marks = {leaf: Mark() for leaf in leaves}
    queue = deque(leaves)
    blocks = 0  # groups of neighbours that wait for one with a known parent
    past_root = 0
    while len(queue) + blocks + past_root > 1:
        if not queue:
            return None
        node = queue.popleft()
        neighbours = [near for near in node.near if near is not None and near in marks]
        waiting = [near for near in neighbours if marks[near].blocked]
        through = [marks[near].parent for near in neighbours if marks[near].parent is not None]
        if node.is_inner and not through:
            marks[node].blocked = True
            blocks += 1 - len(waiting)
            continue
        parent = through[0] if node.is_inner else node.parent
        released = [node, *_blocked_beyond(node, waiting, marks)]
        blocks -= len(waiting)
        for child in released:
            marks[child].blocked, marks[child].parent = False, parent
        if parent is None:
            past_root = 1
            continue
        if parent not in marks:
            marks[parent] = Mark()
            queue.append(parent)
        marks[parent].pending += len(released)
    if blocks:
        _stand_in(marks)
    return marks


def _blocked_beyond(node: Node, waiting: Iterable[Node], marks: Marks) -> Iterable[Node]:
    """Yield the blocked nodes that are connected to `node` through blocked neighbours."""
    for near in waiting:
        for other in chain(near, node):
            if other not in marks or not marks[other].blocked:
                break
            yield other


def _stand_in(marks: Marks) -> None:
    """Give the nodes that are still blocked a temporary parent."""
    parent = Node(Kind.Q)
    blocked = [mark for mark in marks.values() if mark.blocked]
    for mark in blocked:
        mark.parent = parent
    marks[parent] = Mark(pending=len(blocked))


def label(leaves: Sequence[Node], marks: Marks) -> list[Node] | None:
    """Label the marked nodes; return the nodes with touched children, the lowest first.

    The last one is the root of the set: the lowest node with all of its leaves below. Returns None if no order of the
    tree has them together.
    """
    ready = deque(leaves)
    touched = []
    for leaf in leaves:
        marks[leaf].leaves = 1
    while ready:
        node = ready.popleft()
        mark = marks[node]
        if node.kind is not Kind.LEAF:
            touched.append(node)
        if mark.leaves == len(leaves):
            mark.label = _root_label(node, mark, marks)
            return touched if mark.label is not None else None
        mark.label = _side_label(node, mark, marks)
        if mark.label is None or mark.parent is None:
            return None
        above = marks[mark.parent]
        (above.full if mark.label is Label.FULL else above.partial).append(node)
        above.leaves += mark.leaves
        above.pending -= 1
        if above.pending == 0:
            ready.append(mark.parent)
    return None


def _side_label(node: Node, mark: Mark, marks: Marks) -> Label | None:
    """Return the label of a node if leaves outside the set may be at one side only; None if it has no order."""
    if node.kind is Kind.LEAF:
        return Label.FULL
    if len(mark.partial) > 1:
        return None
    if node.kind is Kind.P:
        return Label.FULL if len(mark.full) == len(node.children) else Label.PARTIAL
    start = touched_end(node, mark, marks)
    if start is None:
        return None
    run = list(islice(chain(start, None), len(mark.full) + len(mark.partial)))
    if run[: len(mark.full)] != _full_only(run, marks) or run[len(mark.full) :] != mark.partial:
        return None
    at_other_end = beyond(run[-1], run[-2] if len(run) > 1 else None) is None
    return Label.FULL if at_other_end and not mark.partial else Label.PARTIAL


def _root_label(node: Node, mark: Mark, marks: Marks) -> Label | None:
    """Return the label of the set's root, where leaves outside may be at both sides; None if it has no order."""
    if len(mark.partial) > 2:
        return None
    if node.kind is Kind.P:
        return Label.FULL if len(mark.full) == len(node.children) else Label.PARTIAL
    return Label.PARTIAL if len(run_of(mark, marks)) == len(mark.full) + len(mark.partial) else None


def touched_end(node: Node, mark: Mark, marks: Marks) -> Node | None:
    """Return the end of a Q-node at which the touched children begin, None if no end is touched."""
    wanted = Label.FULL if mark.full else Label.PARTIAL
    return next((end for end in node.ends if end in marks and marks[end].label is wanted), None)


def _full_only(nodes: Iterable[Node], marks: Marks) -> list[Node]:
    return [node for node in nodes if node in marks and marks[node].label is Label.FULL]


def run_of(mark: Mark, marks: Marks) -> list[Node]:
    """Return neighbours among a Q-node's touched children, in order, with partial ones only at the ends.

    They are all of its touched children if these can be made consecutive.
    """
    if not mark.full:
        first = mark.partial[0]
        return [first, *(near for near in first.near if near in mark.partial)]
    middle = mark.full[0]
    sides = []
    for near in middle.near:
        side: list[Node] = []
        for node in chain(near, middle) if near is not None else ():
            if node not in marks or marks[node].label is None:
                break
            side.append(node)
            if marks[node].label is Label.PARTIAL:
                break
        sides.append(side)
    return [*reversed(sides[0]), middle, *sides[1]]
