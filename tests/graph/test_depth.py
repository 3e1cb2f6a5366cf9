"""How deep each node of a graph lies."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchmaker.graph.cell_graph import CellGraph, Run
from batchmaker.graph.depth import depths_of
from batchmaker.graph.recorder import Recorder
from batchmaker.graph.spec import CellType, ValueSpec
from batchmaker.graph.values import HostValues

NUMBER = ValueSpec((), "int64")
NOTHING = np.empty(0, np.int64)


def cell(type_id: int, inputs: int, outputs: int) -> CellType:
    return CellType(type_id, f"cell {type_id}", (NUMBER,) * inputs, (NUMBER,) * outputs, (1, 4))


def host(count: int) -> HostValues:
    return HostValues(np.zeros(count, np.int64), count, NUMBER)


ENCODER, LEAF, INNER, JOIN = cell(0, 2, 1), cell(1, 1, 2), cell(2, 4, 2), cell(3, 2, 1)


def longest_ways(graphs: list[CellGraph]) -> list[int]:
    """The same, node by node, from the definition."""
    depth: list[int] = []
    for graph in graphs:
        sources: dict[int, list[int]] = {}
        for part in graph.parts:
            if isinstance(part, Run):
                for step in range(part.length):
                    before = [source for source, _ in part.init] if step == 0 else [part.first + step - 1]
                    fed = [int(column[0][step]) for column in part.sequences if column is not None]
                    sources[part.first + step] = before + fed
            else:
                for i in range(part.count):
                    sources[part.first + i] = part.sources[:, i].tolist()
        for node in range(graph.first, graph.first + graph.num_nodes):
            depth.append(max((depth[s] + 1 for s in sources[node] if s >= 0), default=0))
    return depth


def test_a_chain_counts_up_and_what_follows_it_goes_on():
    recorder = Recorder()
    (end,) = recorder.run(ENCODER, [host(4)], None)
    recorder.node(JOIN, [end, host(1)])
    assert depths_of(recorder.take(), NOTHING).tolist() == [0, 1, 2, 3, 4]


def test_a_tree_is_as_deep_as_its_deepest_child():
    recorder = Recorder()
    leaves = recorder.map(LEAF, [host(4)])
    recorder.tree(INNER, np.array([[0, 1], [4, 2], [5, 3]]), leaves, [])
    assert depths_of(recorder.take(), NOTHING).tolist() == [0, 0, 0, 0, 1, 2, 3]


def test_a_chain_over_nodes_is_at_each_step_deeper_than_what_feeds_it():
    recorder = Recorder()
    (first,) = recorder.run(ENCODER, [host(5)], None)
    recorder.run(ENCODER, [first.steps[::-1]], None)
    assert depths_of(recorder.take(), NOTHING).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    (first,) = recorder.run(ENCODER, [host(5)], None)
    recorder.run(ENCODER, [first.steps], None)
    assert depths_of(recorder.take(), np.arange(10))[-5:].tolist() == [1, 2, 3, 4, 5]


@given(st.integers(0, 2**32))
def test_depths_are_the_longest_ways_through_any_graph_and_its_extensions(seed):
    rng = random.Random(seed)
    recorder = Recorder(holds_values=True)
    values, sequences, graphs, found = [], [], [], NOTHING
    for _ in range(rng.randint(1, 3)):
        for _ in range(rng.randint(1, 5)):
            kind = rng.randrange(4)
            fed = rng.choice(sequences) if sequences and rng.random() < 0.6 else host(rng.randint(1, 5))
            start = [rng.choice(values)] if values and rng.random() < 0.6 else None
            if kind == 0:
                (end,) = recorder.run(ENCODER, [fed], start)
                values.append(end)
                sequences.append(end.steps)
            elif kind == 1:
                sequences += recorder.map(LEAF, [fed])
            elif kind == 2:
                leaves = recorder.map(LEAF, [fed])
                count = len(leaves[0])
                children = [[rng.randrange(count + i), rng.randrange(count + i)] for i in range(rng.randint(1, 5))]
                sequences += recorder.tree(INNER, np.array(children), leaves, [])
            else:
                values += recorder.node(JOIN, [rng.choice(values) if values else host(1), host(1)])
        graphs.append(recorder.take())
        found = np.concatenate((found, depths_of(graphs[-1], found)))
    assert found.tolist() == longest_ways(graphs)
