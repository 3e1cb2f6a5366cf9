"""Attention over a memory with a fixed number of places; each request uses the first few."""

from __future__ import annotations

from typing import Any, Final, final

import torch
from torch import Tensor, nn

from batchmaker.compile.declaration import Declared
from batchmaker.graph.spec import ValueSpec
from batchmaker.graph.values import ValueSequence
from batchmaker.model.cell import Cell

BLOCK: Final = 8
"""Places of a memory that one step fills. Each step writes the whole memory anew, so fewer steps are better."""


def used(count: Tensor, places: int) -> Tensor:
    """Return which places are in use: bool [n, places]. count: [n]."""
    return torch.arange(places, device=count.device) < count[:, None]


def mean_of(values: Tensor, scores: Tensor, count: Tensor) -> Tensor:
    """Return the mean of the first `count` values under softmax of the scores: [n, width].

    values: [n, places, width]. scores: [n, places].
    """
    scores = scores.masked_fill(~used(count, scores.shape[1]), float("-inf"))
    return (scores.softmax(-1)[:, None] @ values)[:, 0]


@final
class AdditiveAttention(nn.Module):
    """score = v tanh(W query + U memory) (Bahdanau et al. 2015). keys: U memory, constant over the steps."""

    def __init__(self, query_width: int, memory_width: int, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(query_width, width)
        self.keys = nn.Linear(memory_width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, query: Tensor, values: Tensor, keys: Tensor, count: Tensor) -> Tensor:
        scores = self.score((self.query(query)[:, None] + keys).tanh())[:, :, 0]
        return mean_of(values, scores, count)


@final
class DotAttention(nn.Module):
    """score = (W query) (U memory) (Chan et al. 2016, section 3.2). keys: U memory, constant over the steps."""

    def __init__(self, query_width: int, memory_width: int, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(query_width, width)
        self.keys = nn.Linear(memory_width, width)

    def forward(self, query: Tensor, values: Tensor, keys: Tensor, count: Tensor) -> Tensor:
        scores = (keys @ self.query(query)[:, :, None])[:, :, 0]
        return mean_of(values, scores, count)


@final
class Remember(nn.Module):
    """Writes encoder outputs into the next places of a memory.

    forward(part of place 1, ..., values, keys, count) -> (values, keys, count). The inputs are `parts` tensors [n,
    width] for each of `block` places; concatenated they are one value. values: [n, places, ...]; keys: `keys` of each
    value. count: places in use, [n] int64.
    """

    def __init__(self, keys: nn.Module, parts: int, block: int) -> None:
        super().__init__()
        self.keys = keys
        self.parts = parts
        self.block = block

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (values, keys, count) after writing `block` places from `count` on; the arguments are not modified."""
        *rows, values, keys, count = inputs
        parts = self.parts
        value = torch.stack([torch.cat(rows[at : at + parts], -1) for at in range(0, len(rows), parts)], 1)
        key = self.keys(value)
        places = (count[:, None] + torch.arange(self.block, device=count.device))[:, :, None]
        values = values.scatter(1, places.expand(-1, -1, value.shape[2]), value)
        keys = keys.scatter(1, places.expand(-1, -1, key.shape[2]), key)
        return values, keys, count + self.block


def remember_cell(keys: nn.Linear, *, places: int, parts: int, block: int, dtype: str, max_batch: int) -> Cell:
    """Return a cell that fills a memory from zeros. keys: the module from the encoder's outputs to the keys."""
    width = keys.in_features
    state = (
        ValueSpec((places, width), dtype),
        ValueSpec((places, keys.out_features), dtype),
        ValueSpec((), "int64"),
    )
    inputs = (ValueSpec((width // parts,), dtype),) * (parts * block)
    module = Remember(keys, parts, block)
    return Cell(module, max_batch=max_batch, declared=Declared((*inputs, *state), state))


def remember(blocks: Cell, singles: Cell, parts: tuple[ValueSequence, ...]) -> Any:
    """Add the nodes that fill a memory with a sequence, and return (values, keys, count).

    blocks: fills BLOCK places a step. singles: fills one, for the rest.
    """
    count = len(parts[0])
    even = count - count % BLOCK
    state = None
    if even:
        state = blocks.run(tuple(part[at:even:BLOCK] for at in range(BLOCK) for part in parts))
    if even < count:
        state = singles.run(tuple(part[even:] for part in parts), state)
    return state
