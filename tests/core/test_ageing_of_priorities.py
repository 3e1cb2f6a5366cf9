"""However long a flood of higher priorities lasts, a request of a lower one is answered; strictly, it is not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness, cell_type, chain, host

from batchmaker import policies
from batchmaker.policies.ageing import AGED_EVERY
from batchmaker.policies.beginning import behind_their_equals
from covering import covering

CELL, OTHER = cell_type(0, "cell", 2, sizes=(1, 2, 4)), cell_type(1, "other", 2, sizes=(1, 2, 4))
LOW = 10**6
"""The number of the request in the flood."""


def steps_in_a_row(cell, count):
    """A request of single nodes, each of which reads the one before: it stands in the queue again for each."""

    def program(recorder):
        value = host(0)
        for _ in range(count):
            (value,) = recorder.node(cell, [value, host(1)])
        return [value]
        yield

    return program


class Flood:
    """One request of a low priority among twice as many of a high one as the workers can compute, for `lasts`.

    The flood's requests are chains of `steps`. A worker runs four of them together, each step in a unit of time.
    """

    def __init__(
        self, policy, *, priority=1, cells=(CELL,), steps=4, at_s=5.0, length=3, lasts=300, workers=1, every=AGED_EVERY,
        program=None,
    ):  # fmt: skip
        one = Harness(
            [CELL, OTHER], policy=policies.make(policy), num_workers=workers, aged_every=every, check_always=False
        )
        coming = max(2, 8 // steps) * workers
        for number in range(lasts * coming):
            for cell in cells:
                at = float(number // coming)
                one.arrive(2 * number + cell.type_id, chain(cell, steps), at, priority=priority)
        one.arrive(LOW, program or chain(cells[-1], length), at_s)
        one.run(until_s=lasts)
        self.answered = LOW in one.answers
        self.took_s = one.left_s(LOW) - at_s if self.answered else float("inf")
        self.steps = [set(ran.requests) for ran in one.log]


ONE_TYPE = ["cellular", "cellular:max_steps=5", "agenda", "depth", "sufficient", "auto", "lazy", "closed:max_batch=4"]
TYPES_BY_PRIORITY = ["sufficient", "auto"]
"""Under the others a type may wait behind another whatever the priorities; see `Ageing`."""


@pytest.mark.slow
@pytest.mark.parametrize("policy", ONE_TYPE)
def test_in_a_flood_of_a_higher_priority_a_request_is_answered_and_strictly_it_is_not(policy):
    assert Flood(policy).answered
    assert not Flood(policy, every=None, lasts=100).answered


@pytest.mark.parametrize(("policy", "workers"), covering(TYPES_BY_PRIORITY, [1, 2]))
def test_so_is_one_that_uses_another_cell_than_half_of_the_flood(policy, workers):
    assert Flood(policy, cells=(CELL, OTHER), workers=workers).answered
    assert not Flood(policy, cells=(CELL, OTHER), workers=workers, every=None, lasts=100).answered


@pytest.mark.slow
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(["cellular:max_steps=1", "agenda", "sufficient"]), st.integers(1, 2**32), st.integers(1, 5),
    st.integers(0, 20), st.integers(1, 4), st.integers(1, 2),
)  # fmt: skip
def test_it_takes_at_most_eight_times_as_long_as_with_equal_priorities(policy, priority, steps, at_s, length, workers):
    """Where all tasks take equally long: turns are counted, not seconds."""
    facts = {"steps": steps, "at_s": float(at_s), "length": length, "workers": workers}
    equal = Flood(policy, priority=0, lasts=100, **facts)
    assert equal.answered
    aged = Flood(policy, priority=priority, lasts=int(AGED_EVERY * (equal.took_s + 1) + at_s + 2), **facts)
    assert aged.took_s <= AGED_EVERY * (equal.took_s + 1)


def test_a_request_that_stands_in_the_queue_again_for_each_of_its_steps_is_answered():
    assert Flood("agenda", steps=2, program=steps_in_a_row(CELL, 3)).answered
    assert not Flood("agenda", steps=2, program=steps_in_a_row(CELL, 3), lasts=100, every=None).answered


def test_the_flood_loses_at_most_one_turn_of_eight():
    flood = Flood("cellular", lasts=200, length=200)
    assert sum(LOW in step for step in flood.steps) <= len(flood.steps) / AGED_EVERY + 1


def test_a_flood_that_leaves_room_in_its_batches_loses_nothing():
    """Three rows of four: the fourth is for the low priority in every step, and no turn is taken by age."""
    one, strict = (Harness([CELL], aged_every=every) for every in (AGED_EVERY, None))
    for harness in (one, strict):
        for request in range(3):
            harness.arrive(request, chain(CELL, 40), priority=1)
        harness.arrive(LOW, chain(CELL, 40))
        harness.run()
    assert one.timeline() == strict.timeline()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=30))
def test_those_who_cannot_be_in_time_stand_behind_their_equals_and_take_no_place_of_another_priority(waiting):
    """Where the line has put a low priority forward, `auto` does not put it back."""
    line = np.arange(len(waiting), dtype=np.int64)  # slots
    hopeless, priority = (np.array([one[i] for one in waiting], kind) for i, kind in enumerate((np.bool_, np.int64)))
    ordered = behind_their_equals(line, hopeless, priority)
    assert sorted(ordered) == line.tolist()
    assert priority[ordered].tolist() == priority.tolist()
    for one in range(3):
        theirs = [slot for slot in ordered.tolist() if priority[slot] == one]
        assert theirs == sorted(theirs, key=lambda slot: (hopeless[slot], slot))


@pytest.mark.parametrize("every", [AGED_EVERY, None])
def test_equal_priorities_make_one_order_aged_or_strict(every):
    one = Flood("cellular", priority=0, lasts=40, every=every)
    assert one.steps == Flood("cellular", priority=0, lasts=40, every=2).steps
