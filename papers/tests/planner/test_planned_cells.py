"""A planned cell computes what its module computes, whatever the module; what cannot be planned is left and named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from batchmaker.compile.binding import bind, traced
from batchmaker.compile.export import example_rows, flat_outputs
from batchmaker.compile.rewrite import cut_recurrent_cells, fold_constants, lift
from batchmaker.compile.split import compile_whole, split_cell
from batchmaker.graph.spec import ValueSpec
from batchmaker.lab.zoo.treelstm import LstmInner
from batchmaker_papers.gatewise import CELLS, inputs_of
from batchmaker_papers.planner.in_runs import planner
from batchmaker_papers.planner.memory import memory_after, memory_before
from batchmaker_papers.planner.plan import Plan, plan_cell
from covering import covering

APART, JOINED, PASSES_APART, PASSES_JOINED = 1, 2, 3, 4
WAYS = [APART, JOINED, PASSES_APART, PASSES_JOINED]
PAPER = {  # ED-Batch, table 2: memory kernels that its planning leaves
    "gru": 2, "lstm": 1, "mv": 2, "treegru_internal": 2, "treegru_leaf": 2, "treelstm_internal": 3, "treelstm_leaf": 1
}  # fmt: skip


def rows(*widths: int, dtype: str = "float32") -> tuple[ValueSpec, ...]:
    return tuple(ValueSpec((width,), dtype) for width in widths)


def gatewise(name: str, hidden: int, dtype: str) -> tuple[nn.Module, tuple[ValueSpec, ...]]:
    """One of the seven cells with its inputs."""
    torch.manual_seed(0)
    module = CELLS[name](hidden).to(getattr(torch, dtype)).eval()
    shapes = [(hidden, hidden) if argument.startswith("m") else (hidden,) for argument in inputs_of(module)]
    return module, tuple(ValueSpec(shape, dtype) for shape in shapes)


def planned(module: nn.Module, inputs: tuple[ValueSpec, ...], way: int) -> Plan:
    """The module's plan with layers over several values apart or joined, in batches or, where there are any, passes."""
    graph = lift(traced(module.eval(), inputs))
    cut_recurrent_cells(graph)
    fold_constants(graph)
    return plan_cell(graph, choose=lambda ways: way if way < len(ways) else way - 2)


def assert_same(
    module: nn.Module,
    inputs: tuple[ValueSpec, ...],
    plan: Plan,
    tolerance: float,
    magnitude: Callable[..., float] = lambda *_: 1.0,
) -> None:
    """The plan's graph, with memory used again, equals the module at several sizes and leaves its inputs alone.

    magnitude: of what is computed from rows on the way, to which errors of rounding are in proportion.
    """
    program = compile_whole(plan.way.graph, plan.way.packer())
    for num_rows in (1, 5, 400):
        given_rows = example_rows(inputs, num_rows, random=True)
        before = [value.clone() for value in given_rows]
        with torch.no_grad():
            wanted = flat_outputs(module(*(value.clone() for value in given_rows)), "test")
            outputs = program(*given_rows)
            absolute = tolerance * max(1.0, magnitude(*given_rows))
        assert len(outputs) == len(wanted)
        for output, want in zip(outputs, wanted, strict=True):
            assert output.dtype == want.dtype
            torch.testing.assert_close(output, want, rtol=tolerance, atol=absolute)
        assert all(map(torch.equal, given_rows, before))


NEAR = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 3e-2}


@pytest.mark.parametrize(("name", "dtype", "way"), covering(CELLS, NEAR, WAYS))
def test_a_planned_cell_equals_the_one_written_gate_by_gate(name, dtype, way):
    module, inputs = gatewise(name, 16, dtype)
    assert_same(module, inputs, planned(module, inputs, way), NEAR[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_no_cell_copies_more_often_than_the_papers_plan(name):
    module, inputs = gatewise(name, 8, "float32")
    before = memory_before(lift(traced(module, inputs)), 64)
    for way in WAYS:
        after = memory_after(planned(module, inputs, way).way.lowered(), 64)
        assert after.kernels <= PAPER[name]
        assert after.kernels < before.kernels
        assert after.copied_bytes < before.copied_bytes


@pytest.mark.parametrize("name", CELLS)
def test_the_seven_cells_are_searched_to_the_end(name):
    module, inputs = gatewise(name, 8, "float32")
    chosen = planned(module, inputs, APART).way.batched
    assert chosen is not None
    assert chosen.proven


def test_the_gates_of_an_lstm_become_one_product_and_one_sigmoid():
    chosen = planned(*gatewise("lstm", 8, "float32"), way=JOINED).way.batched
    assert chosen is not None
    sizes = {str(batch[0].target).split(".")[1]: len(batch) for batch in chosen.batches if len(batch) > 1}
    assert sizes == {"linear": 4, "sigmoid": 4}


def test_gates_written_as_one_layer_give_the_same_plan_as_gates_written_one_by_one():
    packed = LstmInner(8)
    one_by_one, inputs = gatewise("treelstm_internal", 8, "float32")
    plans = planned(packed, rows(8, 8, 8, 8), APART).way.batched, planned(one_by_one, inputs, APART).way.batched
    counts = [sorted((str(batch[0].target), len(batch)) for batch in plan.batches) for plan in plans if plan]
    assert counts[0] == counts[1]


class Program(nn.Module):
    """Values made one after another by layers and operations, as a list of choices says."""

    def __init__(self, choices: list[tuple[int, int, int]], width: int) -> None:
        super().__init__()
        self.choices, self.width = choices, width
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=i % 3 > 0) for i in range(4))
        self.pairs = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))
        self.wide = nn.Linear(width, 3 * width)
        self.row = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        values = self.values(x, h)
        return (*values[2:][-3:], values[-1] + 0)

    def values(self, x: Tensor, h: Tensor) -> list[Tensor]:
        values = [x, h]
        for kind, first, second in self.choices:
            values.append(self.make(kind, values[first % len(values)], values[second % len(values)], first + second))
        return values

    def magnitude(self, x: Tensor, h: Tensor) -> float:
        """Return the largest number on the way: where such are taken from each other, little of a sum may be left."""
        return max(float(value.abs().max()) for value in self.values(x, h))

    def make(self, kind: int, a: Tensor, b: Tensor, which: int) -> Tensor:
        ways: list[Callable[[], Tensor]] = [
            lambda: self.layers[which % 4](a),
            lambda: self.layers[which % 4](a) + self.layers[(which + 1) % 4](b),
            lambda: self.pairs[which % 2](torch.cat((a, b), 1)),
            lambda: torch.sigmoid(a),
            lambda: torch.tanh(a),
            lambda: torch.tanh(self.layers[which % 4](a) + b * self.layers[0](b)),
            lambda: a + b,
            lambda: a * b,
            lambda: (1 - a) * b + a * self.row,
            lambda: (1 - a) * b + a * x_or(b, a),
            lambda: self.wide(a).chunk(3, 1)[which % 3] * b,
            lambda: torch.sigmoid(self.wide(a))[:, self.width // 2 : self.width // 2 + self.width],
            lambda: torch.relu(self.wide(a)[:, self.width :]).chunk(2, 1)[which % 2] - 0.5 * b,
            lambda: a * b.mean(1, keepdim=True) + self.row,
            lambda: 0.5 * (a + b) if which % 2 else (a + b) / 2,
            lambda: torch.softmax(a, 1),
            lambda: a.view(-1, 2, self.width // 2).transpose(1, 2).reshape(-1, self.width) / 2,
        ]
        return ways[kind]()


def x_or(b: Tensor, a: Tensor) -> Tensor:
    return torch.sub(b, a, alpha=0.5)


TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 1e-1}
programs = st.lists(st.tuples(st.integers(0, 16), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9)


@pytest.mark.slow
@settings(max_examples=20, deadline=None, derandomize=True)
@given(choices=programs, way=st.sampled_from(WAYS), dtype=st.sampled_from(list(TOLERANCES)))
@example(
    choices=[(8, 0, 0), (7, 2, 0), *[(0, 0, 0)] * 2, (7, 2, 9), *[(0, 0, 0)] * 3, (0, 6, 0)], way=1, dtype="bfloat16"
)
@example(
    choices=[(11, 8, 5), (16, 4, 7), (3, 9, 5), (9, 0, 6), (2, 3, 5), (16, 9, 5), (4, 5, 4), (2, 4, 5)],
    way=1,
    dtype="float32",
)
def test_any_small_program_is_planned_without_changing_its_results(choices, way, dtype):
    torch.manual_seed(len(choices))
    module = Program(choices, 6).to(getattr(torch, dtype))
    inputs = rows(6, 6, dtype=dtype)
    assert_same(module, inputs, planned(module, inputs, way), TOLERANCES[dtype], module.magnitude)


class Branching(nn.Module):
    """Branches on a value, so that it cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.sum()) > 1e9 else self.layer(x)


class Sorting(nn.Module):
    """Nothing that the planner knows."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x.cumsum(1), 1)


class HandingOn(nn.Module):
    """Returns an input as it is, a slice of one, and a value twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        total = torch.sigmoid(self.first(x) + self.second(h))
        return x, h[:, 1:3], total, total


def test_a_module_with_control_flow_is_left_as_it_is_with_the_reason():
    bound = bind(Branching(), rows(4), name="branching", planner=planner)
    assert "left as it is: torch.export failed" in bound.notes[0]
    assert bound.call(example_rows(bound.inputs, 2))[0].shape == (2, 4)


def test_operations_that_are_not_known_are_named_and_left():
    plan = planned(Sorting(), rows(4), APART)
    assert plan.way.batched is None
    assert plan.note == "not planned: cumsum, softmax cannot be batched"
    with_layers = planned(nn.Sequential(nn.Linear(4, 4), Sorting()), rows(4), APART)
    assert "left as they are: cumsum, softmax" in with_layers.note


@pytest.mark.parametrize("way", WAYS)
def test_inputs_that_are_handed_on_stay_what_they_are(way):
    module, inputs = HandingOn(), rows(4, 4)
    assert_same(module, inputs, planned(module, inputs, way), 1e-5)


def test_a_cell_that_is_no_faster_batched_stays_as_it_is():
    module, inputs = gatewise("lstm", 8, "float32")
    plan = planned(module, inputs, 0)
    assert plan.way.batched is None
    assert plan.note == "planned, but left as it is: no batching was faster"
    assert_same(module, inputs, plan, 1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_a_planned_cell_can_still_be_cut_into_projection_and_step(way):
    module, inputs = gatewise("lstm", 16, "float32")
    split = split_cell((plan := planned(module, inputs, way)).way.graph, 1, plan.way.packer())
    assert [spec.shape for spec in split.hoisted] == [(64,)]
    x, h, c = example_rows(inputs, 5, random=True)
    with torch.no_grad():
        torch.testing.assert_close(split.step(*split.hoist(x), h, c), module(x, h, c), rtol=1e-5, atol=1e-5)


class Contradicting(nn.Module):
    """Three batches of two, of which every two share a gate: no order has all of them side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b, c = self.first(x), self.second(x), self.third(x)
        return a.relu() * b.relu() + b.exp() * c.exp(), a.abs() * c.abs()


@pytest.mark.parametrize("way", [APART, JOINED])
def test_batches_that_contradict_each_other_run_in_more_calls(way):
    module, inputs = Contradicting(), rows(4)
    plan = planned(module, inputs, way)
    assert plan.way.batched is not None
    assert memory_after(plan.way.lowered(), 64).kernels == 0
    assert memory_after(plan.way.lowered(), 64).calls > len(plan.way.batched.batches)
    assert_same(module, inputs, plan, 1e-5)


class Tagger(nn.Module):
    """A token through an embedding and gates, torch's own LSTM cell, and a layer over both states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.gate, self.value = nn.Linear(8, 8), nn.Linear(8, 8)
        self.lstm = nn.LSTMCell(8, 8)
        self.out = nn.Linear(16, 8)

    def forward(self, token: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.embed(token)
        h, c = self.lstm(torch.sigmoid(self.gate(x)) * torch.tanh(self.value(x)), (h, c))
        return torch.tanh(self.out(torch.cat((h, c), 1))), h, c


@pytest.mark.parametrize("way", [*WAYS[::3], *[pytest.param(way, marks=pytest.mark.slow) for way in WAYS[1:3]]])
def test_tokens_are_folded_and_states_stepped_in_a_planned_cell(monkeypatch, way):
    monkeypatch.setattr("batchmaker_papers.planner.plan.fastest", lambda ways: way)
    monkeypatch.setattr("batchmaker_papers.planner.in_runs.fastest_in_runs", lambda ways, num_step_inputs: 1)
    module = Tagger().eval()
    inputs = (ValueSpec((), "int64"), *rows(8, 8))
    bound = bind(module, inputs, name="tagger", num_step_inputs=1, planner=planner)
    assert "lstm_cell cut into input projection and step" in bound.notes
    assert any("folded" in note for note in bound.notes)
    _, h, c = example_rows(bound.inputs, 7, random=True)
    token = torch.arange(7)
    with torch.no_grad():
        wanted = module(token, h, c)
    for outputs in (bound.call((token, h, c)), bound.step(bound.hoist((token,)), (h, c))):
        torch.testing.assert_close(outputs, wanted, rtol=1e-5, atol=1e-5)


def test_a_bound_cell_says_how_it_was_planned():
    module, inputs = gatewise("treelstm_leaf", 8, "float32")
    note = bind(module, inputs, name="leaf", planner=planner).notes[0]
    assert "operations planned as" in note or note.startswith("planned, but left")
