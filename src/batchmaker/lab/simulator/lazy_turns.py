"""What `lazy` decides, for the compiled loop of `CompiledCells`: by the policy's own functions."""

from __future__ import annotations

import numpy as np

from batchmaker.arrays import Floats, Ints
from batchmaker.compiled import compiled
from batchmaker.lab.simulator.loop_tables import (
    CHANGES,
    FIRST,
    IN_FLIGHT,
    LAST,
    LEARN,
    MODELS,
    NOW_S,
    REJECTED,
    STALE,
    WHY,
    LoopTables,
    Policy,
)
from batchmaker.policies.joining import NO_TEST
from batchmaker.policies.lazy import fitting, num_joining_of, urgencies
from batchmaker.policies.requests import RequestColumns


@compiled
def who_joins(loop: LoopTables, watched: RequestColumns, policy: Policy) -> Ints:
    """Return the slots of those who begin now, as LazyPolicy.admit. Where it cannot be said yet, WHY is LEARN."""
    numbers, lazy, in_flight = loop.numbers, policy.lazy, loop.members[: loop.numbers[IN_FLIGHT]]
    first, last = numbers[FIRST], numbers[LAST]
    if first == last or numbers[CHANGES] == numbers[REJECTED]:
        return loop.line[:0]
    room = lazy.cap - len(in_flight) if numbers[MODELS] < 2 else lazy.cap * numbers[MODELS]
    candidates = loop.line[first : min(last, first + max(room, 0))]
    if numbers[MODELS] > 1:
        candidates = fitting(watched.model, in_flight, candidates, lazy.cap, numbers[MODELS])
    if len(candidates) > 0 and len(in_flight) > 0 and (lazy.rules.benefit or lazy.rules.slack != NO_TEST):
        if numbers[STALE]:
            numbers[WHY] = LEARN
            return loop.line[:0]
        num = num_joining_of(
            np.concatenate((in_flight, candidates)),
            len(in_flight),
            watched,
            lazy.predictions,
            policy.times.seconds,
            loop.seconds[NOW_S],
            lazy.rules,
        )
        candidates = candidates[:num]
        if num == 0:
            numbers[REJECTED] = numbers[CHANGES]
    return candidates.copy()


@compiled
def urgency_of(loop: LoopTables, watched: RequestColumns, policy: Policy) -> Floats:
    """Return how urgent each model is: the smallest goes first. Nothing where it cannot be said yet; WHY is LEARN."""
    if loop.numbers[STALE] and not policy.lazy.recent:
        loop.numbers[WHY] = LEARN
        return np.empty(0)
    return urgencies(
        loop.members[: loop.numbers[IN_FLIGHT]],
        watched,
        loop.numbers[MODELS],
        policy.lazy.predictions,
        policy.times.seconds,
        policy.lazy.recent,
    )


@compiled
def learn_lengths(loop: LoopTables, watched: RequestColumns, policy: Policy, slots: Ints) -> None:
    """Note the lengths of the runs of requests that are done."""
    lazy, cells, sources = policy.lazy, policy.lazy.predictions.cell, policy.lazy.predictions.source
    for slot in slots:
        for which in range(len(cells)):
            done, source, at = watched.done[slot, cells[which]], sources[which], lazy.num_seen[which]
            if done == 0 or lazy.predictions.fixed[which] > 0:
                continue
            lazy.seen_given[which, at] = watched.left[slot, source] + watched.done[slot, source] if source >= 0 else 0
            lazy.seen_steps[which, at] = done
            lazy.num_seen[which] += 1
            if lazy.num_seen[which] >= lazy.stale_at[which]:
                loop.numbers[STALE] = 1
