"""What the sufficient-condition policy ranks by, and which policies deadlines matter to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from batchmaker.cli.simulate.study import looks_at_deadlines
from batchmaker.errors import OptionError
from batchmaker.policies import SufficientPolicy, make


def view(*types: tuple[int, int], max_batch: int = 10) -> SimpleNamespace:
    """types: (ready, independent) of each."""
    return SimpleNamespace(
        cells=[SimpleNamespace(max_batch=max_batch, priority=0)] * len(types),
        ready=[number for number, (ready, _) in enumerate(types) if ready],
        num_ready=lambda number: types[number][0],
        frontiers=SimpleNamespace(independent=lambda number: types[number][1]),
    )


@pytest.mark.parametrize(
    ("types", "order"),
    [
        ([(9, 10), (1, 1)], [1, 0]),
        ([(1, 3), (2, 6)], [1, 0]),
        ([(2, 6), (2, 6), (1, 3)], [0, 1, 2]),
        ([(0, 5), (1, 5)], [1]),
        ([(0, 0), (0, 3)], []),
    ],
)
def test_the_largest_ready_share_then_the_most_ready_then_the_lowest_number(types, order):
    assert list(SufficientPolicy().rank(view(*types))) == order


def test_a_type_that_fills_a_batch_goes_first_and_among_full_ones_the_order_stands():
    types = ((9, 10), (4, 20), (1, 1), (5, 10))
    assert list(SufficientPolicy().rank(view(*types))) == [2, 0, 3, 1]
    assert list(SufficientPolicy().rank(view(*types, max_batch=5))) == [0, 3, 2, 1]
    assert list(SufficientPolicy().rank(view(*types, max_batch=4))) == [0, 3, 1, 2]


def test_it_is_found_by_name_and_wrong_steps_are_refused():
    assert make("sufficient:max_steps=3").max_steps == 3
    with pytest.raises(OptionError, match="max_steps"):
        make("sufficient:max_steps=0")


@pytest.mark.parametrize(
    ("name", "looks"), [("cellular", False), ("agenda", False), ("lazy", True), ("sufficient", True)]
)
def test_simulations_know_which_policies_deadlines_change(name, looks):
    assert looks_at_deadlines(make(name)) is looks
