"""The state of depth agree with what has run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_scheduler_properties import play, settings_of_a_run

from batchmaker.core.depths import Depths
from batchmaker.core.scheduler import Scheduler
from batchmaker.policies import AgendaRemainingPolicy


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(settings_of_a_run(), st.sampled_from(["agenda-remaining", "depth"]))
def test_nothing_is_left_of_a_request_that_is_answered(run: dict[str, Any], policy: str) -> None:
    leave, num_left = Depths.leave, 0

    def checked(entry: Depths, slot: int) -> None:
        nonlocal num_left
        num_left += 1
        assert not entry.left_of_slot[:, :, slot].any()
        leave(entry, slot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Depths, "leave", checked)
        play(run | {"mishaps": False, "policy": policy})
    assert num_left == run["num_requests"] + run["num_sequences"] * run["num_chunks"]


def test_a_scheduler_in_which_nothing_is_in_flight_has_nothing_left() -> None:
    scheduler = Scheduler(AgendaRemainingPolicy())
    scheduler.check_invariants()
    assert not scheduler.depths.left.any()
