"""Priorities and deadlines where the policy only ranks cell types: events in, commands out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness, cell_type, chain, host
from test_scheduler_properties import play, settings_of_a_run

from batchmaker.core.commands import RunTask
from batchmaker.core.events import CellTypeAdded, RequestArrived, StepsFinished
from batchmaker.core.invariants import check_state
from batchmaker.core.scheduler import Scheduler
from batchmaker.core.urgency import Urgency
from batchmaker.graph.recorder import Recorder
from batchmaker.policies import SufficientPolicy
from insides import hurry, state_of

A, B = cell_type(0, "a", 2, sizes=(1, 2)), cell_type(1, "b", 2, sizes=(1, 2))


def scheduler_of(*cells: Any, **options: Any) -> Scheduler:
    scheduler = Scheduler(SufficientPolicy(), **options)
    scheduler.handle(*(CellTypeAdded(cell, 0.0) for cell in cells))
    return scheduler


def arrival(request: int, cell: Any, length: int, at_s: float, **facts: Any) -> RequestArrived:
    recorder = Recorder()
    recorder.run(cell, [host(*range(length))], None)
    return RequestArrived(request, recorder.take(), at_s, **facts)  # type: ignore[arg-type]


class Device:
    """One worker whose steps take a second each: says who is in every step."""

    def __init__(self, scheduler: Scheduler, *events: RequestArrived) -> None:
        self.scheduler = scheduler
        self.now_s = 0.0
        self.ran: list[tuple[str, tuple[int, ...]]] = []
        self._task: RunTask | None = None
        self.tell(*events)

    def tell(self, *events: Any) -> None:
        for command in self.scheduler.handle(*events):
            if isinstance(command, RunTask):
                self._task = command
                owners = self.scheduler.owners(command.steps[0].nodes)
                self.ran.append((self.scheduler.cells[command.type_id].name, tuple(sorted(owners))))  # type: ignore[type-var]
        check_state(self.scheduler.state)

    def step(self, *events: RequestArrived) -> None:
        """One second goes by: the step ends and these requests come."""
        self.now_s += 1.0
        assert self._task is not None
        task, self._task = self._task, None
        self.tell(StepsFinished(task.task, 0, 1, self.now_s, busy_s=1.0), *events)


def test_the_type_of_the_request_with_the_highest_priority_runs_first() -> None:
    device = Device(scheduler_of(A, B), arrival(1, A, 2, 0.0), arrival(2, A, 2, 0.0), arrival(3, B, 2, 0.0, priority=1))
    for _ in range(3):
        device.step()
    assert device.ran == [("b", (3,)), ("b", (3,)), ("a", (1, 2)), ("a", (1, 2))]


def test_others_of_its_type_ride_along_and_those_of_low_priority_wait() -> None:
    device = Device(
        scheduler_of(A, B),
        arrival(1, A, 1, 0.0, priority=-1), arrival(2, A, 1, 0.0, priority=-1), arrival(3, B, 2, 0.0),
        arrival(4, B, 1, 0.0, priority=-2),
    )  # fmt: skip
    for _ in range(2):
        device.step()
    assert device.ran == [("b", (3, 4)), ("b", (3,)), ("a", (1, 2))]


def test_without_priorities_and_deadlines_the_policys_order_stands() -> None:
    device = Device(scheduler_of(A, B), arrival(1, A, 1, 0.0), arrival(2, B, 1, 0.0), arrival(3, B, 1, 0.0))
    device.step()
    assert device.ran == [("b", (2, 3)), ("a", (1,))]


def hurrying(deadline_s: float | None, **facts: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Two long chains of a, as full a batch as there can be, and one short chain of b: what runs in each second.

    One step of each type has been measured before, at a second.
    """
    device = Device(scheduler_of(A, B), arrival(1, A, 1, 0.0), arrival(2, B, 1, 0.0))
    device.step()
    device.step(arrival(3, A, 30, 2.0), arrival(4, A, 30, 2.0), arrival(5, B, 3, 2.0, deadline_s=deadline_s, **facts))
    for _ in range(20):
        device.step()
    return device.ran[2:]


def test_a_request_whose_time_runs_out_raises_its_types_and_is_done_in_time() -> None:
    """Three steps take three seconds alone: twice that before its deadline it goes first."""
    ran = hurrying(20.0)
    assert [what for what, _ in ran].index("b") == 14 - 2
    assert ran[12:15] == [("b", (5,))] * 3


def test_a_request_without_a_deadline_waits_for_its_turn() -> None:
    assert not any(what == "b" for what, _ in hurrying(None))


def test_a_request_in_a_hurry_does_not_pass_one_of_higher_priority() -> None:
    device = Device(scheduler_of(A, B), arrival(1, A, 1, 0.0), arrival(2, B, 1, 0.0))
    device.step()
    device.step(arrival(3, A, 4, 2.0, priority=1), arrival(5, B, 3, 2.0, deadline_s=9.0))
    for _ in range(4):
        device.step()
    assert [what for what, _ in device.ran[2:]] == ["a"] * 4 + ["b"]


def test_within_a_type_the_one_in_a_hurry_is_in_the_batch() -> None:
    device = Device(scheduler_of(A), arrival(1, A, 1, 0.0))
    device.step(*(arrival(2 + i, A, 9, 1.0) for i in range(4)), arrival(9, A, 2, 1.0, deadline_s=8.0))
    for _ in range(8):
        device.step()
    assert [requests for _, requests in device.ran[1:]][:7] == [(2, 3), (2, 3), (2, 3), (2, 9), (2, 9), (2, 3), (2, 3)]


def test_after_its_deadline_a_request_is_like_any_other_again() -> None:
    """Where late requests are finished all the same, they do not make others late."""
    device = Device(scheduler_of(A, B, give_up_late=False), arrival(1, A, 1, 0.0), arrival(2, B, 1, 0.0))
    device.step()
    late = arrival(5, B, 9, 2.0, deadline_s=5.0)
    device.step(arrival(3, A, 9, 2.0), arrival(4, A, 9, 2.0), late)
    for _ in range(6):
        device.step()
    assert [what for what, _ in device.ran[2:]] == ["b"] * 3 + ["a"] * 4


@pytest.mark.parametrize("facts", [{"priority": 5}, {"deadline_s": 1e9}])
def test_ageing_lets_other_types_on_behind_a_stream_of_urgent_requests(facts: dict[str, Any]) -> None:
    core = Harness([A, B], policy=SufficientPolicy(), patience=10, check_always=False)
    core.arrive(0, chain(B, 3))
    for request in range(1, 200):
        core.arrive(request, chain(A, 2), 0.5 * request, **facts)
    core.run()
    core.check_nothing_left()
    assert core.left_s(0) <= 3 * (10 + 2)


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(settings_of_a_run(), st.floats(0.1, 40.0))
def test_books_balance_whenever_requests_are_hurried(run: dict[str, Any], hurry: float) -> None:
    """Steps seem to take so long that deadlines bring requests to the fore at any time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("batchmaker.core.urgency.HURRY", hurry)
        patch.setattr("batchmaker.core.urgency.Urgency.step_finished", lambda self, *_: None)
        hurry_every_other(patch, hurry)
        play(run | {"policy": "sufficient"}).check_nothing_left()


def hurry_every_other(patch: pytest.MonkeyPatch, after_s: float) -> None:
    """Hurry every other request from a moment on until some time later, deadline or not."""
    look, came = Urgency.look, list[int]()

    def more_work(urgency: Any, slot: int, graph: Any) -> None:
        came.append(state_of(urgency).id_of(slot))

    def look_and_hurry(urgency: Any, now_s: float) -> None:
        for request in came:
            if request % 2:
                hurry(urgency, request, now_s + after_s / 10, now_s + after_s)
        came.clear()
        look(urgency, now_s)

    patch.setattr(Urgency, "more_work", more_work)
    patch.setattr(Urgency, "look", look_and_hurry)


# --- cohorts -----------------------------------------------------------------------------------------------------


def test_a_cohort_is_done_before_those_who_came_meanwhile() -> None:
    """By its ratio and its number a would go on for as long as newcomers keep coming."""
    wide = cell_type(0, "a", 2, sizes=(1, 50))
    device = Device(scheduler_of(wide, B), arrival(1, wide, 2, 0.0), arrival(2, wide, 2, 0.0), arrival(3, B, 3, 0.0))
    for number in range(6):
        device.step(arrival(10 + 2 * number, wide, 1, 0.0), arrival(11 + 2 * number, wide, 1, 0.0))
    assert [what for what, _ in device.ran[:5]] == ["a", "a", "b", "b", "b"]


def test_newcomers_who_fill_a_batch_have_every_other_task_at_most() -> None:
    device = Device(scheduler_of(A, B), arrival(1, A, 2, 0.0), arrival(2, A, 2, 0.0), arrival(3, B, 3, 0.0))
    for number in range(8):
        device.step(arrival(10 + 2 * number, A, 1, 0.0), arrival(11 + 2 * number, A, 1, 0.0))
    assert [what for what, _ in device.ran[:6]] == ["a", "a", "a", "b", "a", "b"]


def test_newcomers_who_fill_a_batch_do_not_pass_a_higher_priority() -> None:
    device = Device(scheduler_of(A, B), arrival(1, A, 1, 0.0), arrival(2, B, 3, 0.0, priority=1))
    for number in range(4):
        device.step(arrival(10 + 2 * number, A, 1, 0.0), arrival(11 + 2 * number, A, 1, 0.0))
    assert [what for what, _ in device.ran[:3]] == ["b"] * 3


def test_newcomers_ride_along_in_the_batches_of_a_cohort() -> None:
    device = Device(scheduler_of(A, B), arrival(1, A, 3, 0.0))
    device.step(arrival(2, A, 3, 1.0))
    device.step()
    assert device.ran == [("a", (1,)), ("a", (1, 2)), ("a", (1, 2))]


def test_a_long_request_does_not_keep_newcomers_waiting() -> None:
    """Requests have two nodes, but for one: a newcomer is done after a few tasks, though a is preferred to b."""
    device = Device(scheduler_of(A, B))
    device.tell(*(arrival(i, A, 2, 0.0) for i in range(40)), arrival(90, A, 500, 0.0), arrival(91, A, 500, 0.0))
    for _ in range(45):
        device.step()
    device.step(arrival(99, B, 2, 46.0))
    for _ in range(3):
        device.step()
    assert device.ran[-4:] == [("a", (90, 91)), ("b", (99,)), ("a", (90, 91)), ("b", (99,))]


def test_requests_that_come_together_are_one_cohort_to_the_end() -> None:
    """However long it takes: nothing but the policy decides."""
    device = Device(scheduler_of(A, B), arrival(1, A, 40, 0.0), arrival(2, A, 1, 0.0), arrival(3, B, 1, 0.0))
    for _ in range(40):
        device.step()
    assert [what for what, _ in device.ran] == ["a"] * 40 + ["b"]
