"""What becomes of offered load, in an engine whose time stands still but for who waits for it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from batchmaker.cli.bench import load
from batchmaker.cli.workload import make_workload
from batchmaker.clock import VirtualClock
from batchmaker.engine.stats import DriverStats
from batchmaker.errors import BatchmakerError
from batchmaker.lab.datasets import poisson_arrivals

RATE_RPS, SECONDS, SEED = 200.0, 2.0, 3
WORKLOAD = make_workload("lstm", lengths="fixed:5", count=20)
NUM_TO_WARM_UP = 2 * load.MOST_WARM_UP - 1
"""All bursts: time stands still meanwhile."""


class Immediate:
    """Answers every request `latency_s` after it came, or never: a step of its own for each."""

    def __init__(self, latency_s: float, fails: type[Exception] | None = None) -> None:
        self.clock = VirtualClock()
        self.stats = DriverStats()
        self.driver = None
        self.on_settled: Any = None
        self.running = False
        self.num_asked = 0
        self._latency_s, self._fails = latency_s, fails

    def start(self) -> None:
        self.running = True

    def stop(self, *, drain: bool) -> None:
        self.running = False

    def submit(self, request: Any) -> SimpleNamespace:
        now_s = self.clock.now_s()
        self.stats = DriverStats(self.stats.steps + 1, self.stats.cells + len(request))
        ticket = SimpleNamespace(
            request=request, request_id=self.num_asked, arrived_s=now_s, started_s=now_s,
            finished_s=now_s + self._latency_s,
        )  # fmt: skip
        self.num_asked += 1
        self.on_settled(ticket, None if self._fails is None else self._fails("no"))
        return ticket


def measured(monkeypatch: pytest.MonkeyPatch, latency_s: float) -> tuple[Immediate, load.Measured]:
    engine = Immediate(latency_s)
    monkeypatch.setattr(load.time, "sleep", engine.clock.advance)
    return engine, load.poisson(engine, WORKLOAD, RATE_RPS, SECONDS, SEED, lambda share, answered: None)


def due_s() -> np.ndarray:
    return poisson_arrivals(RATE_RPS, SEED, seconds=1.2 * SECONDS)


def test_what_is_answered_within_the_window_is_counted(monkeypatch):
    engine, seen = measured(monkeypatch, 0.05)
    finished_s = due_s() + 0.05
    num_in_window = int(((finished_s >= 0.2 * SECONDS) & (finished_s < 1.2 * SECONDS)).sum())
    assert not engine.running
    assert (seen.num_answered, seen.num_failed, seen.cells) == (num_in_window, 0, 5 * num_in_window)
    assert seen.num_answered > 300
    assert (seen.seconds, seen.offered_rps) == (SECONDS, RATE_RPS)
    assert seen.stats.cells == pytest.approx(seen.cells, abs=5)


def test_what_warms_the_engine_up_is_not_measured(monkeypatch):
    engine, seen = measured(monkeypatch, 0.05)
    assert engine.num_asked == NUM_TO_WARM_UP + len(due_s())
    assert seen.stats.steps <= len(due_s())


def test_latencies_count_from_when_a_request_was_due(monkeypatch):
    _, seen = measured(monkeypatch, 0.05)
    assert len(seen.latencies_s) == int((due_s() >= 0.2 * SECONDS).sum())
    assert seen.latencies_s == pytest.approx(0.05)
    assert seen.queues_s == pytest.approx(0.0, abs=1e-9)
    assert seen.late_ms == pytest.approx(0.0, abs=1e-6)
    assert seen.num_in_time(0.06) == len(seen.latencies_s)
    assert seen.num_in_time(0.04) == 0


def test_answers_that_come_after_the_window_are_none_of_its_throughput(monkeypatch):
    _, seen = measured(monkeypatch, 10.0)
    assert (seen.num_answered, seen.cells) == (0, 0)
    assert seen.latencies_s == pytest.approx(10.0)


class Slow(Immediate):
    """Answers all requests that wait together, in one step of `latency_s`."""

    def __init__(self, latency_s: float) -> None:
        super().__init__(latency_s)
        self._waiting: list[Any] = []
        self._ids = itertools.count()
        self.ends_s = latency_s

    def submit(self, request: Any) -> SimpleNamespace:
        now_s = self.clock.now_s()
        ticket = SimpleNamespace(request=request, request_id=next(self._ids), arrived_s=now_s, started_s=now_s)
        self._waiting.append(ticket)
        return ticket

    def sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)
        if self.clock.now_s() < self.ends_s:
            return
        batch, self._waiting = self._waiting, []
        self.stats = DriverStats(self.stats.steps + 1, self.stats.cells + sum(len(ticket.request) for ticket in batch))
        for ticket in batch:
            ticket.finished_s = self.ends_s
            self.on_settled(ticket, None)
        self.num_asked += len(batch)
        self.ends_s += self._latency_s


def test_a_backlogs_window_holds_whole_steps_however_long_they_take(monkeypatch):
    """A translator's batch of 256 takes longer than a look of a sweep, which ended before anything was answered."""
    engine = Slow(latency_s=20.0)
    monkeypatch.setattr(load.time, "sleep", engine.sleep)
    found = load.backlog(engine, WORKLOAD, 8, 1.0, lambda share, answered: None)
    assert found.seconds == 20.0
    assert found.num_answered == 8


def test_a_backlog_that_stops_being_answered_after_an_error_raises_it_and_does_not_wait_for_ever(monkeypatch):
    engine = Slow(latency_s=20.0)

    def sleep(seconds: float) -> None:
        engine.sleep(seconds)
        if engine.num_asked == 8:  # after the first batch the engine fails, and takes no more
            engine.on_settled(
                SimpleNamespace(
                    request=WORKLOAD.requests[0], request_id=8, arrived_s=0.0, started_s=None, finished_s=1.0
                ),
                RuntimeError("out of memory"),
            )
            engine.ends_s = float("inf")
            engine.num_asked += 1

    monkeypatch.setattr(load.time, "sleep", sleep)
    with pytest.raises(BatchmakerError, match="out of memory"):
        load.backlog(engine, WORKLOAD, 8, 1.0, lambda share, answered: None)
