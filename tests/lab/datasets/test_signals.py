import numpy as np
import pytest

from batchmaker.errors import OptionError
from batchmaker.lab.datasets import librispeech_lengths, random_images, random_spectrograms


@pytest.mark.parametrize("seed", [0, 1])
def test_utterances_meet_the_figures_of_librispeech(seed):
    frames = librispeech_lengths(20_000, seed)
    assert frames.dtype == np.int64
    assert frames.mean() == pytest.approx(742, rel=0.03)
    assert (frames.min(), frames.max()) == (128, 3496)


def test_clipped_utterances_are_the_same_ones_shortened():
    whole = librispeech_lengths(500, seed=3)
    assert (librispeech_lengths(500, seed=3, clip=600) == np.minimum(whole, 600)).all()
    with pytest.raises(OptionError, match="clip"):
        librispeech_lengths(5, seed=3, clip=0)
    with pytest.raises(OptionError, match="count"):
        librispeech_lengths(-1, seed=3)


def test_signals_have_their_shapes_and_follow_the_seed():
    sounds, same, other = (random_spectrograms([3, 5], 7, seed) for seed in (1, 1, 2))
    assert [sound.shape for sound in sounds] == [(3, 7), (5, 7)]
    assert all((a == b).all() for a, b in zip(sounds, same, strict=True))
    assert (sounds[0] != other[0]).any()
    first, second = random_images(2, seed=1, size=8)
    assert first.shape == (3, 8, 8)
    assert first.dtype == np.float32
    assert (first != second).any()
