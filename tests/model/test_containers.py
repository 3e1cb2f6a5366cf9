"""Cells in lists, dicts and models inside a model; several example requests; values as sequences."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.errors import ModelError, SavedModelError

WIDTHS = (3, 5)


class Layers(bm.Model):
    """A cell per width in a dict, a stack in a list, a cell and a list in a tuple, and recurrent layers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.into = {width: bm.Cell(nn.Linear(width, 4)) for width in WIDTHS}
        self.stack: list[bm.Cell] = []
        for _ in range(2):
            self.stack.append(bm.Cell(nn.Linear(4, 4)))
        self.ends = (bm.Cell(nn.Linear(4, 2)), ["a note", 3])
        self.lstm = bm.recurrent(nn.LSTM(4, 4))
        self.example_requests = [torch.zeros(2, width) for width in WIDTHS]

    def unfold(self, frames: Any) -> Any:
        x = self.into[frames.shape[1]].map(frames)
        for cell in self.stack:
            x = cell.map(x)
        x, _ = self.lstm(x)
        return self.ends[0].map(x)

    def alone(self, frames: Tensor) -> Tensor:
        lstm = nn.LSTM(4, 4)
        step = self.lstm.l0.module.cell  # type: ignore[union-attr]
        lstm.load_state_dict({f"{name}_l0": weight for name, weight in step.state_dict().items()})  # type: ignore[union-attr]
        x = self.into[frames.shape[1]].module(frames)
        for cell in self.stack:
            x = cell.module(x)
        result: Tensor = self.ends[0].module(lstm(x)[0])
        return result


PATHS = ["into.3", "into.5", "stack.0", "stack.1", "ends.0", "lstm.l0"]


def check(model: Layers, reference: Layers) -> None:
    requests = [torch.randn(n, width) for n in (1, 4, 4, 4) for width in WIDTHS]
    with bm.Engine(model) as engine, torch.no_grad():
        for request, result in zip(requests, engine.map(requests, progress=False), strict=True):
            torch.testing.assert_close(result, reference.alone(request), atol=1e-5, rtol=1e-5)


def test_cells_are_found_and_named_by_their_paths():
    model = Layers()
    assert list(model.cells) == PATHS
    with bm.Engine(model):
        assert [cell.name for cell in model.cells.values()] == PATHS


def test_a_model_with_cells_in_containers_runs():
    model = Layers()
    check(model, model)


def test_a_model_with_a_cell_per_width_is_saved_with_an_example_for_each(tmp_path):
    model = Layers()
    bm.save(model, tmp_path / "saved")
    loaded = bm.load(tmp_path / "saved")
    assert isinstance(loaded, Layers)
    assert sorted(loaded.cells) == sorted(PATHS)
    assert loaded.ends[1] == ["a note", 3]
    assert len(loaded.examples) == 2
    check(loaded, model)


def test_all_example_requests_are_unfolded_when_the_engine_starts():
    model = Layers()
    with bm.Engine(model) as engine:
        assert {"into.3", "into.5"} <= {cell.name for cell in engine.registry.types}


def test_a_cell_that_no_example_reaches_is_named_with_what_to_give(tmp_path):
    with pytest.raises(SavedModelError, match=r"'into\.5': the example request never reaches it.*example_requests=\["):
        bm.save(Layers(), tmp_path / "saved", example_request=torch.zeros(2, 3))
    bm.save(Layers(), tmp_path / "saved", example_requests=[torch.zeros(2, width) for width in WIDTHS])


class WithModules(bm.Model):
    def __init__(self) -> None:
        self.modules = nn.ModuleList([nn.Linear(3, 3)])
        self.cells_of_them = [bm.Cell(module) for module in self.modules]
        self.example_request = torch.zeros(2, 3)

    def unfold(self, frames: Any) -> Any:
        return self.cells_of_them[0].map(frames)


def test_a_module_that_is_no_cell_is_not_saved_and_the_message_says_what_to_write(tmp_path):
    with pytest.raises(
        SavedModelError, match=r"modules'\]: ModuleList is not plain data.*a list of cells for an nn\.Mod"
    ):
        bm.save(WithModules(), tmp_path / "saved")


@pytest.mark.parametrize(
    ("modules", "line"),
    [
        (nn.ModuleList([nn.Linear(3, 3)]), r"\[bm\.Cell\(m\) for m in modules\]"),
        (nn.ModuleDict({"a": nn.Linear(3, 3)}), r"\{name: bm\.Cell\(m\) for name, m in modules\.items\(\)\}"),
    ],
)
def test_a_cell_of_a_container_of_modules_is_refused_with_the_line_to_write(modules, line):
    with pytest.raises(ModelError, match=f"no forward.*Make a cell of each: {line}"):
        bm.Cell(modules)


class Twice(bm.Model):
    def __init__(self) -> None:
        self.cells_by = {1: bm.Cell(nn.Linear(3, 3)), "1": bm.Cell(nn.Linear(3, 3))}

    def unfold(self, frames: Any) -> Any:
        return None


def test_two_cells_of_one_path_are_refused():
    with pytest.raises(ModelError, match=r"two cells have the path 'cells_by\.1'"):
        Twice()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["stack"].__setitem__(0, {"$cell": "missing"}), r"malformed \$cell"),
        (
            lambda state: state["lstm"]["$model"].__setitem__("class", "os.path:join"),
            "neither of batchmaker nor of the",
        ),
        (lambda state: state["lstm"].__setitem__("$model", 3), r"malformed \$model"),
        (lambda state: state["into"].__setitem__("$dict", [3]), r"malformed \$dict"),
    ],
)
def test_a_state_that_was_tampered_with_is_refused(tmp_path, change, message):
    bm.save(Layers(), tmp_path / "saved")
    path = tmp_path / "saved" / "manifest.json"
    manifest = msgspec.json.decode(path.read_bytes())
    change(manifest["state"])
    path.write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(SavedModelError, match=message):
        bm.load(tmp_path / "saved")


class Frames(nn.Module):
    """A picture [batch, 12] -> frames [batch, 6, 4], as a convolution gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 4)

    def forward(self, picture: Tensor) -> Tensor:
        result: Tensor = self.layer(picture.view(-1, 6, 2))
        return result


class Reader(bm.Model):
    """Recurrent layers, a chain and a map over the one value that a cell gives."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.frames = bm.Cell(Frames())
        self.network = nn.LSTM(4, 4, bidirectional=True)
        self.lstm = bm.recurrent(self.network)
        self.step, self.score = bm.Cell(nn.GRUCell(4, 3)), bm.Cell(nn.Linear(4, 2))

    def unfold(self, picture: Any) -> Any:
        frames = self.frames(picture)
        return self.lstm(frames)[0], self.step.run(frames), self.score.map(frames)


def test_a_value_of_a_cell_is_the_sequence_that_others_run_over():
    model, pictures = Reader(), torch.randn(5, 12)
    with bm.Engine(model) as engine, torch.no_grad():
        for picture, result in zip(pictures, engine.map(list(pictures), progress=False), strict=True):
            frames = model.frames.module(picture[None])[0]
            h = torch.zeros(1, 3)
            for frame in frames:
                h = model.step.module(frame[None], h)
            expected = (model.network(frames)[0], h[0], model.score.module(frames))
            torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["cells", "examples", "takes_chunks"])
def test_an_attribute_with_the_name_of_what_a_model_finds_out_itself_is_refused(name: str) -> None:
    class Own(bm.Model):
        def __init__(self) -> None:
            setattr(self, name, {2: bm.Cell(nn.Linear(2, 2))})

        def unfold(self, x: Any) -> Any:
            return x

    advice = rf"Own\.{name}: an attribute of a model cannot be named '{name}'.*Give it another name"
    with pytest.raises(ModelError, match=advice):
        Own()
    with pytest.raises(ModelError, match=advice):
        type("Own", (bm.Model,), {name: {}})
