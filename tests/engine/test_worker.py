"""How many requests the worker takes at once, by the time that they take. The clock is virtual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from raising_models import Sums

import batchmaker as bm
from batchmaker.clock import VirtualClock
from batchmaker.core.events import RequestId
from batchmaker.engine.incoming import FEWEST_ARRIVALS, MOST_ARRIVALS, SOON_S
from batchmaker.engine.request import Ticket
from batchmaker.engine.worker import Worker
from batchmaker.executor.null import NullExecutor
from insides import turn


class Taking:
    """A driver of which each request takes `each_s` seconds. taken: how many it was given in each turn."""

    wants_requests = True
    has_live_streams = False
    begin_together: int | None = None
    own_tasks: tuple[str, ...] = ()
    num_in_flight = 0

    def __init__(self, clock: VirtualClock, each_s: float) -> None:
        self.clock = clock
        self.each_s = each_s
        self.taken: list[int] = []

    def next_wakeup_s(self) -> float:
        """A turn waits for nothing."""
        return self.clock.now_s()

    def poll(self) -> None:
        """Nothing is computed."""

    def advance(self, tickets: Sequence[Ticket]) -> None:
        """Note how many have come."""
        self.taken.append(len(tickets))
        self.clock.advance(self.each_s * len(tickets))


def worker_of(driver: Taking) -> Worker:
    return Worker(cast(Any, driver), lambda failed: failed, driver.clock, lambda *_: None)


def tickets(count: int, first: int = 0, deadline_s: float | None = None, priority: int = 0) -> list[Ticket]:
    return [
        Ticket(RequestId(number), None, 0.0, deadline_s, model=cast(Any, None), priority=priority)
        for number in range(first, first + count)
    ]


def turned(worker: Worker, driver: Taking, *bursts: int) -> list[int]:
    """Return how many requests each turn takes where these many come, each burst once the one before it is taken."""
    for burst in bursts:
        worker.send(tickets(burst))
        sent = sum(driver.taken) + burst
        while sum(driver.taken) < sent:
            turn(worker)
    return driver.taken


@pytest.mark.parametrize(
    ("each_s", "taken"), [(1e-6, MOST_ARRIVALS), (SOON_S / 100, 100), (1e-3, FEWEST_ARRIVALS), (1.0, FEWEST_ARRIVALS)]
)
def test_as_many_requests_are_taken_together_as_take_20_ms_within_bounds(each_s: float, taken: int) -> None:
    driver = Taking(VirtualClock(), each_s)
    first, *following, _ = turned(worker_of(driver), driver, 2000)
    assert first == FEWEST_ARRIVALS  # nothing is known yet
    assert set(following) <= {taken, taken - 1}  # a clock that adds up seconds may be off by one


def test_fewer_are_taken_after_a_turn_that_was_too_long_though_it_was_not_full() -> None:
    driver = Taking(VirtualClock(), 1e-6)
    worker = worker_of(driver)
    turned(worker, driver, 1000)
    assert MOST_ARRIVALS in driver.taken
    driver.each_s = 1e-3
    driver.taken.clear()
    for burst in (200, 500):
        worker.send(tickets(burst))
        turn(worker)
    assert driver.taken == [200, FEWEST_ARRIVALS]


def test_beside_live_streams_that_keep_the_workers_busy_only_urgent_requests_begin() -> None:
    driver = Taking(VirtualClock(), 1e-6)
    driver.has_live_streams, driver.wants_requests = True, False
    worker = worker_of(driver)
    worker.send(tickets(2000))
    turn(worker)
    assert driver.taken == [0]  # the next turn waits for something to come, however many there are
    worker.send(tickets(1, first=2000, deadline_s=1.0))
    for _ in range(2):
        turn(worker)
    assert driver.taken == [0, 1, 0]
    driver.has_live_streams, driver.wants_requests = False, True
    for _ in range(100):
        turn(worker)
    assert sum(driver.taken) == 2001


def test_requests_that_begin_together_wait_until_those_in_flight_are_done_but_for_urgent_ones() -> None:
    driver = Taking(VirtualClock(), 1e-6)
    worker = worker_of(driver)
    driver.begin_together, driver.wants_requests = 512, False
    worker.send(tickets(600))
    turn(worker)
    assert driver.taken == [0]
    worker.send(tickets(1, first=600, priority=1))
    turn(worker)
    driver.wants_requests = True  # nothing is in flight
    turn(worker)
    assert driver.taken == [0, FEWEST_ARRIVALS, 512]


def after_a_beginning(each_s: float, count: int, *own_tasks: str, **options: Any) -> tuple[Taking, Worker]:
    """Return a driver that has taken so many requests, and has these tasks; and its worker, to which one more came."""
    driver = Taking(VirtualClock(), each_s)
    worker = worker_of(driver)
    worker.send(tickets(count))
    turn(worker)
    driver.own_tasks = own_tasks
    worker.send(tickets(1, first=count, **options))
    turn(worker)
    return driver, worker


def test_those_in_flight_compute_as_long_as_others_began_before_the_next_begin() -> None:
    driver, worker = after_a_beginning(1e-3, 3, "a task")
    assert driver.taken == [3, 0]
    driver.clock.advance(2.9e-3)
    turn(worker)
    assert driver.taken == [3, 0, 0]
    driver.clock.advance(0.2e-3)
    turn(worker)
    assert driver.taken == [3, 0, 0, 1]


def test_a_beginning_that_took_long_holds_the_next_back_for_20_ms_at_most() -> None:
    driver, worker = after_a_beginning(1.0, 2, "a task")
    driver.clock.advance(SOON_S + 1e-4)
    turn(worker)
    assert driver.taken == [2, 0, 1]


@pytest.mark.parametrize("urgent", [{"deadline_s": 1.0}, {"priority": 1}])
def test_urgent_ones_begin_at_once(urgent: dict[str, Any]) -> None:
    driver, _ = after_a_beginning(1e-3, 3, "a task", **urgent)
    assert driver.taken == [3, 1]


def test_all_begin_at_once_where_the_engines_thread_has_nothing_to_compute() -> None:
    driver, _ = after_a_beginning(1e-3, 3)
    assert driver.taken == [3, 1]


def test_what_another_thread_or_a_device_computes_keeps_nobody_waiting() -> None:
    with bm.Engine(Sums(), executor=NullExecutor()) as elsewhere, bm.Engine(Sums(), threads=1) as here:
        assert not isinstance(elsewhere.driver.own_tasks, dict)
        assert isinstance(here.driver.own_tasks, dict)
