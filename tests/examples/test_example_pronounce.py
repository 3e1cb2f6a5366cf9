"""examples/pronounce says what g2p_en says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from example_models import answers, example

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

WORDS = [
    "batchmaker",
    "activationist",
    "pneumonoultramicroscopicsilicovolcanoconiosis",
    "recurrent",
    "cellular",
    "queue",
    "xylophone",
    "rhythm",
    "schedule",
    "lieutenant",
    "colonel",
    "yacht",
    "choir",
    "thorough",
    "through",
    "tough",
    "though",
    "bough",
    "cough",
    "hiccough",
    "a",
    "i",
    "o",
    "zzz",
    "qwerty",
    "dynet",
    "pytorch",
    "tokenizer",
    "kubernetes",
    "nginx",
    "sqlite",
    "zstandard",
    "covfefe",
    "selfie",
    "blockchain",
    "podcast",
    "emoji",
    "doge",
    "yeet",
    "wombat",
    "quokka",
    "axolotl",
    "ptarmigan",
    "gnu",
    "aardvark",
    "capybara",
    "ocelot",
    "narwhal",
    "pangolin",
    "tarsier",
    "okapi",
    "dugong",
    "fossa",
    "don't",
    "rock'n'roll",
    "café",
    "42nd",
]


@pytest.fixture(scope="module")
def model():
    return example("pronounce", "g2p_en")


@pytest.fixture(scope="module")
def package(model):
    """g2p_en without its dictionary, which it would download and which `predict` does not use."""
    nltk = pytest.importorskip("nltk")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nltk, "download", lambda *_, **__: False)
        from g2p_en import g2p

        patch.setattr(g2p, "cmudict", SimpleNamespace(dict=dict))
        return g2p.G2p()


def test_every_word_is_pronounced_as_by_the_package(model, package):
    assert len(WORDS) >= 50
    assert answers(model, WORDS) == [package.predict(word) for word in WORDS]


def test_names_of_sounds_are_the_packages(model, package):
    import pronounce

    assert package.phonemes == pronounce.SOUNDS
    assert package.graphemes == pronounce.LETTERS
