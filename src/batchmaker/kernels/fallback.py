"""Recurrent layers step by step with PyTorch's operations, on any device, if no persistent kernel fits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.errors import DeviceError
from batchmaker.kernels.layer import CallBuffers, LayerWeights, RecurrentLayer
from batchmaker.kernels.rows import CallRows
from batchmaker.kernels.tuner import batch_bucket

_LOG = logging.getLogger("batchmaker.kernels")
MOST_STEPS: Final = 32
"""Steps of the longest recording; a longer call replays it several times."""


@final
class SteppedLayers:
    """Makes layers with one product per step (two for "gru-before"), in the kernels' arithmetic."""

    def layer(self, weights: LayerWeights) -> SteppedLayer:
        return SteppedLayer(weights)


@final
class SteppedLayer(RecurrentLayer):
    """See RecurrentLayer. h is rounded to its type in every step; gates and c are float32."""

    def __init__(self, weights: LayerWeights) -> None:
        super().__init__(weights)
        self._transposed = weights.w_hh.detach().t().contiguous()

    @torch.no_grad()
    def run_rows(self, rows: CallRows, px: Tensor, h_state: Tensor, c_state: Tensor | None, y: Tensor | None) -> None:
        """Advance the rows step by step with PyTorch's operations.

        The arguments are those of RecurrentLayer.run_rows. Step t computes only the rows that have at least t + 1
        steps.
        """
        px_offset, slots, y_rows = (
            torch.from_numpy(each).long().to(px.device) for each in (rows.px_offset, rows.slot, rows.y_offset)
        )
        h = h_state.index_select(0, slots)
        c = None if c_state is None else c_state.index_select(0, slots)
        for t in range(rows.longest):
            active = int((rows.length > t).sum())
            at = int(rows.step_offset[t])
            x = px.index_select(0, px_offset[:active] + at).float()
            h[:active] = self._step(x, h[:active], None if c is None else c[:active])
            if y is not None:
                y.index_copy_(0, y_rows[:active] + at, h[:active])
        h_state.index_copy_(0, slots, h)
        if c_state is not None and c is not None:
            c_state.index_copy_(0, slots, c)

    @torch.no_grad()
    def run_buffers(self, call: CallBuffers) -> tuple[Tensor, ...]:
        """Compute a call in its buffers without reading a value, so that it can be recorded.

        All rows go through all steps; rows that have ended keep their state. Returns the written tensors.
        """
        rows, steps = call.rows, call.steps
        px, y = call.px[: rows * steps].view(rows, steps, -1), call.y.view(rows, steps, -1)
        for t in range(steps):
            goes_on = (call.length > t)[:, None]
            c = None if call.c is None else call.c.clone()
            h = self._step(px[:, t].float(), call.h, c)
            call.h.copy_(torch.where(goes_on, h, call.h))
            if call.c is not None and c is not None:
                call.c.copy_(torch.where(goes_on, c, call.c))
                if call.c_steps is not None:
                    call.c_steps.view(rows, steps, -1)[:, t] = call.c
            y[:, t] = call.h
        return tuple(each for each in (call.h, call.y, call.c, call.c_steps) if each is not None)

    def _step(self, x: Tensor, h: Tensor, c: Tensor | None) -> Tensor:
        """Return the new h; c is changed in place. x: [batch, gates * hidden], float32."""
        hidden = h.shape[1]
        if c is not None:
            i, f, g, o = (x + (h @ self._transposed).float()).chunk(4, 1)
            c.mul_(f.sigmoid()).addcmul_(i.sigmoid(), g.tanh())
            return (o.sigmoid() * c.tanh()).to(h.dtype)
        products = h @ (self._transposed if self._weights.cell == "gru" else self._transposed[:, : 2 * hidden])
        r, z = (x[:, : 2 * hidden] + products[:, : 2 * hidden].float()).sigmoid().chunk(2, 1)
        if self._weights.cell == "gru":
            last = products[:, 2 * hidden :].float()
            last = r * (last if self._weights.bias_n is None else last + self._weights.bias_n)
        else:
            last = ((r * h.float()).to(h.dtype) @ self._transposed[:, 2 * hidden :]).float()
        n = (x[:, 2 * hidden :] + last).tanh()
        return (n + z * (h.float() - n)).to(h.dtype)


class StepRecorder(Protocol):
    """Records work of a device and replays it; implemented by the executor's devices."""

    def compute(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Submit operations after all earlier ones."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return a function that submits the work again. Raises any error that prevents the recording."""


@final
class RecordedLayer(RecurrentLayer):
    """See RecurrentLayer. Steps are replayed from recordings.

    There is one for each number of rows and of steps, both rounded up to powers of two. A layer that cannot be recorded
    runs step by step, and the log says so once.
    """

    def __init__(self, weights: LayerWeights, recorder: StepRecorder) -> None:
        super().__init__(weights)
        self._stepped = SteppedLayer(weights)
        self._recorder = recorder
        self._recordings: dict[tuple[int, int], tuple[CallBuffers, Callable[[], None]]] = {}
        self._cannot = False

    def run_rows(self, rows: CallRows, px: Tensor, h_state: Tensor, c_state: Tensor | None, y: Tensor | None) -> None:
        """Advance the rows by replays of a recording, or step by step if recording is impossible.

        The arguments are those of RecurrentLayer.run_rows. All work is submitted to the recorder's device and may not
        have finished at the return.
        """
        recording = None if rows.longest == 0 else self._recording(rows)
        if recording is None:
            self._submit(lambda: self._stepped.run_rows(rows, px, h_state, c_state, y))
            return
        call, replay = recording
        own, slots = slice(len(rows.slot)), _on_device(rows.slot, px.device)
        tables = [(call.h, h_state)] if call.c is None or c_state is None else [(call.h, h_state), (call.c, c_state)]

        def enter() -> None:
            for buffer, table in tables:
                buffer[own] = table.index_select(0, slots)

        def leave() -> None:
            for buffer, table in tables:
                table.index_copy_(0, slots, buffer[own])

        self._submit(enter)
        for first in range(0, rows.longest, call.steps):
            numbers = _Numbers.of(rows, first, call)
            self._submit(lambda numbers=numbers: numbers.fill(call, px))  # type: ignore[misc]
            replay()
            if y is not None:
                self._submit(lambda numbers=numbers: numbers.take(call, y))  # type: ignore[misc]
        self._submit(leave)

    def _submit(self, work: Callable[[], None]) -> None:
        @torch.no_grad()
        def quietly() -> tuple[Tensor, ...]:
            work()
            return ()

        self._recorder.compute(quietly)

    def _recording(self, rows: CallRows) -> tuple[CallBuffers, Callable[[], None]] | None:
        """Return buffers and a function that replays the steps in them, None if recording is impossible."""
        size = batch_bucket(len(rows.slot)), min(MOST_STEPS, batch_bucket(rows.longest))
        if size not in self._recordings and not self._cannot:
            call = call_buffers(self._weights, *size)

            def work() -> None:
                self._recorder.compute(lambda: self._stepped.run_buffers(call))

            try:
                self._recordings[size] = call, self._recorder.record(work)
            except (DeviceError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # any error of the device
                self._cannot = True
                _LOG.warning("the steps of a layer are not recorded (%s); they run one operation at a time", error)
        return self._recordings.get(size)


def call_buffers(weights: LayerWeights, rows: int, steps: int) -> CallBuffers:
    """Return buffers for these numbers of rows and steps, on the weights' device, with lengths of zero."""

    def zeros(*shape: int, dtype: torch.dtype = weights.w_hh.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=weights.w_hh.device)

    return CallBuffers(
        zeros(rows * steps, weights.gates * weights.hidden),
        zeros(rows, dtype=torch.int32),
        zeros(rows, weights.hidden),
        zeros(rows, weights.hidden, dtype=torch.float32) if weights.cell == "lstm" else None,
        zeros(rows * steps, weights.hidden),
    )


@final
@dataclass(frozen=True, slots=True)
class _Numbers:
    """The steps of a call in one replay. length: of each row. place: in the buffers; px_row, y_row: outside."""

    length: Tensor
    place: Tensor
    px_row: Tensor
    y_row: Tensor

    @classmethod
    def of(cls, rows: CallRows, first: int, call: CallBuffers) -> _Numbers:
        """Return the steps from `first` on that fit into the buffers."""
        length = np.zeros(call.rows, np.int64)
        length[: len(rows.length)] = np.clip(rows.length - first, 0, call.steps)
        row, step = np.nonzero(np.arange(call.steps) < length[:, None])
        at = rows.step_offset[first + step]
        numbers = np.concatenate((length, row * call.steps + step, rows.px_offset[row] + at, rows.y_offset[row] + at))
        return cls(*_on_device(numbers, call.h.device).tensor_split([call.rows, call.rows + len(row), -len(row)]))

    def fill(self, call: CallBuffers, px: Tensor) -> None:
        call.length.copy_(self.length)
        call.px.index_copy_(0, self.place, px.index_select(0, self.px_row))

    def take(self, call: CallBuffers, y: Tensor) -> None:
        y.index_copy_(0, self.y_row, call.y.index_select(0, self.place))


def _on_device(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """Return numbers as int64 on a device, without waiting for it."""
    host = torch.from_numpy(numbers).long()
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
