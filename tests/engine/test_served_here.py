"""Who waits for a short request while the engine has nothing else to do computes it in the own thread, as well."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import assert_balanced
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.engine import lone_runs
from batchmaker.engine.incoming import Incoming
from batchmaker.errors import EngineError, OptionError, StoppedError

TIMES = 200
"""So often somebody asks at most: another thread may be faster now and then."""


class Summing(nn.Module):
    """x, total -> total + weighted x: a product, so that what a thread has set for products shows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weighted = nn.Linear(8, 8)

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        return total + self.weighted(x)


class Sums(bm.Model):
    def __init__(self) -> None:
        self.add = bm.Cell(Summing())

    def unfold(self, rows: Any) -> Any:
        return self.add.run(rows)


ROWS = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)


MODEL = Sums()


def wanted(rows: np.ndarray) -> Tensor:
    with torch.no_grad():
        return MODEL.add.module.weighted(torch.from_numpy(rows)).sum(0)


@pytest.fixture
def engine() -> Iterator[bm.Engine]:
    with bm.Engine(MODEL, threads=1, workers=1) as engine:
        for _ in range(8):
            engine.submit(ROWS).result(60)
        yield engine


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads in which requests are computed alone."""
    compute, seen = lone_runs.LoneRuns.compute, list[int]()

    def noted(self: lone_runs.LoneRuns, run: Any, values: Any) -> Any:
        seen.append(threading.get_ident())
        return compute(self, run, values)

    monkeypatch.setattr(lone_runs.LoneRuns, "compute", noted)
    return seen


def until_here(engine: bm.Engine, threads: list[int], ask: Callable[[], object]) -> None:
    """Ask until a request is computed in this thread."""
    for _ in range(TIMES):
        ask()
        if threading.get_ident() in threads:
            return
        engine.submit(ROWS).result(60)
    pytest.fail(f"none of {TIMES} requests was computed in the thread that waited for it")


def test_it_is_computed_in_the_thread_that_waits(engine: bm.Engine, threads: list[int]) -> None:
    def ask() -> None:
        torch.testing.assert_close(engine.submit(ROWS).result(60), wanted(ROWS))

    until_here(engine, threads, ask)
    assert_balanced(engine)


def test_the_thread_has_as_many_compute_threads_as_before(engine: bm.Engine, threads: list[int]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        until_here(engine, threads, lambda: engine.submit(ROWS).result(60))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "mode",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        torch.inference_mode,
        lambda: torch.device("meta"),
    ],
)
def test_what_the_callers_thread_has_set_changes_no_answer(
    engine: bm.Engine, threads: list[int], mode: Callable[[], Any]
) -> None:
    right = wanted(ROWS)
    with mode():
        answers = [engine.submit(ROWS).result(60) for _ in range(20)]
    assert threading.get_ident() not in threads
    for answer in answers:
        assert answer.dtype == torch.float32
        assert not answer.is_inference()
        torch.testing.assert_close(answer, right)


def test_a_callback_there_may_submit_and_not_wait(engine: bm.Engine, threads: list[int]) -> None:
    raised, more = list[BaseException](), list[Any]()

    def wait(_: object) -> None:
        more.append(engine.submit(ROWS))
        try:
            more[-1].result(60)
        except OptionError as error:
            raised.append(error)

    def ask() -> None:
        answer = engine.submit(ROWS)
        answer.add_done_callback(wait)
        answer.result(60)

    until_here(engine, threads, ask)
    for answer in more:
        torch.testing.assert_close(answer.result(60), wanted(ROWS))
    assert len(raised) == len(more) > 0


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """The signals that somebody's own handler of SIGALRM has handled; it raises."""
    seen = list[int]()

    def handle(number: int, _: object) -> None:
        seen.append(number)
        raise TimeoutError("the caller's own")

    before = signal.signal(signal.SIGALRM, handle)
    yield seen
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGALRM, TimeoutError)], ids=["SIGINT", "SIGALRM"]
)
def test_a_signal_ends_the_wait_and_not_the_turn(
    engine: bm.Engine, monkeypatch: pytest.MonkeyPatch, handled: list[int], number: int, error: type[BaseException]
) -> None:
    compute, here, came = lone_runs.LoneRuns.compute, threading.get_ident(), list[int]()

    def interrupted(self: lone_runs.LoneRuns, run: Any, values: Any) -> Any:
        if threading.get_ident() == here and not came:
            came.append(number)
            signal.raise_signal(number)
        return compute(self, run, values)

    monkeypatch.setattr(lone_runs.LoneRuns, "compute", interrupted)
    for _ in range(TIMES):
        answer = engine.submit(ROWS)
        try:
            answer.result(60)
        except error:
            break
    else:
        pytest.fail("nothing was raised")
    assert came == [number]
    assert handled == came * (number == signal.SIGALRM)
    torch.testing.assert_close(answer.result(0), wanted(ROWS))
    assert engine.stats.restarts == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_ends_what_hangs_there(engine: bm.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, here, came = lone_runs.LoneRuns.compute, threading.get_ident(), list[bool]()

    def hanging(self: lone_runs.LoneRuns, run: Any, values: Any) -> Any:
        if threading.get_ident() == here and not came:
            came.append(True)
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
            pytest.fail("still there")
        return compute(self, run, values)

    monkeypatch.setattr(lone_runs.LoneRuns, "compute", hanging)
    for _ in range(TIMES):
        answer = engine.submit(ROWS)
        try:
            answer.result(60)
        except KeyboardInterrupt:
            break
    else:
        pytest.fail("nothing was raised")
    torch.testing.assert_close(answer.result(60), wanted(ROWS))
    torch.testing.assert_close(engine.submit(ROWS).result(60), wanted(ROWS))
    assert_balanced(engine)


@pytest.mark.parametrize("error", [RuntimeError("a defect"), KeyboardInterrupt("raised in its thread")], ids=repr)
def test_a_turn_that_fails_there_is_as_one_of_the_engines_own(
    engine: bm.Engine, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    failures = [error]
    driver = type(engine.driver)
    answer_here = driver.answer_here

    def failing(self: Any, tickets: Any) -> Any:
        if failures:
            raise failures.pop()
        return answer_here(self, tickets)

    monkeypatch.setattr(driver, "answer_here", failing)
    for _ in range(TIMES):
        answer = engine.submit(ROWS)
        with suppress(KeyboardInterrupt, EngineError):
            answer.result(60)
        if not failures:
            break
    with pytest.raises(EngineError, match=type(error).__name__):
        answer.result(60)
    torch.testing.assert_close(engine.submit(ROWS).result(60), wanted(ROWS))
    assert engine.stats.restarts == 1
    assert_balanced(engine)


def test_a_stop_in_a_callback_there_ends_the_engine(engine: bm.Engine, threads: list[int]) -> None:
    stopped = threading.Event()

    def stop(_: object) -> None:
        if threading.get_ident() in threads:
            engine.stop()
            stopped.set()

    for _ in range(TIMES):
        answer = engine.submit(ROWS)
        answer.add_done_callback(stop)
        answer.result(60)
        if stopped.is_set():
            break
    assert stopped.is_set()
    with pytest.raises(StoppedError):
        engine.submit(ROWS)
    engine.stop()


def test_who_does_not_wait_long_enough_leaves_it_to_the_engine(engine: bm.Engine, threads: list[int]) -> None:
    for _ in range(20):
        answer = engine.submit(ROWS)
        try:
            answer.result(1e-6)
        except TimeoutError:
            torch.testing.assert_close(answer.result(60), wanted(ROWS))
    assert engine.submit(ROWS).exception(60) is None


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    workers=st.sampled_from([1, 2]),
    calls=st.lists(
        st.lists(
            st.tuples(st.integers(1, 6), st.sampled_from(["wait", "wait", "cancel", "late", "several", "map", "bad"])),
            min_size=1, max_size=12,
        ),
        min_size=1, max_size=4,
    ),
)  # fmt: skip
def test_callers_in_any_threads_get_the_right_answers(workers: int, calls: list[list[tuple[int, str]]]) -> None:
    def call(asked: list[tuple[int, str]]) -> None:
        for length, how in asked:
            rows = np.random.default_rng(length).standard_normal((length, 8)).astype(np.float32)
            right = wanted(rows)
            if how == "several":
                for answer in [engine.submit(rows) for _ in range(6)]:
                    torch.testing.assert_close(answer.result(60), right)
            elif how == "map":
                for got in engine.map([rows] * 3, progress=False):
                    torch.testing.assert_close(got, right)
            elif how == "bad":
                assert isinstance(engine.submit(rows[:, :3]).exception(60), bm.errors.ShapeError)
            elif how == "late":
                error = engine.submit(rows, deadline_ms=1e-6).exception(60)
                assert isinstance(error, bm.errors.DeadlineError)
            else:
                answer = engine.submit(rows)
                if how == "cancel" and answer.cancel():
                    assert isinstance(answer.exception(60), bm.errors.CancelledError)
                else:
                    torch.testing.assert_close(answer.result(60), right)

    with bm.Engine(MODEL, threads=1, workers=workers) as engine, ThreadPoolExecutor(len(calls)) as pool:
        for _ in range(3):
            for done in [pool.submit(call, asked) for asked in calls]:
                done.result(120)
    assert engine.num_in_flight == 0
    assert_balanced(engine)


def test_an_entry_that_the_engines_thread_takes_meanwhile_is_left_to_it() -> None:
    class Contested(queue.SimpleQueue[Any]):
        def empty(self) -> bool:
            return False  # it was not, a moment ago

    incoming = Incoming()
    incoming.inbox = Contested()
    assert not incoming.take()


def test_who_waits_while_another_computes_is_answered(engine: bm.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, entered, go_on = lone_runs.LoneRuns.compute, threading.Event(), threading.Event()
    here = threading.get_ident()

    def slow(self: lone_runs.LoneRuns, run: Any, values: Any) -> Any:
        if threading.get_ident() == here and not entered.is_set():
            entered.set()
            assert go_on.wait(60)
        return compute(self, run, values)

    monkeypatch.setattr(lone_runs.LoneRuns, "compute", slow)
    others = list[Any]()

    def ask() -> None:
        assert entered.wait(60)
        answer = engine.submit(ROWS)
        threading.Thread(target=lambda: (time.sleep(0.02), go_on.set())).start()
        others.append(answer.result(60))

    other = threading.Thread(target=ask)
    other.start()
    for _ in range(TIMES):
        engine.submit(ROWS).result(60)
        if entered.is_set():
            break
    other.join(60)
    torch.testing.assert_close(others[0], wanted(ROWS))
