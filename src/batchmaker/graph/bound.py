"""The number of batches that any policy needs at least."""

from __future__ import annotations

import numpy as np

from batchmaker.graph.mini_batch import MiniBatch


def lower_bound(mini_batch: MiniBatch, max_batch: int | None = None, alone: frozenset[int] = frozenset()) -> int:
    """Return the lower bound of batches for the mini-batch, over all schedules (ED-Batch, Equation 2).

    Each type needs as many batches as it has nodes on some path. max_batch: rows of the largest batch; a type also
    needs enough batches for all its nodes. None for no limit. alone: types that cannot be batched; each of their nodes
    is a batch.
    """
    counts = np.bincount(mini_batch.types, minlength=mini_batch.num_types)
    longest = np.zeros(mini_batch.num_types, np.int64)
    np.maximum.at(longest, mini_batch.types, mini_batch.own_depths + 1)
    if max_batch is not None:
        longest = np.maximum(longest, -(-counts // max_batch))
    if alone:
        longest[list(alone)] = counts[list(alone)]
    return int(longest.sum())
