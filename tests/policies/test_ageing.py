"""What is passed over too often goes first."""

from __future__ import annotations

from batchmaker.policies.ageing import Ageing


def test_the_policys_order_stands_until_a_type_has_lost_patience():
    ageing = Ageing(patience=3)
    for _ in range(3):
        assert list(ageing.order([5, 7])) == [5, 7]
        ageing.ran(5, [5, 7])
    assert list(ageing.order([5, 7])) == [7, 5]
    ageing.ran(7, [5, 7])
    assert list(ageing.order([5, 7])) == [5, 7]


def test_only_times_in_a_row_count():
    ageing = Ageing(patience=2)
    for ranked in ([5, 7], [5], [5, 7]):
        ageing.ran(5, ranked)
    assert list(ageing.order([5, 7])) == [5, 7]


def test_of_two_that_have_lost_patience_the_one_that_waits_longer_goes_first():
    ageing = Ageing(patience=2)
    ageing.ran(1, [1, 2])
    ageing.ran(1, [1, 3, 2])
    ageing.ran(1, [1, 3, 2])
    assert list(ageing.order([1, 3, 2])) == [2, 3, 1]
