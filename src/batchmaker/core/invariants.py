"""Checks that the parts of the scheduler's state agree. Written plainly, to be easy to verify; too slow for each turn.

`Scheduler.check_invariants` calls them, in tests and in the analysis of faults.
"""

from __future__ import annotations

import numpy as np

from batchmaker.core.layout import (
    DONE,
    ID,
    LEFT,
    LENGTH_MASK,
    NOBODY,
    NODE_MASK,
    NODES,
    NOWHERE,
    NUM_MEMORIES,
    NUM_ROWS,
    NUM_RUNNING,
    OVER,
    PLACES,
    RANK,
    READY,
    SLOTS,
    STEP_SHIFT,
    STEPS_ON,
)
from batchmaker.core.state import SchedulerState
from batchmaker.errors import InvariantError


def check_state(state: SchedulerState) -> None:
    """Raise InvariantError with the first contradiction that is found."""
    _check_rows(state)
    _check_memories(state)
    _check_lanes(state)
    _check_ready(state)
    _check_workers(state)
    _check_requests(state)
    _check_depths(state)
    _check_frontiers(state)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantError(message)


def _nodes_in_flight(state: SchedulerState) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return the numbers of all nodes in flight and of all stored nodes. Each has one owner, and none is lost."""
    spans = [np.arange(base, base + count) for base, count in state.arena.spans_of(state.slots).tolist()]
    spans += [stored.nodes for stored in state.store.in_use.values()]
    nodes = np.concatenate(spans) if spans else np.empty(0, np.int64)
    _require(len(np.unique(nodes)) == len(nodes), "two requests own the same node number")
    _require(state.arena.num_used(NODES) == len(nodes), "node numbers have leaked")
    return nodes


def _check_rows(state: SchedulerState) -> None:
    """Every row in use has exactly one owner. No free row has an owner. No finished node keeps an unread row."""
    arena = state.arena
    nodes = _nodes_in_flight(state)
    owners = nodes[arena.row[nodes] != NOWHERE]
    for pool in state.tables.pools:
        types = [entry.cell.type_id for entry in state.types if entry.pool is pool]
        mine = owners[np.isin(arena.type[arena.subgraph[owners]], types)]
        rows = arena.row[mine]
        _require(len(np.unique(rows)) == len(rows), "two nodes own the same row")
        free = arena.free_rows_of(pool.number)
        num_used = int(arena.pools[NUM_ROWS, pool.number]) - len(free)
        _require(len(rows) == num_used, f"{num_used} rows are in use, {len(rows)} have an owner")
        _require(not np.isin(rows, free).any(), "a row is owned and free at once")
    unused = (arena.uses[owners] == 0) & (arena.held[owners] == 0) & (arena.state[owners] == DONE)
    _require(not unused.any(), "a finished node without readers holds a row")
    _require(not (arena.uses[nodes] < 0).any(), "a node was read more often than it has readers")


def _check_memories(state: SchedulerState) -> None:
    """What a node reads as a memory has a row from when it has run until the reader has, or the last step of its run.

    No step after the reader is in it.
    """
    arena = state.arena
    if not state.plan_rows or not len(arena.reach):
        return
    alive = [slot for slot in state.slots if arena.is_alive(slot)]
    spans = [np.arange(base, base + count) for base, count in arena.spans_of(alive).tolist()]
    for node in np.concatenate(spans).tolist() if spans else ():
        mine = arena.subgraph[node]
        end = int(arena.end[mine])
        if arena.state[end - 1 if end else node] == DONE or arena.open_ended[mine] == OVER:
            continue
        for port in range(int(arena.types[NUM_MEMORIES, arena.type[mine]])):
            reach = int(arena.reach[port, node])
            read = arena.source[port, node] + (reach >> STEP_SHIFT) * np.arange(reach & LENGTH_MASK)
            own = end > 0 and arena.source[port, node] == arena.head[mine]
            _require(not own or not len(read) or read[-1] == node - 1, "a step's own memory ends elsewhere")
            _require(bool((arena.uses[read] > 0).all()), "a memory was given back before it was read")
            done = read[[_is_done(state, one) for one in read.tolist()]]
            _require(own or bool((arena.row[done] != NOWHERE).all()), "a memory that has been computed has no row")


def _is_done(state: SchedulerState, node: int) -> bool:
    end = int(state.arena.end[state.arena.subgraph[node]])
    return bool(state.arena.state[end - 1 if end else node] == DONE)


def _check_lanes(state: SchedulerState) -> None:
    """Every chain that has a lane is the occupant of this lane. If no request is in flight, all lanes are empty."""
    arena = state.arena
    for chain in _subgraphs_in_flight(state):
        if arena.lane[chain] != NOWHERE:
            lanes = arena.occupants(int(arena.lane_worker[chain]), int(arena.type[chain]))
            occupant = int(lanes[arena.lane[chain]])
            _require(occupant == chain, f"chain {chain} sits in a lane of chain {occupant}")
    if not state.slots:
        busy = np.flatnonzero(arena.occupant != NOBODY)
        _require(len(busy) == 0, f"lanes {busy.tolist()} are left over")


def _subgraphs_in_flight(state: SchedulerState) -> list[int]:
    extents = [extent for slot in state.slots for extent in state.own_extents(slot)]
    return [mine for e in extents for mine in range(e.first_subgraph, e.first_subgraph + e.num_subgraphs)]


def _check_ready(state: SchedulerState) -> None:
    """Queued nodes belong to living requests, wait for no other node, are in the queue once, and are in order."""
    arena = state.arena
    for entry in state.types:
        keys = arena.ready_keys(entry.cell.type_id)
        ranks = arena.requests[RANK, arena.request[keys & NODE_MASK]]
        in_order = (np.diff(ranks) < 0) | ((np.diff(ranks) == 0) & (np.diff(keys) > 0))
        _require(bool(in_order.all()), f"the queue of {entry.cell.name!r} is out of order")
        nodes = keys & NODE_MASK
        subgraphs = arena.subgraph[nodes]
        slots = arena.request[nodes].tolist()
        _require(
            all(arena.is_alive(slot) for slot in slots),
            "a dead request's node is ready",
        )
        _require(not arena.external[subgraphs].any(), "a ready node's subgraph waits for another")
        _require(bool((arena.type[subgraphs] == entry.cell.type_id).all()), "a node is in another type's queue")
        single = arena.end[subgraphs] == 0
        _require(not arena.pending[nodes[single]].any(), "a ready node waits for another node")
        _require(bool((arena.state[nodes[single]] == READY).all()), "a node in the queue is not marked ready")


def _check_workers(state: SchedulerState) -> None:
    """The counts of steps are right. A subgraph is pinned exactly while it has steps on a worker."""
    arena = state.arena
    steps = [0] * state.num_workers
    running = [0] * len(state.types)
    in_flight: dict[int, int] = {}
    pins: dict[int, int] = {}
    for task in state.tasks.values():
        worker, num_left = task.run.worker, task.run.num_steps - task.num_finished
        steps[worker] += num_left
        running[task.run.type_id] += num_left
        for subgraph in arena.subgraph[task.unfinished].tolist():
            in_flight[subgraph] = in_flight.get(subgraph, 0) + 1
            _require(pins.setdefault(subgraph, worker) == worker, "a subgraph runs on two workers")
    noted = arena.workers[STEPS_ON].tolist()
    _require(steps == noted, f"workers hold {steps} steps, the state says {noted}")
    _require(running == arena.types[NUM_RUNNING].tolist(), "running steps per type are miscounted")
    for subgraph in _subgraphs_in_flight(state):
        _require(arena.in_flight[subgraph] == in_flight.get(subgraph, 0), "steps in flight are miscounted")
        _require(arena.pin[subgraph] == pins.get(subgraph, NOWHERE), "pinned without a step on a worker, or not")


def _check_requests(state: SchedulerState) -> None:
    """Each request in flight is listed, and its number of units left is right."""
    arena = state.arena
    _require(arena.num_used(SLOTS) == len(state.slots), "request slots have leaked")
    _require(
        all(arena.requests[ID, slot] == one for one, slot in state.requests.items()), "a request is listed wrongly"
    )
    alive = [slot for slot in state.slots if arena.is_alive(slot)]
    _require(sorted(state.living) == alive, "a living request is not listed, or a dead one is")
    places = np.zeros(len(state.types), np.int64)
    for slot in state.slots:
        num_left = 0
        for base, count in arena.spans_of((slot,)).tolist():
            nodes = np.arange(base, base + count)
            ends = arena.end[arena.subgraph[nodes]]
            units = nodes[(ends == 0) | (nodes + 1 == ends)]
            num_left += int(np.count_nonzero(arena.state[units] != DONE))
            np.add.at(places, arena.type[arena.subgraph[units]], 1)
        noted = int(arena.requests[LEFT, slot])
        _require(num_left == noted, f"request {state.id_of(slot)} has {num_left} units left, not {noted}")
    _require(places.tolist() == arena.types[PLACES].tolist(), "places in the queues are miscounted")


def _check_depths(state: SchedulerState) -> None:
    """The depths left by type are the sums of those by request. Ended requests have none."""
    if state.depths is None:
        return
    by_type, by_slot = state.depths.left, state.depths.left_of_slot
    _require(bool((by_type == by_slot.sum(axis=2)).all()), "depths left by type and by request differ")
    alive = sorted(state.living)
    _require(not np.delete(by_slot, alive, axis=2).any(), "depths are left of a request that has ended")
    _require(not (by_slot < 0).any(), "more nodes were submitted than there are")


def _check_frontiers(state: SchedulerState) -> None:
    """No more nodes are ready than independent, and nothing is left of ended requests."""
    if state.frontiers is None or not state.frontiers.is_kept:
        return
    alive = state.arena.spans_of(sorted(state.living)).tolist()
    num_left = sum(int(state.frontiers.left[base : base + count].sum()) for base, count in alive)
    _require(num_left == np.count_nonzero(state.frontiers.left), "a request that has ended is in a frontier")
    for type_id, entry in enumerate(state.types):
        independent = state.frontiers.independent(type_id)
        ready = state.arena.num_ready(type_id)
        _require(ready <= independent, f"more nodes of {entry.cell.name!r} are ready than independent")
    _require(num_left > 0 or not state.frontiers.counts.any(), "a frontier is left of nothing")
