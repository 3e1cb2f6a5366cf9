"""Changes a PQ-tree so that a set is consecutive in every remaining order. The set must allow this.

Applies Booth & Lueker's templates from the lowest touched node to the root of the set. Their numbers are given where
they are applied; full nodes (L1, P1, Q1) need nothing. A partial node becomes a Q-node whose first end is outside the
set and whose last end is in it. The node above takes that Q-node's children into its own chain. No template can fail
after `marks.label`.
"""

from __future__ import annotations

from batchmaker_papers.planner.pq_tree.marks import Label, Mark, Marks, run_of, touched_end
from batchmaker_papers.planner.pq_tree.nodes import Kind, Node, beyond, substitute

OUTSIDE, INSIDE = 0, 1
"""The two ends of a partial Q-node."""


def rearrange(touched: list[Node], marks: Marks) -> bool:
    """Apply the templates to the labelled nodes, the root of the set last; return whether the tree has changed."""
    *below, root = touched
    for node in below:
        mark = marks[node]
        if mark.label is Label.FULL:
            continue
        partial = _side_of_p(node, mark) if node.kind is Kind.P else _side_of_q(node, mark, marks)
        marks[partial] = mark
        if mark.parent is not None:
            above = marks[mark.parent].partial
            above[above.index(node)] = partial
    mark = marks[root]
    if mark.label is Label.FULL or (root.kind is Kind.Q and not mark.partial):
        return False
    if root.kind is Kind.P:
        _root_p(root, mark)
    else:
        _root_q(root, mark, marks)
    return True


def _side_of_p(node: Node, mark: Mark) -> Node:
    """Turn a P-node below the root of the set into a partial Q-node (templates P3 and P5)."""
    partial = mark.partial[0] if mark.partial else None
    if partial is not None:
        del node.children[partial]
    full = _take_full(node, mark)
    chain = partial or Node(Kind.Q)
    substitute(node, chain)
    outside = node if len(node.children) > 1 else next(iter(node.children), None)
    if partial is None:
        assert outside is not None  # otherwise the node would be full
        assert full is not None  # otherwise the node would not be touched
        chain.begin(outside, full)
        return chain
    if outside is not None:
        chain.append(OUTSIDE, outside)
    if full is not None:
        chain.append(INSIDE, full)
    return chain


def _side_of_q(node: Node, mark: Mark, marks: Marks) -> Node:
    """Turn a Q-node below the root of the set into a partial one (template Q2)."""
    if node.ends[INSIDE] is not touched_end(node, mark, marks):
        node.ends.reverse()
    for partial in mark.partial:
        _splice(node, partial, next((near for near in partial.near if near in mark.full), None))
    return node


def _root_p(node: Node, mark: Mark) -> None:
    """Gather the full children of the set's root under one node (P2), beside or between partial ones (P4, P6)."""
    full = _take_full(node, mark)
    if not mark.partial:
        assert full is not None  # the root of a set has two touched children
        node.adopt(full)
        return
    chain, *others = mark.partial
    if full is not None:
        chain.append(INSIDE, full)
    for other in others:
        del node.children[other]
        chain.extend(INSIDE, other)
    if len(node.children) == 1:
        del node.children[chain]
        substitute(node, chain)


def _root_q(node: Node, mark: Mark, marks: Marks) -> None:
    """Take the children of one or two partial nodes into the chain of the set's root (Q2 at the root, Q3)."""
    run = run_of(mark, marks)
    if run[-1] in mark.partial:
        _splice(node, run[-1], run[-2])
        run[-1] = run[-1].ends[INSIDE]
    if run[0] in mark.partial:
        _splice(node, run[0], run[1])


def _take_full(node: Node, mark: Mark) -> Node | None:
    """Take the full children out of a P-node and return them as one loose node, None if there are none."""
    for child in mark.full:
        del node.children[child]
    if len(mark.full) < 2:
        return mark.full[0] if mark.full else None
    group = Node(Kind.P)
    for child in mark.full:
        group.adopt(child)
    return group


def _splice(node: Node, partial: Node, inner: Node | None) -> None:
    """Put the children of a partial Q-node into the chain of its parent, those in the set beside `inner`.

    inner: the neighbour of `partial` that is in the set, None if `partial` is at the end of the chain.
    """
    outer = beyond(partial, inner)
    for end, neighbour in ((partial.ends[INSIDE], inner), (partial.ends[OUTSIDE], outer)):
        end.near[end.near.index(None)] = neighbour
        if neighbour is None:
            node.ends[node.ends.index(partial)] = end
            end.parent = node
        else:
            neighbour.near[neighbour.near.index(partial)] = end
            end.parent = None
