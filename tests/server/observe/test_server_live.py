"""What the live page is told: every number is what happened, and looking on stays cheap."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import Router

from batchmaker.clock import VirtualClock
from batchmaker.engine import StepSeen, StepsSeen, Ticket
from batchmaker.engine.stats import LatencyHistogram
from batchmaker.errors import CancelledError, DeadlineError, RefusedError
from batchmaker.server.access.auth import KeyRing
from batchmaker.server.access.origins import Origins
from batchmaker.server.http.middleware import CallMiddleware
from batchmaker.server.http.routes.live import MAX_LOOKS_PER_S, live_routes
from batchmaker.server.observe.chrome_trace import StepRing
from batchmaker.server.observe.live import MAX_ROWS, TICKS, live_view
from batchmaker.server.observe.recent import KEPT_S, RecentSeconds, together
from batchmaker.server.observe.spans import Spans
from batchmaker.server.observe.statistics import ModelStatistics


def ticket(arrived_s, finished_s, deadline_s=None, started_s=None):
    made = Ticket(0, None, arrived_s, deadline_s, model=None)
    made.started_s, made.finished_s = started_s, finished_s
    return made


def step(begin_s, end_s, requests=(1, 2), cell="cell", padded=4):
    return StepSeen(0, cell, begin_s, end_s, tuple(requests), padded)


def served_at(now_s, steps=(), settled=()):
    """A model, as far as live_view looks at it."""
    statistics, ring = ModelStatistics(), StepRing(1000)
    for seen in steps:
        rows = [len(seen.requests)]
        together = StepsSeen(seen.worker, seen.cell, seen.begin_s, seen.end_s, seen.requests, rows, [seen.padded])
        statistics.note_steps(together)
        ring.add(together)
    for done in settled:
        statistics.accepted += 1
        statistics.note_settled(done, None)
    port = SimpleNamespace(clock=SimpleNamespace(now_s=lambda: now_s), num_sequences=0)
    return SimpleNamespace(name="m", version="1", ready=True, statistics=statistics, steps=ring, port=port)


def view_of(served, span_s=10.0, after_s=None):
    return live_view(served, [served], span_s, after_s, server_ready=True)


# --- seconds --------------------------------------------------------------------------------------------------------


def test_each_way_to_end_is_counted_in_its_second():
    recent = RecentSeconds()
    for done, error in (
        (ticket(3.0, 3.5, started_s=3.2), None),
        (ticket(3.0, 3.6, deadline_s=3.55), None),
        (ticket(3.0, 3.7, deadline_s=3.7), DeadlineError("given up")),
        (ticket(3.0, 3.8, deadline_s=9.0), RefusedError("refused")),
        (ticket(3.0, 3.9, deadline_s=9.0), CancelledError("gone")),
    ):
        recent.at(done.finished_s, 7).add(done, error)
    (second,) = recent.since(0)
    assert (second.second, second.latency.num_samples, second.missed, second.failed) == (3, 2, 3, 1)
    assert second.queue_s == pytest.approx(0.2)
    assert second.deadline_ms == pytest.approx(550)
    assert second.in_flight == 7


def test_only_the_last_minute_is_kept():
    recent = RecentSeconds()
    for number in range(200):
        recent.at(number + 0.5, number)
    assert [second.second for second in recent.since(0)] == list(range(200 - KEPT_S, 200))
    assert [second.in_flight for second in recent.since(198)] == [198, 199]


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(1e-4, 10.0)), min_size=1))
def test_seconds_together_are_the_sum_of_their_requests(answers):
    recent, whole = RecentSeconds(), LatencyHistogram()
    for second, latency_s in sorted(answers):
        recent.at(second, 0).add(ticket(second - latency_s, second), None)
        whole.add(second - (second - latency_s))
    total = together(recent.since(0), 0)
    assert total.latency.num_samples == len(answers)
    assert total.latency.percentile_ms(90) == whole.percentile_ms(90)


# --- steps ----------------------------------------------------------------------------------------------------------


def test_a_long_step_is_told_once_with_all_its_ticks():
    served = served_at(20.0, [step(15.01, 16.01)])
    (told,) = view_of(served).steps
    assert (told.first, told.last, told.rows, told.computed, told.requests) == (601, 640, 2, 4, (1, 2))


def test_short_steps_are_told_in_proportion_to_their_time():
    steps = [step(19 + n / 1000, 19 + (n + 0.5) / 1000, cell="often") for n in range(1000)]
    served = served_at(20.0, steps)
    assert 0 < len(view_of(served).steps) <= 41  # a second has 40 ticks of 25 ms
    assert len(view_of(served, span_s=0.1).steps) >= 99  # and 0.1 s has 400 of 0.25 ms


@given(st.lists(st.tuples(st.floats(0.0, 0.3), st.floats(1e-4, 0.5)), max_size=12), st.data())
def test_whoever_asks_again_and_again_is_told_each_step_once(gaps, data):
    now_s, steps = 1.0, []
    for idle_s, busy_s in gaps:
        steps.append(step(now_s + idle_s, now_s + idle_s + busy_s))
        now_s = steps[-1].end_s
    at_once = view_of(served_at(now_s, steps)).steps
    asked_s = sorted(data.draw(st.lists(st.floats(1.0, now_s), max_size=5)))
    told, after_s = [], None
    for moment_s in [*asked_s, now_s]:
        view = view_of(served_at(moment_s, [seen for seen in steps if seen.end_s <= moment_s]), after_s=after_s)
        told += view.steps
        after_s = view.now_s
    oldest = int(now_s / (10.0 / TICKS)) - TICKS
    assert [seen for seen in told if seen.last > oldest] == [seen for seen in at_once if seen.last > oldest]


def test_a_large_batch_is_cut_but_counted():
    served = served_at(20.0, [step(19.0, 19.5, requests=range(500), padded=512)])
    (told,) = view_of(served).steps
    assert (told.rows, told.computed, told.requests) == (500, 512, tuple(range(MAX_ROWS)))


def test_after_a_moment_only_what_is_newer_is_told():
    served = served_at(20.0, [step(15.0, 15.5), step(19.0, 19.5)], [ticket(14.9, 15.5), ticket(19.0, 19.5)])
    everything = view_of(served)
    assert [second.second for second in everything.seconds] == [15, 19]
    assert everything.summary.answered == 2
    later = view_of(served, after_s=18.9)
    assert [seen.first for seen in later.steps] == [761]
    assert [second.second for second in later.seconds] == [19]
    assert later.summary.answered == 2
    assert view_of(served, after_s=1e15).steps == []


# --- how often ------------------------------------------------------------------------------------------------------


def looked(app, path="/v2/live"):
    """Status and headers of what a viewer is answered."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []}
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}


def test_too_many_who_look_on_are_told_when_to_ask_again():
    clock, served = VirtualClock(), served_at(0.5)
    repository = SimpleNamespace(models=lambda: [served])
    site = SimpleNamespace(service=SimpleNamespace(repository=repository, ready=True))
    app = CallMiddleware(
        Router(live_routes(site, clock)),
        KeyRing({}),
        Origins((), only_this_machine=False),
        Spans(enabled=False),
        log_access=False,
    )
    at_once = int(2 * MAX_LOOKS_PER_S)
    assert [looked(app)[0] for _ in range(at_once + 2)] == [200] * at_once + [429] * 2
    assert looked(app)[1]["retry-after"] == "1"
    assert looked(app, "/")[0] == 200  # the page itself is no look
    clock.advance(1.0)
    assert [looked(app)[0] for _ in range(int(MAX_LOOKS_PER_S) + 1)] == [200] * int(MAX_LOOKS_PER_S) + [429]
