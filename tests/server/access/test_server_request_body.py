"""A client that has gone: what is done for it is cancelled, and nothing else is. And the bytes that clients hold."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmaker.server.access.departure import DEPARTURE, Departure, unless_gone
from batchmaker.server.access.request_body import BodyBudget, HeldBytes
from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.limits import Limits


def outcome(meet):
    """Return what a call comes to whose work takes forever, with its departure; meet(departure, task) meets it."""

    async def main():
        departure = Departure(lambda: None)
        scope = {"extensions": {DEPARTURE: departure}}

        async def work():
            try:
                await unless_gone(scope, asyncio.sleep(60))
            finally:
                mine = asyncio.current_task()
                before = mine.cancelling()
                departure.happened()
                assert mine.cancelling() == before, "what has ended is not cancelled again"

        task = asyncio.create_task(work())
        meet(departure, task, before=True)
        await asyncio.sleep(0)
        meet(departure, task, before=False)
        await task

    asyncio.run(main())


@pytest.mark.parametrize("early", [True, False])
def test_a_client_that_leaves_cancels_its_work(early):
    def leave(departure, task, *, before):
        if before == early:
            departure.happened()

    with pytest.raises(ServiceError) as caught:
        outcome(leave)
    assert caught.value.kind is FaultKind.CANCELLED


def test_a_cancellation_by_somebody_else_goes_on_as_such():
    def cancel(departure, task, *, before):
        if not before:
            task.cancel()

    with pytest.raises(asyncio.CancelledError):
        outcome(cancel)


def test_work_that_is_done_is_left_alone_by_a_client_that_leaves_later():
    async def main():
        departure = Departure(lambda: None)
        assert await unless_gone({"extensions": {DEPARTURE: departure}}, asyncio.sleep(0, "done")) == "done"
        departure.happened()
        await asyncio.sleep(0)
        return "not cancelled"

    assert asyncio.run(main()) == "not cancelled"


def test_a_connection_reads_on_while_a_call_is_answered():
    async def main():
        resumed = []
        await unless_gone({"extensions": {DEPARTURE: Departure(lambda: resumed.append(1))}}, asyncio.sleep(0))
        return resumed

    assert asyncio.run(main()) == [1]


# --- the budget of all bodies -----------------------------------------------------------------------------------------


def test_one_client_may_hold_half_of_all_and_leaves_room_for_others():
    budget = BodyBudget(Limits(max_body_bytes=10, max_total_body_bytes=100))
    mine = [HeldBytes(budget, "mine") for _ in range(17)]
    taken = [took(one, 10) for one in mine]
    assert taken.count(True) == 5
    assert took(HeldBytes(budget, "other"), 10)
    for one in mine:
        one.release()
    assert (budget.held, budget.held_by("mine"), budget.held_by("other")) == (10, 0, 10)


def test_one_body_may_always_be_held_if_there_is_room():
    budget = BodyBudget(Limits(max_body_bytes=80, max_total_body_bytes=100))
    assert took(HeldBytes(budget, "mine"), 80)
    assert not took(HeldBytes(budget, "other"), 21)
    assert took(HeldBytes(budget, "other"), 20)


def took(held: HeldBytes, size: int) -> bool:
    """Whether the bytes may be held; if not, they are given back."""
    try:
        held.add(size)
    except ServiceError:
        held.release()
        return False
    return True


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 10)), max_size=200))
def test_however_greedy_others_are_a_newcomer_finds_room(asked):
    budget = BodyBudget(Limits(max_body_bytes=10, max_total_body_bytes=200))
    for client, size in asked:
        took(HeldBytes(budget, client), size)
    assert budget.held == sum(budget.held_by(client) for client in "abcd") <= 200
    assert budget.held <= 200 * 4 / 5 + 10  # of four greedy clients each has a fifth, and one body
    assert took(HeldBytes(budget, "newcomer"), 10)


def test_bytes_change_hands_and_are_divided_without_being_lost():
    budget = BodyBudget(Limits())
    held = HeldBytes(budget, "1.2.3.4")
    held.add(100)
    held.belongs_to("ann")
    part = held.part(30)
    assert (held.size, part.size, budget.held_by("1.2.3.4"), budget.held_by("ann")) == (70, 30, 0, 100)
    held.release()
    held.release()
    assert (budget.held, budget.held_by("ann")) == (30, 30)
    part.release()
    assert budget.held == 0
