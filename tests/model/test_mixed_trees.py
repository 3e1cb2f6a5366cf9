"""Trees whose nodes call several cells: what the arrays mean, and what is said of arrays that mean nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from unfolding_forms import begun

import batchmaker as bm
from batchmaker.errors import InvalidRequestError, ShapeError
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.model.arguments import integers
from batchmaker.model.registry import CellRegistry
from batchmaker.model.unfolding import Unfolding


class Leaf(nn.Module):
    """n -> h, c."""

    def forward(self, n: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * n[:, None].float(), n[:, None].float()


class Step(nn.Module):
    """n, h, c -> h, c; not alike for every factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, n: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return h + self.factor * n[:, None], c - self.factor


class Join(nn.Module):
    """The states of some children -> h, c."""

    def forward(self, h: Tensor, c: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        for other_h, other_c in zip(others[::2], others[1::2], strict=True):
            h, c = h - 2 * other_h, c * other_c + 1
        return h, c


class Lone(nn.Module):
    """h, c -> h alone."""

    def forward(self, h: Tensor, c: Tensor) -> Tensor:
        return h + c


class Trees(bm.Model):
    """Each request is its own unfold function."""

    def __init__(self) -> None:
        self.leaf = bm.Cell(Leaf())
        self.first, self.second = bm.Cell(Step(1.0)), bm.Cell(Step(3.0))
        self.two, self.three, self.lone = bm.Cell(Join()), bm.Cell(Join()), bm.Cell(Lone())

    def unfold(self, request: Callable[[Any], Any]) -> Any:
        return request(self)


CELLS = {"first": 1, "second": 1, "two": 2, "three": 3}
"""The cells of inner nodes and how many children each has."""


@pytest.fixture(scope="module")
def unfolded() -> Callable[[Callable[[Any], Any]], CellGraph]:
    """Unfold a request; all cells have been used before, so that their types do not depend on it."""
    model, registry = Trees(), CellRegistry()

    def every_cell(m: Any) -> Any:
        state = m.leaf(1)
        return [m.first(1, *state), m.second(1, *state), m.two(*state * 2), m.three(*state * 3), m.lone(*state)]

    begun(Unfolding(model, registry, every_cell))
    return lambda request: begun(Unfolding(model, registry, request)).graph


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, list[tuple[str, list[int], int]]]:
    """Return a number of leaves, and of each inner node its cell, its children and the number that a step takes."""
    num_leaves = draw(st.integers(1, 3))
    nodes = []
    for place in range(draw(st.integers(1, 12))):
        cell = draw(st.sampled_from(sorted(CELLS)))
        child = st.integers(0, num_leaves + place - 1)
        nodes.append((cell, draw(st.lists(child, min_size=CELLS[cell], max_size=CELLS[cell])), draw(st.integers(0, 9))))
    return num_leaves, nodes


def by_node(m: Any, leaves: list[tuple[Any, Any]], nodes: list[tuple[str, list[int], int]]) -> Any:
    states = list(leaves)
    for cell, children, number in nodes:
        given = [part for child in children for part in states[child]]
        states.append(getattr(m, cell)(*([number] if CELLS[cell] == 1 else []), *given))
    return [h for h, _ in states[len(leaves) :]]


def by_arrays(m: Any, leaves: Any, nodes: list[tuple[str, list[int], int]]) -> Any:
    parts = []
    for cell, arity in CELLS.items():
        places = [place for place, node in enumerate(nodes) if node[0] == cell]
        children = np.array([nodes[place][1] for place in places], np.int64).reshape(-1, arity)
        inputs = [[nodes[place][2] for place in places]] if arity == 1 and places else []
        parts.append(getattr(m, cell).at(places, children, *inputs))
    return list(bm.tree(leaves, *parts)[0])


def described(graph: CellGraph) -> Any:
    """What a graph computes: of each node its type and sources, the data, and what is fetched."""
    nodes = {}
    for block in graph.blocks:
        for i, type_id in enumerate(block.types.tolist()):
            fed = zip(block.sources[:, i].tolist(), block.outputs[:, i].tolist(), strict=True)
            nodes[block.first + i] = (type_id, {port: pair for port, pair in enumerate(fed) if pair[0] >= 0})
    data = {
        (node, host.port): (host.type_id, np.asarray(value).tolist())
        for host in graph.host_inputs
        for node, value in zip(np.r_[host.rows(0)].tolist(), host.values, strict=True)
    }
    fetches = [(node, fetch.output) for fetch in graph.fetches for node in fetch.nodes.tolist()]
    return nodes, data, fetches, graph.num_nodes


@settings(deadline=None, max_examples=60)
@given(trees())
def test_arrays_give_the_graph_that_calls_give_one_by_one(unfolded: Any, tree: Any) -> None:
    num_leaves, nodes = tree
    numbers = list(range(num_leaves))
    alone = unfolded(lambda m: by_node(m, list(zip(*m.leaf.map(numbers), strict=True)), nodes))
    together = unfolded(lambda m: by_arrays(m, m.leaf.map(numbers), nodes))
    assert described(together) == described(alone)


@settings(deadline=None, max_examples=60)
@given(trees())
def test_leaves_may_be_data_which_each_node_that_reads_them_is_given(unfolded: Any, tree: Any) -> None:
    num_leaves, nodes = tree
    rows = np.arange(2 * num_leaves, dtype=np.float32).reshape(2, num_leaves, 1)
    alone = unfolded(lambda m: by_node(m, [(h, c) for h, c in zip(*rows, strict=True)], nodes))
    together = unfolded(lambda m: by_arrays(m, tuple(rows), nodes))
    assert described(together) == described(alone)


def test_a_mixed_tree_computes_what_its_cells_say() -> None:
    def request(m: Any) -> Any:
        h, c = bm.tree(
            m.leaf.map([1, 2]),
            m.two.at([0, 2], [[0, 1], [3, 2]]),
            m.first.at([1], [[1]], [5]),
            m.second.at([], []),
        )
        return h, c[np.array([2, 0])]

    with bm.Engine(Trees(), threads=1) as engine:
        h, c = engine.submit(request).result()
    assert h.tolist() == [[-6.0], [9.0], [21.0]]  # 2 - 2 * 4, 4 + 5, 9 - 2 * -6
    assert c.tolist() == [[4.0], [3.0]]  # (2 - 1) * 3 + 1, 1 * 2 + 1


def test_nodes_without_children_take_their_inputs_alone(unfolded: Any) -> None:
    def request(m: Any) -> Any:
        return bm.tree(m.leaf.map([1]), m.leaf.at([0, 1], np.empty((2, 0), int), [7, 8]), m.two.at([2], [[1, 2]]))[0]

    nodes, data, _, _ = described(unfolded(request))
    assert [data[node, 0][1] for node in range(3)] == [1, 7, 8]
    assert nodes[3][1] == {0: (1, 0), 1: (1, 1), 2: (2, 0), 3: (2, 1)}


WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "nothing": (lambda m: bm.tree(m.leaf.map([1])), InvalidRequestError, "no parts"),
    "no places": (lambda m: bm.tree(m.leaf.map([1]), m.two.at([], [])), InvalidRequestError, "'two'"),
    "place twice": (
        lambda m: bm.tree(m.leaf.map([1]), m.two.at([0], [[0, 0]]), m.first.at([0], [[0]], [1])),
        InvalidRequestError,
        "'first': place 0 of a tree of 2 nodes is given twice",
    ),
    "place outside": (
        lambda m: bm.tree(m.leaf.map([1]), m.two.at([0, 2], [[0, 0], [0, 0]])),
        InvalidRequestError,
        "'two': place 2 of a tree of 2 nodes is given twice or outside 0 to 1",
    ),
    "negative place": (lambda m: bm.tree(m.leaf.map([1]), m.two.at([-1], [[0, 0]])), InvalidRequestError, "place -1"),
    "places of no number": (
        lambda m: bm.tree(m.leaf.map([1]), m.two.at([0.5], [[0, 0]])),
        InvalidRequestError,
        r"'two': places must be integers \[num_nodes\], got float64",
    ),
    "too few places": (
        lambda m: bm.tree(m.leaf.map([1]), m.two.at([0], [[0, 0], [0, 0]])),
        InvalidRequestError,
        r"'two': got places of shape \(1,\) for 2 tree nodes",
    ),
    "too few inputs": (
        lambda m: bm.tree(m.leaf.map([1]), m.first.at([0, 1], [[0], [0]], [1])),
        InvalidRequestError,
        "'first': 1 inputs for 2 tree nodes",
    ),
    "child after its parent": (
        lambda m: bm.tree(m.leaf.map([1]), m.two.at([0], [[0, 2]]), m.first.at([1], [[0]], [1])),
        InvalidRequestError,
        r"'two': child 1 of tree node 0 is 2; allowed are 0 to 0",
    ),
    "cells that do not give alike": (
        lambda m: bm.tree(m.leaf.map([1]), m.two.at([0], [[0, 0]]), m.lone.at([1], [[0]])),
        ShapeError,
        "cell 'two' gives .* and cell 'lone' .*must give alike",
    ),
    "leaves unlike nodes": (
        lambda m: bm.tree((np.zeros((1, 2), np.float32),) * 2, m.two.at([0], [[0, 0]])),
        ShapeError,
        "'two', input 0",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_tree_is_refused_with_the_cell_at_fault(unfolded: Any, name: str) -> None:
    request, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        unfolded(request)


@pytest.mark.parametrize(
    ("index", "message"),
    [(np.array([0, 3]), "index 3 is outside a sequence of 3"), (np.array([-4]), "index -4"),
     (np.array([0.0]), "indices float64"), (np.array([[0]]), r"shape \(1, 1\)")],
)  # fmt: skip
def test_indices_are_integers_inside_the_sequence(unfolded: Any, index: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        unfolded(lambda m: m.leaf.map([1, 2, 3])[0][index])


def test_a_sequence_may_be_indexed_by_an_array(unfolded: Any) -> None:
    graph = unfolded(lambda m: m.leaf.map([1, 2, 3])[1][np.array([2, 0, 2, -2])])
    assert [fetch.nodes.tolist() for fetch in graph.fetches] == [[2, 0, 2, 1]]


# --- data of calls, one by one ---------------------------------------------------------------------------------------


def test_data_is_that_of_the_call_whatever_becomes_of_it_later(unfolded: Any) -> None:
    def request(m: Any) -> Any:
        row, array, tensor = [1.0], np.array([2.0]), torch.tensor([3.0])
        value = m.two(row, array, tensor, row)[0]
        row[0] = array[0] = tensor[0] = 9.0
        return value

    _, data, _, _ = described(unfolded(request))
    assert [data[0, port][1] for port in range(4)] == [[1.0], [2.0], [3.0], [1.0]]


@pytest.mark.parametrize(
    ("data", "message"),
    [([1, "a"], "'leaf', input 0: got the text 'a', expected numbers"),
     ([1, 1 << 70], r"'leaf', input 0: got an integer of 71 bits \(no dtype holds it\), expected int64"),
     ([1, [1, 2]], r"'leaf', input 0: got rows of shape \(2,\), expected \(\)")],
)  # fmt: skip
def test_data_that_does_not_fit_is_refused_among_data_that_does(unfolded: Any, data: Any, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        unfolded(lambda m: [m.leaf(number)[0] for number in data])


def test_data_of_several_kinds_that_all_fit_meets_in_one_input(unfolded: Any) -> None:
    kinds = [1, np.int32(2), np.array(3), torch.tensor(4), np.array(5, np.uint8), torch.tensor(6, dtype=torch.int16)]
    _, data, _, _ = described(unfolded(lambda m: [m.leaf(number)[0] for number in kinds]))
    assert [data[node, 0][1] for node in range(6)] == [1, 2, 3, 4, 5, 6]


def test_arrays_that_cannot_be_written_are_copied_since_loops_are_compiled_for_those_that_can() -> None:
    given = np.array([[0, 1]])
    assert integers(bm.Cell(Leaf()), given, "children") is given
    given.setflags(write=False)
    assert integers(bm.Cell(Leaf()), given, "children").flags.writeable
