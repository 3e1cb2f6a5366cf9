"""Length profiles: conditional quantiles of the steps that are left."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmaker.cost import lengths
from batchmaker.cost.lengths import MAX_SAMPLES, MAX_STEPS, MIN_SAMPLES, LengthProfile
from batchmaker.errors import DataError, OptionError
from batchmaker.lab.datasets import lazybatching_lengths

QUANTILES = st.sampled_from([0.1, 0.25, 0.5, 0.75, 0.9, 0.99])
RUNS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 40)), min_size=1, max_size=400)


def profile_of(runs: list[tuple[int, int]], **options: int) -> LengthProfile:
    return LengthProfile.from_pairs([given for given, _ in runs], [steps for _, steps in runs], **options)


def remaining(profile: LengthProfile, given: int, done: int, quantile: float) -> int:
    return int(profile.remaining(np.array([given]), np.array([done]), quantile)[0])


def quantile_left(steps: list[int], done: int, quantile: float) -> int:
    """The smallest number of further steps that the share of those beyond `done` does not exceed, by counting."""
    left = sorted(total - done for total in steps if total > done)
    return next(value for i, value in enumerate(left, start=1) if i >= quantile * len(left) - 1e-9)


@given(RUNS, st.integers(0, 12), st.integers(0, 60), QUANTILES)
def test_steps_left_are_the_conditional_quantile(runs, given_length: int, done: int, quantile: float):
    profile = profile_of(runs)
    bucket = np.searchsorted(profile.edges, given_length)
    own = [steps for given, steps in runs if np.searchsorted(profile.edges, given) == bucket]
    pooled = [steps for _, steps in runs]
    found = remaining(profile, given_length, done, quantile)
    for known, enough in ((own, MIN_SAMPLES), (pooled, min(MIN_SAMPLES, len(runs)))):
        if sum(steps > done for steps in known) >= enough:
            assert found == quantile_left(known, done, quantile)
            return
    assert found >= 1


@given(RUNS, QUANTILES)
def test_fixed_is_the_smallest_length_that_covers_the_share(runs, quantile: float):
    length = profile_of(runs).fixed(quantile)
    steps = np.array([steps for _, steps in runs])
    assert (steps <= length).mean() >= quantile - 1e-9
    assert (steps <= length - 1).mean() < quantile


@given(RUNS, st.integers(0, 12), st.integers(0, 60))
def test_a_higher_quantile_never_promises_an_earlier_end(runs, given_length: int, done: int):
    profile = profile_of(runs)
    left = [remaining(profile, given_length, done, quantile) for quantile in (0.1, 0.5, 0.75, 0.9, 0.99)]
    assert left == sorted(left)
    assert left[0] >= 1


def test_the_known_length_tells_the_unknown_one():
    profile = profile_of([(given, 2 * given) for given in (5, 50) for _ in range(100)])
    assert remaining(profile, 5, 0, 0.75) == 10
    assert remaining(profile, 50, 0, 0.75) == 100
    assert remaining(profile, 50, 99, 0.75) == 1


def test_few_runs_in_a_bucket_are_helped_by_all_others():
    profile = profile_of([(1, 10)] * 40 + [(2, 100)] * 40, num_buckets=2)
    assert remaining(profile, 1, 10, 0.5) == 90  # no run of the bucket was as long, all of the other one were


def test_beyond_the_data_the_tail_is_geometric():
    generator = np.random.default_rng(0)
    steps = generator.geometric(0.1, size=20_000)
    profile = LengthProfile.from_pairs(np.zeros(len(steps), np.int64), steps)
    beyond = remaining(profile, 0, 10_000, 0.75)
    exact = math.ceil(math.log(0.25) / math.log(0.9))
    assert exact / 2 <= beyond <= 2 * exact
    assert remaining(profile, 0, 10_001, 0.75) == beyond  # it has no memory


def test_many_requests_are_looked_up_at_once():
    profile = profile_of([(given, 2 * given + extra) for given in range(1, 30) for extra in range(30)])
    given, done = np.meshgrid(np.arange(30), np.arange(80))
    at_once = profile.remaining(given.ravel(), done.ravel(), 0.75)
    assert at_once.dtype == np.int64
    one_by_one = [
        remaining(profile, g, d, 0.75) for g, d in zip(given.ravel().tolist(), done.ravel().tolist(), strict=True)
    ]
    assert at_once.tolist() == one_by_one


@pytest.mark.parametrize("seed", range(5))
def test_lengths_of_lazybatching_meet_both_published_quantiles(seed: int):
    profile = LengthProfile.from_pairs(*lazybatching_lengths(30_000, seed))
    assert profile.fixed(0.90) == 32
    assert profile.fixed(0.16) == 10


def test_serving_teaches_what_data_does():
    runs = [(given, 2 * given) for given in range(5, 25) for _ in range(20)]
    learnt = profile_of(runs[:1])
    remaining(learnt, 5, 0, 0.75)  # a table is there that will have to be made anew
    for known, steps in runs[1:]:
        learnt.observe(known, steps)
    assert learnt.num_samples == len(runs)
    assert learnt.fixed(0.9) == profile_of(runs).fixed(0.9)
    assert remaining(learnt, 5, 10, 0.75) == remaining(profile_of(runs, num_buckets=1), 5, 10, 0.75)


def test_what_was_served_lately_wins_in_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lengths, "MAX_SAMPLES", 1000)
    old = LengthProfile(counts=[[0, 0, 1000]])
    before = old.counts.nbytes
    for _ in range(3000):
        old.observe(0, 4)
        assert old.num_samples <= 1000
    assert old.fixed(0.5) == 4
    assert old.counts.nbytes <= 2 * before


def test_one_endless_run_does_not_take_all_memory():
    profile = LengthProfile()
    profile.observe(3, 10**12)
    assert profile.counts.shape == (1, MAX_STEPS + 1)
    assert profile.fixed(0.5) == MAX_STEPS


def test_halving_keeps_rare_lengths():
    profile = LengthProfile(counts=[[0, MAX_SAMPLES - 99] + [1] * 99])
    profile.observe(0, 1)
    assert profile.num_samples < MAX_SAMPLES
    assert np.count_nonzero(profile.counts) > 40


def test_an_empty_profile_says_what_to_do():
    empty = LengthProfile.from_pairs([], [])
    assert empty.num_samples == 0
    for use in (lambda: empty.fixed(0.9), lambda: remaining(empty, 1, 0, 0.75)):
        with pytest.raises(DataError, match=r"empty.*batchmaker profile"):
            use()


@pytest.mark.parametrize("quantile", [0.0, 1.0, -1.0, math.nan])
def test_quantiles_outside_of_the_open_interval_are_refused(quantile: float):
    profile = profile_of([(1, 2)])
    with pytest.raises(OptionError, match="quantile"):
        remaining(profile, 1, 0, quantile)
    with pytest.raises(OptionError, match="quantile"):
        profile.fixed(quantile)


@pytest.mark.parametrize(("given", "steps"), [([1, 2], [1]), ([-1], [1]), ([1], [0]), ([1.5], [1]), ([[1]], [[1]])])
def test_lengths_that_are_none_are_refused(given, steps):
    with pytest.raises(OptionError):
        LengthProfile.from_pairs(given, steps)


@pytest.mark.parametrize(
    ("edges", "counts"),
    [([3, 3], [[0, 1]] * 3), ([3], [[0, 1]]), ([], [[1, 1]]), ([], [[0, -1]]), ([], [[0]]), ([], [0, 1])],
)
def test_counts_that_are_no_profile_are_refused(edges, counts):
    with pytest.raises(DataError, match="length profile"):
        LengthProfile(edges, counts)


@pytest.mark.parametrize("known", [0, 200, MAX_SAMPLES - 40])
def test_runs_that_are_learnt_together_are_learnt_as_one_by_one(known: int) -> None:
    rng = np.random.default_rng(known)
    given, steps = rng.integers(1, 50, 100), rng.integers(1, 60, 100)
    together, one_by_one = (
        LengthProfile.from_pairs(np.resize(given, max(known, 1)), np.resize(steps, max(known, 1))) for _ in range(2)
    )
    together.observe_all(given, steps)
    for one, taken in zip(given.tolist(), steps.tolist(), strict=True):
        one_by_one.observe(one, taken)
    np.testing.assert_array_equal(together.counts, one_by_one.counts)
    assert together.num_samples == one_by_one.num_samples


@pytest.mark.parametrize("known", [1, 30, 1000])
def test_a_table_is_the_same_until_so_many_runs_have_been_learnt(known: int) -> None:
    profile = LengthProfile.from_pairs(np.ones(known, int), np.full(known, 5))
    table, until = profile.table(0.75), profile.num_until_stale
    for _ in range(until - 1):
        profile.observe(1, 9)
        assert profile.table(0.75) is table
    profile.observe(1, 9)
    assert profile.table(0.75) is not table
