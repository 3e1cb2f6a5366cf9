"""What simulations say."""

from __future__ import annotations

import numpy as np
import pytest

from batchmaker.errors import OptionError
from batchmaker.lab.simulator.report import Difference, paired_difference, spread, summarise
from batchmaker.lab.simulator.workload import ANSWERED, GIVEN_UP, REFUSED, Records


def records(latencies_s: list[float], outcome: list[int]) -> Records:
    """One request a second."""
    arrived_s = np.arange(len(latencies_s), dtype=np.float64)
    finished_s = arrived_s + latencies_s
    return Records(arrived_s, arrived_s + 0.25, finished_s, np.array(outcome, np.int8), steps=4, rows=10, busy_s=3.0)


def test_a_summary_counts_who_was_answered_in_time() -> None:
    summary = summarise(records([0.5, 1.5, 0.5, 0.5, 1.0], [ANSWERED] * 5), sla_s=1.0)
    assert (summary.requests, summary.answered) == (5, 5)
    assert (summary.mean_ms, summary.p50_ms, summary.queue_mean_ms) == (800.0, 500.0, 250.0)
    assert summary.throughput_rps == 1.0  # five answers in five seconds
    assert summary.goodput_rps == pytest.approx(0.8)
    assert summary.violation_share == pytest.approx(0.2)
    assert (summary.mean_batch, summary.busy_share) == (2.5, 0.6)


def test_refused_and_given_up_requests_violate_and_have_no_latency() -> None:
    summary = summarise(records([0.5, 0.0, 1.0, 0.5], [ANSWERED, REFUSED, GIVEN_UP, ANSWERED]), sla_s=1.0)
    assert (summary.answered, summary.mean_ms, summary.violation_share) == (2, 500.0, 0.5)


def test_a_summary_of_nobody_answered_has_no_latency() -> None:
    summary = summarise(records([0.0, 0.0], [REFUSED, REFUSED]), sla_s=1.0)
    assert (summary.mean_ms, summary.p99_ms, summary.throughput_rps) == (None, None, 0.0)
    assert summary.violation_share == 1.0


def test_an_sla_of_nothing_is_refused() -> None:
    with pytest.raises(OptionError, match="SLA"):
        summarise(records([1.0], [ANSWERED]), sla_s=0.0)


def test_spread_gives_the_quartiles() -> None:
    found = spread([1.0, 2.0, 3.0, 4.0, 10.0])
    assert (found.mean, found.p25, found.p75) == (4.0, 2.0, 4.0)
    with pytest.raises(OptionError, match="at least one seed"):
        spread([])


def test_a_paired_difference_sees_through_the_noise_that_seeds_share() -> None:
    shared = np.random.default_rng(0).normal(0, 10, 20)
    one = shared + 1 + np.random.default_rng(1).normal(0, 0.1, 20)
    found = paired_difference(one, shared)
    assert found.is_certain
    assert 0.9 < found.low < found.mean < found.high < 1.1
    assert found == paired_difference(one, shared)
    assert not paired_difference(np.random.default_rng(2).permutation(shared), shared).is_certain


def test_a_difference_needs_the_same_seeds_of_both() -> None:
    for one, other in (([1.0], [1.0]), ([1.0, 2.0], [1.0, 2.0, 3.0])):
        with pytest.raises(OptionError, match="the same 2 or more seeds"):
            paired_difference(one, other)
    assert Difference(1.0, -0.5, 2.0).is_certain is False
