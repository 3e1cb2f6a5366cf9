"""How many of the package's own Python functions a request calls. Counted, not timed: a count is the same everywhere.

Each count is the least of some: a slow machine needs more turns of the engine for the same requests, never fewer.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np
import pytest
from torch import nn

import batchmaker as bm
from batchmaker.executor import task_steps
from batchmaker.lab import zoo
from batchmaker.scheduler import live_streams

ROOT = Path(bm.__file__).parent


class Calls:
    """Counts the calls of the package's functions, in all threads that begin while it is there."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._on = False

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        if self._on and event == "call" and frame.f_code.co_filename.startswith(f"{ROOT}/"):
            self.counts[frame.f_code.co_qualname] += 1

    def of(self, run: Callable[[], object], tries: int = 100) -> int:
        """Return how many calls `run` makes, in this thread and the engine's: the least of seven or more."""
        found = list[int]()
        while len(found) < 7 or (len(found) < tries and found.count(min(found)) < 3):
            self.counts.clear()
            self._on = True
            sys.setprofile(self.note)
            try:
                run()
            finally:
                sys.setprofile(None)
                self._on = False
            found.append(self.counts.total())
        return min(found)


SLOW: Final = "auto:budget_ms=10000"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """With `SLOW`, a task takes all steps that it can and is reported at its end, however slow the machine is."""
    monkeypatch.setattr(task_steps, "REPORT_S", math.inf)
    monkeypatch.setattr(live_streams, "FRAMES", 0)  # no chunk is of a live stream, beside which tasks are short
    counted = Calls()
    threading.setprofile(counted.note)
    yield counted
    threading.setprofile(None)


REQUESTS = [np.random.default_rng(i).integers(1, 99, 25) for i in range(256)]


@pytest.fixture
def engine(calls: Calls) -> Iterator[bm.Engine]:
    model = zoo.make("lstm", vocabulary_size=100, hidden=16, max_batch=256)
    with bm.Engine(model, SLOW, threads=1) as engine:
        for _ in range(4):  # its template is proved, and all requests of a call begin in one turn
            engine.map(REQUESTS, progress=False)
        yield engine


def test_one_request_alone(engine: bm.Engine, calls: Calls) -> None:
    assert calls.of(lambda: engine.submit(REQUESTS[0]).result(60)) <= 232


def test_each_further_request_of_a_map(engine: bm.Engine, calls: Calls) -> None:
    one = calls.of(lambda: engine.map(REQUESTS[:1], progress=False))
    whole = calls.of(lambda: engine.map(REQUESTS, progress=False))
    assert (whole - one) / 255 <= 3


def test_each_further_request_that_is_submitted_with_others(engine: bm.Engine, calls: Calls) -> None:
    def ask(count: int) -> None:
        for answer in engine.submit_many(REQUESTS[:count]):
            answer.result(60)

    assert (calls.of(lambda: ask(256)) - calls.of(lambda: ask(1))) / 255 <= 6


class Recogniser(bm.Model):
    """Frames [n, 4] of a sequence -> the state after them, which goes on with the next frames."""

    def __init__(self) -> None:
        self.step = bm.Cell(nn.GRUCell(4, 4))

    def unfold(self, frames: Any) -> Any:
        return self.step.run(frames)

    def unfold_chunk(self, frames: Any, state: Any) -> Any:
        h = self.step.run(frames, state)
        return h, h


@pytest.fixture
def ask(calls: Calls) -> Iterator[Callable[[int], None]]:
    """A function that asks for a chunk of so many of fifty sequences."""
    frames = np.ones((2, 4), np.float32)
    with bm.Engine(Recogniser(), SLOW, threads=1) as engine:
        sequences = [engine.open_sequence() for _ in range(50)]

        def ask(count: int) -> None:
            for answer in reversed(engine.submit_chunks([(sequence, frames) for sequence in sequences[:count]])):
                answer.result(60)  # the last is done last: nobody waits for the others

        for _ in range(4):
            ask(50)
        yield ask


def test_one_chunk_alone(ask: Callable[[int], None], calls: Calls) -> None:
    assert calls.of(lambda: ask(1)) <= 280


def test_each_further_chunk_of_other_sequences(ask: Callable[[int], None], calls: Calls) -> None:
    assert (calls.of(lambda: ask(50)) - calls.of(lambda: ask(1))) / 49 <= 8
