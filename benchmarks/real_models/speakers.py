"""Resemblyzer: mel frames of an utterance to a vector."""

from __future__ import annotations

import csv
import importlib.util
import io
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final, final
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from real_models.case import Case, Data, example, text
from real_models.hand_layers import CompiledLayers, TorchLayers

FRAMES_A_SECOND: Final = 100
SAME: Final = 1e-5


def case(data: Data) -> Case:
    """Utterances as long as LibriSpeech's, noise for speech, 3 layers of LSTM 256."""
    model: Any = example("speakers", "resemblyzer")
    lines = csv.DictReader(io.StringIO(text(data, "librispeech_durations", "dev_clean.csv")))
    seconds = [float(line["duration_s"]) for line in lines]
    chosen = np.random.default_rng(0).permutation(seconds)[: data.of(64, 12)]
    longest = data.of(10_000, 200)
    lengths = [min(longest, round(FRAMES_A_SECOND * length)) for length in chosen.tolist()]
    generator = torch.Generator().manual_seed(0)
    frames = [torch.rand(length, 40, generator=generator).pow(4) for length in lengths]
    network = encoder()
    layers: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
        "padded": TorchLayers(network.lstm, packed=False),
        "packed": TorchLayers(network.lstm, packed=True),
        "compiled": CompiledLayers(network.lstm),
    }
    return Case(
        package="Resemblyzer",
        about="mel frames, 3 layers of LSTM 256",
        asked=frames,
        model=model,
        by_hand={name: Voices(run, network) for name, run in layers.items()},
        own=lambda asked: torch.no_grad()(network)(asked[None])[0],
        same=lambda ours, theirs: float((ours - theirs).abs().max()) < SAME,
        target=1.5,
        sizes=(4, 16, 64),
        own_count=20,
    )


@final
class Voices:
    """A batch of utterances by these layers, and the output over all last states together."""

    def __init__(self, layers: Callable[[Sequence[Tensor]], Tensor], network: nn.Module) -> None:
        self._layers, self._linear = layers, network.linear

    @torch.no_grad()
    def __call__(self, requests: Sequence[Tensor]) -> list[Tensor]:
        """Return the vector of each utterance."""
        ends = np.cumsum([len(request) for request in requests]) - 1
        h = self._layers(requests)[torch.from_numpy(ends)]
        return list(nn.functional.normalize(self._linear(h).relu(), dim=-1))


def encoder() -> Any:
    """Return Resemblyzer's network without its part for sound, which needs libraries that have to be compiled."""
    package, audio = ModuleType("resemblyzer"), ModuleType("resemblyzer.audio")
    package.__path__ = list(importlib.util.find_spec("resemblyzer").submodule_search_locations)  # type: ignore[union-attr]
    package.audio = audio  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {"resemblyzer": package, "resemblyzer.audio": audio}):
        return importlib.import_module("resemblyzer.voice_encoder").VoiceEncoder("cpu", verbose=False).eval()
