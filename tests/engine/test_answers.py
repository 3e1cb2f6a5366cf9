"""What `submit` returns: one object to await, to wait for, to iterate, to call back from and to cancel."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections import Counter as Count
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from engine_models import Counter, Endless, Gate, Sums, Totals, assert_balanced, shut
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import batchmaker as bm
from batchmaker.core.events import RequestId
from batchmaker.engine import Answer
from batchmaker.errors import CancelledError, InvalidRequestError, OptionError, StoppedError
from insides import num_waiting_for, unanswered
from waiting import wait_until


@pytest.fixture
def engine() -> Iterator[bm.Engine]:
    with bm.Engine(Sums(), threads=1) as engine:
        yield engine
    assert_balanced(engine)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Opens at the end, so that no engine hangs where a test fails."""
    gate = Gate()
    yield gate
    gate.opened.set()


async def awaited(answer: Answer) -> Any:
    return await answer


# --- one answer, many ways to wait -----------------------------------------------------------------------------------


def test_one_answer_can_be_waited_for_in_every_way_at_once(gate: Gate) -> None:
    called: list[Answer] = []
    with bm.Engine(Sums(gate), threads=1) as engine, ThreadPoolExecutor(6) as pool:
        answer = engine.submit([1, 2, 3], stream=True)
        answer.add_done_callback(called.append)
        assert gate.entered.wait(60)
        assert not answer.done()
        assert "is waited for" in repr(answer)
        blocked = [pool.submit(answer.result, 60) for _ in range(2)]
        failures = pool.submit(answer.exception, 60)
        looped = [pool.submit(asyncio.run, awaited(answer)) for _ in range(2)]
        streamed = pool.submit(list, answer)
        gate.opened.set()
        assert [float(one.result(60)) for one in (*blocked, *looped)] == [6.0] * 4
        assert failures.result(60) is None
        assert [float(value) for value in streamed.result(60)] == [6.0]
    assert called == [answer]
    assert "is there" in repr(answer)


def test_an_answer_that_is_there_can_be_asked_for_again_and_again(engine: bm.Engine) -> None:
    answer = engine.submit([4, 5])
    assert answer.result() is answer.result(0) is asyncio.run(awaited(answer)) is asyncio.run(awaited(answer))
    late: list[Answer] = []
    answer.add_done_callback(late.append)
    assert late == [answer]


def test_an_error_is_raised_in_every_way_of_waiting(engine: bm.Engine) -> None:
    answer = engine.submit([object()], stream=True)
    with pytest.raises(InvalidRequestError):
        answer.result(60)
    with pytest.raises(InvalidRequestError):
        asyncio.run(awaited(answer))
    for _ in range(2):
        with pytest.raises(InvalidRequestError):
            list(answer)
    assert isinstance(answer.exception(), InvalidRequestError)
    assert not answer.cancel()


def test_waiting_ends_after_the_time_given_and_the_request_goes_on(gate: Gate) -> None:
    with bm.Engine(Sums(gate), threads=1) as engine:
        answer = engine.submit([1, 2])
        assert gate.entered.wait(60)
        for wait in (answer.result, answer.exception):
            for seconds in (0, -1, 0.001):
                with pytest.raises(TimeoutError, match="it goes on"):
                    wait(seconds)
        assert not num_waiting_for(answer), "who polls leaves nothing behind"
        gate.opened.set()
        assert float(answer.result(60)) == 3.0


def test_a_coroutine_that_blocks_for_what_it_has_just_submitted_is_answered(engine: bm.Engine) -> None:
    """What one turn of an event loop submits waits for its end, which does not come while the turn blocks."""

    async def main() -> None:
        assert float(engine.submit([1, 2]).result(60)) == 3.0
        assert [float(value) for value in engine.submit([3], stream=True)] == [3.0]

    asyncio.run(main())


def test_what_is_submitted_and_never_awaited_is_computed_all_the_same(engine: bm.Engine) -> None:
    async def main() -> Answer:
        return engine.submit([1, 2])

    assert float(asyncio.run(main()).result(60)) == 3.0


def test_an_answer_works_where_asyncio_takes_awaitables(engine: bm.Engine) -> None:
    async def main() -> list[float]:
        one = await asyncio.wait_for(engine.submit([1]), 60)
        more = await asyncio.gather(engine.submit([2]), asyncio.ensure_future(engine.submit([3])))
        return [float(value) for value in (one, *more)]

    assert asyncio.run(main()) == [1.0, 2.0, 3.0]


class Nobody:
    """Takes the place of an engine."""

    is_own_thread = False

    def cancel(self, request_id: RequestId) -> None: ...

    def release(self) -> None: ...


def failed() -> Answer:
    answer = Answer(RequestId(0), Nobody())
    answer.verdicts.append(None)
    assert not Answer.settle([(answer, None, InvalidRequestError("wrong"))])
    return answer


@pytest.mark.parametrize("wait", [lambda: failed().result(), lambda: next(failed().__await__())])
def test_an_answer_that_has_raised_its_error_leaves_nothing_to_the_garbage_collector(wait: Any) -> None:
    def ask() -> weakref.ref[Any]:
        try:
            wait()
        except InvalidRequestError as error:
            return weakref.ref(error)
        raise AssertionError

    gc.collect()
    gc.disable()
    try:
        assert ask()() is None
    finally:
        gc.enable()


# --- values as they come ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("iterate", [iter, aiter, list])
def test_iterating_without_asking_for_values_says_what_to_do(engine: bm.Engine, iterate: Any) -> None:
    answer = engine.submit([1, 2])
    with pytest.raises(OptionError, match=r"submit\(request, stream=True\)"):
        iterate(answer)
    assert float(answer.result(60)) == 3.0, "the request is none the worse for it"


def test_the_result_is_there_after_the_values_and_a_second_iteration_has_none() -> None:
    with bm.Engine(Counter(), threads=1) as engine:
        answer = engine.submit(4, stream=True)
        assert list(answer) == [1, 2, 3, 4]
        assert answer.result(60) == [1, 2, 3, 4]
        assert list(answer) == []

        async def main() -> tuple[list[int], Any, list[int]]:
            answer = engine.submit(3, stream=True)
            return [value async for value in answer], await answer, [value async for value in answer]

        assert asyncio.run(main()) == ([1, 2, 3], [1, 2, 3], [])


def test_several_iterations_share_the_values_and_all_end() -> None:
    async def taken(answer: Answer) -> list[int]:
        return [value async for value in answer]

    with bm.Engine(Counter(), threads=1) as engine, ThreadPoolExecutor(4) as pool:
        answer = engine.submit(300, stream=True)
        parts = [pool.submit(list, answer), pool.submit(list, answer), pool.submit(asyncio.run, taken(answer))]
        parts.append(pool.submit(asyncio.run, taken(answer)))
        values = [value for part in parts for value in part.result(60)]
    assert sorted(values) == list(range(1, 301))


def test_leaving_an_iteration_early_cancels_the_request_and_waiting_says_so() -> None:
    with bm.Engine(Endless(), threads=1) as engine:
        answer = engine.submit(0, stream=True)
        for value in answer:
            if value == 3:
                break
        with pytest.raises(CancelledError, match="cancelled by the caller"):
            answer.result(60)
        wait_until(lambda: engine.num_in_flight == 0)
    assert_balanced(engine)


def test_cancelling_ends_an_iteration_in_another_thread() -> None:
    with bm.Engine(Endless(), threads=1) as engine, ThreadPoolExecutor(1) as pool:
        answer = engine.submit(0, stream=True)
        begun = threading.Event()

        def read() -> None:
            for _ in answer:
                begun.set()

        reading = pool.submit(read)
        assert begun.wait(60)
        assert answer.cancel()
        assert isinstance(reading.exception(60), CancelledError)
    assert_balanced(engine)


# --- cancelling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_cancelling_gives_up_what_waits_and_what_runs(gate: Gate, workers: int) -> None:
    settled: list[Any] = []
    with bm.Engine(Sums(gate), threads=1, workers=workers) as engine:
        engine.on_settled = lambda ticket, error: settled.append((ticket.request_id, type(error)))
        runs = engine.submit([1, 2, 3])
        assert gate.entered.wait(60)
        waits = engine.submit([4])
        for answer in (waits, runs):
            assert answer.cancel()
            assert answer.cancel(), "once more is no harm"
            assert answer.done()
            assert isinstance(answer.exception(0), CancelledError)
            assert "was cancelled" in repr(answer)
        gate.opened.set()
        kept = engine.submit([5])
        assert float(kept.result(60)) == 5.0
        assert not kept.cancel()
        assert float(kept.result(60)) == 5.0
    assert sorted(settled, key=lambda pair: pair[0]) == [(0, CancelledError), (1, CancelledError), (2, type(None))]
    assert_balanced(engine)


def test_what_is_cancelled_in_the_turn_that_submits_it_is_never_unfolded() -> None:
    unfolded: list[Any] = []

    class Noted(Sums):
        def unfold(self, xs: Any, form: str = "run") -> Any:
            unfolded.append(xs)
            return super().unfold(xs, form)

    async def main(engine: bm.Engine) -> None:
        gone, kept = engine.submit(["no number"]), engine.submit([2, 3])
        assert gone.cancel()
        assert float(await kept) == 5.0
        with pytest.raises(CancelledError):
            await gone

    with bm.Engine(Noted(), threads=1) as engine:
        asyncio.run(main(engine))
    assert ["no number"] not in unfolded
    (counts,) = engine.service.values()
    assert (counts.answered, counts.failed) == (1, {"CancelledError": 1})
    assert_balanced(engine)


def test_cancelling_one_of_the_tasks_that_await_an_answer_cancels_it_for_all(gate: Gate) -> None:
    async def main(engine: bm.Engine) -> None:
        answer = engine.submit([1, 2])
        tasks = [asyncio.ensure_future(awaited(answer)) for _ in range(3)]
        await asyncio.to_thread(gate.entered.wait, 60)
        tasks[1].cancel()
        first, second, third = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(second, asyncio.CancelledError)
        assert isinstance(first, CancelledError), "not asyncio's, which would say that this task was cancelled"
        assert isinstance(third, CancelledError)
        gate.opened.set()

    with bm.Engine(Sums(gate), threads=1) as engine:
        asyncio.run(main(engine))
    assert_balanced(engine)


def test_a_chunk_of_a_sequence_has_the_same_kind_of_answer(gate: Gate) -> None:
    gate.opened.set()
    with bm.Engine(Totals(gate), threads=1) as engine, engine.open_sequence() as sequence:
        assert float(sequence.submit([1]).result(60)) == 1.0
        assert [float(value) for value in sequence.submit([2], stream=True)] == [3.0]
        shut(gate)
        runs, waits = sequence.submit([3]), sequence.submit([4])
        assert gate.entered.wait(60)
        assert waits.cancel()
        gate.opened.set()
        assert float(runs.result(60)) == 6.0
        sequence.resume()
        assert float(sequence.submit([5]).result(60)) == 11.0
    assert_balanced(engine)


# --- exactly once ----------------------------------------------------------------------------------------------------

WAYS = ("result", "await", "stream", "stream-async", "cancel", "leave", "callback", "race")


def use(engine: bm.Engine, way: str, n: int, outcomes: Callable[[str], None]) -> None:
    """Submit one request, wait for it in some way, and note what came of it: once, and the same for all who ask."""
    called: list[Answer] = []
    answer = engine.submit(n, stream=way.startswith("stream") or way == "leave")
    answer.add_done_callback(called.append)
    given_up = False
    if way == "await":
        assert asyncio.run(awaited(answer)) == list(range(1, n + 1))
    elif way == "stream":
        assert list(answer) == list(range(1, n + 1))
    elif way == "stream-async":
        assert asyncio.run(_collected(answer)) == list(range(1, n + 1))
    elif way == "leave":
        for _ in answer:
            break
        given_up = isinstance(answer.exception(60), CancelledError)
    elif way == "cancel":
        given_up = answer.cancel()
    elif way == "race":
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(answer.cancel) for _ in range(2)]
            seen = answer.exception(60)
            given_up = both[0].result(60)
            assert both[1].result(60) == given_up
        assert isinstance(seen, CancelledError) == given_up
    error = answer.exception(60)
    assert isinstance(error, CancelledError) if given_up else error is None
    assert given_up or answer.result(0) == list(range(1, n + 1))
    wait_until(lambda: called)
    assert called == [answer]
    outcomes("CancelledError" if given_up else "answered")


async def _collected(answer: Answer) -> list[int]:
    return [value async for value in answer]


@settings(max_examples=7, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    threads=st.lists(
        st.lists(st.tuples(st.sampled_from(WAYS), st.integers(1, 30)), min_size=1, max_size=6), min_size=2, max_size=4
    ),
    workers=st.sampled_from([1, 2]),
)
def test_each_answer_comes_exactly_once_whatever_several_threads_do(
    threads: list[list[tuple[str, int]]], workers: int
) -> None:
    settled: list[int] = []
    outcomes: list[str] = []
    with bm.Engine(Counter(), threads=1, workers=workers) as engine:
        engine.on_settled = lambda ticket, error: settled.append(ticket.request_id)
        with ThreadPoolExecutor(len(threads)) as pool:
            work = [[pool.submit(use, engine, way, n, outcomes.append) for way, n in uses] for uses in threads]
            for each in work:
                for one in each:
                    one.result(120)
    total = sum(map(len, threads))
    assert sorted(settled) == list(range(total))
    (counts,) = engine.service.values()
    assert Count(outcomes) == Count({"answered": counts.answered, **counts.failed})
    assert not unanswered(engine)
    assert_balanced(engine)


def test_stopping_answers_whoever_waits_in_whatever_way() -> None:
    engine = bm.Engine(Endless(), threads=1).start()
    with ThreadPoolExecutor(4) as pool:
        blocked, looped, streamed = engine.submit(0), engine.submit(0), engine.submit(0, stream=True)
        waiting = [pool.submit(blocked.result), pool.submit(asyncio.run, awaited(looped)), pool.submit(list, streamed)]
        wait_until(lambda: engine.stats.steps > 3)
        engine.stop(drain=False)
        assert all(isinstance(one.exception(60), StoppedError) for one in waiting)
    assert_balanced(engine)
