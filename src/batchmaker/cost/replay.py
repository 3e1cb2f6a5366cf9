"""A forecast of finish times by replaying the requests in flight, without arrivals.

The requests that are furthest behind run first: types in order, and within a type all requests that still have steps of
it, until the last one has done them. With this order there is a closed form: the k-th step of a type is taken by all
requests with at least k steps of it left. So the batch sizes of all future steps are one cumulative sum, and so are
their times. The computation jumps from one change of members to the next, however many steps are between.

Policies walk the same order in compiled loops (`policies/joining.py`). `Replay.forecasts` is its plain form, for all
prefixes at once, to which tests hold those loops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Floats, Ints


@dataclass(frozen=True, slots=True)
class Forecasts:
    """Finish times of requests, in seconds from now, if 0, 1, 2, ... of the candidates join.

    finish_s: [candidates + 1, requests]; row j counts only for the first num_fixed + j requests, and is 0 for requests
    without remaining steps. drain_s: [candidates + 1] the end of the last step.
    """

    finish_s: Floats
    drain_s: Floats


@final
class Replay:
    """Forecasts from the seconds of a step of each type at each batch size.

    seconds: [types, max_batch + 1], column 0 is zero. A larger batch takes whole calls of max_batch and one call for
    the rest.
    """

    __slots__ = ("_flat", "_max_batch", "seconds")

    def __init__(self, seconds: Floats) -> None:
        self.seconds = np.ascontiguousarray(seconds)
        self._max_batch = seconds.shape[1] - 1
        self._flat = self.seconds.ravel()

    def alone(self, steps: Ints) -> Floats:
        """Return the seconds that each request takes by itself, one row at a time: [requests].

        steps: [requests, types] remaining steps. This is SingleInputExecTime of LazyBatching's Algorithm 1.
        """
        single: Floats = steps @ self.seconds[:, 1]
        return single

    def forecasts(self, steps: Ints, num_fixed: int, width: NDArray[np.float64] | None = None) -> Forecasts:
        """Return the finish times if the first `num_fixed` and the first j of the others run together.

        steps: [requests, types] remaining steps. width: [requests, types] rows of the request in a step; None: one.
        """
        num_requests, num_types = steps.shape
        num_rows = num_requests - num_fixed + 1
        longest = steps.max(axis=0, initial=0)
        ends = longest.cumsum()
        total = int(ends[-1]) if num_types else 0
        finish_s = np.zeros((num_rows, num_requests))
        if total == 0:
            return Forecasts(finish_s, np.zeros(num_rows))
        requests, types = steps.nonzero()
        counts = steps[requests, types]
        begin = (ends - longest)[types]
        end = begin + counts
        # Joining and leaving rows at each future step; candidate j adds its part from row j + 1 on.
        line = np.maximum(requests - (num_fixed - 1), 0) * (total + 1)
        size = num_rows * (total + 1)
        rows = None if width is None else width[requests, types]
        change = np.bincount(line + begin, rows, size) - np.bincount(line + end, rows, size)
        batch = change.reshape(num_rows, total + 1)[:, :total].cumsum(axis=1)
        if num_rows > 1:
            batch = batch.cumsum(axis=0)
        if rows is not None:
            batch = np.ceil(batch - 1e-6).astype(np.int64)
        done_s = self._step_s(np.arange(num_types).repeat(longest), batch).cumsum(axis=1)
        last = np.zeros(num_requests, np.int64)
        last[requests] = end - 1  # a request's types are ascending: the last one stays
        finish_s = done_s[:, last]
        finish_s[:, ~steps.any(axis=1)] = 0.0
        return Forecasts(finish_s, done_s[:, -1])

    def _step_s(self, types: Ints, batch: Ints) -> Floats:
        if int(batch.max()) <= self._max_batch:
            seconds: Floats = self._flat.take(batch + types * (self._max_batch + 1))
            return seconds
        whole, rest = np.divmod(batch, self._max_batch)
        seconds = whole * self.seconds[types, self._max_batch] + self.seconds[types, rest]
        return seconds
