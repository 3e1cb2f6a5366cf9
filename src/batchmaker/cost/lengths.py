"""The number of steps of a run, and of its remaining steps: learnt from data, or while serving."""

from __future__ import annotations

import math
from typing import Final, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchmaker.errors import DataError, OptionError

MAX_STEPS: Final = 1 << 16
"""Longer runs count as runs of this length."""
MIN_SAMPLES: Final = 20
"""A quantile needs so many runs. With fewer, the runs of all given lengths together are used."""
MAX_SAMPLES: Final = 1 << 17
"""Most runs that are remembered. Beyond it all counts are halved, so that new runs count more."""
NUM_BUCKETS: Final = 8
_MAX_TABLES: Final = 16
_STALE_SHARE: Final = 1 / 16


@final
class LengthProfile:
    """The number of steps of runs, by a length that is known at their start, such as that of the source sentence.

    edges: [num_buckets - 1] int64, ascending: bucket i holds given lengths above edges[i - 1] and up to edges[i].
    counts: [num_buckets, longest + 1] int64: the number of runs with each number of steps; column 0 is zero. All memory
    is in `counts` and at most 16 tables of its shape, and `observe` keeps both bounded. num_samples: known runs, the
    sum of the counts; with none, `remaining` and `fixed` raise.
    """

    __slots__ = ("_counted_at_build", "_tables", "counts", "edges", "num_samples")

    def __init__(self, edges: ArrayLike = (), counts: ArrayLike | None = None) -> None:
        self.edges = np.array(edges, np.int64).reshape(-1)
        num_buckets = len(self.edges) + 1
        self.counts: NDArray[np.int64] = (
            np.zeros((num_buckets, 2), np.int64) if counts is None else np.array(counts, np.int64)
        )
        if (np.diff(self.edges) <= 0).any():
            raise DataError(f"length profile: edges of buckets are {self.edges.tolist()}, expected ascending numbers.")
        if (
            self.counts.ndim != 2
            or self.counts.shape[0] != num_buckets
            or not 2 <= self.counts.shape[1] <= MAX_STEPS + 1
        ):
            raise DataError(
                f"length profile: counts have shape {list(self.counts.shape)}, expected [{num_buckets}, steps + 1] "
                f"with 1 to {MAX_STEPS} steps."
            )
        if (self.counts < 0).any() or self.counts[:, 0].any():
            raise DataError("length profile: counts must be at least 0, and 0 for runs of no steps.")
        self.num_samples = int(self.counts.sum())
        self._tables: dict[float, NDArray[np.int64]] = {}
        self._counted_at_build = 0

    @classmethod
    def from_pairs(cls, given: ArrayLike, steps: ArrayLike, *, num_buckets: int = NUM_BUCKETS) -> LengthProfile:
        """Return the profile of runs that took `steps` where `given` was known.

        given, steps: [num_runs] integers, at least 0 and 1. Buckets hold about equally many runs; with few runs there
        are fewer buckets. OptionError if the two do not match or a length is out of range.
        """
        lengths, num_steps = _lengths("given", given, least=0), _lengths("steps", steps, least=1)
        if len(lengths) != len(num_steps):
            raise OptionError(
                f"a length profile needs one given length per run, got {len(lengths)} for {len(num_steps)}"
            )
        if num_buckets < 1:
            raise OptionError(f"num_buckets must be at least 1, got {num_buckets}")
        parts = max(1, min(num_buckets, len(lengths) // MIN_SAMPLES))
        edges = np.unique(np.sort(lengths)[np.arange(1, parts) * len(lengths) // parts]) if parts > 1 else ()
        profile = cls(edges)
        profile._add(lengths, num_steps)
        return profile

    def fixed(self, quantile: float) -> int:
        """Return the smallest number of steps that at least this share of all runs does not exceed.

        Source: dec_timesteps of LazyBatching. DataError if the profile is empty.
        """
        self._check(quantile)
        below = np.cumsum(self.counts.sum(axis=0))
        return int(np.searchsorted(below, _rank(quantile, below[-1:])[0]))

    def remaining(self, given: NDArray[np.int64], done: NDArray[np.int64], quantile: float) -> NDArray[np.int64]:
        """Return the remaining steps of runs that have done `done` steps: a quantile, at least 1.

        given, done: [n] integers, done at least 0. Returns [n] int64: Q(T | T > done) - done within the bucket of
        `given`. If fewer than 20 of its runs took more than `done`, all buckets are used. If those are too few as well,
        the result is that of a geometric distribution with the last known mean. DataError if the profile is empty.
        """
        table = self.table(quantile)
        bucket = np.searchsorted(self.edges, given)
        steps: NDArray[np.int64] = table[bucket, np.minimum(done, table.shape[1] - 1)]
        return steps

    def table(self, quantile: float) -> NDArray[np.int64]:
        """Return what `remaining` looks up: [num_buckets, steps done], where the last column is for all beyond it.

        Do not change it. DataError if the profile is empty.
        """
        table = self._tables.get(quantile)
        return self._build(quantile) if table is None else table

    @property
    def num_until_stale(self) -> int:
        """How many more runs can be observed before the tables may be others: at least 1."""
        grown = self.num_samples - self._counted_at_build
        until = math.floor(_STALE_SHARE * self._counted_at_build) + 1 - grown
        return max(1, min(until, MAX_SAMPLES + 1 - self.num_samples))

    def observe_all(self, given: NDArray[np.int64], steps: NDArray[np.int64]) -> None:
        """Learn from runs that were served, as `observe` one by one. given, steps: [runs]."""
        if self.num_samples + len(given) <= MAX_SAMPLES:
            if len(given):
                self._add(_lengths("given", given, least=0), _lengths("steps", steps, least=1))
            return
        for one, num_steps in zip(given.tolist(), steps.tolist(), strict=True):
            self.observe(one, num_steps)

    def observe(self, given: int, steps: int) -> None:
        """Learn from a run that was served.

        The memory is bounded: steps above 65 536 count as that many, and when more than 131 072 runs are known, all
        counts are halved. Look-up tables are rebuilt when the number of runs has grown by a sixteenth.
        """
        self._add(_lengths("given", [given], least=0), _lengths("steps", [steps], least=1))

    def _add(self, lengths: NDArray[np.int64], steps: NDArray[np.int64]) -> None:
        steps = np.minimum(steps, MAX_STEPS)
        longest = int(steps.max(initial=1))
        if longest >= self.counts.shape[1]:
            self.counts = np.pad(self.counts, ((0, 0), (0, longest + 1 - self.counts.shape[1])))
        np.add.at(self.counts, (np.searchsorted(self.edges, lengths), steps), 1)
        self.num_samples += len(steps)
        while self.num_samples > MAX_SAMPLES:
            self.counts = _halved(self.counts)
            self.num_samples = int(self.counts.sum())
        if abs(self.num_samples - self._counted_at_build) > _STALE_SHARE * self._counted_at_build:
            self._tables.clear()

    def _build(self, quantile: float) -> NDArray[np.int64]:
        """Build, keep and return the table [num_buckets, steps done] of remaining steps: see `remaining`."""
        self._check(quantile)
        pooled = self.counts.sum(axis=0)
        enough = min(MIN_SAMPLES, self.num_samples)
        pooled_steps, survivors = _remaining(pooled, quantile)
        last = int(np.flatnonzero(survivors >= enough)[-1])
        steps = np.arange(len(pooled))
        mean_left = float((pooled * np.maximum(steps - last, 0)).sum() / survivors[last])
        pooled_steps[last + 1 :] = _geometric(mean_left, quantile)
        table = np.empty(self.counts.shape, np.int64)
        for bucket, counts in enumerate(self.counts):
            own, own_survivors = _remaining(counts, quantile)
            table[bucket] = np.where(own_survivors >= MIN_SAMPLES, own, pooled_steps)
        if len(self._tables) >= _MAX_TABLES:
            self._tables.clear()
        self._tables[quantile] = table
        self._counted_at_build = self.num_samples
        return table

    def _check(self, quantile: float) -> None:
        if not 0 < quantile < 1:
            raise OptionError(f"a quantile is above 0 and below 1, got {quantile}")
        if not self.num_samples:
            raise DataError(
                "the length profile is empty, so no length can be predicted. Build it from data (`batchmaker profile "
                "MODEL --data SOURCE --data TARGET --out profile.json`) or serve some requests first."
            )


def _remaining(counts: NDArray[np.int64], quantile: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return, for each number of steps done, the quantile of the remaining steps and the number of longer runs.

    counts: [longest + 1]. Both results: [longest + 1] int64. The remaining steps are 1 if there is no longer run.
    """
    below = np.cumsum(counts)
    survivors = below[-1] - below
    ends = np.searchsorted(below, below + _rank(quantile, survivors))
    return np.maximum(ends - np.arange(len(counts)), 1), survivors


def _halved(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return half of each count. Every second odd count is rounded up, so that rare lengths do not all disappear."""
    half = counts >> 1
    odd = np.flatnonzero(counts & 1)
    half.flat[odd[::2]] += 1
    return half


def _rank(quantile: float, num_samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position of the quantile among sorted samples, counted from 1."""
    exact = quantile * num_samples
    return np.maximum(np.ceil(exact - 1e-9 * num_samples), 1).astype(np.int64)


def _geometric(mean: float, quantile: float) -> int:
    """Return the quantile of a geometric distribution on 1, 2, ... with this mean."""
    if mean <= 1:
        return 1
    return max(1, min(MAX_STEPS, math.ceil(math.log1p(-quantile) / math.log1p(-1 / mean) - 1e-9)))


def _lengths(name: str, lengths: ArrayLike, *, least: int) -> NDArray[np.int64]:
    array = np.asarray(lengths)
    if array.ndim != 1 or (array.size and (array.dtype.kind not in "iu" or array.min() < least)):
        raise OptionError(f"{name}: expected a one-dimensional list of whole numbers of at least {least}.")
    return array.astype(np.int64)
