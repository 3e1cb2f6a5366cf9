"""Values that go to the host with a task: their places in the memory of its blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from batchmaker.arrays import Ints
from batchmaker.compile.export import row_bytes
from batchmaker.core.commands import FetchOutput, within
from batchmaker.executor.cuda.blocks import Blocks
from batchmaker.graph.spec import ValueSpec


@final
@dataclass(frozen=True, slots=True)
class Fetched:
    """Rows of one output in the extra memory of a task's blocks. first: the offset of the first row there, in bytes.

    positions: [count] of the task, ascending.
    """

    output: int
    first: int
    positions: Ints
    spec: ValueSpec

    def base(self, blocks: Blocks) -> int:
        """Return the host address of the first row."""
        return int(blocks.extra.ctypes.data) + self.first

    def addresses(self, blocks: Blocks) -> Ints:
        """Return the host address of each row, [count]."""
        return self.base(blocks) + row_bytes(self.spec) * np.arange(len(self.positions))

    def values(self, blocks: Blocks, begin: int, end: int) -> Tensor:
        """Return the rows at positions from `begin` to before `end`, [count, *shape], in memory of their own."""
        mine, size = within(self.positions, begin, end), row_bytes(self.spec)
        rows = blocks.extra[self.first + mine.start * size : self.first + mine.stop * size].copy()
        is_brain = self.spec.dtype == "bfloat16"  # which NumPy does not know
        shape = (mine.stop - mine.start, *self.spec.shape)
        values = torch.from_numpy(rows.view("int16" if is_brain else self.spec.dtype).reshape(shape))
        return values.view(torch.bfloat16) if is_brain else values


def fetched(fetches: Sequence[FetchOutput], outputs: Sequence[ValueSpec]) -> tuple[tuple[Fetched, ...], int]:
    """Return a place for each fetch of a task, each at a multiple of 16 bytes, and the number of bytes of all."""
    places, first = [], 0
    for fetch in fetches:
        place = Fetched(fetch.output, first, fetch.positions, outputs[fetch.output])
        places.append(place)
        first += math.ceil(len(fetch.positions) * row_bytes(place.spec) / 16) * 16
    return tuple(places), first
