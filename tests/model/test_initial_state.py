"""The state that a user left out is found where it can be found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.errors import ModelError, OptionError, ShapeError
from batchmaker.graph.spec import ValueSpec
from batchmaker.model.initial_state import zero_state_specs
from batchmaker.model.registry import CellRegistry
from batchmaker.model.unfolding import Unfolding

X = (ValueSpec((4,), "float32"),)


def state(*widths: int, dtype: str = "float32") -> tuple[ValueSpec, ...]:
    return tuple(ValueSpec((width,), dtype) for width in widths)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTMCell(4, 6), nn.GRUCell(6, 6)

    def forward(self, x: Tensor, h: Tensor, c: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        h, c = self.first(x, (h, c))
        return h.sum(1), h, c, self.second(h, g)


class Handwritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(4, 7), nn.Linear(7, 7)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.w(x) + self.u(h))


class AnyWidth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(4, 1), nn.Linear(5, 5)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return h + self.w(x)


class Pyramid(nn.Module):
    """Layers of different widths; grouped: all h before all c."""

    def __init__(self, *, grouped: bool) -> None:
        super().__init__()
        self.grouped, self.first, self.second = grouped, nn.LSTMCell(4, 6), nn.LSTMCell(6, 3)

    def forward(self, x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        h1, c1, h2, c2 = (a, c, b, d) if self.grouped else (a, b, c, d)
        h1, c1 = self.first(x, (h1, c1))
        h2, c2 = self.second(h1, (h2, c2))
        return (h1, h2, c1, c2) if self.grouped else (h1, c1, h2, c2)


class Detector(nn.Module):
    """A state of the last samples, whose width no parameter has, beside that of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.lstm = nn.Conv1d(1, 5, 3), nn.LSTMCell(5, 6)

    def forward(self, x: Tensor, last: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        frame = self.convolution(torch.cat([last, x], 1).unsqueeze(1)).mean(2)
        return (h.sum(1), x[:, -2:], *self.lstm(frame, (h, c)))


class TwoKinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(4, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor, wide: Tensor, narrow: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.tanh(self.w(x) + wide)
        return wide, narrow + self.u(wide)


@pytest.mark.parametrize(
    ("module", "wanted"),
    [
        (nn.LSTMCell(4, 6), state(6, 6)),
        (nn.GRUCell(4, 6).to(torch.bfloat16), state(6, dtype="bfloat16")),
        (nn.RNNCell(4, 6), state(6)),
        (TwoLayers(), state(6, 6, 6)),
        (Handwritten(), state(7)),
        (Pyramid(grouped=False), state(6, 6, 3, 3)),
        (Pyramid(grouped=True), state(6, 3, 6, 3)),
        (Detector(), state(2, 6, 6)),
        (nn.Linear(4, 4), ()),
    ],
)
def test_state_is_found(module: nn.Module, wanted: tuple[ValueSpec, ...]) -> None:
    assert zero_state_specs(module, X) == wanted


def test_state_of_any_width_must_be_given() -> None:
    with pytest.raises(ModelError, match=r"could be .*bm\.Cell\(module, state=\.\.\.\), or give init="):
        zero_state_specs(AnyWidth(), X)


def test_module_that_keeps_no_state_of_one_width_must_be_told() -> None:
    class Shrinking(nn.Module):
        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return torch.cat([x, h], 1)

    with pytest.raises(ModelError, match="no width found"):
        zero_state_specs(Shrinking(), X)


def test_more_values_per_step_than_inputs_are_refused() -> None:
    with pytest.raises(ModelError, match="takes 1 inputs, got 2"):
        zero_state_specs(nn.Linear(4, 4), (*X, *X))


def test_open_ended_inputs_are_refused() -> None:
    class Open(nn.Module):
        def forward(self, x: Tensor, *state: Tensor) -> Tensor:
            return x

    with pytest.raises(ModelError, match="any number of inputs"):
        zero_state_specs(Open(), X)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ValueSpec((4,), "int64"),
            r"input 0: got rows of int64\[4\], expected float32\[4\]; an integer is given for a",
        ),
        (ValueSpec((9,), "float32"), r"input 0: got rows of float32\[9\], expected float32\[4\]; a wrong width"),
        (ValueSpec((1, 4), "float32"), r"expected float32\[4\]; a dimension too many: leave out the batch"),
    ],
)
@pytest.mark.parametrize("module", [TwoLayers(), Handwritten()], ids=["cells", "by hand"])
def test_an_input_at_fault_is_named_and_not_the_state(module: nn.Module, given: ValueSpec, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        zero_state_specs(module, (given,))


def test_what_a_module_raises_is_said_where_no_state_is_found() -> None:
    class Broken(Handwritten):
        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return self.missing(x)

    with pytest.raises(
        ModelError, match=r"with a state of \(float32\[7\]\) it raised AttributeError.*state=\(64, 128\)"
    ):
        zero_state_specs(Broken(), X)


class Given(bm.Model):
    """One cell; a request is what `run` gets."""

    def __init__(self, cell: bm.Cell) -> None:
        self.cell = cell

    def unfold(self, arguments: Any) -> Any:
        made = self.cell.run(*arguments)
        return made[-1] if isinstance(made, tuple) else made


def unfolded(cell: bm.Cell, *arguments: Any) -> Any:
    unfolding = Unfolding(Given(cell), CellRegistry(), arguments)
    unfolding.start()
    return unfolding.returned


@pytest.mark.parametrize("init", [None, (None, torch.zeros(3))])
def test_a_declared_state_starts_from_zeros(init: Any) -> None:
    value = unfolded(bm.Cell(TwoKinds(), state=(7, 3)), torch.zeros(2, 4), init)
    assert value.spec == ValueSpec((3,), "float32")


def test_a_declared_state_may_have_any_shape_and_dtype() -> None:
    cell = bm.Cell(nn.Linear(3, 3).bfloat16(), state=[(2, 64), 5, ValueSpec((), "int64")])
    assert cell.state == (ValueSpec((2, 64), "bfloat16"), ValueSpec((5,), "bfloat16"), ValueSpec((), "int64"))


@pytest.mark.parametrize("wrong", [(64, "h"), 0, [(3, -1)], [1.5]])
def test_a_declared_state_that_is_no_shape_is_refused(wrong: Any) -> None:
    with pytest.raises(OptionError, match=r"state must be the shapes of its parts without the batch"):
        bm.Cell(nn.Linear(3, 3), state=wrong)


@pytest.mark.parametrize(
    ("init", "message"),
    [
        ((0,), r"initial state has rows of \(int64\[\]\), expected \(float32\[7\]\)"),
        ((torch.zeros(1, 7),), r"initial state has rows of \(float32\[1, 7\]\), expected \(float32\[7\]\)"),
        ((torch.zeros(7), torch.zeros(7)), r"initial state has rows of \(float32\[7\], float32\[7\]\), expected"),
    ],
)
def test_an_initial_state_at_fault_is_named(init: Any, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        unfolded(bm.Cell(Handwritten()), torch.zeros(2, 4), init)


def test_a_wrong_number_of_inputs_is_counted() -> None:
    with pytest.raises(ModelError, match=r"forward\(x, wide, narrow\) takes 3 inputs, got 2"):
        unfolded(bm.Cell(TwoKinds(), state=(7,)), torch.zeros(2, 4))
