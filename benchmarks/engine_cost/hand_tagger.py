"""A BiLSTM tagger of one layer, as g2pM's, in batches by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine_cost.hand_chains import Lstm, Plain, columns
from engine_cost.hand_kernels import Product, lstm_gates


def parts_of(model: Any) -> tuple[tuple[nn.Embedding, nn.LSTMCell], tuple[nn.Embedding, nn.LSTMCell], nn.Module]:
    """Return embedding and cell of each direction of a `bilstm-tagger` of one layer, and its output."""
    cells = [model.cells[name].module for name in ("forwards", "backwards")]
    forwards, backwards = [(cell.embedding, cell.layers[0]) for cell in cells]
    return forwards, backwards, model.cells["tag"].module


@final
class PlainTagger:
    """nn.LSTM over a padded or a packed batch, once in each direction, and the output over all words together."""

    def __init__(self, model: Any, *, packed: bool) -> None:
        forwards, backwards, self._tag = parts_of(model)
        self._directions = [Plain(*forwards), Plain(*backwards)]
        self._packed = packed

    @torch.no_grad()
    def __call__(self, requests: Sequence[NDArray[np.int64]]) -> list[Tensor]:
        """Return the labels of each sentence's words."""
        lengths = torch.tensor([len(request) for request in requests])
        forwards = self._outputs(self._directions[0], list(requests), lengths)
        backwards = self._outputs(self._directions[1], [request[::-1].copy() for request in requests], lengths)
        step = torch.arange(len(forwards))[:, None]
        backwards = backwards.gather(
            0, (lengths - 1 - step).clamp(min=0)[:, :, None].expand(-1, -1, backwards.shape[2])
        )
        inside = (step < lengths).t()
        labels = self._tag(forwards.transpose(0, 1)[inside], backwards.transpose(0, 1)[inside])
        return list(labels.split(lengths.tolist()))

    def _outputs(self, plain: Plain, requests: list[NDArray[np.int64]], lengths: Tensor) -> Tensor:
        x = plain.embedding(nn.utils.rnn.pad_sequence([torch.from_numpy(request) for request in requests]))
        if not self._packed:
            return plain.lstm(x)[0]
        parts = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(plain.lstm(parts)[0])[0]


@final
class FoldedTagger:
    """The same with what the engine makes for itself; rows in order of length, none computed beyond its end."""

    def __init__(self, model: Any) -> None:
        forwards, backwards, self._tag = parts_of(model)
        self._directions = [Lstm.of(*forwards), Lstm.of(*backwards)]
        self._products = [Product(lstm.recurrent) for lstm in self._directions]

    @torch.no_grad()
    def __call__(self, requests: Sequence[NDArray[np.int64]]) -> list[Tensor]:
        """Return the labels of each sentence's words."""
        lengths = np.array([len(request) for request in requests])
        starts = np.cumsum(lengths) - lengths
        total = int(lengths.sum())
        sides = [torch.empty(total, lstm.hidden) for lstm in self._directions]
        turned = ([*requests], [request[::-1] for request in requests])
        for side, (lstm, product, given) in enumerate(zip(self._directions, self._products, turned, strict=True)):
            order, words, running = columns(given)
            h, c = torch.zeros(len(order), lstm.hidden), np.zeros((len(order), lstm.hidden), np.float32)
            place = (starts if side == 0 else starts + lengths - 1)[order]
            for now, n in zip(words, running, strict=True):
                lstm_gates(product(h[:n]).numpy(), lstm.table, now, h.numpy(), c, n)
                sides[side][torch.from_numpy(place[:n])] = h[:n]
                place += 1 if side == 0 else -1
        return list(self._tag(*sides).split(lengths.tolist()))
