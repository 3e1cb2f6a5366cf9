"""Linear layers with constant weights, packed once for oneDNN if that is faster."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["none", "tanh", "sigmoid", "relu"]

# Measured on one Zen 4 core (benchmarks/cells.py): a packed call starts 12 us later than addmm.
PLAIN_NUMEL = 1 << 16
"""float32 weights up to this number of elements stay plain at every batch size."""
PLAIN_ROW_NUMEL = 1 << 18
"""float32 weights up to this number of elements stay plain for a single row."""

PLAIN_ACTIVATIONS: Final[dict[Activation, Callable[[Tensor], Tensor]]] = {
    "tanh": torch.tanh_,
    "sigmoid": torch.sigmoid_,
    "relu": torch.relu_,
}
"""Activations in place."""


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN has a packed matrix product for this weight on this machine."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


@final
class Linear:
    """x @ weight.T + bias for constant weight [out, in] and bias [out] or None.

    Calls take x [n, in] and return a fresh [n, out]. Only add_ modifies an argument.
    """

    __name__ = "packed_linear"  # torch.fx names its nodes by it
    __slots__ = ("_binary", "_transposed", "_unary", "activation", "bias", "packed", "plain_rows", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: Activation = "none") -> None:
        weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.activation = activation
        self.weight: Tensor | None = weight
        self.packed: Tensor | None = None
        self.plain_rows = sys.maxsize
        if can_pack(weight) and not (weight.dtype is torch.float32 and weight.numel() <= PLAIN_NUMEL):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
            small = weight.dtype is torch.float32 and weight.numel() <= PLAIN_ROW_NUMEL
            self.plain_rows = 1 if small else 0
            self.weight = weight if small else None  # otherwise the packed copy is enough
        self._transposed = None if self.weight is None else self.weight.t()
        self._unary = torch.ops.mkldnn._linear_pointwise.default
        self._binary = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        """Return activation(x @ weight.T + bias)."""
        if x.shape[0] > self.plain_rows:
            product: Tensor = self._unary(x, self.packed, self.bias, self.activation, [], "")
            return product
        assert self.weight is not None
        product = F.linear(x, self.weight, self.bias)
        if self.activation != "none":
            PLAIN_ACTIVATIONS[self.activation](product)
        return product

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        """Return x @ weight.T + bias + other, other [n, out] of the same dtype."""
        if x.shape[0] > self.plain_rows:
            total: Tensor = self._binary(x, other, self.packed, self.bias, "add")
            return total
        assert self._transposed is not None
        total = torch.addmm(other, x, self._transposed)
        return total if self.bias is None else total.add_(self.bias)

    def add_(self, x: Tensor, other: Tensor) -> Tensor:
        """As `add`, but may write the result over `other`, which is contiguous."""
        if x.shape[0] > self.plain_rows:
            return self.add(x, other)
        assert self._transposed is not None
        total = other.addmm_(x, self._transposed)
        return total if self.bias is None else total.add_(self.bias)
