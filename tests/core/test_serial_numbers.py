"""The numbers by which subgraphs stand in line never run out, and nobody changes places when they begin again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness, cell_type, chain, complete_tree, same
from test_scheduler_properties import play, settings_of_a_run

from batchmaker.core.layout import NEXT_SERIAL, SERIAL_LIMIT

LEAF, INNER, LOOP = cell_type(0, "leaf"), cell_type(1, "inner", inputs=2), cell_type(2, "loop")

STARTS = [SERIAL_LIMIT - 1, SERIAL_LIMIT, 2**27 - 2, 2**27, 2**31 - 2, 2**31, 2**62]


def commands_from(harness: Harness, start: int, jumps: dict[int, int]) -> list[Any]:
    """What a scheduler says to the same events that has come as far as `start`. jumps: numbers that it leaves out
    before an event."""
    again = harness.make()
    arena = again.state.arena
    arena.counts[NEXT_SERIAL] = start
    commands = []
    for number, events in enumerate(harness.events):
        arena.counts[NEXT_SERIAL] += jumps.get(number, 0)
        commands += again.handle(*events)
        again.check_invariants()
        assert all((arena.ready_keys(type_id) >= 0).all() for type_id in range(arena.types.shape[1]))
    return commands


@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(
    run=settings_of_a_run(),
    start=st.sampled_from(STARTS) | st.integers(SERIAL_LIMIT - 60, SERIAL_LIMIT),
    jumps=st.dictionaries(st.integers(0, 60), st.integers(SERIAL_LIMIT - 40, SERIAL_LIMIT), max_size=4),
)
def test_who_runs_when_does_not_depend_on_how_many_have_run_before(
    run: dict[str, Any], start: int, jumps: dict[int, int]
) -> None:
    harness = play(run)
    commands = commands_from(harness, start, jumps)
    assert len(commands) == len(harness.commands)
    assert all(same(one, other) for one, other in zip(commands, harness.commands, strict=True))


@pytest.mark.parametrize("start", STARTS)
def test_numbers_begin_again_with_requests_in_flight_before_they_run_out(start: int) -> None:
    harness = Harness([LEAF, INNER, LOOP], num_workers=2, run_ahead=1)
    programs = (complete_tree(LEAF, INNER, 8), chain(INNER, 5), chain(LOOP, 5, open_ended=True))
    for request in range(30):
        harness.arrive(request, programs[request % 3], at_s=request / 4, priority=request % 2)
    counts = harness.scheduler.state.arena.counts
    counts[NEXT_SERIAL] = start - 20
    lowest = []
    for at_s in range(20):
        harness.run(until_s=at_s)
        lowest.append(int(counts[NEXT_SERIAL]))
    harness.run()
    harness.check_nothing_left()
    assert lowest[-1] < 2000, "numbers have begun again"
    assert harness.scheduler.num_requests == 0
