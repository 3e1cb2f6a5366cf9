"""Many requests and chunks at once of a model that decides by values."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.core.frames import Frames
from batchmaker.core.region_code import ALL_DONE, LACKS_MACHINE

MOST_CHUNKS = 400
"""Of each sequence, if the ordinary requests are not answered before."""


class Sign(nn.Module):
    """x [n, 4] -> whether the first number is positive"""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0] > 0


class Times(nn.Module):
    """x -> x times a number"""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(by))

    def forward(self, x: Tensor) -> Tensor:
        return self.by * x


class Flipped(bm.Model):
    """A row, four times with the other sign if it is negative. Nothing repeats, so newcomers wait for those in flight
    to end."""

    def __init__(self) -> None:
        self.test, self.flip, self.keep = bm.Cell(Sign(), max_batch=512), bm.Cell(Times(-1.0)), bm.Cell(Times(1.0))

    def unfold(self, x: Any) -> Any:
        for _ in range(4):
            x = bm.cond(self.test(x), lambda x=x: self.keep(x), lambda x=x: self.flip(x))
        return x

    def unfold_chunk(self, x: Any, state: Any) -> Any:
        return self.unfold(x), None


def test_a_request_is_answered_although_chunks_come_all_the_time() -> None:
    row, counts = torch.tensor([-1.0, 2, 3, 4]), [0] * 12
    answered = threading.Event()
    with bm.Engine(Flipped(), threads=1) as engine:

        def ask(number: int) -> None:
            with engine.open_sequence() as sequence:
                waiting = [sequence.submit(row) for _ in range(3)]
                while not answered.is_set() and counts[number] < MOST_CHUNKS:
                    waiting.append(sequence.submit(row))
                    assert torch.equal(waiting.pop(0).result(60), -row)
                    counts[number] += 1
                for answer in waiting:
                    answer.result(60)

        engine.submit(row).result(600)  # the first one, for which loops may be compiled
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(counts))]
        for thread in threads:
            thread.start()
        for _ in range(5):
            assert torch.equal(engine.submit(row).result(60), -row)
        answered.set()
        for thread in threads:
            thread.join(60)
    assert max(counts) < MOST_CHUNKS


class Thrice(Flipped):
    """Three branches that begin at once."""

    def unfold(self, x: Any) -> Any:
        is_positive = self.test(x)
        return [bm.cond(is_positive, lambda: self.keep(x), lambda: self.flip(x)) for _ in range(3)]


def test_the_tables_of_decisions_have_room_for_as_many_as_there_were_before(monkeypatch: pytest.MonkeyPatch) -> None:
    found, outcome = list[int](), Frames.outcome
    monkeypatch.setattr(Frames, "outcome", lambda self, what, done: found.append(what) or outcome(self, what, done))
    with bm.Engine(Thrice(), threads=1) as engine:
        for _ in range(4):
            found.clear()
            engine.map([torch.full((4,), -1.0)] * 400, progress=False)
    assert ALL_DONE in found
    assert LACKS_MACHINE not in found
