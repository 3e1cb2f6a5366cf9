"""What follows when requests end, as compiled loops: their rows, lanes and numbers are given back.

A *dying* request has ended while a worker still had steps of it. Its numbers and rows are freed when no worker has any.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled
from batchmaker.scheduler import extents
from batchmaker.scheduler.arena import State
from batchmaker.scheduler.layout import (
    ALIVE,
    BASE,
    EDGES,
    END,
    EXTENT_FIRST_EDGE,
    EXTENT_NUM_EDGES,
    EXTENTS,
    FIRST,
    FIRST_EDGE,
    FIRST_SUBGRAPH,
    HEAD,
    IN_FLIGHT,
    IN_USE,
    LANE,
    LANE_WORKER,
    LANES_BEGIN,
    LEFT,
    NEXT,
    NEXT_SLOT,
    NOBODY,
    NODES,
    NOWHERE,
    NUM_NODES,
    NUM_RANKED,
    NUM_SUBGRAPHS,
    OPEN,
    OWNS,
    PLACES,
    RANK,
    ROW,
    SIZE,
    SLOTS,
    SUBGRAPHS,
    TYPE,
)
from batchmaker.scheduler.queues import discard
from batchmaker.scheduler.row_release import free_rows

Ids = NDArray[np.int64]


@compiled
def end_those_done(requests: Ids, slots: Ids) -> Ids:
    """End those of these requests that are alive, may get no more nodes, and have no work left. Returns their slots."""
    found = np.empty(len(slots), np.int64)
    count = 0
    for slot in slots:
        if requests[ALIVE, slot] and not requests[OPEN, slot] and requests[LEFT, slot] <= 0:
            requests[ALIVE, slot] = 0
            found[count] = slot
            count += 1
    return found[:count]


@compiled
def _is_on_worker(state: State, slot: int) -> bool:
    """Whether a worker has steps of a request."""
    extent = state.requests[FIRST, slot]
    while extent != NOWHERE:
        first = state.extents[FIRST_SUBGRAPH, extent]
        for mine in range(first, first + state.extents[NUM_SUBGRAPHS, extent]):
            if state.subgraphs[IN_FLIGHT, mine] > 0:
                return True
        extent = state.extents[NEXT, extent]
    return False


@compiled
def _free_rows_of(state: State, slot: int) -> None:
    extent = state.requests[FIRST, slot]
    while extent != NOWHERE:
        base, size = state.extents[BASE, extent], state.extents[NUM_NODES, extent]
        owners = np.empty(size, np.int64)
        count = 0
        for node in range(base, base + size):
            if state.nodes[ROW, node] != NOWHERE:
                owners[count] = node
                count += 1
        free_rows(state.nodes, state.subgraphs, state.types, state.pools, state.free_rows, owners[:count])
        extent = state.extents[NEXT, extent]


@compiled
def _leave_lanes(state: State, slot: int) -> None:
    extent = state.requests[FIRST, slot]
    while extent != NOWHERE:
        first = state.extents[FIRST_SUBGRAPH, extent]
        for mine in range(first, first + state.extents[NUM_SUBGRAPHS, extent]):
            lane, worker = state.subgraphs[LANE, mine], state.subgraphs[LANE_WORKER, mine]
            if lane != NOWHERE:
                state.occupant[state.lanes[LANES_BEGIN, worker, state.subgraphs[TYPE, mine]] + lane] = NOBODY
                state.subgraphs[LANE, mine] = state.subgraphs[LANE_WORKER, mine] = NOWHERE
        extent = state.extents[NEXT, extent]


@compiled
def _forget(state: State, slot: int) -> None:
    """Give back all that an ended request still owns. No worker has a step of it."""
    nodes, subgraphs, requests, free, counts = state.nodes, state.subgraphs, state.requests, state.free, state.counts
    if requests[OWNS, slot]:
        _free_rows_of(state, slot)
    extent = requests[FIRST, slot]
    while extent != NOWHERE:
        first, size = state.extents[FIRST_SUBGRAPH, extent], state.extents[NUM_SUBGRAPHS, extent]
        for mine in range(first, first + size):
            state.types[PLACES, subgraphs[TYPE, mine]] -= 1 if subgraphs[END, mine] > 0 else subgraphs[SIZE, mine]
        extents.release(
            free, counts, NODES, nodes[FIRST_EDGE], state.extents[BASE, extent], state.extents[NUM_NODES, extent]
        )
        extents.release(free, counts, SUBGRAPHS, subgraphs[HEAD], first, size)
        extents.release(
            free, counts, EDGES, state.consumer, state.extents[EXTENT_FIRST_EDGE, extent],
            state.extents[EXTENT_NUM_EDGES, extent],
        )  # fmt: skip
        following = state.extents[NEXT, extent]
        extents.release(free, counts, EXTENTS, state.extents[NEXT], extent, 1)
        extent = following
    counts[NUM_RANKED] -= requests[RANK, slot] != 0
    requests[RANK, slot] = requests[IN_USE, slot] = 0
    extents.release(free, counts, SLOTS, requests[NEXT_SLOT], slot, 1)


@compiled
def leave(state: State, slots: Ids) -> Ids:
    """Forget requests that were answered. Returns those of which a worker has steps: they are dying."""
    dying = np.empty(len(slots), np.int64)
    count = 0
    for slot in slots:
        if state.requests[OWNS, slot] and _is_on_worker(state, slot):  # of loops, submitted ahead
            dying[count] = slot
            count += 1
        else:
            _forget(state, slot)
    return dying[:count]


@compiled
def kill(state: State, slot: int) -> None:
    """End a request early: nothing more of it is submitted. It is dying."""
    state.requests[ALIVE, slot] = 0
    state.requests[OWNS, slot] = 1
    discard(state.nodes, state.types, state.queue, slot)


@compiled
def bury(state: State, dying: Ids) -> Ids:
    """Forget the dying requests of which no worker has a step any more. Returns the others."""
    still = np.empty(len(dying), np.int64)
    count = 0
    for slot in dying:
        if _is_on_worker(state, slot):
            still[count] = slot
            count += 1
        else:
            _leave_lanes(state, slot)
            _forget(state, slot)
    return still[:count]
