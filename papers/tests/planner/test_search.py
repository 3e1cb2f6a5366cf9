"""The fewest batches inside a cell, against trying every sequence of types."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmaker_papers.planner.search import Schedule, fewest_batches

Graph = tuple[list[int], list[list[int]]]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Up to nine nodes of three types, each reading some of those before it."""
    size = draw(st.integers(0, 9))
    types = [draw(st.integers(0, 2)) for _ in range(size)]
    sources = [draw(st.lists(st.integers(0, node - 1), max_size=3)) if node else [] for node in range(size)]
    return types, sources


def fewest_of_all(types: list[int], sources: list[list[int]]) -> int:
    """The least number of batches when every type is tried at every step."""

    @cache
    def least(done: frozenset[int]) -> int:
        if len(done) == len(types):
            return 0
        ready = [n for n in range(len(types)) if n not in done and done.issuperset(sources[n])]
        return 1 + min(least(done | {n for n in ready if types[n] == kind}) for kind in {types[n] for n in ready})

    return least(frozenset())


def assert_can_run(schedule: Schedule, types: list[int], sources: list[list[int]]) -> None:
    """Every node runs once, after what it reads, with nodes of its own type."""
    done: set[int] = set()
    for batch in schedule.batches:
        assert len({types[node] for node in batch}) == 1
        assert all(done.issuperset(sources[node]) for node in batch)
        assert done.isdisjoint(batch)
        done.update(batch)
    assert done == set(range(len(types)))


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_no_sequence_of_types_has_fewer_batches(graph):
    schedule = fewest_batches(*graph)
    assert_can_run(schedule, *graph)
    assert schedule.proven
    assert len(schedule.batches) == fewest_of_all(*graph)


@settings(max_examples=50, deadline=None)
@given(graphs())
def test_without_time_to_search_the_rule_of_thumb_still_runs_everything(graph):
    schedule = fewest_batches(*graph, most_states=0)
    assert_can_run(schedule, *graph)
    assert len(schedule.batches) >= fewest_of_all(*graph)


def test_a_type_waits_for_its_last_node_when_that_saves_a_batch():
    types = [0, 1, 0, 1]  # a b, and a chain b -> a -> b would need more if the first b ran too early
    sources: list[list[int]] = [[], [], [], [2]]
    assert fewest_batches(types, sources).batches == ((0, 2), (1, 3))


@pytest.mark.parametrize("size", [0, 1])
def test_next_to_nothing_needs_next_to_no_batches(size):
    assert len(fewest_batches([0] * size, [[]] * size).batches) == size


def test_a_graph_too_large_to_search_is_batched_and_not_called_proven():
    types = [(7 * node) % 5 for node in range(120)]
    sources = [[other for other in (node - 3, node - 7, node // 2) if 0 <= other < node] for node in range(120)]
    schedule = fewest_batches(types, sources, most_states=50)
    assert_can_run(schedule, types, sources)
    assert not schedule.proven
