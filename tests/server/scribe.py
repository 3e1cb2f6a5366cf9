"""Models that write what they hear, for the server's tests: a small RNN-T, and one whose text is known by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.lab.zoo.rnnt import RnntModel
from batchmaker.server import Audio, Signature, TensorSpec, Transcriptions

RATE = 8000
ROW = 80
"""Samples of a frame."""

PITCHES, SYMBOLS = 6, 27


def frames_of(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows of samples [n, ROW] as a spectrogram [n, PITCHES]: energies in bands."""
    energies = np.abs(np.fft.rfft(rows)[:, 1 : 1 + 6 * PITCHES]).reshape(len(rows), PITCHES, 6).mean(-1)
    return np.log(energies + 1e-3).astype(np.float32)


def letters(symbols: Any) -> str:
    return "".join(chr(ord("a") + int(symbol) - 1) for symbol in symbols)


class Scribe(bm.Model):
    """Hears rows of samples, [n, ROW], and writes letters."""

    example_request = np.zeros((3, PITCHES), np.float32)

    def __init__(self) -> None:
        self.rnnt = RnntModel(PITCHES, SYMBOLS, hidden=24, layers=1, max_symbols=2, seed=3)

    def unfold(self, frames: Any) -> Any:
        return self.unfold_chunk(frames, None)[0]

    def unfold_chunk(self, frames: Any, state: Any) -> Any:
        return self.rnnt.unfold_chunk(frames, state)

    def serving_signature(self) -> Signature:
        return Signature(
            (TensorSpec("audio", "FP32", (-1, ROW)),),
            (TensorSpec("symbols", "INT64", (-1,)),),
            request="value",
            stream="elements",
            encode=frames_of,
        )

    def serving_audio(self) -> Audio:
        return Audio(RATE)

    def serving_transcriptions(self) -> Transcriptions:
        return Transcriptions(decode=letters, chunk_s=0.2, language="en")

    def plain(self, samples: NDArray[np.float32]) -> str:
        """The text of a whole sound, padded with silence, in plain PyTorch: no cells, no chunks."""
        rows = np.concatenate([samples, np.zeros(-len(samples) % ROW, np.float32)]).reshape(-1, ROW)
        return letters(self.rnnt.batched([frames_of(rows)])[0])


class AnyRate(Scribe):
    """The same, for sound of any rate."""

    def serving_transcriptions(self) -> Transcriptions:
        return Transcriptions(decode=letters, chunk_s=0.2, resample=True)


class Loudness(nn.Module):
    """(sample) -> (1 for a loud sample, 0 else, and -1 for one that cannot be heard)."""

    def forward(self, sample: Tensor) -> Tensor:
        if bool((sample > 0.99).any()):
            raise ValueError("a secret of the inside")
        return (sample.abs() > 0.5).to(torch.int64)


class Taps(bm.Model):
    """Hears samples, [n], and writes a character of two bytes for each loud one; fails at one of 1.0."""

    example_request = np.zeros(4, np.float32)

    def __init__(self, wanted: str = "taps") -> None:
        self.loud = bm.Cell(Loudness(), independent_rows=False)
        self._wanted = wanted

    def unfold(self, samples: Any) -> Any:
        return self.unfold_chunk(samples, None)[0]

    def unfold_chunk(self, samples: Any, state: Any) -> Any:
        return self.loud.map(samples), 0

    def serving_audio(self) -> Audio:
        return Audio(RATE)

    def serving_transcriptions(self) -> Transcriptions | None:
        return None if self._wanted == "mute" else Transcriptions(decode=taps, chunk_s=0.5)


def taps(values: Any) -> str:
    """Loud samples as bytes of "é", first one and then the other; others are not written."""
    return (b"\xc3\xa9" * len(values))[: sum(values)].decode(errors="replace")


class LateTaps(Taps):
    """Looks one sample ahead: the last sample of a chunk is heard with the next chunk, or at the end."""

    def unfold_chunk(self, samples: Any, state: Any, last: bool) -> Any:
        known = [np.zeros(0, np.float32) if part is None else part for part in (state, samples)]
        samples = np.concatenate(known)
        now = samples if last else samples[:-1]
        return self.loud.map(now) if len(now) else now.astype(np.int64), samples[len(now) :]

    def unfold(self, samples: Any) -> Any:
        return self.unfold_chunk(samples, None, True)[0]


class Counts(Taps):
    """Writes texts itself: how many samples a chunk has, and at the end that it is over."""

    def unfold_chunk(self, samples: Any, state: Any, last: bool) -> Any:
        return "".join(["" if samples is None else f"{len(samples)} ", "over" if last else ""]), 0

    def unfold(self, samples: Any) -> Any:
        return self.unfold_chunk(samples, None, True)[0]

    def serving_transcriptions(self) -> Transcriptions:
        return Transcriptions(chunk_s=0.5)


def build(*, kind: str = "scribe") -> bm.Model:
    kinds = {"scribe": Scribe, "any": AnyRate, "late": LateTaps, "counts": Counts}
    return kinds[kind]() if kind in kinds else Taps(kind)
