"""Closed batches of cells: graph batching with the cells, the engine and the loops of cellular batching."""

from __future__ import annotations

from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.errors import OptionError
from batchmaker.policies.base import Admission, CellPolicy, ReadyView
from batchmaker.policies.cellular import BUDGET_MS, MOST_STEPS
from batchmaker.policies.order import ALGORITHM_1


@final
class ClosedPolicy(CellPolicy):
    """Requests begin in batches from one bucket, and nobody joins a batch that runs. Then it is `cellular`.

    So it computes what cellular batching computes, with the same cells in the same engine, and differs only in who
    runs together: the baseline with equal work. It is stronger than padded batches, because a request is answered as
    soon as its own last step is done, and its row is not computed any more.

    max_batch, bucket_width, full_first: as for PaddedPolicy; buckets are by the known number of nodes of a request, and
    served in turn. max_steps, budget_ms: as for CellularPolicy.
    """

    name = "closed"
    order: ClassVar[int] = ALGORITHM_1
    watches_requests: ClassVar[bool] = True

    def __init__(
        self,
        max_batch: int = 64,
        bucket_width: int = 10,
        full_first: bool = False,
        max_steps: int = MOST_STEPS,
        budget_ms: float = BUDGET_MS,
    ) -> None:
        super().__init__(max_steps, budget_ms)
        if max_batch < 1 or bucket_width < 1:
            raise OptionError(f"max_batch and bucket_width must be at least 1, got {max_batch} and {bucket_width}")
        self._max_batch, self._width, self._full_first = max_batch, bucket_width, full_first
        self._next = 0

    @property
    def max_batch(self) -> int:
        """The most requests that begin together."""
        return self._max_batch

    def admit(self, view: ReadyView) -> Admission:
        """Begin the first requests of the next bucket in turn, if no request is in flight."""
        if len(view.requests.in_flight) or not view.num_waiting:
            return Admission(())
        line = view.waiting(view.num_waiting)
        buckets = self._buckets(view, line)
        chosen = line[buckets == self._turn(buckets)][: self._max_batch]
        return Admission(chosen.tolist())

    def _buckets(self, view: ReadyView, line: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the bucket of each request in line; those of several models never share one."""
        table = view.requests
        number = (np.maximum(table.left[line].sum(axis=1), 1) - 1) // self._width
        return np.asarray(number * max(table.num_models, 1) + table.model[line], np.int64)

    def _turn(self, buckets: NDArray[np.int64]) -> int:
        unique, counts = np.unique(buckets, return_counts=True)
        if self._full_first and (counts >= self._max_batch).any():
            unique = unique[counts >= self._max_batch]
        chosen = int(unique[np.searchsorted(unique, self._next) % len(unique)])
        self._next = chosen + 1
        return chosen
