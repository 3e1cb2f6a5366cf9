"""The model of the overhead benchmarks: one cell call per request, n -> n + 1."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

import batchmaker as bm


class Add(nn.Module):
    """n -> n + 1."""

    def forward(self, n: Tensor) -> Tensor:
        return n + 1


class Trivial(bm.Model):
    """A request is a list with one whole number; the answer is the next one."""

    def __init__(self) -> None:
        self.add = bm.Cell(Add())
        self.example_request = [1]

    def unfold(self, request: Any) -> Any:
        return self.add(request[0])
