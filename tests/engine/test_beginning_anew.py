"""An engine that fails begins anew: who had begun is told, who waited is served, and nothing of it is left behind."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
from engine_models import Counter, Turns, Watching, assert_balanced
from raising_models import Ask, Hanging, WholeSums
from torch import nn

import batchmaker as bm
from batchmaker.clock import VirtualClock
from batchmaker.core.scheduler import Scheduler
from batchmaker.engine import Answer
from batchmaker.engine.heartbeat import HUNG_AFTER_S
from batchmaker.engine.worker import MOST_RESTARTS
from batchmaker.engine.workers import LONG_TURN_S
from batchmaker.errors import EngineError, ModelError, SequenceError, StoppedError
from batchmaker.policies.cellular import CellularPolicy
from insides import scheduler, scheduler_of, unanswered, use_clock, watchdog, workers
from waiting import wait_until


class DefectError(Exception):
    pass


@pytest.fixture
def engine_log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "batchmaker.engine")
    return caplog


def break_now(engine: bm.Engine) -> None:
    """Let the present driver fail at its next call of the scheduler."""

    def fails(*_: Any) -> Any:
        raise DefectError("of a test")

    for driver in engine.drivers:
        scheduler_of(driver).handle = fails  # type: ignore[attr-defined]


def test_who_had_begun_is_told_and_who_waited_is_served(engine_log: Any) -> None:
    model = Hanging()
    with bm.Engine(model, threads=1) as engine:
        assert int(engine.submit(3).result(60)) == 3
        began = engine.submit(0)
        assert model.entered.wait(60)
        waited = [engine.submit(n) for n in (4, 5, 6)]
        cancelled = engine.submit(7)
        assert cancelled.cancel()
        before = engine.driver
        break_now(engine)
        model.let_go.set()
        error = began.exception(60)
        assert isinstance(error, EngineError)
        assert "has begun anew: DefectError: of a test" in str(error)
        assert isinstance(error.__cause__, DefectError)
        assert [int(answer.result(60)) for answer in waited] == [4, 5, 6]
        assert engine.driver is not before
        assert engine.stats.restarts == 1
        assert engine.heartbeat.alive
    told = [record for record in engine_log.records if "begins anew" in record.getMessage()]
    assert len(told) == 1
    assert "1 requests that had begun fail, 4 that had not wait" in told[0].getMessage()
    assert told[0].exc_info is not None
    assert_balanced(engine)
    (counts,) = engine.service.values()
    assert (counts.answered, counts.failed) == (4, {"EngineError": 1, "CancelledError": 1})


def test_a_request_answered_late_by_another_thread_is_counted_once(engine_log: Any) -> None:
    model, settled = Hanging(), list[str]()
    with bm.Engine(model, threads=1) as engine:
        engine.submit(3).result(60)
        began = engine.submit(0, deadline_ms=1)
        assert began.exception(60) is not None
        engine.on_settled = lambda ticket, error: settled.append(type(error).__name__)
        break_now(engine)
        model.let_go.set()
        assert int(engine.submit(2).result(60)) == 2
    assert settled == ["DeadlineError", "NoneType"]
    assert not unanswered(engine)


def test_its_sequences_end_and_say_why(engine_log: Any) -> None:
    with bm.Engine(Turns(), threads=1, max_sequences=2) as engine:
        sequences = [engine.open_sequence() for _ in range(2)]
        for sequence in sequences:
            assert sequence.submit(2).result(60) == [1, 2]
        break_now(engine)
        assert isinstance(sequences[0].submit(1).exception(60), EngineError)
        for sequence in sequences:
            with pytest.raises(SequenceError, match="the engine has failed and begun anew"):
                sequence.submit(1).result(60)  # at once, or with the answer if it has not ended yet
            assert not sequence.is_open
            sequence.close()
        assert engine.num_sequences == 0
        with engine.open_sequence() as fresh, engine.open_sequence() as other:
            assert fresh.submit(2).result(60) == [1, 2]
            assert other.submit(1).result(60) == [1]
            assert fresh.submit(0).result(60) == 2
    assert_balanced(engine)


def test_a_policy_begins_as_it_was_given_and_so_does_the_line_of_those_who_wait(engine_log: Any) -> None:
    policy = Watching()
    with bm.Engine(Counter(), policy, threads=1) as engine:
        assert engine.submit(2).result(60) == [1, 2]
        break_now(engine)
        assert isinstance(engine.submit(3).exception(60), EngineError)
        assert engine.submit(2).result(60) == [1, 2]
        assert engine.policy is not policy
        assert type(engine.policy) is Watching
    assert_balanced(engine)


def test_whoever_observes_the_engine_goes_on(engine_log: Any) -> None:
    steps, turns = list[str](), list[int]()
    with bm.Engine(Counter(), threads=1) as engine:
        engine.observe(lambda step: steps.append(step.cell))
        engine.driver.record = lambda events, commands: turns.append(len(commands))  # type: ignore[attr-defined]
        engine.submit(2).result(60)
        break_now(engine)
        engine.submit(2).exception(60)
        seen = len(steps), len(turns), engine.stats.steps
        engine.submit(2).result(60)
        assert len(steps) > seen[0]
        assert len(turns) > seen[1]
        assert engine.stats.steps > seen[2]


def test_callers_of_map_get_the_error_and_the_engine_maps_on(engine_log: Any) -> None:
    with bm.Engine(Counter(), threads=1) as engine:
        break_now(engine)
        with pytest.raises(EngineError):
            engine.map([2] * 700, progress=False)
        assert engine.map([2] * 5, progress=False) == [[1, 2]] * 5
    assert_balanced(engine)


def test_failures_with_answers_in_between_never_end_it(engine_log: Any) -> None:
    with bm.Engine(Counter(), threads=1) as engine:
        for _ in range(3 * MOST_RESTARTS):
            break_now(engine)
            assert isinstance(engine.submit(2).exception(60), EngineError)
            assert engine.submit(2).result(60) == [1, 2]
        assert engine.stats.restarts == 3 * MOST_RESTARTS


def test_it_may_fail_while_it_stops(engine_log: Any) -> None:
    engine = bm.Engine(Counter(), threads=1).start()
    engine.submit(2).result(60)

    def fails() -> None:
        raise DefectError

    engine.driver.finish = fails  # type: ignore[method-assign]
    assert engine.stop()
    assert engine.stats.restarts == 1
    assert_balanced(engine)


def test_one_of_several_workers_begins_anew_and_the_others_know_nothing_of_it(engine_log: Any) -> None:
    model = Hanging()
    with bm.Engine(model, threads=1, workers=2) as engine:
        began = engine.submit(0)  # one of the workers hangs in its unfold function
        assert model.entered.wait(60)
        (hanging,) = [n for n, loop in enumerate(workers(engine)) if loop.work]
        before = engine.drivers

        def fails(*_: Any) -> Any:
            raise DefectError("of a test")

        scheduler_of(before[hanging]).handle = fails  # type: ignore[attr-defined]
        wait_until(lambda: workers(engine)[hanging].busy_for_s > LONG_TURN_S)
        others = [engine.submit(n) for n in (4, 5, 6)]
        assert [int(answer.result(60)) for answer in others] == [4, 5, 6]
        model.let_go.set()
        assert isinstance(began.exception(60), EngineError)
        wait_until(lambda: engine.drivers[hanging] is not before[hanging])
        assert engine.drivers[1 - hanging] is before[1 - hanging]
        assert engine.stats.restarts == 1
    assert_balanced(engine)


def test_whole_requests_in_batches_begin_anew_as_well(engine_log: Any) -> None:
    with bm.Engine(WholeSums(), "padded:bucket_width=1000,max_batch=8", threads=1) as engine:
        assert engine.submit(Ask(4)).result(60) == [10, 3]
        break_now(engine)
        assert isinstance(engine.submit(Ask(4)).exception(60), EngineError)
        assert engine.submit(Ask(4)).result(60) == [10, 3]
        assert engine.stats.restarts == 1
    assert engine.num_in_flight == 0


# --- the start -------------------------------------------------------------------------------------------------------


class Slow(bm.Model):
    """Its example is unfolded when the test lets it go; then it raises, if it is to fail."""

    example_request = 3

    def __init__(self, *, fails: bool) -> None:
        self.cell = bm.Cell(nn.Linear(2, 2))
        self.fails = fails
        self.entered, self.let_go = threading.Event(), threading.Event()

    def unfold(self, n: int) -> Any:
        self.entered.set()
        self.let_go.wait(60)
        if self.fails:
            raise ValueError("a wrong setting")
        return self.cell(torch.zeros(2))


@pytest.mark.parametrize("fails", [False, True])
def test_a_slow_start_says_what_it_does_and_a_failed_one_only_its_error(fails: bool, engine_log: Any) -> None:
    model, raised = Slow(fails=fails), list[BaseException]()
    engine = bm.Engine(model, CellularPolicy(), threads=1)
    watched = watchdog(workers(engine)[0])
    watched.hung_after_s = 0.0  # every look finds what it does slow
    watched.start = lambda: None  # the test looks itself

    def start() -> None:
        try:
            engine.start()
        except ModelError as error:
            raised.append(error)

    starter = threading.Thread(target=start)
    starter.start()
    assert model.entered.wait(120)
    for _ in range(4):
        watched.look()
    model.let_go.set()
    starter.join(120)
    watched.hung_after_s = HUNG_AFTER_S
    watched.look()
    engine.stop()
    said = [record.getMessage() for record in engine_log.records if record.name == "batchmaker.engine"]
    line, *last = said
    assert line.startswith("the engine is still starting: it computes the example request of model 'Slow'")
    assert [said.split(":")[0] for said in last] == [] if fails else ["started"]
    assert "Traceback" not in engine_log.text
    assert "File" not in engine_log.text
    assert len(raised) == fails
    assert all("a wrong setting" in str(error) for error in raised)


def test_a_cell_that_is_compiled_at_the_start_is_named() -> None:
    model, compiles = Slow(fails=False), "compiles cell 'decoder'"
    engine = bm.Engine(model, threads=1)
    starter = threading.Thread(target=engine.start)
    starter.start()
    assert model.entered.wait(120)
    engine.registry.binding = "decoder"
    beat = engine.heartbeat
    assert beat.starting == f"computes the example request of model 'Slow': {compiles}"
    assert beat.compiling == compiles
    model.let_go.set()
    starter.join(120)
    engine.registry.binding = "decoder"
    beat = engine.heartbeat
    assert (beat.starting, beat.compiling) == ("", compiles), "no start, but a first request that compiles a cell"
    engine.stop()


def refuses(worker: Any) -> bool:
    try:
        worker.check()
    except StoppedError:
        return True
    return False


def test_a_start_that_fails_after_a_long_time_logs_no_stack(engine_log: Any) -> None:
    model = Slow(fails=True)
    engine = bm.Engine(model, CellularPolicy(), threads=1)
    (loop,) = workers(engine)
    use_clock(loop, clock := VirtualClock())
    unfold = model.unfold

    def slow(n: int) -> Any:
        watched.look()
        clock.advance(100.0)
        watched.look()
        return unfold(n)

    watched = watchdog(loop)
    watched.start = lambda: None  # the test looks itself

    def ends_its_turn(*_: Any) -> None:
        wait_until(lambda: refuses(loop))  # the caller has the error, and stops the engine before the turn is over
        watched.look()

    model.unfold = slow  # type: ignore[method-assign]
    model.let_go.set()
    engine.driver.record = ends_its_turn  # type: ignore[attr-defined]
    with pytest.raises(ModelError, match="a wrong setting"):
        engine.start()
    assert not engine_log.records


def test_the_scheduler_of_a_failed_driver_is_not_used_again(engine_log: Any) -> None:
    with bm.Engine(Counter(), threads=1) as engine:
        before: Scheduler = scheduler(engine)  # type: ignore[attr-defined]
        break_now(engine)
        failed: Answer = engine.submit(1)
        assert isinstance(failed.exception(60), EngineError)
        assert engine.submit(1).result(60) == [1]
        assert scheduler(engine) is not before  # type: ignore[attr-defined]
