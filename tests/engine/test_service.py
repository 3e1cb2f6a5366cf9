"""What is counted of answers, and how latencies are remembered."""

from __future__ import annotations

import math

import numpy as np
import pytest
from engine_models import Sums
from hypothesis import given
from hypothesis import strategies as st

from batchmaker.core.events import RequestId
from batchmaker.engine import Ticket
from batchmaker.engine.stats import LatencyHistogram, ServiceStats
from batchmaker.errors import CellError, DeadlineError, RefusedError


def ticket(latency_s: float, deadline_s: float | None = None) -> Ticket:
    made = Ticket(RequestId(0), None, 10.0, None if deadline_s is None else 10.0 + deadline_s, model=Sums())
    made.finished_s = 10.0 + latency_s
    return made


@given(st.lists(st.floats(2e-6, 900.0), min_size=1, max_size=200), st.sampled_from([50.0, 90.0, 99.0]))
def test_percentiles_are_right_within_a_bin(latencies_s: list[float], percent: float) -> None:
    histogram = LatencyHistogram()
    for latency_s in latencies_s:
        histogram.add(latency_s)
    exact_ms = 1e3 * np.percentile(latencies_s, percent, method="inverted_cdf")
    assert histogram.percentile_ms(percent) == pytest.approx(exact_ms, rel=0.023)
    assert histogram.mean_ms == pytest.approx(1e3 * np.mean(latencies_s))


def test_latencies_out_of_range_are_counted_at_its_ends() -> None:
    histogram = LatencyHistogram()
    assert math.isnan(histogram.percentile_ms(50))
    for latency_s in (0.0, 1e-9, 1e6):
        histogram.add(latency_s)
    assert histogram.num_samples == 3
    assert histogram.percentile_ms(50) < 0.002
    assert histogram.percentile_ms(99) > 1e6


def test_every_outcome_is_counted_as_what_it_is() -> None:
    stats = ServiceStats()
    stats.settled([(ticket(0.010, 0.020), None, None)])
    stats.settled([(ticket(0.030, 0.020), None, None)])
    stats.settled([(ticket(0.030), None, None)])
    stats.settled([(ticket(0.001, 0.020), None, RefusedError("no"))])
    stats.settled([(ticket(0.020, 0.020), None, DeadlineError("late"))])
    stats.settled([(ticket(0.001, 0.020), None, CellError("broken"))])
    assert (stats.answered, stats.late, stats.refused, stats.given_up) == (3, 1, 1, 1)
    assert stats.failed == {"RefusedError": 1, "DeadlineError": 1, "CellError": 1}
    assert (stats.violations, stats.with_deadline, stats.violation_share) == (3, 5, 0.6)
    said = str(stats)
    assert said.startswith("3 answered, p50 29.4 ms, p90 29.4 ms, p99 29.4 ms")
    assert said.endswith("; failed: 1 CellError, 1 DeadlineError, 1 RefusedError; 3 of 5 deadlines missed")
    assert str(ServiceStats()) == "none answered"
