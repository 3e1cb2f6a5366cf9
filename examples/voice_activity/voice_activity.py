"""Whether somebody speaks: silero-vad 6.2, which hears 32 ms of sound at a time and remembers what was before.

Convolutions make a vector of a frame, an LSTM goes on from its state, and one more product gives a probability. Live
streams are sequences, a frame or more at a time; a recording is a request.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad

import batchmaker as bm
from batchmaker.server import Audio, Signature, TensorSpec

RATE = 16_000
FRAME = 512
"""Samples of a frame: 32 ms."""

CONTEXT = 64
"""Samples of the frame before, which the network hears again."""

WINDOW, HOP, BINS = 256, 128, 129
"""Of the short-time Fourier transform, which is a convolution too."""


class Listen(nn.Module):
    """(sound [576], h, c [128]) -> (probability of speech, h, c), all float32. The sound is context and frame."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.register_buffer("basis", weights["stft.forward_basis_buffer"])
        strides = (1, 2, 2, 1)
        self.layers = nn.ModuleList(
            convolution(weights, f"encoder.{place}.reparam_conv", stride) for place, stride in enumerate(strides)
        )
        self.lstm = nn.LSTMCell(128, 128)
        self.lstm.load_state_dict({name: weights[f"decoder.rnn.{name}"] for name, _ in self.lstm.named_parameters()})
        self.speech = nn.Linear(128, 1)
        self.speech.load_state_dict(
            {"weight": weights["decoder.decoder.2.weight"][:, :, 0], "bias": weights["decoder.decoder.2.bias"]}
        )

    def forward(self, sound: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        parts = conv1d(pad(sound, (0, CONTEXT), "reflect")[:, None], self.basis, stride=HOP)
        x = (parts[:, :BINS].square() + parts[:, BINS:].square()).sqrt()  # how loud each pitch is, four times
        for layer in self.layers:
            x = layer(x).relu()
        h, c = self.lstm(x[:, :, 0], (h, c))
        return self.speech(h.relu()).sigmoid()[:, 0], h, c


class ListenLive(nn.Module):
    """(frame [512], context [64], h, c [128]) -> (probability of speech, context, h, c): the context is state, too."""

    def __init__(self, listen: Listen) -> None:
        super().__init__()
        self.listen = listen

    def forward(self, frame: Tensor, context: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        speech, h, c = self.listen(torch.cat((context, frame), -1), h, c)
        return speech, frame[:, -CONTEXT:], h, c


class VoiceActivity(bm.Model):
    """A request is a recording in frames, float32 [n, 512], the last one filled up with zeros; a chunk is some of them.

    The result is the probability that somebody speaks, for each frame: float32 [n].
    """

    example_request = torch.zeros(4, FRAME)
    example_chunks = (torch.zeros(1, FRAME), torch.zeros(1, FRAME))

    def __init__(self, listen: Listen) -> None:
        self.listen = bm.Cell(listen)
        self.live = bm.Cell(ListenLive(listen), max_batch=256)  # frames of as many streams go together

    def unfold(self, frames: Any) -> Any:
        """All contexts are known, so the convolutions of many frames are computed together."""
        frames = torch.as_tensor(frames)
        contexts = pad(frames[:-1, -CONTEXT:], (0, 0, 1, 0))
        speech, _, _ = self.listen.run(torch.cat((contexts, frames), -1))
        return speech.steps

    def unfold_chunk(self, frames: Any, state: Any) -> Any:
        speech, *state = self.live.run(frames, state)
        return speech.steps, tuple(state)

    def serving_signature(self) -> Signature:
        """A client sends frames and gets probabilities."""
        frames, speech = TensorSpec("frames", "FP32", (-1, FRAME)), TensorSpec("speech", "FP32", (-1,))
        return Signature((frames,), (speech,), request="value", stream="elements")

    def serving_audio(self) -> Audio:
        """The sound may come as PCM of 16 bits too."""
        return Audio(RATE)


def build() -> VoiceActivity:
    """Return the model with the weights of the silero-vad that is installed."""
    package = find_spec("silero_vad")  # not imported: only its weights are needed
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("silero-vad is not installed: pip install 'silero-vad>=6.2,<6.3'")
    # The wheel's safetensors are of another training
    path = Path(package.submodule_search_locations[0]) / "data" / "silero_vad.jit"
    weights = torch.jit.load(path, map_location="cpu").state_dict()
    return VoiceActivity(Listen({name[7:]: value for name, value in weights.items() if name.startswith("_model.")}))


def convolution(weights: dict[str, Tensor], name: str, stride: int) -> nn.Conv1d:
    """Return one layer of the encoder."""
    width_out, width_in, size = weights[f"{name}.weight"].shape
    layer = nn.Conv1d(width_in, width_out, size, stride, padding=1)
    layer.load_state_dict({part: weights[f"{name}.{part}"] for part in ("weight", "bias")})
    return layer
