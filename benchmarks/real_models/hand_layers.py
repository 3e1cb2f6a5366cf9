"""nn.LSTM layers over frames in batches by hand: as torch has them, and with compiled gates and no step too many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine_cost.hand_chains import columns
from engine_cost.hand_kernels import Product, lstm_gates


@final
class TorchLayers:
    """The module as it is over a batch, padded or packed. Padding is behind the end, so one direction only is padded.

    Returns the top layer's outputs of all steps, [steps of all requests, hidden * directions], one request after the
    other.
    """

    def __init__(self, lstm: nn.LSTM, *, packed: bool) -> None:
        if lstm.bidirectional and not packed:
            raise ValueError("the backward direction would begin in the padding")
        self._lstm, self._packed = lstm, packed

    @torch.no_grad()
    def __call__(self, requests: Sequence[Tensor]) -> Tensor:
        lengths = torch.tensor([len(request) for request in requests])
        x = nn.utils.rnn.pad_sequence(list(requests), batch_first=self._lstm.batch_first)
        if self._packed:
            parts = nn.utils.rnn.pack_padded_sequence(x, lengths, self._lstm.batch_first, enforce_sorted=False)
            out = nn.utils.rnn.pad_packed_sequence(self._lstm(parts)[0], self._lstm.batch_first)[0]
        else:
            out = self._lstm(x)[0]
        if not self._lstm.batch_first:
            out = out.transpose(0, 1)
        return out[torch.arange(out.shape[1]) < lengths[:, None]]


@final
class CompiledLayers:
    """The same: one product for the inputs of all steps of a layer, packed products and compiled gates for its state.

    Rows are in order of length, so that who has ended is not computed any more.
    """

    def __init__(self, lstm: nn.LSTM) -> None:
        suffixes = ("", "_reverse") if lstm.bidirectional else ("",)
        self._layers = [
            [_Direction(lstm, f"_l{layer}{suffix}") for suffix in suffixes] for layer in range(lstm.num_layers)
        ]

    @torch.no_grad()
    def __call__(self, requests: Sequence[Tensor]) -> Tensor:
        lengths = np.array([len(request) for request in requests])
        ends = np.cumsum(lengths)
        places = [np.arange(end - length, end) for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]
        turned = [place[::-1] for place in places]
        x = torch.cat(list(requests))
        for layer in self._layers:
            x = torch.cat([one(x, given) for one, given in zip(layer, (places, turned), strict=False)], -1)
        return x


@final
class _Direction:
    """One direction of a layer."""

    def __init__(self, lstm: nn.LSTM, suffix: str) -> None:
        weight, bias_ih, bias_hh = (
            getattr(lstm, name + suffix).detach() for name in ("weight_ih", "bias_ih", "bias_hh")
        )
        self._hidden = lstm.hidden_size
        self._inputs = nn.Linear(*weight.shape[::-1]).requires_grad_(False)
        self._inputs.load_state_dict({"weight": weight, "bias": bias_ih + bias_hh})
        self._product = Product(getattr(lstm, "weight_hh" + suffix))

    def __call__(self, x: Tensor, places: Sequence[NDArray[np.int64]]) -> Tensor:
        """Return h of every step. x: [steps of all, width]. places: of each request's steps in x, in their order."""
        table, out = self._inputs(x).numpy(), torch.empty(len(x), self._hidden)
        order, steps, running = columns(places)
        h, c = torch.zeros(len(order), self._hidden), np.zeros((len(order), self._hidden), np.float32)
        for now, n in zip(steps, running, strict=True):
            lstm_gates(self._product(h[:n]).numpy(), table, now, h.numpy(), c, n)
            out[torch.from_numpy(np.ascontiguousarray(now[:n]))] = h[:n]
        return out
