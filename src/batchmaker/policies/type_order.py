"""Which type of cell goes first under `auto`: its rules 2 to 4 (see auto.py), compiled.

The order is that of models and frontiers. A type that is owed a call goes before it: requests that lack nothing but one
call of a type run up a debt while they wait for it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled
from batchmaker.policies.requests import Slots

Ids = NDArray[np.int64]
Seconds = NDArray[np.float64]

PRICES: Final = 5.0
"""How often what a call costs all others is what is owed before it is made."""


@compiled
def _by_frontiers(ready: Ids, num_ready: Ids, independent: Ids, max_batch: Ids, type_model: Ids, worth: Seconds) -> Ids:
    """Return the ready types in the order of rules 2 and 3.

    That is by the worth of the model, full batches, the ready share of the frontier (of full ones the smallest), ready
    nodes, and the type's id. For the arguments see `type_order`.
    """
    order = ready.copy()
    for i in range(1, len(order)):
        k = i
        while k > 0:
            one, other = order[k], order[k - 1]
            gain = worth[type_model[one]] - worth[type_model[other]]
            if gain == 0.0:
                gain = num_ready[one] / independent[one] - num_ready[other] / independent[other]
                full = num_ready[one] >= max_batch[one]
                if full != (num_ready[other] >= max_batch[other]):
                    gain = 1.0 if full else -1.0
                elif full:
                    gain = -gain
            if gain == 0.0:
                gain = 1.0 * (num_ready[one] - num_ready[other])
            if gain <= 0.0:
                break
            order[k], order[k - 1] = other, one
            k -= 1
    return order


@compiled
def count_chains(in_flight: Slots, left: Ids, width: Seconds, independent: Ids) -> bool:
    """Count for each type the requests in flight that have nodes of it left, or 1 where none has: [types], written.

    Returns whether that is what `Frontiers` counts, without an account of every node: it is where the nodes of a type
    follow each other in each request (width 1), so that one of them at most waits for no other of its type. Where not,
    the counts mean nothing.
    """
    independent[:] = 0
    for i in range(len(in_flight)):
        for type_id in range(len(independent)):
            if left[in_flight[i], type_id] > 0:
                if width[in_flight[i], type_id] > 1.0:
                    return False
                independent[type_id] += 1
    for type_id in range(len(independent)):
        independent[type_id] = max(independent[type_id], 1)
    return True


@compiled
def _count_finishing(
    in_flight: Slots, left: Ids, width: Seconds, is_open: NDArray[np.bool_], deadline_s: Seconds, now_s: float,
    until_s: float, finishing: Ids,
) -> Ids:  # fmt: skip
    """Count for each type the requests that one call of it would finish: [types], in `finishing`.

    Returns how many of these have a deadline between now and `until_s`. For the other arguments see `type_order`.
    """
    finishing[:] = 0
    hurried = np.zeros(len(finishing), np.int64)
    for i in range(len(in_flight)):
        slot = in_flight[i]
        if is_open[slot]:
            continue
        only, num_types = 0, 0
        for type_id in range(left.shape[1]):
            if left[slot, type_id] > 0:
                only = type_id
                num_types += 1
                if num_types > 1:
                    break
        if num_types == 1 and left[slot, only] <= width[slot, only] + 1e-6:
            finishing[only] += 1
            if now_s < deadline_s[slot] < until_s:
                hurried[only] += 1
    return hurried


@compiled
def type_order(
    ready: Ids,
    num_ready: Ids,
    independent: Ids,
    max_batch: Ids,
    type_model: Ids,
    worth: Seconds,
    in_flight: Slots,
    left: Ids,
    width: Seconds,
    is_open: NDArray[np.bool_],
    deadline_s: Seconds,
    now_s: float,
    passed_s: float,
    single_s: Seconds,
    finishing: Ids,
    debt_s: Seconds,
) -> Ids:
    """Return the ready types in the order of rules 2 to 4.

    - ready: type ids. num_ready, independent, max_batch, single_s: [types]; the first two are read for ready types
      only. type_model: [types]; worth: [models].
    - left, width, is_open, deadline_s: see RequestTable. now_s: engine seconds. passed_s: since the last order.
    - finishing: [types] requests that one call of it would finish; debt_s: [types]. Both are those of the last order,
      and written.
    """
    order = _by_frontiers(ready, num_ready, independent, max_batch, type_model, worth)
    longest_s = 0.0
    for type_id in range(len(single_s)):
        debt_s[type_id] = debt_s[type_id] + finishing[type_id] * passed_s if finishing[type_id] else 0.0
        longest_s = max(longest_s, single_s[type_id])
    until_s = now_s + passed_s + longest_s
    hurried = _count_finishing(in_flight, left, width, is_open, deadline_s, now_s, until_s, finishing)
    first, most = -1, 0.0
    for i in range(len(order)):
        type_id = order[i]
        if type_model[type_id] != type_model[order[0]] or finishing[type_id] == 0:
            continue
        costs_s = (len(in_flight) - finishing[type_id]) * single_s[type_id]
        gain = (finishing[type_id] + hurried[type_id]) / max(costs_s, 1e-9)
        if (hurried[type_id] > 0 or debt_s[type_id] >= PRICES * costs_s) and gain > most:
            first, most = i, gain
    if first >= 0:
        owed = order[first]
        for i in range(first, 0, -1):
            order[i] = order[i - 1]
        order[0] = owed
        debt_s[owed] = 0.0
    return order
