"""What an unfold function reads: noted with its values, and refused where it could change unseen."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import batchmaker as bm
from batchmaker.model.guards import Guard, Reads, UnprovenError, noting

WORDS = {"one": 1}
COUNT = 0
CLOCKS = [time]


def twice(n: int) -> int:
    return n * len(WORDS)


class Limits:
    def __init__(self) -> None:
        self.longest = 5


class Reader(bm.Model):
    """Its request is what it does with itself."""

    size = 3

    def __init__(self) -> None:
        self.number = 1
        self.names = ["a", "b"]
        self.limits = Limits()
        self.weights = torch.zeros(2)
        self.random = random.Random(0)
        self.array = np.zeros(2)
        self.cell = bm.Cell(torch.nn.Identity())

    def unfold(self, request: Callable[[Reader], Any]) -> Any:
        return request(self)

    @property
    def double(self) -> int:
        return 2 * self.number

    def longest(self) -> int:
        return self.limits.longest


def guard_of(model: Reader, does: Callable[[Any], Any]) -> Guard:
    """What the guard of one function is, once it has run."""
    reads = Reads(model)
    with noting(model, "unfold", reads) as function:
        function(does)
    return reads.guard()


def set_number(model: Reader) -> None:
    model.number = 2


CHANGES: list[tuple[Callable[[Any], Any], Callable[[Reader], Any]]] = [
    (lambda m: m.number, set_number),
    (lambda m: m.double, set_number),
    (lambda m: m.names[0], lambda m: m.names.append("c")),
    (lambda m: len(m.names), lambda m: m.names.__setitem__(0, "z")),
    (lambda m: m.limits, lambda m: setattr(m.limits, "longest", 6)),
    (lambda m: m.longest(), lambda m: setattr(m.limits, "longest", 6)),
    (lambda m: m.weights, lambda m: m.weights.add_(1)),
    (lambda m: m.array, lambda m: m.array.__setitem__(0, 1.0)),
    (lambda m: m.cell, lambda m: setattr(m, "cell", bm.Cell(torch.nn.Identity()))),
    (lambda m: m.size, lambda m: setattr(m, "size", 4)),
    (lambda _: twice(3), lambda _: WORDS.update(two=2)),
]


@pytest.mark.parametrize(("read", "change"), CHANGES)
def test_a_guard_holds_until_something_that_was_read_changes(
    read: Callable[[Any], Any], change: Callable[[Reader], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WORDS, "one", 1)
    monkeypatch.setitem(WORDS, "two", 2)
    del WORDS["two"]
    model = Reader()
    guard = guard_of(model, read)
    assert guard.holds()
    model.unread = 1
    assert guard.holds()
    change(model)
    assert not guard.holds()


def count() -> None:
    global COUNT
    COUNT += 1


@pytest.mark.parametrize(
    "does",
    [
        set_number,
        lambda m: m.names.append("c"),
        lambda m: setattr(m.limits, "longest", 6),
        lambda m: delattr(m, "number"),
        lambda _: WORDS.update(three=3),
        lambda _: count(),
        lambda m: m.random.random(),
        lambda _: random.random(),
        lambda _: random.Random(0).random(),
        lambda _: time.time(),
        lambda _: np.random.rand(2),
        lambda _: torch.rand(2),
        lambda _: print("hello"),
        lambda m: vars(m),
        lambda _: CLOCKS,
        lambda m: m.weights.add_(1),
    ],
)
def test_what_acts_or_could_change_unseen_is_refused(does: Callable[[Any], Any], capsys: Any) -> None:
    model = Reader()
    try:
        with pytest.raises(UnprovenError):
            guard_of(model, does)
    finally:
        WORDS.pop("three", None)
    assert capsys.readouterr().out == ""
    assert model.number == 1


def test_who_looks_at_what_runs_is_not_disturbed() -> None:
    import sys

    seen: list[str] = []
    sys.setprofile(lambda *_: seen.append("called"))
    try:
        with pytest.raises(UnprovenError):
            guard_of(Reader(), lambda m: m.number)
        mine = sys.getprofile()
    finally:
        sys.setprofile(None)
    assert mine is not None


class Curious(Reader):
    def __getattr__(self, name: str) -> Any:
        return name


class Registered(Reader):
    def __init_subclass__(cls) -> None:
        raise AssertionError("a subclass was made")


@pytest.mark.parametrize("kind", [Curious, Registered])
def test_classes_with_ways_of_their_own_are_refused(kind: type[Reader]) -> None:
    with pytest.raises(UnprovenError):
        guard_of(kind(), lambda m: m.number)


def test_super_and_the_class_are_as_ever() -> None:
    class Child(Reader):
        def unfold(self, request: Any) -> Any:
            return super().unfold(request) if isinstance(self, Child) and self.__class__ is Child else None

    model = Child()
    guard = guard_of(model, lambda m: m.longest())
    model.limits.longest = 7
    assert not guard.holds()
