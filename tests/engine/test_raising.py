"""Nobody who uses an engine can end it: whatever their code raises is their request's error, or goes to the log."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from engine_models import assert_balanced
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raising_models import KINDS, PLACES, Ask, Incomparable, Sums, Unsayable, WaitingSums, WholeSums

import batchmaker as bm
from batchmaker.engine import Answer
from batchmaker.engine.cell_driver import CellDriver
from batchmaker.engine.worker import MOST_RESTARTS
from batchmaker.errors import CancelledError, RequestError, StoppedError
from insides import submit_ticket, tickets_of, unanswered

ENGINES = [(1, "cellular"), (2, "cellular")]


def check(ask: Ask, future: Answer) -> None:
    """The answer is right, or the error names what was raised."""
    if ask.place is None:
        total, counted = future.result(60)
        assert (float(total), int(counted)) == (ask.n * (ask.n + 1) / 2, min(ask.n, 3))
        return
    error = future.exception(60)
    assert isinstance(error, RequestError)
    assert ask.kind.__name__ in str(error)


def places_of(model: bm.Model) -> list[str]:
    waits = isinstance(model, WaitingSums)
    return [place for place in PLACES if waits or "yield" not in place]


@pytest.mark.parametrize(("workers", "policy"), ENGINES)
@pytest.mark.parametrize("make", [Sums, WaitingSums])
def test_whatever_a_models_code_raises_is_the_requests_own_error(make: Any, workers: int, policy: str) -> None:
    model = make()
    with bm.Engine(model, policy, workers=workers, threads=1) as engine:
        for place in places_of(model):
            for kind in KINDS:
                asks = [Ask(4), Ask(5, place, kind), Ask(2)]
                for ask, future in [(ask, engine.submit(ask)) for ask in asks]:
                    check(ask, future)
    assert_balanced(engine)


@pytest.mark.parametrize("workers", [1, 2])
def test_whatever_whole_batches_raise_is_the_requests_own_error(workers: int) -> None:
    with bm.Engine(WholeSums(), "padded:bucket_width=1000,max_batch=8", workers=workers, threads=1) as engine:
        for place in ("unfold", "cell"):
            for kind in KINDS:
                asks = [Ask(4), Ask(5, place, kind), Ask(2)]
                for ask, future in [(ask, engine.submit(ask)) for ask in asks]:
                    check(ask, future)
    assert engine.num_in_flight == 0


@st.composite
def mixes(draw: Any) -> dict[str, Any]:
    place = st.sampled_from([None, None, *PLACES])
    ask = st.builds(Ask, st.integers(1, 12), place, st.sampled_from(KINDS))
    return {
        "asks": draw(st.lists(st.tuples(ask, st.integers(-2, 2), st.booleans()), min_size=1, max_size=40)),
        "waits": draw(st.booleans()),
        "workers": draw(st.sampled_from([1, 2])),
        "policy": draw(st.sampled_from(["cellular", "cellular:max_steps=1", "lazy", "agenda"])),
        "looks_on": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }


@pytest.fixture(scope="module", autouse=True)
def level_of_the_log() -> Iterator[None]:
    """What these tests do to the level of the log ends with them."""
    logger = logging.getLogger("batchmaker.engine")
    before = logger.level
    yield
    logger.setLevel(before)


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(mixes())
def test_in_any_mix_every_good_request_is_answered_and_every_bad_one_fails(mix: dict[str, Any]) -> None:
    logging.getLogger("batchmaker.engine").setLevel(logging.CRITICAL)
    model = WaitingSums() if mix["waits"] else Sums()
    engine = bm.Engine(model, mix["policy"], workers=mix["workers"], threads=1)
    settled: list[int] = []
    chance = random.Random(mix["seed"])

    def look_on(*_: Any) -> None:
        raise chance.choice(KINDS)

    def note(ticket: Any, error: BaseException | None) -> None:
        settled.append(ticket.request_id)
        raise chance.choice(KINDS)

    engine.on_settled = note
    if mix["looks_on"]:
        engine.observe(look_on)
        engine.driver.record = look_on  # type: ignore[attr-defined]
    asked = []
    with engine:
        for ask, priority, cancels in mix["asks"]:
            if ask.place is not None and ask.place not in places_of(model):
                continue
            future = engine.submit(ask, priority=priority)
            if mix["looks_on"]:
                with suppress(*KINDS):  # an answer that is there calls it at once, in this thread
                    future.add_done_callback(look_on)
            asked.append((ask, future, cancels and future.cancel()))
    for ask, future, cancelled in asked:
        if cancelled:
            assert isinstance(future.exception(0), CancelledError)
        else:
            check(ask, future)
    assert sorted(settled) == list(range(len(asked)))
    assert not unanswered(engine)
    assert_balanced(engine)
    (counts,) = engine.service.values()
    assert counts.answered + counts.num_failed == len(asked)
    assert counts.failed.get("CancelledError", 0) == sum(cancelled for *_, cancelled in asked)


@pytest.fixture
def engine_log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "batchmaker.engine")
    return caplog


@pytest.mark.parametrize("kind", KINDS)
def test_who_looks_on_may_raise_and_is_told_of_once(kind: type[BaseException], engine_log: Any) -> None:
    calls = []

    def raises(*arguments: Any) -> None:
        calls.append(arguments)
        raise kind

    with bm.Engine(Sums(), threads=1) as engine:
        engine.observe(raises)
        engine.on_settled = raises
        engine.driver.record = raises  # type: ignore[attr-defined]
        for ask in (Ask(3), Ask(5)):
            check(ask, engine.submit(ask))
    assert len(calls) > 6
    told = [record.getMessage() for record in engine_log.records]
    assert len(told) == 3
    assert all(kind.__name__ in message for message in told)
    assert_balanced(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_callback_may_raise_and_those_behind_it_are_called(kind: type[BaseException]) -> None:
    called: list[Answer] = []

    def raises(_: Answer) -> None:
        raise kind

    with bm.Engine(Sums(), threads=1) as engine:
        future = engine.submit(Ask(9))
        for callback in (raises, called.append, raises, called.append):
            future.add_done_callback(callback)
        check(Ask(9), future)
        check(Ask(2), engine.submit(Ask(2)))
    assert called == [future, future]


def test_a_callback_that_is_called_at_once_raises_in_its_own_thread() -> None:
    def leave(_: Answer) -> None:
        raise SystemExit

    with bm.Engine(Sums(), threads=1) as engine:
        future = engine.submit(Ask(1))
        check(Ask(1), future)
        with pytest.raises(SystemExit):
            future.add_done_callback(leave)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_stream_runs_into_is_the_requests_own_error(kind: type[BaseException]) -> None:
    def raises(_: Any) -> None:
        raise kind

    with bm.Engine(WaitingSums(), threads=1) as engine:
        (ticket,) = tickets_of(engine, [Ask(3)])
        ticket.on_value = raises
        error = submit_ticket(engine, ticket).exception(60)
        assert isinstance(error, RequestError)
        assert kind.__name__ in str(error)
        check(Ask(4), engine.submit(Ask(4)))
    assert_balanced(engine)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not GeneratorExit and kind is not StopIteration])
def test_an_unfold_function_may_raise_while_it_is_closed(kind: type[BaseException], engine_log: Any) -> None:
    class Stubborn(WaitingSums):
        def unfold(self, ask: Ask) -> Any:  # type: ignore[override]
            try:
                while True:
                    yield self.count(ask.n)
            finally:
                raise kind

    with bm.Engine(Stubborn(), threads=1) as engine:
        values = iter(engine.submit(Ask(1), stream=True))
        next(values)
        values.close()
        engine.stop(drain=False)
    assert [record.getMessage() for record in engine_log.records if kind.__name__ in record.getMessage()]
    assert_balanced(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_stop_tests_that_cannot_be_compared_are_each_applied_alone(kind: type[BaseException]) -> None:
    class Compared(Sums):
        def unfold(self, ask: Ask) -> Any:
            return self.count.loop((0,), until=Incomparable(kind), max_steps=ask.n)

    with bm.Engine(Compared(), threads=1) as engine:
        assert [int(n) for n in engine.map([Ask(9), Ask(2), Ask(5)], progress=False)] == [3, 2, 3]


def defect(*_: Any) -> None:
    raise Unsayable


def test_an_engine_that_fails_again_and_again_ends_and_tells_all_who_wait(
    engine_log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bm.Engine(Sums(), threads=1).start()
    check(Ask(1), engine.submit(Ask(1)))
    monkeypatch.setattr(CellDriver, "poll", defect)
    futures = [engine.submit(Ask(n)) for n in (1, 2, 3)]
    assert all(isinstance(future.exception(60), StoppedError) for future in futures)
    assert engine.stop()
    assert not engine.heartbeat.alive
    assert engine.stats.restarts == MOST_RESTARTS
    assert engine_log.text.count("the engine has failed and begins anew: Unsayable") == MOST_RESTARTS
    assert "the engine has failed: Unsayable" in engine_log.text
    with pytest.raises(StoppedError, match="the engine has failed"):
        engine.submit(Ask(1))


# --- cancelling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_cancelling_an_answer_gives_its_request_up(workers: int) -> None:
    class Endless(WaitingSums):
        def unfold(self, ask: Ask) -> Any:  # type: ignore[override]
            while True:
                yield self.count(0)

    settled: list[Any] = []
    engine = bm.Engine(Endless(), threads=1, workers=workers)
    engine.on_settled = lambda ticket, error: settled.append(type(error).__name__)
    with engine:
        future = engine.submit(Ask(1))
        assert future.cancel()
        assert future.cancel()
        assert future.done()
        with pytest.raises(CancelledError):
            future.result()
    assert settled == ["CancelledError"]
    assert_balanced(engine)


def test_an_answered_request_cannot_be_cancelled() -> None:
    with bm.Engine(Sums(), threads=1) as engine:
        future = engine.submit(Ask(4))
        check(Ask(4), future)
        assert not future.cancel()
        assert future.exception() is None


def test_a_callback_may_cancel_other_requests() -> None:
    with bm.Engine(WaitingSums(), threads=1) as engine:
        others = [engine.submit(Ask(12)) for _ in range(5)]
        first = engine.submit(Ask(1), priority=1)
        first.add_done_callback(lambda _: [other.cancel() for other in others])
        check(Ask(1), first)
    assert all(other.done() for other in others)
    assert_balanced(engine)


def test_the_task_that_awaits_an_answer_gives_its_request_up_when_cancelled() -> None:
    async def main(engine: bm.Engine) -> Answer:
        future = engine.submit(Ask(10))
        waiting = asyncio.ensure_future(future)
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return future

    with bm.Engine(WaitingSums(), threads=1) as engine:
        future = asyncio.run(main(engine))
    assert future.done()
    assert_balanced(engine)
