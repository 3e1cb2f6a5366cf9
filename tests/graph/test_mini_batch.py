"""Requests merged into a closed mini-batch, and the fewest batches that it could take."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_graphs import fewest_batches, graphs, sources_of

from batchmaker.errors import InvalidRequestError
from batchmaker.graph.bound import lower_bound
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.depth import depths_of
from batchmaker.graph.mini_batch import MiniBatch, merged, mini_batch, unrolled
from batchmaker.graph.recorder import Recorder
from batchmaker.graph.spec import CellType, ValueSpec
from batchmaker.graph.values import HostValues
from batchmaker.graph.work import work_of

NUMBER = ValueSpec((), "int64")
ENCODER = CellType(0, "encoder", (NUMBER,) * 2, (NUMBER,), (1, 4))
JOIN = CellType(1, "join", (NUMBER,) * 2, (NUMBER,), (1, 4))
OUTPUT = CellType(2, "output", (NUMBER,), (NUMBER,), (1, 4))


def translator() -> CellGraph:
    """A chain of three steps, an output of each, the last two joined, and a chain over the outputs from the join."""
    recorder = Recorder()
    (last,) = recorder.run(ENCODER, [HostValues(np.zeros(3, np.int64), 3, NUMBER)], None)
    outputs = recorder.map(OUTPUT, [last.steps])[0]
    (joined,) = recorder.node(JOIN, [outputs[1], outputs[2]])
    recorder.run(ENCODER, [outputs], [joined])
    return recorder.take()


def longest_ways(given_batch: MiniBatch) -> list[int]:
    """The most nodes of each type on any way through the graph, by walking all ways."""
    types, sources = given_batch.types.tolist(), sources_of(given_batch)

    def ways(node: int) -> list[list[int]]:
        return [[*way, node] for source in sources[node] for way in ways(source)] or [[node]]

    every = [[types[i] for i in way] for node in range(len(types)) for way in ways(node)]
    return [max(way.count(kind) for way in every) for kind in range(given_batch.num_types)]


def test_a_run_is_as_many_nodes_each_fed_by_the_one_before_it():
    made = unrolled(translator(), 3)
    assert made.types.tolist() == [0, 0, 0, 2, 2, 2, 1, 0, 0, 0]
    assert sources_of(made) == [[], [0], [1], [0], [1], [2], [4, 5], [3, 6], [4, 7], [5, 8]]


def test_depths_and_longest_ways_are_those_that_the_scheduler_works_with():
    graph = translator()
    made, work = unrolled(graph, 3), work_of(graph)
    assert made.depths.tolist() == depths_of(graph, np.empty(0, np.int64)).tolist()
    assert lower_bound(made) == work.steps.sum()


def test_requests_that_are_merged_keep_their_edges_and_wait_for_nobody_else():
    one, other = mini_batch([0, 1], [[], [0]], 2), mini_batch([1, 0, 0], [[], [0], [0, 1]], 2)
    both = merged([one, other])
    assert both.types.tolist() == [0, 1, 1, 0, 0]
    assert sources_of(both) == [[], [0], [], [2], [2, 3]]
    assert both.own_depths.tolist() == [*one.own_depths, *other.own_depths]


def test_a_node_fed_twice_by_another_waits_for_it_once():
    made = mini_batch([0, 1], [[], [0, 0, 0]], 2)
    assert sources_of(made) == [[], [0]]


@pytest.mark.parametrize(
    ("types", "sources", "says"),
    [
        ([0, 0], [[1], [0]], "node 0 is fed by node 1.*without cycles"),
        ([0], [[0]], "node 0 is fed by node 0"),
        ([0, 0], [[], [-1]], "node 1 is fed by node -1"),
        ([0, 2], [[], []], "node 1 is of type 2, expected one from 0 to 1"),
        ([0, 1], [[]], "types of 2 nodes and the sources of 1"),
    ],
)
def test_a_graph_with_a_cycle_or_of_unknown_types_is_refused(types, sources, says):
    with pytest.raises(InvalidRequestError, match=says):
        mini_batch(types, sources, 2)


@given(graphs())
def test_turned_twice_is_the_same(made: MiniBatch):
    twice = made.turned.turned
    assert twice.types.tolist() == made.types.tolist()
    assert sources_of(twice) == sources_of(made)
    assert twice.own_depths.tolist() == made.own_depths.tolist()


@given(graphs())
def test_the_lower_bound_adds_up_the_longest_ways_and_nothing_is_below_it(made: MiniBatch):
    bound = lower_bound(made)
    assert bound == sum(longest_ways(made))
    assert bound == lower_bound(made.turned)
    assert bound <= fewest_batches(made)


@given(graphs(), st.integers(1, 3))
def test_with_a_largest_batch_a_type_needs_as_many_as_its_nodes_fill(made: MiniBatch, most: int):
    counts = np.bincount(made.types, minlength=made.num_types).tolist()
    expected = [max(way, -(-count // most)) for way, count in zip(longest_ways(made), counts, strict=True)]
    assert lower_bound(made, most) == sum(expected)


def test_nodes_that_cannot_be_batched_add_one_each():
    made = mini_batch([0, 0, 0, 1], [[], [], [], [0, 1, 2]], 2)
    assert lower_bound(made) == 2
    assert lower_bound(made, alone=frozenset({0})) == 4
