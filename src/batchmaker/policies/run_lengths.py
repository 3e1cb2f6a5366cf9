"""How many steps requests have left where values end their runs: from a profile, or learnt from runs that ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled
from batchmaker.cost.lengths import LengthProfile
from batchmaker.cost.profile import CostProfile
from batchmaker.graph.spec import CellType
from batchmaker.policies.requests import RequestTable, Slots

Ids = NDArray[np.int64]

QUANTILE: Final = 0.75
"""Of the remaining steps of runs that have come as far: what is expected."""
_NEVER: Final = np.iinfo(np.int64).max


@compiled
def _steps_left(
    slots: Slots, left: Ids, done: Ids, width: NDArray[np.float64], is_open: NDArray[np.bool_], row: Ids,
    is_told: NDArray[np.bool_], given: Ids, edges: Ids, expected: Ids,
) -> Ids:  # fmt: skip
    """Return the remaining steps of each type: [slots, types].

    left, done, width, is_open: see RequestTable. row: [types] the rows in the next four, -1 where the graph tells.
    is_told: [rows] whether a profile told the lengths. given: [rows] the type whose length is known at the start, or
    -1. edges: [rows, buckets - 1] of it. expected: [rows, buckets, most steps done + 1].
    """
    num_types = left.shape[1]
    steps = np.empty((len(slots), num_types), np.int64)
    for i in range(len(slots)):
        slot = slots[i]
        for type_id in range(num_types):
            at = row[type_id]
            if at < 0:
                steps[i, type_id] = int(np.ceil(left[slot, type_id] / width[slot, type_id] - 1e-9))
                continue
            steps[i, type_id] = 0
            if left[slot, type_id] > 0 or (is_told[at] and is_open[slot]):
                bucket, source = 0, given[at]
                if source >= 0:
                    while bucket < edges.shape[1] and edges[at, bucket] < left[slot, source] + done[slot, source]:
                        bucket += 1
                steps[i, type_id] = expected[at, bucket, min(done[slot, type_id], expected.shape[2] - 1)]
    return steps


@dataclass(frozen=True, slots=True)
class _Predicted:
    """A type whose lengths are predicted. given: the type whose length is known at the start, -1 without one."""

    profile: LengthProfile
    given: int
    is_told: bool


@final
class RunLengths:
    """The lengths of the runs of each cell type that values end.

    A cost profile may tell them, by a length that is known at the start. Where none does they are learnt: the graph
    knows only how long a run may get, and by that all requests in flight would be far from their ends. What a profile
    told is learnt further.

    told: the types whose lengths a profile told.
    """

    __slots__ = ("_edges", "_expected", "_given", "_is_told", "_known", "_num_types", "_predicted", "_row", "told")

    def __init__(self) -> None:
        self._known: dict[str, tuple[str | None, LengthProfile]] = {}  # by the cell's name
        self._predicted: dict[int, _Predicted] = {}  # by type
        self.learn_types(())

    def use(self, profile: CostProfile) -> None:
        """Take lengths from this profile. Lengths learnt while serving stay in this object."""
        self._known = {
            known.cell: (known.given, LengthProfile(known.profile.edges, known.profile.counts))
            for known in profile.lengths
        }

    def learn_types(self, cells: Sequence[CellType]) -> None:
        """Make room for these cell types, and find those that are named in profiles."""
        self._num_types = len(cells)
        column = {cell.name: type_id for type_id, cell in enumerate(cells)}
        for name, (given, profile) in self._known.items():
            if name in column:
                source = -1 if given is None else column.get(given, -1)
                self._predicted[column[name]] = _Predicted(profile, source, is_told=True)
        self._tabulate()

    def left(self, table: RequestTable, slots: Slots) -> Ids:
        """Return the remaining steps of each type for these requests: [slots, types]."""
        return _steps_left(
            slots, table.left, table.done, table.width, table.open, self._row, self._is_told, self._given, self._edges,
            self._expected,
        )  # fmt: skip

    def requests_finished(self, table: RequestTable, slots: Sequence[int]) -> None:
        """Learn the lengths of these requests' runs."""
        left, done = table.left[slots], table.done[slots]
        is_stale = False
        for type_id in self._predicted.keys() | table.stopping_types:
            ran = done[:, type_id] > 0
            if not ran.any():
                continue
            one = self._predicted.get(type_id)
            if one is None:
                one = self._predicted[type_id] = _Predicted(LengthProfile(), -1, is_told=False)
            given = np.zeros(len(slots), np.int64) if one.given < 0 else left[:, one.given] + done[:, one.given]
            is_stale |= one.profile.num_until_stale <= int(ran.sum())
            one.profile.observe_all(given[ran], done[ran, type_id])
        if is_stale:
            self._tabulate()

    def _tabulate(self) -> None:
        """Write down what is expected, by type, bucket of the given length and steps done."""
        found = {type_id: one.profile.table(QUANTILE) for type_id, one in self._predicted.items()}
        buckets = max((len(table) for table in found.values()), default=1)
        longest = max((table.shape[1] for table in found.values()), default=1)
        self._row = np.full(self._num_types, -1)
        self._is_told = np.array([one.is_told for one in self._predicted.values()], np.bool_)
        self._given = np.array([one.given for one in self._predicted.values()], np.int64)
        self._edges = np.full((len(found), buckets - 1), _NEVER, np.int64)
        self._expected = np.ones((len(found), buckets, longest), np.int64)
        for at, (type_id, table) in enumerate(found.items()):
            edges = self._predicted[type_id].profile.edges
            self._row[type_id] = at
            self._edges[at, : len(edges)] = edges
            self._expected[at, : len(table)] = table[:, np.minimum(np.arange(longest), table.shape[1] - 1)]
        self.told = {type_id for type_id, one in self._predicted.items() if one.is_told}
