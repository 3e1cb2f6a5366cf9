"""Requests of a higher priority go first among the ready nodes of a type; nothing is lost on the way."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness, cell_type, chain

CELL = cell_type(0, "step", inputs=2, sizes=(1, 2))


def test_a_late_request_of_high_priority_takes_the_place_of_the_first_in_line() -> None:
    core = Harness([CELL])
    for request in range(4):
        core.arrive(request, chain(CELL, 3))
    core.arrive(9, chain(CELL, 3), at_s=0.5, priority=1)
    core.run()
    core.check_nothing_left()
    running = [requests for _, _, requests in core.timeline()]
    assert running[:4] == [(0, 1), (0, 9), (0, 9), (1, 9)]
    assert core.left_s(9) == 4.0


def test_a_low_priority_waits_until_no_other_request_is_ready() -> None:
    core = Harness([CELL])
    core.arrive(1, chain(CELL, 2), priority=-1)
    for request in (2, 3, 4):
        core.arrive(request, chain(CELL, 2))
    core.run()
    core.check_nothing_left()
    assert max(core.answers, key=core.left_s) == 1


def test_requests_of_one_priority_keep_the_order_in_which_they_came() -> None:
    def order(priority: int) -> Any:
        core = Harness([CELL])
        for request in range(5):
            core.arrive(request, chain(CELL, 1 + request % 3), at_s=float(request % 2), priority=priority)
        core.run()
        core.check_nothing_left()
        return core.timeline()

    assert order(0) == order(7) == order(-7)


@given(
    requests=st.lists(st.tuples(st.integers(-2, 2), st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=14),
    num_workers=st.integers(1, 2),
)
@settings(max_examples=100)
def test_where_priorities_are_strict_no_batch_leaves_a_ready_node_of_a_higher_one_behind(
    requests: Any, num_workers: int
) -> None:
    core = Harness([CELL], num_workers=num_workers, aged_every=None)
    for request, (priority, length, at_s) in enumerate(requests):
        core.arrive(request, chain(CELL, length), float(at_s), priority=priority)
    core.run()
    core.check_nothing_left()
    left_s = {request: core.left_s(request) for request in core.answers}
    for ran in core.log:
        lowest = min(requests[request][0] for request in ran.requests)
        for request, (priority, _, at_s) in enumerate(requests):
            if priority <= lowest or not at_s <= ran.start_s < left_s[request] or request in ran.requests:
                continue
            elsewhere = [r for r in core.log if request in r.requests and r.start_s <= ran.start_s < r.finish_s]
            assert elsewhere, f"at {ran.start_s}, request {request} of priority {priority} waits for {lowest}"
