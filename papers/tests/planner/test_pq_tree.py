"""A PQ-tree holds exactly the orders in which all accepted sets are consecutive, and is fast at it."""

from __future__ import annotations

import inspect
import itertools
import math
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from batchmaker_papers.planner import pq_tree
from batchmaker_papers.planner.pq_tree import Part, PQTree

FOLDER = str(Path(pq_tree.__file__).parent)


def places_in_all_orders(num_elements: int) -> np.ndarray:
    """Return, per order of the elements, where each one is: [orders, elements]."""
    return np.array(list(itertools.permutations(range(num_elements))), np.int8).reshape(-1, num_elements)


ALL = {size: places_in_all_orders(size) for size in range(1, 9)}


def together(places: np.ndarray, elements: Sequence[int]) -> np.ndarray:
    """Return which of the orders have the elements next to each other."""
    found = places[:, elements]
    return found.max(axis=1) - found.min(axis=1) == len(elements) - 1


def places_in(order: Sequence[int]) -> np.ndarray:
    return np.argsort(np.array(order)).reshape(1, -1)


def num_orders(part: Part) -> int:
    """Return how many orders a part allows."""
    here = 2 if part.in_chain else math.factorial(len(part.parts))
    return here * math.prod(num_orders(below) for below in part.parts)


def family(random_: random.Random, num_elements: int) -> list[list[int]]:
    """Return random sets; in half of the families most of them are slices of one order, so that many hold together."""
    hidden = random_.sample(range(num_elements), num_elements)
    share = random_.choice([0.0, 0.9])
    sets = []
    for _ in range(random_.randint(1, 8)):
        if random_.random() < share:
            begin, end = sorted(random_.sample(range(num_elements + 1), 2))
            sets.append(hidden[begin:end])
        else:
            sets.append(random_.sample(range(num_elements), random_.randint(1, num_elements)))
    return sets


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_elements", "families"), [(1, 5), (2, 50), (3, 300), (4, 700), (5, 900), (6, 900), (7, 500), (8, 300)]
)
def test_exactly_the_families_that_have_an_order_are_accepted(num_elements, families):
    """Each set is reduced, and the tree compared with all orders that are left."""
    random_ = random.Random(num_elements)
    accepted = rejected = 0
    for _ in range(families):
        tree, left = PQTree(num_elements), ALL[num_elements]
        for elements in family(random_, num_elements):
            before, fitting = repr(tree), left[together(left, elements)]
            assert tree.reduce(elements) == (len(fitting) > 0)
            if len(fitting) == 0:
                assert repr(tree) == before
                rejected += 1
                continue
            accepted, left = accepted + 1, fitting
            assert num_orders(tree.part(range(num_elements))) == len(left)
            assert (places_in(tree.frontier()) == left).all(axis=1).any()
    assert accepted
    assert rejected or num_elements < 3


def test_sets_that_overlap_make_a_chain():
    tree = PQTree(5)
    assert repr(tree) == "PQTree (0 1 2 3 4)"
    assert tree.reduce([1, 2])
    assert repr(tree) == "PQTree (0 3 4 (1 2))"
    assert tree.reduce([2, 3])
    assert repr(tree) == "PQTree (0 4 [1 2 3])"
    assert tree.reduce([3, 4, 0])
    assert tree.frontier() in ([1, 2, 3, 0, 4], [1, 2, 3, 4, 0], [0, 4, 3, 2, 1], [4, 0, 3, 2, 1])


def test_three_sets_of_two_that_go_in_a_circle_are_refused():
    tree = PQTree(4)
    assert [tree.reduce(elements) for elements in ([0, 1], [1, 2], [2, 0])] == [True, True, False]
    assert tree.reduce([2, 3])
    assert tree.frontier() in ([0, 1, 2, 3], [3, 2, 1, 0])


def test_what_is_known_already_is_no_change():
    tree = PQTree(6)
    for elements in ([0, 1, 2], [1, 2, 3], [4]):
        assert tree.reduce(elements)
    changes = tree.changes
    assert all(map(tree.reduce, ([1, 2], [0, 1, 2, 3], [], [5], [3, 3], range(6))))
    assert tree.changes == changes == 2


def test_part_of_a_tree_is_what_it_says_of_some_elements():
    tree = PQTree(7)
    for elements in ([0, 1], [1, 2], [2, 3], [4, 5, 6]):
        assert tree.reduce(elements)
    chain, group, single = tree.part([3, 1, 2]), tree.part([4, 5, 6]), tree.part([5])
    assert (chain.in_chain, chain.elements) in ((True, (1, 2, 3)), (True, (3, 2, 1)))
    assert (group.in_chain, sorted(group.elements)) == (False, [4, 5, 6])
    assert (single.parts, single.elements) == ((), (5,))
    parents = tree.parents()
    assert len({parents[part.node] for part in chain.parts}) == 1
    assert {parents[part.node] for part in group.parts} == {group.node}


@pytest.mark.parametrize("elements", [[0, 2], [3, 4], [0, 5]])
def test_part_is_refused_for_elements_that_need_not_be_consecutive(elements):
    tree = PQTree(6)
    for accepted in ([0, 1], [1, 2], [3, 4, 5]):
        assert tree.reduce(accepted)
    with pytest.raises(ValueError, match="is not consecutive in PQTree"):
        tree.part(elements)


def test_elements_that_are_not_there_are_refused():
    tree = PQTree(3)
    with pytest.raises(IndexError, match=r"element -1 is not in range\(3\)"):
        tree.reduce([0, -1])
    assert repr(PQTree(1)) == "PQTree 0"
    assert PQTree(0).frontier() == []


def sets_of(kind: str, num_elements: int) -> list[list[int]]:
    """Return sets that hold together, in an order of no use, over elements in an order of no use."""
    random_ = random.Random(num_elements)
    hidden = random_.sample(range(num_elements), num_elements)
    if kind == "pairs":
        sets = [hidden[begin : begin + 2] for begin in range(num_elements - 1)]
    elif kind == "windows":
        sets = [hidden[begin : begin + random_.randint(2, 16)] for begin in range(0, num_elements - 16, 3)]
    else:
        widths = [2**power for power in range(1, 40) if 2**power <= num_elements]
        sets = [hidden[begin : begin + width] for width in widths for begin in range(0, num_elements, width)]
    random_.shuffle(sets)
    return sets


def reduced(num_elements: int, sets: Sequence[Sequence[int]]) -> PQTree:
    tree = PQTree(num_elements)
    assert all(map(tree.reduce, sets))
    return tree


def lines_run(work: Callable[[], object]) -> int:
    """Return how many lines of the PQ-tree's source run: primitive steps, on any machine."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        lines += event == "line"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(previous)
    return lines


@pytest.mark.parametrize("kind", ["pairs", "windows", pytest.param("halves", marks=pytest.mark.slow)])
def test_steps_grow_with_the_size_of_the_sets_alone(kind):
    per_element = []
    for num_elements in (100, 400, 1600):
        sets = sets_of(kind, num_elements)
        lines = lines_run(lambda count=num_elements, sets=sets: reduced(count, sets).frontier())
        per_element.append(lines / (num_elements + sum(map(len, sets))))
    assert max(per_element) < 1.2 * min(per_element)


def test_ten_thousand_elements_in_a_chain_leave_one_order_and_its_reverse():
    sets = sets_of("pairs", 10_000)
    tree = reduced(10_000, sets)
    order = tree.frontier()
    assert {frozenset(pair) for pair in itertools.pairwise(order)} == {frozenset(elements) for elements in sets}
    assert not tree.reduce([order[0], order[2]])
    assert repr(tree).count("[") == 1


def test_depth_of_a_tree_is_not_limited_by_the_stack():
    depth = 400
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 150)
    try:
        tree = reduced(depth, [range(size) for size in range(2, depth)])
        assert repr(tree).count("(") == depth - 1
        assert places_in(tree.frontier()).max() == depth - 1
        assert len(tree.part(range(depth)).elements) == len(tree.parents()) - depth + 2
        assert tree.reduce([0, depth - 1])  # the innermost beside the outermost: one order is left
        assert repr(tree).count("(") == 0
        assert tree.frontier() in ([*range(depth - 2, -1, -1), depth - 1], [depth - 1, *range(depth - 1)])
        assert not tree.reduce([1, depth - 1])
    finally:
        sys.setrecursionlimit(limit)
