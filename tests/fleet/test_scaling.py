"""How many replicas a rule wants."""

from __future__ import annotations

import pytest

from batchmaker.errors import OptionError
from batchmaker.fleet.scaling import Autoscaler, ScalingRule


def test_a_fleet_grows_at_once_to_what_the_target_needs() -> None:
    scaler = Autoscaler(ScalingRule("work", target=0.5, most=10))
    assert [scaler.wanted(at_s, work) for at_s, work in ((0, 0.0), (1, 0.6), (2, 2.1), (3, 99.0))] == [1, 2, 5, 10]


def test_a_fleet_shrinks_only_to_what_was_enough_for_the_whole_cool_down() -> None:
    scaler = Autoscaler(ScalingRule("sequences", target=10, least=2, cool_s=3.0))
    told = [(0, 50), (1, 10), (2, 30), (3, 10), (4, 10), (5, 10), (6, 10), (7, 0)]
    assert [scaler.wanted(at_s, open_now) for at_s, open_now in told] == [5, 5, 5, 5, 4, 3, 2, 2]


def test_a_fleet_shrinks_by_a_twentieth_at_a_look() -> None:
    scaler = Autoscaler(ScalingRule("work", target=1.0, cool_s=0.0), replicas=100)
    assert [scaler.wanted(at_s, 0.0) for at_s in range(1, 5)] == [100, 95, 91, 87]


def test_what_a_fleet_has_at_first_was_enough_so_far() -> None:
    scaler = Autoscaler(ScalingRule("work", target=1.0, cool_s=3.0), replicas=3)
    assert [scaler.wanted(at_s, 0.0) for at_s in range(6)] == [3, 3, 3, 3, 2, 1]


def test_a_rule_is_read_from_text() -> None:
    assert ScalingRule.read("work:target=0.05,least=2,most=40,every_s=2,cool_s=90") == ScalingRule(
        "work", 0.05, 2, 40, 2.0, 90.0
    )
    assert ScalingRule.read("sequences:target=8").most == 1000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("work", "needs a target"),
        ("wrok:target=1", "work"),
        ("work:traget=1", "target"),
        ("work:target=much", "must be a number, got 'much'"),
        ("work:target=0", "above 0"),
        ("work:target=1,least=5,most=2", "least=5 and most=2"),
        ("work:target=1,cool_s=-1", "cool_s"),
        ("work:target=1,every_s=nan", "every_s"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ScalingRule.read(text)
