"""What a graph says of memories: who waits for whom, depths, work, subgraphs and closed mini-batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from batchmaker.errors import ModelError, ShapeError
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.depth import depths_of
from batchmaker.graph.mini_batch import unrolled
from batchmaker.graph.recorder import Recorder
from batchmaker.graph.spec import GIVEN, CellType, TypeId, ValueSpec
from batchmaker.graph.subgraphs import split
from batchmaker.graph.values import HostValues, ValueSequence
from batchmaker.graph.work import work_of

ROW = ValueSpec((), "int64")
CHAIN = CellType(TypeId(0), "chain", (ROW, ROW), (ROW,), (1, 8))
LOOK = CellType(TypeId(1), "look", (ROW, ROW), (ROW,), (1, 8), memories=(GIVEN,))
PAST = CellType(TypeId(2), "past", (ROW, ROW, ROW), (ROW, ROW), (1, 8), memories=(1,))
NO_EARLIER = np.empty(0, np.int64)


def words(count: int) -> HostValues:
    return HostValues(np.arange(count), count, ROW)


def chain(recorder: Recorder, count: int) -> ValueSequence:
    return recorder.run(CHAIN, [words(count)], None)[0].steps


def edges(graph: CellGraph) -> list[list[int]]:
    starts, sources = graph.memory_edges()
    return [sources[a:b].tolist() for a, b in pairwise(starts)]


def test_a_single_node_waits_for_every_node_of_its_memory() -> None:
    recorder = Recorder()
    recorder.node(LOOK, [words(1)], [chain(recorder, 4)[::-2]])
    assert edges(recorder.take()) == [[], [], [], [], [3, 1]]


def test_a_run_waits_at_its_first_step_and_a_map_at_every_node() -> None:
    recorder = Recorder()
    steps = chain(recorder, 2)
    recorder.run(LOOK, [words(3)], None, memories=[steps])
    recorder.map(LOOK, [words(2)], [steps])
    assert edges(recorder.take()) == [[], [], [0, 1], [], [], [0, 1], [0, 1]]


def test_a_runs_own_memory_is_no_edge() -> None:
    recorder = Recorder()
    recorder.run(PAST, [words(3)], None)
    graph = recorder.take()
    assert edges(graph) == [[], [], []]
    (read,) = graph.memories
    assert (read.port, read.first, read.count, read.output, read.own) == (0, 0, 3, 1, True)


@pytest.mark.parametrize("length", [0, 1, 5])
def test_what_reads_a_memory_is_deeper_than_all_of_it(length: int) -> None:
    recorder = Recorder()
    steps = chain(recorder, 5)[:length]
    (one,) = recorder.node(LOOK, [words(1)], [steps])
    run = recorder.run(LOOK, [words(2)], None, memories=[steps])[0].steps
    recorder.node(LOOK, [one], [run])
    assert depths_of(recorder.take(), NO_EARLIER).tolist() == [
        0, 1, 2, 3, 4, length, length, length + 1, length + 2,
    ]  # fmt: skip


def test_work_counts_the_longest_path_through_memories() -> None:
    recorder = Recorder()
    steps = recorder.map(LOOK, [words(3)], [chain(recorder, 4)])[0]
    for _ in range(2):
        steps = recorder.map(LOOK, [words(2)], [steps])[0]
    work = work_of(recorder.take())
    assert (work.types.tolist(), work.nodes.tolist(), work.steps.tolist()) == ([0, 1], [4, 7], [4, 3])


def test_nodes_are_not_of_one_subgraph_with_their_memory() -> None:
    recorder = Recorder()
    (value,) = recorder.node(LOOK, [words(1)], [chain(recorder, 2)])
    sequence = ValueSequence(range(value.node, value.node + 1), value.of)
    recorder.node(LOOK, [value], [sequence])  # reads it as its input and as its memory
    recorder.node(LOOK, [value], [ValueSequence(range(0), value.of)])  # reads it as its input alone
    numbers, count = split(recorder.take())
    assert (numbers.tolist(), count) == ([0, 0, 1, 2, 1], 3)


def test_a_mini_batch_has_an_edge_for_each_node_that_is_read() -> None:
    recorder = Recorder()
    steps = chain(recorder, 2)
    recorder.run(PAST, [words(2)], None)
    recorder.map(LOOK, [words(1)], [steps])
    batch = unrolled(recorder.take(), 3)
    fed: list[Sequence[int]] = [
        batch.sources[a:b].tolist() for a, b in pairwise(batch.starts)
    ]  # fmt: skip
    assert fed == [[], [0], [], [2], [0, 1]]


def test_rows_of_another_kind_are_no_memory() -> None:
    other = ValueSpec((3,), "float32")
    wide = CellType(TypeId(3), "wide", (ROW,), (other,), (1, 8))
    recorder = Recorder()
    rows = recorder.map(wide, [words(2)])[0]
    with pytest.raises(ShapeError, match="cell 'look', input 0"):
        recorder.node(LOOK, [words(1)], [rows])


def test_single_calls_have_no_earlier_steps() -> None:
    with pytest.raises(ModelError, match="only `run` and `loop` have"):
        Recorder().node(PAST, [words(1), words(1)])
