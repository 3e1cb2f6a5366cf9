"""Requests of `map` share tickets and records: each has the answer that it would have alone."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import batchmaker as bm
from batchmaker.clock import RealClock
from batchmaker.engine import Ticket
from batchmaker.engine.bulks import FEWEST_IN_BULK, MOST_IN_BULK, Bulks
from batchmaker.engine.cell_driver import CellDriver
from batchmaker.engine.incoming import Incoming
from batchmaker.engine.request import InFlight
from batchmaker.engine.submission import Tickets
from batchmaker.errors import BatchmakerError, CellError, EngineError, InvalidRequestError, StoppedError
from batchmaker.executor.inline import InlineExecutor
from batchmaker.lab import zoo
from batchmaker.lab.simulator.replay import EventLog, SchedulerOptions, check_replay

WORDS = 30


class Sums(nn.Module):
    """x [n, width], h [n, width] -> h + x, which is a row's own; it raises where x is above 1,000."""

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        if (x > 1000).any():
            raise ValueError("a number above 1,000")
        return h + x


class Running(bm.Model):
    """Rows [steps, width] -> their sum, or with `whole` all sums."""

    def __init__(self, width: int, *, whole: bool = False, max_batch: int = 64) -> None:
        self.step, self.width, self.whole = bm.Cell(Sums(), state=(width,), max_batch=max_batch), width, whole

    def unfold(self, rows: Any) -> Any:
        last = self.step.run(rows)
        return last.steps if self.whole else last


class Odd(bm.Model):
    """Numbers -> their sum. What it returns, and whether it has a template, differs from request to request."""

    def __init__(self) -> None:
        self.step = bm.Cell(Sums(), state=(2,), max_batch=64)

    def unfold(self, request: Any) -> Any:
        if isinstance(request, dict):
            last = self.step.run(request["rows"])
            return {"last": last, "all": last.steps} if request["kind"] == "all" else (last, request["kind"])
        if len(request) == 1 and float(request[0][0]) < 0:  # looks at a value
            return self.step.run(-np.asarray(request))
        return self.step.run(request)


def rows_of(lengths: list[int], width: int = 3) -> list[np.ndarray[Any, Any]]:
    draw = np.random.default_rng(sum(lengths))
    return [draw.integers(0, 9, (length, width)).astype(np.float32) for length in lengths]


def bulks_of(engine: bm.Engine) -> Bulks:
    assert isinstance(engine.driver, CellDriver)
    return engine.driver.bulks


def warm(engine: bm.Engine, requests: list[Any]) -> None:
    """Let each shape have a template."""
    for _ in range(3):
        engine.map(requests, progress=False)


@pytest.mark.parametrize("width", [1, 3, 100, 9000])
@pytest.mark.parametrize("whole", [False, True])
def test_each_request_gets_its_own_sum_whatever_the_size_of_a_value(width: int, whole: bool) -> None:
    """Values of 4 bytes and of 12 have a row for each node, those of 400 one for each value, those of 36,000 none."""
    requests = rows_of([1 + i % 5 for i in range(40)], width)
    with bm.Engine(Running(width, whole=whole), threads=1) as engine:
        for _ in range(4):
            found = engine.map(requests, progress=False)
            for request, sums in zip(requests, found, strict=True):
                wanted = request.cumsum(0) if whole else request.sum(0)
                assert np.array_equal(np.asarray(sums), wanted)
        assert not bulks_of(engine).members
        assert engine.service["Running"].answered == 4 * len(requests)


def test_results_keep_no_memory_of_others_alive() -> None:
    with bm.Engine(Running(100), threads=1) as engine:
        warm(engine, rows_of([2] * 20, 100))
        found = engine.map(rows_of([2] * 20, 100), progress=False)
    assert all(one.untyped_storage().nbytes() == one.nbytes for one in found)


def test_nothing_keeps_results_once_the_caller_has_let_go_of_them() -> None:
    requests = rows_of([2] * 20, 100)
    with bm.Engine(Running(100), threads=1) as engine:
        warm(engine, requests)
        gc.collect()
        gc.disable()
        try:
            found = engine.map(requests, progress=False)
            results = [weakref.ref(one) for one in found]
            found = engine.map(requests[:8], progress=False)  # what the engine's thread has left in its variables
            assert not any(result() is not None for result in results)
        finally:
            gc.enable()


def test_many_requests_at_once_are_not_run_one_by_one_whatever_they_return() -> None:
    requests = [{"rows": np.full((2, 2), i, np.float32), "kind": "all"} for i in range(64)]
    with bm.Engine(Odd(), threads=1) as engine:
        for _ in range(4):
            engine.map(requests, progress=False)
        before = engine.stats.tasks
        engine.map(requests, progress=False)
        assert engine.stats.tasks - before < 8


def test_members_that_wait_end_with_their_bulk_when_the_engine_begins_anew() -> None:
    served: Any = SimpleNamespace(model=Running(3), model_id=0)
    incoming = Incoming()
    incoming.inbox.put(Tickets(RealClock()).bulks(served, rows_of([2] * 30), 0, MOST_IN_BULK))
    incoming.take()
    incoming.separate_bulks()
    assert incoming.start_over() == set()
    assert incoming.num_waiting == 0


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_requests_of_every_kind_together_have_the_answers_that_they_have_alone(data: st.DataObject) -> None:
    kinds = st.sampled_from(["rows", "looks", "all", "words"])
    drawn = data.draw(st.lists(st.tuples(kinds, st.integers(1, 4)), min_size=FEWEST_IN_BULK, max_size=90))
    requests = list[Any]()
    for number, (kind, length) in enumerate(drawn):
        rows = np.full((length, 2), number % 7, np.float32)
        requests.append(rows if kind == "rows" else -rows[:1] - 1 if kind == "looks" else {"rows": rows, "kind": kind})
    with bm.Engine(Odd(), threads=1) as engine:
        for _ in range(2):
            together = engine.map(requests, progress=False)
        alone = [engine.submit(request).result(30) for request in requests]
    for one, other in zip(together, alone, strict=True):
        assert type(one) is type(other)
        parts = [(one, other)]
        if isinstance(one, dict):
            parts = [(one[name], other[name]) for name in ("last", "all")]
        elif isinstance(one, tuple):
            parts = [(one[0], other[0])]
            assert one[1] == other[1]
        assert all(torch.equal(a, b) for a, b in parts)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["cellular", "auto", "lazy", "depth", "agenda-remaining"])
@pytest.mark.parametrize("name", ["lstm", "bilstm-tagger", "seq2seq", "early-exit"])
def test_networks_answer_in_bulk_as_one_by_one(name: str, policy: str) -> None:
    draw = np.random.default_rng(0)
    if name == "early-exit":
        model = zoo.make(name, width=8, layers=3, output="scores")
        requests: list[Any] = [draw.standard_normal(8).astype(np.float32) for _ in range(30)]
    else:
        vocabulary = {"vocabulary_size": WORDS} if name != "seq2seq" else {"source_vocabulary": WORDS}
        options = {key: size for key, size in vocabulary.items() if key in zoo.option_names(name)}
        model = zoo.make(name, hidden=8, **options)
        requests = [draw.integers(3, WORDS, 1 + i % 4) for i in range(30)]
        if name == "seq2seq":
            requests = [model.example_request] * 10
    with bm.Engine(model, policy, threads=1) as engine:
        for _ in range(3):
            together = engine.map(requests, progress=False)
        alone = [engine.submit(request).result(60) for request in requests]
    for one, other in zip(together, alone, strict=True):
        assert torch.allclose(torch.as_tensor(one), torch.as_tensor(other), atol=1e-5)


def test_a_row_that_raises_fails_its_request_alone() -> None:
    requests = rows_of([1 + i % 3 for i in range(50)])
    wrong = [row.copy() for row in requests]
    wrong[17][-1, 0] = 2000
    outcomes = Counter[str]()
    with bm.Engine(Running(3), threads=1) as engine:
        warm(engine, requests)
        engine.on_settled = lambda ticket, error: outcomes.update([type(error).__name__])
        with pytest.raises(CellError, match="a number above 1,000"):
            engine.map(wrong, progress=False)
        assert outcomes == {"NoneType": 49, "CellError": 1}
        assert engine.service["Running"].num_failed == 1
        assert np.array_equal(engine.map(requests, progress=False)[17], requests[17].sum(0))
        assert engine.num_in_flight == 0


def test_a_wrong_request_among_many_is_named_by_its_number_and_the_others_are_answered() -> None:
    seen = list[BaseException | None]()
    model = zoo.make("lstm", vocabulary_size=WORDS, hidden=8)
    requests: list[Any] = [[1, 2, 3]] * 40
    with bm.Engine(model, threads=1) as engine:
        warm(engine, requests)
        engine.on_settled = lambda ticket, error: seen.append(error)
        with pytest.raises(InvalidRequestError, match="30"):
            engine.map([*requests[:20], [1, WORDS, 2], *requests[20:]], progress=False)
    assert sum(error is None for error in seen) == 40
    assert sum(isinstance(error, InvalidRequestError) for error in seen) == 1


def test_data_that_cannot_be_written_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    write = InlineExecutor.write

    def refuses(self: InlineExecutor, table: Any, rows: Any, values: Any) -> None:
        if (np.asarray(values) == 77).any():
            raise RuntimeError("not this number")
        write(self, table, rows, values)

    monkeypatch.setattr(InlineExecutor, "write", refuses)
    requests = rows_of([2] * 30)
    with bm.Engine(Running(3), threads=1) as engine:
        warm(engine, requests)
        requests[11][:] = 77
        with pytest.raises(InvalidRequestError, match="not this number"):
            engine.map(requests, progress=False)
        assert engine.service["Running"].num_failed == 1
        assert engine.service["Running"].answered == 4 * 30 - 1


def test_who_observes_requests_sees_each_with_its_times() -> None:
    seen = list[Ticket]()
    with bm.Engine(Running(3), threads=1) as engine:
        warm(engine, rows_of([2] * 20))
        engine.on_settled = lambda ticket, error: seen.append(ticket)
        engine.map(rows_of([2] * 20), progress=False)
    assert len({ticket.request_id for ticket in seen}) == 20
    assert all(ticket.latency_s is not None and ticket.latency_s >= 0 for ticket in seen)
    assert all(ticket.queue_s is not None and ticket.queue_s >= 0 and ticket.num_cells == 2 for ticket in seen)


def test_stopping_ends_a_map_with_an_error_and_nobody_hangs() -> None:
    class Waits(nn.Module):
        def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
            if is_warm.is_set():
                begun.set()
                go_on.wait(30)
            return h.mul_(1) + x  # written in place: it runs as it is

    is_warm, begun, go_on = threading.Event(), threading.Event(), threading.Event()
    model = Running(3)
    model.step = bm.Cell(Waits(), state=(3,), max_batch=64)
    engine = bm.Engine(model, threads=1)
    engine.start()
    warm(engine, rows_of([2] * 20))
    is_warm.set()
    ended = list[BaseException]()

    def ask() -> None:
        try:
            engine.map(rows_of([3] * 300), progress=False)
        except BatchmakerError as error:
            ended.append(error)

    caller = threading.Thread(target=ask)
    caller.start()
    assert begun.wait(30)
    threading.Timer(0.1, go_on.set).start()
    engine.stop(drain=False)
    caller.join(30)
    assert not caller.is_alive()
    assert isinstance(ended[0], StoppedError)


def test_after_a_failure_of_the_engine_a_map_has_an_error_and_the_next_its_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = rows_of([2] * 40)
    with bm.Engine(Running(3), threads=1) as engine:
        warm(engine, requests)

        def fails(*_: Any) -> Any:
            raise RuntimeError("a defect")

        monkeypatch.setattr(Bulks, "admit", fails)
        with pytest.raises(EngineError, match="a defect"):
            engine.map(requests, progress=False)
        monkeypatch.undo()
        assert np.array_equal(engine.map(requests, progress=False)[5], requests[5].sum(0))


def test_with_few_places_all_are_answered_and_the_places_are_free_again() -> None:
    requests = rows_of([1 + i % 3 for i in range(100)])
    for places in (1, FEWEST_IN_BULK, 20):
        with bm.Engine(Running(3), threads=1, max_queue=places, when_full="wait") as engine:
            for _ in range(3):
                found = engine.map(requests, progress=False)
            assert all(np.array_equal(one, rows.sum(0)) for one, rows in zip(found, requests, strict=True))
            for answer in engine.submit_many(requests[:places]):
                answer.result(30)


def test_several_workers_share_the_requests_of_a_call() -> None:
    requests = rows_of([1 + i % 3 for i in range(400)])
    with bm.Engine(Running(3), threads=1, workers=2) as engine:
        for _ in range(3):
            found = engine.map(requests, progress=False)
        assert all(np.array_equal(one, rows.sum(0)) for one, rows in zip(found, requests, strict=True))
        assert all(driver.stats.cells > 0 for driver in engine.drivers)


def test_the_first_of_waiting_requests_come_by_their_number_not_by_their_tickets() -> None:
    served: Any = SimpleNamespace(model=Running(3), model_id=0)
    tickets = Tickets(RealClock()).bulks(served, rows_of([2] * 200), 0, MOST_IN_BULK)
    incoming = Incoming()
    incoming.inbox.put(tickets)
    incoming.take()
    assert incoming.num_waiting == 200
    first = incoming.first(100)
    assert sum(ticket.num_requests for ticket in first) == 2 * MOST_IN_BULK
    assert incoming.num_waiting == 200 - 2 * MOST_IN_BULK
    incoming.separate_bulks()
    assert [ticket.num_requests for ticket in incoming.first(10)] == [1] * 10
    assert incoming.num_waiting == 200 - 2 * MOST_IN_BULK - 10


@pytest.mark.parametrize("priority", [0, 1])
def test_beside_live_streams_requests_of_a_bulk_begin_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch, priority: int
) -> None:
    requests = rows_of([2] * 200)
    with bm.Engine(Running(3, max_batch=2), "cellular", threads=1) as engine:
        warm(engine, requests)
        most = list[int]()
        advance = CellDriver.advance

        def noted(self: CellDriver, tickets: Any) -> None:
            most.append(sum(ticket.num_requests for ticket in tickets))
            advance(self, tickets)

        monkeypatch.setattr(CellDriver, "has_live_streams", True)
        monkeypatch.setattr(CellDriver, "advance", noted)
        found = engine.map(requests, progress=False, priority=priority)
        assert max(most) < MOST_IN_BULK
        assert all(np.array_equal(one, rows.sum(0)) for one, rows in zip(found, requests, strict=True))
        assert engine.stats.restarts == 0


def test_recorded_events_of_bulks_replay_to_the_same_commands() -> None:
    log = EventLog(SchedulerOptions("cellular", take_turns=True, loops_ahead=True))
    with bm.Engine(Running(3), "cellular", threads=1) as engine:
        assert isinstance(engine.driver, CellDriver)
        engine.driver.record = log.record
        warm(engine, rows_of([1 + i % 4 for i in range(80)]))
    assert check_replay(log) > 80


def test_a_stopped_engine_refuses_a_map() -> None:
    engine = bm.Engine(Running(3), threads=1)
    engine.start()
    engine.stop()
    with pytest.raises(StoppedError):
        engine.map(rows_of([2] * 20), progress=False)


def test_requests_with_templates_have_no_records_of_their_own_and_their_callers_no_tickets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Counter[str]()
    requests = rows_of([1 + i % 3 for i in range(130)])
    with bm.Engine(Running(3), threads=1) as engine:
        warm(engine, requests)
        monkeypatch.setattr(InFlight, "__init__", lambda *_: made.update(["records"]))
        ticket = Ticket.__init__

        def counted(self: Ticket, *arguments: Any, **named: Any) -> None:
            made.update(["tickets"])
            ticket(self, *arguments, **named)

        monkeypatch.setattr(Ticket, "__init__", counted)
        engine.map(requests, progress=False)
    assert made == {"tickets": -(-130 // MOST_IN_BULK)}
