"""What `auto` decides for one model, for the compiled loop of `CompiledCells`: by the policy's own functions."""

from __future__ import annotations

import numpy as np

from batchmaker.compiled import compiled
from batchmaker.lab.simulator.loop_tables import (
    CHANGES,
    FIRST,
    HAS_RANKED,
    IN_FLIGHT,
    LAST,
    NOW_S,
    RANKED_S,
    REJECTED,
    Ids,
    LoopTables,
    Policy,
    Watched,
)
from batchmaker.policies.auto import AT_ONCE, LOOKED_AT, are_hopeless, num_of_line, see_types_at_once
from batchmaker.policies.type_order import count_chains, type_order


@compiled
def who_begins(loop: LoopTables, watched: Watched, policy: Policy) -> Ids:
    """Return the slots of those who begin now, as AutoPolicy.admit."""
    numbers, auto, times, now_s = loop.numbers, policy.auto, policy.times, loop.seconds[NOW_S]
    line, in_flight = loop.line[numbers[FIRST] : numbers[LAST]], loop.members[: numbers[IN_FLIGHT]]
    num_waiting = len(line)
    if num_waiting == 0:
        return line
    if len(in_flight) > 0:
        see_types_at_once(
            in_flight[:LOOKED_AT], watched.left, watched.done, watched.width, watched.model, auto.at_once
        )  # fmt: skip
    if numbers[CHANGES] == numbers[REJECTED]:
        return line[:0]
    all_begin = auto.at_once[0] > AT_ONCE
    if not all_begin and not auto.has_deadlines:
        line = line[: max(auto.cap - len(in_flight), 0)]
    if len(line) == 0:
        return line
    if auto.has_deadlines and not auto.ignores:
        hopeless = are_hopeless(
            line, watched.left, watched.done, watched.width, watched.is_open, watched.deadline_s, watched.arrived_s,
            auto.stops, auto.lengths, times.single_s, now_s, True,
        )  # fmt: skip
        line = np.concatenate((line[~hopeless], line[hopeless]))
    num = len(line)
    if not all_begin:
        num = num_of_line(
            line, in_flight, num_waiting, auto.cap, watched.left, watched.done, watched.width, watched.is_open,
            watched.deadline_s, now_s, times.seconds, auto.lengths,
        )  # fmt: skip
    numbers[REJECTED] = -1 if num > 0 or auto.has_learnt else numbers[CHANGES]
    return line[:num].copy()


@compiled
def order_of(loop: LoopTables, watched: Watched, policy: Policy, ready: Ids) -> Ids:
    """Return the ready types in the order of AutoPolicy.rank. Ask also where fewer than two are ready."""
    numbers, seconds, auto, now_s = loop.numbers, loop.seconds, policy.auto, loop.seconds[NOW_S]
    passed_s = now_s - seconds[RANKED_S]
    seconds[RANKED_S] = now_s
    if len(ready) < 2:
        if numbers[HAS_RANKED]:
            auto.finishing[:] = 0
            auto.debt_s[:] = 0.0
            numbers[HAS_RANKED] = 0
        return ready
    numbers[HAS_RANKED] = 1
    in_flight = loop.members[: numbers[IN_FLIGHT]]
    count_chains(in_flight, watched.left, watched.width, auto.independent)
    return type_order(
        ready, auto.num_ready, auto.independent, auto.max_batch, auto.type_model, auto.worth, in_flight, watched.left,
        watched.width, watched.is_open, watched.deadline_s, now_s, passed_s, policy.times.single_s, auto.finishing,
        auto.debt_s,
    )  # fmt: skip
