"""A cell whose rows depend on each other is tried once, however many requests come for it."""

import pytest
import torch
from torch import nn

import batchmaker as bm
from batchmaker.errors import RowsError


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, x):
        self.calls.append(len(x))
        return x - x.mean(0)


class Mixes(bm.Model):
    def __init__(self):
        self.good, self.mixing = bm.Cell(nn.Linear(3, 3)), bm.Cell(Centred())

    def unfold(self, request):
        return self.mixing(request["x"]) if request["mix"] else self.good(request["x"])


def test_later_requests_are_refused_at_once_with_the_same_words_and_others_are_answered():
    model = Mixes()
    counted = model.mixing.module
    with bm.Engine(model, threads=1) as engine:
        first = engine.submit({"x": [1.0, 2.0, 3.0], "mix": True}).exception(60)
        assert isinstance(first, RowsError)
        tried = len(counted.calls)
        assert tried > 0
        answers = engine.submit_many([{"x": [float(k), 2.0, 3.0], "mix": k % 2 == 0} for k in range(20)])
        for k, answer in enumerate(answers):
            if k % 2:
                assert answer.result(60).shape == (3,)
                continue
            with pytest.raises(RowsError) as raised:
                answer.result(60)
            assert str(raised.value) == str(first).replace("request 0", f"request {answer.request_id}")
        assert len(counted.calls) == tried
        other = engine.submit({"x": torch.ones(5), "mix": True}).exception(60)
        assert isinstance(other, RowsError), "another form is tried anew"
