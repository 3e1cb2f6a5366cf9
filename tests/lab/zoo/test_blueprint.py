"""Models without weights: what the simulator plays is what the engine would unfold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.errors import InvalidRequestError, ModelError
from batchmaker.graph.work import work_of
from batchmaker.lab import zoo
from batchmaker.lab.zoo.blueprint import Blueprint, blueprint
from batchmaker.lab.zoo.reference import interpreted
from batchmaker.model.registry import CellRegistry
from batchmaker.model.unfolding import Unfolding


def test_a_blueprint_unfolds_what_the_engine_unfolds() -> None:
    model = zoo.make("seq2seq", hidden=8, vocabulary_size=30)
    registry = CellRegistry()
    live = Unfolding(model, registry, {"source": [3, 4, 5], "words": 4})
    live.start()
    plan = Blueprint("seq2seq", model)
    request = plan.request({"source": [3, 4, 5], "words": 4})
    found, wanted = work_of(request.graph), work_of(live.graph)
    assert [cell.name for cell in plan.model.cells] == [cell.name for cell in registry.types]
    assert (found.types.tolist(), found.nodes.tolist()) == (wanted.types.tolist(), wanted.nodes.tolist())
    assert request.length == 3
    assert request.graph.host_inputs == []


def test_a_decoder_is_marked_as_ending_when_a_value_says_so() -> None:
    request = blueprint("seq2seq", lambda: zoo.make("seq2seq", hidden=8)).sized(5, 7)
    assert [(run.length, run.open_ended) for run in request.graph.runs] == [(5, False), (7, True)]


def test_requests_of_one_shape_are_one_object() -> None:
    plan = blueprint("seq2seq", lambda: zoo.make("seq2seq", hidden=8))
    assert plan.sized(5, 7) is plan.sized(5, 7)
    assert plan.sized(5, 7) is not plan.sized(5, 8)
    trees = blueprint("treelstm", lambda: zoo.make("treelstm", hidden=8))
    left = {"words": [1, 2, 3], "children": [[0, 1], [3, 2]]}
    right = {"words": [1, 2, 3], "children": [[1, 2], [0, 3]]}
    assert trees.request(left) is trees.request({name: np.array(value) for name, value in left.items()})
    assert trees.request(left) is not trees.request(right)


def test_a_blueprint_takes_no_memory_for_weights() -> None:
    made: list[Any] = []
    blueprint("lstm", lambda: made.append(zoo.make("lstm", hidden=4096)) or made[-1])
    assert {weight.device.type for weight in made[0].step.module.parameters()} == {"meta"}


def test_a_model_whose_requests_hold_values_of_its_own_is_made_for_real() -> None:
    made: list[Any] = []
    plan = blueprint("lstm", lambda: made.append(zoo.make("lstm", hidden=8, layers=2)) or made[-1])
    assert plan.sized(6).graph.num_nodes == 6
    assert [cell.name for cell in plan.shapes.types] == ["step"]


def test_a_request_that_the_model_refuses_raises() -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        blueprint("lstm", lambda: zoo.make("lstm", hidden=8)).request([])


class Increment(nn.Module):
    """n -> n + 1."""

    def forward(self, n: Tensor) -> Tensor:
        return n + 1


class Waits(bm.Model):
    """Asks for a value while it is unfolded."""

    example_request = 0.0

    def __init__(self) -> None:
        self.increment = bm.Cell(Increment())

    def unfold(self, request: Any) -> Any:
        value = yield self.increment(torch.tensor(request))
        return self.increment(torch.tensor(value))


class IsPositive(nn.Module):
    """x -> whether it is above 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x > 0


class Decides(bm.Model):
    """Asks a cell which other one is to run."""

    example_request = 0.0

    def __init__(self) -> None:
        self.increment, self.is_positive = bm.Cell(Increment()), bm.Cell(IsPositive())

    def unfold(self, request: Any) -> Any:
        value = self.increment(request)
        return bm.cond(self.is_positive(value), lambda: self.increment(value), lambda: value)


def test_a_model_that_decides_by_values_is_neither_simulated_nor_interpreted() -> None:
    with pytest.raises(ModelError, match="decides by values"):
        Blueprint("decides", Decides())
    with pytest.raises(ModelError, match="decides by values"):
        interpreted(Decides(), 0.0)


def test_a_model_that_waits_for_values_cannot_be_simulated() -> None:
    with pytest.raises(ModelError, match=r"waits for values.*cell\.loop"):
        Blueprint("waits", Waits())
    model = Waits()
    model.example_request = None
    with pytest.raises(ModelError, match="example_request"):
        Blueprint("waits", model)
