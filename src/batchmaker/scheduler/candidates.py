"""Compiled loops that keep ready nodes in order while `find_steps` forms the steps of a task.

The order is: higher ranks first, then smaller keys.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled
from batchmaker.scheduler.queues import Keys, sort

Ids = NDArray[np.int64]


@compiled
def choose(
    candidates: Keys, ranks: Ids, first: int, waiting: Keys, waiting_ranks: Ids, limit: int, chosen: Keys, of: Ids
) -> tuple[int, int, int]:
    """Take up to `limit` nodes, in order, from two ordered arrays.

    - candidates, ranks: taken from index `first` on. ranks is empty if all are equal; then waiting_ranks means nothing.
    - waiting, waiting_ranks: taken from the beginning.
    - chosen, of: written; the taken keys and their ranks.

    Returns how many were taken in all, the index of the next candidate, and how many of `waiting` were taken.
    """
    count, at = 0, 0
    ranked = len(ranks) > 0
    while count < limit and (first < len(candidates) or at < len(waiting)):
        from_waiting = first == len(candidates)
        if not from_waiting and at < len(waiting):
            from_waiting = waiting[at] < candidates[first]
            if ranked and waiting_ranks[at] != ranks[first]:
                from_waiting = waiting_ranks[at] > ranks[first]
        if from_waiting:
            chosen[count] = waiting[at]
            if ranked:
                of[count] = waiting_ranks[at]
            at += 1
        else:
            chosen[count] = candidates[first]
            if ranked:
                of[count] = ranks[first]
            first += 1
        count += 1
    return count, first, at


@compiled
def joined(keys: Keys, ranks: Ids, ranked: bool, others: Keys, other_ranks: Ids) -> tuple[Keys, Ids]:
    """Merge nodes that have become ready with waiting ones; return all in order, with their ranks.

    - keys, ranks: the new nodes, in any order, which is changed; ranks is empty if `ranked` is False.
    - others, other_ranks: the waiting nodes, in order.
    """
    if len(keys) == 0:  # with empty ranks `choose` would take all ranks for equal
        return others, other_ranks
    sort(keys, ranks)
    if len(others) == 0:
        return keys, ranks
    total = len(keys) + len(others)
    merged, of = np.empty(total, np.int64), np.empty(total if ranked else 0, np.int64)
    choose(keys, ranks, int(np.int64(0)), others, other_ranks, total, merged, of)
    return merged, of
