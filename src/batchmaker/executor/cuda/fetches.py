"""Values that go to the host with a step: their places in the block that the step was launched with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.compile.export import torch_dtype
from batchmaker.executor.cuda.program import Block
from batchmaker.executor.cuda.tables import row_bytes
from batchmaker.graph.spec import ValueSpec
from batchmaker.scheduler.commands import FetchOutput, RunTask, Step


@final
@dataclass(frozen=True, slots=True)
class Fetched:
    """Rows of one output in the extra memory of a block. first: the offset of the first row there, in bytes."""

    first: int
    count: int
    spec: ValueSpec

    def addresses(self, block: Block) -> NDArray[np.int64]:
        """Return the host address of each row, [count]."""
        return block.extra.ctypes.data + self.first + np.arange(self.count) * row_bytes(self.spec)

    def values(self, block: Block) -> Tensor:
        """Return the rows of a finished step, [count, *shape], in memory of their own."""
        size = self.count * row_bytes(self.spec)
        rows = torch.from_numpy(block.extra[self.first : self.first + size].copy())
        return rows.view(torch_dtype(self.spec.dtype)).view(self.count, *self.spec.shape)


def fetched(
    fetches: Sequence[FetchOutput], outputs: Sequence[ValueSpec], first: int = 0
) -> tuple[tuple[Fetched, ...], int]:
    """Return a place for each fetch of a step, from byte `first` on, and the first byte after them.

    The places begin at multiples of 16 bytes if `first` is one.
    """
    places = []
    for fetch in fetches:
        place = Fetched(first, len(fetch.positions), outputs[fetch.output])
        places.append(place)
        first += math.ceil(place.count * row_bytes(place.spec) / 16) * 16
    return tuple(places), first


def of_task(task: RunTask, step: Step, places: Sequence[Fetched]) -> tuple[Fetched | None, ...]:
    """Return the places of a step's values, one for each fetch of the task; None if the step has no such value."""
    found = {fetch.output: place for fetch, place in zip(step.fetches, places, strict=True)}
    return tuple(found.get(fetch.output) for fetch in task.fetches)


def in_task(task: RunTask, number: int, failed: Iterable[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    """Turn failures at positions of a step into failures at positions of its task."""
    begin = task.begin_of(number)
    return tuple((begin + position, reason) for position, reason in failed)
