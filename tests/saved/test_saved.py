"""A saved model answers as before, from files that are never unpickled, and a wrong file is refused by name."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import batchmaker as bm
from batchmaker.errors import ModelError, SavedModelError
from batchmaker.saved import plain
from batchmaker.saved.graph_check import RefusedGraphError, check_graph

sys.path.insert(0, str(Path(__file__).parent))  # the models' classes must be importable, as a user's are
import saved_models as models

TREE = {"words": [3, 1, 2, 7], "children": [(0, 1), (4, 2), (5, 3)]}
CASES: list[Any] = [
    pytest.param(models.Sentence, [[1, 2, 3], [4]], 1e-6, id="run"),
    pytest.param(lambda: models.Sentence(torch.bfloat16), [[1, 2, 3], [4]], 0.01, id="bfloat16"),
    pytest.param(models.Tree, [TREE], 1e-6, id="tree"),
    pytest.param(models.Translate, [[4, 5], [6]], 0.0, id="generator"),
    pytest.param(models.Rows, [torch.ones(models.WIDTH)], 1e-6, id="shared module"),
]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved") / "model"
    torch.manual_seed(0)
    bm.save(models.Sentence(), directory)
    return directory


@pytest.fixture
def saved(saved_once: Path, tmp_path: Path) -> Path:
    """A saved model of the test's own, to be changed as it likes."""
    return shutil.copytree(saved_once, tmp_path / "model")


def answers(model: bm.Model, requests: list[Any]) -> tuple[list[Any], bm.Engine]:
    with bm.Engine(model, threads=1) as engine:
        return engine.map(requests, progress=False), engine


def edit_manifest(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def rehash(directory: Path) -> None:
    """Make the manifest agree with the files, as whoever plants something would."""

    def change(manifest: dict[str, Any]) -> None:
        for cell in manifest["cells"]:
            for file in (cell["graph"], cell["weights"]):
                content = (directory / file["name"]).read_bytes()
                file["sha256"], file["num_bytes"] = hashlib.sha256(content).hexdigest(), len(content)

    edit_manifest(directory, change)


def graph_of(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read("cell/models/model.json"))


def edit_graph(directory: Path, change: Callable[[Any], object]) -> None:
    path = directory / "0_lstm.pt2"
    graph = graph_of(path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(graph)
    members["cell/models/model.json"] = json.dumps(graph).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    rehash(directory)


# --- round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "requests", "atol"), CASES)
def test_loaded_model_gives_the_same_answers_and_types(
    make: Any, requests: list[Any], atol: float, tmp_path: Path
) -> None:
    """Types name the weights bit by bit; answers may round differently, as each engine times its kernels anew."""
    model = make()
    bm.save(model, tmp_path / "model")
    wanted, before = answers(model, requests)
    loaded = bm.load(tmp_path / "model")
    got, after = answers(loaded, requests)
    torch.testing.assert_close(got, wanted, rtol=0, atol=atol)
    assert after.registry.types == before.registry.types
    assert [b.identity for b in after.registry.bound] == [b.identity for b in before.registry.bound]
    assert [b.notes for b in after.registry.bound] == [b.notes for b in before.registry.bound]
    assert list(loaded.cells) == list(model.cells)
    assert type(loaded) is type(model)


def test_a_loaded_model_can_be_saved_again(saved: Path, tmp_path: Path) -> None:
    bm.save(bm.load(saved), tmp_path / "again")
    assert {p.name: p.read_bytes() for p in saved.iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "again").iterdir()
    }


def test_plain_attributes_come_back_as_they_were(tmp_path: Path) -> None:
    bm.save(models.Tree(), tmp_path / "model")
    loaded = bm.load(tmp_path / "model")
    assert loaded.sizes == {"width": models.WIDTH, "name": "tree", "pair": (1, 2.5), "none": None}  # type: ignore[attr-defined]
    assert loaded.example_request == {"words": [3, 1, 2], "children": [(0, 1), (3, 2)]}


def test_a_model_may_keep_its_state_in_its_own_way(tmp_path: Path) -> None:
    bm.save(models.Noting(), tmp_path / "model")
    assert bm.load(tmp_path / "model").hook is print  # type: ignore[attr-defined]


def test_equal_cells_share_files_and_tied_weights_are_written_once(tmp_path: Path) -> None:
    bm.save(models.Rows(), tmp_path / "rows")
    assert len(list((tmp_path / "rows").iterdir())) == 3
    bm.save(models.Translate(), tmp_path / "translate")
    cells = json.loads((tmp_path / "translate" / "manifest.json").read_text())["cells"]
    assert len(cells[1]["aliases"]) == 1


def test_another_class_may_unfold_the_cells(saved: Path) -> None:
    class Last(models.Sentence):
        def unfold(self, request: Any) -> Any:
            return self.lstm.run(request)[1]

    edit_manifest(saved, lambda m: m.update(model="no.such.module:Class"))
    assert type(bm.load(saved, model_class=Last)) is Last


def test_plain_data_round_trips_through_json() -> None:
    given = {"a": [1, 2.5, "x", None, True], "t": (float("inf"), torch.tensor([1.5], dtype=torch.bfloat16))}
    back = plain.from_json(json.loads(json.dumps(plain.to_json(given, "it"))), "it")
    assert back["a"] == given["a"]
    assert back["t"][0] == float("inf")
    assert torch.equal(back["t"][1], given["t"][1])  # type: ignore[arg-type]
    assert back["t"][1].dtype is torch.bfloat16


# --- nothing is unpickled ---------------------------------------------------------------------------------------------


def test_loading_never_unpickles(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("unpickled")

    for module, name in (
        (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (pickle, "_Unpickler"), (torch, "load"),
        (torch._C, "_pickle_load_obj"), (torch.serialization, "load"), (torch.export, "load"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, refuse)
    got, _ = answers(bm.load(saved), [[1, 2, 3]])
    assert got[0].shape == (models.WIDTH,)


def test_no_saved_file_holds_a_pickle(tmp_path: Path) -> None:
    bm.save(models.Translate(), tmp_path / "model")
    names = []
    for path in (tmp_path / "model").glob("*.pt2"):
        with zipfile.ZipFile(path) as archive:
            names += [name.split("/", 1)[1] for name in archive.namelist()]
    assert set(names) == {"archive_format", "archive_version", "byteorder", "models/model.json"}


class Planted:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["BATCHMAKER_TEST_PLANTED"],)


def test_a_pickle_planted_in_an_archive_is_refused(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHMAKER_TEST_PLANTED", str(tmp_path / "ran"))
    with zipfile.ZipFile(saved / "0_lstm.pt2", "a") as archive:
        archive.writestr("cell/data/sample_inputs/model.pt", pickle.dumps(Planted()))
    rehash(saved)
    with pytest.raises(SavedModelError, match=r"0_lstm\.pt2: refused.*sample_inputs/model\.pt.*pickle"):
        bm.load(saved)
    assert not (tmp_path / "ran").exists()


def test_an_archive_of_torch_export_save_is_refused(saved: Path) -> None:
    program = torch.export.export(nn.Linear(2, 2), (torch.ones(3, 2),))
    stream = io.BytesIO()
    torch.export.save(program, stream)
    (saved / "0_lstm.pt2").write_bytes(stream.getvalue())
    rehash(saved)
    with pytest.raises(SavedModelError, match=r"torch\.export\.save are not accepted"):
        bm.load(saved)


def node(graph: Any) -> Any:
    return graph["graph_module"]["graph"]["nodes"][0]


def sizes(graph: Any) -> Any:
    return graph["graph_module"]["graph"]["tensor_values"]["word"]["sizes"][0]["as_expr"]


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = [value]
    return value


SUM = "Mul(" + ", ".join(["Add(Symbol('s0'), Integer(1))"] * 6) + ", ".join(["", *["Symbol('s1')"] * 8]) + ")"
CODE = "__import__('os').mkdir('/tmp/batchmaker-planted')"
PLANTS: list[Any] = [
    pytest.param(lambda g: sizes(g).update(expr_str=CODE), "size", id="size that is code"),
    pytest.param(lambda g: sizes(g).update(expr_str="Symbol('s0').__class__"), "size", id="size with attributes"),
    pytest.param(lambda g: sizes(g).update(expr_str="Pow(9, Pow(9, 9))"), "exponent", id="a number without end"),
    pytest.param(lambda g: sizes(g).update(expr_str="Float('1e999999999')"), "Float", id="a decimal without end"),
    pytest.param(lambda g: sizes(g).update(hint={"as_int": 1 << 9999}), "10000 bits", id="a number of many bits"),
    pytest.param(
        lambda g: g["graph_module"]["graph"]["tensor_values"]["word"]["sizes"].append({"as_int": 1 << 62}),
        "word whose sizes",
        id="a value larger than any memory",
    ),
    pytest.param(lambda g: g["graph_module"]["graph"].update(nodes=[node(g)] * 20_001), "20001 nodes", id="nodes"),
    pytest.param(
        lambda g: g["graph_module"]["graph"].update(inputs=[{"as_expr": {"expr_str": SUM}}] * 1700),
        "50000 terms",
        id="sizes together",
    ),
    pytest.param(lambda g: g.update(opset_version=nested(100)), "64 levels", id="levels"),
    pytest.param(lambda g: g.update(opset_version=nested(900)), "64 levels", id="many levels"),
    pytest.param(lambda g: g.update(guards_code=[CODE]), "guards_code", id="guard that is code"),
    pytest.param(lambda g: node(g).update(name="x\nimport os"), "name", id="name that is code"),
    pytest.param(lambda g: node(g).update(target="torch.load"), "operator", id="torch.load as an operator"),
    pytest.param(lambda g: node(g).update(target="torch.os.system"), "operator", id="a shell as an operator"),
    pytest.param(lambda g: node(g).update(target="torch.ops.aten.from_file.default"), "operator", id="reads a file"),
    pytest.param(lambda g: node(g).update(target="torch.ops.aten.save.default"), "operator", id="writes a file"),
    pytest.param(lambda g: node(g).update(target="_operator.pow"), "operator", id="numbers without end"),
    pytest.param(
        lambda g: node(g).update(target="_operator.mul", inputs=[{"name": "", "arg": {"as_string": "a"}, "kind": 1}]),
        "arithmetic with text",
        id="text without end",
    ),
    pytest.param(lambda g: node(g).update(metadata={"custom": "1"}), "metadata", id="metadata"),
    pytest.param(
        lambda g: node(g)["inputs"][0].update(arg={"as_operator": "torch.os.system"}),
        "as_operator",
        id="operator given",
    ),
    pytest.param(lambda g: g["graph_module"]["graph"].update(nodes=[]), "malformed", id="no nodes"),
]


@pytest.mark.parametrize(("plant", "reason"), PLANTS)
def test_code_planted_in_a_graph_is_refused(plant: Any, reason: str, saved: Path) -> None:
    edit_graph(saved, plant)
    with pytest.raises(SavedModelError, match=reason):
        bm.load(saved)
    assert not Path("/tmp/batchmaker-planted").exists()


def test_the_check_accepts_what_was_saved(saved: Path) -> None:
    graph = graph_of(saved / "0_lstm.pt2")
    check_graph(graph)
    graph["guards_code"] = ["1"]
    with pytest.raises(RefusedGraphError, match="guards_code"):
        check_graph(graph)


# --- files that are not as they should be -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["manifest.json", "0_lstm.pt2", "0_lstm.safetensors"])
def test_a_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(SavedModelError, match=rf"{name}: cannot be read"):
        bm.load(saved)


@pytest.mark.parametrize("name", ["manifest.json", "0_lstm.pt2", "0_lstm.safetensors"])
@pytest.mark.parametrize("hashed", [False, True])
def test_a_truncated_file_is_named(saved: Path, name: str, hashed: bool) -> None:
    path = saved / name
    path.write_bytes(path.read_bytes()[:-40])
    if hashed and name != "manifest.json":
        rehash(saved)
    with pytest.raises(SavedModelError, match=name):
        bm.load(saved)


@pytest.mark.parametrize("name", ["manifest.json", "0_lstm.pt2", "0_lstm.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_in_place_of_a_file_is_not_read(saved: Path, name: str, kind: str) -> None:
    (saved / name).unlink()
    if kind == "pipe":
        os.mkfifo(saved / name)
    else:
        (saved / name).symlink_to("/dev/zero")
    with pytest.raises(SavedModelError, match=rf"{name}: is no regular file"):
        bm.load(saved)


def test_a_file_of_another_size_than_the_manifest_says_is_not_read(saved: Path) -> None:
    with (saved / "0_lstm.safetensors").open("ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(SavedModelError, match=r"1099511627776 bytes, manifest\.json says"):
        bm.load(saved)


def test_a_model_saved_before_sizes_were_noted_is_loaded(saved: Path) -> None:
    edit_manifest(saved, lambda m: [file.pop("num_bytes") for c in m["cells"] for file in (c["graph"], c["weights"])])
    assert bm.load(saved).cells


MANIFESTS: list[Any] = [
    pytest.param(lambda m: m.update(format=99), "format 99", id="later format"),
    pytest.param(lambda m: m.update(surprise=1), "surprise", id="unknown field"),
    pytest.param(lambda m: m.pop("cells"), "cells", id="no cells"),
    pytest.param(lambda m: m["cells"][0]["graph"].update(name="../x.pt2"), "plain name", id="parent directory"),
    pytest.param(lambda m: m["cells"][0]["graph"].update(name="/etc/passwd"), "plain name", id="absolute path"),
    pytest.param(lambda m: m["cells"][0]["inputs"][1].update(shape=[9]), "inputs are", id="other input shape"),
    pytest.param(lambda m: m["cells"][0]["outputs"][1].update(dtype="float64"), "outputs are", id="other output dtype"),
    pytest.param(lambda m: m["cells"][0].update(batch_sizes=[]), "batch_sizes", id="no batch sizes"),
    pytest.param(
        lambda m: m["cells"][0].update(batch_sizes=[1, 1 << 24]), "16777216 are more than .*16384", id="a large batch"
    ),
    pytest.param(lambda m: m["cells"][0].update(batch_sizes=list(range(1, 600))), "599", id="many batch sizes"),
    pytest.param(lambda m: m["cells"][0].update(priority=1 << 40), "priority", id="priority"),
    pytest.param(lambda m: m["cells"][0]["inputs"][1].update(shape=[1 << 40]), "elements of one v", id="a large row"),
    pytest.param(lambda m: m["cells"][0]["inputs"][1].update(shape=[-1]), "shape", id="a negative size"),
    pytest.param(lambda m: m["cells"][0]["inputs"][0].update(num_tokens=0), "0 tokens", id="no tokens"),
    pytest.param(
        lambda m: m["cells"][0].update(
            batch_sizes=[1 << 14], outputs=[{**m["cells"][0]["outputs"][0], "shape": [1 << 20]}]
        ),
        "largest batch",
        id="a large batch of large rows",
    ),
    pytest.param(lambda m: m.update(cells=m["cells"] * 1025), "1025 are more than", id="many cells"),
    pytest.param(lambda m: m["cells"][0].update(name="n" * 300), "letters of its name", id="a long name"),
    pytest.param(lambda m: m.update(example_request=[0] * (1 << 20)), "values in the example", id="a long example"),
    pytest.param(lambda m: m.update(example_requests=[[1]] * 300), "requests and chunks", id="many examples"),
    pytest.param(lambda m: m.update(example_request=nested(70)), "64 levels", id="a deep example"),
    pytest.param(lambda m: m.update(example_request=nested(900)), "64 levels|malformed", id="a deeper example"),
    pytest.param(lambda m: m.update(state={"a": nested(70)}), "64 levels", id="a deep state"),
    pytest.param(lambda m: m.update(deadline_ms=-1.0), "deadline_ms", id="a deadline before the request"),
    pytest.param(lambda m: m["cells"][0].update(attribute="__class__"), "attribute", id="attribute name"),
    pytest.param(lambda m: m["cells"].append(m["cells"][0]), "attribute", id="cell named twice"),
    pytest.param(lambda m: m["cells"][0].update(aliases={"a": "b"}), "safetensors", id="alias of nothing"),
    pytest.param(
        lambda m: m.update(model="no.such.module:Class"), "cannot import .* PYTHONPATH", id="class not installed"
    ),
    pytest.param(lambda m: m.update(model="os:system"), "not a batchmaker.Model", id="not a model"),
    pytest.param(lambda m: m.update(model="os.system('x')"), "does not name a class", id="not a name"),
    pytest.param(lambda m: m.update(example_request={"$what": 1}), "unknown tag", id="unknown tag"),
    pytest.param(lambda m: m.update(example_request={"$tensor": {}}), "malformed", id="malformed tensor"),
]


@pytest.mark.parametrize(("change", "message"), MANIFESTS)
def test_a_wrong_manifest_is_refused(change: Any, message: str, saved: Path) -> None:
    edit_manifest(saved, change)
    with pytest.raises(SavedModelError, match=message):
        bm.load(saved)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything in JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, item in inner for path in places(item, (*at, key)))]


@pytest.mark.parametrize("odd", ["..", -1, 1 << 62, 1 << 70, 1e308, None, [], {}, {"$tuple": 3}, nested(70)], ids=str)
def test_whatever_stands_in_a_manifest_it_is_a_model_or_a_model_error(odd: Any, saved: Path) -> None:
    path = saved / "manifest.json"
    content = path.read_text()
    for *outer, last in places(json.loads(content))[1:]:
        for remove in (False, True):
            manifest = within = json.loads(content)
            for key in outer:
                within = within[key]
            if remove:
                del within[last]
            else:
                within[last] = odd
            path.write_text(json.dumps(manifest))
            with contextlib.suppress(ModelError):
                bm.load(saved)


def test_a_model_that_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    model = models.Sentence()
    model.lstm.batch_sizes = (1, 1 << 15)
    with pytest.raises(SavedModelError, match="rows in its largest batch"):
        bm.save(model, tmp_path / "large")
    assert not (tmp_path / "large").exists()


def test_a_file_larger_than_the_memory_is_not_read_though_the_manifest_agrees(saved: Path) -> None:
    with (saved / "0_lstm.safetensors").open("ab") as file:
        file.truncate(1 << 42)
    edit_manifest(saved, lambda m: m["cells"][0]["weights"].update(num_bytes=1 << 42))
    with pytest.raises(SavedModelError, match="this machine's memory"):
        bm.load(saved)


def test_weights_of_another_shape_are_refused(saved: Path, tmp_path: Path) -> None:
    bm.save(models.Rows(), tmp_path / "rows")
    (saved / "0_lstm.safetensors").write_bytes((tmp_path / "rows" / "0_one.safetensors").read_bytes())
    rehash(saved)
    with pytest.raises(SavedModelError, match=r"0_lstm\.pt2"):
        bm.load(saved)


def test_tokens_are_proved_when_the_engine_starts(saved: Path) -> None:
    edit_manifest(saved, lambda m: m["cells"][0]["inputs"][0].update(num_tokens=99))
    with pytest.raises(ModelError, match="takes 20 tokens, declared for 99"):
        bm.Engine(bm.load(saved), threads=1).start()


# --- models that cannot be saved --------------------------------------------------------------------------------------


def test_a_class_that_cannot_be_imported_is_refused(tmp_path: Path) -> None:
    class Local(models.Sentence):
        pass

    with pytest.raises(SavedModelError, match="Move it to the top level of a module"):
        bm.save(Local(), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [(models.NeverReached, "'two'.*never reaches"), (models.Unsavable, "builtin_function.*saved_state")],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_left(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(SavedModelError, match=message):
        bm.save(make(), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_saving_needs_an_example_request_that_works(tmp_path: Path) -> None:
    model = models.Rows()
    model.example_request = None
    with pytest.raises(SavedModelError, match="needs an example request"):
        bm.save(model, tmp_path / "model")
    with pytest.raises(SavedModelError, match="example request failed"):
        bm.save(model, tmp_path / "model", example_request="no rows")


def test_a_directory_in_use_is_left_alone(saved: Path) -> None:
    before = (saved / "manifest.json").read_bytes()
    with pytest.raises(SavedModelError, match="not an empty directory"):
        bm.save(models.Sentence(), saved)
    assert (saved / "manifest.json").read_bytes() == before
