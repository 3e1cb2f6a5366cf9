"""Ready nodes stand as they may run: higher ranks first, then lower keys, however they came to be there."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from batchmaker.scheduler.candidates import choose, joined

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
