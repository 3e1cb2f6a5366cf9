"""Latency tables between and beyond what was measured, and their correction while serving."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmaker.cost.latency import CellLatency, LatencyTable, OnlineCorrection, isotonic
from batchmaker.errors import DataError, OptionError

TIMES = st.floats(1e-6, 10.0)


@st.composite
def latencies(draw) -> CellLatency:
    sizes = sorted(draw(st.sets(st.integers(1, 300), min_size=1, max_size=8)))
    median = [draw(TIMES) for _ in sizes]
    return CellLatency("cell", tuple(sizes), tuple(median), tuple(time * draw(st.floats(1, 3)) for time in median))


def table_of(times: dict[int, float]) -> LatencyTable:
    seconds = tuple(times.values())
    return LatencyTable((CellLatency("cell", tuple(times), seconds, seconds),))


@given(latencies(), st.integers(1, 900))
def test_a_larger_batch_is_never_faster(cell: CellLatency, largest: int):
    table = LatencyTable((cell,))
    for quantile in ("median", "p95"):
        row = table.dense(["cell"], largest, quantile)[0]
        assert row[0] == 0
        assert (row[1:] > 0).all()
        assert (np.diff(row) >= -1e-9 * row.max()).all()


@given(latencies(), st.integers(1, 400))
def test_the_95th_percentile_is_never_below_the_median(cell: CellLatency, batch: int):
    table = LatencyTable((cell,))
    assert table.seconds("cell", batch, "p95") >= table.seconds("cell", batch) * (1 - 1e-12)


@given(latencies(), st.integers(0, 700))
def test_a_dense_table_holds_what_is_told_one_by_one(cell: CellLatency, batch: int):
    table = LatencyTable((cell,))
    assert table.dense(["cell"], batch)[0, batch] == table.seconds("cell", batch)


@given(st.lists(TIMES, min_size=1, max_size=20))
def test_making_times_monotone_keeps_their_sum_and_what_was_monotone(times: list[float]):
    smooth = isotonic(times)
    assert (np.diff(smooth) >= 0).all()
    assert smooth.sum() == pytest.approx(sum(times))
    assert isotonic(sorted(times)).tolist() == sorted(times)


@given(st.lists(TIMES, min_size=2, max_size=6), st.lists(TIMES, min_size=6, max_size=6))
def test_no_monotone_sequence_is_nearer(times: list[float], other: list[float]):
    rival = np.sort(other)[: len(times)]
    wanted = np.array(times)
    assert ((isotonic(times) - wanted) ** 2).sum() <= ((rival - wanted) ** 2).sum() + 1e-12


def test_batches_between_and_beyond_the_measured_ones():
    table = table_of({2: 3.0, 4: 5.0, 8: 6.0})
    assert table.seconds("cell", 1) == 3.0
    assert table.seconds("cell", 3) == 4.0
    assert table.seconds("cell", 8) == 6.0
    assert table.seconds("cell", 16) == 12.0
    assert table.seconds("cell", 19) == 16.0  # two calls of 8, one of 3


def test_a_larger_batch_that_was_measured_faster_gets_the_mean():
    table = table_of({1: 1.0, 2: 4.0, 4: 2.0})
    assert table.dense(["cell"], 4)[0].tolist() == [0.0, 1.0, 3.0, 3.0, 3.0]


def test_dense_rows_come_in_the_order_of_the_names():
    slow, fast = (CellLatency(name, (1,), (s,), (s,)) for name, s in (("slow", 2.0), ("fast", 1.0)))
    assert LatencyTable((slow, fast)).dense(["fast", "slow", "fast"], 1)[:, 1].tolist() == [1.0, 2.0, 1.0]


def test_a_table_that_is_wrong_on_purpose_is_wrong_by_the_factor():
    table = table_of({1: 1.0, 2: 4.0}).with_error(1.2)
    assert table.seconds("cell", 2, "p95") == pytest.approx(4.8)
    for factor in (0.0, -1.0, math.nan):
        with pytest.raises(OptionError, match="factor"):
            table.with_error(factor)


def test_unknown_cells_are_answered_with_the_nearest_name():
    with pytest.raises(OptionError, match="Did you mean 'cell'"):
        table_of({1: 1.0}).dense(["cel"], 4)
    with pytest.raises(OptionError, match="quantile"):
        table_of({1: 1.0}).seconds("cell", 1, "p99")


@pytest.mark.parametrize(
    ("batch", "median", "p95", "what"),
    [
        ((), (), (), "no batch size"),
        ((2, 1), (1.0, 1.0), (1.0, 1.0), "ascending"),
        ((1, 1), (1.0, 1.0), (1.0, 1.0), "ascending"),
        ((0, 1), (1.0, 1.0), (1.0, 1.0), "ascending"),
        ((1, 2), (1.0,), (1.0, 1.0), "1 times in median_s for 2"),
        ((1,), (0.0,), (1.0,), "median_s has 0.0"),
        ((1,), (1.0,), (math.nan,), "p95_s has nan"),
        ((1,), (1.0,), (0.5,), "p95_s is below median_s"),
    ],
)
def test_malformed_latencies_are_refused(batch, median, p95, what):
    with pytest.raises(DataError, match=what):
        CellLatency("cell", batch, median, p95)


def test_tables_without_cells_or_with_one_twice_are_refused():
    cell = CellLatency("cell", (1,), (1.0,), (1.0,))
    with pytest.raises(DataError, match="no cells"):
        LatencyTable(())
    with pytest.raises(DataError, match="'cell' twice"):
        LatencyTable((cell, cell))


def test_correction_moves_towards_what_is_measured():
    correction = OnlineCorrection(2)
    for _ in range(200):
        correction.observe(1, predicted_s=1.0, measured_s=1.5)
    assert correction.factors[0] == 1.0
    assert correction.factors[1] == pytest.approx(1.5, rel=1e-3)


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=60))
def test_correction_stays_within_its_clamp_whatever_is_measured(calls):
    correction = OnlineCorrection(1, weight=0.5)
    for predicted_s, measured_s in calls:
        correction.observe(0, predicted_s, measured_s)
        assert 0.5 <= correction.factors[0] <= 2.0


def test_one_hiccup_counts_as_no_more_than_the_clamp():
    correction = OnlineCorrection(1)
    correction.observe(0, predicted_s=0.001, measured_s=60.0)
    assert correction.factors[0] == pytest.approx(1.05)


@pytest.mark.parametrize(
    "options", [{"weight": 0.0}, {"weight": 1.5}, {"lowest": 0.0}, {"lowest": 2.0}, {"highest": 0.5}]
)
def test_corrections_that_cannot_work_are_refused(options):
    with pytest.raises(OptionError):
        OnlineCorrection(1, **options)
