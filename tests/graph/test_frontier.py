"""What of a mini-batch is ready, and how near each type is to the sufficient condition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from small_graphs import fewest_batches, graphs, independent_of, ready_of

from batchmaker.graph.frontier import Frontier
from batchmaker.graph.mini_batch import MiniBatch, mini_batch


def agrees(frontier: Frontier, made: MiniBatch, done: frozenset[int]) -> bool:
    return (
        [set(nodes) for nodes in frontier.ready] == ready_of(made, done)
        and frontier.independent == independent_of(made, done)
        and frontier.num_left == len(made) - len(done)
    )


@given(graphs(max_nodes=12), st.data())
def test_sizes_are_those_of_the_definitions_whatever_has_run(made: MiniBatch, data: st.DataObject):
    frontier, done = Frontier(made), frozenset[int]()
    assert agrees(frontier, made, done)
    while frontier.num_left:
        kind = data.draw(st.sampled_from([kind for kind, nodes in enumerate(frontier.ready) if nodes]))
        some = data.draw(st.none() | st.lists(st.sampled_from(frontier.ready[kind]), min_size=1, unique=True))
        done |= set(frontier.run(kind, some))
        assert agrees(frontier, made, done)
    frontier.reset()
    assert agrees(frontier, made, frozenset())


@given(graphs(), st.data())
def test_a_type_whose_whole_frontier_is_ready_begins_a_shortest_sequence(made: MiniBatch, data: st.DataObject):
    """Lemma 1, against all sequences."""
    frontier, done = Frontier(made), frozenset[int]()
    while frontier.num_left:
        ready = {kind: frozenset(nodes) for kind, nodes in enumerate(frontier.ready) if nodes}
        fewest = fewest_batches(made, done)
        for kind, nodes in ready.items():
            if len(nodes) == frontier.independent[kind]:
                assert 1 + fewest_batches(made, done | nodes) == fewest
        chosen = data.draw(st.sampled_from(sorted(ready)))
        done |= set(frontier.run(chosen))


def test_a_trees_outputs_are_independent_before_they_are_ready():
    """Two leaves and their parent, each with an output: all outputs are in G^output's frontier from the beginning."""
    tree = mini_batch([0, 0, 1, 2, 2, 2], [[], [], [0, 1], [0], [1], [2]], 3)
    frontier = Frontier(tree)
    assert (frontier.ready, frontier.independent) == ([[0, 1], [], []], [2, 1, 3])
    frontier.run(0)
    assert (frontier.ready, frontier.independent) == ([[], [2], [3, 4]], [0, 1, 3])
    frontier.run(1)
    assert (frontier.ready, frontier.independent) == ([[], [], [3, 4, 5]], [0, 0, 3])
