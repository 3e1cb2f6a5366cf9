import gzip

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmaker.errors import DataError, OptionError
from batchmaker.lab.datasets import mmpp_arrivals, poisson_arrivals, trace_arrivals, with_season

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
RATES = st.floats(0.01, 1000)
SEEDS = st.integers(0, 2**32)


def test_poisson_arrivals_have_the_asked_rate_and_memoryless_gaps():
    times = poisson_arrivals(50.0, seed=0, count=20_000)
    gaps = np.diff(times)
    assert (times.shape, times.dtype) == ((20_000,), np.float64)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.03)


def test_poisson_arrivals_fill_the_asked_time():
    times = poisson_arrivals(100.0, seed=0, seconds=100.0)
    assert times.size == pytest.approx(10_000, abs=400)
    assert times[0] > 0
    assert 99.5 < times[-1] < 100


@given(RATES, SEEDS, st.integers(0, 300), st.floats(0.01, 3))
def test_a_shorter_process_is_the_beginning_of_a_longer_one(rate_rps, seed, count, mean_gaps):
    seconds = 100 * mean_gaps / rate_rps
    long = poisson_arrivals(rate_rps, seed, count=1000)
    by_count = poisson_arrivals(rate_rps, seed, count=count)
    by_time = poisson_arrivals(rate_rps, seed, seconds=seconds)
    both = poisson_arrivals(rate_rps, seed, count=count, seconds=seconds)
    assert np.array_equal(by_count, long[:count])
    assert np.array_equal(by_time, long[long < seconds])
    assert np.array_equal(both, min(by_count, by_time, key=len))
    assert (np.diff(long) >= 0).all()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"rate_rps": 1.0, "seed": 0}, "neither `count` nor `seconds`"),
        ({"rate_rps": 0.0, "seed": 0, "count": 1}, "rate_rps: got 0.0"),
        ({"rate_rps": float("inf"), "seed": 0, "count": 1}, "rate_rps: got inf"),
        ({"rate_rps": 1.0, "seed": -1, "count": 1}, "seed: got -1"),
        ({"rate_rps": 1.0, "seed": 0, "count": -1}, "count: got -1"),
        ({"rate_rps": 1.0, "seed": 0, "seconds": 0.0}, "seconds: got 0.0"),
    ],
)
def test_a_process_that_makes_no_sense_is_refused(options, complaint):
    with pytest.raises(OptionError, match=complaint):
        poisson_arrivals(**options)


def test_timestamps_become_seconds_since_the_first(write):
    path = write(
        HEADER
        + "2023-11-16 23:59:59.5000000,374,44\n"
        + "2023-11-17 00:00:00.7500000,396,109\n\n"
        + "2023-11-17 00:00:02,1,1\r\n"
    )
    assert trace_arrivals(path).tolist() == pytest.approx([0.0, 1.25, 2.5])


def test_the_timestamp_column_is_found_by_name_and_offsets_count(write):
    path = write('id,"TIMESTAMP"\n1,2024-05-10 00:00:00.5+00:00\n2,2024-05-10 02:00:01+02:00\n')
    assert trace_arrivals(path).tolist() == pytest.approx([0.0, 0.5])


def test_a_plain_file_holds_seconds_in_any_order(write):
    assert trace_arrivals(write("10.5\n\n12\n1.1e1\n")).tolist() == [0.0, 0.5, 1.5]


def test_a_gzipped_trace_is_read(write):
    assert trace_arrivals(write(gzip.compress(b"1\n3\n"), "trace.txt.gz")).tolist() == [0.0, 2.0]


def test_a_trace_is_stretched_by_a_factor(write):
    assert trace_arrivals(write("0\n1\n4\n"), time_scale=0.5).tolist() == [0.0, 0.5, 2.0]


@given(st.lists(st.floats(0, 1e6), min_size=2, unique=True), RATES)
def test_a_trace_is_stretched_to_a_mean_rate(tmp_path_factory, seconds, rate_rps):
    path = tmp_path_factory.mktemp("trace") / "seconds.txt"
    path.write_text("".join(f"{second!r}\n" for second in seconds))
    times = trace_arrivals(path, rate_rps=rate_rps)
    assert (times.size - 1) / times[-1] == pytest.approx(rate_rps)
    assert (np.diff(times) >= 0).all()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "the trace is empty"),
        ("\n \n", "the trace is empty"),
        (HEADER, "a header and no arrivals"),
        ("1.5\nsoon\n", "line 2: got 'soon', expected a number of seconds"),
        ("1.5\n\nnan\n", "line 3: got 'nan'"),
        ("inf\n", "line 1: got 'inf'"),
        ("time,tokens\n1,2\n", "line 1: got 'time,tokens', .*column TIMESTAMP"),
        (
            HEADER + "2023-11-16 18:15:46.68,1,1\n16/11/2023,1,1\n",
            "line 3: got '16/11/2023', expected a date",
        ),
        ("id,TIMESTAMP\n1\n", "line 2: got 1 fields, expected 2 or more"),
    ],
)
def test_a_malformed_trace_is_explained_with_file_and_line(write, content, complaint):
    with pytest.raises(DataError, match=rf"data\.txt.*{complaint}"):
        trace_arrivals(write(content))


def test_a_missing_trace_is_named(tmp_path):
    with pytest.raises(DataError, match=r"absent\.csv: there is no such file"):
        trace_arrivals(tmp_path / "absent.csv")


def test_a_trace_without_duration_has_no_rate_to_change(write):
    with pytest.raises(DataError, match="2 arrivals, all at one time"):
        trace_arrivals(write("3\n3\n"), rate_rps=1.0)


@pytest.mark.parametrize("options", [{"rate_rps": 0.0}, {"time_scale": -1.0}, {"rate_rps": 1.0, "time_scale": 1.0}])
def test_options_that_make_no_sense_are_refused(write, options):
    with pytest.raises(OptionError, match=r"rate_rps|time_scale"):
        trace_arrivals(write("1\n2\n"), **options)


@pytest.mark.parametrize(
    ("name", "num_arrivals", "rate_rps", "variation"),
    [("conv", 19_366, 5.53, 1.09), ("code", 8_819, 2.57, 13.15)],
)
def test_recorded_traces_have_their_known_statistics(real_data, name, num_arrivals, rate_rps, variation):
    path = real_data(f"arrival_traces/AzureLLMInferenceTrace_{name}.csv")
    times = trace_arrivals(path)
    gaps = np.diff(times)
    assert times.size == num_arrivals
    assert times[0] == 0
    assert 1 / gaps.mean() == pytest.approx(rate_rps, abs=0.01)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, abs=0.01)
    assert 1 / np.diff(trace_arrivals(path, rate_rps=100.0)).mean() == pytest.approx(100)


def test_bursty_arrivals_have_the_asked_rate_and_come_in_bursts():
    times = mmpp_arrivals(50.0, seed=0, count=50_000)
    gaps = np.diff(times)
    assert (times.shape, times.dtype) == ((50_000,), np.float64)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.06)
    assert gaps.std() / gaps.mean() > 1.3
    in_a_second = np.bincount(times.astype(np.int64))
    assert in_a_second.var() / in_a_second.mean() > 5


def test_bursts_that_are_no_faster_are_a_poisson_process():
    gaps = np.diff(mmpp_arrivals(50.0, seed=0, count=20_000, burst_ratio=1.0))
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.03)


@given(RATES, SEEDS, st.integers(0, 300), st.integers(0, 300))
def test_bursty_arrivals_are_ascending_repeatable_and_scale_with_the_rate(rate_rps, seed, count, more):
    times = mmpp_arrivals(rate_rps, seed, count=count)
    assert times.shape == (count,)
    assert (np.diff(times) >= 0).all()
    assert (times >= 0).all()
    assert np.array_equal(times, mmpp_arrivals(rate_rps, seed, count=count + more)[:count])
    assert np.allclose(2 * mmpp_arrivals(2 * rate_rps, seed, count=count), times)


@pytest.mark.parametrize(
    "wrong",
    [{"rate_rps": 0.0}, {"rate_rps": float("inf")}, {"seed": -1}, {"count": -1}, {"burst_ratio": 0.5},
     {"burst_share": 0.0}, {"burst_share": 1.0}, {"burst_arrivals": 0.0}],
)  # fmt: skip
def test_bursts_out_of_range_are_refused(wrong):
    with pytest.raises(OptionError):
        mmpp_arrivals(**{"rate_rps": 1.0, "seed": 0, "count": 3, **wrong})


def test_a_season_moves_arrivals_from_night_to_day_and_keeps_their_number():
    even = np.arange(100_000) / 1000.0  # ten days of ten seconds
    times = with_season(even, depth=0.8, day_s=10.0)
    assert (np.diff(times) >= 0).all()
    assert times[::10_000] == pytest.approx(even[::10_000], abs=1e-6)  # each day has as many
    in_day = np.histogram(times % 10.0, bins=10, range=(0, 10))[0] / 10_000
    rate = 1 - 0.8 * np.cos(2 * np.pi * (np.arange(10) + 0.5) / 10)
    assert in_day == pytest.approx(rate, abs=0.03)


@pytest.mark.parametrize(("depth", "day_s"), [(1.0, 10.0), (-0.1, 10.0), (0.5, 0.0)])
def test_a_season_that_cannot_be_is_refused(depth, day_s):
    with pytest.raises(OptionError):
        with_season(np.zeros(1), depth=depth, day_s=day_s)
