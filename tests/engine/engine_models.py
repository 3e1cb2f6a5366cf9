"""Small models for the engine's tests, each with its answer in plain PyTorch."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.errors import InvalidRequestError
from batchmaker.graph.spec import TypeId
from batchmaker.policies.base import CellPolicy, ReadyView
from batchmaker.policies.cellular import CellularPolicy
from insides import schedulers, workers

HIDDEN = 6
VOCABULARY = 30
END = 2
POISON = 13


class Encode(nn.Module):
    """One encoder step: word, h, c -> h, c."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.cell = nn.LSTMCell(HIDDEN, HIDDEN)

    def forward(self, word: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return self.cell(self.embed(word), (h, c))


class Decode(nn.Module):
    """One greedy decoder step: word, h, c -> next word, h, c."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.cell = nn.LSTMCell(HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, word: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, c = self.cell(self.embed(word), (h, c))
        return self.out(h).argmax(-1), h, c


class Accumulate(nn.Module):
    """x, total -> total + x. Exact in float32 for small integers, so answers can be told apart."""

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        return total + x


class Count(nn.Module):
    """n -> n + 1: counts its own steps."""

    def forward(self, n: Tensor) -> Tensor:
        return n + 1


class Poisoned(nn.Module):
    """Adds, and raises where any row holds the poison: cannot be traced, so it runs as it is.

    where: "sequence" looks at what does not depend on state, "state" at what does.
    """

    def __init__(self, where: str = "sequence") -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        watched = x if self.where == "sequence" else total
        if bool((watched == POISON).any()):
            raise ValueError("poison in the batch")
        return total + x


class Gate(nn.Module):
    """Hands rows through once `opened` is set, so that a test decides when a step ends."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()
        self.entered = threading.Event()

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        if float(x[0, 0]) >= 0:  # data-dependent, so it is not traced away
            self.entered.set()
            self.opened.wait(60)
        return total + x


def shut(gate: Gate) -> None:
    """The next step holds its worker until the gate is opened."""
    gate.opened.clear()
    gate.entered.clear()


class Translator(bm.Model):
    """Encoder and decoder that share nothing; the unfold function waits for each word."""

    def __init__(self, encode: Encode, decode: Decode) -> None:
        self.encoder = bm.Cell(encode)
        self.decoder = bm.Cell(decode, priority=1, host_outputs=(0,))

    def unfold(self, source: list[int]) -> Iterator[Any]:
        h, c = self.encoder.run(source)
        word: Any = 1
        for _ in range(2 * len(source) + 3):
            word, h, c = self.decoder(word, h, c)
            if (yield word) == END:
                break


class LoopTranslator(Translator):
    """The same with a loop cell."""

    def unfold(self, source: list[int]) -> Any:
        h, c = self.encoder.run(source)
        word, h, c = self.decoder.loop((1, h, c), until=END, max_steps=2 * len(source) + 3)
        return word.steps


@torch.no_grad()
def translate(encode: Encode, decode: Decode, source: list[int]) -> list[int]:
    """What both translators answer."""
    h = c = torch.zeros(1, HIDDEN)
    for word in source:
        h, c = encode(torch.tensor([word]), h, c)
    word, words = torch.tensor([1]), []
    for _ in range(2 * len(source) + 3):
        word, h, c = decode(word, h, c)
        words.append(int(word))
        if words[-1] == END:
            break
    return words


def check_some(xs: Any) -> None:
    """Let an empty request fail, as a model may want it: a run over nothing gives its init."""
    if len(xs) == 0:
        raise InvalidRequestError("the request is empty")


class Sums(bm.Model):
    """Running sums of numbers. A request is a list of numbers, or a dict of keywords for other forms."""

    def __init__(self, module: nn.Module | None = None, **options: Any) -> None:
        self.add = bm.Cell(module or Accumulate(), **options)

    def unfold(self, xs: Any, form: str = "run") -> Any:
        rows = [[float(x)] for x in xs]
        if form == "run":
            check_some(rows)
            return self.add.run(rows, ([0.0],))
        total: Any = [0.0]
        for row in rows:
            total = self.add(row, total)
        return total


class Totals(Sums):
    """The running total, chunk by chunk."""

    def unfold_chunk(self, xs: Any, state: Any) -> Any:
        check_some(xs)
        total = self.add.run([[float(x)] for x in xs], ([0.0] if state is None else state,))
        return total, total


class Counter(bm.Model):
    """Counts to n, waiting for every number: a request that lasts exactly as long as it says."""

    def __init__(self) -> None:
        self.count = bm.Cell(Count(), host_outputs=(0,))

    def unfold(self, n: int) -> Iterator[Any]:
        value: Any = 0
        for _ in range(n):
            value = self.count(value)
            yield value


class Turns(bm.Model):
    """Counts on from where the last chunk ended, waiting for every number; keeps plain data beside the number."""

    def __init__(self) -> None:
        self.count = bm.Cell(Count(), host_outputs=(0,))

    def unfold(self, n: int) -> Any:
        return self.count(n)

    def unfold_chunk(self, n: int, state: Any) -> Iterator[Any]:
        value, seen = (0, []) if state is None else (state["value"], state["seen"])
        if n == 0:
            return value, {"value": value, "seen": seen}  # nothing to compute: what was kept is asked for and kept on
        for _ in range(n):
            value = self.count(value)
            seen = [*seen, (yield value)]
        return None, {"value": value, "seen": seen}


class Endless(Counter):
    """Never ends by itself."""

    def unfold(self, n: int) -> Iterator[Any]:
        value: Any = n
        while True:
            value = self.count(value)
            yield value


class Watching(CellPolicy):
    """As cellular batching, but requests wait in line until they are let in."""

    name = "watching"
    watches_requests: ClassVar[bool] = True
    max_steps = 1

    def rank(self, view: ReadyView) -> Sequence[TypeId]:
        return CellularPolicy().rank(view)


def assert_balanced(engine: bm.Engine) -> None:
    """Everything is given back and the state is consistent. Call it once the engine has stopped."""
    for core in schedulers(engine):
        core.check_invariants()
        assert core.num_requests == 0
        assert core.num_rows == 0
    assert engine.num_in_flight == 0
    assert [worker.work for worker in workers(engine)] == [0] * len(engine.drivers)
