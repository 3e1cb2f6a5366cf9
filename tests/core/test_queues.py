"""Ready nodes stand as they may run: higher ranks first, then as they were released; nothing is lost on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scheduler_harness import cell_type

from batchmaker.core.arena import Arena
from batchmaker.core.layout import (
    NODE_BITS,
    NODE_MASK,
    NOWHERE,
    NUM_RANKED,
    PIN,
    PLACES,
    RANK,
    REQUEST,
    SERIAL,
    SUBGRAPH,
)
from batchmaker.core.priorities import Priorities
from batchmaker.core.queues import (
    ages_and_ranks,
    candidates,
    choose,
    discard,
    joined,
    order_again,
    put,
    ranks_of,
    sort,
    take,
)

TYPE = 3
ANY_DEPTH: NDArray[np.int64] = np.zeros(64, np.int64)
RANKS = st.lists(st.integers(-1, 2), min_size=1, max_size=40)
"""Of each node: the rank of its request."""


class Queue:
    """The queue of one type, whose nodes are requests and subgraphs of their own, numbered in the order of release."""

    def __init__(self, ranks: list[int]) -> None:
        self.arena = arena = Arena()
        for type_id in range(TYPE + 2):
            arena.add_type(cell_type(type_id, f"cell {type_id}"), 0)
        arena.types[PLACES] = len(ranks)
        arena.fit_queues()
        self.nodes = np.arange(len(ranks))
        arena.nodes[REQUEST, self.nodes] = arena.nodes[SUBGRAPH, self.nodes] = self.nodes
        arena.subgraphs[SERIAL, self.nodes] = self.nodes
        arena.subgraphs[PIN, self.nodes] = NOWHERE
        arena.requests[RANK, self.nodes] = ranks
        arena.counts[NUM_RANKED] = np.count_nonzero(ranks)
        self.ranks = ranks

    def put(self, nodes: NDArray[np.int64]) -> None:
        keys = (nodes << NODE_BITS) | nodes
        ranks = ranks_of(self.arena.nodes, self.arena.requests, self.arena.counts, keys)
        sort(keys, ranks)
        put(self.arena.types, self.arena.queue, TYPE, keys, ranks)

    def _selection(self, worker: int, by_age: bool) -> tuple[Any, ...]:
        a = self.arena
        return a.nodes, a.subgraphs, a.types, a.queue, ANY_DEPTH, TYPE, worker, NOWHERE, by_age

    def take(self, limit: int, worker: int = NOWHERE, *, by_age: bool = False, of: int | None = None) -> list[int]:
        """Take `limit` of the first `of` candidates."""
        keys, ranks = candidates(*self._selection(worker, by_age), limit if of is None else of)
        assert by_age or ranks.tolist() == [self.ranks[key & NODE_MASK] for key in keys.tolist()]
        take(*self._selection(worker, by_age), keys[:limit])
        return [int(key & NODE_MASK) for key in keys[:limit]]

    def waiting(self) -> list[int]:
        return [int(key & NODE_MASK) for key in self.arena.ready_keys(TYPE)]

    def in_order(self, nodes: Any) -> list[int]:
        return sorted(nodes, key=lambda node: (-self.ranks[node], node))


@given(ranks=RANKS, data=st.data())
def test_the_queue_gives_back_what_it_took_in_order_of_rank(ranks: list[int], data: Any) -> None:
    queue = Queue(ranks)
    shuffled = data.draw(st.permutations(queue.nodes.tolist()))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ranks)), max_size=3)))
    for begin, end in zip([0, *cuts], [*cuts, len(ranks)], strict=True):
        queue.put(np.array(shuffled[begin:end], np.int64))
    gone = set(data.draw(st.lists(st.sampled_from(shuffled), max_size=5)))
    for slot in gone:
        discard(queue.arena.nodes, queue.arena.types, queue.arena.queue, slot)
    left = queue.in_order(set(shuffled) - gone)
    while left:
        assert queue.waiting() == left
        taken = queue.take(data.draw(st.integers(1, 7)), of=data.draw(st.integers(7, 50)))
        assert taken == left[: len(taken)]
        left = left[len(taken) :]
        if data.draw(st.booleans()) and len(taken) > 1:  # some come back
            queue.put(np.array(taken[1:], np.int64))
            left = queue.in_order([*taken[1:], *left])
    assert not queue.waiting()


@given(
    ranks=RANKS,
    limit=st.integers(1, 9),
    more=st.integers(0, 9),
    barred=st.sets(st.integers(0, 39)),
    by_age=st.booleans(),
)
def test_what_is_pinned_to_another_worker_stays_and_by_age_ranks_do_not_count(
    ranks: list[int], limit: int, more: int, barred: set[int], by_age: bool
) -> None:
    queue = Queue(ranks)
    queue.put(queue.nodes)
    assert ages_and_ranks(queue.arena.types, queue.arena.queue, TYPE) == (0, max(ranks), min(ranks))
    queue.arena.subgraphs[PIN, [node for node in barred if node < len(ranks)]] = 1
    allowed = [node for node in queue.nodes.tolist() if node not in barred]
    wanted = allowed if by_age else queue.in_order(allowed)
    assert queue.take(limit, worker=0, by_age=by_age, of=limit + more) == wanted[:limit]
    assert queue.waiting() == queue.in_order(set(queue.nodes.tolist()) - set(wanted[:limit]))


@given(before=RANKS, data=st.data())
def test_after_ranks_and_numbers_have_changed_the_queue_is_in_the_new_order(before: list[int], data: Any) -> None:
    queue = Queue(before)
    queue.put(queue.nodes)
    queue.ranks = data.draw(st.lists(st.integers(-1, 2), min_size=len(before), max_size=len(before)))
    arena = queue.arena
    arena.requests[RANK, queue.nodes] = queue.ranks
    arena.subgraphs[SERIAL, queue.nodes] = 3 * queue.nodes + 7
    order_again(arena.nodes, arena.subgraphs, arena.requests, arena.types, arena.queue)
    assert queue.waiting() == queue.in_order(queue.nodes.tolist())
    assert (arena.ready_keys(TYPE) >> NODE_BITS).tolist() == [3 * node + 7 for node in queue.waiting()]


@given(st.lists(st.integers(0, 20), max_size=60))
def test_numbers_without_ranks_ascend(numbers: list[int]) -> None:
    given, none = np.array(numbers, np.int64), np.empty(0, np.int64)
    sort(given, none)
    assert given.tolist() == sorted(numbers)


def test_queues_grow_and_keep_what_waits() -> None:
    queue = Queue([0, 1, 0])
    queue.put(queue.nodes)
    for places in (40, 1000, 5000):
        queue.arena.types[PLACES, [TYPE - 1, TYPE]] = places
        queue.arena.fit_queues()
        assert queue.waiting() == [1, 0, 2]
        assert queue.take(1, of=3) == [1]
        queue.put(np.array([1]))


def test_requests_of_the_usual_priority_alone_are_looked_up_by_nobody() -> None:
    arena, key = Arena(), np.array([3], np.int64)
    priorities = Priorities(arena)
    priorities.enter(3, 0)
    assert not priorities.differ
    assert len(ranks_of(arena.nodes, arena.requests, arena.counts, key)) == 0
    arena.nodes[REQUEST, 3] = 4
    priorities.enter(4, 4)
    assert priorities.differ
    assert ranks_of(arena.nodes, arena.requests, arena.counts, key).tolist() == [16]


# --- the nodes that become ready while a task is formed ---------------------------------------------------------------

NODES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), max_size=12, unique_by=lambda node: node[1])
"""Rank and key of each."""

Node = tuple[int, int]


def arrays(nodes: list[Node], ranked: bool) -> tuple[np.ndarray, np.ndarray]:
    return np.array([key for _, key in nodes], np.int64), np.array([rank for rank, _ in nodes if ranked], np.int64)


def as_they_may_run(nodes: list[Node], ranked: bool) -> list[Node]:
    return sorted(nodes, key=lambda node: (-node[0] if ranked else 0, node[1]))


@given(nodes=NODES, num_waiting=st.integers(0, 12), ranked=st.booleans())
@example(nodes=[(1, 5), (0, 3)], num_waiting=2, ranked=True)
def test_nodes_that_have_become_ready_are_joined_to_those_that_wait(
    nodes: list[Node], num_waiting: int, ranked: bool
) -> None:
    waiting, ready = as_they_may_run(nodes[:num_waiting], ranked), nodes[num_waiting:]
    keys, ranks = joined(*arrays(ready, ranked), ranked, *arrays(waiting, ranked))
    wanted = as_they_may_run(nodes, ranked)
    assert keys.tolist() == [key for _, key in wanted]
    assert ranks.tolist() == [rank for rank, _ in wanted if ranked]


@given(nodes=NODES, num_waiting=st.integers(0, 12), ranked=st.booleans(), limit=st.integers(0, 14))
def test_a_batch_takes_the_first_of_those_that_wait_and_of_the_candidates(
    nodes: list[Node], num_waiting: int, ranked: bool, limit: int
) -> None:
    waiting, candidates = as_they_may_run(nodes[:num_waiting], ranked), as_they_may_run(nodes[num_waiting:], ranked)
    chosen, of = np.full(limit, -1), np.full(limit, -1)
    count, following, taken = choose(*arrays(candidates, ranked), 0, *arrays(waiting, ranked), limit, chosen, of)
    wanted = as_they_may_run(nodes, ranked)[:limit]
    assert count == following + taken == len(wanted)
    assert chosen[:count].tolist() == [key for _, key in wanted]
    if ranked and candidates:  # without candidates nobody's ranks are looked at
        assert of[:count].tolist() == [rank for rank, _ in wanted]
