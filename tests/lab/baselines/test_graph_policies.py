"""Which whole requests run together, and when: serial, padded, graph."""

from __future__ import annotations

import pytest

from batchmaker.errors import OptionError
from batchmaker.lab.baselines import OrlojPolicy, PaddedPolicy, SerialPolicy, WindowPolicy
from batchmaker.policies import GraphPolicy

EVERY = [SerialPolicy, PaddedPolicy, WindowPolicy, OrlojPolicy]


def batches(policy: GraphPolicy, now_s: float = 100.0) -> list[list[int]]:
    """Every batch that may start at one time."""
    found = []
    while chosen := policy.choose(now_s):
        found.append(list(chosen))
    return found


def test_padded_policy_serves_buckets_in_turn_oldest_first():
    policy = PaddedPolicy(max_batch=2, bucket_width=10)
    for request, length in enumerate([1, 25, 10, 11, 5, 30]):
        policy.add(request, length, 0.0)
    assert batches(policy) == [[0, 2], [3], [1, 5], [4]]
    assert len(policy) == 0


def test_padded_policy_serves_full_buckets_first_if_asked():
    policy = PaddedPolicy(max_batch=2, bucket_width=10, full_first=True)
    for request, length in enumerate([1, 25, 11, 30, 12]):
        policy.add(request, length, 0.0)
    assert batches(policy) == [[2, 4], [1, 3], [0]]


def test_serial_policy_serves_one_at_a_time_in_order():
    policy = SerialPolicy()
    for request in range(3):
        policy.add(request, 1, 0.0)
    assert batches(policy) == [[0], [1], [2]]


@pytest.mark.parametrize("make", EVERY)
def test_discarded_requests_are_not_served(make):
    policy = make()
    policy.add(1, 3, 0.0)
    policy.add(2, 3, 0.0)
    policy.discard(1)
    policy.discard(99)
    assert len(policy) == 1
    assert batches(policy) == [[2]]


@pytest.mark.parametrize("make", EVERY)
def test_requests_of_different_models_never_share_a_batch(make):
    policy = make()
    for request in range(6):
        policy.add(request, 3, 0.0, model=request % 2)
    found = batches(policy)
    assert sorted(request for batch in found for request in batch) == list(range(6))
    assert all(len({request % 2 for request in batch}) == 1 for batch in found)


@pytest.mark.parametrize("make", EVERY)
def test_the_highest_priority_goes_first_then_the_earliest_arrival(make):
    policy = make()
    for request, priority in enumerate([0, 1, 0, 1]):
        policy.add(request, 3, 0.1 * request, priority=priority)
    assert [request for batch in batches(policy) for request in batch] == [1, 3, 0, 2]


# --- the window --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", EVERY)
def test_in_a_flood_of_a_higher_priority_one_place_or_batch_of_eight_is_the_oldest_s(make):
    policy = make() if make is SerialPolicy else make(max_batch=2)
    policy.add(0, 5, 0.0)
    number, chosen = 1, []
    while 0 not in chosen:
        for _ in range(4):
            policy.add(number, 5, 0.0, priority=1)
            number += 1
        chosen += policy.choose(100.0)
        assert len(chosen) <= 16
    assert len(chosen) >= 8


def test_a_batch_waits_for_its_window_from_the_arrival_of_its_first_request():
    policy = WindowPolicy(window_ms=5, max_batch=4)
    policy.add(0, 1, 1.000)
    policy.add(1, 9, 1.004)
    assert policy.choose(1.0049) == ()
    assert policy.next_wakeup_s(1.0049) == pytest.approx(1.005)
    assert list(policy.choose(policy.next_wakeup_s(1.0049))) == [0, 1]
    assert policy.next_wakeup_s(1.005) is None


def test_a_full_batch_starts_at_once_and_leaves_the_rest_to_their_own_window():
    policy = WindowPolicy(window_ms=1000, max_batch=2)
    for request in range(5):
        policy.add(request, 1, 0.1 * request)
    assert batches(policy, 0.4) == [[0, 1], [2, 3]]
    assert policy.next_wakeup_s(0.4) == pytest.approx(1.4)


def test_a_batch_whose_window_is_over_goes_on_collecting_until_a_worker_is_idle():
    policy = WindowPolicy(window_ms=1, max_batch=8)
    policy.add(0, 1, 0.0)
    policy.add(1, 1, 0.5)
    assert list(policy.choose(0.5)) == [0, 1]


def test_the_window_moves_on_when_the_first_request_is_given_up():
    policy = WindowPolicy(window_ms=100, max_batch=8)
    policy.add(0, 1, 0.0)
    policy.add(1, 1, 0.05)
    policy.discard(0)
    assert policy.next_wakeup_s(0.05) == pytest.approx(0.15)


def test_each_model_collects_a_batch_of_its_own_and_the_earlier_goes_first():
    policy = WindowPolicy(window_ms=10, max_batch=8)
    policy.add(0, 1, 0.000, model=7)
    policy.add(1, 1, 0.004, model=3)
    policy.add(2, 1, 0.005, model=7)
    assert batches(policy, 0.012) == [[0, 2]]
    policy.add(3, 1, 0.013, model=7)
    assert batches(policy, 1.0) == [[1], [3]]


def test_a_window_of_nothing_starts_at_once():
    policy = WindowPolicy(window_ms=0)
    policy.add(0, 1, 2.5)
    assert list(policy.choose(2.5)) == [0]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (PaddedPolicy, {"max_batch": 0}),
        (PaddedPolicy, {"bucket_width": 0}),
        (WindowPolicy, {"max_batch": 0}),
        (WindowPolicy, {"window_ms": -1.0}),
        (WindowPolicy, {"window_ms": float("nan")}),
        (OrlojPolicy, {"max_batch": 0}),
        (OrlojPolicy, {"assumed_deadline_ms": 0.0}),
    ],
)
def test_options_out_of_range_are_refused(make, options):
    with pytest.raises(OptionError, match=next(iter(options))):
        make(**options)
