"""`Cell(..., optimize=True)` in an engine and in a saved model."""

from __future__ import annotations

import json

import pytest
import torch

import batchmaker as bm
from batchmaker.errors import OptionError
from batchmaker.graph.spec import ValueSpec
from batchmaker.model.cell import Cell
from batchmaker.model.registry import CellRegistry
from batchmaker_papers.gatewise import CELLS, GatewiseModel

HIDDEN = 8


@pytest.fixture
def requests() -> list[list[list[float]]]:
    """Five requests for the cell of a TreeLSTM's inner nodes, of which no two are alike."""
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(HIDDEN, generator=generator).tolist() for _ in range(4)] for _ in range(5)]


def answers(model: bm.Model, requests: list[list[list[float]]]) -> list[tuple[torch.Tensor, ...]]:
    with bm.Engine(model, threads=1) as engine:
        return [tuple(map(torch.as_tensor, result)) for result in engine.map(requests, progress=False)]


def test_an_engine_gives_the_same_answers_from_planned_cells(requests):
    planned = answers(GatewiseModel("treelstm_internal", HIDDEN, optimize=True), requests)
    plain = answers(GatewiseModel("treelstm_internal", HIDDEN), requests)
    for one, other in zip(planned, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimize", [True, False])
def test_a_saved_model_keeps_what_is_to_be_planned(tmp_path, requests, optimize):
    model = GatewiseModel("treelstm_internal", HIDDEN, optimize=optimize)
    bm.save(model, tmp_path / "model")
    loaded = bm.load(tmp_path / "model")
    assert loaded.cells["treelstm_internal"].optimize is optimize
    (cell,) = json.loads((tmp_path / "model" / "manifest.json").read_text())["cells"]
    assert ("optimize" in cell) is optimize  # older versions still read what does not need it
    for one, other in zip(answers(loaded, requests), answers(model, requests), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_planned_and_plain_cells_of_equal_weights_are_two_types():
    module = CELLS["treelstm_leaf"](HIDDEN).eval()
    registry, row = CellRegistry(), (ValueSpec((HIDDEN,), "float32"),)
    types = [registry.learn(Cell(module, optimize=optimize), row).type_id for optimize in (True, False, True)]
    assert types == [0, 1, 0]


def test_the_notes_of_an_engine_say_what_was_done_to_each_cell(requests):
    model = GatewiseModel("treelstm_internal", HIDDEN, optimize=True)
    with bm.Engine(model, threads=1) as engine:
        engine.map(requests[:1], progress=False)
        notes = engine.registry.notes
    assert list(notes) == ["treelstm_internal"]
    assert "planned" in " ".join(notes["treelstm_internal"])


def test_optimize_is_yes_or_no_and_nothing_else():
    with pytest.raises(OptionError, match="optimize must be True or False, got str 'yes'"):
        bm.Cell(torch.nn.Linear(2, 2), optimize="yes")
