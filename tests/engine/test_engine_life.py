"""How an engine starts and stops."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from engine_models import Counter, Decode, Encode, Endless, LoopTranslator, Sums, assert_balanced

import batchmaker as bm
from batchmaker.compile.loops import ChainLoop
from batchmaker.engine import Answer
from batchmaker.errors import ModelError, StoppedError
from insides import workers
from waiting import wait_until


class Held(Counter):
    """Begins no request until it is let go, so that all of them are there when the first is done."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def unfold(self, n: int) -> Iterator[Any]:
        assert self.let_go.wait(60)
        yield from super().unfold(n)


def test_an_engine_starts_at_its_first_request_and_stops_once() -> None:
    engine = bm.Engine(Sums(), threads=1)
    assert float(engine.submit([1, 2]).result()) == 3.0
    engine.stop()
    engine.stop()
    assert_balanced(engine)


def test_what_one_turn_of_an_event_loop_submits_begins_together() -> None:
    async def main() -> tuple[list[Any], int]:
        async with bm.Engine(Sums(), threads=1) as engine:
            tasks = [asyncio.ensure_future(engine.submit([n, 1])) for n in range(20)]
            results = await asyncio.gather(*tasks)
            return results, engine.stats.steps

    results, num_steps = asyncio.run(main())
    assert [float(result) for result in results] == [n + 1.0 for n in range(20)]
    assert num_steps == _steps_of_one_request()


def _steps_of_one_request() -> int:
    with bm.Engine(Sums(), threads=1) as engine:
        engine.submit([0, 1]).result()
        return engine.stats.steps


def test_what_was_submitted_in_the_very_turn_of_an_event_loop_that_stops_the_engine_is_finished() -> None:
    async def main() -> float:
        engine = bm.Engine(Sums(), threads=1).start()
        asking = asyncio.ensure_future(engine.submit([1, 2]))
        await asyncio.sleep(0)  # submitted, and the turn is not over
        engine.stop()
        return float(await asking)

    assert asyncio.run(main()) == 3.0


def test_two_event_loops_that_submit_at_once_are_both_answered() -> None:
    async def ask(engine: bm.Engine) -> list[float]:
        return [float(r) for r in await asyncio.gather(*(engine.submit([n, 1]) for n in range(200)))]

    with bm.Engine(Sums(), threads=1) as engine, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(lambda: asyncio.run(ask(engine))) for _ in range(8)]
        assert all(future.result(60) == [n + 1.0 for n in range(200)] for future in asked)


def test_the_async_context_manager_starts_and_stops() -> None:
    async def main() -> bm.Engine:
        async with bm.Engine(Sums(), threads=1) as engine:
            assert float(await engine.submit([4, 5])) == 9.0
        return engine

    assert_balanced(asyncio.run(main()))


def test_stop_answers_everything_accepted() -> None:
    engine = bm.Engine(Counter(), threads=1)
    futures = [engine.submit(n) for n in [60, 1, 30] * 60]
    engine.stop()
    assert [len(future.result(0)) for future in futures] == [60, 1, 30] * 60
    assert_balanced(engine)


@pytest.mark.parametrize("workers", [1, 2])
def test_stop_without_drain_settles_everything_with_an_error(workers: int) -> None:
    engine = bm.Engine(Endless(), threads=1, workers=workers)
    futures = [engine.submit(0) for _ in range(150)]
    wait_until(lambda: engine.stats.steps > 10)
    engine.stop(drain=False)
    assert all(isinstance(future.exception(0), StoppedError) for future in futures), "no caller has cancelled"
    assert_balanced(engine)


def test_leaving_the_context_by_an_error_does_not_wait_for_endless_requests() -> None:
    with pytest.raises(KeyError), bm.Engine(Endless(), threads=1) as engine:  # noqa: PT012
        future = engine.submit(0)
        raise KeyError
    assert isinstance(future.exception(0), StoppedError)
    assert_balanced(engine)


def test_a_stopped_engine_takes_no_more_requests() -> None:
    engine = bm.Engine(Sums(), threads=1)
    engine.start()
    engine.stop()

    async def ask_from_an_event_loop(request: Any) -> Any:
        return await engine.submit(request)

    for ask in (
        engine.submit,
        lambda r: engine.submit(r, stream=True),
        lambda r: asyncio.run(ask_from_an_event_loop(r)),
        lambda r: engine.map([r]),
    ):
        with pytest.raises(StoppedError, match="stopped"):
            ask([1])
    with pytest.raises(StoppedError):
        engine.start()


def test_an_engine_stopped_before_it_began_takes_no_requests() -> None:
    engine = bm.Engine(Sums(), threads=1)
    engine.stop()
    with pytest.raises(StoppedError, match="make a new one"):
        engine.submit([1])


def test_the_example_request_proves_the_model_at_start() -> None:
    model = Sums(max_batch=4)
    model.example_request = [1, 2]
    with bm.Engine(model, threads=1) as engine:
        assert len(engine.registry.types) == 1
        assert float(engine.submit([3, 4]).result()) == 7.0
    model.example_request = ["not a number"]
    engine = bm.Engine(model, threads=1)
    with pytest.raises(ModelError, match="example request failed"):
        engine.start()


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled")
@pytest.mark.parametrize("workers", [1, 2])
def test_loops_are_compiled_and_measured_by_who_starts_the_engine_and_not_by_its_own_threads(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their compiler takes most of a minute at the first start, which nobody should take for a hanging engine."""
    measured_in: list[threading.Thread] = []
    measure = ChainLoop.measure

    def measured(*given: Any) -> None:
        measured_in.append(threading.current_thread())
        measure(*given)

    monkeypatch.setattr(ChainLoop, "measure", measured)
    model = LoopTranslator(Encode(), Decode())
    model.example_request = [3, 4]
    with bm.Engine(model, workers=workers, threads=1) as engine:
        after_start = len(measured_in)
        engine.submit([5, 6, 7]).result()
    assert after_start > 0
    assert measured_in == [threading.current_thread()] * after_start


@pytest.mark.parametrize("drain", [True, False])
def test_an_engine_stopped_in_its_own_thread_settles_all_it_accepted_and_ends(drain: bool) -> None:
    """An answer's callbacks run in the engine's thread, which cannot wait for its own end."""
    model = Held()
    engine = bm.Engine(model, threads=1)
    first = engine.submit(1)
    others = [engine.submit(n) for n in (400, 3, 200)]
    refused: list[BaseException] = []

    def stop(_: Answer) -> None:
        engine.stop(drain=drain)
        try:
            engine.submit(1)
        except StoppedError as error:
            refused.append(error)

    first.add_done_callback(stop)
    model.let_go.set()
    wait_until(lambda: workers(engine)[0].has_ended)
    assert len(refused) == 1
    assert first.result(0) == [1]
    if drain:
        assert [len(future.result(0)) for future in others] == [400, 3, 200]
    else:
        assert all(isinstance(future.exception(0), StoppedError) for future in others)
    assert all(future.done() for future in others)
    engine.stop()
    assert_balanced(engine)
