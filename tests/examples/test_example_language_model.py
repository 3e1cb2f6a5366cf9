"""examples/language_model learns from texts, is saved, and answers completions."""

from __future__ import annotations

import runpy
import sysconfig
from itertools import islice
from pathlib import Path

import pytest
import torch
from example_models import EXAMPLES

import batchmaker as bm
from batchmaker.lab import zoo
from batchmaker.saved import python_file
from batchmaker.server.formats.completions import DeclaresCompletions

FILE = EXAMPLES / "language_model" / "language_model.py"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(FILE))


@pytest.mark.slow
def test_it_is_trained_saved_and_served(script, tmp_path):
    text = script["as_bytes"](islice(script["docstrings"](Path(sysconfig.get_paths()["stdlib"])), 40))
    assert (text == 0).sum() == 40
    trained = script["train"](text, 0.0, hidden=16, layers=1)
    bm.save(trained, tmp_path / "saved")
    model = python_file.build(FILE, {"folder": str(tmp_path / "saved")})
    assert isinstance(model, DeclaresCompletions)
    answered = model.serving_completions()
    asked = {"prompt": answered.encode("Return é"), "max_tokens": 12, "temperature": 0.7, "seed": 1, "ignore_eos": True}
    with bm.Engine(model, threads=1) as engine:
        written = engine.submit(asked).result().tolist()
    assert written == trained.alone(asked).tolist()
    assert isinstance(answered.decode(written), str)
    assert answered.decode(asked["prompt"]) == "Return é"


def test_a_step_of_training_makes_the_text_likelier(script):
    text = script["as_bytes"](["the same words again and again. "] * 40)
    begun = zoo.make("rwkv", vocabulary_size=256, hidden=16, layers=2, rescale_every=0)
    trained = script["train"](text, 0.0, hidden=16, layers=2)
    rows = text[:64].long()[None]

    def surprise(model):
        network = model.read.module.network
        with torch.no_grad():
            x, _ = network.through(rows[:, :-1], network.start(1))
            return float(torch.nn.functional.cross_entropy(network.head(x)[0], rows[0, 1:]))

    assert surprise(trained) < surprise(begun)


def test_without_a_trained_model_it_says_how_to_train(tmp_path):
    with pytest.raises(Exception, match="train the model first"):
        python_file.build(FILE, {"folder": str(tmp_path / "nowhere")})
