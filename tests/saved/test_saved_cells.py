"""Cells of a saved model that are more than one program: several shapes, and ONNX models."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import batchmaker as bm
from batchmaker.errors import RequestShapeError, SavedModelError, ShapeError

sys.path.insert(0, str(Path(__file__).parent))
import saved_models as models


def answers(model: bm.Model, requests: list[Any]) -> list[Any]:
    with bm.Engine(model) as engine:
        return engine.map(requests, progress=False)


def manifest_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "manifest.json").read_text())
    return found


# --- several shapes ---------------------------------------------------------------------------------------------------


def pictures(*widths: int) -> list[Any]:
    return [torch.randn(1, 4, width) for width in widths]


def test_a_cell_of_several_shapes_is_saved_with_those_of_the_examples(tmp_path):
    model = models.Pictures()
    bm.save(model, tmp_path / "saved")
    loaded = bm.load(tmp_path / "saved")
    requests = pictures(9, 5, 9, 7, 5)
    for one, other in zip(answers(model, requests), answers(loaded, requests), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def test_programs_of_several_shapes_share_their_weights(tmp_path):
    bm.save(models.Pictures(), tmp_path / "saved")
    (cell,) = manifest_of(tmp_path / "saved")["cells"]
    programs = [cell, *cell["others"]]
    assert [program["inputs"][0]["shape"] for program in programs] == [[1, 4, 5], [1, 4, 9], [1, 4, 7]]
    assert len({program["weights"]["name"] for program in programs}) == 1
    assert len({program["graph"]["name"] for program in programs}) == 3


@pytest.mark.parametrize("first", [5, 9])
def test_a_shape_that_was_not_saved_is_the_requests_error(tmp_path, first):
    bm.save(models.Pictures(), tmp_path / "saved")
    loaded = bm.load(tmp_path / "saved")
    loaded.example_request, loaded.example_requests = None, ()
    with bm.Engine(loaded) as engine:
        engine.map(pictures(first), progress=False)
        with pytest.raises(RequestShapeError, match=r"'convolve' was saved for \(float32\[1, 4, 5\]\) or .*1, 4, 9"):
            engine.map(pictures(6), progress=False)
        engine.map(pictures(5, 9), progress=False)
    loaded = bm.load(tmp_path / "saved")
    loaded.example_request, loaded.example_requests = None, ()
    with bm.Engine(loaded) as engine, pytest.raises(ShapeError, match=r"'convolve'.*it was saved for"):
        engine.map(pictures(6), progress=False)


def test_a_loaded_model_of_several_shapes_is_saved_again(tmp_path):
    bm.save(models.Pictures(), tmp_path / "saved")
    bm.save(bm.load(tmp_path / "saved"), tmp_path / "again")
    one, again = (manifest_of(tmp_path / name) for name in ("saved", "again"))
    assert one["cells"] == again["cells"]


def test_states_of_several_shapes_start_from_zeros_after_loading(tmp_path):
    bm.save(models.Totals(), tmp_path / "saved")
    rows = [torch.ones(4, 3), torch.ones(2, 5)]
    first, second = answers(bm.load(tmp_path / "saved"), rows)
    assert first.tolist() == [4.0] * 3
    assert second.tolist() == [2.0] * 5


# --- ONNX models ------------------------------------------------------------------------------------------------------


@pytest.fixture
def onnx_models() -> Any:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    import onnx_models

    return onnx_models


@pytest.fixture
def saved(onnx_models: Any, tmp_path: Path) -> Path:
    path = tmp_path / "step.onnx"
    path.write_bytes(onnx_models.model_bytes(onnx_models.STEP))
    bm.save(onnx_models.Chain(path, inputs=["x", "h"], threads=2), tmp_path / "saved")
    return tmp_path / "saved"


def test_an_onnx_model_is_saved_by_its_bytes(onnx_models, saved):
    (cell,) = manifest_of(saved)["cells"]
    content = (saved / "0_step.onnx").read_bytes()
    assert content == onnx_models.model_bytes(onnx_models.STEP)
    assert cell["onnx"]["file"] == {
        "name": "0_step.onnx", "sha256": hashlib.sha256(content).hexdigest(), "num_bytes": len(content),
    }  # fmt: skip
    assert "graph" not in cell
    frames = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    loaded = bm.load(saved)
    assert loaded.cells["step"].module.threads == 2
    (result,) = answers(loaded, [frames])
    np.testing.assert_allclose(result, onnx_models.states(frames)[-1], atol=1e-5)


def test_a_loaded_onnx_model_is_saved_again_and_two_cells_share_a_file(onnx_models, saved, tmp_path):
    bm.save(bm.load(saved), tmp_path / "again")
    assert (tmp_path / "again" / "0_step.onnx").read_bytes() == (saved / "0_step.onnx").read_bytes()
    both = onnx_models.Both((saved / "0_step.onnx").read_bytes())
    bm.save(both, tmp_path / "both", example_request=[[0.0] * 3])
    there, back = manifest_of(tmp_path / "both")["cells"]
    assert there["onnx"]["file"] == back["onnx"]["file"]
    assert len(list((tmp_path / "both").glob("*.onnx"))) == 1
    loaded = bm.load(tmp_path / "both")
    assert loaded.cells["there"].module is loaded.cells["back"].module


def test_a_layered_onnx_model_and_its_open_sizes_are_saved(onnx_models, tmp_path):
    network = bm.layers(bm.onnx(onnx_models.model_bytes(onnx_models.DOUBLE_ANY)), [1.0, 2.0])
    bm.save(network, tmp_path / "saved")
    rows = answers(bm.load(tmp_path / "saved"), [[1.0, 2.0], [3.0]])
    assert [row.tolist() for row in rows] == [[2.0, 4.0], [6.0]]


def test_the_state_and_the_shapes_of_an_onnx_cell_are_saved(onnx_models, tmp_path):
    bm.save(onnx_models.OpenState(), tmp_path / "saved", example_request=[[1.0, 1.0]])
    loaded = bm.load(tmp_path / "saved")
    assert loaded.cells["add"].max_shapes == 3
    assert answers(loaded, [np.ones((3, 2), np.float32)])[0].tolist() == [3.0, 3.0]


def test_a_file_that_changed_after_the_cell_was_made_is_not_saved(onnx_models, tmp_path):
    path = tmp_path / "step.onnx"
    path.write_bytes(onnx_models.model_bytes(onnx_models.STEP))
    model = onnx_models.Chain(path)
    path.write_bytes(onnx_models.model_bytes(onnx_models.TURNED))
    with pytest.raises(SavedModelError, match=r"cell 'step': cannot be saved: .*step\.onnx: has changed"):
        bm.save(model, tmp_path / "saved")


def edit(directory: Path, change: Any) -> None:
    manifest = manifest_of(directory)
    change(manifest["cells"][0])
    (directory / "manifest.json").write_text(json.dumps(manifest))


def planted(directory: Path, content: bytes) -> None:
    """Put another model in place of the saved one, with its hash."""
    (directory / "0_step.onnx").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    edit(directory, lambda cell: cell["onnx"]["file"].update(sha256=digest, num_bytes=len(content)))


def test_a_damaged_onnx_file_is_found_by_its_hash(saved):
    file = saved / "0_step.onnx"
    file.write_bytes(file.read_bytes()[::-1])
    with pytest.raises(SavedModelError, match=r"0_step\.onnx: its SHA-256 is not the one"):
        bm.load(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda cell: cell["onnx"]["file"].update(name="../step.onnx"), "must be a plain name"),
        (lambda cell: cell["onnx"].update(inputs=["x", "z"]), "unknown input of the ONNX model 'z'"),
        (lambda cell: cell["onnx"].update(threads=0), "0 threads"),
        (lambda cell: cell.pop("onnx"), "needs either a graph with weights, or an ONNX model"),
        (lambda cell: cell.update(max_shapes=0), "max_shapes|malformed"),
    ],
)
def test_a_manifest_that_says_nonsense_of_an_onnx_cell_is_refused(saved, change, message):
    edit(saved, change)
    with pytest.raises(SavedModelError, match=message):
        bm.load(saved)


@pytest.mark.parametrize("location", ["outside.bin", "../outside.bin", "{folder}/outside.bin"])
def test_a_planted_onnx_model_cannot_read_other_files(onnx_models, saved, tmp_path, monkeypatch, location):
    path = onnx_models.external(tmp_path, location.format(folder=tmp_path))
    (tmp_path / "weights.bin").rename(tmp_path / "outside.bin")
    (tmp_path / "deep").mkdir()
    planted(saved, path.read_bytes())
    for folder in (tmp_path, tmp_path / "deep"):
        monkeypatch.chdir(folder)
        with pytest.raises(SavedModelError, match="other file"):
            bm.load(saved)


def test_what_is_no_onnx_model_is_refused(saved):
    planted(saved, b"no model")
    with pytest.raises(SavedModelError, match="is not an ONNX file"):
        bm.load(saved)
