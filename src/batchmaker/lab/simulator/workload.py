"""The data of a simulation: cell types without weights, requests without values, and their outcomes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final, overload

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Floats
from batchmaker.errors import OptionError
from batchmaker.graph.cell_graph import CellGraph, Work
from batchmaker.graph.spec import CellType
from batchmaker.graph.work import work_of
from batchmaker.lab.simulator.decisions import RecordedDecisions


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """A model as seen by the scheduler. cells: by type id, with unique names. OptionError for duplicate names."""

    name: str
    cells: tuple[CellType, ...]

    def __post_init__(self) -> None:
        if not self.cells:
            raise OptionError(f"model {self.name!r} has no cells to simulate")
        for number, cell in enumerate(self.cells):
            if cell.type_id != number:
                raise OptionError(f"model {self.name!r}: cell {cell.name!r} has id {cell.type_id}, expected {number}")
        names = [cell.name for cell in self.cells]
        if len(set(names)) < len(names):
            raise OptionError(f"model {self.name!r}: cells share a name among {', '.join(names)}; give each its own")


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request without values. Requests of one shape may be one object, and are then admitted much faster.

    graph: its open-ended runs have their true number of steps; the scheduler only sees that they may end. length: for
    the buckets of graph batching. model: its number, if several models run together. decided: what decided in it, if
    values decide what it computes. OptionError if they do and nothing is recorded.
    """

    graph: CellGraph
    length: int
    model: int = 0
    decided: RecordedDecisions | None = None

    def __post_init__(self) -> None:
        if (self.graph.region is None) != (self.decided is None):
            raise OptionError("a request has recorded decisions if values decide what it computes, and only then")

    @property
    def work(self) -> Work:
        """Its nodes and steps of each cell type, of all that runs."""
        return work_of(self.graph) if self.decided is None else self.decided.work


@final
@dataclass(frozen=True, slots=True)
class ShapedRequests(Sequence[SimulatedRequest]):
    """Requests by the number of their shape: millions of them, of few shapes. kinds: [num_requests] int32."""

    shapes: Sequence[SimulatedRequest]
    kinds: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.kinds)

    @overload
    def __getitem__(self, index: int) -> SimulatedRequest: ...
    @overload
    def __getitem__(self, index: slice) -> ShapedRequests: ...
    def __getitem__(self, index: int | slice) -> SimulatedRequest | ShapedRequests:
        if isinstance(index, slice):
            return ShapedRequests(self.shapes, self.kinds[index])
        shape: SimulatedRequest = self.shapes[int(self.kinds[index])]
        return shape

    def __iter__(self) -> Iterator[SimulatedRequest]:
        return (self.shapes[kind] for kind in self.kinds)


@dataclass(frozen=True, slots=True)
class Offered:
    """Requests and their arrival times. arrived_s: [num_requests] seconds, ascending, from 0 on. OptionError if not."""

    requests: Sequence[SimulatedRequest]
    arrived_s: Floats

    def __post_init__(self) -> None:
        if not len(self.requests):
            raise OptionError("there is no request to simulate; give at least one")
        if len(self.requests) != len(self.arrived_s):
            raise OptionError(f"{len(self.requests)} requests were given {len(self.arrived_s)} times of arrival")
        if not np.isfinite(self.arrived_s).all() or self.arrived_s[0] < 0 or (np.diff(self.arrived_s) < 0).any():
            raise OptionError("times of arrival must be finite, at least 0 and ascending")


OUTCOMES: Final = ("answered", "refused", "given up")
"""Meaning of `Records.outcome`."""
ANSWERED, REFUSED, GIVEN_UP = range(3)


@dataclass(slots=True)
class Records:
    """The outcome of each request. Arrays [num_requests], in order of arrival.

    arrived_s, started_s, finished_s: seconds; started_s is NaN if nothing was computed, finished_s is the end of a
    request without an answer too. outcome: index into OUTCOMES. steps, rows: batched calls (of cells, or of whole
    graphs) and the rows in them. busy_s: seconds of computing, of all workers together.
    """

    arrived_s: Floats
    started_s: Floats
    finished_s: Floats
    outcome: NDArray[np.int8]
    steps: int = 0
    rows: int = 0
    busy_s: float = 0.0

    @classmethod
    def of(cls, arrived_s: Floats) -> Records:
        """Return records in which nothing has happened."""
        count = len(arrived_s)
        return cls(arrived_s, np.full(count, np.nan), np.full(count, np.nan), np.zeros(count, np.int8))

    @property
    def answered(self) -> NDArray[np.bool_]:
        """Which requests were answered, in time or not."""
        return np.asarray(self.outcome == ANSWERED, np.bool_)

    def met(self, sla_s: float) -> NDArray[np.bool_]:
        """Return which requests were answered within `sla_s` of their arrival. OptionError unless above 0."""
        if not (math.isfinite(sla_s) and sla_s > 0):
            raise OptionError(f"an SLA must be a finite time above 0, got {sla_s} s")
        return np.asarray(self.answered & (self.finished_s - self.arrived_s <= sla_s), np.bool_)
