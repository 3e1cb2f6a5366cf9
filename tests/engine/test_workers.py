"""Several workers of an engine: who gets what, what stays where it began, what an idle one takes from another."""

from __future__ import annotations

import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import Counter, Gate, Totals, assert_balanced, shut
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.engine import Answer
from batchmaker.engine.workers import Workers, work_of
from batchmaker.errors import CancelledError, OptionError, SequenceLimitError, StoppedError
from batchmaker.executor.processors import Processors
from batchmaker.policies.cellular import CellularPolicy
from insides import deal, forbid_unfolding, policies_of, tickets_of, workers
from waiting import wait_until


class Words(nn.Module):
    """word, h -> h."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.cell = nn.Embedding(10, 3), nn.GRUCell(3, 3)

    def forward(self, word: Tensor, h: Tensor) -> Tensor:
        return self.cell(self.embedding(word), h)


ROWS = torch.tensor([[1.0], [2.0], [3.0]])


class Chain(bm.Model):
    """Sums of rows, without a look at them: its requests have templates."""

    def __init__(self, module: nn.Module) -> None:
        self.add = bm.Cell(module, max_batch=4)

    def unfold(self, rows: Any) -> Any:
        return self.add.run(rows, ([0.0],))


class Lengths(bm.Model):
    """Words through a GRU."""

    def __init__(self) -> None:
        self.cell = bm.Cell(Words(), max_batch=4)

    def unfold(self, words: list[int]) -> Any:
        return self.cell.run(words)


@pytest.mark.parametrize(
    ("request_", "work"),
    [
        ([1, 2, 3], 3), ("words", 5), (np.zeros((4, 2)), 4), (torch.zeros(6), 6), (torch.zeros(()), 1), (7, 1),
        (([1, 2], [1, 2, 3, 4], 9), 4), ({"source": [1, 2, 3], "length": 2}, 3), ([], 1), (None, 1),
        ((("a", "b"), "c"), 1),
    ],
)  # fmt: skip
def test_the_work_of_a_request_is_the_number_of_its_values(request_: Any, work: int) -> None:
    assert work_of(request_) == work


def test_requests_are_dealt_by_work() -> None:
    with bm.Engine(Lengths(), "cellular", threads=1, workers=3) as engine:
        sent: list[list[int]] = [[], [], []]
        for number, worker in enumerate(workers(engine)):
            worker.send = lambda tickets, n=number: sent[n].extend(ticket.work for ticket in tickets)  # type: ignore[method-assign]
        deal(engine, tickets_of(engine, [[0] * n for n in (9, 1, 1, 1, 1, 8, 7)]))
    assert sorted(sum(each) for each in sent) == [9, 9, 10]


class Doing:
    """A worker, as its workers see it."""

    has_ended = False

    def __init__(self, work: int = 0, busy_for_s: float = 0.0) -> None:
        self.work, self.busy_for_s, self.used_s = work, busy_for_s, 0.0
        self.got: list[Any] = []

    def send(self, tickets: list[Any]) -> None:
        self.got += tickets
        self.work += sum(ticket.work for ticket in tickets)


def tickets(count: int) -> list[Any]:
    return [SimpleNamespace(request=[1], worker=None, answer=None, work=0, bulk=None) for _ in range(count)]


def test_a_worker_in_a_long_turn_gets_nothing_while_there_is_another() -> None:
    hung, other = Doing(0, busy_for_s=3.0), Doing(5)
    Workers([hung, other]).send(tickets(4))  # type: ignore[list-item]
    assert (len(hung.got), len(other.got)) == (0, 4)
    both = Doing(0, busy_for_s=3.0), Doing(5, busy_for_s=2.0)
    Workers(both).send(tickets(4))  # type: ignore[arg-type]
    assert sum(len(one.got) for one in both) == 4, "nothing is lost where all are busy"


@pytest.mark.skipif(
    not hasattr(time, "pthread_getcpuclockid"), reason="the processor time of a thread is not told here"
)
@pytest.mark.parametrize(("busy", "taking"), [(0.0, 2), (1.0, 3), (1.9, 4), (3.8, 7), (9.9, 16), (15.0, 16)])
def test_as_many_workers_take_requests_as_the_lock_lets_run(
    busy: float, taking: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr("batchmaker.engine.workers.time.monotonic", lambda: now_s)
    members = [Doing() for _ in range(16)]
    several = Workers(members, adapts=True)  # type: ignore[arg-type]
    several.send(tickets(16))
    assert [len(worker.got) for worker in members] == [1] * 16, "nothing is known yet"
    now_s += 0.1
    for worker in members:
        worker.used_s += 0.1 * busy / 16
        worker.got.clear()
    several.send(tickets(160))
    assert sum(bool(worker.got) for worker in members) == taking
    told = Workers([Doing() for _ in range(16)])  # type: ignore[list-item]
    now_s += 0.1
    told.send(tickets(16))
    assert all(len(worker.got) == 1 for worker in told.members), "a number that the user gives is that number"  # type: ignore[attr-defined]


def test_the_processor_time_of_a_loop_is_known_while_it_runs() -> None:
    with bm.Engine(Lengths(), threads=1) as engine:
        engine.map([[1, 2, 3]] * 20, progress=False)
        (worker,) = workers(engine)
        before_s = worker.used_s
        engine.map([[1, 2, 3]] * 20, progress=False)
        assert 0 < before_s < worker.used_s


def test_every_worker_answers_and_all_are_counted_together() -> None:
    requests = [list(range(1 + n % 9)) for n in range(200)]
    with bm.Engine(Lengths(), threads=1, workers=3) as engine, bm.Engine(Lengths(), threads=1, workers=1) as one:
        for ours, theirs in zip(engine.map(requests, progress=False), one.map(requests, progress=False), strict=True):
            torch.testing.assert_close(ours, theirs)
        assert all(driver.stats.steps for driver in engine.drivers)
        assert engine.stats.cells == one.stats.cells == sum(map(len, requests))
        (counts,) = engine.service.values()
        assert counts.answered == counts.latency.num_samples == 200
    assert_balanced(engine)


def test_a_template_that_one_worker_has_proved_is_known_to_all() -> None:
    with bm.Engine(Lengths(), threads=1, workers=2) as engine:
        for _ in range(3):  # alone, so they go to the first worker
            engine.submit([1, 2, 3]).result(60)
        for driver in engine.drivers:
            forbid_unfolding(driver)
        engine.map([[1, 2, 3]] * 40, progress=False)
        assert all(driver.templates.num_templates == 1 for driver in engine.drivers)


def test_a_sequence_stays_with_its_worker_and_sequences_are_dealt() -> None:
    with bm.Engine(Totals(), threads=1, workers=2) as engine:
        opened = [engine.open_sequence() for _ in range(6)]
        assert [driver.num_sequences for driver in engine.drivers] == [3, 3]
        for round_ in range(1, 4):
            answers = engine.submit_chunks([(sequence, [float(n)]) for n, sequence in enumerate(opened)])
            assert [float(answer.result(60)) for answer in answers] == [float(n * round_) for n in range(6)]
        for sequence in opened:
            sequence.close()
        wait_until(lambda: engine.num_sequences == 0)
    assert_balanced(engine)


def test_the_limit_of_sequences_is_that_of_all_workers_together() -> None:
    with bm.Engine(Totals(), threads=1, workers=3, max_sequences=4) as engine:
        opened = [engine.open_sequence() for _ in range(4)]
        with pytest.raises(SequenceLimitError, match="4 sequences are open"):
            engine.open_sequence()
        opened.pop().close()
        engine.open_sequence()


def engine_and_gate() -> tuple[bm.Engine, Gate]:
    """Return an engine of two workers that has a template for `ROWS`, and the gate that holds its steps."""
    gate = Gate()
    gate.opened.set()
    engine = bm.Engine(Chain(gate), "cellular", threads=1, workers=2).start()
    engine.map([ROWS] * 8, progress=False)
    shut(gate)
    return engine, gate


def keep_idle(*idle: Any) -> None:
    """Let workers not look for work by themselves from now on."""
    for worker in idle:
        worker.on_idle = lambda: None
        past = threading.Event()  # what it may just have asked of others is done before its thread calls this
        worker.call_soon(past.set)
        assert past.wait(60)


def sent_to(engine: bm.Engine, worker: Any, count: int) -> list[Answer]:
    """Send requests to one worker, whatever the others have to do."""
    sent = tickets_of(engine, [ROWS] * count)
    for ticket in sent:
        ticket.answer = Answer(ticket.request_id, worker)
    worker.send(sent)
    return [ticket.answer for ticket in sent if ticket.answer is not None]


def test_an_idle_worker_takes_what_has_not_begun_at_another() -> None:
    engine, gate = engine_and_gate()
    first, other = workers(engine)
    keep_idle(first)  # whichever is done first, none comes back
    before = engine.drivers[1].stats.cells
    held = sent_to(engine, first, 1)
    assert gate.entered.wait(60)  # the first worker is in a step, and the others wait behind it
    waiting = sent_to(engine, first, 20)
    assert other.work == 0
    first.call_soon(partial(first.give, other))
    gate.opened.set()
    assert [answer.result(60).item() for answer in (*held, *waiting)] == [6.0] * 21
    assert engine.drivers[1].stats.cells - before >= 30, "three steps of each of ten requests"
    engine.stop()
    assert_balanced(engine)


def test_the_only_request_of_a_worker_stays_with_it() -> None:
    engine, gate = engine_and_gate()
    gate.opened.set()
    first, other = workers(engine)
    keep_idle(first, other)
    before, all_sent = engine.drivers[1].stats.cells, threading.Event()
    first.call_soon(lambda: all_sent.wait(60))
    (answer,) = sent_to(engine, first, 1)
    first.call_soon(partial(first.give, other))  # comes with the request, before it has begun
    all_sent.set()
    assert answer.result(60).item() == 6.0
    assert engine.drivers[1].stats.cells == before, "it would go to and fro between two idle workers"
    engine.stop()


def test_a_worker_without_work_asks_the_one_that_has_most() -> None:
    engine, gate = engine_and_gate()
    first, other = workers(engine)
    seek_work: dict[Any, Any] = {worker: worker.on_idle for worker in (first, other)}
    keep_idle(first, other)
    asked: list[Any] = []
    first.call_soon = asked.append  # type: ignore[method-assign]
    held = sent_to(engine, first, 1)
    assert gate.entered.wait(60)
    seek_work[first]()
    assert not asked, "it has itself the most"
    for _ in range(3):  # once until it is answered: else the other would do nothing but answer
        seek_work[other]()
    assert [call.args for call in asked] == [(first, other)]
    gate.opened.set()
    assert held[0].result(60).item() == 6.0
    wait_until(lambda: not first.work)  # an answer is told a moment before its request is counted as done
    seek_work[other]()
    assert len(asked) == 1, "nobody has any"
    engine.stop()


def test_a_request_that_has_moved_can_be_cancelled() -> None:
    engine, gate = engine_and_gate()
    first, other = workers(engine)
    held = sent_to(engine, first, 1)
    assert gate.entered.wait(60)
    waiting = sent_to(engine, first, 12)
    moved = threading.Event()
    first.call_soon(lambda: (first.give(other), moved.set()))
    gate.opened.set()
    assert moved.wait(60)
    cancelled = [answer for answer in waiting if answer.cancel()]
    for answer in (*held, *waiting):
        if answer in cancelled:
            assert isinstance(answer.exception(60), CancelledError)
        else:
            assert answer.result(60).item() == 6.0
    engine.stop()
    assert_balanced(engine)


def test_what_is_given_to_a_worker_that_stops_comes_back() -> None:
    engine, gate = engine_and_gate()
    first, other = workers(engine)
    held = sent_to(engine, first, 1)
    assert gate.entered.wait(60)
    waiting = sent_to(engine, first, 12)
    other.end(drain=True)
    first.call_soon(partial(first.give, other))
    gate.opened.set()
    assert [answer.result(60).item() for answer in (*held, *waiting)] == [6.0] * 13
    engine.stop()
    with pytest.raises(StoppedError):
        engine.submit(ROWS)
    assert_balanced(engine)


def test_observers_are_called_by_one_worker_at_a_time_and_told_which() -> None:
    inside, together, seen = threading.Semaphore(1), list[bool](), list[int]()

    def look_on(step: Any) -> None:
        together.append(not inside.acquire(blocking=False))
        time.sleep(1e-4)  # long enough for another worker to come meanwhile, if it could
        seen.append(step.worker)
        inside.release()

    with bm.Engine(Lengths(), "cellular", threads=1, workers=3) as engine:
        engine.observe(look_on)
        engine.on_settled = lambda ticket, error: look_on(SimpleNamespace(worker=-1))
        engine.map([[1, 2, 3, 4]] * 60, progress=False)
        engine.observe(None)
    assert set(seen) == {-1, 0, 1, 2}
    assert not any(together)


def test_each_worker_has_a_policy_of_its_own() -> None:
    with bm.Engine(Counter(), CellularPolicy(), threads=1, workers=3) as engine:
        assert len(set(map(id, policies_of(engine)))) == 3


def test_a_policy_that_cannot_be_copied_needs_one_worker() -> None:
    class Alone(CellularPolicy):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("not this one")

    bm.Engine(Counter(), Alone(), workers=1)
    with pytest.raises(OptionError, match="use workers=1"):
        bm.Engine(Counter(), Alone(), workers=2)


@pytest.mark.parametrize(
    ("found", "threads", "workers"),
    [
        (Processors(16, 16), None, 15), (Processors(16, 16), 4, 3), (Processors(2, 2), None, 1),
        (Processors(64, 3), None, 2), (Processors(64, 64, quota=4.0), None, 3),
        (Processors(64, 64, quota=1.5), None, 1),
        (Processors(16, 16, omp_threads=4), None, 4), (Processors(16, 16, omp_threads=1), None, 1),
        (Processors(16, 16), 32, 1),
    ],
)  # fmt: skip
def test_as_many_workers_as_there_are_processors_to_compute(found: Processors, threads: Any, workers: int) -> None:
    assert found.divided("auto", threads)[0] == workers


@pytest.fixture
def many_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchmaker.engine.engine.found_processors", lambda: Processors(5, 5))


def test_where_there_are_more_than_two_processors_there_are_several_workers(many_processors: None) -> None:
    with bm.Engine(Counter()) as engine:
        assert len(engine.drivers) == 4
        assert engine.driver.executor.num_threads == 1  # type: ignore[attr-defined]
        assert engine.map([1, 2, 3], progress=False) == [[1], [1, 2], [1, 2, 3]]
    with bm.Engine(Counter(), workers=1) as engine:
        assert len(engine.drivers) == 1
