"""Forms for whole runs in saved models: kept where they can be traced, proved again when loaded, else left out."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import saved_models as models
import torch
from torch import Tensor

import batchmaker as bm
from batchmaker.errors import ModelError, SavedModelError

REQUESTS = [[5], [3, 1], [7, 7, 2], list(range(20)), [4] * 33]


def answers(model: Any) -> list[Tensor]:
    with bm.Engine(model, threads=1) as engine:
        return list(engine.map(REQUESTS, progress=False))


def whole_nodes(model: Any) -> int:
    """How many runs of a model's requests are one node."""
    with bm.Engine(model, threads=1) as engine:
        engine.map(REQUESTS, progress=False)
        return sum(engine.registry.is_whole(cell.type_id) for cell in engine.registry.types)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    bm.save(models.Fading(), tmp_path / "it")
    return tmp_path / "it"


def manifest(folder: Path) -> Any:
    return json.loads((folder / "manifest.json").read_text("utf-8"))


def change(folder: Path, **fields: Any) -> None:
    content = manifest(folder)
    content["cells"][0]["whole"].update(fields)
    (folder / "manifest.json").write_text(json.dumps(content), "utf-8")


def test_a_loaded_model_has_its_form_for_whole_runs_and_gives_the_same(tmp_path: Path) -> None:
    model = models.Fading()
    wanted = answers(model)
    bm.save(model, tmp_path / "it")
    loaded = bm.load(tmp_path / "it")
    assert loaded.cells["read"].whole_from == 3
    for mine, other in zip(answers(loaded), wanted, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
    assert whole_nodes(bm.load(tmp_path / "it")) == 1


def test_weights_are_kept_and_held_once(saved: Path) -> None:
    whole = manifest(saved)["cells"][0]["whole"]
    assert set(whole["shared"].values()) == {"state_dict.embedding.weight", "state_dict.keep"}
    assert (saved / whole["weights"]["name"]).stat().st_size < 100
    cell = bm.load(saved).cells["read"]
    own = {weight.data_ptr() for weight in cell.module.parameters()}
    assert {weight.data_ptr() for weight in cell.whole.parameters()} == own


def test_a_loaded_model_is_saved_again_with_its_form(saved: Path, tmp_path: Path) -> None:
    bm.save(bm.load(saved), tmp_path / "again")
    assert manifest(tmp_path / "again")["cells"][0]["whole"]["whole_from"] == 3
    again = answers(bm.load(tmp_path / "again"))
    for mine, other in zip(again, answers(bm.load(saved)), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


def test_without_a_length_it_is_measured_when_loaded(tmp_path: Path) -> None:
    bm.save(models.Fading(least=None), tmp_path / "it")
    loaded = bm.load(tmp_path / "it")
    assert loaded.cells["read"].whole is not None
    with bm.Engine(loaded, threads=1) as engine:
        engine.map(REQUESTS, progress=False)
        assert any("runs are" in note for note in engine.registry.notes["read"])


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: models.Fading(models.FadeLooped), "torch.export failed"),
        (models.FadingShapes, "its inputs have several shapes"),
    ],
)
def test_a_form_that_cannot_be_kept_is_left_out_with_a_warning(
    make: Any, why: str, tmp_path: Path, caplog: Any
) -> None:
    model = make()
    bm.save(model, tmp_path / "it")
    assert f"its form for whole runs is not saved, so its runs will be steps: {why}" in caplog.text
    assert "whole" not in manifest(tmp_path / "it")["cells"][0]
    assert bm.load(tmp_path / "it").cells["read"].whole is None


def test_weights_that_are_not_those_of_the_steps_are_refused_at_the_start(saved: Path) -> None:
    """Whoever changes a file must change its hash too; the proof does not depend on either."""
    change(saved, shared={"state_dict.step.keep": "state_dict.embedding.weight"})
    with pytest.raises(SavedModelError):
        bm.load(saved)
    change(saved, shared={"state_dict.step.keep": "state_dict.nothing"})
    with pytest.raises(SavedModelError, match=r"no weight 'state_dict\.nothing' to share"):
        bm.load(saved)


def test_a_form_that_gives_other_numbers_is_refused_when_the_engine_starts(saved: Path) -> None:
    cell = manifest(saved)["cells"][0]
    tensors = safetensors.torch.load((saved / cell["weights"]["name"]).read_bytes())
    mine = {name: tensors[source].clone() for name, source in cell["whole"]["shared"].items()}
    next(weight for name, weight in mine.items() if name.endswith("keep")).add_(0.05)
    content = safetensors.torch.save(mine)
    (saved / "other.safetensors").write_bytes(content)
    file = {"name": "other.safetensors", "sha256": hashlib.sha256(content).hexdigest(), "num_bytes": len(content)}
    change(saved, weights=file, shared={})
    with pytest.raises(ModelError, match="whole= gives something else than its steps"), bm.Engine(bm.load(saved)):
        pass
