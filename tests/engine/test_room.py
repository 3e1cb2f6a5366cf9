"""How many requests an engine takes that it has not answered, and what becomes of the next one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from engine_models import Endless, Gate, Sums, Totals, assert_balanced
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import batchmaker as bm
from batchmaker.engine import Answer
from batchmaker.errors import OptionError, QueueFullError, RequestError, StoppedError
from insides import num_free, num_unanswered, num_waiting_for_room
from waiting import wait_until


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


def test_a_full_engine_refuses_at_once_and_takes_more_when_it_has_answered(gate: Gate) -> None:
    with bm.Engine(Sums(gate), threads=1, max_queue=3) as engine:
        taken = [engine.submit([n]) for n in range(3)]
        for stream in (False, True):
            with pytest.raises(QueueFullError, match="3 requests are accepted and not answered"):
                engine.submit([9], stream=stream)
        assert isinstance(QueueFullError("x"), RequestError)
        gate.opened.set()
        assert [float(answer.result(60)) for answer in taken] == [0.0, 1.0, 2.0]
        assert float(engine.submit([4]).result(60)) == 4.0
        assert num_free(engine) == 3
    assert_balanced(engine)


def test_an_answer_frees_its_place_before_its_caller_hears_of_it() -> None:
    """So one who asks again as soon as there is an answer is never refused."""
    with bm.Engine(Sums(), threads=1, max_queue=1) as engine:
        for n in range(50):
            assert float(engine.submit([n]).result(60)) == n
        chained: list[Answer] = []
        again = threading.Event()

        def ask_again(_: Answer) -> None:
            chained.append(engine.submit([7]))
            again.set()

        engine.submit([1]).add_done_callback(ask_again)
        assert again.wait(60)
        assert float(chained[0].result(60)) == 7.0
    assert_balanced(engine)


@pytest.mark.parametrize("how", ["cancel", "fail", "deadline"])
def test_requests_without_a_result_free_their_places_too(how: str) -> None:
    with bm.Engine(Endless() if how == "cancel" else Sums(), threads=1, max_queue=2) as engine:
        for _ in range(5):
            options: dict[str, Any] = {"deadline_ms": -1} if how == "deadline" else {}
            answer = engine.submit([object()] if how == "fail" else 0 if how == "cancel" else [1], **options)
            if how == "cancel":
                assert answer.cancel()
            assert isinstance(answer.exception(60), RequestError)
            wait_until(lambda: num_free(engine) == 2)
    assert_balanced(engine)


def test_waiting_for_room_blocks_a_thread_until_another_request_is_answered(gate: Gate) -> None:
    with bm.Engine(Sums(gate), threads=1, max_queue=2, when_full="wait") as engine, ThreadPoolExecutor(3) as pool:
        taken = [engine.submit([n]) for n in range(2)]
        assert gate.entered.wait(60)
        later = [pool.submit(engine.submit, [n]) for n in (10, 11, 12)]
        wait_until(lambda: num_waiting_for_room(engine) == 3)
        assert not any(one.done() for one in later)
        assert num_unanswered(engine) == 2
        gate.opened.set()
        assert [float(answer.result(60)) for answer in taken] == [0.0, 1.0]
        assert [float(one.result(60).result(60)) for one in later] == [10.0, 11.0, 12.0]
    assert num_free(engine) == 2
    assert_balanced(engine)


def test_an_event_loop_and_the_engines_own_thread_are_refused_where_a_thread_would_wait(gate: Gate) -> None:
    refused: list[BaseException] = []

    def ask(engine: bm.Engine) -> None:
        try:
            engine.submit([3])
        except QueueFullError as error:
            refused.append(error)

    async def main(engine: bm.Engine) -> None:
        ask(engine)

    with bm.Engine(Sums(gate), threads=1, max_queue=2, when_full="wait") as engine:
        taken = [engine.submit([1]), engine.submit([2])]
        asyncio.run(main(engine))
        assert len(refused) == 1

        def ask_on(_: Answer) -> None:  # in the engine's thread, when one place or both have become free
            while len(refused) == 1:
                ask(engine)

        taken[0].add_done_callback(ask_on)
        gate.opened.set()
        assert float(taken[0].result(60)) == 1.0
    assert len(refused) == 2
    assert all("asyncio.to_thread" in str(error) for error in refused)
    assert_balanced(engine)


def test_who_waits_for_room_hears_that_the_engine_is_stopped() -> None:
    engine = bm.Engine(Endless(), threads=1, max_queue=1, when_full="wait").start()
    taken = engine.submit(0)
    wait_until(lambda: engine.stats.steps > 0)
    with ThreadPoolExecutor(3) as pool:
        later = [pool.submit(engine.submit, 0) for _ in range(2)]
        later.append(pool.submit(engine.map, [0, 0], progress=False))
        wait_until(lambda: num_waiting_for_room(engine) == 3)
        engine.stop(drain=False)
        assert all(isinstance(one.exception(60), StoppedError) for one in later)
    assert isinstance(taken.exception(60), StoppedError)
    assert num_free(engine) == 1
    assert_balanced(engine)


def test_a_stopped_engine_keeps_no_place_for_what_it_did_not_take() -> None:
    engine = bm.Engine(Sums(), threads=1, max_queue=1).start()
    engine.stop()
    for _ in range(3):
        with pytest.raises(StoppedError):
            engine.submit([1])
        with pytest.raises(StoppedError):
            engine.map([[1]], progress=False)
    assert num_free(engine) == 1


def test_a_wrong_option_takes_no_place() -> None:
    with bm.Engine(Sums(), threads=1, max_queue=1) as engine:
        with pytest.raises(OptionError):
            engine.submit([1], priority="high")  # type: ignore[arg-type]
        with pytest.raises(OptionError):
            engine.map([[1]], progress=False, model="Sum")
        assert num_free(engine) == 1
        assert float(engine.submit([1]).result(60)) == 1.0


def test_chunks_of_sequences_take_places_as_other_requests_do(gate: Gate) -> None:
    with bm.Engine(Totals(gate), threads=1, max_queue=2) as engine, engine.open_sequence() as sequence:
        taken = [sequence.submit([n]) for n in (1, 2)]
        with pytest.raises(QueueFullError):
            sequence.submit([3])
        gate.opened.set()
        assert [float(answer.result(60)) for answer in taken] == [1.0, 3.0]
        assert float(sequence.submit([4]).result(60)) == 7.0, "the chunk that was refused is no part of the sequence"
    assert_balanced(engine)


@settings(max_examples=7, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    most=st.integers(1, 5),
    when_full=st.sampled_from(["refuse", "wait"]),
    jobs=st.lists(st.integers(1, 25), min_size=1, max_size=4),
)
def test_however_many_ask_no_more_are_in_flight_than_may_be(most: int, when_full: Any, jobs: list[int]) -> None:
    """jobs: threads that map so many requests each. Beside them, one submits and tries again when it is refused."""
    seen: list[int] = []

    class Noted(Sums):
        def unfold(self, xs: Any, form: str = "run") -> Any:
            seen.append(num_unanswered(engine))
            return self.add.run([[float(int(x))] for x in xs], ([0.0],))

    engine = bm.Engine(Noted(), threads=1, max_queue=most, when_full=when_full)

    def submitted(n: int) -> float:
        while True:
            try:
                return float(engine.submit([n]).result(60))
            except QueueFullError:
                continue

    with engine, ThreadPoolExecutor(len(jobs) + 1) as pool:
        mapped = [pool.submit(engine.map, [[n] for n in range(count)], progress=False) for count in jobs]
        alone = pool.submit(lambda: [submitted(n) for n in range(10)])
        assert [[float(x) for x in one.result(120)] for one in mapped] == [
            [float(n) for n in range(count)] for count in jobs
        ]
        assert alone.result(120) == [float(n) for n in range(10)]
    assert max(seen) <= most
    assert num_free(engine) == most
    assert_balanced(engine)
