"""Models whose requests say what they raise, and where."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from engine_models import Count
from torch import Tensor, nn

import batchmaker as bm


class Unsayable(Exception):  # noqa: N818
    """An error that cannot even be shown."""

    def __str__(self) -> str:
        raise SystemExit


class Incomparable:
    """A stop test that cannot be compared with others."""

    def __init__(self, kind: type[BaseException]) -> None:
        self._kind = kind

    def __hash__(self) -> int:
        raise self._kind

    def __call__(self, values: Any) -> Any:
        return values == 3


KINDS: tuple[type[BaseException], ...] = (
    ValueError, LookupError, StopIteration, SystemExit, KeyboardInterrupt, GeneratorExit, Unsayable,
)  # fmt: skip
PLACES = ("unfold", "first yield", "later yield", "result", "cell", "stop test")


@dataclass(frozen=True)
class Ask:
    """A request for the sum of 1 to n. place: where it raises; None for one that is good."""

    n: int
    place: str | None = None
    kind: type[BaseException] = ValueError


class Explosive(nn.Module):
    """x, total -> total + x; raises KINDS[k] where any x is -1000 - k. Cannot be traced, so it runs as it is."""

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        lowest = int(x.min())
        if lowest <= -1000:
            raise KINDS[-1000 - lowest]
        return total + x


class RaisingList(list):  # type: ignore[type-arg]
    """A list that raises when it is made anew from its elements, as it is with results in place of handles."""

    kind: type[BaseException]

    def __init__(self, elements: Any) -> None:
        raise self.kind


RAISING_LISTS = {kind: type(f"RaisingListOf{kind.__name__}", (RaisingList,), {"kind": kind}) for kind in KINDS}


class Sums(bm.Model):
    """Answers with the sum of 1 to n, and the number that a loop counts to: 3, or n if that is less."""

    def __init__(self) -> None:
        self.add = bm.Cell(Explosive(), max_batch=8)
        self.count = bm.Cell(Count(), max_batch=8, host_outputs=(0,))

    def _parts(self, ask: Ask) -> tuple[Any, Any]:
        numbers = [[float(i + 1)] for i in range(ask.n)]
        if ask.place == "unfold":
            raise ask.kind
        if ask.place == "cell":
            numbers[ask.n // 2] = [-1000.0 - KINDS.index(ask.kind)]

        def stop(values: np.ndarray) -> np.ndarray:
            if ask.place == "stop test":
                raise ask.kind
            return values >= 3

        return self.add.run(numbers, ([0.0],)), self.count.loop((0,), until=stop, max_steps=ask.n)

    def unfold(self, ask: Ask) -> Any:
        total, counted = self._parts(ask)
        if ask.place == "result":
            answer = RAISING_LISTS[ask.kind].__new__(RAISING_LISTS[ask.kind])
            answer.append(total)
            return answer
        return [total, counted]


class WaitingSums(Sums):
    """The same, word by word: each number is waited for."""

    def unfold(self, ask: Ask) -> Iterator[Any]:  # type: ignore[override]
        total, counted = self._parts(ask)
        for number in range(2):
            if ask.place == ("first yield", "later yield")[number]:
                raise ask.kind
            yield total if number == 0 else counted
        return super().unfold(ask) if ask.place == "result" else [total, counted]


class WholeSums(bm.Model):
    """The same in whole batches. Only `unfold` (in `length`) and `cell` (in `batched`) are places in it."""

    def unfold(self, ask: Ask) -> Any:
        raise AssertionError

    def length(self, ask: Ask) -> int:
        if ask.place == "unfold":
            raise ask.kind
        return ask.n

    def batched(self, asks: Sequence[Ask]) -> list[Any]:
        for ask in asks:
            if ask.place == "cell":
                raise ask.kind
        return [[ask.n * (ask.n + 1) / 2, min(ask.n, 3)] for ask in asks]


class Hanging(bm.Model):
    """Counts to n; unfolding 0 hangs until the test lets it go."""

    def __init__(self) -> None:
        self.count = bm.Cell(Count(), host_outputs=(0,))
        self.entered = threading.Event()
        self.let_go = threading.Event()
        self.unfolded: list[int] = []

    def unfold(self, n: int) -> Any:
        self.unfolded.append(n)
        if n == 0:
            self.entered.set()
            assert self.let_go.wait(60)
        return self.count.loop((0,), max_steps=max(n, 1))

    def saved_state(self) -> dict[str, Any]:
        return {}
