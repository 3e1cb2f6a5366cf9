"""One step of an LSTM, GRU or plain RNN whose input projection is already computed.

Each `*_rows` function rearranges a torch cell's weights for its step. Each `*Step` is called with the projected input
and the state, and returns the new state in fresh tensors.

tanh costs five times as much as sigmoid on a CPU (64 x 1024 float32: 165 us against 28 us), and tanh(x) = 2 sigmoid(2x)
- 1. So inputs of tanh are scaled by two, which is exact, and sigmoid is used for large arrays: the absolute error stays
below 2e-7. bfloat16 gates are widened to float32 first: rounding sigmoid to 8 bits would lose the precision that 2s - 1
needs.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from batchmaker.compile.linear import Linear

SMALL_NUMEL = 2048
"""Below this number of state elements the overhead per call dominates: fewer kernels are better than cheaper ones."""

_EXACT = (torch.float32, torch.float64)


def _wide_sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Add two optional biases in float32, rounded once."""
    if a is None or b is None:
        return a if b is None else b
    return a + b if a.dtype in _EXACT else (a.float() + b.float()).to(a.dtype)


def lstm_rows(blocks: Tensor) -> Tensor:
    """Reorder gate rows from torch's (i, f, g, o) to (i, f, o, 2g). blocks: [4H, ...]."""
    i, f, g, o = blocks.detach().chunk(4)
    return torch.cat([i, f, o, 2 * g])


def gru_rows(blocks: Tensor) -> Tensor:
    """Scale gate rows (r, z, n) to (r, z, 2n). blocks: [3H, ...]."""
    r, z, n = blocks.detach().chunk(3)
    return torch.cat([r, z, 2 * n])


def lstm_gates(rows: Tensor, dim: int = 0) -> Tensor:
    """Undo lstm_rows. dim: the dimension of the gates."""
    i, f, o, g = rows.chunk(4, dim)
    return torch.cat([i, f, g / 2, o], dim)


def gru_gates(rows: Tensor, dim: int = 0) -> Tensor:
    """Undo gru_rows. dim: the dimension of the gates."""
    r, z, n = rows.chunk(3, dim)
    return torch.cat([r, z, n / 2], dim)


def lstm_bias(ih: Tensor | None, hh: Tensor | None) -> Tensor | None:
    """Return the one bias that the projection adds, in the step's row order."""
    total = _wide_sum(ih, hh)
    return None if total is None else lstm_rows(total)


def rnn_bias(ih: Tensor | None, hh: Tensor | None, scale: int) -> Tensor | None:
    """Return the one bias that the projection adds."""
    total = _wide_sum(ih, hh)
    return None if total is None else scale * total.detach()


@final
class LSTMStep:
    """The part of nn.LSTMCell that depends on the state."""

    __name__ = "lstm_step"

    def __init__(self, weight_hh: Tensor) -> None:
        self.weight_hh = weight_hh.detach()
        self.linear = Linear(lstm_rows(weight_hh), None)

    @property
    def rows(self) -> tuple[Tensor, Tensor | None]:
        """Weights and bias of the product in the step's row order."""
        return lstm_rows(self.weight_hh), None

    def product(self, h: Tensor, zeros: Tensor) -> Tensor:
        """Return the state's share of the gates, as in `__call__`: [n, gates * hidden]. zeros: of that shape."""
        return self.linear.add(h, zeros)

    def __call__(self, projected: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Return (h, c) of the next step.

        projected: [n, 4H], x @ lstm_rows(weight_ih).T + lstm_bias(...). h, c: [n, H]. Nothing is modified.
        """
        gates = self.linear.add(h, projected)
        if gates.dtype in _EXACT:
            return _lstm_gates(gates, c)
        if c.numel() < SMALL_NUMEL:
            return _lstm_gates_narrow(gates, c)
        new_h, new_c = _lstm_gates(gates.float(), c.float())
        return new_h.to(c.dtype), new_c.to(c.dtype)


def _lstm_gates(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """float32 (i, f, o, 2g) and c -> (h, c); overwrites gates."""
    i, f, o, g = gates.sigmoid_().unsafe_chunk(4, 1)
    new_c = f * c
    new_c.addcmul_(i, g, value=2).sub_(i)
    if new_c.numel() < SMALL_NUMEL:
        return new_c.tanh().mul_(o), new_c
    s = torch.add(new_c, new_c).sigmoid_()
    return torch.addcmul(o, o, s, value=-2).neg_(), new_c


def _lstm_gates_narrow(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The same without widening, for small arrays of a narrow dtype; overwrites gates."""
    width = c.shape[1]
    gates.narrow(1, 0, 3 * width).sigmoid_()
    i, f, o, g = gates.unsafe_chunk(4, 1)
    new_c = f * c
    new_c.addcmul_(i, g.mul_(0.5).tanh_())
    return new_c.tanh().mul_(o), new_c


@final
class GRUStep:
    """The part of nn.GRUCell (reset after the product, as in torch) that depends on the state."""

    __name__ = "gru_step"

    def __init__(self, weight_hh: Tensor, bias_hh: Tensor | None) -> None:
        self.weight_hh, self.bias_hh = weight_hh.detach(), None if bias_hh is None else bias_hh.detach()
        self.linear = Linear(gru_rows(weight_hh), None if bias_hh is None else gru_rows(bias_hh))

    @property
    def rows(self) -> tuple[Tensor, Tensor | None]:
        """Weights and bias of the product in the step's row order."""
        return gru_rows(self.weight_hh), None if self.bias_hh is None else gru_rows(self.bias_hh)

    def product(self, h: Tensor, zeros: Tensor) -> Tensor:
        """Return the state's share of the gates, as in `__call__`: [n, gates * hidden]. zeros: of that shape."""
        return self.linear(h)

    def __call__(self, projected: Tensor, h: Tensor) -> Tensor:
        """Return h of the next step.

        projected: [n, 3H], x @ gru_rows(weight_ih).T + gru_rows(bias_ih). h: [n, H]. Nothing is modified.
        """
        recurrent = self.linear(h)
        width = h.shape[1]
        if h.dtype not in _EXACT and h.numel() >= SMALL_NUMEL:
            return _gru_gates(projected.float(), recurrent.float(), h.float(), width).to(h.dtype)
        return _gru_gates(projected, recurrent, h, width)


def _gru_gates(projected: Tensor, recurrent: Tensor, h: Tensor, width: int) -> Tensor:
    """Projected and recurrent (r, z, 2n) and h -> h; overwrites recurrent."""
    gates = recurrent.narrow(1, 0, 2 * width).add_(projected.narrow(1, 0, 2 * width)).sigmoid_()
    r, z = gates.narrow(1, 0, width), gates.narrow(1, width, width)
    n = torch.addcmul(projected.narrow(1, 2 * width, width), r, recurrent.narrow(1, 2 * width, width))
    return torch.lerp(_half_tanh(n), h, z)


def _half_tanh(x: Tensor) -> Tensor:
    """Turn x into tanh(x / 2) in place, with the cheaper method for its size and dtype."""
    if x.dtype not in _EXACT or x.numel() < SMALL_NUMEL:
        return x.mul_(0.5).tanh_()
    return x.sigmoid_().mul_(2).sub_(1)


@final
class RNNStep:
    """The part of nn.RNNCell that depends on the state."""

    def __init__(self, weight_hh: Tensor, *, relu: bool) -> None:
        self.relu, self.weight_hh = relu, weight_hh.detach()
        self.__name__ = "rnn_relu_step" if relu else "rnn_tanh_step"
        self.linear = Linear(self.scale * weight_hh.detach(), None)

    @property
    def scale(self) -> int:
        """The factor of the projection's weight and bias."""
        return 1 if self.relu else 2

    @property
    def rows(self) -> tuple[Tensor, Tensor | None]:
        """Weights and bias of the product in the step's row order."""
        return self.scale * self.weight_hh, None

    def product(self, h: Tensor, zeros: Tensor) -> Tensor:
        """Return the state's share of the gates, as in `__call__`: [n, gates * hidden]. zeros: of that shape."""
        return self.linear.add(h, zeros)

    def __call__(self, projected: Tensor, h: Tensor) -> Tensor:
        """Return h of the next step. projected: [n, H], scaled. h: [n, H]. Nothing is modified."""
        total = self.linear.add(h, projected)
        if self.relu:
            return total.relu_()
        if total.dtype in _EXACT or total.numel() < SMALL_NUMEL:
            return _half_tanh(total)
        return _half_tanh(total.float()).to(h.dtype)


RecurrentStep = LSTMStep | GRUStep | RNNStep
