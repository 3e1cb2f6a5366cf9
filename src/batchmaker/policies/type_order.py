"""Which type of cell goes first under `auto` (see auto.py), compiled.

The order is that of models and frontiers. A type that is owed a call goes before it: requests that lack nothing but one
call of a type run up a debt while they wait for it, until it is what the call costs all others. Who rents until the
price is reached, and then buys, pays at most twice what was needed, without knowing the future.
"""

from __future__ import annotations

import numpy as np

from batchmaker.arrays import Floats, Ints
from batchmaker.compiled import compiled
from batchmaker.policies.beginning import NOTHING_S, AutoTables, are_hopeless
from batchmaker.policies.joining import drained, last_types
from batchmaker.policies.requests import RequestColumns
from batchmaker.policies.run_lengths import run_steps_left


@compiled
def _by_frontiers(ready: Ints, tables: AutoTables) -> Ints:
    """Return the ready types in the order of models and frontiers.

    That is by the worth of the model, full batches, the ready share of the frontier (of full ones the smallest), who
    has waited longest where that is known, ready nodes, and the type's id.
    """
    num_ready, independent, since = tables.num_ready, tables.independent, tables.since
    max_batch, type_model, worth = tables.max_batch, tables.type_model, tables.worth
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
                gain = 1.0 * (since[other] - since[one])
            if gain == 0.0:
                gain = 1.0 * (num_ready[one] - num_ready[other])
            if gain <= 0.0:
                break
            order[k], order[k - 1] = other, one
            k -= 1
    return order


@compiled
def count_chains(ready: Ints, in_flight: Ints, left: Ints, width: Floats, independent: Ints) -> bool:
    """Count for each ready type the requests in flight that have nodes of it left, or 1: `independent`, written.

    Returns whether that is what `Frontiers` counts, without an account of every node: it is where the nodes of a type
    follow each other in each request (width 1), so that one of them at most waits for no other of its type. Where not,
    the counts mean nothing.
    """
    for type_id in ready:
        independent[type_id] = 0
    for slot in in_flight:
        for type_id in ready:
            if left[slot, type_id] > 0:
                if width[slot, type_id] > 1.0:
                    return False
                independent[type_id] += 1
    for type_id in ready:
        independent[type_id] = max(independent[type_id], 1)
    return True


@compiled
def _count_finishing(in_flight: Ints, requests: RequestColumns, now_s: float, until_s: float, finishing: Ints) -> Ints:
    """Count for each type the requests that one call of it would finish: [types], in `finishing`.

    Returns how many of these have a deadline between now and `until_s`.
    """
    left, width, deadline_s = requests.left, requests.width, requests.deadline_s
    finishing[:] = 0
    hurried = np.zeros(len(finishing), np.int64)
    for i in range(len(in_flight)):
        slot = in_flight[i]
        if requests.is_open[slot]:
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
def most_answered_rps(steps: Ints, width: Floats, seconds: Floats) -> float:
    """Return how many of these requests are answered per second at the best moment, if they alone go on (Smith's rule).

    steps, width, seconds: see `num_joining`.
    """
    finish_s = np.sort(drained(steps, width, len(steps), seconds, last_types(steps))[4])
    most = 0.0
    for i in range(len(finish_s)):
        most = max(most, (i + 1) / max(finish_s[i], NOTHING_S))
    return most


@compiled
def value_models(in_flight: Ints, requests: RequestColumns, tables: AutoTables, seconds: Floats, now_s: float) -> None:
    """Write what each model is worth: most requests answered per second if it alone went on (Smith's rule).

    Who cannot be in time counts only where no request of the model can; such a model is worth less than all others.
    """
    hopeless, models = are_hopeless(in_flight, requests, tables, seconds, now_s), requests.model[in_flight]
    for model in range(len(tables.worth)):
        mine = models == model
        timely = mine & ~hopeless
        counted = in_flight[timely if timely.any() else mine]
        steps = run_steps_left(counted, requests.left, requests.done, requests.width, requests.is_open, tables.lengths)
        rps = most_answered_rps(steps, requests.width[counted], seconds)
        tables.worth[model] = rps if timely.any() or rps == 0.0 else -1.0 / rps


@compiled
def type_order(
    ready: Ints,
    num_waiting: int,
    in_flight: Ints,
    requests: RequestColumns,
    tables: AutoTables,
    seconds: Floats,
    now_s: float,
) -> Ints:
    """Return the ready types in the order in which they go.

    - ready: type ids. Of `tables`, num_ready, independent and since are read for these only. num_waiting: not in
      flight.
    - tables.since: [types] a number that is lower the longer a node has been ready; 0 where no request decides by
      values. Where some do, all that is known of them is ready, and a frontier tells nothing. Those at the same place
      stay together if nobody overtakes.
    - seconds: [types, max_batch + 1] of a step. now_s: engine seconds.
    - tables.finishing: [types] requests that one call of it would finish, 0 where nobody waited for another type;
      debt_s: [types]; ranked_s: [1] when this was asked. All are those of the last time, and written.
    """
    order = _by_frontiers(ready, tables)
    finishing, debt_s, longest_s = tables.finishing, tables.debt_s, 0.0
    passed_s = now_s - tables.ranked_s[0]
    tables.ranked_s[0] = now_s
    for type_id in range(len(debt_s)):
        debt_s[type_id] = debt_s[type_id] + finishing[type_id] * passed_s if finishing[type_id] > 0 else 0.0
        longest_s = max(longest_s, seconds[type_id, 1])
    until_s = now_s + passed_s + longest_s
    hurried = _count_finishing(in_flight, requests, now_s, until_s, finishing)
    first, most = -1, 0.0
    for i in range(len(order)):
        type_id = order[i]
        if tables.type_model[type_id] != tables.type_model[order[0]] or finishing[type_id] == 0:
            continue
        call_s = seconds[type_id, min(tables.num_ready[type_id], tables.max_batch[type_id])]
        costs_s = (len(in_flight) + num_waiting - finishing[type_id]) * call_s
        gain = (finishing[type_id] + hurried[type_id]) / max(costs_s, 1e-9)
        if (hurried[type_id] > 0 or debt_s[type_id] >= costs_s) and gain > most:
            first, most = i, gain
    if first >= 0:
        owed = order[first]
        for i in range(first, 0, -1):
            order[i] = order[i - 1]
        order[0] = owed
        debt_s[owed] = 0.0
    return order
