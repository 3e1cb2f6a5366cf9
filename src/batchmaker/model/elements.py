"""Cells that only move values: an element out of a value [n, ...], and values as they are."""

from __future__ import annotations

from typing import Final, final

from torch import Tensor, nn

from batchmaker.graph.spec import ValueSpec

INDEX: Final = ValueSpec((), "int64")
"""The second input of `Element`, beside the value."""


@final
class Element(nn.Module):
    """(values [batch, n, ...], index [batch]) -> the element of each row at its index, [batch, ...]."""

    def forward(self, values: Tensor, index: Tensor) -> Tensor:
        at = index.view(-1, 1, *(1,) * (values.dim() - 2)).expand(-1, 1, *values.shape[2:])
        return values.gather(1, at).squeeze(1)


@final
class Same(nn.Module):
    """Values [batch, ...] -> the same: what came with the request as what a cell gives."""

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        return values
