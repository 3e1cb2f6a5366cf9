"""examples/speakers gives the vectors of Resemblyzer's network."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from example_models import example

import batchmaker as bm

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def model():
    return example("speakers", "resemblyzer")


@pytest.fixture(scope="module")
def network(model):
    """The package's network without its part for sound, which needs libraries that have to be compiled."""
    package, audio = ModuleType("resemblyzer"), ModuleType("resemblyzer.audio")
    package.__path__ = list(find_spec("resemblyzer").submodule_search_locations)
    package.audio = audio
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "resemblyzer", package)
        patch.setitem(sys.modules, "resemblyzer.audio", audio)
        return importlib.import_module("resemblyzer.voice_encoder").VoiceEncoder("cpu", verbose=False)


def test_utterances_of_any_length_have_the_packages_vectors(model, network):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 240, (60,), generator=generator).tolist()
    frames = [torch.rand(length, 40, generator=generator).pow(4) for length in lengths]
    with bm.Engine(model, threads=1) as engine:
        voices = engine.map(frames, progress=False)
    with torch.no_grad():
        wanted = [network(each[None])[0] for each in frames]
    assert max(float((ours - theirs).abs().max()) for ours, theirs in zip(voices, wanted, strict=True)) < 1e-5
    assert torch.stack(voices).std(0).max() > 0.01, "all voices are alike, so nothing was compared"
