"""A BiLSTM tagger of one layer, as g2pM's, in batches by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine_cost.hand_chains import Lstm, Plain, columns
from engine_cost.hand_kernels import Product, lstm_gates

Direction = tuple[nn.Embedding, nn.LSTMCell]
States = Callable[[Sequence[NDArray[np.int64]]], tuple[Tensor, Tensor]]


def parts_of(model: Any) -> tuple[tuple[Direction, Direction], nn.Module]:
    """Return embedding and cell of each direction of a `bilstm-tagger` of one layer, and its output."""
    cells = [model.cells[name].module for name in ("forwards", "backwards")]
    forwards, backwards = [(cell.embedding, cell.layers[0]) for cell in cells]
    return (forwards, backwards), model.cells["tag"].module


@final
class Tagger:
    """The states of every word in either direction, and the output over all words together."""

    def __init__(self, states: States, tag: nn.Module) -> None:
        self._states, self._tag = states, tag

    @torch.no_grad()
    def __call__(self, requests: Sequence[NDArray[np.int64]]) -> list[Tensor]:
        """Return the labels of each sentence's words."""
        return list(self._tag(*self._states(requests)).split([len(request) for request in requests]))


@final
class PlainStates:
    """nn.LSTM over a padded or a packed batch, once in each direction: h of all words, [words, hidden] each."""

    def __init__(self, directions: tuple[Direction, Direction], *, packed: bool) -> None:
        self._directions = [Plain(*direction) for direction in directions]
        self._packed = packed

    @torch.no_grad()
    def __call__(self, requests: Sequence[NDArray[np.int64]]) -> tuple[Tensor, Tensor]:
        lengths = torch.tensor([len(request) for request in requests])
        forwards = self._outputs(self._directions[0], list(requests), lengths)
        backwards = self._outputs(self._directions[1], [request[::-1].copy() for request in requests], lengths)
        step = torch.arange(len(forwards))[:, None]
        backwards = backwards.gather(
            0, (lengths - 1 - step).clamp(min=0)[:, :, None].expand(-1, -1, backwards.shape[2])
        )
        inside = (step < lengths).t()
        return forwards.transpose(0, 1)[inside], backwards.transpose(0, 1)[inside]

    def _outputs(self, plain: Plain, requests: list[NDArray[np.int64]], lengths: Tensor) -> Tensor:
        x = plain.embedding(nn.utils.rnn.pad_sequence([torch.from_numpy(request) for request in requests]))
        if not self._packed:
            return plain.lstm(x)[0]
        parts = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(plain.lstm(parts)[0])[0]


@final
class FoldedStates:
    """The same with what the engine makes for itself; rows in order of length, none computed beyond its end."""

    def __init__(self, directions: tuple[Direction, Direction]) -> None:
        self._directions = [Lstm.of(*direction) for direction in directions]
        self._products = [Product(lstm.recurrent) for lstm in self._directions]

    @torch.no_grad()
    def __call__(self, requests: Sequence[NDArray[np.int64]]) -> tuple[Tensor, Tensor]:
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
        return sides[0], sides[1]


def taggers(model: Any) -> dict[str, Tagger]:
    """Return the ways to compute a `bilstm-tagger` of one layer in batches."""
    directions, tag = parts_of(model)
    return {
        "padded": Tagger(PlainStates(directions, packed=False), tag),
        "packed": Tagger(PlainStates(directions, packed=True), tag),
        "folded": Tagger(FoldedStates(directions), tag),
    }
