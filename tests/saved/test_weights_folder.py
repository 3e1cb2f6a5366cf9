"""Folders of config.json and safetensors: a model is the same again, and what is wrong with a folder is named."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import batchmaker as bm
from batchmaker.errors import ModelError, OptionError, SavedModelError
from batchmaker.lab import zoo
from batchmaker.saved import model_types
from batchmaker.saved.sources import parse_source
from insides import network_of

sys.path.insert(0, str(Path(__file__).parent))  # the models' classes must be importable, as a user's are
import saved_models as models

NEAR = {"atol": 1e-5, "rtol": 1e-5}
SIZED = {name: torch.randn(3, 3) for name in ("up.weight", "down.weight")} | {
    name: torch.randn(3) for name in ("up.bias", "down.bias")
}


def answers(model: bm.Model, requests: list[Any]) -> list[Any]:
    with bm.Engine(model, threads=1) as engine:
        return list(engine.map(requests, progress=False))


def folder_of(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    """A folder as another library writes it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def sized(tmp_path: Path) -> Path:
    config = {"hidden_size": 3, "architectures": ["Other"], "model_type": "other", "torch_dtype": "float32"}
    return folder_of(tmp_path / "sized", config, SIZED)


def change(folder: Path, change_it: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    change_it(weights)
    safetensors.torch.save_file(weights, folder / "model.safetensors")


CASES: list[Any] = [
    pytest.param(models.ServedTagger, [[1, 2, 3], [4]], id="a network's names"),
    pytest.param(lambda: models.Sized(3), [torch.ones(3)], id="the cells' names"),
    pytest.param(
        lambda: zoo.make("treelstm", vocabulary_size=9, hidden=4, max_batch=4),
        [{"words": [1, 2], "children": [[0, 1]]}],
        id="treelstm",
    ),
    pytest.param(lambda: zoo.make("lstm-nmt", vocabulary_size=9, hidden=4, max_batch=4), [[3, 4]], id="lstm-nmt"),
    pytest.param(
        lambda: zoo.make("treelstm-childsum", vocabulary_size=9, hidden=4, max_batch=4),
        [{"words": [1, 2], "edges": [[0, 1]]}],
        id="weights that cells share",
    ),
]


@pytest.mark.parametrize(("make", "requests"), CASES)
def test_a_loaded_model_answers_as_before(make: Callable[[], bm.Model], requests: list[Any], tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = make()
    for tensor in model.saved_weights().values():
        tensor.copy_(torch.randn_like(tensor))  # so that another model of the class has other weights
    bm.save(model, tmp_path / "model", form="weights")
    loaded = bm.load(tmp_path / "model")
    assert type(loaded) is type(model)
    for one, other in zip(answers(model, requests), answers(loaded, requests), strict=True):
        torch.testing.assert_close(one, other, **NEAR)
    bm.save(loaded, tmp_path / "again", form="weights")
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("model", "again"))
    assert one == other


def test_what_is_written_is_the_layout_of_hugging_face(tmp_path: Path) -> None:
    model = models.ServedTagger(7, 4)
    model.deadline_ms = 50.0
    bm.save(model, tmp_path / "model", form="weights")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config == {
        "architectures": ["ServedTagger"], "model_type": "batchmaker", "words": 7, "size": 4,
        "batchmaker": {"class": "saved_models:ServedTagger", "deadline_ms": 50.0},
    }  # fmt: skip
    weights = safetensors.torch.load_file(tmp_path / "model" / "model.safetensors")
    assert set(weights) == set(network_of(model).state_dict()) - {"out.weight"}  # tied: once
    assert bm.load(tmp_path / "model").deadline_ms == 50.0


def test_a_class_is_made_with_the_options_and_gets_the_weights(sized: Path) -> None:
    (result,) = answers(bm.load(sized, models.Sized), [torch.ones(3)])
    up = SIZED["up.weight"] @ torch.ones(3) + SIZED["up.bias"]
    torch.testing.assert_close(result, SIZED["down.weight"] @ up + SIZED["down.bias"], **NEAR)


def test_weights_of_a_network_have_its_names(tmp_path: Path) -> None:
    network = models.Tagger(9, 4).eval()
    weights = {name: weight.clone() for name, weight in network.state_dict().items()}
    folder = folder_of(tmp_path / "tagger", {"words": 9, "size": 4}, weights)
    (result,) = answers(bm.load(folder, models.ServedTagger), [[1, 2, 3]])
    torch.testing.assert_close(result, network(torch.tensor([[1, 2, 3]]))[0].detach(), **NEAR)


def test_a_function_takes_the_options_that_it_needs(sized: Path) -> None:
    config = json.loads((sized / "config.json").read_text())
    (sized / "config.json").write_text(json.dumps({**config, "layer_norm_eps": 1e-5}))
    with pytest.raises(SavedModelError, match=r"options that it does not take: layer_norm_eps.*Give a function"):
        bm.load(sized, models.Sized)
    loaded = bm.load(sized, lambda hidden_size, **_: models.Sized(hidden_size))
    assert torch.equal(loaded.saved_weights()["up.weight"], SIZED["up.weight"])


def test_floats_are_rounded_to_the_dtype_of_the_model(sized: Path) -> None:
    loaded = bm.load(sized, lambda hidden_size, **_: models.Sized(hidden_size, "bfloat16"))
    assert torch.equal(loaded.saved_weights()["up.weight"], SIZED["up.weight"].bfloat16())


def test_shards_are_read_by_their_index(sized: Path) -> None:
    weights = safetensors.torch.load_file(sized / "model.safetensors")
    (sized / "model.safetensors").unlink()
    places = {name: f"model-{1 + name.startswith('up'):05}-of-00002.safetensors" for name in weights}
    for file in set(places.values()):
        safetensors.torch.save_file({n: weights[n] for n, place in places.items() if place == file}, sized / file)
    index = sized / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert torch.equal(bm.load(sized, models.Sized).saved_weights()["up.bias"], SIZED["up.bias"])
    index.write_text(json.dumps({"weight_map": {**places, "up.scale": places["up.bias"]}}))
    with pytest.raises(SavedModelError, match=r"has not the weights that .* names: up.scale"):
        bm.load(sized, models.Sized)
    for file in ("../other.safetensors", "/tmp/a.safetensors", "model.bin"):
        index.write_text(json.dumps({"weight_map": {"up.weight": file}}))
        with pytest.raises(SavedModelError, match=r"is refused: it must be a plain name"):
            bm.load(sized, models.Sized)
    index.write_text(json.dumps({"weight_map": {**places, "up.scale": "model-9.safetensors"}}))
    with pytest.raises(SavedModelError, match=r"model-9\.safetensors: there is no such file"):
        bm.load(sized, models.Sized)
    index.write_text("[]")
    with pytest.raises(SavedModelError, match=r"expected an object"):
        bm.load(sized, models.Sized)


def test_weights_that_do_not_fit_are_all_named(sized: Path) -> None:
    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights["left"] = weights.pop("up.weight")
        weights["down.weight"] = torch.zeros(3, 4)
        weights["down.bias"] = torch.zeros(3, dtype=torch.int64)

    change(sized, spoil)
    with pytest.raises(SavedModelError) as caught:
        bm.load(sized, models.Sized)
    for fault in ("missing: up.weight", "unexpected: left", "down.weight is float32[3, 4], the model's float32[3, 3]",
                  "down.bias is int64[3], the model's float32[3]"):  # fmt: skip
        assert fault in str(caught.value)


def test_nothing_is_loaded_if_anything_does_not_fit(sized: Path) -> None:
    made = models.Sized(3)
    before = {name: tensor.clone() for name, tensor in made.saved_weights().items()}
    change(sized, lambda weights: weights.pop("down.bias"))
    with pytest.raises(SavedModelError, match=r"missing: down.bias"):
        bm.load(sized, lambda **_: made)
    assert all(torch.equal(made.saved_weights()[name], tensor) for name, tensor in before.items())


def test_of_a_tied_weight_one_name_is_enough_and_several_must_agree(tmp_path: Path) -> None:
    network = models.Tagger(9, 4)
    weights = {name: weight.clone() for name, weight in network.state_dict().items() if name != "embed.weight"}
    folder = folder_of(tmp_path / "tagger", {"words": 9, "size": 4}, weights)
    loaded = bm.load(folder, models.ServedTagger)
    assert torch.equal(loaded.saved_weights()["embed.weight"], weights["out.weight"])
    change(folder, lambda weights: weights.update({"embed.weight": torch.zeros(9, 4)}))
    with pytest.raises(SavedModelError, match=r"embed\.weight and out\.weight are one weight .* different values"):
        bm.load(folder, models.ServedTagger)


def test_pickles_are_never_read(sized: Path, tmp_path: Path) -> None:
    (sized / "model.safetensors").unlink()
    (sized / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(SavedModelError, match=r"pytorch_model\.bin is a pickle, which is never read"):
        bm.load(sized, models.Sized)
    (sized / "model.safetensors").write_bytes(pickle.dumps({}))
    with pytest.raises(SavedModelError, match=r"model\.safetensors: cannot be read"):
        bm.load(sized, models.Sized)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "malformed"),
        ("[]", "expected an object"),
        (
            '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}',
            r"model_type 'gpt2' \(GPT2LMHeadModel\); known",
        ),
        ("{}", "no network here for model_type None"),
        ('{"batchmaker": 1}', "batchmaker is 1, expected an object"),
        ('{"batchmaker": {"class": "os:system"}}', "is not a batchmaker.Model"),
        ('{"batchmaker": {"class": "saved_models:Sized"}}', "lacks hidden_size"),
        ('{"batchmaker": {"class": "saved_models:Sized"}, "hidden_size": "a"}', "Sized raised TypeError"),
        ('{"batchmaker": {"class": "saved_models:Sized"}, "hidden_size": 3, "size": 1}', "does not take: size"),
        ('{"batchmaker": {"class": "saved_models:Sized", "deadline_ms": "a"}, "hidden_size": 3}', "deadline_ms is 'a'"),
    ],
)
def test_a_wrong_config_says_what_is_wrong(sized: Path, config: str, message: str) -> None:
    (sized / "config.json").write_text(config)
    with pytest.raises(SavedModelError, match=message):
        bm.load(sized)


def test_something_else_than_a_model_is_refused(sized: Path) -> None:
    with pytest.raises(SavedModelError, match=r"returned dict, expected a batchmaker.Model"):
        bm.load(sized, lambda **options: options)  # type: ignore[arg-type, return-value]


def by_type(config: Any, weights: Any) -> bm.Model:
    if "down.weight" not in weights:
        raise ModelError("no weights of this network")
    model = models.Sized(config["hidden_size"])
    for name, tensor in weights.items():
        model.saved_weights()[name].copy_(tensor)
    return model


def test_a_model_type_that_is_known_has_a_loader(sized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model_types.LOADERS, "other", "test_weights_folder:by_type")
    monkeypatch.setitem(sys.modules, "test_weights_folder", sys.modules[__name__])
    assert torch.equal(bm.load(sized).saved_weights()["up.weight"], SIZED["up.weight"])
    change(sized, lambda weights: weights.pop("down.weight"))
    with pytest.raises(SavedModelError, match=r"model_type 'other': ModelError: no weights of this network"):
        bm.load(sized)
    (sized / "config.json").write_text('{"model_type": "unknown"}')
    with pytest.raises(SavedModelError, match=r"no network here for model_type 'unknown'; known: mamba, other, rwkv"):
        bm.load(sized)


def test_a_model_that_could_not_be_made_again_is_not_saved(tmp_path: Path) -> None:
    target = tmp_path / "model"
    model = models.Sized(3)
    with pytest.raises(SavedModelError, match=r"lacks hidden_size"):
        bm.save(model, target, form="weights", config={})
    with pytest.raises(SavedModelError, match=r"the weights are not those of Sized"):
        bm.save(model, target, form="weights", config={"hidden_size": 4})
    with pytest.raises(SavedModelError, match=r"keys model_type of its own"):
        bm.save(model, target, form="weights", config={"hidden_size": 3, "model_type": "a"})
    with pytest.raises(SavedModelError, match=r"is not plain data"):
        bm.save(model, target, form="weights", config={"hidden_size": object()})
    with pytest.raises(SavedModelError, match=r"has not the weight '.*' of cell 'lstm"):
        bm.save(models.Forgetful(), target, form="weights")
    with pytest.raises(SavedModelError, match=r"options are not known: .*save\(\.\.\., config="):
        bm.save(models.Sentence(), target, form="weights")
    with pytest.raises(OptionError, match=r"form must be"):
        bm.save(model, target, form="pickle")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"config is for"):
        bm.save(model, target, config={})
    with pytest.raises(OptionError, match=r"example request is for"):
        bm.save(model, target, form="weights", example_request=torch.ones(3))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_there_is_not_overwritten(sized: Path) -> None:
    with pytest.raises(SavedModelError, match=r"is not an empty directory"):
        bm.save(models.Sized(3), sized, form="weights")


def test_graphs_need_a_class(tmp_path: Path) -> None:
    bm.save(models.Sized(3), tmp_path / "graphs")
    with pytest.raises(SavedModelError, match=r"has graphs, which need a class"):
        bm.load(tmp_path / "graphs", lambda: models.Sized(3))


def test_a_server_finds_such_folders_and_notices_new_weights(tmp_path: Path) -> None:
    bm.save(models.Sized(3), tmp_path / "sized", form="weights")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")  # of something else
    for text in (str(tmp_path), str(tmp_path / "sized")):
        found = parse_source(text).scan()
        assert list(found) == ["sized"]
        assert isinstance(found["sized"]["1"].make(), models.Sized)
    before = parse_source(str(tmp_path)).scan()["sized"]["1"].stamp
    assert parse_source(str(tmp_path)).scan()["sized"]["1"].stamp == before
    change(tmp_path / "sized", lambda weights: weights["up.bias"].add_(1))
    assert parse_source(str(tmp_path)).scan()["sized"]["1"].stamp != before
