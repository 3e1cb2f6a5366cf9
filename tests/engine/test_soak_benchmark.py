"""benchmarks/soak.py: requests of every kind, each answered once and as plain PyTorch answers it alone."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def soak():
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("soak")
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_every_request_of_a_mix_is_answered_once_and_as_it_is_alone(soak, workers):
    tally = soak.run_mix("auto", workers, 480, seed=3)
    assert tally.wrong == []
    assert sum(tally.outcomes.values()) == 480
    assert tally.outcomes["answered"] > 200


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("policy", ["auto", "cellular", "lazy", "agenda", "depth", "sufficient"])
def test_under_every_policy(soak, policy, workers):
    tally = soak.run_mix(policy, workers, 2_000, seed=4)
    assert tally.wrong == []
    assert sum(tally.outcomes.values()) == 2_000


def test_a_wrong_answer_is_counted(soak, monkeypatch):
    monkeypatch.setattr(soak.soak_models.Translator, "alone", lambda self, **_: torch.tensor([7, 7, 7]))
    assert soak.run_mix("cellular", 1, 48, seed=3).wrong
