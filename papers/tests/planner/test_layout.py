"""A layout gives every batch its results in a slice, as many operands as can be had, and never another result."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmaker.errors import ModelError
from batchmaker_papers.planner import layout as layout_module
from batchmaker_papers.planner.batches import Batch, Operand, Variable
from batchmaker_papers.planner.layout import Access, Layout, plan_layout

VIEW, BROADCAST, GATHER, EXTERNAL = Access.VIEW, Access.BROADCAST, Access.GATHER, Access.EXTERNAL


def batch(results: Sequence[int], *operands: Sequence[int | None], costs: Sequence[float] | None = None) -> Batch:
    costs = costs or [1.0] * len(operands)
    return Batch(tuple(results), tuple(Operand(tuple(each), cost) for each, cost in zip(operands, costs, strict=True)))


def planned(*batches: Batch, sizes: Sequence[int] | None = None) -> Layout:
    """Lay out the variables that the batches name, and check what the layout says of them."""
    named = [i for each in batches for column in columns_of(each) for i in column if i is not None]
    variables = [Variable(size) for size in sizes or [1] * (1 + max(named))]
    layout = plan_layout(variables, batches)
    check(layout, variables, batches)
    return layout


def columns_of(one: Batch) -> list[tuple[int | None, ...]]:
    return [one.results, *(operand.variables for operand in one.operands)]


def accesses(layout: Layout) -> list[list[Access]]:
    return [[operand.access for operand in placed.operands] for placed in layout.batches]


def check(layout: Layout, variables: Sequence[Variable], batches: Sequence[Batch]) -> None:
    """Compare everything that a layout says with its order."""
    assert sorted(layout.order) == list(range(len(variables)))
    for region in {variable.region for variable in variables}:
        inside = [index for index in layout.order if variables[index].region == region]
        assert np.diff([layout.order.index(index) for index in inside]).tolist() == [1] * (len(inside) - 1)
        ends = itertools.accumulate(variables[index].size for index in inside)
        assert [layout.offsets[index] for index in inside] == [0, *ends][:-1]
    for one, placed in zip(batches, layout.batches, strict=True):
        width = len(one.results)
        ordered = [tuple(column[position] for position in placed.positions) for column in columns_of(one)]
        assert sorted(placed.positions) == list(range(width))
        assert layout.order[placed.first : placed.first + width] == ordered[0]
        for wanted, operand in zip(ordered[1:], placed.operands, strict=True):
            if operand.access is VIEW:
                assert layout.order[operand.first : operand.first + width] == wanted
                assert len({variables[index] for index in wanted}) == 1
            elif operand.access is BROADCAST:
                assert set(wanted) == {layout.order[operand.first]}
            else:
                assert operand.first is None
                assert (operand.access is EXTERNAL) == (set(wanted) == {None})
    if len(set(variables)) == 1:
        assert layout.gather_cost == cost_of(layout.order, batches)


def cost_of(order: Sequence[int], batches: Sequence[Batch]) -> float | None:
    """Return what the operands that need a gather cost, None if the results of some batch are no slice."""
    place = {index: number for number, index in enumerate(order)}
    total = 0.0
    for one in batches:
        positions = sorted(range(len(one.results)), key=lambda position: place[one.results[position]])
        if not consecutive([place[one.results[position]] for position in positions]):
            return None
        for operand in one.operands:
            wanted = [operand.variables[position] for position in positions]
            if len(set(wanted)) > 1 and (None in wanted or not consecutive([place[index] for index in wanted])):
                total += operand.gather_cost
    return total


def consecutive(places: Sequence[int]) -> bool:
    return all(after == before + 1 for before, after in itertools.pairwise(places))


def test_papers_example_needs_no_gather():
    first, second = batch([4, 5], [3, 1]), batch([6, 8, 7], [4, 5, 2])
    assert cost_of([0, 1, 2, 3, 4, 5, 7, 8, 6], [first, second]) == 2
    assert cost_of(range(9), [first]) == 1
    assert accesses(planned(first, second)) == [[VIEW], [VIEW]]


def test_operands_that_run_the_same_way_are_all_slices():
    assert accesses(planned(batch([4, 5, 6], [1, 2, 3]), batch([8, 9], [1, 2], [5, 6]))) == [[VIEW], [VIEW, VIEW]]


def test_operands_that_would_run_both_ways_cost_one_gather():
    layout = planned(batch([4, 5, 6], [1, 2, 3]), batch([7, 8], [5, 6], [2, 1]))
    assert layout.gather_cost == 1


def test_neighbours_on_both_sides_cost_one_gather():
    """3-5 and 4-6 have one direction, and 3-4 lie together: then 5 and 6 cannot lie beside 3 and 4 both."""
    both = batch([4, 6], [1, 2], [3, 5]), batch([8, 10], [3, 4], [7, 9])
    layout = planned(*both)
    assert layout.gather_cost == 1
    assert layout.batches[0].operands[0].access is VIEW
    assert layout.batches[1].operands[1].access is VIEW


@pytest.mark.parametrize("dear", range(3))
def test_what_costs_most_is_kept(dear):
    costs = [3.0 if which == dear else 2.0 for which in range(3)]
    layout = planned(batch([4, 5, 6], [1, 2, 3], costs=costs[:1]), batch([7, 8], [5, 6], [2, 1], costs=costs[1:]))
    assert layout.gather_cost == 2
    assert list(itertools.chain(*accesses(layout)))[dear] is VIEW


def test_what_costs_most_is_given_up_where_that_saves_more():
    """2 lies beside 1 or beside 0, since 0 and 1 lie together, and so do 2 and 3."""
    dear = batch([4, 5], [1, 2], costs=[3.0])
    cheap = batch([6, 7], [0, 2], costs=[2.0]), batch([8, 9], [2, 0], costs=[2.0])
    layout = planned(batch([0, 1]), batch([2, 3]), dear, *cheap)
    assert accesses(layout)[2:] == [[GATHER], [VIEW], [VIEW]]


def test_a_gather_costs_the_elements_that_it_copies_unless_told():
    one = Batch((1, 2, 3), (Operand((0, None, 4)), Operand((0, None, 4), gather_cost=1.0)))
    assert plan_layout([Variable(size) for size in (8, 2, 2, 2, 8)], [one]).gather_cost == 17


def test_results_are_permuted_together_with_what_their_batch_reads():
    layout = planned(batch([3, 4, 5], [2, 0, 1]), batch([6, 7, 8], [4, 5, 3]))
    assert layout.gather_cost == 0
    first, second = layout.batches
    assert [(2, 0, 1)[position] for position in first.positions] in ([0, 1, 2], [2, 1, 0])
    assert [(4, 5, 3)[position] for position in second.positions] == [
        (3, 4, 5)[position] for position in first.positions
    ]


def test_one_variable_at_all_positions_is_repeated_without_a_copy():
    layout = planned(batch([1, 2, 3], [0, 0, 0], [None, None, None]), batch([4], [0], [None]))
    assert accesses(layout) == [[BROADCAST, EXTERNAL], [VIEW, EXTERNAL]]


def test_what_is_partly_outside_or_has_repeats_is_gathered():
    assert accesses(planned(batch([3, 4, 5], [0, None, 1], [0, 1, 0]))) == [[GATHER, GATHER]]


def test_values_of_several_sizes_are_gathered_and_offsets_count_elements():
    sizes = [3, 1, 2, 2, 2, 2]
    layout = planned(batch([2, 3], [0, 1]), batch([4, 5], [2, 3]), sizes=sizes)
    assert accesses(layout) == [[GATHER], [VIEW]]
    assert max(layout.offsets) == sum(sizes) - sizes[layout.order[-1]]


def test_regions_lie_apart_and_are_never_read_as_one_slice():
    variables = [Variable(region=index % 2) for index in range(8)]
    batches = [batch([0, 2], [4, 6], [1, 3]), batch([5, 7], [1, 4])]
    layout = plan_layout(variables, batches)
    check(layout, variables, batches)
    assert accesses(layout) == [[VIEW, VIEW], [GATHER]]
    assert sorted(layout.offsets) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_nothing_to_place_is_no_error():
    assert plan_layout([], []) == Layout((), (), (), 0.0)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([batch([0, 4])], "batch 0 names variable 4, there are 4"),
        ([batch([0], [-1])], "batch 0 names variable -1, there are 4"),
        ([batch([0]), batch([1, 0])], "variable 0 is computed by batch 0 and by batch 1"),
        ([batch([0, 0])], "variable 0 is computed by batch 0 and by batch 0"),
        ([batch([0, 1], [2])], "batch 0, operand 0: 1 variables for 2 results"),
        ([batch([])], "batch 0 computes nothing"),
        ([batch([2, 3])], "batch 0 computes variables of several sizes or regions"),
        ([batch([0], [1], costs=[-1.0])], "batch 0, operand 0: a gather costs -1.0"),
    ],
)
def test_batches_that_cannot_be_laid_out_are_refused(batches, message):
    with pytest.raises(ModelError, match=message):
        plan_layout([Variable(), Variable(), Variable(), Variable(2)], batches)


def program(random_: random.Random, num_variables: int, width: int = 4) -> list[Batch]:
    """Return batches whose operands mostly are other variables in any order, some of them of the batch itself."""
    left = random_.sample(range(num_variables), num_variables)
    batches = []
    while left and len(batches) < 4:
        results = [left.pop() for _ in range(min(random_.randint(1, width), len(left)))]
        operands: list[list[int | None]] = []
        for _ in range(random_.randint(0, 2)):
            kind = random_.choices(["distinct", "one", "mixed", "outside"], [15, 2, 2, 1])[0]
            distinct = random_.sample(range(num_variables), len(results))
            operands.append({
                "distinct": distinct,
                "one": distinct[:1] * len(results),
                "mixed": [random_.choice([None, index]) for index in distinct],
                "outside": [None] * len(results),
            }[kind])  # fmt: skip
        batches.append(batch(results, *operands, costs=[float(random_.randint(1, 3)) for _ in operands]))
    return batches


@pytest.mark.parametrize(("num_variables", "programs"), [(3, 100), (4, 150), (5, 60), (6, 20)])
def test_no_order_at_all_costs_less(num_variables, programs):
    random_ = random.Random(num_variables)
    conflicts = 0
    for _ in range(programs):
        batches = program(random_, num_variables)
        layout = plan_layout([Variable()] * num_variables, batches)
        check(layout, [Variable()] * num_variables, batches)
        costs = [cost_of(order, batches) for order in itertools.permutations(range(num_variables))]
        assert layout.gather_cost == min(cost for cost in costs if cost is not None)
        conflicts += layout.gather_cost > 0
    assert 0 < conflicts < programs


def sorted_program(random_: random.Random, num_batches: int) -> tuple[int, list[Batch]]:
    """Return batches that are slices as given for most of what they read, and how many variables they name."""
    batches, begin = [], random_.randint(4, 8)
    for _ in range(num_batches):
        width = random_.randint(1, 4)
        operands = []
        for _ in range(random_.randint(1, 2)):
            first = random_.randint(0, begin - width)
            slice_ = list(range(first, first + width))
            operands.append(slice_ if random_.random() < 0.5 else random_.sample(range(begin), width))
        batches.append(batch(range(begin, begin + width), *operands))
        begin += width
    return begin, batches


@pytest.mark.parametrize("most_work", [0, 500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_order_as_given_never_costs_less_however_little_is_tried(most_work, monkeypatch):
    monkeypatch.setattr(layout_module, "MOST_WORK", most_work)
    random_ = random.Random(most_work)
    better = 0
    for _ in range(30):
        count, batches = sorted_program(random_, 8)
        layout = plan_layout([Variable()] * count, batches)
        check(layout, [Variable()] * count, batches)
        as_given = cost_of(range(count), batches)
        assert as_given is not None
        assert layout.gather_cost <= as_given
        better += layout.gather_cost < as_given
    assert better > 5


def test_a_long_chain_of_batches_is_slices_throughout():
    """Fifty batches of eight, each of which reads what the one before it computed, in another order each time."""
    random_ = random.Random(0)
    batches = []
    for number in range(1, 51):
        order = random_.sample(range(8), 8)
        below = [8 * (number - 1) + place for place in order]
        batches.append(batch([8 * number + place for place in random_.sample(order, 8)], below))
    assert planned(*batches).gather_cost == 0


@st.composite
def programs(draw) -> tuple[list[Variable], list[Batch]]:
    """Draw batches in an order in which they can run: each reads what was there before. Sizes are 1 or 2."""
    variables = [Variable(draw(st.sampled_from([1, 2]))) for _ in range(draw(st.integers(2, 6)))]
    batches = []
    for _ in range(draw(st.integers(1, 6))):
        size, width = draw(st.sampled_from([1, 2])), draw(st.integers(1, 4))
        known = [None, *(index for index, variable in enumerate(variables) if variable.size == size)]
        operands = draw(st.lists(st.lists(st.sampled_from(known), min_size=width, max_size=width), max_size=3))
        results = draw(st.permutations(range(len(variables), len(variables) + width)))
        variables += [Variable(size)] * width
        batches.append(batch(results, *operands))
    return variables, batches


def computed(variables: Sequence[Variable], batches: Sequence[Batch]) -> list[np.ndarray]:
    """Return all variables, computed one by one; those that nothing computes are 1, 2, ..."""
    values = [np.full(variable.size, 1.0 + index) for index, variable in enumerate(variables)]
    for one in batches:
        for position, result in enumerate(one.results):
            operands = [operand.variables[position] for operand in one.operands]
            read = [outside(position) if index is None else values[index] for index in operands]
            values[result] = 1.0 + sum((which + 2) * value for which, value in enumerate(read)) + values[result] * 0
    return values


def outside(position: int) -> float:
    return 0.5 + position


def computed_in_slices(layout: Layout, variables: Sequence[Variable], batches: Sequence[Batch]) -> list[np.ndarray]:
    """Return all variables, computed batch by batch in one piece of memory, as the layout says."""
    memory = np.concatenate([np.full(variables[index].size, 1.0 + index) for index in layout.order])
    for one, placed in zip(batches, layout.batches, strict=True):
        size, width = variables[one.results[0]].size, len(one.results)

        def block(first: int, width: int, size: int = size) -> np.ndarray:
            begin = layout.offsets[layout.order[first]]
            return memory[begin : begin + width * size].reshape(width, size)

        read = []
        for operand, at in zip(one.operands, placed.operands, strict=True):
            wanted = [operand.variables[position] for position in placed.positions]
            if at.access is VIEW:
                read.append(block(at.first, width))
            elif at.access is BROADCAST:
                read.append(block(at.first, 1))
            else:
                pieces = [
                    np.full((1, size), outside(position)) if index is None else block(layout.order.index(index), 1)
                    for index, position in zip(wanted, placed.positions, strict=True)
                ]
                read.append(np.concatenate(pieces))
        block(placed.first, width)[:] = 1.0 + sum((which + 2) * value for which, value in enumerate(read))
    return [memory[begin : begin + v.size] for begin, v in zip(layout.offsets, variables, strict=True)]


@settings(max_examples=150, deadline=None)
@given(programs())
def test_results_are_the_same_whatever_is_a_slice(drawn):
    variables, batches = drawn
    layout = plan_layout(variables, batches)
    check(layout, variables, batches)
    for wanted, found in zip(computed(variables, batches), computed_in_slices(layout, variables, batches), strict=True):
        np.testing.assert_allclose(found, wanted)
