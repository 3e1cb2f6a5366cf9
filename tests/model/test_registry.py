"""Cells get types: equal cells share one, and only equal cells do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.compile.declaration import Declared
from batchmaker.core.layout import OUTPUTS
from batchmaker.errors import ModelError, ShapeError
from batchmaker.graph.spec import MAX_OUTPUTS, CellType, ValueSpec
from batchmaker.lab import zoo
from batchmaker.model.registry import CellRegistry


def rows(*widths: int, dtype: str = "float32") -> tuple[ValueSpec, ...]:
    return tuple(ValueSpec((width,), dtype) for width in widths)


class Branching(nn.Module):
    """Cannot be traced, so nothing is known of its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(-x if float(x.sum()) > 1e9 else x)
        return result


class Two(nn.Module):
    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return x.tanh() + h, (x + h).tanh()


def test_types_are_numbered_in_order_of_first_use_and_told_once_each() -> None:
    told: list[CellType] = []
    registry = CellRegistry(told.append)
    first, second = bm.Cell(nn.ReLU(), name="first"), bm.Cell(nn.Tanh())
    assert registry.type_of(first) is None
    types = [registry.learn(first, rows(3)), registry.learn(second, rows(3)), registry.learn(first, rows(3))]
    assert [cell.type_id for cell in types] == [0, 1, 0]
    assert [cell.name for cell in types] == ["first", "Tanh", "first"]
    assert registry.type_of(first) is types[0]
    assert told == registry.types == types[:2]
    assert len(registry.bound) == len(registry.modules) == 2


def test_cells_with_the_same_graph_weights_and_rows_share_a_type() -> None:
    registry = CellRegistry()
    module = nn.GRUCell(3, 4)
    one = registry.learn(bm.Cell(module), rows(3, 4))
    assert registry.learn(bm.Cell(module), rows(3, 4)) is one
    assert registry.learn(bm.Cell(copy.deepcopy(module)), rows(3, 4)) is one
    assert len(registry.types) == len(registry.bound) == 1


@pytest.mark.parametrize(
    ("one", "other", "inputs"),
    [
        (nn.GRUCell(3, 4), nn.GRUCell(3, 4), (rows(3, 4), rows(3, 4))),
        (nn.ReLU(), nn.Tanh(), (rows(3), rows(3))),
        (nn.ReLU(), nn.ReLU(), (rows(3), rows(4))),
        (nn.ReLU(), nn.ReLU(), (rows(3), rows(3, dtype="bfloat16"))),
        (Branching(), Branching(), (rows(3), rows(3))),
    ],
    ids=["weights", "graph", "row shape", "dtype", "untraceable"],
)
def test_cells_that_differ_in_anything_have_types_of_their_own(
    one: nn.Module, other: nn.Module, inputs: tuple[tuple[ValueSpec, ...], ...]
) -> None:
    registry = CellRegistry()
    types = [registry.learn(bm.Cell(module), specs) for module, specs in zip((one, other), inputs, strict=True)]
    assert [cell.type_id for cell in types] == [0, 1]
    assert [cell.inputs for cell in types] == list(inputs)


def test_a_module_that_cannot_be_traced_shares_a_type_with_itself() -> None:
    registry = CellRegistry()
    module = Branching()
    assert registry.learn(bm.Cell(module), rows(3)) is registry.learn(bm.Cell(module), rows(3))


def test_one_weight_that_differs_makes_another_type() -> None:
    registry = CellRegistry()
    module = nn.Linear(3, 3)
    twin = copy.deepcopy(module)
    before = registry.learn(bm.Cell(module), rows(3))
    with torch.no_grad():
        twin.weight[0, 0] += 1
    assert registry.learn(bm.Cell(twin), rows(3)) is not before


def test_equal_cells_that_steer_by_other_outputs_have_types_of_their_own() -> None:
    """A type has one set of host outputs, and the stop test of a loop looks at the first."""
    registry = CellRegistry()
    module = nn.LSTMCell(3, 3)
    types = [registry.learn(bm.Cell(module, host_outputs=(output,)), rows(3, 3, 3)) for output in (0, 1)]
    assert [cell.host_outputs for cell in types] == [(0,), (1,)]


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"max_batch": 8}, "batch sizes"),
        ({"batch_sizes": (1, 256)}, "batch sizes"),
        ({"priority": 2}, "priority"),
        ({"max_batch": 8, "priority": -1}, "batch sizes and priority"),
    ],
)
def test_equal_cells_with_other_options_have_types_of_their_own_and_say_so(
    options: dict[str, Any], difference: str
) -> None:
    """Merged, one of the two would lose what it was given."""
    registry = CellRegistry()
    module = nn.Linear(3, 3)
    first = registry.learn(bm.Cell(module, name="first"), rows(3))
    second = registry.learn(bm.Cell(module, name="second", **options), rows(3))
    third = registry.learn(bm.Cell(module, name="third", **options), rows(3))
    assert [cell.type_id for cell in (first, second, third)] == [0, 1, 1]
    assert second.priority == options.get("priority", 0)
    assert (second.batch_sizes == first.batch_sizes) == ("batch sizes" not in difference)
    assert registry.notes["second"][-1] == f"not batched with 'first', which is the same cell but for its {difference}"
    assert not any("not batched" in note for note in registry.notes["first"])


def test_a_host_output_that_the_cell_does_not_have_is_refused() -> None:
    registry = CellRegistry()
    cell = bm.Cell(nn.Linear(3, 3), host_outputs=(1,), name="out")
    with pytest.raises(ModelError, match="'out': host_outputs names output 1, the cell has 1"):
        registry.learn(cell, rows(3))
    assert registry.type_of(cell) is None
    assert registry.types == []


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (Declared(rows(4), rows(3)), r"'lin', input 0: got rows of float32\[3\].*expected float32\[4\]"),
        (Declared(rows(3), rows(2)), r"'lin', output 0: got rows of float32\[3\].*expected float32\[2\]"),
    ],
)
def test_a_cell_bound_to_other_rows_than_it_declares_is_refused(declared: Declared, message: str) -> None:
    registry = CellRegistry()
    with pytest.raises(ShapeError, match=message):
        registry.learn(bm.Cell(nn.Linear(3, 3), name="lin", declared=declared), rows(3))
    assert registry.types == []


def test_chains_with_another_number_of_inputs_per_step_are_a_type_of_their_own_with_the_same_weights() -> None:
    registry = CellRegistry()
    cell = registry.learn(bm.Cell(nn.GRUCell(4, 4), name="gru"), rows(4, 4))
    assert registry.in_runs(cell, 1) is registry.in_runs(cell, 1) is cell
    with pytest.raises(ModelError, match="'gru'"):
        registry.in_runs(cell, 0)  # one output cannot feed both inputs
    assert registry.types == [cell]


def test_a_cell_that_is_run_and_looped_is_bound_once() -> None:
    found: list[CellType] = []
    registry = CellRegistry(found.append)
    step = bm.Cell(Two(), name="step")
    cell = registry.learn(step, rows(4, 4))
    assert registry.in_runs(cell, 1) is cell
    loop = registry.in_runs(cell, 0)
    assert registry.in_runs(cell, 0) is loop
    assert registry.in_runs(cell, 1) is cell
    assert (loop.name, loop.form_of, loop.inputs, loop.outputs) == (
        "step loop",
        cell.type_id,
        cell.inputs,
        cell.outputs,
    )
    assert registry.types == found == [cell, loop]
    assert registry.bound[cell.type_id] is registry.bound[loop.type_id]
    assert registry.num_step_inputs == {cell.type_id: 1, loop.type_id: 0}
    assert registry.type_of(step) is cell
    assert registry.types_of(step) == [cell]
    twin = bm.Cell(step.module, name="twin")
    assert registry.learn(twin, rows(4, 4)) is cell, "an equal cell shares the type, not one of its forms"


def test_a_cell_without_room_for_its_state_is_not_noted_as_run() -> None:
    registry = CellRegistry()
    cell = registry.learn(bm.Cell(nn.GRUCell(3, 4), name="gru"), rows(3, 4))
    with pytest.raises(ModelError, match="'gru'"):
        registry.in_runs(cell, 0)
    assert registry.num_step_inputs == {}


def test_zero_state_is_what_the_cell_declares_or_its_module_tells() -> None:
    registry = CellRegistry()
    assert registry.zero_state(bm.Cell(nn.LSTMCell(3, 5)), rows(3)) == rows(5, 5)
    declaring = bm.Cell(nn.Identity(), declared=Declared(rows(3, 7), rows(7)))
    assert registry.zero_state(declaring, rows(3)) == rows(7)


class Fan(nn.Module):
    """As many outputs as asked for: the input times 1, 2, 3, ..."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(x * (i + 1) for i in range(self.outputs))


class Fanned(bm.Model):
    example_request = torch.ones(2)

    def __init__(self, outputs: int) -> None:
        self.fan = bm.Cell(Fan(outputs), max_batch=4)

    def unfold(self, x):
        return list(self.fan(x))


def test_a_cell_may_have_many_outputs_and_all_of_them_can_be_fetched() -> None:
    with bm.Engine(Fanned(40)) as engine:
        (found,) = engine.map([torch.ones(2)], progress=False)
    assert [float(value[0]) for value in found] == [float(i + 1) for i in range(40)]


class Ring(bm.Model):
    """A state of many parts, each of which moves on to the next; the first part is returned."""

    def __init__(self, parts: int, *, returned: int = 0) -> None:
        self.move, self.parts, self.returned = bm.Cell(Moved(), max_batch=4), parts, returned

    def unfold(self, steps):
        zeros = torch.zeros(2)
        return self.move.loop([zeros + i for i in range(self.parts)], max_steps=steps)[self.returned]


class Moved(nn.Module):
    def forward(self, *state):
        return *state[1:], state[0]


@pytest.mark.parametrize("parts", [62, 63, 70, 200])
def test_a_state_may_have_more_parts_than_a_caller_can_ask_for(parts: int) -> None:
    with bm.Engine(Ring(parts)) as engine:
        found = engine.map([1, 5, 70], progress=False)
    assert [float(value[0]) for value in found] == [float(steps % parts) for steps in (1, 5, 70)]


class CountedRing(bm.Model):
    """As Ring, but a value that is computed decides how often the parts move on."""

    def __init__(self, parts: int) -> None:
        self.move, self.parts = bm.Cell(Counted(), max_batch=4), parts

    def unfold(self, steps):
        first = self.move(steps, *[torch.zeros(2) + i for i in range(self.parts)])
        last = bm.while_loop(lambda s: s[1], lambda s: self.move(s[0], *s[2:]), first, max_steps=100)
        return last[2], self.move(last[0], *last[2:])[2]


class Counted(nn.Module):
    def forward(self, count, *state):
        return count - 1, count > 1, *state[1:], state[0]


@pytest.mark.parametrize("parts", [60, 70, 200])
def test_so_may_a_state_whose_loop_a_value_ends(parts: int) -> None:
    with bm.Engine(CountedRing(parts)) as engine:
        found = engine.map([1, 5, 70], progress=False)
    assert [[float(value[0]) for value in pair] for pair in found] == [
        [float(steps % parts), float((steps + 1) % parts)] for steps in (1, 5, 70)
    ]


def test_a_node_with_any_of_its_outputs_is_one_number() -> None:
    assert MAX_OUTPUTS <= OUTPUTS


@pytest.mark.parametrize("returned", [62, 69])
def test_an_output_beyond_those_that_a_caller_can_ask_for_is_refused_by_its_number(returned: int) -> None:
    model = Ring(70, returned=returned)
    with bm.Engine(model) as engine:
        with pytest.raises(ModelError, match=rf"output {returned} of a cell is returned.*the first 62 outputs"):
            engine.submit(3).result()
        model.returned = 61
        assert float(engine.submit(3).result()[0]) == 64.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rwkv", "mamba"])
def test_language_models_of_their_usual_depth_are_served(name: str) -> None:
    model = zoo.make(name, vocabulary_size=11, hidden=8)
    with bm.Engine(model, threads=1) as engine:
        assert len(engine.submit(model.example_request).result()) > 0


def test_more_outputs_than_can_be_told_apart_are_refused() -> None:
    with pytest.raises(ModelError, match=r"1001 outputs, at most 1000"):
        CellRegistry().learn(bm.Cell(Fan(1001), name="fan"), rows(2))
