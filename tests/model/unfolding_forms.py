"""Models whose requests are unfold functions, for the tests of unfolding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.model.unfolding import Unfolding

Begin = Callable[..., Unfolding]
"""Unfolds a request, up to its first `yield` if it has one. Options are those of Unfolding."""


class Add(nn.Module):
    """x, total -> total + x."""

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        return total + x


class Step(nn.Module):
    """n, h -> n + 1, h + n: a word and a state."""

    def forward(self, n: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return n + 1, h + n[:, None]


class Forms(bm.Model):
    """Each request is its own unfold function."""

    def __init__(self) -> None:
        self.add = bm.Cell(Add())
        self.step = bm.Cell(Step(), host_outputs=(0,))

    def unfold(self, request: Callable[[Any], Any]) -> Any:
        return request(self)


class WaitingForms(Forms):
    def unfold(self, request: Callable[[Any], Any]) -> Any:
        return (yield from request(self))


def begun(unfolding: Unfolding) -> Unfolding:
    unfolding.start()
    return unfolding


def add(m: Any, x: float = 1.0, total: Any = (0.0,)) -> Any:
    return m.add([x], list(total) if isinstance(total, tuple) else total)


def run(m: Any, length: int = 3) -> Any:
    return m.add.run([[1.0]] * length, ([0.0],))


def look(node: int, output: int) -> Tensor:
    """Stands for what was computed: a row that tells node and output apart."""
    return torch.tensor([10.0 * node + output])


def yield_all(*values: Any) -> Iterator[Any]:
    """Wait for each of some values in turn, and return nothing."""
    yield from (value for value in values)
