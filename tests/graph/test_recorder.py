"""What an unfold function records, and what it is told when it is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from batchmaker.errors import InvalidRequestError, ModelError, NodeLimitError, ShapeError
from batchmaker.graph.cell_graph import HOST, ZERO
from batchmaker.graph.recorder import Recorder
from batchmaker.graph.spec import CellType, ValueSpec
from batchmaker.graph.subgraphs import split
from batchmaker.graph.values import HostValues

TOKEN, STATE = ValueSpec((), "int64"), ValueSpec((4,), "float32")
LSTM = CellType(0, "lstm", (TOKEN, STATE), (STATE,), (1, 4))
LEAF = CellType(1, "leaf", (TOKEN,), (STATE,), (1, 4))
INNER = CellType(2, "inner", (STATE, STATE), (STATE,), (1, 4))
JOIN = CellType(3, "join", (STATE,), (STATE,), (1, 4))


def tokens(count: int) -> HostValues:
    return HostValues(np.arange(count), count, TOKEN)


def state(width: int = 4, dtype: str = "float32") -> HostValues:
    return HostValues(np.zeros((1, width), dtype), 1, ValueSpec((width,), dtype))


def test_a_run_is_one_entry_however_long():
    recorder = Recorder()
    (end,) = recorder.run(LSTM, [tokens(1000)], None)
    graph = recorder.take()
    assert (graph.num_nodes, len(graph.runs), graph.num_work_units) == (1000, 1, 1)
    assert (end.node, graph.runs[0].last, len(end.steps)) == (999, 999, 1000)
    assert graph.runs[0].init == ((ZERO, 0),)


@pytest.mark.parametrize("wrong", [state(5), state(4, "float64")])
def test_a_wrong_shape_or_dtype_is_refused_with_names(wrong):
    with pytest.raises(ShapeError, match=r"cell 'join', input 0: got .* expected float32\[4\]"):
        Recorder().node(JOIN, [wrong])
    with pytest.raises(ShapeError, match="lstm"):
        Recorder().run(LSTM, [tokens(2)], [wrong])


def test_every_child_of_a_tree_node_must_fit_its_input():
    uneven = CellType(0, "uneven", (STATE, ValueSpec((5,), "float32")), (STATE,), (1, 4))
    recorder = Recorder()
    leaves = recorder.map(LEAF, [tokens(3)])
    with pytest.raises(ShapeError, match=r"cell 'uneven', input 1: got .*\[4\], expected .*\[5\]"):
        recorder.tree(uneven, np.array([[0, 1], [3, 2]]), leaves, [])


def test_empty_and_unequal_sequences_are_refused():
    with pytest.raises(InvalidRequestError, match="empty"):
        Recorder().run(LSTM, [tokens(0)], None)
    pair = CellType(0, "pair", (TOKEN, TOKEN), (STATE,), (1,))
    with pytest.raises(InvalidRequestError, match="different lengths"):
        Recorder().map(pair, [tokens(2), tokens(3)])


@pytest.mark.parametrize("max_steps", [None, 0, -1])
def test_a_loop_needs_a_positive_limit(max_steps):
    loop = CellType(0, "loop", (STATE,), (STATE,), (1,))
    with pytest.raises(InvalidRequestError, match="max_steps"):
        Recorder().run(loop, [], None, max_steps=max_steps)


def test_init_must_match_the_state():
    with pytest.raises(InvalidRequestError, match="init has 2"):
        Recorder().run(LSTM, [tokens(2)], [state(), state()])
    with pytest.raises(InvalidRequestError, match="sequences given"):
        Recorder().run(LEAF, [tokens(2), tokens(2)], None)


@pytest.mark.parametrize(
    ("children", "message"),
    [
        (np.array([0, 1]), r"\[num_nodes, arity\]"),
        (np.empty((0, 2), np.int64), "at least one inner node"),
        (np.array([[0, -1]]), "child 1 of tree node 0 is -1"),
        (np.array([[0, 2]]), "child 1 of tree node 0 is 2"),
        (np.array([[0, 1], [3, 0]]), "child 0 of tree node 1 is 3"),
        (np.array([[0, 1, 1]]), "3 children"),
    ],
)
def test_malformed_children_are_refused(children, message):
    recorder = Recorder()
    leaves = recorder.map(LEAF, [tokens(2)])
    with pytest.raises(InvalidRequestError, match=message):
        recorder.tree(INNER, children, leaves, [])


def test_a_tree_reads_leaves_and_earlier_nodes():
    recorder = Recorder()
    leaves = recorder.map(LEAF, [tokens(3)])
    (nodes,) = recorder.tree(INNER, np.array([[0, 1], [3, 2]]), leaves, [])
    block = recorder.take().blocks[1]
    assert block.sources.tolist() == [[0, 3], [1, 2]]
    assert block.connected
    assert nodes.nodes.tolist() == [3, 4]


def test_a_request_without_end_is_stopped_at_its_limit():
    recorder = Recorder(max_nodes=10)
    (value,) = recorder.node(LEAF, [tokens(1)])
    for _ in range(9):
        (value,) = recorder.node(JOIN, [value])
    with pytest.raises(NodeLimitError, match="more than 10 nodes"):
        recorder.node(JOIN, [value])


def test_single_nodes_of_several_types_share_a_block():
    recorder = Recorder()
    (leaf,) = recorder.node(LEAF, [tokens(1)])
    recorder.node(INNER, [leaf, leaf])
    (block,) = recorder.take().blocks
    assert block.types.tolist() == [1, 2]
    assert block.sources.tolist() == [[HOST, 0], [HOST, 0]]


def test_an_extension_goes_on_counting():
    recorder = Recorder()
    (leaf,) = recorder.node(LEAF, [tokens(1)])
    first = recorder.take()
    recorder.node(JOIN, [leaf])
    second = recorder.take()
    assert (first.first, first.num_nodes, second.first, second.num_nodes) == (0, 1, 1, 1)
    assert second.blocks[0].sources.tolist() == [[0]]


def test_fetching_a_value_twice_fetches_it_once():
    recorder = Recorder()
    (leaf,) = recorder.node(LEAF, [tokens(1)])
    recorder.fetch(leaf)
    recorder.fetch(leaf)
    assert len(recorder.take().fetches) == 1


def waiting(data: bool = False) -> Recorder:
    """A recorder of a function that has waited for a leaf, and then wants an inner node, which may have more data."""
    recorder = Recorder(holds_values=True)
    (leaf,) = recorder.node(LEAF, [tokens(1)])
    recorder.fetch(leaf)
    recorder.take()
    other = recorder.node(LEAF, [tokens(1)])[0] if data else leaf
    recorder.fetch(recorder.node(INNER, [leaf, other])[0])
    return recorder


def test_what_functions_that_wait_add_alike_is_one_object():
    one, other = waiting().take(), waiting().take()
    assert one is other
    assert one.shared
    assert (one.first, one.num_nodes) == (1, 1)
    assert one.blocks[0].sources.tolist() == [[0], [0]]
    assert [(fetch.nodes.tolist(), fetch.output) for fetch in one.fetches] == [([1], 0)]


def test_what_has_data_or_begins_a_request_is_its_own():
    assert waiting(data=True).take() is not waiting(data=True).take()
    assert not waiting(data=True).take().shared
    first = Recorder(holds_values=True)
    first.node(LEAF, [tokens(1)])
    assert not first.take().shared


def test_dropped_handles_are_noted_when_the_last_one_goes():
    recorder = Recorder(holds_values=True)
    (sequence,) = recorder.map(LEAF, [tokens(3)])
    one = sequence[1]
    del sequence
    assert recorder.dropped == []
    del one
    assert recorder.dropped == [(0, 3)]


def test_sequences_can_be_sliced_reversed_and_indexed():
    recorder = Recorder()
    (sequence,) = recorder.map(LEAF, [tokens(5)])
    assert sequence[1:4].nodes.tolist() == [1, 2, 3]
    assert sequence[::-1].nodes.tolist() == [4, 3, 2, 1, 0]
    assert [value.node for value in reversed(sequence)] == [4, 3, 2, 1, 0]
    assert (sequence[-1].node, len(sequence)) == (4, 5)
    with pytest.raises(InvalidRequestError, match="index 5"):
        sequence[5]


def test_values_are_not_known_while_unfolding():
    recorder = Recorder()
    (leaf,) = recorder.node(LEAF, [tokens(1)])
    with pytest.raises(ModelError, match="yield"):
        bool(leaf)
    with pytest.raises(ModelError, match="do not unpack"):
        _a, _b = leaf
    with pytest.raises(ModelError, match="steps"):
        leaf.steps  # noqa: B018


def test_the_length_of_an_open_ended_loop_is_not_known():
    loop = CellType(0, "loop", (STATE,), (STATE,), (1,))
    (end,) = Recorder().run(loop, [], None, max_steps=5, open_ended=True)
    assert end.ends_open_loop
    with pytest.raises(ModelError, match="not known while unfolding"):
        len(end.steps)


def test_runs_and_unconnected_nodes_are_subgraphs_of_their_own():
    recorder = Recorder()
    recorder.run(LSTM, [tokens(3)], None)
    recorder.map(LEAF, [tokens(2)])
    recorder.run(LSTM, [tokens(2)], None)
    numbers, count = split(recorder.take())
    assert (numbers.tolist(), count) == ([0, 0, 0, 1, 2, 3, 3], 4)


def test_an_empty_graph_has_no_subgraphs():
    numbers, count = split(Recorder().take())
    assert (len(numbers), count) == (0, 0)


def test_nodes_of_one_type_that_hang_together_are_one_subgraph():
    recorder = Recorder()
    (value,) = recorder.node(LEAF, [tokens(1)])
    for _ in range(4):
        (value,) = recorder.node(JOIN, [value])
    numbers, count = split(recorder.take())
    assert (numbers.tolist(), count) == ([0, 1, 1, 1, 1], 2)


def test_nodes_that_meet_again_past_another_type_are_split():
    recorder = Recorder()
    (one,) = recorder.node(INNER, [state(), state()])
    (other,) = recorder.node(JOIN, [one])
    recorder.node(INNER, [one, other])
    numbers, count = split(recorder.take())
    assert (numbers.tolist(), count) == ([0, 1, 2], 3)
