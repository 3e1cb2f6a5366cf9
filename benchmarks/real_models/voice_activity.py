"""silero-vad: recordings in frames of 32 ms to the probability of speech in each, and live streams of them."""

from __future__ import annotations

import contextlib
import csv
import io
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

import batchmaker as bm
from engine_cost.hand_streams import StreamsByHand
from engine_cost.measuring import interleaved
from real_models.case import Case, Data, Live, example, text
from real_models.hand_layers import CompiledLayers, TorchLayers

FRAME: Final = 512
FRAME_S: Final = 0.032
CHUNK: Final = 64
"""Frames that go through the convolutions together, by hand: more of them are not faster."""
SAME: Final = 1e-4
STREAMS: Final = 200


def case(data: Data) -> Case:
    """Recordings as long as LibriSpeech's, noise for speech; convolutions and an LSTM of 128, a frame each 32 ms."""
    model: Any = example("voice_activity", "silero_vad")
    lines = csv.DictReader(io.StringIO(text(data, "librispeech_durations", "dev_clean.csv")))
    seconds = [float(line["duration_s"]) for line in lines]
    chosen = np.random.default_rng(0).permutation(seconds)[: data.of(64, 12)]
    longest = data.of(10_000, 40)
    lengths = [min(longest, max(1, round(length / FRAME_S))) for length in chosen.tolist()]
    generator = torch.Generator().manual_seed(0)
    recordings = [0.1 * torch.randn(length, FRAME, generator=generator) for length in lengths]
    network = model.listen.module
    lstm = nn.LSTM(128, 128).requires_grad_(False)
    lstm.load_state_dict({f"{name}_l0": value for name, value in network.lstm.state_dict().items()})
    layers: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
        "padded": TorchLayers(lstm, packed=False),
        "packed": TorchLayers(lstm, packed=True),
        "compiled": CompiledLayers(lstm),
    }
    own = package()
    return Case(
        package="silero-vad",
        about="recordings, convolutions and LSTM 128 for each frame",
        asked=recordings,
        model=model,
        by_hand={name: Recordings(run, network) for name, run in layers.items()},
        own=partial(probabilities, own),
        same=lambda ours, theirs: float((ours - theirs).abs().max()) < SAME,
        target=1.2,
        sizes=(4, 16, 64),
        own_count=20,
        live=partial(live, model.live.module, own, recordings),
    )


def package() -> Any:
    """Return the package's own network. Its readers of sound files are not needed, so they are not imported."""
    (folder,) = find_spec("silero_vad").submodule_search_locations  # type: ignore[union-attr,misc]
    return torch.jit.load(Path(folder) / "data" / "silero_vad.jit", map_location="cpu").eval()


@torch.no_grad()
def probabilities(network: Any, frames: Tensor) -> Tensor:
    """Return what the package says to each frame of a recording, one frame after the other, as its own loop does."""
    network.reset_states()
    return torch.tensor([network(frame[None], 16_000).item() for frame in frames])


@final
class Recordings:
    """A batch of recordings: all frames through the convolutions, the LSTM by these layers, the output together."""

    def __init__(self, layers: Callable[[Sequence[Tensor]], Tensor], network: Any) -> None:
        self._layers, self._network = layers, network

    @torch.no_grad()
    def __call__(self, requests: Sequence[Tensor]) -> list[Tensor]:
        """Return the probability of each frame of each recording."""
        before = [nn.functional.pad(request[:-1, -64:], (0, 0, 1, 0)) for request in requests]
        sound = torch.cat((torch.cat(before), torch.cat(list(requests))), -1)
        lengths = [len(request) for request in requests]
        heard = torch.cat([self._hear(sound[at : at + CHUNK]) for at in range(0, len(sound), CHUNK)])
        h = self._layers(heard.split(lengths))
        return list(self._network.speech(h.relu()).sigmoid()[:, 0].split(lengths))

    def _hear(self, sound: Tensor) -> Tensor:
        network = self._network
        x = nn.functional.pad(sound, (0, 64), "reflect")[:, None]
        real, imaginary = nn.functional.conv1d(x, network.basis, stride=128).split(129, 1)
        x = (real.square() + imaginary.square()).sqrt()
        for layer in network.layers:
            x = layer(x).relu()
        return x[:, :, 0]


def live(network: nn.Module, own: Any, recordings: Sequence[Tensor], data: Data, engine: bm.Engine) -> Live:
    """Streams a core: each of many streams sends its next frame when its last one is answered.

    By hand: what has come is stacked with its states. The package computes a stream's frame alone, with what it keeps.
    """
    count, rounds = data.of(STREAMS, 8), data.of(20, 2)
    frames = torch.cat(list(recordings))[:512]
    with contextlib.closing(StreamsByHand(network, count, (64, 128, 128))) as hand, contextlib.ExitStack() as stack:
        opened = [stack.enter_context(engine.open_sequence()) for _ in range(count)]

        def ours(stream: int, frame: Tensor) -> Any:
            return opened[stream].submit(frame)

        def alone() -> float:
            begin_s = time.process_time()
            probabilities(own, frames[: data.of(200, 10)])
            return FRAME_S * data.of(200, 10) / (time.process_time() - begin_s)

        for number in range(2):
            mine, theirs = (
                [
                    float(answer.result())
                    for answer in [send(stream, frames[number : number + 1]) for stream in range(8)]
                ]
                for send in (ours, hand.submit)
            )
            assert np.allclose(mine, theirs, atol=SAME), "by hand a stream hears other speech"
        sides = {
            "batchmaker": partial(held, ours, frames, count, rounds),
            "by hand": partial(held, hand.submit, frames, count, rounds),
            "package": alone,
        }
        interleaved(sides, 1)
        found = interleaved(sides, data.of(7, 1))
    return Live({name: float(np.median(values)) for name, values in found.items()}, count)


def held(send: Callable[[int, Tensor], Any], frames: Tensor, count: int, rounds: int) -> float:
    """Return how many streams a core holds: seconds of sound over CPU seconds of the process, all threads together."""
    begin_s = time.process_time()
    for number in range(rounds):
        answers = [send(stream, frames[(number * 7 + stream) % len(frames)][None]) for stream in range(count)]
        for answer in answers:
            answer.result()
    return FRAME_S * rounds * count / (time.process_time() - begin_s)
