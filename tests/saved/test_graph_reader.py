"""Saved graphs are read without torch.export as torch reads them, and what they say of values is proved."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._export.serde import schema, serialize

import batchmaker as bm
from batchmaker.compile.binding import traced
from batchmaker.compile.dataflow import TracedSize, TracedValue
from batchmaker.compile.identity import canonical
from batchmaker.compile.programs import AnyProgram, Programs, ReadProgram
from batchmaker.compile.rewrite import lift
from batchmaker.errors import ModelError, SavedModelError
from batchmaker.graph.spec import ValueSpec
from batchmaker.saved import archive, graph_reader

sys.path.insert(0, str(Path(__file__).parent))
import saved_models as models

WIDTH = 6


class Everything(nn.Module):
    """Arguments of many kinds: sizes, lists, dtypes, optional ones, several results."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, dropout=0.5)
        self.convolution = nn.Conv1d(1, 2, 3, padding=1)
        self.register_buffer("mean", torch.ones(WIDTH))
        self.register_buffer("last", torch.zeros(1, WIDTH), persistent=False)

    def forward(self, x: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = keys.reshape(x.shape[0] * 4, WIDTH).to(torch.float64).float()
        rows = torch.cat([rows, rows.flip(0)], -1).view(-1, 4, 2 * WIDTH)
        attended, _ = self.attention(x[:, None], keys, keys, need_weights=False)
        seen = self.norm(attended[:, 0]) + self.mean + self.last.expand(x.shape[0], -1)
        most, where = keys.max(1)
        first, second = torch.split(rows.mean(1), [WIDTH, WIDTH], 1)
        zeros = torch.zeros(x.shape[0], WIDTH, dtype=x.dtype)
        joined = torch.where(where > 1, seen, zeros).clamp(min=-float("inf")) + first * second
        return joined, self.convolution(most[:, None]).flatten(1), where.sum(-1)


def read(module: nn.Module, inputs: tuple[ValueSpec, ...]) -> ReadProgram:
    """A module as it is after it has been saved and read."""
    found = loaded(traced(module.eval(), inputs))
    assert isinstance(found, ReadProgram)
    return found


def loaded(program: torch.export.ExportedProgram) -> AnyProgram:
    weights = archive.dump_weights(program, "it")
    tensors = archive.load_weights(weights.content, weights.aliases, "it")
    return archive.load_program(archive.dump_graph(program, "it"), tensors, "it")


def noted(program: Any) -> list[Any]:
    return [node.meta.get("val") for node in lift(program).graph.nodes if node.op != "output"]


def words(*shapes: int) -> tuple[ValueSpec, ...]:
    return (ValueSpec((), "int64"), *(ValueSpec((size,), "float32") for size in shapes))


MODULES: list[Any] = [
    pytest.param(Everything, (ValueSpec((WIDTH,), "float32"), ValueSpec((4, WIDTH), "float32")), id="everything"),
    pytest.param(models.Decode, words(models.WIDTH, models.WIDTH), id="tied weights"),
    pytest.param(models.Leaf, words(), id="buffer that is not saved"),
    pytest.param(models.Inner, (ValueSpec((models.WIDTH,), "float32"),) * 4, id="chunks"),
    pytest.param(models.Convolve, (ValueSpec((1, 4, 5), "float32"),), id="convolution"),
    pytest.param(
        lambda: nn.GRUCell(3, 4).bfloat16(), (ValueSpec((3,), "bfloat16"), ValueSpec((4,), "bfloat16")), id="GRU"
    ),
]


@pytest.mark.parametrize(("make", "inputs"), MODULES)
def test_a_graph_is_what_torchs_own_reader_makes_of_it(make, inputs):
    program = read(make(), inputs)
    (text, weights), (wanted, its) = canonical(lift(program)), canonical(lift(program.exported()))
    assert text == wanted
    assert all(map(torch.equal, weights, its))
    assert noted(program) == noted(program.exported())


@pytest.mark.parametrize(("make", "inputs"), MODULES)
def test_what_was_read_computes_what_the_module_does(make, inputs):
    module = make()
    bound = bm.Cell(module.eval())
    program = read(module, inputs)
    cell = bm.Cell(Programs(((program.rows, program),)))
    rows = tuple(
        torch.ones(3, *spec.shape, dtype=torch.int64) if spec.dtype == "int64"
        else torch.randn(3, *spec.shape).to(getattr(torch, spec.dtype))
        for spec in inputs
    )  # fmt: skip
    with torch.no_grad():
        torch.testing.assert_close(cell.module(*rows), bound.module(*rows), rtol=1e-5, atol=1e-5)
    assert cell.float_dtype == bound.float_dtype


def test_numbers_of_dtypes_and_orders_of_memory_are_those_of_torchs_schema():
    assert schema.SCHEMA_VERSION[0] == graph_reader.SCHEMA
    for number, dtype in graph_reader.DTYPES.items():
        assert serialize._SERIALIZE_TO_TORCH_DTYPE[number] is dtype
    for number, order in graph_reader.MEMORY_FORMATS.items():
        assert serialize._SERIALIZE_TO_TORCH_MEMORY_FORMAT[number] is order


# --- what the reader does not know ------------------------------------------------------------------------------------


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.cumsum(-1)
        y[:, 0] = 1.0
        return y.add_(x)


def test_calls_that_write_are_left_to_torch():
    program = traced(InPlace().eval(), (ValueSpec((WIDTH,), "float32"),))
    found = loaded(program)
    assert isinstance(found, torch.export.ExportedProgram)
    assert canonical(lift(found))[0] == canonical(lift(program))[0]


def test_a_model_that_torch_has_to_read_gives_the_same_answers(saved, monkeypatch):
    wanted = answers(saved, [[1, 2, 3], [4]])

    def unknown(*arguments: Any) -> ReadProgram:
        raise graph_reader.UnknownGraphError("a test")

    monkeypatch.setattr(archive, "read_graph", unknown)
    model = bm.load(saved)
    assert isinstance(model.cells["lstm"].programs.first, torch.export.ExportedProgram)
    torch.testing.assert_close(answers(saved, [[1, 2, 3], [4]]), wanted, rtol=0, atol=1e-6)  # kernels may differ


@pytest.mark.parametrize(
    "change",
    [
        lambda g: g["schema_version"].update(major=7),
        lambda g: g["opset_version"].update(aten=1),
        lambda g: nodes(g)[0]["inputs"][0].update(kind=None),
        lambda g: sizes(g, "h").__setitem__(0, {"as_expr": {"expr_str": "Symbol('s1', integer=True)", "hint": None}}),
        lambda g: sizes(g, "h").__setitem__(0, {"as_int": 3}),
        lambda g: nodes(g)[0]["inputs"][0].update(name="table"),
        lambda g: g["graph_module"]["graph"]["tensor_values"].pop("h"),
        lambda g: g["graph_module"]["signature"]["output_specs"].reverse(),
        lambda g: g["graph_module"]["graph"].update(outputs=[]),
        lambda g: g.pop("opset_version"),
    ],
)
def test_graphs_that_it_does_not_know_are_for_torch_to_judge(saved, change):
    raw = graph_of(saved)
    change(raw)
    with pytest.raises(graph_reader.UnknownGraphError):
        graph_reader.read_graph(raw, weights_of(saved), {}, lambda: None)


# --- what may not be --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("read") / "model"
    torch.manual_seed(0)
    bm.save(models.Sentence(), directory)
    return directory


@pytest.fixture
def saved(saved_once: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved_once, tmp_path / "model")


def answers(directory: Path, requests: list[Any]) -> list[Any]:
    with bm.Engine(bm.load(directory), threads=1) as engine:
        return engine.map(requests, progress=False)


def graph_of(directory: Path) -> Any:
    with zipfile.ZipFile(directory / "0_lstm.pt2") as file:
        return json.loads(file.read("cell/models/model.json"))


def weights_of(directory: Path) -> dict[str, Tensor]:
    tensors = archive.load_weights((directory / "0_lstm.safetensors").read_bytes(), {}, "it")
    return {name.removeprefix("state_dict."): tensor for name, tensor in tensors.items()}


def nodes(graph: Any) -> Any:
    return graph["graph_module"]["graph"]["nodes"]


def sizes(graph: Any, name: str) -> Any:
    return graph["graph_module"]["graph"]["tensor_values"][name]["sizes"]


def edit(directory: Path, change: Callable[[Any], object]) -> None:
    """Change the graph, and the hash of its file, as whoever plants something would."""
    path, graph = directory / "0_lstm.pt2", graph_of(directory)
    change(graph)
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, content in (members | {"cell/models/model.json": json.dumps(graph).encode()}).items():
            file.writestr(name, content)
    content, manifest = path.read_bytes(), json.loads((directory / "manifest.json").read_text())
    manifest["cells"][0]["graph"].update(sha256=hashlib.sha256(content).hexdigest(), num_bytes=len(content))
    (directory / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "target",
    [
        "torch.ops.aten.__class__.mro", "torch.ops.aten.__init__.__call__", "torch.ops.aten.add.__init__",
        "torch.ops.aten.no_such_thing.default", "torch.ops.aten.add.overloads",
    ],
)  # fmt: skip
def test_what_is_reached_through_torchs_operators_but_is_none_is_refused(saved, target):
    edit(saved, lambda graph: nodes(graph)[0].update(target=target))
    with pytest.raises(SavedModelError, match=r"0_lstm\.pt2"):
        bm.load(saved)


def test_a_weight_that_is_missing_is_refused(saved):
    raw, weights = graph_of(saved), weights_of(saved)
    weights.pop("cell.weight_hh")
    with pytest.raises(graph_reader.RefusedGraphError, match=r"no tensor for 'cell\.weight_hh'"):
        graph_reader.read_graph(raw, weights, {}, lambda: None)


def test_a_weight_of_another_shape_than_the_graph_notes_is_refused(saved):
    edit(saved, lambda graph: sizes(graph, "p_cell_bias_ih")[0].update(as_int=7))
    with pytest.raises(SavedModelError, match=r"0_lstm\.pt2: refused, .*cell\.bias_ih.* made for torch\.float32\[7\]"):
        bm.load(saved)


LIES: list[Any] = [
    pytest.param(lambda g: sizes(g, "embedding")[1].update(as_int=99), "embedding is float32.s\\d+, 99.*8", id="width"),
    pytest.param(
        lambda g: g["graph_module"]["graph"]["tensor_values"]["embedding"].update(dtype=8),
        "embedding is float64.*float32", id="dtype",
    ),
    pytest.param(lambda g: sizes(g, "embedding").clear(), r"embedding is float32\[\].*\[2, 8\]", id="dimensions"),
    pytest.param(lambda g: nodes(g)[0].update(target="torch.ops.aten.relu.default"), "malformed graph", id="call"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), LIES)
def test_what_a_graph_says_of_its_values_is_proved_when_the_engine_starts(saved, change, message):
    edit(saved, change)
    with pytest.raises((ModelError, SavedModelError), match=message):
        bm.Engine(bm.load(saved), threads=1).start()


def test_a_graph_that_does_not_run_says_which_call_it_was(saved):
    def change(graph: Any) -> None:
        nodes(graph)[0]["inputs"][1]["arg"]["as_tensor"]["name"] = "h"  # where indices should be

    edit(saved, change)
    with pytest.raises(ModelError, match=r"does not run: embedding raised .* for 2 rows"):
        bm.Engine(bm.load(saved), threads=1).start()


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_sizes_that_follow_the_batch_are_known_by_their_text():
    batch = TracedSize("s77")
    assert str(batch * 3) == "3*s77"
    assert batch * 3 == TracedSize("3*s77")
    assert (batch * 3 * 2).at(5) == 30
    assert TracedSize("s77 + 1").at(5) is None
    assert str(TracedSize("s77 + 1") * 2) == "(s77 + 1)*2"
    assert TracedValue((batch, 4), torch.float32).like(batch * 4).shape == (batch * 4,)
