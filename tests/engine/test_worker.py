"""How many requests the worker takes at once, by the time that they take. The clock is virtual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from batchmaker.clock import VirtualClock
from batchmaker.core.events import RequestId
from batchmaker.engine.incoming import FEWEST_ARRIVALS, MOST_ARRIVALS, SOON_S
from batchmaker.engine.request import Ticket
from batchmaker.engine.worker import Worker


class Taking:
    """A driver of which each request takes `each_s` seconds. taken: how many it was given in each turn."""

    wants_requests = True
    has_live_streams = False
    begin_together: int | None = None
    num_in_flight = 0

    def __init__(self, clock: VirtualClock, each_s: float) -> None:
        self.clock = clock
        self.each_s = each_s
        self.taken: list[int] = []

    def next_wakeup_s(self) -> None:
        """Nothing is due."""

    def poll(self) -> None:
        """Nothing is computed."""

    def advance(self, tickets: Sequence[Ticket]) -> None:
        """Note how many have come."""
        self.taken.append(len(tickets))
        self.clock.advance(self.each_s * len(tickets))


def turned(driver: Taking, *bursts: int) -> list[int]:
    """Return how many requests each turn takes where these many come, each burst once the one before it is taken."""
    worker = Worker(cast(Any, driver), lambda failed: failed, driver.clock, lambda *_: None)
    for burst in bursts:
        worker.send([Ticket(RequestId(i), None, 0.0, None, model=cast(Any, None)) for i in range(burst)])
        sent = sum(driver.taken) + burst
        while sum(driver.taken) < sent:
            worker._turn()
    return driver.taken


@pytest.mark.parametrize(
    ("each_s", "taken"), [(1e-6, MOST_ARRIVALS), (SOON_S / 100, 100), (1e-3, FEWEST_ARRIVALS), (1.0, FEWEST_ARRIVALS)]
)
def test_as_many_requests_are_taken_together_as_take_20_ms_within_bounds(each_s: float, taken: int) -> None:
    first, *following, _ = turned(Taking(VirtualClock(), each_s), 2000)
    assert first == FEWEST_ARRIVALS  # nothing is known yet
    assert set(following) <= {taken, taken - 1}  # a clock that adds up seconds may be off by one


def test_fewer_are_taken_after_a_turn_that_was_too_long_though_it_was_not_full() -> None:
    driver = Taking(VirtualClock(), 1e-6)
    turned(driver, 1000)
    assert MOST_ARRIVALS in driver.taken
    driver.each_s = 1e-3
    worker = Worker(cast(Any, driver), lambda failed: failed, driver.clock, lambda *_: None)
    worker._incoming._most_arrivals = MOST_ARRIVALS
    driver.taken.clear()
    for burst in (200, 500):
        worker.send([Ticket(RequestId(i), None, 0.0, None, model=cast(Any, None)) for i in range(burst)])
        worker._turn()
    assert driver.taken == [200, FEWEST_ARRIVALS]


def test_beside_live_streams_that_keep_the_workers_busy_only_urgent_requests_begin() -> None:
    driver = Taking(VirtualClock(), 1e-6)
    driver.has_live_streams, driver.wants_requests = True, False
    worker = Worker(cast(Any, driver), lambda failed: failed, driver.clock, lambda *_: None)
    worker.send([Ticket(RequestId(i), None, 0.0, None, model=cast(Any, None)) for i in range(2000)])
    worker._incoming.take()
    assert not worker._should_accept()  # the next turn waits for something to come, however many there are
    worker.send([Ticket(RequestId(2000), None, 0.0, 1.0, model=cast(Any, None))])  # with a deadline
    worker._turn()
    assert driver.taken == [1]
    assert worker._incoming.num_waiting == 2000
    assert not worker._should_accept()


def test_requests_that_begin_together_wait_until_those_in_flight_are_done_but_for_urgent_ones() -> None:
    driver = Taking(VirtualClock(), 1e-6)
    worker = Worker(cast(Any, driver), lambda failed: failed, driver.clock, lambda *_: None)
    driver.begin_together, driver.wants_requests = 512, False
    worker.send([Ticket(RequestId(i), None, 0.0, None, model=cast(Any, None)) for i in range(600)])
    worker._incoming.take()
    assert not worker._should_accept()
    worker.send([Ticket(RequestId(600), None, 0.0, None, model=cast(Any, None), priority=1)])
    worker._incoming.take()
    assert worker._should_accept()
    worker._accept()
    driver.wants_requests = True  # nothing is in flight
    worker._turn()
    assert driver.taken == [FEWEST_ARRIVALS, 512]
