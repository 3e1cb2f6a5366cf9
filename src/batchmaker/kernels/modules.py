"""PersistentLSTM and PersistentGRU: nn.LSTM and nn.GRU for inference, on persistent kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from batchmaker.errors import ModelError, OptionError, ShapeError
from batchmaker.kernels.launch import CudaLayers
from batchmaker.kernels.layer import KernelLayers, LayerWeights, RecurrentLayer
from batchmaker.kernels.sequences import KernelSequences, rows_tensor, sequences_of
from batchmaker.kernels.template import CellKind

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@final
@dataclass(frozen=True, slots=True)
class _Projected:
    """One direction of one layer: its input projection, and the recurrent layer."""

    w_ih: Tensor
    bias: Tensor | None
    layer: RecurrentLayer


class PersistentRecurrent(nn.Module, ABC):
    """Several layers, one or two directions. Weights are copied at construction; there is no training.

    The input projection of a layer is one product over all steps. The part that depends on the state runs in one kernel
    per layer and direction, which keeps the recurrent weights on the chip. Calls must not overlap in time.
    """

    source_type: ClassVar[type[nn.RNNBase]]

    def __init__(self, module: nn.RNNBase, cell: CellKind, layers: KernelLayers | None) -> None:
        super().__init__()
        _check_module(module, self.source_type)
        weight: Tensor = module.weight_hh_l0  # type: ignore[assignment]
        layers = layers or CudaLayers.for_device(weight.device)
        self.input_size, self.hidden_size, self.num_layers = module.input_size, module.hidden_size, module.num_layers
        self.batch_first, self.bidirectional = module.batch_first, module.bidirectional
        self._dtype = weight.dtype
        self._directions = 2 if self.bidirectional else 1
        self._parts = [
            _projected(module, f"_l{number}{suffix}", cell, layers)
            for number in range(self.num_layers)
            for suffix in ("", "_reverse")[: self._directions]
        ]

    @classmethod
    @abstractmethod
    def from_module(cls, module: Any) -> Self:
        """Return a copy of a PyTorch module."""

    def _run(
        self, source: Tensor | PackedSequence, h0: Tensor | None, c0: Tensor | None, with_c: bool
    ) -> tuple[Tensor | PackedSequence, Tensor, Tensor | None]:
        """Return the outputs, the last h and the last c, as PyTorch's modules return them. c0 and c: LSTM only."""
        data = source.data if isinstance(source, PackedSequence) else source
        if data.dtype != self._dtype:
            raise ShapeError(f"recurrent module: input is {data.dtype}, the weights are {self._dtype}.")
        sequences = sequences_of(source, self.input_size, self.batch_first)
        h = self._initial("h_0", h0, sequences)
        c = self._initial("c_0", c0, sequences).float() if with_c else None
        x = sequences.data
        for number in range(self.num_layers):
            x = self._run_layer(number, x, sequences, h, c)
        last = _given_back(h, sequences)
        return sequences.outputs(x), last, None if c is None else _given_back(c.to(self._dtype), sequences)

    def _run_layer(self, number: int, x: Tensor, sequences: KernelSequences, h: Tensor, c: Tensor | None) -> Tensor:
        """Return one layer's outputs [rows, directions * hidden]; its state in h and c is changed in place."""
        y = x.new_empty(len(x), self._directions * self.hidden_size)
        for direction in range(self._directions):
            index = number * self._directions + direction
            part = self._parts[index]
            columns = y[:, direction * self.hidden_size : (direction + 1) * self.hidden_size]
            backward = rows_tensor(sequences.reversed_rows(), x.device) if direction else None
            inputs = x if backward is None else x.index_select(0, backward)
            target = columns if backward is None else torch.empty_like(columns, memory_format=torch.contiguous_format)
            part.layer.run(
                F.linear(inputs, part.w_ih, part.bias),
                sequences.offset,
                range(sequences.batch),
                sequences.lengths,
                h[index],
                None if c is None else c[index],
                target,
                step_offset=sequences.step_offset,
            )
            if backward is not None:
                columns.copy_(target.index_select(0, backward))
        return y

    def _initial(self, name: str, state: Tensor | None, sequences: KernelSequences) -> Tensor:
        """Return a fresh [layers * directions, batch, hidden]: zeros, or a copy of the caller's state."""
        shape = (self.num_layers * self._directions, sequences.batch, self.hidden_size)
        if state is None:
            return sequences.data.new_zeros(shape)
        wanted = (shape[0], shape[2]) if _is_unbatched(sequences) else shape
        if tuple(state.shape) != wanted or state.dtype != self._dtype:
            raise ShapeError(
                f"recurrent module: {name} is {state.dtype} of shape {tuple(state.shape)}, "
                f"wanted {self._dtype} {wanted}."
            )
        state = state.detach().view(shape)
        order = sequences.source.sorted_indices if isinstance(sequences.source, PackedSequence) else None
        return state.clone(memory_format=torch.contiguous_format) if order is None else state.index_select(1, order)


@final
class PersistentLSTM(PersistentRecurrent):
    """nn.LSTM for inference: `output, (h_n, c_n) = lstm(input, (h_0, c_0))`, the input padded, unbatched or packed.

    c is float32 within a call. Between calls it has the type of the weights, as in PyTorch.
    """

    source_type = nn.LSTM

    @classmethod
    def from_module(cls, module: nn.LSTM, *, layers: KernelLayers | None = None) -> Self:
        """Return a copy of an LSTM on the GPU that holds its weights.

        layers: makes the layers; by default persistent kernels. Raises DeviceError without a usable GPU, driver or
        compiler, OptionError for a module with projections (proj_size), in training with dropout, or of another type
        than float32, bfloat16 or float16.
        """
        return cls(module, "lstm", layers)

    @torch.no_grad()
    def forward(
        self,
        input: Tensor | PackedSequence,  # noqa: A002 - as in PyTorch
        hx: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor | PackedSequence, tuple[Tensor, Tensor]]:
        """Run the layers, as nn.LSTM does; without gradients.

        input: [T, B, width] (with batch_first [B, T, width]), [T, width], or packed. hx: (h_0, c_0), each [layers *
        directions, B, hidden]; zeros if None. Returns (output, (h_n, c_n)), with output in the form of the input.
        ShapeError for arguments of another form.
        """
        if hx is not None and (not isinstance(hx, tuple | list) or len(hx) != 2):
            raise ShapeError("recurrent module: hx of an LSTM is a pair (h_0, c_0).")
        h0, c0 = (None, None) if hx is None else hx
        y, h, c = self._run(input, h0, c0, with_c=True)
        assert c is not None
        return y, (h, c)


@final
class PersistentGRU(PersistentRecurrent):
    """nn.GRU for inference: `output, h_n = gru(input, h_0)`, the input padded, unbatched or packed."""

    source_type = nn.GRU

    @classmethod
    def from_module(cls, module: nn.GRU, *, reset_after: bool = True, layers: KernelLayers | None = None) -> Self:
        """Return a copy of a GRU on the GPU that holds its weights; see PersistentLSTM.from_module.

        reset_after: True: the reset gate acts on the product with h, as in PyTorch. False: on h before the product, as
        in the paper that introduced the GRU, with the same weights.
        """
        return cls(module, "gru" if reset_after else "gru-before", layers)

    @torch.no_grad()
    def forward(
        self,
        input: Tensor | PackedSequence,  # noqa: A002 - as in PyTorch
        hx: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Run the layers, as nn.GRU does; without gradients.

        input: [T, B, width] (with batch_first [B, T, width]), [T, width], or packed. hx: h_0 [layers * directions, B,
        hidden]; zeros if None. Returns (output, h_n), with output in the form of the input. ShapeError for arguments of
        another form.
        """
        if hx is not None and not isinstance(hx, Tensor):
            raise ShapeError(f"recurrent module: hx of a GRU is the tensor h_0, got {type(hx).__name__}.")
        y, h, _ = self._run(input, hx, None, with_c=False)
        return y, h


def _check_module(module: nn.RNNBase, wanted: type[nn.RNNBase]) -> None:
    if not isinstance(module, wanted):
        raise ModelError(f"from_module: got {type(module).__name__}, wanted torch.nn.{wanted.__name__}.")
    if module.proj_size:
        raise OptionError(
            f"from_module: proj_size is {module.proj_size}; projected states are not supported, wanted 0."
        )
    if module.training and module.dropout:
        raise OptionError(f"from_module: dropout is {module.dropout} and the module trains; call module.eval() first.")
    if module.weight_hh_l0.dtype not in _TYPES:
        raise OptionError(
            f"from_module: the weights are {module.weight_hh_l0.dtype}, wanted one of {', '.join(map(str, _TYPES))}."
        )


def _projected(module: nn.RNNBase, suffix: str, cell: CellKind, layers: KernelLayers) -> _Projected:
    """Return one direction of one layer.

    All biases but one are added to the inputs; their sums are rounded once.
    """
    w_ih, w_hh = (getattr(module, name + suffix).detach().clone() for name in ("weight_ih", "weight_hh"))
    bias, bias_n = None, None
    if module.bias:
        of_input, of_state = (getattr(module, name + suffix).detach().float() for name in ("bias_ih", "bias_hh"))
        if cell == "gru":
            bias_n = of_state[2 * module.hidden_size :].clone()
            of_state = torch.cat([of_state[: 2 * module.hidden_size], torch.zeros_like(bias_n)])
        bias = (of_input + of_state).to(w_ih.dtype)
    return _Projected(w_ih, bias, layers.layer(LayerWeights(cell, w_hh, bias_n)))


def _is_unbatched(sequences: KernelSequences) -> bool:
    return isinstance(sequences.source, Tensor) and sequences.source.ndim == 2


def _given_back(state: Tensor, sequences: KernelSequences) -> Tensor:
    """Return a final state in the caller's order and shape."""
    if isinstance(sequences.source, PackedSequence) and sequences.source.unsorted_indices is not None:
        return state.index_select(1, sequences.source.unsorted_indices)
    return state[:, 0] if _is_unbatched(sequences) else state
