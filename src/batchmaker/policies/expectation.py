"""LazyBatching's predictions: the remaining steps of requests, and the seconds of steps."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Final, Literal, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled
from batchmaker.cost.latency import LatencyTable, OnlineCorrection
from batchmaker.cost.lengths import LengthProfile
from batchmaker.cost.profile import CostProfile
from batchmaker.cost.replay import Replay
from batchmaker.graph.spec import CellType
from batchmaker.policies.requests import RequestTable

Lengths = Literal["conditional", "fixed", "true"]

CORRECT_EVERY = 64
"""Steps between two updates of the forecast's times."""

NOBODY: Final = -1
_NO_TABLE: Final = np.zeros((0, 0), np.int64)


class Predictions(NamedTuple):
    """The types whose lengths are predicted. Arrays have one entry for each of them.

    cell: its column. source: the column of the type whose length is given, or NOBODY. fixed: the length if it is
    `fixed`, otherwise 0. edges: [predictions, most edges] of the buckets of given lengths. tables, widths:
    [predictions, buckets, steps] of LengthProfile, and the steps of each.
    """

    cell: Ints
    source: Ints
    fixed: Ints
    edges: Ints
    tables: Ints
    widths: Ints


_NONE: Final[Ints] = np.zeros(0, np.int64)
NO_PREDICTIONS: Final = Predictions(
    _NONE, _NONE, _NONE, np.zeros((0, 0), np.int64), np.zeros((0, 0, 0), np.int64), _NONE
)
"""No length is predicted."""


@compiled
def steps_left(
    slots: Ints,
    left: Ints,
    done: Ints,
    width: NDArray[np.float64],
    is_open: NDArray[np.bool_],
    predictions: Predictions,
) -> Ints:
    """Return the remaining steps of each type for these requests: [slots, types]. For the columns see RequestTable."""
    steps = np.empty((len(slots), left.shape[1]), np.int64)
    cells, edges, tables = predictions.cell, predictions.edges, predictions.tables
    for i in range(len(slots)):
        slot = slots[i]
        for type_id in range(left.shape[1]):
            steps[i, type_id] = left[slot, type_id]
            if width[slot, type_id] != 1.0:
                steps[i, type_id] = int(np.ceil(left[slot, type_id] / width[slot, type_id] - 1e-9))
        for which in range(len(cells)):
            cell, source, fixed = cells[which], predictions.source[which], predictions.fixed[which]
            so_far = done[slot, cell]
            if left[slot, cell] == 0 and not is_open[slot]:
                steps[i, cell] = 0
            elif fixed > 0:
                steps[i, cell] = max(fixed - so_far, 1)
            else:
                length = left[slot, source] + done[slot, source] if source >= 0 else 0
                bucket = 0
                while bucket < edges.shape[1] and edges[which, bucket] < length:
                    bucket += 1
                steps[i, cell] = tables[which, bucket, min(so_far, predictions.widths[which] - 1)]
    return steps


@final
class StepsLeft:
    """The number of remaining steps of each type, for each request.

    For most types the graph tells. For types with a length profile there are three modes. `conditional`: the quantile
    of the remaining steps, given the input length and the steps done. `fixed` (LazyBatching's dec_timesteps): a length
    that `percent` % of outputs do not exceed. `true`: the graph's numbers for every type; this is the Oracle, if the
    graph holds true lengths.

    lengths, quantile: of these. share: `percent` as a fraction. predicted: for each predicted type its column, the
    column of the type whose length is given, and the profile.
    """

    __slots__ = ("_predictions", "_profiles", "_tables", "lengths", "predicted", "quantile", "share")

    def __init__(self, lengths: Lengths, quantile: float, percent: float) -> None:
        self.lengths = lengths
        self.quantile = quantile
        self.share = percent / 100
        self._profiles: list[tuple[str, str | None, LengthProfile]] = []
        self.predicted: list[tuple[int, int | None, LengthProfile]] = []
        self._predictions: Predictions | None = None
        self._tables: list[NDArray[np.int64]] = []  # of these

    def use(self, profile: CostProfile) -> None:
        """Predict lengths from this profile. Lengths learnt while serving stay in this object."""
        if self.lengths == "true":
            return
        self._profiles = [
            (one.cell, one.given, LengthProfile(one.profile.edges, one.profile.counts)) for one in profile.lengths
        ]

    def learn_types(self, cells: Sequence[CellType]) -> None:
        """Find the columns of the types that are named in profiles."""
        column = {cell.name: i for i, cell in enumerate(cells)}
        self.predicted = [
            (column[cell], None if source is None else column.get(source), profile)
            for cell, source, profile in self._profiles
            if cell in column
        ]
        self._predictions = None

    def remaining(self, table: RequestTable, slots: Ints) -> Ints:
        """Return the remaining steps of each type for these requests: [slots, types]."""
        return steps_left(slots, table.left, table.done, table.width, table.open, self.predictions())

    def predictions(self) -> Predictions:
        """Return what is predicted now, for compiled loops."""
        tables = [_NO_TABLE if self.lengths == "fixed" else p.table(self.quantile) for _, _, p in self.predicted]
        if self._predictions is not None and all(map(is_, tables, self._tables)):
            return self._predictions
        shape = (max((t.shape[axis] for t in tables), default=0) for axis in (0, 1))
        edges = max((len(profile.edges) for _, _, profile in self.predicted), default=0)
        self._tables, num = tables, len(tables)
        self._predictions = result = Predictions(
            cell=np.array([cell for cell, _, _ in self.predicted], np.int64),
            source=np.array([NOBODY if source is None else source for _, source, _ in self.predicted], np.int64),
            fixed=np.array(
                [p.fixed(self.share) if self.lengths == "fixed" else 0 for _, _, p in self.predicted], np.int64
            ),
            edges=np.full((num, edges), np.iinfo(np.int64).max),
            tables=np.zeros((num, *shape), np.int64),
            widths=np.array([table.shape[1] for table in tables], np.int64),
        )
        for which, ((_, _, profile), table) in enumerate(zip(self.predicted, tables, strict=True)):
            result.edges[which, : len(profile.edges)] = profile.edges
            result.tables[which, : table.shape[0], : table.shape[1]] = table
        return result

    def whole(self, table: RequestTable, slots: Ints) -> Ints:
        """Return all steps of each type for these requests, done ones included: [slots, types]."""
        return self.remaining(table, slots) + np.ceil(table.done[slots] / table.width[slots] - 1e-9).astype(np.int64)

    def requests_finished(self, table: RequestTable, slots: Sequence[int]) -> None:
        """Learn the lengths of these requests' runs."""
        if self.lengths != "conditional":
            return
        for cell, source, profile in self.predicted:
            for slot in slots:
                done = int(table.done[slot, cell])
                if done:
                    profile.observe(int(self._whole_lengths(table, np.array([slot]), source)[0]), done)

    @staticmethod
    def _whole_lengths(table: RequestTable, slots: Ints, column: int | None) -> Ints:
        if column is None:
            return np.zeros(len(slots), np.int64)
        whole: Ints = table.left[slots, column] + table.done[slots, column]
        return whole


class ExpectedTimes(NamedTuple):
    """What ExpectedStepTimes knows, for compiled loops.

    corrects: whether steps change `factors`, [types], by which base_s is to be multiplied. base_s, seconds: [types,
    most + 1] as profiled, and as expected now. single_s: [types] of one row.
    """

    corrects: bool
    base_s: NDArray[np.float64]
    factors: NDArray[np.float64]
    seconds: NDArray[np.float64]
    single_s: NDArray[np.float64]


@final
class ExpectedStepTimes:
    """Seconds per step of each type and batch size: profiled, and corrected by measured times while serving.

    A cell without a profile is predicted to take as long as its steps have taken so far, for any batch size; before its
    first step, no time at all. by_size: as long as its steps of this size have taken, by doublings of the size; see
    `_hopeful` for sizes that were not seen.

    base: [types, max_batch + 1] seconds as profiled, 0 where nothing is known. corrects: whether they are corrected.
    """

    __slots__ = (
        "_by_size",
        "_correction",
        "_is_known",
        "_latency",
        "_measured",
        "_replay",
        "_since",
        "_single_s",
        "base",
    )

    def __init__(self, *, correct: bool, by_size: bool = False) -> None:
        self._by_size: dict[int, dict[int, float]] | None = {} if by_size else None
        self._correction = OnlineCorrection(0) if correct else None
        self._latency: LatencyTable | None = None
        self._measured: list[float] = []  # by type: recent seconds of a step, 0 before the first
        self._is_known: list[bool] = []  # by type: whether it has a profile
        self.base: NDArray[np.float64] = np.zeros((0, 2))
        self._replay = Replay(self.base)
        self._single_s = np.zeros(0)
        self._since = 0

    def use(self, profile: CostProfile) -> None:
        """Take step times from this profile."""
        self._latency = profile.latency

    @property
    def corrects(self) -> bool:
        return self._correction is not None

    @property
    def tables(self) -> ExpectedTimes:
        """What is expected now. Its factors are those of this object."""
        factors = np.zeros(0) if self._correction is None else self._correction.factors
        return ExpectedTimes(self.corrects, self.base, factors, self._replay.seconds, self._single_s)

    @property
    def replay(self) -> Replay:
        """Forecasts with the present times."""
        return self._replay

    @property
    def single_s(self) -> NDArray[np.float64]:
        """Seconds of a step with one row: [types]. 0 where nothing is known."""
        return self._single_s

    def learn_types(self, cells: Sequence[CellType]) -> None:
        """Add rows for new cell types."""
        names = [cell.name for cell in cells]
        self._measured += [0.0] * (len(names) - len(self._measured))
        if self._correction is not None:
            factors = self._correction.factors
            self._correction = OnlineCorrection(len(names))
            self._correction.factors[: len(factors)] = factors
        max_batch = max(cell.max_batch for cell in cells)
        self.base = np.zeros((len(names), max_batch + 1))
        table_names = {cell.name for cell in self._latency.cells} if self._latency is not None else set()
        rows = [i for i, name in enumerate(names) if name in table_names]
        if rows and self._latency is not None:
            self.base[rows] = self._latency.dense([names[i] for i in rows], max_batch)
        self._is_known = [bool(row.any()) for row in self.base]
        self.rebuild()

    def step_finished(self, type_id: int, batch: int, seconds: float) -> None:
        """Learn from a measured step."""
        if self._correction is None or type_id >= len(self._is_known):
            return
        predicted = float(self.base[type_id, min(batch, self.base.shape[1] - 1)]) if self._is_known[type_id] else 0.0
        if predicted > 0:
            self._correction.observe(type_id, predicted, seconds)
        else:
            before = self._measured[type_id]
            self._measured[type_id] = seconds if before == 0 else 0.9 * before + 0.1 * seconds
            if self._by_size is not None:
                seen, size = self._by_size.setdefault(type_id, {}), batch.bit_length()
                predicted = seen.get(size, 0.0)
                seen[size] = seconds if predicted == 0 else 0.9 * predicted + 0.1 * seconds
        self._since += 1
        if self._since >= CORRECT_EVERY or predicted == 0:
            self.rebuild()

    def rebuild(self) -> None:
        """Let forecasts use what was learnt."""
        self._since = 0
        seconds = self.base.copy()
        if self._correction is not None:
            seconds *= self._correction.factors[:, None]
        unknown = self.base[:, -1] == 0
        seconds[unknown, 1:] = np.array(self._measured)[unknown, None]
        doublings = np.log2(np.arange(1, seconds.shape[1])).astype(np.int64) + 1
        for type_id, seen in (self._by_size or {}).items():
            seconds[type_id, 1:] = np.array(_hopeful(seen, int(doublings[-1])))[doublings - 1]
        self._replay = Replay(seconds)
        self._single_s = seconds[:, 1].copy()


def _hopeful(seen: dict[int, float], num_doublings: int) -> list[float]:
    """Return seconds for each doubling of the batch from those that were seen, by number from 1 on.

    Sizes that were not seen are hoped to gain: larger ones cost no more, smaller ones only their share. So both are
    tried, and known then.
    """
    largest = max(seen)
    seconds = [seen[largest]] * num_doublings
    for size in range(largest - 1, 0, -1):
        seconds[size - 1] = seen.get(size, seconds[size] / 2)
    for size in range(1, num_doublings):
        seconds[size] = max(seconds[size], seconds[size - 1])
    return seconds
