"""Convolutions with constant weights, computed in the way that is measured to be fastest for a number of rows.

torch prepares the weights of a convolution at each call. For the short signals of live speech this takes longer than
the arithmetic, and an image of one channel takes a slow path of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Tensor

from batchmaker.compile.linear import PLAIN_ACTIVATIONS, Activation, Linear, can_pack

DENSE_NUMEL: Final = 1 << 20
"""Most weights of the one product that replaces a whole convolution (4 MB)."""
DENSE_ROW: Final = 1 << 12
"""Most numbers in a row of its input. Its weights are found by a convolution of this many rows (64 MB)."""
DENSE_SHARE: Final = 2.5
"""Most operations of this product, over those of the convolution: the others multiply by zero."""
PACKED_FOR: Final = 16
"""Number of rows for which weights are packed. They may be used for any number."""
LOOKS: Final = 3

Way: TypeAlias = Callable[[Tensor], Tensor]


@final
@dataclass(frozen=True, slots=True)
class Window:
    """How a convolution over one or two dimensions goes over its input: one number for each dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]


@final
class Convolution:
    """activation(x * weight + bias) for constant weight [out, in, *window], float32 on the CPU, and bias [out] or None.

    row: shape of a row of x, [in, length] or [in, height, width]. Calls take x [n, *row] and return a fresh, contiguous
    [n, out, *places].

    ways: all ways to compute it, by name. `plain` is torch's. `packed` packs the weights once. `windows` copies the
    inputs of each place side by side and multiplies them. `dense` is one product of a whole row, in which most places
    have zero weights. There an infinite or undefined number of a row reaches all results of this row.
    """

    __name__ = "convolution"  # torch.fx names its nodes by it

    def __init__(
        self, weight: Tensor, bias: Tensor | None, window: Window, row: Sequence[int], activation: Activation = "none"
    ) -> None:
        self._weight, self._bias = weight.detach(), None if bias is None else bias.detach()
        self._window, self._row, self._activation = window, tuple(row), activation
        self._convolve = F.conv1d if weight.ndim == 3 else F.conv2d
        places = self._plain(self._weight.new_zeros((1, *row))).shape[2:]
        self._made = (len(weight), *places)
        self.ways: dict[str, Way] = {"plain": self._plain}
        if can_pack(weight):
            self.ways |= self._packed_ways(math.prod(places))
        self._fastest: dict[int, Way] = {}  # by the number of binary digits of the number of rows

    def __call__(self, x: Tensor) -> Tensor:
        """Return the convolution of x [n, *row]. The first call for a number of rows measures."""
        digits = x.shape[0].bit_length()
        way = self._fastest.get(digits)
        if way is None:  # several threads may measure; the last one decides
            way = self._fastest[digits] = min(self.ways.values(), key=lambda one: _seconds(one, x))
        return way(x)

    def _plain(self, x: Tensor) -> Tensor:
        window = self._window
        made = self._convolve(x, self._weight, self._bias, window.stride, window.padding, window.dilation)
        return made if self._activation == "none" else PLAIN_ACTIVATIONS[self._activation](made)

    def _packed_ways(self, num_places: int) -> dict[str, Way]:
        weight, window = self._weight, self._window
        ways = {"packed": self._packed()}
        if weight.ndim == 3 and window.dilation == (1,):
            ways["windows"] = self._windows()
        inputs, outputs = math.prod(self._row), math.prod(self._made)
        most = min(DENSE_NUMEL, DENSE_SHARE * weight.numel() * num_places)
        if inputs <= DENSE_ROW and inputs * outputs <= most:
            ways["dense"] = self._dense()
        return ways

    def _packed(self) -> Way:
        missing = 4 - self._weight.ndim  # oneDNN's operator takes images; a signal is an image of height 1
        before = [self._window.padding, self._window.stride, self._window.dilation]
        padding, stride, dilation = ([fill] * missing + list(of) for fill, of in zip((0, 1, 1), before, strict=True))
        row = (self._row[0], *[1] * missing, *self._row[1:])
        out, into, *window = self._weight.shape
        packed = torch.ops.mkldnn._reorder_convolution_weight(
            self._weight.reshape(out, into, *[1] * missing, *window), padding, stride, dilation, 1, [PACKED_FOR, *row]
        )
        convolve = torch.ops.mkldnn._convolution_pointwise.default

        def run(x: Tensor) -> Tensor:
            made: Tensor = convolve(
                x.reshape(len(x), *row), packed, self._bias, padding, stride, dilation, 1, self._activation, [], ""
            )
            return made.reshape(len(x), *self._made).contiguous()

        return run

    def _windows(self) -> Way:
        (length,), (stride,), (padding,) = self._weight.shape[2:], self._window.stride, self._window.padding
        layer = Linear(self._weight.flatten(1), self._bias, self._activation)
        out, places = self._made

        def run(x: Tensor) -> Tensor:
            padded = F.pad(x, (padding, padding)) if padding else x
            windows = padded.unfold(2, length, stride).transpose(1, 2).reshape(len(x) * places, -1)
            return layer(windows).view(len(x), places, out).transpose(1, 2).contiguous()

        return run

    def _dense(self) -> Way:
        numel, window = math.prod(self._row), self._window
        each = torch.eye(numel, dtype=self._weight.dtype).view(numel, *self._row)
        weight = self._convolve(each, self._weight, None, window.stride, window.padding, window.dilation)
        bias = None if self._bias is None else self._bias.repeat_interleave(math.prod(self._made[1:]))
        layer = Linear(weight.flatten(1).t().contiguous(), bias, self._activation)
        return lambda x: layer(x.flatten(1)).view(len(x), *self._made)


def _seconds(way: Way, x: Tensor) -> float:
    """Return the shortest time of some calls, after a first one."""
    way(x)
    times = []
    for _ in range(LOOKS):
        begin_s = time.perf_counter()
        way(x)
        times.append(time.perf_counter() - begin_s)
    return min(times)
