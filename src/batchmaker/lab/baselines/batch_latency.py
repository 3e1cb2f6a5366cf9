"""The distribution of the time of a batch of whole requests: the maximum over its unknown lengths."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

NUM_SAMPLES = 1024  # lengths remembered
NUM_POINTS = 32  # of the distribution
REFRESH = 64  # observations between two updates of the distribution, fewer at first
KEEP = 0.98  # weight of earlier knowledge when a batch has finished


@final
class StepCost:
    """Learned seconds of a padded batch: each step costs a fixed part and a part per row.

    A least-squares line through (rows, seconds per step) of finished batches; recent ones count more.
    """

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # of the weights, rows, seconds per step, rows squared, rows times seconds

    @property
    def is_known(self) -> bool:
        return bool(self._sums[0] > 0)

    def saw(self, rows: int, longest: int, seconds: float) -> None:
        """Learn from a batch of `rows` rows, padded to `longest`, that took so long."""
        each = seconds / max(longest, 1)
        self._sums = KEEP * self._sums + np.array([1.0, rows, each, rows * rows, rows * each])

    def seconds(self, rows: int, longest: int) -> float:
        """Return the predicted seconds of a batch; 0 while nothing is known."""
        if not self.is_known:
            return 0.0
        mean_rows, mean, rows_squared, product = map(float, self._sums[1:] / self._sums[0])
        spread = rows_squared - mean_rows**2
        per_row = max(0.0, (product - mean_rows * mean) / spread) if spread > 1e-9 * rows_squared else 0.0
        fixed = max(0.0, mean - per_row * mean_rows)
        return max(longest, 1) * (fixed + per_row * rows)


@final
class BatchLatency:
    """Distribution of the latency of a batch, by its size.

    sizes: ascending. batch_seconds: see OrlojPolicy; None to learn it. If F is the distribution of one request's
    length, that of the longest of k requests is F to the k-th power; a batch is padded to its longest.
    """

    __slots__ = (
        "_batch_seconds",
        "_cost",
        "_known_seconds",
        "_lengths",
        "_mean_s",
        "_next_look",
        "_num_seen",
        "_seconds",
        "_sizes",
        "_weights",
    )

    def __init__(self, sizes: Sequence[int], batch_seconds: Callable[[Sequence[int]], float] | None) -> None:
        self._sizes = sizes
        self._batch_seconds = batch_seconds
        self._cost = StepCost()
        self._lengths: deque[int] = deque(maxlen=NUM_SAMPLES)
        self._num_seen = self._next_look = 0
        self._known_seconds: dict[tuple[int, int], float] = {}  # results of `batch_seconds`
        self._mean_s = dict.fromkeys(sizes, 0.0)
        self._seconds: dict[int, NDArray[np.float64]] = {}  # size -> [points] ascending
        self._weights: dict[int, NDArray[np.float64]] = {}  # size -> [points] their probabilities

    def saw_length(self, length: int) -> None:
        """Note that a request of this length has arrived."""
        self._lengths.append(length)
        self._saw()

    def saw_batch(self, lengths: Sequence[int], seconds: float) -> None:
        """Learn from a batch of requests of these lengths that took so long."""
        self._cost.saw(len(lengths), max(lengths), seconds)
        self._saw()

    def mean_s(self, size: int) -> float:
        """Return the expected latency of a batch of one of the sizes; 0 while nothing is known."""
        return self._mean_s[size]

    def worth(self, size: int, slack_s: NDArray[np.float64], firm: NDArray[np.bool_]) -> float:
        """Return the sum of the priority scores of requests in a batch of this size that starts now.

        slack_s: [members] seconds until each is due. firm: [members] worth nothing once late; others stay urgent.
        """
        mean_s = self._mean_s[size]
        if mean_s <= 0:
            return 0.0
        spare = slack_s[:, None] - self._seconds[size]  # [members, points]
        gain = np.exp(-np.maximum(spare, 0.0) / self._mean_s[self._sizes[-1]])
        gain[(spare < 0) & firm[:, None]] = 0.0
        return float((gain @ self._weights[size]).sum()) / mean_s

    def _saw(self) -> None:
        self._num_seen += 1
        if self._num_seen >= self._next_look and (self._batch_seconds is not None or self._cost.is_known):
            self._next_look = self._num_seen + min(self._num_seen, REFRESH)
            self._look()

    def _look(self) -> None:
        """Update the distribution with the present lengths and costs."""
        samples = np.sort(np.array(self._lengths))
        num = min(len(samples), NUM_POINTS)
        below = np.arange(num + 1) / num  # probability of a length up to each point
        points = samples[np.ceil(below[1:] * len(samples)).astype(np.int64) - 1].tolist()
        for size in self._sizes:
            seconds = np.array([self._padded(size, length) for length in points])
            self._seconds[size] = seconds
            self._weights[size] = np.diff(below**size)
            self._mean_s[size] = float(seconds @ self._weights[size])

    def _padded(self, size: int, length: int) -> float:
        """Return the seconds of a batch that is padded to a length."""
        if self._batch_seconds is None:
            return self._cost.seconds(size, length)
        if (size, length) not in self._known_seconds:
            self._known_seconds[size, length] = self._batch_seconds([length] * size)
        return self._known_seconds[size, length]
