"""A model of one's own, as its author has it: a Python file, and what `batchmaker.save` made of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SOURCE = """
import torch
import batchmaker as bm


class Step(torch.nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.embed = torch.nn.Embedding(20, hidden)
        self.cell = torch.nn.RNNCell(hidden, hidden)

    def forward(self, token, h):
        return self.cell(self.embed(token), h)


class Scored(bm.Model):
    def __init__(self, hidden=4, example=False):
        torch.manual_seed(0)
        self.step = bm.Cell(Step(hidden).eval())
        self.score = bm.Cell(torch.nn.Linear(hidden, 1).eval())
        self.more = bm.Cell(torch.nn.Linear(hidden, 3).eval())
        if example:
            self.example_request = [1, 2]

    def unfold(self, tokens):
        state = self.step.run(tokens)
        score = yield self.score(state)
        if score[0] < 100 and len(tokens) < 9:
            yield self.more(state)


def build(hidden=4, example=False):
    return Scored(hidden, example)
"""


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file; what it has imported and where it looked is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "own_model_of_a_test.py"
    path.write_text(SOURCE, "utf-8")
    monkeypatch.setitem(sys.modules, path.stem, None)  # so that it is taken out again at the end
    del sys.modules[path.stem]
    return path


@pytest.fixture
def request_file(tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_text("[1, 2, 3]\n\n[4]\n", "utf-8")
    return path
