"""Checks that the parts of the scheduler's state agree. Written plainly, to be easy to verify; too slow for each turn.

`Scheduler.check_invariants` calls them, in tests and in the analysis of faults.
"""

from __future__ import annotations

import numpy as np

from batchmaker.errors import InvariantError
from batchmaker.scheduler.arena import DONE, NOWHERE, READY
from batchmaker.scheduler.lanes import NOBODY
from batchmaker.scheduler.ready import nodes_of
from batchmaker.scheduler.state import SchedulerState


def check_state(state: SchedulerState) -> None:
    """Raise InvariantError with the first contradiction that is found."""
    _check_rows(state)
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
    spans = [np.arange(e.base, e.base + e.num_nodes) for entry in state.by_slot.values() for e in entry.extents]
    spans += [stored.nodes for stored in state.store.in_use.values()]
    nodes = np.concatenate(spans) if spans else np.empty(0, np.int64)
    _require(len(np.unique(nodes)) == len(nodes), "two requests own the same node number")
    _require(state.arena.nodes.num_used == len(nodes), "node numbers have leaked")
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
        _require(len(rows) == pool.num_used, f"{pool.num_used} rows are in use, {len(rows)} have an owner")
        _require(not np.isin(rows, pool.free_rows()).any(), "a row is owned and free at once")
    unused = (arena.uses[owners] == 0) & (arena.held[owners] == 0) & (arena.state[owners] == DONE)
    _require(not unused.any(), "a finished node without readers holds a row")
    _require(not (arena.uses[nodes] < 0).any(), "a node was read more often than it has readers")


def _check_lanes(state: SchedulerState) -> None:
    """Every chain that has a lane is the occupant of this lane. If no request is in flight, all lanes are empty."""
    arena = state.arena
    spans = [e for entry in state.by_slot.values() for e in entry.extents]
    for extent in spans:
        for chain in range(extent.first_subgraph, extent.first_subgraph + extent.num_subgraphs):
            if arena.lane[chain] != NOWHERE:
                lanes = state.lane_maps[(int(arena.lane_worker[chain]), int(arena.type[chain]))]  # type: ignore[index]
                occupant = int(lanes.occupant[arena.lane[chain]])
                _require(occupant == chain, f"chain {chain} sits in a lane of chain {occupant}")
    if not state.by_slot:
        for (worker, type_id), lanes in state.lane_maps.items():
            busy = np.flatnonzero(lanes.occupant != NOBODY)
            _require(len(busy) == 0, f"worker {worker}, type {type_id}: lanes {busy.tolist()} are left over")


def _check_ready(state: SchedulerState) -> None:
    """Queued nodes belong to living requests, wait for no other node, are in the queue once, and are in order."""
    arena = state.arena
    for entry in state.types:
        keys = entry.ready.keys()
        ranks = state.priorities.of(keys)
        ranks = np.zeros(len(keys), np.int64) if ranks is None else ranks
        in_order = (np.diff(ranks) < 0) | ((np.diff(ranks) == 0) & (np.diff(keys) > 0))
        _require(bool(in_order.all()), f"the queue of {entry.cell.name!r} is out of order")
        nodes = nodes_of(keys)
        subgraphs = arena.subgraph[nodes]
        slots = arena.request[nodes].tolist()
        _require(
            all(s in state.by_slot and state.by_slot[s].alive for s in slots),
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
    steps = [0] * len(state.worker_steps)
    running = [0] * len(state.types)
    in_flight: dict[int, int] = {}
    pins: dict[int, int] = {}
    for task in state.tasks.values():
        steps[task.worker] += task.num_steps - task.num_finished
        running[task.type_id] += task.num_steps - task.num_finished
        for subgraph in arena.subgraph[task.unfinished].tolist():
            in_flight[subgraph] = in_flight.get(subgraph, 0) + 1
            _require(pins.setdefault(subgraph, task.worker) == task.worker, "a subgraph runs on two workers")
    _require(steps == state.worker_steps, f"workers hold {steps} steps, the state says {state.worker_steps}")
    _require(running == [entry.num_running for entry in state.types], "running steps per type are miscounted")
    for entry in state.by_slot.values():
        for extent in entry.extents:
            for subgraph in range(extent.first_subgraph, extent.first_subgraph + extent.num_subgraphs):
                _require(arena.in_flight[subgraph] == in_flight.get(subgraph, 0), "steps in flight are miscounted")
                _require(
                    arena.pin[subgraph] == pins.get(subgraph, NOWHERE),
                    "pinned without a step on a worker, or not",
                )


def _check_requests(state: SchedulerState) -> None:
    """Each request in flight is listed, and its number of units left is right."""
    arena = state.arena
    _require(state.slots.num_used == len(state.by_slot), "request slots have leaked")
    for entry in state.by_slot.values():
        _require(not entry.alive or state.requests.get(entry.request) is entry, "a living request is not listed")
        left = 0
        for extent in entry.extents:
            nodes = np.arange(extent.base, extent.base + extent.num_nodes)
            ends = arena.end[arena.subgraph[nodes]]
            units = nodes[(ends == 0) | (nodes + 1 == ends)]
            left += int(np.count_nonzero(arena.state[units] != DONE))
        _require(
            left == state.left[entry.slot],
            f"request {entry.request} has {left} units left, not {state.left[entry.slot]}",
        )
    _require(len(state.requests) == sum(b.alive for b in state.by_slot.values()), "requests are miscounted")


def _check_depths(state: SchedulerState) -> None:
    """The depths left by type are the sums of those by request. Ended requests have none."""
    if state.depths is None:
        return
    left, by_slot = state.depths.left, state.depths.left_of_slot
    _require(bool((left == by_slot.sum(axis=2)).all()), "depths left by type and by request differ")
    alive = [entry.slot for entry in state.by_slot.values() if entry.alive]
    _require(not np.delete(by_slot, alive, axis=2).any(), "depths are left of a request that has ended")
    _require(not (by_slot < 0).any(), "more nodes were submitted than there are")


def _check_frontiers(state: SchedulerState) -> None:
    """No more nodes are ready than independent, and nothing is left of ended requests."""
    if state.frontiers is None or not state.frontiers.kept:
        return
    alive = [extent for entry in state.by_slot.values() if entry.alive for extent in entry.extents]
    left = sum(int(state.frontiers.left[e.base : e.base + e.num_nodes].sum()) for e in alive)
    _require(left == np.count_nonzero(state.frontiers.left), "a request that has ended is in a frontier")
    for type_id, entry in enumerate(state.types):
        independent = state.frontiers.independent(type_id)
        _require(len(entry.ready) <= independent, f"more nodes of {entry.cell.name!r} are ready than independent")
    _require(left > 0 or not state.frontiers.counts.any(), "a frontier is left of nothing")
