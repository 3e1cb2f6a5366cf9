"""Forecasts equal playing the requests forward step by step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from batchmaker.cost.replay import Replay

MAX_BATCH = 4


def step_by_step(seconds: np.ndarray, steps: np.ndarray, width: np.ndarray) -> tuple[np.ndarray, float]:
    """Laggards first: type after type, everybody who still has a step of it."""
    left, now_s = steps.copy(), 0.0
    finish_s = np.zeros(len(steps))
    for kind in range(steps.shape[1]):
        while left[:, kind].any():
            running = left[:, kind] > 0
            whole, rest = divmod(int(np.ceil(width[running, kind].sum() - 1e-6)), MAX_BATCH)
            now_s += whole * seconds[kind, MAX_BATCH] + seconds[kind, rest]
            left[running, kind] -= 1
            finish_s[running & ~left.any(axis=1)] = now_s
    return finish_s, now_s


@st.composite
def situations(draw):
    requests, types = draw(st.integers(0, 7)), draw(st.integers(1, 4))
    steps = draw(arrays.arrays(np.int64, (requests, types), elements=st.integers(0, 5)))
    more = draw(arrays.arrays(np.float64, (types, MAX_BATCH), elements=st.floats(0.0, 1.0, width=16)))
    width = draw(arrays.arrays(np.float64, (requests, types), elements=st.sampled_from([1.0, 2.5, 3.0])))
    seconds = np.concatenate((np.zeros((types, 1)), np.cumsum(more, axis=1)), axis=1)
    return seconds, steps, width


@given(situations(), st.integers(0, 7))
def test_forecasts_equal_playing_forward_step_by_step(situation, num_fixed):
    seconds, steps, width = situation
    num_fixed = min(num_fixed, len(steps))
    for rows in (None, width):
        found = Replay(seconds).forecasts(steps, num_fixed, rows)
        for joining in range(len(steps) - num_fixed + 1):
            count = num_fixed + joining
            ones = np.ones_like(width) if rows is None else rows
            finish_s, drain_s = step_by_step(seconds, steps[:count], ones[:count])
            np.testing.assert_allclose(found.finish_s[joining, :count], finish_s, atol=1e-9)
            assert found.drain_s[joining] == pytest.approx(drain_s)


@given(situations())
def test_alone_is_what_a_request_takes_with_nobody_else_there(situation):
    seconds, steps, _ = situation
    replay = Replay(seconds)
    alone_s = [replay.forecasts(steps[i : i + 1], 1).drain_s[0] for i in range(len(steps))]
    np.testing.assert_allclose(replay.alone(steps), alone_s, atol=1e-9)


def test_with_nobody_in_flight_everything_is_done_at_once():
    nothing = Replay(np.ones((2, 3))).forecasts(np.zeros((0, 2), np.int64), 0)
    assert nothing.finish_s.shape == (1, 0)
    assert nothing.drain_s.tolist() == [0.0]
