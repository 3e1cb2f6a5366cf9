"""Seeded images and spectrograms. As in `generators`, the same seed gives the same values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchmaker.errors import OptionError
from batchmaker.lab.datasets.generators import Seed

FRAMES_PER_S: Final = 100
"""Windows of 20 to 25 ms that begin every 10 ms, as is usual in speech recognition."""
LIBRISPEECH_MEAN_S: Final = 7.42
LIBRISPEECH_MIN_S: Final = 1.285
LIBRISPEECH_MAX_S: Final = 34.955
_LIBRISPEECH_SIGMA: Final = 0.68


def librispeech_lengths(count: int, seed: Seed, clip: int | None = None) -> NDArray[np.int64]:
    """Return lengths of utterances distributed like LibriSpeech's test-clean: [count] int64, in frames of 10 ms.

    A clipped lognormal that meets the mean (7.4 s), the shortest (1.3 s) and the longest (35 s) of its 2620 utterances.
    `clip` shortens longer ones to that many frames. Source: Panayotov et al. (ICASSP 2015) for the set; its utterances
    for the figures.
    """
    if count < 0:
        raise OptionError(f"count: got {count}, expected at least 0.")
    if clip is not None and clip < 1:
        raise OptionError(f"clip: got {clip}, expected at least 1.")
    mu = math.log(LIBRISPEECH_MEAN_S) - _LIBRISPEECH_SIGMA**2 / 2
    seconds = np.random.default_rng(seed).lognormal(mu, _LIBRISPEECH_SIGMA, size=count)
    frames = np.rint(FRAMES_PER_S * np.clip(seconds, LIBRISPEECH_MIN_S, LIBRISPEECH_MAX_S)).astype(np.int64)
    return frames if clip is None else np.minimum(frames, clip)


def random_spectrograms(lengths: Iterable[int], pitches: int, seed: Seed) -> list[NDArray[np.float32]]:
    """Return one spectrogram [length, pitches] of normal noise, float32, per length in frames."""
    generator = np.random.default_rng(seed)
    return [generator.standard_normal((length, pitches), dtype=np.float32) for length in lengths]


def random_images(count: int, seed: Seed, size: int = 224) -> list[NDArray[np.float32]]:
    """Return images [3, size, size] of normal noise, float32, like normalised photographs."""
    generator = np.random.default_rng(seed)
    return [generator.standard_normal((3, size, size), dtype=np.float32) for _ in range(count)]
