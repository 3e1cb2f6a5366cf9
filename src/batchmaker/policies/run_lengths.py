"""How many steps requests have left where values end their runs: from a profile, or learnt from runs that ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled
from batchmaker.cost.lengths import LengthProfile
from batchmaker.cost.profile import CostProfile
from batchmaker.graph.spec import CellType
from batchmaker.policies.requests import RequestTable

QUANTILE: Final = 0.75
"""Of the remaining steps of runs that have come as far: what is expected."""
_NEVER: Final = np.iinfo(np.int64).max
_UNKNOWN: Final = np.ones((1, 1), np.int64)
MOST_NOTED: Final = 256
"""Runs of a type that have ended and were not learnt from; and those of one step more."""


class ExpectedLengths(NamedTuple):
    """What is expected, for compiled loops.

    row: [types] the rows in the next four, -1 where the graph tells. is_predicted: [rows] whether a profile told the
    lengths. source: [rows] the type whose length is known at the start, or -1. edges: [rows, buckets - 1] of it.
    expected: [rows, buckets, most steps done + 1].
    """

    row: Ints
    is_predicted: NDArray[np.bool_]
    source: Ints
    edges: Ints
    expected: Ints


class EndedRuns(NamedTuple):
    """Runs that have ended and were not learnt from.

    types, source: [rows], see ExpectedLengths. ended: [rows, 2, room] given lengths and steps, written up to num_ended
    [rows]. until_stale: [rows] so many runs change what is expected.
    """

    types: Ints
    source: Ints
    ended: Ints
    num_ended: Ints
    until_stale: Ints


@compiled
def run_steps_left(
    slots: Ints,
    left: Ints,
    done: Ints,
    width: NDArray[np.float64],
    is_open: NDArray[np.bool_],
    lengths: ExpectedLengths,
) -> Ints:
    """Return the remaining steps of each type: [slots, types]. left, done, width, is_open: see RequestTable."""
    row, is_predicted, sources, edges, expected = lengths
    num_types = left.shape[1]
    steps = np.empty((len(slots), num_types), np.int64)
    for i in range(len(slots)):
        slot = slots[i]
        for type_id in range(num_types):
            at = row[type_id]
            at_most = left[slot, type_id]
            if width[slot, type_id] != 1.0:
                at_most = int(np.ceil(at_most / width[slot, type_id] - 1e-9))
            if at < 0:
                steps[i, type_id] = at_most
                continue
            steps[i, type_id] = 0
            if left[slot, type_id] > 0 or (is_predicted[at] and is_open[slot]):
                bucket, source = 0, sources[at]
                if source >= 0:
                    while bucket < edges.shape[1] and edges[at, bucket] < left[slot, source] + done[slot, source]:
                        bucket += 1
                so_far = int(np.ceil(done[slot, type_id] / width[slot, type_id] - 1e-9))
                steps[i, type_id] = expected[at, bucket, min(so_far, expected.shape[2] - 1)]
                if not is_predicted[at]:
                    steps[i, type_id] = min(steps[i, type_id], at_most)
    return steps


@compiled
def note_ended(slots: Ints, left: Ints, done: Ints, width: NDArray[np.float64], runs: EndedRuns) -> bool:
    """Note the steps of these requests' runs; return whether it is time to learn from what was noted."""
    types, sources, ended, num_ended, until_stale = runs
    is_stale = False
    for row in range(len(types)):
        for i in range(len(slots)):
            steps = int(np.ceil(done[slots[i], types[row]] / width[slots[i], types[row]] - 1e-9))
            if steps > 0:
                source, at = sources[row], num_ended[row]
                ended[row, 0, at] = left[slots[i], source] + done[slots[i], source] if source >= 0 else 0
                ended[row, 1, at] = steps
                num_ended[row] += 1
        is_stale = is_stale or num_ended[row] >= min(until_stale[row], MOST_NOTED)
    return is_stale


@dataclass(frozen=True, slots=True)
class _Predicted:
    """A type whose lengths are predicted. source: the type whose length is known at the start, -1 without one."""

    profile: LengthProfile
    source: int
    is_predicted: bool


@final
class RunLengths:
    """The lengths of the runs of each cell type that values end.

    A cost profile may tell them, by a length that is known at the start. Where none does they are learnt: the graph
    knows only how long a run may get, and by that all requests in flight would be far from their ends. What a profile
    told is learnt further.

    predicted_types: the types whose lengths a profile told. learnt: those whose lengths runs that ended have shown; a
    run may turn out longer, so what follows from them is not kept.
    """

    __slots__ = (
        "_edges",
        "_ended",
        "_expected",
        "_is_predicted",
        "_num_ended",
        "_num_types",
        "_predicted",
        "_profiles",
        "_row",
        "_source",
        "_types",
        "_until_stale",
        "learnt",
        "predicted_types",
    )

    def __init__(self) -> None:
        self._profiles: dict[str, tuple[str | None, LengthProfile]] = {}  # by the cell's name
        self._predicted: dict[int, _Predicted] = {}  # by type
        self._ended: Ints = np.zeros((0, 2, 0), np.int64)
        self._num_ended = self._until_stale = np.zeros(0, np.int64)
        self.learn_types(())

    def use(self, profile: CostProfile) -> None:
        """Take lengths from this profile. Lengths learnt while serving stay in this object."""
        self._profiles = {
            one.cell: (one.given, LengthProfile(one.profile.edges, one.profile.counts)) for one in profile.lengths
        }

    def learn_types(self, cells: Sequence[CellType]) -> None:
        """Make room for these cell types, and find those that are named in profiles."""
        self._observe()
        self._num_types = len(cells)
        column = {cell.name: type_id for type_id, cell in enumerate(cells)}
        self._predicted = {type_id: one for type_id, one in self._predicted.items() if not one.is_predicted}
        for name, (source_name, profile) in self._profiles.items():
            if name in column:
                source = -1 if source_name is None else column.get(source_name, -1)
                self._predicted[column[name]] = _Predicted(profile, source, is_predicted=True)
        self._tabulate()

    def remaining(self, table: RequestTable, slots: Ints) -> Ints:
        """Return the remaining steps of each type for these requests: [slots, types]."""
        return run_steps_left(slots, table.left, table.done, table.width, table.open, self.expected)

    @property
    def expected(self) -> ExpectedLengths:
        return ExpectedLengths(self._row, self._is_predicted, self._source, self._edges, self._expected)

    @property
    def ended(self) -> EndedRuns:
        return EndedRuns(self._types, self._source, self._ended, self._num_ended, self._until_stale)

    def requests_finished(self, table: RequestTable, slots: Sequence[int]) -> None:
        """Learn the lengths of these requests' runs, of many at once."""
        if not table.stopping_types <= self._predicted.keys():
            self._observe()
            for type_id in table.stopping_types - self._predicted.keys():
                self._predicted[type_id] = _Predicted(LengthProfile(), -1, is_predicted=False)
            self._tabulate()
        if len(slots) > self._ended.shape[2] - MOST_NOTED:
            self._ended = np.pad(self._ended, ((0, 0), (0, 0), (0, len(slots))))
        if note_ended(np.array(slots, np.int64), table.left, table.done, table.width, self.ended):
            self.learn()

    def learn(self) -> None:
        """Expect what the runs that were noted show."""
        self._observe()
        self._tabulate()

    def _observe(self) -> None:
        """Learn from the runs that were noted; `_tabulate` must follow."""
        for one, noted, num in zip(self._predicted.values(), self._ended, self._num_ended.tolist(), strict=True):
            one.profile.observe_all(noted[0, :num], noted[1, :num])

    def _tabulate(self) -> None:
        """Write down what is expected, by type, bucket of the given length and steps done."""
        predicted = list(self._predicted.values())
        self._types = np.array(list(self._predicted), np.int64)
        self._source = np.array([one.source for one in predicted], np.int64)
        self._is_predicted = np.array([one.is_predicted for one in predicted], np.bool_)
        self.predicted_types = {type_id for type_id, one in self._predicted.items() if one.is_predicted}
        self.learnt = {t for t, one in self._predicted.items() if not one.is_predicted and one.profile.num_samples}
        self._num_ended = np.zeros(len(predicted), np.int64)
        self._ended = np.zeros((len(predicted), 2, 2 * MOST_NOTED), np.int64)
        tables = [one.profile.table(QUANTILE) if one.profile.num_samples else _UNKNOWN for one in predicted]
        self._until_stale = np.array([one.profile.num_until_stale for one in predicted], np.int64)
        buckets, longest = (max((table.shape[axis] for table in tables), default=1) for axis in (0, 1))
        self._row = np.full(self._num_types, -1)
        self._edges = np.full((len(tables), buckets - 1), _NEVER, np.int64)
        self._expected = np.ones((len(tables), buckets, longest), np.int64)
        for row, (one, table) in enumerate(zip(predicted, tables, strict=True)):
            self._edges[row, : len(one.profile.edges)] = one.profile.edges
            self._expected[row, : len(table)] = table[:, np.minimum(np.arange(longest), table.shape[1] - 1)]
            if one.profile.num_samples:
                self._row[self._types[row]] = row
