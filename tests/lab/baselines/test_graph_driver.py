"""Graph batching on real threads: windows, cancellation, deadlines, what is counted."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import batchmaker as bm
from batchmaker.engine.stats import StepSeen
from batchmaker.errors import CancelledError, DeadlineError, RefusedError, StoppedError
from batchmaker.lab.baselines import OrlojPolicy, PaddedPolicy, WindowPolicy


class Whole(bm.Model):
    """Sums of lists, computed whole. A gate holds the worker up; a request of -1 fails alone."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.entered = threading.Event()

    def unfold(self, request: Any) -> Any:
        raise NotImplementedError

    def batched(self, requests: Any) -> list[Any]:
        self.entered.set()
        assert self.opened.wait(60)
        if [-1] in requests:
            raise ValueError("a negative number")
        return [torch.tensor(float(sum(request))) for request in requests]


@pytest.mark.parametrize("policy", ["graph:window_ms=2", "orloj", "padded", "serial"])
def test_every_graph_policy_answers_on_two_workers(policy: str) -> None:
    with bm.Engine(Whole(), policy, threads=1, workers=2) as engine:
        assert [float(x) for x in engine.map([[1] * n for n in range(1, 30)])] == [float(n) for n in range(1, 30)]
    assert engine.num_in_flight == 0


def test_the_engine_wakes_when_a_window_is_over() -> None:
    with bm.Engine(Whole(), WindowPolicy(window_ms=30), threads=1) as engine:
        begin = time.monotonic()
        assert float(engine.submit([2]).result(60)) == 2.0  # alone: nothing else wakes it
        assert time.monotonic() - begin >= 0.03
    assert engine.stats.steps == 1


def test_what_is_counted_and_seen_is_useful_and_padded_work() -> None:
    seen: list[StepSeen] = []
    with bm.Engine(Whole(), WindowPolicy(window_ms=10_000, max_batch=3), threads=1) as engine:
        engine.observe(seen.append)
        engine.map([[1], [1, 2], [1, 2, 3, 4]])
    stats = engine.stats
    assert (stats.tasks, stats.steps, stats.cells, stats.padded_cells) == (1, 1, 7, 12)
    ((step),) = seen
    assert (step.cell, step.requests, step.padded) == ("graph", (0, 1, 2), 3)


def test_a_request_cancelled_in_a_batch_fails_at_once_and_the_batch_goes_on() -> None:
    model, settled, gone = Whole(), [], threading.Event()

    def note(ticket: Any, error: Any) -> None:
        settled.append((ticket.request[0], type(error)))
        if isinstance(error, CancelledError):
            gone.set()

    with bm.Engine(model, WindowPolicy(window_ms=10_000, max_batch=2), threads=1) as engine:
        engine.on_settled = note
        model.opened.clear()
        doomed = engine.submit([1])
        kept = engine.submit([5])
        assert model.entered.wait(60)
        assert doomed.cancel()
        assert gone.wait(60)
        assert not kept.done()
        model.opened.set()
        assert float(kept.result(60)) == 5.0
    assert settled == [(1, CancelledError), (5, type(None))]
    assert engine.stats.cells == 2


def test_stopping_without_draining_ends_who_waits_and_who_runs() -> None:
    model = Whole()
    engine = bm.Engine(model, PaddedPolicy(max_batch=1), threads=1).start()
    model.opened.clear()
    futures = [engine.submit([n]) for n in range(3)]
    assert model.entered.wait(60)
    stopping = threading.Thread(target=lambda: engine.stop(drain=False))
    stopping.start()
    assert all(isinstance(future.exception(60), StoppedError) for future in futures)
    model.opened.set()
    stopping.join(60)
    assert not stopping.is_alive()


def test_deadlines_pass_while_requests_wait_and_a_failing_request_fails_alone() -> None:
    model = Whole()
    with bm.Engine(model, PaddedPolicy(), threads=1) as engine:
        model.opened.clear()
        first = engine.submit([1])
        assert model.entered.wait(60)
        late = engine.submit([2], deadline_ms=20.0)
        with pytest.raises(DeadlineError, match="not begun by its deadline"):
            late.result(60)
        mixed = [engine.submit(request) for request in ([3], [-1], [4])]
        model.opened.set()
        assert float(first.result(60)) == 1.0
        assert "negative" in str(mixed[1].exception(60))
        assert [float(mixed[i].result(60)) for i in (0, 2)] == [3.0, 4.0]


def test_a_policy_refuses_what_it_cannot_do_in_time() -> None:
    policy = OrlojPolicy(batch_seconds=lambda lengths: 60.0)
    with bm.Engine(Whole(), policy, threads=1) as engine, pytest.raises(RefusedError, match="cannot be met"):
        engine.submit([1], deadline_ms=30_000.0).result(60)
