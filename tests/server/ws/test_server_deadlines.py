"""One timer for the deadlines of many connections."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from batchmaker.server.ws.deadlines import Watch
from waiting import pass_time, run_in_virtual_time


class Watched:
    """Notes when it is looked at; looks again at the times that it is given."""

    def __init__(self, watch: Watch, *again_s: float) -> None:
        self.watch = watch
        self.again_s = list(again_s)
        self.planned = None
        self.looked: list[float] = []

    def plan(self, at_s: float) -> None:
        self.planned = self.watch.plan(at_s, self, self.planned)

    def look(self, now_s: float) -> None:
        self.looked.append(now_s)
        if self.again_s:
            self.plan(self.again_s.pop(0))


@settings(deadline=None, max_examples=30)
@given(plans=st.lists(st.lists(st.floats(0.0, 0.05), min_size=1, max_size=4), min_size=1, max_size=8))
def test_each_is_looked_at_once_and_no_later_than_the_earliest_of_its_plans(plans):
    async def body() -> None:
        loop, watch = asyncio.get_running_loop(), Watch()
        start_s = loop.time()
        watched = [Watched(watch) for _ in plans]
        for one, ahead in zip(watched, plans, strict=True):
            for after_s in ahead:
                one.plan(start_s + after_s)
        await pass_time(0.06)
        for one, ahead in zip(watched, plans, strict=True):
            assert len(one.looked) == 1
            assert one.looked[0] >= start_s + min(ahead)

    run_in_virtual_time(body())


def test_a_look_may_plan_the_next_one_and_what_has_ended_is_not_looked_at():
    async def body() -> None:
        loop, watch = asyncio.get_running_loop(), Watch()
        now_s = loop.time()
        again, gone = Watched(watch, now_s + 0.03, now_s + 0.06), Watched(watch)
        again.plan(now_s)
        gone.plan(now_s + 0.03)
        gone.planned.watched = None
        await pass_time(0.07)
        assert len(again.looked) == 3
        assert again.looked == sorted(again.looked)
        assert gone.looked == []

    run_in_virtual_time(body())
