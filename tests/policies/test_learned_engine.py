"""A learned policy in a live engine: answers are those of other policies, and another model is refused at the start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import batchmaker as bm
from batchmaker.errors import PolicyFileError, StoppedError
from batchmaker.lab import zoo
from batchmaker.lab.datasets import random_trees
from batchmaker.policies.learned import CellRow, LearntFrom, PolicyFile

LEARNT = LearntFrom("none", 1, 1, 1, 1, 1, 0, 1.0, 0.0, "none")
CELLS = (CellRow("leaf", 1, 2), CellRow("inner", 4, 2), CellRow("classify", 1, 1))


@pytest.fixture
def policy(tmp_path: Path) -> str:
    """Outputs last, where leaves are not ready; other states are unknown."""
    PolicyFile("treelstm", "sort", CELLS, {(1, 2): 1, (2, 1): 1}, LEARNT).write(tmp_path / "policy.json")
    return f"learned:file={tmp_path / 'policy.json'}"


def test_answers_are_those_of_cellular_batching(policy):
    drawn = random_trees(12, seed=1, min_leaves=1, max_leaves=9)
    requests = [{"words": list(range(tree.num_leaves)), "children": tree.children} for tree in drawn]
    answers = []
    for name in (policy, "cellular"):
        model = zoo.make("treelstm", vocabulary_size=20, hidden=8, output="labels", max_batch=4)
        with bm.Engine(model, name) as engine:
            answers.append(engine.map(requests, progress=False))
    for learned, cellular in zip(*answers, strict=True):
        assert torch.equal(learned, cellular)


def test_another_model_is_refused_when_the_engine_starts_and_nothing_runs_on(policy):
    engine = bm.Engine(zoo.make("lstm", vocabulary_size=20, hidden=8, max_batch=4), policy)
    with pytest.raises(PolicyFileError, match="learnt for model 'treelstm': got cell"):
        engine.start()
    with pytest.raises(StoppedError):
        engine.map([[1, 2]], progress=False)
