"""Speech recognition by convolutions, recurrent layers and a dense layer (Deep Speech 2, Amodei et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from batchmaker.lab.zoo.padding import NetworkModel, outputs_of, pad_frames
from batchmaker.lab.zoo.parts import DTYPES, check_choice, check_positive, checked_frames, frozen, seeded
from batchmaker.model.cell import Cell

Output = Literal["labels", "scores"]

TIME: Final = 11
"""Frames in the window of a convolution."""
_PITCHES: Final = (41, 21, 21)
"""Frequencies in the window of each convolution; it keeps every second one."""


@final
class ConvolutionLayer(nn.Module):
    """Convolution, batch norm and a ReLU cut off at 20: [n, inputs, pitches, frames] -> [n, outputs, ..., ...]."""

    def __init__(self, inputs: int, outputs: int, pitches: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.padding = (pitches // 2, TIME // 2)
        self.convolution = nn.Conv2d(inputs, outputs, (pitches, TIME), (2, stride), self.padding, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.activated(self.convolution(x))

    def activated(self, x: Tensor) -> Tensor:
        return F.hardtanh(self.norm(x), 0.0, 20.0)

    def frame(self, window: Tensor, inside: Tensor) -> Tensor:
        """Return one frame of the result of `forward`: [n, outputs, pitches], zeros where `inside` [n] is zero.

        window: [n, inputs, pitches, TIME], the frames around the frame.
        """
        x = F.conv2d(window, self.convolution.weight, None, (2, 1), (self.padding[0], 0))
        return self.activated(x)[..., 0] * inside[:, None, None]

    def frames(self, count: Any) -> Any:
        """Return the number of output frames for `count` input frames."""
        return (count - 1) // self.stride + 1


@final
class FirstConvolution(nn.Module):
    """A frame from a window of the spectrogram: forward(window [n, pitches, TIME], inside [n])."""

    def __init__(self, layer: ConvolutionLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, window: Tensor, inside: Tensor) -> Tensor:
        return self.layer.frame(window[:, None], inside)


@final
class NextConvolution(nn.Module):
    """A frame from TIME frames of the layer below: forward(frame 1, ..., frame TIME, inside [n])."""

    def __init__(self, layer: ConvolutionLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.layer.frame(torch.stack(inputs[:-1], -1), inputs[-1])


@final
class FirstDirection(nn.Module):
    """One direction of the first recurrent layer: forward(frame [n, channels, pitches], h) -> h."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gru = nn.GRUCell(width, hidden)

    def forward(self, frame: Tensor, h: Tensor) -> Tensor:
        result: Tensor = self.gru(frame.flatten(1), h)
        return result


@final
class PaddedDirection(nn.Module):
    """One direction of a recurrent layer above another: forward(left, right, h) -> h, of the normalised sum of both."""

    def __init__(self, norm: nn.Module, hidden: int) -> None:
        super().__init__()
        self.norm = norm
        self.gru = nn.GRUCell(hidden, hidden)

    def forward(self, left: Tensor, right: Tensor, h: Tensor) -> Tensor:
        result: Tensor = self.gru(self.norm(left + right), h)
        return result


@final
class Scores(nn.Module):
    """forward(left, right) -> scores of the characters [n, characters], or the likeliest [n]."""

    def __init__(self, hidden: int, characters: int, output: Output) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(hidden)
        self.dense = nn.Linear(hidden, characters)
        self.output = output

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        scores: Tensor = self.dense(self.norm(left + right))
        return scores.argmax(-1) if self.output == "labels" else scores


@final
class DeepSpeech2(nn.Module):
    """The whole network."""

    def __init__(
        self, pitches: int, channels: int, convolutions: int, hidden: int, layers: int, characters: int, output: Output
    ) -> None:
        super().__init__()
        inputs = 1
        self.convolutions = nn.ModuleList()
        for number, size in enumerate(_PITCHES[:convolutions]):
            outputs = 3 * channels if number == 2 else channels
            self.convolutions.append(ConvolutionLayer(inputs, outputs, size, 1 if number else 2))
            inputs, pitches = outputs, (pitches - 1) // 2 + 1
        self.left = nn.ModuleList([FirstDirection(inputs * pitches, hidden)])
        self.right = nn.ModuleList([FirstDirection(inputs * pitches, hidden)])
        for _ in range(layers - 1):
            norm = nn.BatchNorm1d(hidden)
            self.left.append(PaddedDirection(norm, hidden))
            self.right.append(PaddedDirection(norm, hidden))
        self.scores = Scores(hidden, characters, output)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """x: [longest, n, pitches], zeros after each end -> the result of `scores` at every step, and new lengths."""
        x = x.transpose(1, 2)[:, None]
        for layer in self.convolutions:
            x, lengths = layer(x), layer.frames(lengths)  # type: ignore[operator]
            x = x * (torch.arange(x.shape[3]) < lengths[:, None])[:, None, None]
        x = x.permute(3, 0, 1, 2).flatten(2)
        pairs: list[Any] = list(zip(self.left, self.right, strict=True))
        for number, (left, right) in enumerate(pairs):
            sides = outputs_of(left.gru, x), outputs_of(right.gru, x, lengths)
            if number + 1 < len(pairs):
                x = pairs[number + 1][0].norm((sides[0] + sides[1]).flatten(0, 1)).view_as(sides[0])
        scores = self.scores(sides[0].flatten(0, 1), sides[1].flatten(0, 1))
        return scores.view(*sides[0].shape[:2], *scores.shape[1:]).transpose(0, 1), lengths


@final
class DeepSpeech2Model(NetworkModel):
    """Deep Speech 2: a spectrogram to characters, for CTC. A request is an array [frames, pitches] of floats.

    Two-dimensional convolutions, of which the first halves the number of frames, bidirectional GRU layers whose
    directions are added up, and a dense layer. The sizes are the usual ones for measurements, smaller than the paper's
    largest. Each convolution is a cell over the frames around each place, and each direction of each recurrent layer is
    a cell, so any number of frames is exact. output: "labels", the likeliest character at every second frame, int64, or
    "scores" [steps, characters]. channels: of the first two convolutions. convolutions: 1 to 3. hidden, layers: of the
    recurrent ones. Other options as for LstmModel.
    """

    def __init__(
        self,
        pitches: int = 161,
        channels: int = 32,
        convolutions: int = 2,
        hidden: int = 800,
        layers: int = 5,
        characters: int = 29,
        output: Output = "labels",
        dtype: str = "float32",
        max_batch: int = 128,
        seed: int = 0,
    ) -> None:
        check_positive(pitches=pitches, channels=channels, hidden=hidden, layers=layers, characters=characters)
        check_choice("convolutions", str(convolutions), ("1", "2", "3"))
        check_choice("output", output, ("labels", "scores"))
        with seeded(seed):
            network = DeepSpeech2(pitches, channels, convolutions, hidden, layers, characters, output)
        frozen(network, dtype)
        self._network = network
        self._convolutions: list[Any] = list(network.convolutions)
        self.strides = [layer.stride for layer in self._convolutions]
        # All layers before the scores have one priority. If upper layers went first, each request would run alone as
        # soon as it is a layer ahead of the others.
        for number, layer in enumerate(self._convolutions, start=1):
            window = FirstConvolution(layer) if number == 1 else NextConvolution(layer)
            setattr(self, f"convolution_{number}", Cell(window.eval(), max_batch=max_batch))
        pairs = zip(network.left, network.right, strict=True)
        for number, (left, right) in enumerate(pairs, start=1):
            for side, module in (("left", left), ("right", right)):
                setattr(self, f"{side}_{number}", Cell(module, max_batch=max_batch))
        self.scores = Cell(network.scores, max_batch=max_batch, priority=1)
        self.pitches, self.layers, self.dtype = pitches, layers, dtype
        self.example_request = np.zeros((8, pitches), np.float32)

    def unfold(self, request: Any) -> Any:
        """Return characters, int64 [n], or scores [n, characters] of the steps of a spectrogram [frames, pitches]."""
        cells = self.cells
        x = self._convolved(checked_frames(request, self.pitches, "the spectrogram"), cells)
        inputs: tuple[Any, ...] = (x,)
        back: tuple[Any, ...] = (x[::-1],)
        for number in range(1, self.layers + 1):
            left, right = cells[f"left_{number}"].run(inputs), cells[f"right_{number}"].run(back)
            inputs = left.steps, right.steps[::-1]
            back = left.steps[::-1], right.steps
        return self.scores.map(*inputs)

    def length(self, request: Any) -> int:
        return len(checked_frames(request, self.pitches, "the spectrogram"))

    def batched(self, requests: Sequence[Any]) -> list[Any]:
        """Run the padded batch; each keeps its own steps."""
        network: DeepSpeech2 = self._need_network()
        frames = [checked_frames(request, self.pitches, "the spectrogram") for request in requests]
        with torch.no_grad():
            scores, lengths = network(*pad_frames(frames, DTYPES[self.dtype]))
        return [row[:length].clone() for row, length in zip(scores, lengths.tolist(), strict=True)]

    def _convolved(self, frames: NDArray[np.float32], cells: dict[str, Cell]) -> Any:
        """Return the outputs of the last convolution at every step.

        A convolution has zeros around its input. For the first one they are in the array. Between layers they are
        frames outside, before the beginning and after the end; a layer computes them as zeros where the next one reads
        them.
        """
        half = TIME // 2
        beyond = [0]  # frames outside on either side for each layer, preceded by those of the spectrogram
        for stride in reversed(self.strides):
            beyond.insert(0, beyond[0] * stride + half)
        count = len(frames)
        padded = np.pad(frames, ((beyond[0], beyond[0]), (0, 0)))
        x: Any = np.lib.stride_tricks.sliding_window_view(padded, TIME, axis=0)
        for number, stride in enumerate(self.strides, start=1):
            count = (count - 1) // stride + 1
            outside = beyond[number]
            inside = np.zeros(count + 2 * outside, np.float32)
            inside[outside : outside + count] = 1.0
            cell, steps = cells[f"convolution_{number}"], len(inside)
            if number == 1:
                x = cell.map(x[::stride][:steps], inside)
            else:
                x = cell.map(*(x[at::stride][:steps] for at in range(TIME)), inside)
        return x
