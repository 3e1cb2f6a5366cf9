"""Deadlines and distributions of execution time."""

from __future__ import annotations

import numpy as np
import pytest

from batchmaker.lab.baselines.batch_latency import BatchLatency, StepCost
from batchmaker.lab.baselines.orloj import OrlojPolicy


def linear(lengths):
    """1 ms per step, and 0.1 ms for each further row."""
    return max(lengths) * (1e-3 + 1e-4 * (len(lengths) - 1))


def latency_of(lengths, sizes=(1, 2, 4, 8)):
    latency = BatchLatency(sizes, linear)
    for length in lengths:
        latency.saw_length(length)
    return latency


def test_a_batch_takes_the_maximum_over_its_members_in_expectation():
    lengths = [10, 20] * 64
    latency = latency_of(lengths)
    longest = {k: 20 - 10 * 0.5**k for k in (1, 2, 4, 8)}  # 10 only if all k are of length 10
    for k in (1, 2, 4, 8):
        assert latency.mean_s(k) == pytest.approx(longest[k] * (1e-3 + 1e-4 * (k - 1)))


def test_the_longer_the_spread_the_more_a_large_batch_costs():
    wide, narrow = latency_of([1, 39] * 64), latency_of([20] * 128)
    assert wide.mean_s(1) == pytest.approx(narrow.mean_s(1))
    assert wide.mean_s(8) > 1.8 * narrow.mean_s(8)


def test_the_score_grows_as_the_deadline_comes_near_and_is_nothing_beyond_it():
    latency = latency_of([10] * 8)
    firm = np.ones(1, np.bool_)
    worth = [latency.worth(1, np.array([slack_s]), firm) for slack_s in (0.5, 0.1, 0.02, 0.0099)]
    assert worth[0] < worth[1] < worth[2]
    assert worth[3] == 0.0
    assert latency.worth(1, np.array([0.0099]), ~firm) > worth[2]


def test_what_cannot_be_met_is_refused_and_what_has_no_deadline_never():
    policy = OrlojPolicy(batch_seconds=linear)
    policy.add(0, 10, 0.0, deadline_s=0.009)
    policy.add(1, 10, 0.0, deadline_s=0.012)
    policy.add(2, 10, -50.0)
    assert list(policy.refuse(0.0)) == [0]
    assert sorted(policy.choose(0.0)) == [1, 2]


def test_a_large_batch_leaves_out_those_for_whom_it_would_be_too_slow():
    policy = OrlojPolicy(max_batch=8, batch_seconds=linear)
    for request in range(8):
        policy.add(request, 10, 0.0, deadline_s=0.0105 if request == 0 else 0.02)
    assert policy.refuse(0.0) == []
    first = list(policy.choose(0.0))
    assert first == [1, 2, 3, 4, 5, 6, 7]  # worth more together than the urgent one alone
    assert list(policy.choose(0.0)) == [0]


def test_an_urgent_request_goes_alone_where_a_batch_could_wait():
    policy = OrlojPolicy(max_batch=2, batch_seconds=lambda lengths: 0.01 * len(lengths))
    policy.add(0, 1, 0.0, deadline_s=0.011)
    policy.add(1, 1, 0.0, deadline_s=10.0)
    assert list(policy.choose(0.0)) == [0]


def test_without_deadlines_the_oldest_run_in_full_batches():
    policy = OrlojPolicy(max_batch=4, batch_seconds=linear)
    for request in range(6):
        policy.add(request, 10, 0.001 * request)
    assert [list(policy.choose(0.01)) for _ in range(3)] == [[0, 1, 2, 3], [4, 5], []]


def test_before_anything_is_known_nothing_is_refused_and_batches_are_full():
    policy = OrlojPolicy(max_batch=4)
    for request in range(6):
        policy.add(request, 10, 0.0, deadline_s=0.001)
    assert list(policy.refuse(0.0)) == []
    assert list(policy.choose(0.0)) == [0, 1, 2, 3]


def test_the_cost_is_learned_from_finished_batches():
    policy = OrlojPolicy(max_batch=4)
    policy.add(0, 10, 0.0)
    policy.choose(0.0)
    policy.batch_finished(0, [10], 0.01)
    policy.add(1, 10, 1.0, deadline_s=1.009)
    policy.add(2, 10, 1.0, deadline_s=1.011)
    assert list(policy.refuse(1.0)) == [1]


def test_step_cost_finds_the_fixed_part_and_the_part_per_row():
    cost = StepCost()
    assert cost.seconds(4, 10) == 0.0
    for rows, longest in [(1, 10), (8, 20), (4, 7), (16, 3)]:
        cost.saw(rows, longest, longest * (2e-3 + 1e-4 * rows))
    assert cost.seconds(32, 5) == pytest.approx(5 * (2e-3 + 32e-4))
    assert cost.seconds(1, 100) == pytest.approx(0.21)


def test_models_have_distributions_of_their_own():
    policy = OrlojPolicy(batch_seconds=linear)
    policy.add(0, 100, 0.0, deadline_s=0.05, model=0)
    policy.add(1, 10, 0.0, deadline_s=0.05, model=1)
    assert list(policy.refuse(0.0)) == [0]
    assert list(policy.choose(0.0)) == [1]
