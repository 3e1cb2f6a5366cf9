"""What the programs by hand compute with: gates in one compiled loop, one packed product a step.

LSTM gates are in torch's order i, f, g, o, GRU gates r, z, n. All is float32 but for LSTM weights that are bfloat16.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Final, final

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor, nn

FAST: Final[dict[str, Any]] = {"nogil": True, "fastmath": True, "error_model": "numpy"}
MOST: Final = 256
LOOKED_AT: Final = (1, 2, 4, 16, 64, MOST)
"""Rows for which packed and plain products are compared; another number is taken for the next of these."""
LOOKS: Final = 8
F = np.float32


@njit(inline="always", **FAST)
def tanh(x):
    """The rational approximation of Eigen and XLA, degree 13 over 6, within 3e-7: LLVM makes vectors of it."""
    x = min(max(x, F(-7.90531110763549805)), F(7.90531110763549805))
    s = x * x
    above = F(-2.76076847742355e-16)
    above = above * s + F(2.00018790482477e-13)
    above = above * s + F(-8.60467152213735e-11)
    above = above * s + F(5.12229709037114e-08)
    above = above * s + F(1.48572235717979e-05)
    above = above * s + F(6.37261928875436e-04)
    above = above * s + F(4.89352455891786e-03)
    below = F(1.19825839466702e-06)
    below = below * s + F(1.18534705686654e-04)
    below = below * s + F(2.26843463243900e-03)
    return x * above / (below * s + F(4.89352518554385e-03))


@njit(inline="always", **FAST)
def sigmoid(x):
    return F(0.5) * tanh(F(0.5) * x) + F(0.5)


@njit(inline="always", **FAST)
def widened(bits):
    """bfloat16, as its bits, to float32."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@njit(inline="always", **FAST)
def narrowed(value):
    """float32 to the bits of the nearest bfloat16, ties to even."""
    bits = np.float32(value).view(np.uint32)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@njit(**FAST)
def lstm_gates(product, table, words, h, c, n):
    """The first n rows go one step on. product: [rows, 4 H] of h. table: [words, 4 H], the input's share and biases."""
    width = h.shape[1]
    for row in range(n):
        g, x, hidden, cell = product[row], table[words[row]], h[row], c[row]
        for j in range(width):
            i = sigmoid(g[j] + x[j])
            f = sigmoid(g[width + j] + x[width + j])
            u = tanh(g[2 * width + j] + x[2 * width + j])
            o = sigmoid(g[3 * width + j] + x[3 * width + j])
            value = f * cell[j] + i * u
            cell[j] = value
            hidden[j] = o * tanh(value)


@njit(**FAST)
def lstm_gates_bfloat16(product, table, words, h, c, n):
    """As lstm_gates on the bits of bfloat16, but for c, which stays float32."""
    width = h.shape[1]
    for row in range(n):
        g, x, hidden, cell = product[row], table[words[row]], h[row], c[row]
        for j in range(width):
            i = sigmoid(widened(g[j]) + widened(x[j]))
            f = sigmoid(widened(g[width + j]) + widened(x[width + j]))
            u = tanh(widened(g[2 * width + j]) + widened(x[2 * width + j]))
            o = sigmoid(widened(g[3 * width + j]) + widened(x[3 * width + j]))
            value = f * cell[j] + i * u
            cell[j] = value
            hidden[j] = narrowed(o * tanh(value))


@njit(**FAST)
def gru_gates(product, table, words, h, n):
    """The first n rows go one step on. product: [rows, 3 H] of h, with its bias. table: [words, 3 H], the input's."""
    width = h.shape[1]
    for row in range(n):
        g, x, hidden = product[row], table[words[row]], h[row]
        for j in range(width):
            r = sigmoid(g[j] + x[j])
            z = sigmoid(g[width + j] + x[width + j])
            new = tanh(x[2 * width + j] + r * g[2 * width + j])
            hidden[j] = new + z * (hidden[j] - new)


@final
class Product:
    """x [rows, in] -> x W^T (+ bias) [rows, out], packed or plain, whichever is faster here for so many rows.

    Up to MOST rows the result lies where that of the next call with as many rows will lie.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.upright, packs = weight.t().contiguous(), torch.backends.mkldnn.is_available()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if packs else None
        room = torch.zeros((MOST, len(weight)), dtype=weight.dtype)
        self._out = [room[:rows] for rows in range(MOST + 1)]
        self._packs = [self._is_packing_faster(rows) for rows in LOOKED_AT]

    def __call__(self, x: Tensor) -> Tensor:
        return self._packed(x) if self._packs[bisect_left(LOOKED_AT, min(len(x), MOST))] else self._plain(x)

    def of(self, x: Tensor) -> Callable[[], NDArray[Any]]:
        """Return what computes the product of these rows, as they are then, at less cost a call. At most MOST rows."""
        if self._packs[bisect_left(LOOKED_AT, len(x))]:
            return lambda: as_array(self._packed(x))
        out = self._out[len(x)]
        array, upright, multiply = as_array(out), self.upright, torch.mm
        if self.bias is not None:
            return lambda: as_array(self._plain(x))

        def product() -> NDArray[Any]:
            multiply(x, upright, out=out)
            return array

        return product

    def _packed(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def _plain(self, x: Tensor) -> Tensor:
        out = self._out[len(x)] if len(x) <= MOST else None
        if self.bias is None:
            return torch.mm(x, self.upright, out=out)
        return torch.addmm(self.bias, x, self.upright, out=out)

    @torch.no_grad()
    def _is_packing_faster(self, rows: int) -> bool:
        if self.packed is None:
            return False
        x = torch.randn((rows, len(self.upright))).to(self.upright.dtype)
        taken = {False: math.inf, True: math.inf}
        for turn in range(2 * LOOKS):
            begin_s = time.perf_counter()
            (self._packed if turn % 2 else self._plain)(x)
            taken[bool(turn % 2)] = min(taken[bool(turn % 2)], time.perf_counter() - begin_s)
        return taken[True] < taken[False]


def as_array(tensor: Tensor) -> NDArray[Any]:
    """Return the same memory as an array; bfloat16 as its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def folded(embedding: nn.Embedding | None, weight: Tensor, *biases: Tensor) -> NDArray[Any]:
    """Return the table of what each word adds to the gates, computed in float32: [words, gates]."""
    words = torch.eye(weight.shape[1]) if embedding is None else embedding.weight.detach().float()
    whole = words @ weight.detach().float().t() + sum(bias.detach().float() for bias in biases)
    return as_array(whole.to(weight.dtype))
