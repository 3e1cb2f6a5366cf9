"""What an engine changes in the interpreter when it starts."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest
from engine_models import Sums

import batchmaker as bm
from batchmaker.engine.python_settings import COLLECT_AFTER, SWITCH_INTERVAL_S


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    interval_s, thresholds = sys.getswitchinterval(), gc.get_threshold()
    yield
    sys.setswitchinterval(interval_s)
    gc.set_threshold(*thresholds)


def test_threads_take_turns_more_often_and_the_collector_looks_more_seldom_once_an_engine_has_started() -> None:
    sys.setswitchinterval(5e-3)
    gc.set_threshold(700)
    with bm.Engine(Sums(), threads=1):
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S, abs=2e-6)
        assert gc.get_threshold()[0] == COLLECT_AFTER


@pytest.mark.parametrize("young", [0, 5 * COLLECT_AFTER])
def test_a_collector_that_is_off_or_looks_more_seldom_already_and_a_shorter_interval_stay(young: int) -> None:
    sys.setswitchinterval(1e-4)
    gc.set_threshold(young)
    with bm.Engine(Sums(), threads=1):
        assert sys.getswitchinterval() == pytest.approx(1e-4, abs=2e-6)
        assert gc.get_threshold()[0] == young
