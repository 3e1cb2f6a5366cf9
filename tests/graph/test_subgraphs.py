"""How graphs are split, beside the definition node by node, and what shared arrays say."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchmaker.graph.cell_graph import HOST, CellGraph
from batchmaker.graph.constants import MAX_SHARED, ascending, from_host, nodes_of, of_type
from batchmaker.graph.recorder import Recorder
from batchmaker.graph.spec import CellType, ValueSpec
from batchmaker.graph.subgraphs import split
from batchmaker.graph.values import HostValues, Value
from insides import begin_block

NUMBER = ValueSpec((), "int64")
CELLS = [CellType(i, f"cell {i}", (NUMBER,) * (1 + i), (NUMBER,), (1, 4)) for i in range(3)]


def by_definition(graph: CellGraph) -> list[int]:
    """Return a number for each node's relatives: nodes of one type and level that edges join."""
    types = [kind for block in graph.blocks for kind in block.types.tolist()]
    sources = [[s for s in column if s >= 0] for block in graph.blocks for column in block.sources.T.tolist()]
    level: list[int] = []
    for node, fed in enumerate(sources):
        level.append(max((level[s] + (types[s] != types[node]) for s in fed), default=0))
    relative = list(range(len(types)))
    for node, fed in enumerate(sources):
        for source in fed:
            if types[source] == types[node] and level[source] == level[node]:
                one, other = relative[source], relative[node]
                relative = [min(one, other) if r in (one, other) else r for r in relative]
    order = sorted(set(relative))
    return [order.index(r) for r in relative]


@given(st.integers(0, 10**6), st.integers(1, 40))
def test_single_calls_are_split_as_defined(seed: int, count: int) -> None:
    draw = random.Random(seed)
    recorder = Recorder()
    values: list[Value | HostValues] = [HostValues(np.zeros(1, np.int64), 1, NUMBER)]
    for _ in range(count):
        cell = draw.choice(CELLS)
        values += recorder.node(cell, [draw.choice(values[-5:] + values[:1]) for _ in cell.inputs])
        if draw.random() < 0.1:
            begin_block(recorder)
    graph = recorder.take()
    numbers, many = split(graph)
    expected = by_definition(graph)
    assert numbers.tolist() == (expected if not graph.plain else numbers.tolist())
    assert many == len(set(numbers.tolist()))
    alone, all_alone = split(graph, node_by_node=True)
    assert (alone.tolist(), all_alone) == (list(range(count)), count)


def test_shared_arrays_are_as_if_made_anew():
    for count in (1, 7, MAX_SHARED, MAX_SHARED + 1):
        assert of_type(3, count).tolist() == [3] * count
        sources, outputs = from_host(2, count)
        assert sources.tolist() == [[HOST] * count] * 2
        assert outputs.tolist() == [[0] * count] * 2
    assert ascending(5, 3).tolist() == [5, 6, 7]
    assert ascending(1 << 20, 2).tolist() == [1 << 20, (1 << 20) + 1]


def test_a_sequence_keeps_a_range_until_its_nodes_are_asked_for():
    recorder = Recorder()
    (sequence,) = recorder.map(CELLS[0], [HostValues(np.zeros(5, np.int64), 5, NUMBER)])
    assert sequence.numbers == range(5)
    assert (sequence[1:].numbers, sequence[::-1].nodes.tolist()) == (range(1, 5), [4, 3, 2, 1, 0])
    assert nodes_of(sequence[::2]).tolist() == [0, 2, 4]
    assert [value.node for value in sequence] == sequence.nodes.tolist() == [0, 1, 2, 3, 4]
