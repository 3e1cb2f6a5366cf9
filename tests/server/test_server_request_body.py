"""A client that has gone: what is done for it is cancelled, and nothing else is."""

from __future__ import annotations

import asyncio

import pytest

from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.request_body import DEPARTURE, Departure, unless_gone


def outcome(meet):
    """Return what a call comes to whose work takes forever, with its departure; meet(departure, task) meets it."""

    async def main():
        departure = Departure(lambda: None)
        scope = {"extensions": {DEPARTURE: departure}}
        task = asyncio.create_task(unless_gone(scope, asyncio.sleep(60)))
        meet(departure, task, before=True)
        await asyncio.sleep(0)
        meet(departure, task, before=False)
        try:
            await task
        finally:
            assert departure._task is None

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
