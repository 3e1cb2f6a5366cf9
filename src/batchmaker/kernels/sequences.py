"""The places of the steps of a batch of sequences: padded, batch first, unbatched or packed, without copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from batchmaker.arrays import Ints
from batchmaker.errors import ShapeError


@final
@dataclass(frozen=True, slots=True)
class KernelSequences:
    """A batch of sequences as rows of one matrix: step t of sequence b is row offset[b] + step_offset[t].

    data: [rows, width]. lengths, offset: [batch]. step_offset: [longest]. source: the original input; `outputs` returns
    its form.
    """

    data: Tensor
    lengths: Ints
    offset: Ints
    step_offset: Ints
    source: Tensor | PackedSequence
    batch_first: bool

    @property
    def batch(self) -> int:
        return len(self.lengths)

    def reversed_rows(self) -> Ints:
        """Return, for each row, the row of the same sequence's step counted from the end."""
        rows = np.arange(len(self.data))
        for b, length in enumerate(self.lengths):
            mine = self.offset[b] + self.step_offset[:length]
            rows[mine] = mine[::-1]
        return rows

    def outputs(self, y: Tensor) -> Tensor | PackedSequence:
        """Return rows of outputs in the form of the input."""
        if isinstance(self.source, PackedSequence):
            return self.source._replace(data=y)
        return y.view(*self.source.shape[:-1], y.shape[1])


def sequences_of(source: Tensor | PackedSequence, width: int, batch_first: bool) -> KernelSequences:
    """Return the sequences of an input of nn.LSTM.

    The input is [T, B, width], with batch_first [B, T, width], [T, width], or packed, whose sequences are sorted by
    length. Raises ShapeError for another shape, and for an input without steps or sequences.
    """
    if isinstance(source, PackedSequence):
        data, sizes = source.data, source.batch_sizes.numpy().astype(np.int64)
        _check_width(data, 2, width, "packed data of shape (steps, {width})")
        lengths = (sizes[:, None] > np.arange(sizes[0])).sum(axis=0)
        step_offset = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        return KernelSequences(data, lengths, np.arange(sizes[0]), step_offset, source, batch_first)
    _check_width(source, 2 if source.ndim == 2 else 3, width, "3 dimensions, or 2 without a batch, the last {width}")
    shape = (len(source), 1) if source.ndim == 2 else source.shape[:2]
    steps, batch = shape if not batch_first or source.ndim == 2 else (shape[1], shape[0])
    if not steps or not batch:
        raise ShapeError(f"recurrent module: input of shape {tuple(source.shape)} holds no step; wanted at least one.")
    row, step = (steps, 1) if batch_first and source.ndim == 3 else (1, batch)
    return KernelSequences(
        source.reshape(steps * batch, width),
        np.full(batch, steps),
        np.arange(batch) * row,
        np.arange(steps) * step,
        source,
        batch_first,
    )


def _check_width(value: Tensor, dims: int, width: int, wanted: str) -> None:
    if value.ndim != dims or value.shape[-1] != width:
        raise ShapeError(
            f"recurrent module: input has shape {tuple(value.shape)}, wanted {wanted.format(width=width)}."
        )


def rows_tensor(places: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(places).to(device)
