"""The fewest batches that any policy could need."""

from __future__ import annotations

import numpy as np

from batchmaker.graph.mini_batch import MiniBatch


def lower_bound(mini_batch: MiniBatch, max_batch: int | None = None, alone: frozenset[int] = frozenset()) -> int:
    """Return a number of batches that no schedule of the mini-batch can be below (ED-Batch, Equation 2).

    Each type needs as many batches as it has nodes on some path. max_batch: rows of the largest batch, so that a type
    also needs as many as its nodes fill; None for no limit. alone: types that cannot be batched, one for each node.
    """
    counts = np.bincount(mini_batch.types, minlength=mini_batch.num_types)
    longest = np.zeros(mini_batch.num_types, np.int64)
    np.maximum.at(longest, mini_batch.types, mini_batch.own_depths + 1)
    if max_batch is not None:
        longest = np.maximum(longest, -(-counts // max_batch))
    if alone:
        longest[list(alone)] = counts[list(alone)]
    return int(longest.sum())
