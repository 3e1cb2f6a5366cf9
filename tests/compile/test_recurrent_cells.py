"""Cells that are recognised as an LSTM or a GRU, and those that are more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchmaker.compile.binding import bind
from batchmaker.compile.recurrent_cells import C, H, Recurrence
from batchmaker.graph.spec import ValueSpec


class Words(nn.Module):
    """A token's embedding through a layer of its own and a recurrent cell."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.cell = cell

    def forward(self, token: Tensor, *state: Tensor) -> Any:
        return self.cell(self.embedding(token).tanh(), state if len(state) > 1 else state[0])


class Swapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 6)

    def forward(self, x: Tensor, c: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        h, c = self.cell(x, (h, c))
        return h, c, h


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.score = nn.GRUCell(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(x, h)
        return self.score(h), h


class Peeking(nn.Module):
    """The input of its cell depends on the state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 6)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return self.cell(x + h, h)


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = nn.GRUCell(4, 6), nn.GRUCell(6, 6)

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        a = self.lower(x, a)
        return a, self.upper(a, b)


def found(module: nn.Module, given: ValueSpec, num_state: int, dtype: torch.dtype = torch.float32) -> Recurrence | None:
    torch.manual_seed(0)
    row = ValueSpec((6,), str(dtype).removeprefix("torch."))
    return bind(module.to(dtype).eval(), (given, *[row] * num_state), name="cell").recurrence(1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("tokens", [True, False])
def test_the_inputs_share_and_the_weights_make_up_the_cell(kind: Any, bias: bool, tokens: bool) -> None:
    cell = kind(4, 6, bias=bias)
    module = Words(cell) if tokens else cell
    is_lstm = kind is nn.LSTMCell
    given = ValueSpec((), "int64", 9) if tokens else ValueSpec((4,), "float32")
    recurrence = found(module, given, 2 if is_lstm else 1)
    assert recurrence is not None
    x = torch.arange(9) if tokens else torch.randn(9, 4)
    h, c = torch.randn(9, 6), torch.randn(9, 6)
    with torch.no_grad():
        (px,) = recurrence.project(x)
        products = h @ recurrence.weights.w_hh.t()
        bias_n = recurrence.weights.bias_n
        if is_lstm:
            assert recurrence.state == recurrence.outputs == (H, C)
            i, f, g, o = (px + products).chunk(4, 1)
            new_c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            mine, wanted = (o.sigmoid() * new_c.tanh(), new_c), module(x, *((h, c) if tokens else ((h, c),)))
        else:
            assert recurrence.state == recurrence.outputs == (H,)
            assert (bias_n is not None) == bias
            r, z = (px + products)[:, :12].sigmoid().chunk(2, 1)
            n = (px[:, 12:] + r * (products[:, 12:] + (0 if bias_n is None else bias_n))).tanh()
            mine, wanted = n + z * (h - n), module(x, h)
    torch.testing.assert_close(mine, wanted, atol=1e-6, rtol=1e-5)


def test_state_and_outputs_may_be_in_any_order() -> None:
    recurrence = found(Swapped(), ValueSpec((4,), "float32"), 2)
    assert recurrence is not None
    assert recurrence.state == (C, H)
    assert recurrence.outputs == (H, C, H)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_keep_their_type(dtype: torch.dtype) -> None:
    recurrence = found(nn.GRUCell(4, 6), ValueSpec((4,), str(dtype).removeprefix("torch.")), 1, dtype)
    assert recurrence is not None
    assert recurrence.weights.w_hh.dtype == dtype
    assert recurrence.weights.bias_n is not None
    assert recurrence.weights.bias_n.dtype == torch.float32
    assert recurrence.project(torch.ones(2, 4, dtype=dtype))[0].dtype == dtype


@pytest.mark.parametrize(
    ("module", "width", "num_state"),
    [(Scored(), 4, 1), (Peeking(), 6, 1), (Stacked(), 4, 2), (nn.RNNCell(4, 6), 4, 1), (nn.Bilinear(4, 6, 6), 4, 1)],
)
def test_what_is_more_than_the_recurrence_is_not_taken_for_one(module: nn.Module, width: int, num_state: int) -> None:
    assert found(module, ValueSpec((width,), "float32"), num_state) is None
