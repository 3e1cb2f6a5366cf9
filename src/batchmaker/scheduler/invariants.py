"""Checks that the scheduler's books balance. Written plainly, to be obviously right; not for the hot path."""

from __future__ import annotations

import numpy as np

from batchmaker.errors import InvariantError
from batchmaker.scheduler.arena import DONE, NOWHERE, READY
from batchmaker.scheduler.books import Books
from batchmaker.scheduler.lanes import NOBODY
from batchmaker.scheduler.ready import nodes_of


def check_books(books: Books) -> None:
    """Raise InvariantError naming the first thing that does not balance."""
    _check_rows(books)
    _check_lanes(books)
    _check_ready(books)
    _check_workers(books)
    _check_requests(books)
    _check_depths(books)
    _check_frontiers(books)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantError(message)


def _nodes_in_flight(books: Books) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    spans = [np.arange(e.base, e.base + e.num_nodes) for book in books.by_slot.values() for e in book.extents]
    spans += [shelf.nodes for shelf in books.shelves.in_use.values()]
    nodes = np.concatenate(spans) if spans else np.empty(0, np.int64)
    _require(len(np.unique(nodes)) == len(nodes), "two requests own the same node number")
    _require(books.arena.nodes.num_used == len(nodes), "node numbers have leaked")
    return nodes


def _check_rows(books: Books) -> None:
    """Every row in use has exactly one owner, and no free row has one."""
    arena = books.arena
    nodes = _nodes_in_flight(books)
    owners = nodes[arena.row[nodes] != NOWHERE]
    for pool in books.tables.pools:
        types = [book.cell.type_id for book in books.types if book.pool is pool]
        mine = owners[np.isin(arena.type[arena.subgraph[owners]], types)]
        rows = arena.row[mine]
        _require(len(np.unique(rows)) == len(rows), "two nodes own the same row")
        _require(len(rows) == pool.num_used, f"{pool.num_used} rows are in use, {len(rows)} have an owner")
        _require(not np.isin(rows, pool.free_rows()).any(), "a row is owned and free at once")
    unused = (arena.uses[owners] == 0) & (arena.held[owners] == 0) & (arena.state[owners] == DONE)
    _require(not unused.any(), "a finished node without readers holds a row")
    _require(not (arena.uses[nodes] < 0).any(), "a node was read more often than it has readers")


def _check_lanes(books: Books) -> None:
    """Every chain that sits in a lane is its occupant; dead occupants are only lanes a chain has just left."""
    arena = books.arena
    spans = [e for book in books.by_slot.values() for e in book.extents]
    for extent in spans:
        for chain in range(extent.first_subgraph, extent.first_subgraph + extent.num_subgraphs):
            if arena.lane[chain] != NOWHERE:
                lanes = books.lane_maps[(int(arena.lane_worker[chain]), int(arena.type[chain]))]  # type: ignore[index]
                occupant = int(lanes.occupant[arena.lane[chain]])
                _require(occupant == chain, f"chain {chain} sits in a lane of chain {occupant}")
    if not books.by_slot:
        for (worker, type_id), lanes in books.lane_maps.items():
            busy = np.flatnonzero(lanes.occupant != NOBODY)
            _require(len(busy) == 0, f"worker {worker}, type {type_id}: lanes {busy.tolist()} are left over")


def _check_ready(books: Books) -> None:
    """Ready nodes belong to living requests, wait for nothing and are queued once, in order."""
    arena = books.arena
    for book in books.types:
        keys = book.ready.keys()
        ranks = books.priorities.of(keys)
        ranks = np.zeros(len(keys), np.int64) if ranks is None else ranks
        in_order = (np.diff(ranks) < 0) | ((np.diff(ranks) == 0) & (np.diff(keys) > 0))
        _require(bool(in_order.all()), f"the queue of {book.cell.name!r} is out of order")
        nodes = nodes_of(keys)
        subgraphs = arena.subgraph[nodes]
        slots = arena.request[nodes].tolist()
        _require(
            all(s in books.by_slot and books.by_slot[s].alive for s in slots),
            "a dead request's node is ready",
        )
        _require(not arena.external[subgraphs].any(), "a ready node's subgraph waits for another")
        _require(bool((arena.type[subgraphs] == book.cell.type_id).all()), "a node is in another type's queue")
        single = arena.end[subgraphs] == 0
        _require(not arena.pending[nodes[single]].any(), "a ready node waits for another node")
        _require(bool((arena.state[nodes[single]] == READY).all()), "a node in the queue is not marked ready")


def _check_workers(books: Books) -> None:
    """Counts of steps, and pins exactly while a subgraph has steps on a worker."""
    arena = books.arena
    steps = [0] * len(books.worker_steps)
    running = [0] * len(books.types)
    in_flight: dict[int, int] = {}
    pins: dict[int, int] = {}
    for task in books.tasks.values():
        steps[task.worker] += task.num_steps - task.num_finished
        running[task.type_id] += task.num_steps - task.num_finished
        for subgraph in arena.subgraph[task.unfinished].tolist():
            in_flight[subgraph] = in_flight.get(subgraph, 0) + 1
            _require(pins.setdefault(subgraph, task.worker) == task.worker, "a subgraph runs on two workers")
    _require(steps == books.worker_steps, f"workers hold {steps} steps, the books say {books.worker_steps}")
    _require(running == [book.num_running for book in books.types], "running steps per type are miscounted")
    for book in books.by_slot.values():
        for extent in book.extents:
            for subgraph in range(extent.first_subgraph, extent.first_subgraph + extent.num_subgraphs):
                _require(arena.in_flight[subgraph] == in_flight.get(subgraph, 0), "steps in flight are miscounted")
                _require(
                    arena.pin[subgraph] == pins.get(subgraph, NOWHERE),
                    "pinned without a step on a worker, or not",
                )


def _check_requests(books: Books) -> None:
    arena = books.arena
    _require(books.slots.num_used == len(books.by_slot), "request slots have leaked")
    for book in books.by_slot.values():
        _require(not book.alive or books.requests.get(book.request) is book, "a living request is not listed")
        left = 0
        for extent in book.extents:
            nodes = np.arange(extent.base, extent.base + extent.num_nodes)
            ends = arena.end[arena.subgraph[nodes]]
            units = nodes[(ends == 0) | (nodes + 1 == ends)]
            left += int(np.count_nonzero(arena.state[units] != DONE))
        _require(
            left == books.left[book.slot],
            f"request {book.request} has {left} units left, not {books.left[book.slot]}",
        )
    _require(len(books.requests) == sum(b.alive for b in books.by_slot.values()), "requests are miscounted")


def _check_depths(books: Books) -> None:
    """What is left by type is what is left by request, and nothing once no request is."""
    if books.depths is None:
        return
    left, by_slot = books.depths.left, books.depths.left_of_slot
    _require(bool((left == by_slot.sum(axis=2)).all()), "depths left by type and by request differ")
    alive = [book.slot for book in books.by_slot.values() if book.alive]
    _require(not np.delete(by_slot, alive, axis=2).any(), "depths are left of a request that has ended")
    _require(not (by_slot < 0).any(), "more nodes were submitted than there are")


def _check_frontiers(books: Books) -> None:
    """Every node that is ready waits for none of its type; nothing is left of requests that have ended."""
    if books.frontiers is None or not books.frontiers.kept:
        return
    alive = [extent for book in books.by_slot.values() if book.alive for extent in book.extents]
    left = sum(int(books.frontiers.left[e.base : e.base + e.num_nodes].sum()) for e in alive)
    _require(left == np.count_nonzero(books.frontiers.left), "a request that has ended is in a frontier")
    for type_id, book in enumerate(books.types):
        independent = books.frontiers.independent(type_id)
        _require(len(book.ready) <= independent, f"more nodes of {book.cell.name!r} are ready than independent")
    _require(left > 0 or not books.frontiers.counts.any(), "a frontier is left of nothing")
