"""The interface of a recurrent layer, for every implementation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from batchmaker.errors import ShapeError
from batchmaker.kernels.rows import CallRows, Numbers, call_rows
from batchmaker.kernels.template import CellKind


@final
@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The recurrent weights of one layer, in PyTorch's order of gates: (i, f, g, o) or (r, z, n).

    w_hh: [gates * hidden, hidden], float32, bfloat16 or float16. bias_n: [hidden], float32, added to the candidate's
    product before the reset gate; only for "gru". All other biases belong to the projected inputs.
    """

    cell: CellKind
    w_hh: Tensor
    bias_n: Tensor | None

    @property
    def hidden(self) -> int:
        return self.w_hh.shape[1]

    @property
    def gates(self) -> int:
        return 4 if self.cell == "lstm" else 3


@final
@dataclass(frozen=True, slots=True)
class CallBuffers:
    """The tensors of a recorded call: the same at every replay, with any content.

    Step t of row b reads row b * steps + t of px, [rows * steps, gates * hidden] or longer, and writes that row of y,
    [rows * steps, hidden]. length: [rows] int32, at most `steps`, longest first; y is undefined beyond. h, c: [rows,
    hidden], the state before and after; c is float32, and None except for an LSTM. c_steps: c of every step in float32,
    in the rows of y; None if it is not needed.
    """

    px: Tensor
    length: Tensor
    h: Tensor
    c: Tensor | None
    y: Tensor
    c_steps: Tensor | None = None

    @property
    def rows(self) -> int:
        return len(self.length)

    @property
    def steps(self) -> int:
        return len(self.y) // len(self.length)


class RecurrentLayer(ABC):
    """One layer, ready to run: the engine's task of several steps. Subclasses implement the computation."""

    def __init__(self, weights: LayerWeights) -> None:
        self._weights = weights

    def run(
        self,
        px: Tensor,
        px_row_offset: Numbers,
        slot: Numbers,
        length: Numbers,
        h_state: Tensor,
        c_state: Tensor | None,
        y: Tensor | None = None,
        y_offset: Numbers | None = None,
        *,
        step_offset: Numbers | None = None,
    ) -> None:
        """Advance each row by its number of steps: the tables then hold its last state, and y its h of each step.

        px: projected inputs [rows, gates * hidden]. px_row_offset, slot, length: for each row, on the host, in any
        order; a length may be 0. h_state: [slots, hidden]; c_state: the same in float32, and None except for an LSTM;
        both are written at `slot`. y: [rows, hidden]; its rows may be part of longer ones. y_offset: default:
        px_row_offset. step_offset: the distance of step t from a row's first step; default: t. Calls of one layer must
        not overlap in time. Raises ShapeError for tensors that do not fit, OptionError for an invalid row, slot or
        length.
        """
        checked = self._checked(px, px_row_offset, slot, length, h_state, c_state, y, y_offset, step_offset)
        self.run_rows(checked, px, h_state, c_state, y)

    @abstractmethod
    def run_rows(self, rows: CallRows, px: Tensor, h_state: Tensor, c_state: Tensor | None, y: Tensor | None) -> None:
        """Compute rows that were checked; the other arguments are those of `run`."""

    def _checked(
        self,
        px: Tensor,
        px_row_offset: Numbers,
        slot: Numbers,
        length: Numbers,
        h_state: Tensor,
        c_state: Tensor | None,
        y: Tensor | None,
        y_offset: Numbers | None,
        step_offset: Numbers | None,
    ) -> CallRows:
        """Check all arguments of a call of `run` and return its rows."""
        weights = self._weights
        hidden, dtype = weights.hidden, weights.w_hh.dtype
        _check("px", px, weights.gates * hidden, dtype, weights.w_hh.device)
        _check("h_state", h_state, hidden, dtype, weights.w_hh.device)
        if weights.cell == "lstm":
            if c_state is None:
                raise ShapeError("recurrent call: an LSTM needs c_state, float32 of the shape of h_state.")
            _check("c_state", c_state, hidden, torch.float32, weights.w_hh.device)
            if len(c_state) != len(h_state):
                raise ShapeError(f"recurrent call: c_state has {len(c_state)} rows, h_state has {len(h_state)}.")
        elif c_state is not None:
            raise ShapeError(f"recurrent call: a {weights.cell} has no c_state; leave it out.")
        if y is not None:
            _check("y", y, hidden, dtype, weights.w_hh.device, whole_rows=False)
        return call_rows(
            px_row_offset,
            slot,
            length,
            y_offset,
            step_offset,
            num_inputs=len(px),
            num_slots=len(h_state),
            num_outputs=None if y is None else len(y),
        )


class KernelLayers(Protocol):
    """Makes layers: on a GPU with persistent kernels, or with plain operations."""

    def layer(self, weights: LayerWeights) -> RecurrentLayer:
        """Return a layer with a copy of these weights."""


def _check(
    name: str, value: Tensor, width: int, dtype: torch.dtype, device: torch.device, *, whole_rows: bool = True
) -> None:
    if value.ndim != 2 or value.shape[1] != width:
        raise ShapeError(f"recurrent call: {name} has shape {tuple(value.shape)}, wanted (rows, {width}).")
    if value.dtype != dtype:
        raise ShapeError(f"recurrent call: {name} is {value.dtype}, wanted {dtype}.")
    if value.device != device:
        raise ShapeError(f"recurrent call: {name} is on {value.device}, the weights are on {device}.")
    dense = value.is_contiguous() if whole_rows else value.stride(1) == 1
    if value.numel() and not dense:
        raise ShapeError(f"recurrent call: {name} has strides {value.stride()}; make it contiguous.")
