"""What is passed over too often goes first."""

from __future__ import annotations

import numpy as np

from batchmaker.policies.ageing import note_ran, overdue_first


class Types:
    """Ten cell types, and how often each was passed over."""

    def __init__(self, patience: int) -> None:
        self.patience, self.passed = patience, np.zeros(10, np.int64)

    def order(self, ranked: list[int]) -> list[int]:
        return overdue_first(np.array(ranked, np.int64), self.passed, self.patience).tolist()

    def ran(self, chosen: int, ranked: list[int]) -> None:
        note_ran(self.passed, np.array(ranked, np.int64), chosen)


def test_the_policys_order_stands_until_a_type_has_lost_patience():
    types = Types(patience=3)
    for _ in range(3):
        assert types.order([5, 7]) == [5, 7]
        types.ran(5, [5, 7])
    assert types.order([5, 7]) == [7, 5]
    types.ran(7, [5, 7])
    assert types.order([5, 7]) == [5, 7]


def test_only_times_in_a_row_count():
    types = Types(patience=2)
    for ranked in ([5, 7], [5], [5, 7]):
        types.ran(5, ranked)
    assert types.order([5, 7]) == [5, 7]


def test_of_two_that_have_lost_patience_the_one_that_waits_longer_goes_first():
    types = Types(patience=2)
    types.ran(1, [1, 2])
    types.ran(1, [1, 3, 2])
    types.ran(1, [1, 3, 2])
    assert types.order([1, 3, 2]) == [2, 3, 1]
