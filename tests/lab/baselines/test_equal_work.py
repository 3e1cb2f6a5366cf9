"""Whole requests are computed by the engine's own cells, and give its answers."""

from __future__ import annotations

import pytest
import torch

import batchmaker as bm
from batchmaker.errors import ModelError
from batchmaker.lab import zoo
from batchmaker.lab.baselines.equal_work import EqualWorkModel


def test_padded_batches_with_equal_work_give_the_answers_of_the_model():
    model = zoo.make("lstm", hidden=8, vocabulary_size=20, max_batch=4)
    requests = [list(range(1, n)) for n in (3, 9, 4, 12, 6, 2)]
    with EqualWorkModel(model) as same, bm.Engine(same, "padded:max_batch=3", threads=1) as engine:
        answers = engine.map(requests, progress=False)
        assert engine.stats.tasks < len(requests)
    for answer, request in zip(answers, requests, strict=True):
        torch.testing.assert_close(answer, model.batched([request])[0])


def test_trees_without_a_padded_form_are_batched_too():
    model = zoo.make("treelstm", hidden=8, vocabulary_size=20, max_batch=4)
    requests = [{"words": [1, 2, 3], "children": [[0, 1], [3, 2]]}, {"words": [4], "children": []}] * 2
    with EqualWorkModel(model) as same, bm.Engine(same, "padded:bucket_width=9", threads=1) as engine:
        answers = engine.map(requests, progress=False)
    for answer, expected in zip(answers, model.batched(requests), strict=True):
        torch.testing.assert_close(answer, expected)


def test_a_wrong_request_fails_alone():
    model = zoo.make("lstm", hidden=8, vocabulary_size=20, max_batch=4)
    with EqualWorkModel(model) as same, bm.Engine(same, "padded", threads=1) as engine:
        good, bad = engine.submit([1, 2]), engine.submit([1, 99])
        assert good.result(60).shape == (8,)
        assert bad.exception(60) is not None


def test_it_is_for_policies_of_whole_requests():
    model = zoo.make("lstm", hidden=8, vocabulary_size=20, max_batch=4)
    with EqualWorkModel(model) as same, pytest.raises(ModelError, match="such as `padded`"):
        same.unfold([1])
