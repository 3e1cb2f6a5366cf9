"""Decisions of simulated requests: the values that decided when a request was computed once, for each segment of it.

The scheduler decides as it does live. It gets these values when it has let a segment begin, before its nodes are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.errors import InvariantError
from batchmaker.graph.cell_graph import CellGraph, Work
from batchmaker.graph.regions import Region, Segment, segments_of
from batchmaker.graph.work import work_of

ReadValue = tuple[int, int, int]
"""An output, a node, and the value: what a decision looks at."""


@final
@dataclass(frozen=True, slots=True)
class RecordedDecisions:
    """What decided in one request.

    own: of the request's own graph, by local nodes. begun: for each of `segments_of` the region, its copies in the
    order in which they began, with nodes counted from the copy's first. work: of all that ran.

    Where equal segments of one request begin independently of each other, a simulation may let them begin in another
    order than they were computed in. They then change places; the request has the same values in all.
    """

    own: tuple[ReadValue, ...]
    begun: tuple[tuple[tuple[ReadValue, ...], ...], ...]
    work: Work


def work_of_decided(graph: CellGraph, counts: Sequence[int]) -> Work:
    """Return the work of a request with this graph whose segments began so often; steps of segments are added up.

    counts: for each of `segments_of` the graph's region.
    """
    parts = [(work_of(graph), 1)] if graph.num_nodes else []
    for segment, count in zip(segments_of(graph.region), counts, strict=True):
        if count:
            assert segment.graph is not None
            parts.append((work_of(segment.graph), count))
    types = np.unique(np.concatenate([np.zeros(0, np.int64), *[work.types for work, _ in parts]]))
    nodes, steps = np.zeros((2, len(types)), np.int64)
    for work, count in parts:
        at = np.searchsorted(types, work.types)
        nodes[at] += count * work.nodes
        steps[at] += count * work.steps
    return Work(types, nodes, steps)


@final
class Deciding:
    """The values that the scheduler has not been told yet, of the requests in flight in one simulation."""

    def __init__(self) -> None:
        self._values: list[ReadValue] = []
        self._num_begun: dict[int, list[int]] = {}  # by request, of each of its segments
        self._numbers: dict[Region, dict[int, int]] = {}  # id of a segment -> its place among its region's

    def admitted(self, decided: RecordedDecisions, shift: int) -> None:
        """Note that the request's own graph has got its numbers: local node n is node n + shift."""
        self._values += [(output, node + shift, value) for output, node, value in decided.own]

    def begun(self, request: int, region: Region, decided: RecordedDecisions, segment: Segment, base: int) -> None:
        """Note that a copy of a segment has begun, from node `base` on. InvariantError for one that never was."""
        if region not in self._numbers:
            self._numbers[region] = {id(one): place for place, one in enumerate(segments_of(region))}
        number = self._numbers[region][id(segment)]
        counts = self._num_begun.setdefault(request, [0] * len(decided.begun))
        copies = decided.begun[number]
        if counts[number] == len(copies):
            raise InvariantError(f"request {request} lets a segment begin {len(copies) + 1} times, recorded one less")
        self._values += [(output, base + node, value) for output, node, value in copies[counts[number]]]
        counts[number] += 1

    def ended(self, request: int) -> None:
        """Note that a request is over."""
        self._num_begun.pop(request, None)

    def take(self) -> tuple[tuple[int, Ints, Ints], ...]:
        """Return what is to be told now, as StepsFinished has it: output, nodes, values."""
        if not self._values:
            return ()
        rows = np.array(self._values, np.int64)
        self._values.clear()
        return tuple([(output, *rows[rows[:, 0] == output].T[1:]) for output in np.unique(rows[:, 0]).tolist()])
