"""Padded batches for graph batching: torch's own recurrent layers, exact at each request's end."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from batchmaker.errors import ModelError
from batchmaker.model.model import Model


def fused(cells: Sequence[nn.LSTMCell] | Sequence[nn.GRUCell]) -> nn.RNNBase:
    """Return nn.LSTM or nn.GRU that shares the weight tensors of a stack of cells."""
    first = cells[0]
    kind = nn.LSTM if isinstance(first, nn.LSTMCell) else nn.GRU
    layers = kind(first.input_size, first.hidden_size, len(cells), device="meta")
    for number, cell in enumerate(cells):
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            setattr(layers, f"{name}_l{number}", getattr(cell, name))
    return layers.eval()


class PaddedModel(Model):
    """A model whose padded form uses torch's fused layers, which hold the weights of its cells.

    Attributes with a leading underscore are derived from the others: they are not saved, and `_prepare` sets them
    again. `_layers` is None in a loaded model: its cells are graphs, and torch's layers cannot be made from those.
    """

    _layers: nn.RNNBase | None = None

    @abstractmethod
    def _prepare(self) -> None:
        """Set the derived attributes."""

    def saved_state(self) -> dict[str, Any]:
        return {name: value for name, value in super().saved_state().items() if not name.startswith("_")}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._prepare()

    def _need_layers(self) -> nn.RNNBase:
        if self._layers is None:
            raise ModelError(
                f"a {type(self).__name__} loaded from a directory has no padded form; make it with zoo.make, or use "
                "policy 'cellular'"
            )
        return self._layers


def pad(sequences: Sequence[NDArray[np.int64]]) -> tuple[Tensor, Tensor]:
    """Return tokens [longest, batch], zero after each end, and lengths [batch]."""
    lengths = [len(sequence) for sequence in sequences]
    tokens = np.zeros((max(lengths), len(sequences)), np.int64)
    for column, sequence in enumerate(sequences):
        tokens[: len(sequence), column] = sequence
    return torch.from_numpy(tokens), torch.tensor(lengths)


def pad_frames(spectrograms: Sequence[NDArray[np.float32]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return frames [batch, longest, pitches], zeros after each end, and lengths [batch]."""
    lengths = [len(frames) for frames in spectrograms]
    batch = np.zeros((len(spectrograms), max(lengths), spectrograms[0].shape[1]), np.float32)
    for row, frames in zip(batch, spectrograms, strict=True):
        row[: len(frames)] = frames
    return torch.from_numpy(batch).to(dtype), torch.tensor(lengths)


def final_states(layers: nn.RNNBase, x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
    """Return each state, (h, c) or (h,), as [layers, batch, hidden] at each row's own last step.

    x: [longest, batch, width], padded. The steps that all rows have run as one plain batch, where torch is fastest; the
    rest is packed. Of the exact methods this is the fastest at 64 x 1024 and lengths 21 to 30: 291 ms, against 354
    packed and 322 padded, which gives no c (one thread, float32). With few common steps everything is packed: lengths 1
    to 10.
    """
    shared, longest = int(lengths.min()), len(x)
    if shared == longest:
        return _states(layers(x)[1])
    if 4 * shared < longest:
        shared = 0
    extra, order = (lengths - shared).sort(descending=True)
    extra = extra[extra > 0]
    rows = order[: len(extra)]
    rest = pack_padded_sequence(x[shared:].index_select(1, rows), extra)
    if shared == 0:
        back = order.argsort()
        return tuple(part.index_select(1, back) for part in _states(layers(rest)[1]))
    head = _states(layers(x[:shared])[1])
    begun = tuple(part.index_select(1, rows) for part in head)
    tail = _states(layers(rest, begun if len(begun) > 1 else begun[0])[1])
    return tuple(part.index_copy(1, rows, own) for part, own in zip(head, tail, strict=True))


def _states(state: Any) -> tuple[Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


class NetworkModel(Model):
    """A model with its whole network beside its cells, for padded batches and comparisons.

    Attributes with a leading underscore are not saved: a loaded model has only its cells.
    """

    _network: nn.Module | None = None

    def saved_state(self) -> dict[str, Any]:
        return {name: value for name, value in super().saved_state().items() if not name.startswith("_")}

    def alone(self, request: Any) -> Any:
        return self.batched([request])[0]

    def _need_network(self) -> Any:
        if self._network is None:
            raise ModelError(
                f"a {type(self).__name__} loaded from a directory has no padded form; make it with zoo.make, or use "
                "policy 'cellular'"
            )
        return self._network


def outputs_of(cell: nn.LSTMCell | nn.GRUCell, x: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return h at every step of a padded batch: [longest, batch, hidden]. x: [longest, batch, width].

    lengths: [batch], to run each row from its own end to its beginning.
    """
    layer = fused([cell])  # type: ignore[arg-type]
    if lengths is None:
        forwards: Tensor = layer(x)[0]
        return forwards
    return from_the_end(layer(from_the_end(x, lengths))[0], lengths)


def from_the_end(x: Tensor, lengths: Tensor) -> Tensor:
    """Return a padded batch with each row's own steps in reverse order; values beyond its end stay there.

    x: [longest, batch, width]. lengths: [batch].
    """
    step = torch.arange(len(x))[:, None]
    order = torch.where(step < lengths, lengths - 1 - step, step)
    return x.gather(0, order[:, :, None].expand(-1, -1, x.shape[2]))
