"""The state that a user left out is found where it can be found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from batchmaker.cells.state import zero_state_specs
from batchmaker.errors import ModelError
from batchmaker.graph.spec import ValueSpec

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


@pytest.mark.parametrize(
    ("module", "wanted"),
    [
        (nn.LSTMCell(4, 6), state(6, 6)),
        (nn.GRUCell(4, 6).to(torch.bfloat16), state(6, dtype="bfloat16")),
        (nn.RNNCell(4, 6), state(6)),
        (TwoLayers(), state(6, 6, 6)),
        (Handwritten(), state(7)),
        (nn.Linear(4, 4), ()),
    ],
)
def test_state_is_found(module: nn.Module, wanted: tuple[ValueSpec, ...]) -> None:
    assert zero_state_specs(module, X) == wanted


def test_state_of_any_width_must_be_given() -> None:
    with pytest.raises(ModelError, match=r"could be .* Pass init="):
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
