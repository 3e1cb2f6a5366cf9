"""How policies rank cell types, as data: the number of an order, and a few numbers of each ready type.

The scheduler's `turn` ranks by `ranked`, and so does `CellPolicy.rank`, for whatever shows its ready nodes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled, number

ALGORITHM_1, LOWEST_DEPTH, MEAN_DEPTH, MEAN_DEPTH_LEFT, READY_SHARE, LONGEST_READY = map(number, range(6))
"""
- ALGORITHM_1: the three criteria of BatchMaker's Algorithm 1 (a full batch, a type that is not running, any), then the
  higher priority.
- LOWEST_DEPTH, MEAN_DEPTH, MEAN_DEPTH_LEFT: the least deep first; see DepthView.
- READY_SHARE: full batches, then the larger share of the frontier that is ready, then more ready nodes (ED-Batch,
  section 2.3).
- LONGEST_READY: full batches, then the type of which a node has been ready longest.

Of types that an order ranks equal the lower id goes first.
"""


@compiled
def ranked(
    order: int, ready: Ints, num_ready: Ints, max_batch: Ints, measure: NDArray[np.float64], priority: Ints
) -> Ints:
    """Return the ready types, best first.

    ready: [types] ids, ascending. num_ready, max_batch, measure, priority: [types] of each, in this order. measure:
    what the order looks at besides: steps on workers, a depth, the size of the frontier, or since when one is ready.
    """
    keys = np.zeros((3, len(ready)))
    for i in range(len(ready)):
        is_full = num_ready[i] >= max_batch[i]
        if order == ALGORITHM_1:
            keys[0, i] = 0.0 if is_full else 2.0 if measure[i] > 0 else 1.0
            keys[1, i] = -priority[i]
        elif order == READY_SHARE:
            keys[0, i] = 0.0 if is_full else 1.0
            keys[1, i], keys[2, i] = -num_ready[i] / measure[i], -num_ready[i]
        elif order == LONGEST_READY:
            keys[0, i] = 0.0 if is_full else 1.0
            keys[1, i] = measure[i]
        else:
            keys[0, i] = measure[i]
    places = np.arange(len(ready))
    for i in range(1, len(ready)):
        k = i
        while k > 0:
            before, field = places[k - 1], 0
            while field < 2 and keys[field, before] == keys[field, i]:
                field += 1
            if keys[field, before] <= keys[field, i]:
                break
            places[k] = before
            k -= 1
        places[k] = i
    return ready[places]
