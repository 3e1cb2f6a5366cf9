"""Who reads whom among admitted nodes: the compiled loops against what they are to do, edge by edge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from batchmaker.core.edges import count_edges, enter, feed, write_edges
from batchmaker.core.layout import (
    DONE,
    END,
    EXTERNAL,
    FIRST_EDGE,
    NODE_FIELDS,
    NUM_EDGES,
    PENDING,
    REQUEST,
    STATE,
    SUBGRAPH,
    SUBGRAPH_FIELDS,
    TYPE,
    USES,
)

Tables = tuple[NDArray[Any], NDArray[Any]]
LENGTHS = np.array([3, 2])
NEW = np.array([10, 11, 12, 20, 21])


@pytest.fixture
def tables() -> Tables:
    """Node 5 is from before and is under way. 10 and 11 are a run; 12, 20 and 21 are single, the last two together."""
    of_nodes, of_subgraphs = np.full((NODE_FIELDS, 32), 7), np.zeros((SUBGRAPH_FIELDS, 8), np.int64)
    enter(NEW, LENGTHS, np.array([3, 4]), of_nodes)
    of_nodes[STATE, 5] = 0
    of_nodes[SUBGRAPH, [5, 10, 11, 12, 20, 21]] = [0, 1, 1, 2, 3, 3]
    of_subgraphs[END, 1] = 12
    of_subgraphs[TYPE, [1, 2, 3]] = [0, 1, 2]
    return of_nodes, of_subgraphs


def test_new_nodes_belong_to_the_slot_of_their_graph_and_begin_without_anything(tables: Tables) -> None:
    of_nodes, _ = tables
    assert of_nodes[REQUEST, NEW].tolist() == [3, 3, 3, 4, 4]
    assert not of_nodes[np.ix_([STATE, PENDING, USES, NUM_EDGES], NEW)].any()


def test_inputs_are_found_where_the_type_that_computes_them_keeps_that_output(tables: Tables) -> None:
    of_nodes, of_subgraphs = tables
    source, source_table = np.zeros((2, 2, 32), np.int64)
    fed = np.zeros((3, 2), np.bool_)
    edges = feed(
        np.array([[-1, 0], [2, 1]]), np.array([10, 20]), np.array([[0, 1], [1, 0]], np.int16), np.array([12, 21]),
        np.array([[100, 101], [110, 111], [120, 121]]), fed, of_nodes, of_subgraphs, source, source_table,
    )  # fmt: skip
    assert edges.tolist() == [[20, 12, 21], [21, 12, 21]]  # port by port; the first input of 12 is data
    assert source_table[0, 21] == 121
    assert source_table[1, [12, 21]].tolist() == [111, 120]
    assert np.argwhere(fed).tolist() == [[1, 1], [2, 0], [2, 1]]


def test_edges_from_a_run_count_from_its_last_step_and_edges_from_earlier_nodes_are_told_of(tables: Tables) -> None:
    of_nodes, of_subgraphs = tables
    edges = np.array([[10, 20, 5, 10], [12, 21, 20, 12]])
    place, consumer = np.full(32, -1), np.zeros(8, np.int64)
    producers, per_graph, waiting = count_edges(edges, NEW, LENGTHS, place, of_nodes, of_subgraphs, False)
    write_edges(edges, producers, np.array([0, 4]), NEW, LENGTHS, of_nodes, consumer)
    assert (per_graph.tolist(), waiting.tolist()) == ([2, 1], [[5], [20]])
    assert of_nodes[USES, [10, 11, 20]].tolist() == [2, 0, 1]
    assert of_nodes[NUM_EDGES, [10, 11, 20]].tolist() == [0, 2, 1]
    assert (of_nodes[PENDING, 21], of_subgraphs[EXTERNAL, [2, 3]].tolist()) == (1, [2, 1])
    assert consumer[of_nodes[FIRST_EDGE, 11] :][:2].tolist() == [12, 12]
    assert consumer[of_nodes[FIRST_EDGE, 20]] == 21
    assert (place == -1).all()


def test_what_is_done_already_is_waited_for_by_nobody(tables: Tables) -> None:
    of_nodes, of_subgraphs = tables
    of_nodes[STATE, 5] = DONE
    _, _, waiting = count_edges(np.array([[5], [20]]), NEW, LENGTHS, np.full(32, -1), of_nodes, of_subgraphs, False)
    assert waiting.shape == (2, 0)
    assert not of_subgraphs[EXTERNAL].any()


def test_single_nodes_of_one_type_wait_until_those_they_read_are_submitted_where_these_are_followed(
    tables: Tables,
) -> None:
    of_nodes, of_subgraphs = tables
    for own_type_follows, pending, external in ((False, 1, 2), (True, 2, 1)):
        of_nodes[PENDING], of_subgraphs[EXTERNAL], of_subgraphs[TYPE, 3] = 0, 0, of_subgraphs[TYPE, 2]
        edges = np.array([[20, 12, 11], [21, 20, 21]])  # from its own subgraph, of one type with it, and of a run
        count_edges(edges, NEW, LENGTHS, np.full(32, -1), of_nodes, of_subgraphs, own_type_follows)
        assert of_nodes[PENDING, [20, 21]].sum() == pending
        assert of_subgraphs[EXTERNAL].sum() == external
