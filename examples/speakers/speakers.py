"""Whose voice it is: the speaker encoder of Resemblyzer 0.1, three layers of LSTM over mel frames.

A request is an utterance of any length; the result is a vector of length 1 that is alike for one person's utterances.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.server import Signature, TensorSpec

MELS = 40
"""Mel bands of a frame; frames come every 10 ms, of 25 ms of sound at 16 kHz."""


class Voice(nn.Module):
    """The last state of the top layer -> a vector of length 1."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, h: Tensor) -> Tensor:
        return nn.functional.normalize(self.linear(h).relu(), dim=-1)


class Speakers(bm.Model):
    """A request is the mel frames of an utterance, float32 [n, 40]; the result is a vector, float32 [256]."""

    example_request = torch.zeros(160, MELS)

    def __init__(self, lstm: nn.LSTM, linear: nn.Linear) -> None:
        self.lstm = bm.recurrent(lstm, max_batch=64)
        self.voice = bm.Cell(Voice(linear), max_batch=64, priority=1)

    def unfold(self, frames: Any) -> Any:
        _, (h_n, _) = self.lstm(frames)
        return self.voice(h_n[-1])

    def serving_signature(self) -> Signature:
        """A client sends frames and gets a vector."""
        frames, voice = TensorSpec("frames", "FP32", (-1, MELS)), TensorSpec("voice", "FP32", (256,))
        return Signature((frames,), (voice,), request="value")


def build() -> Speakers:
    """Return the model with the weights of the Resemblyzer that is installed."""
    package = find_spec("resemblyzer")  # not imported: that would need its libraries for audio
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("Resemblyzer is not installed: pip install --no-deps Resemblyzer")
    path = Path(package.submodule_search_locations[0]) / "pretrained.pt"
    weights = torch.load(path, map_location="cpu", weights_only=True)["model_state"]
    lstm, linear = nn.LSTM(MELS, 256, num_layers=3), nn.Linear(256, 256)
    lstm.load_state_dict({name[5:]: value for name, value in weights.items() if name.startswith("lstm.")})
    linear.load_state_dict({name[7:]: value for name, value in weights.items() if name.startswith("linear.")})
    return Speakers(lstm.eval(), linear.eval())
