"""A model whose graph depends on values: saved models are found by import."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from torch import nn

import batchmaker as bm


class Waiting(bm.Model):
    """Waits for what its first cell computes, which says how often it calls the other."""

    def __init__(self) -> None:
        self.first = bm.Cell(nn.Linear(1, 1), max_batch=2)
        self.second = bm.Cell(nn.Linear(1, 1), max_batch=2)

    def unfold(self, request: Any) -> Generator[Any, Any, Any]:
        value = self.first(request)
        again = (yield value)[0] > 0
        value = self.second(value)
        return self.second(value) if again else value
