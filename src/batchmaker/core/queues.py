"""The ready nodes of each cell type, in order: higher ranks first, then as their subgraphs were released.

The nodes of a type are a sorted window in its part of `State.queue`. A batch is taken at the head, newcomers join at
the tail, and followers of what has run are put in near the head, where they belong. So the cost of a batch depends on
its size, not on the number of waiting nodes. There is room on both sides, because a part is at least twice as long as
there can be ready nodes (see `Arena.fit_queues`).

nodes, subgraphs, requests, types, queue and counts are the tables of the arena (see `layout`).
"""

from __future__ import annotations

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled
from batchmaker.core.layout import (
    HEAD_OF_QUEUE,
    KEY,
    KEY_RANK,
    NODE_BITS,
    NODE_MASK,
    NOWHERE,
    NUM_RANKED,
    PIN,
    QUEUE_BEGIN,
    QUEUE_END,
    RANK,
    REQUEST,
    SERIAL,
    SUBGRAPH,
    TAIL_OF_QUEUE,
)


@compiled
def is_before(key: int, rank: int, other: int, other_rank: int) -> bool:
    """Whether one ready node goes before another."""
    return rank > other_rank or (rank == other_rank and key < other)


@compiled
def sort(keys: Ints, ranks: Ints) -> None:
    """Bring ready nodes into order (heapsort), with their ranks. ranks: [keys], or empty if all are equal.

    Also for other numbers, with empty ranks: they ascend then.
    """
    count, ranked = len(keys), len(ranks) > 0
    in_order = True
    for i in range(1, count):
        if is_before(keys[i], ranks[i] if ranked else 0, keys[i - 1], ranks[i - 1] if ranked else 0):
            in_order = False
            break
    if in_order:
        return
    for turn in range(count // 2 + count - 1):  # first make a heap whose top is the last in order, then empty it
        root, size = count // 2 - 1 - turn, count
        if root < 0:
            size = count // 2 + count - 1 - turn
            root = 0
            keys[0], keys[size] = keys[size], keys[0]
            if ranked:
                ranks[0], ranks[size] = ranks[size], ranks[0]
        while 2 * root + 1 < size:
            child = 2 * root + 1
            if child + 1 < size and is_before(
                keys[child], ranks[child] if ranked else 0, keys[child + 1], ranks[child + 1] if ranked else 0
            ):
                child += 1
            if not is_before(keys[root], ranks[root] if ranked else 0, keys[child], ranks[child] if ranked else 0):
                break
            keys[root], keys[child] = keys[child], keys[root]
            if ranked:
                ranks[root], ranks[child] = ranks[child], ranks[root]
            root = child


@compiled
def ranks_of(nodes: Ints, requests: Ints, counts: Ints, keys: Ints) -> Ints:
    """Return the ranks of the requests of these ready nodes, [keys]; empty if all requests in flight have rank 0."""
    ranks = np.empty(len(keys) if counts[NUM_RANKED] > 0 else 0, np.int64)
    for i in range(len(ranks)):
        ranks[i] = requests[RANK, nodes[REQUEST, keys[i] & NODE_MASK]]
    return ranks


@compiled
def put(types: Ints, queue: Ints, type_id: int, keys: Ints, ranks: Ints) -> None:
    """Add ready nodes of one type, which are in order. ranks: [keys], or empty if all are 0."""
    count, head, tail = len(keys), types[HEAD_OF_QUEUE, type_id], types[TAIL_OF_QUEUE, type_id]
    if count == 0:
        return
    begin, end, size = types[QUEUE_BEGIN, type_id], types[QUEUE_END, type_id], tail - head
    ranked = len(ranks) > 0
    is_behind = size == 0 or is_before(
        queue[KEY, tail - 1], queue[KEY_RANK, tail - 1], keys[0], ranks[0] if ranked else 0
    )
    if tail + count > end if is_behind else head - count < begin:  # no room there: the window goes to the middle
        to = begin + (end - begin - size - count) // 2 + (0 if is_behind else count)
        for i in range(size):
            k = i if to < head else size - 1 - i
            queue[KEY, to + k], queue[KEY_RANK, to + k] = queue[KEY, head + k], queue[KEY_RANK, head + k]
        head, tail = to, to + size
    at = tail if is_behind else head - count
    types[HEAD_OF_QUEUE, type_id] = head if is_behind else at
    types[TAIL_OF_QUEUE, type_id] = tail + count if is_behind else tail
    following = tail if is_behind else head
    for i in range(count):
        key, rank = keys[i], ranks[i] if ranked else 0
        while following < tail and is_before(queue[KEY, following], queue[KEY_RANK, following], key, rank):
            queue[KEY, at], queue[KEY_RANK, at] = queue[KEY, following], queue[KEY_RANK, following]
            at, following = at + 1, following + 1
        queue[KEY, at], queue[KEY_RANK, at] = key, rank
        at += 1


@compiled
def _may_run(nodes: Ints, subgraphs: Ints, depth_of: Ints, worker: int, depth: int, key: int) -> bool:
    """Whether a ready node is not pinned to another worker, and has this depth. worker, depth: NOWHERE for any."""
    node = key & NODE_MASK
    pin = subgraphs[PIN, nodes[SUBGRAPH, node]]
    return (worker == NOWHERE or pin in (NOWHERE, worker)) and (depth == NOWHERE or depth_of[node] == depth)


@compiled
def candidates(
    nodes: Ints,
    subgraphs: Ints,
    types: Ints,
    queue: Ints,
    depth_of: Ints,
    type_id: int,
    worker: int,
    depth: int,
    by_age: bool,
    limit: int,
) -> tuple[Ints, Ints]:
    """Return up to `limit` ready nodes that may run (see `_may_run`), in order, and their ranks. They stay ready.

    by_age: those that have been ready longest, in that order; then the ranks mean nothing.
    """
    head, tail = types[HEAD_OF_QUEUE, type_id], types[TAIL_OF_QUEUE, type_id]
    room = tail - head if by_age else min(limit, tail - head)
    keys, ranks = np.empty(room, np.int64), np.empty(room, np.int64)
    count = 0
    for at in range(head, tail):
        if count == room:
            break
        if _may_run(nodes, subgraphs, depth_of, worker, depth, queue[KEY, at]):
            keys[count], ranks[count] = queue[KEY, at], queue[KEY_RANK, at]
            count += 1
    keys, ranks = keys[:count], ranks[:count]
    if by_age:
        sort(keys, ranks[:0])
    return keys[:limit], ranks[:limit]


@compiled
def take(
    nodes: Ints,
    subgraphs: Ints,
    types: Ints,
    queue: Ints,
    depth_of: Ints,
    type_id: int,
    worker: int,
    depth: int,
    by_age: bool,
    keys: Ints,
) -> None:
    """Remove the first of the nodes that `candidates` returns for the same arguments. keys: these, in that order."""
    head, num_left = types[HEAD_OF_QUEUE, type_id], len(keys)
    if num_left == 0:
        return
    last = keys[num_left - 1]
    at = head
    while num_left > 0:  # up to the last of them
        key = queue[KEY, at]
        num_left -= _may_run(nodes, subgraphs, depth_of, worker, depth, key) and (not by_age or key <= last)
        at += 1
    to = at
    for k in range(at - 1, head - 1, -1):  # those between them that stay
        key = queue[KEY, k]
        if not (_may_run(nodes, subgraphs, depth_of, worker, depth, key) and (not by_age or key <= last)):
            to -= 1
            queue[KEY, to], queue[KEY_RANK, to] = key, queue[KEY_RANK, k]
    types[HEAD_OF_QUEUE, type_id] = to


@compiled
def discard(nodes: Ints, types: Ints, queue: Ints, slot: int) -> None:
    """Remove the nodes of a request from all queues."""
    for type_id in range(types.shape[1]):
        to = types[HEAD_OF_QUEUE, type_id]
        for at in range(to, types[TAIL_OF_QUEUE, type_id]):
            if nodes[REQUEST, queue[KEY, at] & NODE_MASK] != slot:
                queue[KEY, to], queue[KEY_RANK, to] = queue[KEY, at], queue[KEY_RANK, at]
                to += 1
        types[TAIL_OF_QUEUE, type_id] = to


@compiled
def order_again(nodes: Ints, subgraphs: Ints, requests: Ints, types: Ints, queue: Ints) -> None:
    """Bring all queues into order again: ranks of requests, or serial numbers of subgraphs, have changed."""
    for type_id in range(types.shape[1]):
        head, tail = types[HEAD_OF_QUEUE, type_id], types[TAIL_OF_QUEUE, type_id]
        for at in range(head, tail):
            node = queue[KEY, at] & NODE_MASK
            queue[KEY, at] = (subgraphs[SERIAL, nodes[SUBGRAPH, node]] << NODE_BITS) | node
            queue[KEY_RANK, at] = requests[RANK, nodes[REQUEST, node]]
        sort(queue[KEY, head:tail], queue[KEY_RANK, head:tail])


@compiled
def ready_types(types: Ints) -> Ints:
    """Return the types that have ready nodes, ascending."""
    ready = np.empty(types.shape[1], np.int64)
    count = 0
    for type_id in range(types.shape[1]):
        if types[TAIL_OF_QUEUE, type_id] > types[HEAD_OF_QUEUE, type_id]:
            ready[count] = type_id
            count += 1
    return ready[:count]


@compiled
def ages_and_ranks(types: Ints, queue: Ints, type_id: int) -> tuple[int, int, int]:
    """Return the key of the node of a type that has been ready longest, the highest rank and the lowest.

    The queue must not be empty.
    """
    head, tail = types[HEAD_OF_QUEUE, type_id], types[TAIL_OF_QUEUE, type_id]
    oldest = queue[KEY, head]
    for at in range(head + 1, tail):
        oldest = min(oldest, queue[KEY, at])
    return oldest, queue[KEY_RANK, head], queue[KEY_RANK, tail - 1]


@compiled
def choose(
    candidates: Ints, ranks: Ints, first: int, waiting: Ints, waiting_ranks: Ints, limit: int, chosen: Ints, of: Ints
) -> tuple[int, int, int]:
    """Take up to `limit` nodes, in order, from two ordered arrays.

    - candidates, ranks: taken from index `first` on. ranks is empty if all are equal; then waiting_ranks means nothing.
    - waiting, waiting_ranks: taken from the beginning.
    - chosen, of: written; the taken keys and their ranks.

    Returns how many were taken in all, the index of the next candidate, and how many of `waiting` were taken.
    """
    count, at = 0, 0
    ranked = len(ranks) > 0
    while count < limit and (first < len(candidates) or at < len(waiting)):
        from_waiting = first == len(candidates)
        if not from_waiting and at < len(waiting):
            from_waiting = waiting[at] < candidates[first]
            if ranked and waiting_ranks[at] != ranks[first]:
                from_waiting = waiting_ranks[at] > ranks[first]
        if from_waiting:
            chosen[count] = waiting[at]
            if ranked:
                of[count] = waiting_ranks[at]
            at += 1
        else:
            chosen[count] = candidates[first]
            if ranked:
                of[count] = ranks[first]
            first += 1
        count += 1
    return count, first, at


@compiled
def joined(keys: Ints, ranks: Ints, ranked: bool, others: Ints, other_ranks: Ints) -> tuple[Ints, Ints]:
    """Merge nodes that have become ready with waiting ones; return all in order, with their ranks.

    - keys, ranks: the new nodes, in any order, which is changed; ranks is empty if `ranked` is False.
    - others, other_ranks: the waiting nodes, in order.
    """
    if len(keys) == 0:  # with empty ranks `choose` would take all ranks for equal
        return others, other_ranks
    sort(keys, ranks)
    if len(others) == 0:
        return keys, ranks
    total = len(keys) + len(others)
    merged, of = np.empty(total, np.int64), np.empty(total if ranked else 0, np.int64)
    choose(keys, ranks, int(np.int64(0)), others, other_ranks, total, merged, of)
    return merged, of
