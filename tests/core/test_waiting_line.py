"""Requests that a policy holds back: order, priorities, cancellation, deadlines, progress."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_harness import Harness, cell_type, chain

from batchmaker.errors import InvariantError
from batchmaker.policies.base import Admission, CellPolicy
from batchmaker.policies.line import WaitingLine

CELL = cell_type(0, "cell", sizes=(1, 2, 4))


class OneAtATime(CellPolicy):
    """Holds everybody back for as long as somebody is in flight."""

    name = "one-at-a-time"
    watches_requests: ClassVar[bool] = True
    max_steps = 1

    def rank(self, view):
        return view.ready

    def admit(self, view):
        return Admission(() if len(view.requests.in_flight) else view.waiting(1).tolist())


class Stubborn(OneAtATime):
    """Lets nobody in."""

    def admit(self, view):
        return Admission(())


def test_requests_begin_in_the_order_of_arrival(harness):
    one = harness([CELL], policy=OneAtATime())
    for request in range(3):
        one.arrive(request, chain(CELL, 2))
    assert one.run().timeline() == [(float(t), "cell", (t // 2,)) for t in range(6)]


def test_a_policy_that_lets_nobody_in_does_not_stop_the_world(harness):
    one = harness([CELL], policy=Stubborn())
    for request in range(3):
        one.arrive(request, chain(CELL, 2))
    one.run()
    assert [one.left_s(request) for request in range(3)] == [2.0, 4.0, 6.0]


def test_requests_that_compute_nothing_do_not_hold_up_those_behind_them(harness):
    def nothing(recorder):
        return []
        yield

    one = harness([CELL], policy=OneAtATime())
    for request in range(3):
        one.arrive(request, nothing if request < 2 else chain(CELL, 2))
    one.run()
    assert [one.left_s(request) for request in range(3)] == [0.0, 0.0, 2.0]


def test_a_request_cancelled_in_line_is_never_begun(harness):
    one = harness([CELL], policy=OneAtATime())
    for request in range(3):
        one.arrive(request, chain(CELL, 2))
    one.cancel(1, 0.5)
    one.run()
    assert {requests for _, _, requests in one.timeline()} == {(0,), (2,)}
    assert one.answers[1] == (0.5, "cancelled")


def test_a_deadline_that_passes_in_line_ends_the_request(harness):
    one = harness([CELL], policy=OneAtATime())
    one.arrive(0, chain(CELL, 4))
    one.arrive(1, chain(CELL, 1), deadline_s=2.0)
    one.tick(2.0)
    one.run()
    assert one.answers[1] == (2.0, "deadline")


def test_a_policy_knows_what_is_left_and_what_is_done(harness):
    seen = []

    class Watching(OneAtATime):
        def rank(self, view):
            table = view.requests
            seen.extend((int(table.left[slot, 0]), int(table.done[slot, 0])) for slot in table.in_flight)
            return super().rank(view)

    one = harness([CELL], policy=Watching())
    one.arrive(0, chain(CELL, 3))
    one.run()
    assert seen[:3] == [(3, 0), (2, 1), (1, 2)]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40))
def test_the_line_keeps_priority_and_order_of_arrival_whoever_leaves(moves):
    line, model = WaitingLine(aged_every=None), []
    for slot, (priority, leaves) in enumerate(moves):
        line.join(slot, None, priority)
        model.append((-priority, slot))
        if leaves:
            gone = sorted(model)[len(model) // 2]
            model.remove(gone)
            line.leave(gone[1])
        assert line.first(100).tolist() == [slot for _, slot in sorted(model)]
        assert len(line) == len(model)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=40), st.integers(2, 8))
def test_the_line_says_in_which_order_its_requests_begin(moves, every):
    line, number = WaitingLine(every), 0
    for priority, taken in moves:
        for _ in range(4):
            line.join(number, number, priority)
            number += 1
        said = line.first(100).tolist()
        assert sorted(said) == sorted(line.first(1000).tolist())
        assert len(said) == len(line)
        assert line.take(taken) == said[:taken]
        assert line.first(100).tolist() == said[taken:]


@given(st.lists(st.integers(1, 2**32), min_size=1, max_size=30), st.integers(0, 5), st.integers(2, 8))
def test_whoever_comes_a_request_begins_when_those_before_it_have_begun_and_one_of_so_many_is_the_oldest(
    priorities, ahead, every
):
    """However many join with higher priorities whenever one begins."""
    line, number = WaitingLine(every), 0
    for _ in range(ahead + 1):
        line.join(number, number, 0)
        number += 1
    begun = []
    while ahead not in begun:
        for priority in priorities:
            line.join(number, number, priority)
            number += 1
        begun += line.take(1)
    assert len(begun) <= every * (ahead + 1)


def test_those_who_give_up_do_not_bring_the_turn_of_the_oldest_nearer():
    line = WaitingLine()
    line.join(0, "low", 0)
    for number in range(1, 101):
        line.join(number, "high", 1)
    for number in range(1, 51):
        line.leave(number)
    assert line.first(8).tolist() == [51, 52, 53, 54, 55, 56, 57, 0]
    assert line.take(8) == ["high"] * 7 + ["low"]
    assert line.oldest() == "high"


def test_as_many_priorities_as_requests_cost_no_more_than_a_few():
    """Anybody may choose a priority. Joining and leaving look at no other request."""
    line, count = WaitingLine(), 50_000
    for number in range(count):
        line.join(number, number, (number * 7919) % count)
    assert len(line) == count
    for number in range(count):
        line.leave(number)
    assert not len(line)


def test_reading_requests_without_declaring_it_is_a_clear_error():
    class Sly(OneAtATime):
        watches_requests: ClassVar[bool] = False

        def rank(self, view):
            return view.requests

    with pytest.raises(InvariantError, match="watches_requests"):
        Harness([CELL], policy=Sly())


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=4), st.integers(0, 6))
def test_those_who_join_together_stand_as_if_they_had_joined_one_by_one(groups: list[list[int]], taken: int) -> None:
    together, alone, number = WaitingLine[str](), WaitingLine[str](), 0
    for priorities in groups:
        joining = [(number + i, f"item {number + i}", priority) for i, priority in enumerate(priorities)]
        number += len(joining)
        together.join_all(joining)
        for one in joining:
            alone.join(*one)
        assert together.take(taken // 2) == alone.take(taken // 2)
    assert together.take(number) == alone.take(number)
