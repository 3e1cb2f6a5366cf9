"""While a function of the model hangs, others can see it, deadlines are answered, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from engine_models import assert_balanced
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raising_models import Hanging

import batchmaker as bm
from batchmaker.clock import VirtualClock
from batchmaker.engine import Answer
from batchmaker.engine.heartbeat import HUNG_AFTER_S, Heartbeat, Watchdog, stack_of
from batchmaker.errors import CancelledError, DeadlineError, StoppedError
from insides import is_woken, unanswered, watchdog, workers
from waiting import wait_until


@pytest.fixture
def model() -> Iterator[Hanging]:
    model = Hanging()
    yield model
    model.let_go.set()


def unfolded(model: Hanging) -> list[int]:
    """The requests that were unfolded; a proof that a function looks at no value calls it with something else."""
    return [request for request in model.unfolded if type(request) is int]


async def awaited(answer: Answer) -> Any:
    return await answer


def hung(engine: bm.Engine, model: Hanging) -> Any:
    """Submit a request that hangs the engine's thread, and wait until it does."""
    assert int(engine.submit(3).result(60)) == 3
    first = engine.submit(0)
    assert model.entered.wait(60)
    return first


def test_deadlines_are_answered_while_an_unfold_function_hangs(model: Hanging) -> None:
    settled: list[tuple[int, str]] = []
    with bm.Engine(model, threads=1) as engine:
        first = hung(engine, model)
        engine.on_settled = lambda ticket, error: settled.append((ticket.request_id, type(error).__name__))
        late = engine.submit(5, deadline_ms=1)
        patient = engine.submit(4)
        values = engine.submit(6, deadline_ms=1, stream=True)
        with pytest.raises(DeadlineError, match="the engine's thread has been busy with one turn"):
            late.result(60)
        with pytest.raises(DeadlineError):
            list(values)
        with pytest.raises(DeadlineError):
            asyncio.run(awaited(engine.submit(7, deadline_ms=1)))
        assert not patient.done()
        assert not settled, "what is counted is the thread's own, when it comes back"
        model.let_go.set()
        assert int(first.result(60)) == 1
        assert int(patient.result(60)) == 4
        assert int(engine.submit(8).result(60)) == 8
    assert [how for _, how in settled].count("DeadlineError") == 3
    assert len({number for number, _ in settled}) == len(settled) == 6
    assert {5, 6, 7}.isdisjoint(unfolded(model))
    (counts,) = engine.service.values()
    assert (counts.given_up, counts.answered) == (3, 4)
    assert_balanced(engine)


@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(
    asks=st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.booleans()), max_size=20),
    workers=st.sampled_from([1, 2]),
)
def test_each_request_is_answered_once_whoever_answers_it(asks: list[tuple[int, bool, bool]], workers: int) -> None:
    """asks: a number to count to, whether the deadline passes while the thread hangs, whether it is cancelled then."""
    model = Hanging()
    settled: list[int] = []
    answered: list[int] = []
    with bm.Engine(model, threads=1, workers=workers) as engine:
        first = hung(engine, model)
        engine.on_settled = lambda ticket, error: settled.append(ticket.request_id)
        futures = [engine.submit(n, deadline_ms=1 if late else None) for n, late, _ in asks]
        for number, future in enumerate(futures):
            future.add_done_callback(lambda _, number=number: answered.append(number))  # type: ignore[misc]
        cancelled = [cancels and future.cancel() for future, (*_, cancels) in zip(futures, asks, strict=True)]
        for future, (_, late, _), gone in zip(futures, asks, cancelled, strict=True):
            if late and not gone:
                error = future.exception(60)
                assert isinstance(error, DeadlineError) or (error is None and workers == 2), (
                    "another worker may serve it"
                )
        model.let_go.set()
        assert int(first.result(60)) == 1
        for future, (n, late, _), gone in zip(futures, asks, cancelled, strict=True):
            if gone:
                assert isinstance(future.exception(0), CancelledError)
            elif not late:
                assert int(future.result(60)) == n
    assert sorted(answered) == list(range(len(asks)))
    assert len(set(settled)) == len(settled) == 1 + len(asks)
    assert not unanswered(engine)
    assert_balanced(engine)


def test_requests_that_are_finished_late_are_not_given_up_while_another_hangs(model: Hanging) -> None:
    with bm.Engine(model, threads=1, late="finish") as engine:
        hung(engine, model)
        late = engine.submit(5, deadline_ms=1)
        wait_until(lambda: engine.heartbeat.busy_for_s > 0.1)
        watchdog(workers(engine)[0]).look()
        assert not late.done()
        model.let_go.set()
        assert int(late.result(60)) == 5


def test_a_chunk_answered_late_leaves_its_sequence_as_any_late_chunk_does() -> None:
    class Chunks(Hanging):
        def unfold_chunk(self, chunk: int, state: Any) -> Any:
            return self.unfold(chunk), None

    model = Chunks()
    with bm.Engine(model, threads=1) as engine, engine.open_sequence() as sequence:
        assert int(sequence.submit(2).result(60)) == 2
        other = engine.submit(0)
        assert model.entered.wait(60)
        late = sequence.submit(3, deadline_ms=1)
        assert isinstance(late.exception(60), DeadlineError)
        model.let_go.set()
        assert int(other.result(60)) == 1
        sequence.resume()
        assert int(sequence.submit(4).result(60)) == 4
    assert_balanced(engine)


def test_a_request_cancelled_while_another_is_unfolded_never_is(model: Hanging) -> None:
    with bm.Engine(model, threads=1) as engine:
        first = hung(engine, model)
        others = [engine.submit(n) for n in range(2, 9)]
        assert all(other.cancel() for other in others)
        model.let_go.set()
        assert int(first.result(60)) == 1
    assert unfolded(model) == [3, 0]
    (counts,) = engine.service.values()
    assert counts.failed == {"CancelledError": len(others)}
    assert_balanced(engine)


def test_the_heartbeat_says_what_the_engines_thread_does(model: Hanging) -> None:
    engine = bm.Engine(model, threads=1)
    assert engine.heartbeat == Heartbeat(alive=False, doing="starting", age_s=0.0, busy_for_s=0.0)
    with engine:
        wait_until(lambda: engine.heartbeat.doing == "waiting")
        assert engine.heartbeat.busy_for_s == 0.0
        hung(engine, model)
        beat = engine.heartbeat
        assert (beat.alive, beat.doing) == (True, "unfolding and scheduling")
        wait_until(lambda: engine.heartbeat.busy_for_s > beat.busy_for_s)
        model.let_go.set()
        wait_until(lambda: engine.heartbeat.doing == "waiting")
    assert not engine.heartbeat.alive


@pytest.mark.parametrize("drain", [True, False])
def test_stopping_does_not_wait_for_a_thread_that_hangs(model: Hanging, drain: bool, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "batchmaker.engine")
    engine = bm.Engine(model, threads=1)
    first = hung(engine, model)
    futures = [first, *(engine.submit(n) for n in (4, 5))]
    assert not engine.stop(drain=drain, within_s=0.0)
    assert all(isinstance(future.exception(60), StoppedError) for future in futures)
    assert "is left behind" in caplog.text
    assert "let_go.wait" in caplog.text, "the stack of the thread that hangs"
    with pytest.raises(StoppedError):
        engine.submit(3)
    model.let_go.set()
    assert engine.stop()
    assert_balanced(engine)


# --- the watchdog alone, with a clock that stands still --------------------------------------------------------------


class Watched:
    """A thread that the watchdog looks at, as a test says."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.since_s: float | None = None
        self.late: list[float] = []
        self.doing = "unfolding"
        self.starting = self.compiling = ""
        self.watchdog = Watchdog(self.clock.now_s, self.beat, threading.get_ident, self._late)

    def beat(self) -> Heartbeat:
        busy_s = 0.0 if self.since_s is None else self.clock.now_s() - self.since_s
        return Heartbeat(True, self.doing, busy_s, busy_s, self.starting, self.compiling)

    def _late(self, beat: Heartbeat) -> None:
        self.late.append(beat.busy_for_s)

    def after(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.watchdog.look()


def test_the_watchdog_leaves_short_turns_to_the_engine() -> None:
    watched = Watched()
    watched.after(100.0)
    watched.since_s = watched.clock.now_s()
    watched.after(0.01)
    assert not watched.late
    watched.after(0.2)
    assert len(watched.late) == 1


def test_a_hang_is_logged_once_with_the_stack_and_so_is_its_end(caplog: Any) -> None:
    caplog.set_level(logging.INFO, "batchmaker.engine")
    watched = Watched()
    for _ in range(2):
        caplog.clear()
        watched.since_s = watched.clock.now_s()
        watched.after(HUNG_AFTER_S / 2)
        assert not caplog.records
        for _ in range(3):
            watched.after(HUNG_AFTER_S)
        assert len(caplog.records) == 1
        assert "test_a_hang_is_logged_once" in caplog.text
        watched.since_s = None
        watched.after(1.0)
        assert [record.getMessage() for record in caplog.records][1:] == ["the engine's thread goes on"]


def test_a_cell_that_is_compiled_for_long_at_its_first_use_is_named_once_and_no_hang(caplog: Any) -> None:
    watched = Watched()
    watched.since_s, watched.compiling = 0.0, "compiles cell 'decoder'"
    for _ in range(5):
        watched.after(HUNG_AFTER_S)
    watched.compiling = ""
    watched.after(HUNG_AFTER_S / 2)  # the rest of the turn
    watched.since_s = None
    watched.after(1.0)
    (record,) = caplog.records
    assert "compiles cell 'decoder' for the first request" in record.getMessage()
    assert "example_request" in record.getMessage()


def test_a_turn_of_a_start_that_took_long_may_end_after_it(caplog: Any) -> None:
    watched = Watched()
    watched.since_s, watched.starting = 0.0, "computes the example request of model 'M'"
    for _ in range(3):
        watched.after(HUNG_AFTER_S)
    watched.starting = ""
    watched.after(1.0)
    watched.since_s = None
    watched.after(1.0)
    assert not caplog.records
    watched.since_s = watched.clock.now_s()
    watched.after(HUNG_AFTER_S)
    assert "has been busy with one turn" in caplog.text, "a later turn may hang"


def test_an_engine_that_waits_for_its_workers_to_end_is_not_said_to_hang(caplog: Any) -> None:
    watched = Watched()
    watched.doing, watched.since_s = "stopping", 0.0
    watched.after(10 * HUNG_AFTER_S)
    assert not caplog.records


def test_the_watchdog_looks_often_while_deadlines_are_ahead_and_seldom_otherwise() -> None:
    watched = Watched()
    interval_s = watched.watchdog.interval_s
    watched.clock.advance(100.0)
    assert interval_s() == 1.0
    watched.watchdog.expect(105.0)
    assert is_woken(watched.watchdog)
    assert interval_s() < 0.1
    watched.clock.advance(10.0)
    assert interval_s() == 1.0


def test_a_thread_that_is_gone_has_no_stack() -> None:
    assert stack_of(None) == ""
    assert stack_of(-1) == ""
    assert "test_a_thread_that_is_gone" in stack_of(threading.get_ident())
