"""What follows when requests end, as compiled loops: their rows, lanes and numbers are given back.

A *dying* request has ended while a worker still had steps of it. Its numbers and rows are freed when no worker has any.
"""

from __future__ import annotations

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled, compiled_merged, compiled_within
from batchmaker.core import extents
from batchmaker.core.addresses import State, state_at
from batchmaker.core.layout import (
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
from batchmaker.core.progress import free_rows
from batchmaker.core.queues import discard
from batchmaker.core.sequence_store import store_kept


@compiled
def end_those_done(requests: Ints, slots: Ints) -> Ints:
    """End those of these requests that are alive, may get no more nodes, and have no work left. Returns their slots."""
    finished = np.empty(len(slots), np.int64)
    count = 0
    for slot in slots:
        if requests[ALIVE, slot] and not requests[OPEN, slot] and requests[LEFT, slot] <= 0:
            requests[ALIVE, slot] = 0
            finished[count] = slot
            count += 1
    return finished[:count]


@compiled_within
def _is_on_worker(requests: Ints, columns: Ints, subgraphs: Ints, slot: int) -> bool:
    """Whether a worker has steps of a request."""
    extent = requests[FIRST, slot]
    while extent != NOWHERE:
        first = columns[FIRST_SUBGRAPH, extent]
        for mine in range(first, first + columns[NUM_SUBGRAPHS, extent]):
            if subgraphs[IN_FLIGHT, mine] > 0:
                return True
        extent = columns[NEXT, extent]
    return False


@compiled_within
def _leave_lanes(requests: Ints, columns: Ints, subgraphs: Ints, lanes: Ints, occupant: Ints, slot: int) -> None:
    extent = requests[FIRST, slot]
    while extent != NOWHERE:
        first = columns[FIRST_SUBGRAPH, extent]
        for mine in range(first, first + columns[NUM_SUBGRAPHS, extent]):
            lane, worker = subgraphs[LANE, mine], subgraphs[LANE_WORKER, mine]
            if lane != NOWHERE:
                occupant[lanes[LANES_BEGIN, worker, subgraphs[TYPE, mine]] + lane] = NOBODY
                subgraphs[LANE, mine] = subgraphs[LANE_WORKER, mine] = NOWHERE
        extent = columns[NEXT, extent]


@compiled_within
def _free_rows_of(
    nodes: Ints, subgraphs: Ints, types: Ints, pools: Ints, rows: Ints, requests: Ints, columns: Ints, slot: int
) -> None:
    extent = requests[FIRST, slot]
    while extent != NOWHERE:
        base, size = columns[BASE, extent], columns[NUM_NODES, extent]
        owners = np.empty(size, np.int64)
        count = 0
        for node in range(base, base + size):
            if nodes[ROW, node] != NOWHERE:
                owners[count] = node
                count += 1
        free_rows(nodes, subgraphs, types, pools, rows, owners[:count])
        extent = columns[NEXT, extent]


@compiled_merged
def _forget(state: State, slot: int) -> None:
    """Give back all that an ended request still owns. No worker has a step of it."""
    nodes, subgraphs, types, requests = state.nodes, state.subgraphs, state.types, state.requests
    columns, free, counts = state.extents, state.free, state.counts
    if requests[OWNS, slot]:
        _free_rows_of(nodes, subgraphs, types, state.pools, state.free_rows, requests, columns, slot)
    extent = requests[FIRST, slot]
    while extent != NOWHERE:
        first, size = columns[FIRST_SUBGRAPH, extent], columns[NUM_SUBGRAPHS, extent]
        for mine in range(first, first + size):
            types[PLACES, subgraphs[TYPE, mine]] -= 1 if subgraphs[END, mine] > 0 else subgraphs[SIZE, mine]
        extents.release(free, counts, NODES, nodes[FIRST_EDGE], columns[BASE, extent], columns[NUM_NODES, extent])
        extents.release(free, counts, SUBGRAPHS, subgraphs[HEAD], first, size)
        extents.release(
            free, counts, EDGES, state.consumer, columns[EXTENT_FIRST_EDGE, extent], columns[EXTENT_NUM_EDGES, extent]
        )
        following = columns[NEXT, extent]
        extents.release(free, counts, EXTENTS, columns[NEXT], extent, extents.ONE)
        extent = following
    counts[NUM_RANKED] -= requests[RANK, slot] != 0
    requests[RANK, slot] = requests[IN_USE, slot] = 0
    extents.release(free, counts, SLOTS, requests[NEXT_SLOT], slot, extents.ONE)


@compiled_within
def leave_all(state: State, slots: Ints) -> tuple[Ints, Ints]:
    """Forget requests that were answered; what their sequences keep is stored.

    Returns those of which a worker has steps, which are dying; and what `store_kept` returns, for whose numbers there
    must be room.
    """
    stored = store_kept(state, slots)
    dying = np.empty(len(slots), np.int64)
    count = 0
    for slot in slots:
        if state.requests[OWNS, slot] and _is_on_worker(state.requests, state.extents, state.subgraphs, slot):
            dying[count] = slot  # it has steps of loops there, submitted ahead
            count += 1
        else:
            _forget(state, slot)
    return dying[:count], stored


@compiled
def leave(addresses: Ints, slots: Ints) -> tuple[Ints, Ints]:
    """As `leave_all`, for tables by their addresses."""
    return leave_all(state_at(addresses), slots)


@compiled
def kill(nodes: Ints, requests: Ints, types: Ints, queue: Ints, slot: int) -> None:
    """End a request early: nothing more of it is submitted. It is dying."""
    requests[ALIVE, slot] = 0
    requests[OWNS, slot] = 1
    discard(nodes, types, queue, slot)


@compiled
def bury(addresses: Ints, dying: Ints) -> Ints:
    """Forget the dying requests of which no worker has a step any more. Returns the others."""
    state = state_at(addresses)
    still = np.empty(len(dying), np.int64)
    count = 0
    for slot in dying:
        if _is_on_worker(state.requests, state.extents, state.subgraphs, slot):
            still[count] = slot
            count += 1
        else:
            _leave_lanes(state.requests, state.extents, state.subgraphs, state.lanes, state.occupant, slot)
            _forget(state, slot)
    return still[:count]
