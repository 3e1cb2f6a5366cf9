"""The fastest way to compute a recurrent step is found by trials, by a clock that the test moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from batchmaker.kernels.cpu import choice
from batchmaker.kernels.cpu.steps import BF16, BLOCK, TILED
from insides import loop_times


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Seconds of processor time; `spend` moves them."""
    now = SimpleNamespace(s=0.0)

    def spend(seconds: float) -> None:
        now.s += seconds

    now.spend = spend
    monkeypatch.setattr(choice, "time", SimpleNamespace(thread_time=lambda: now.s))
    return now


def test_a_hopeless_way_is_tried_twice_and_the_others_until_time_is_over(clock):
    tried: list[str] = []

    def taking(name: str, seconds: float) -> Any:
        return lambda: (tried.append(name), clock.spend(seconds))

    least = choice.least_s([taking("slow", 1e-3), taking("quick", 1e-4), taking("near", 2e-4)])
    assert least == pytest.approx([1e-3, 1e-4, 2e-4])
    assert (tried.count("slow"), tried.count("quick")) == (2, tried.count("near"))
    assert tried.count("quick") > 2


def test_what_is_slow_for_a_block_is_not_taken_for_few_rows(clock, monkeypatch):
    """Sizes are slow enough that the time limit is over after the first one."""

    def times(loop: Any, step: Any, n: int) -> Any:
        clock.spend(1.0)
        way = TILED if n < 64 else BF16
        return loop_times(way, compiled_s=n * 1e-3, products_s=8e-3, step_s=4.5e-3)

    monkeypatch.setattr(choice, "_times", times)
    monkeypatch.setattr(choice, "_compile", lambda loop: None)
    loop = SimpleNamespace(products=SimpleNamespace(ways=[TILED, BF16]), plan=None)
    faster = choice.choose(loop, lambda n: lambda: None, [1, 8, 64, 256])  # type: ignore[arg-type]
    assert loop.plan.ways[8] == TILED
    assert (loop.plan.ways[9], loop.plan.ways[BLOCK]) == (BF16, BF16)
    assert np.array_equal(np.flatnonzero(faster), np.arange(5))  # 4 ms, beside the step's 4.5
