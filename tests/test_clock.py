"""Clocks tell seconds since their own start and never run back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmaker import clock
from batchmaker.clock import Clock, RealClock, VirtualClock


def test_real_clock_counts_seconds_from_its_own_start(monkeypatch):
    readings = iter([100.0, 100.0, 102.5])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(readings))
    real = RealClock()
    assert real.now_s() == 0.0
    assert real.now_s() == 2.5


def test_real_clock_never_runs_back():
    real: Clock = RealClock()
    readings = [real.now_s() for _ in range(100)]
    assert readings[0] >= 0.0
    assert readings == sorted(readings)


def test_virtual_clock_stands_still_until_moved():
    virtual: Clock = VirtualClock(3.0)
    assert [virtual.now_s(), virtual.now_s()] == [3.0, 3.0]


def test_virtual_clock_starts_at_zero_and_moves_by_what_it_is_told():
    virtual = VirtualClock()
    assert virtual.advance(0.25) == 0.25
    assert virtual.advance(0.5) == 0.75
    assert virtual.now_s() == 0.75


def test_virtual_clock_refuses_to_run_back_and_keeps_its_time():
    virtual = VirtualClock(1.0)
    with pytest.raises(ValueError, match=r"only moves forward, got -0\.5 s"):
        virtual.advance(-0.5)
    assert virtual.now_s() == 1.0


@given(st.lists(st.floats(min_value=0.0, max_value=1e6)))
def test_virtual_time_is_the_sum_of_its_advances(steps_s):
    virtual = VirtualClock()
    readings = [virtual.advance(step_s) for step_s in steps_s]
    assert readings == sorted(readings)
    assert virtual.now_s() == pytest.approx(sum(steps_s))
