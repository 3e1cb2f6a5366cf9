"""Modules that are no plain nn.Module: TorchScript, compiled, exported, and of the calling convention of encoders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.errors import ModelError


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTMCell(3, 4)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        h, c = self.lstm(x, (h, c))
        return h, c


class Chain(bm.Model):
    def __init__(self, module: Any) -> None:
        self.step = bm.Cell(module)
        self.example_request = torch.zeros(2, 3)

    def unfold(self, frames: Any) -> Any:
        return self.step.run(frames)[0]


def given() -> tuple[Tensor, ...]:
    return torch.zeros(3, 3), torch.zeros(3, 4), torch.zeros(3, 4)


def exported() -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1, max=64)
    return torch.export.export(Step(), given(), dynamic_shapes=({0: batch},) * 3)


MODULES = {
    "traced": lambda: torch.jit.trace(Step(), given()),
    "scripted": lambda: torch.jit.script(Step()),
    "compiled": lambda: torch.compile(Step()),
    "exported": exported,
}


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("kind", MODULES)
def test_a_module_of_another_kind_is_a_cell_whose_state_starts_from_zeros(kind):
    frames, h, c = torch.randn(4, 3), torch.zeros(1, 4), torch.zeros(1, 4)
    with bm.Engine(Chain(MODULES[kind]())) as engine, torch.no_grad():
        (result,) = engine.map([frames], progress=False)
        for frame in frames:
            h, c = Step()(frame[None], h, c)
    torch.testing.assert_close(result, h[0], atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_torchscript_cannot_be_saved_or_cut_and_says_what_to_give(tmp_path):
    with pytest.raises(
        ModelError, match=r"cannot be saved: torch\.export does not take TorchScript: give the nn\.Module"
    ):
        bm.save(Chain(torch.jit.script(Step())), tmp_path / "saved")
    with pytest.raises(ModelError, match=r'TorchScript cannot be cut.*cut="whole"'):
        bm.layers(torch.jit.script(nn.Linear(3, 4)))


class Encoder(nn.Module):
    """Called as Hugging Face's encoders are: named tensors, options, and whatever else; a dict comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.dense, self.pool = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, return_dict: bool | None = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        hidden = torch.tanh(self.dense(self.embed(input_ids))) * mask.unsqueeze(-1)
        return {"last_hidden_state": hidden, "pooler_output": self.pool(hidden[:, 0])}


@pytest.mark.parametrize("example", [None, torch.zeros(5, dtype=torch.int64)])
def test_an_encoder_with_further_keywords_is_cut_into_layers(example):
    network, words = Encoder(), torch.arange(5)
    with bm.Engine(bm.layers(network, example)) as engine, torch.no_grad():
        (result,) = engine.map([words], progress=False)
        expected = network(words[None])
    assert set(result) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value[0], atol=1e-5, rtol=1e-5)


class Deciding(Encoder):
    """As those that torch.fx cannot trace, with an input between that has a default."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Tensor | None]:
        named = dict(kwargs)
        if not named.get("plain") and input_ids.shape[1] == 0:
            raise ValueError("an empty text")
        states: dict[str, Tensor | None] = dict(super().forward(input_ids, attention_mask))
        if token_type_ids is not None:
            states["types"] = self.embed(token_type_ids)
        return {**states, "attentions": None}


@pytest.mark.parametrize("cut", ["layers", "whole"])
def test_inputs_that_an_example_leaves_out_between_others_keep_their_defaults(cut):
    network = Deciding()
    request = {"input_ids": torch.arange(5), "token_type_ids": torch.tensor([0, 0, 1, 1, 1])}
    with bm.Engine(bm.layers(network, request, cut=cut)) as engine, torch.no_grad():
        (result,) = engine.map([request], progress=False)
        expected = network(**{name: value[None] for name, value in request.items()})
    assert set(result) == {"last_hidden_state", "pooler_output", "types"}
    for name, value in result.items():
        torch.testing.assert_close(value, expected[name][0], atol=1e-5, rtol=1e-5)


class Pair(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(3, 3), kind

    def forward(self, x: Tensor) -> Any:
        return self.kind([self.linear(x), x * 2])


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_network_kept_whole_returns_what_it_returns_also_when_loaded(kind, tmp_path):
    network, row = Pair(kind), torch.randn(3)
    model = bm.layers(network, torch.zeros(3), cut="whole")
    bm.save(model, tmp_path / "saved")
    for served in (model, bm.load(tmp_path / "saved")):
        with bm.Engine(served) as engine, torch.no_grad():
            (result,) = engine.map([row], progress=False)
        assert type(result) is kind
        torch.testing.assert_close(result[0], network(row)[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(result[1], row * 2)
        torch.testing.assert_close(served.batched([row])[0][1], row * 2)


def test_a_whole_network_that_returns_more_than_tensors_says_so():
    with pytest.raises(ModelError, match=r"Pair: returns a tuple of more than tensors; wrap it in a module"):
        bm.layers(Pair(lambda parts: (parts, parts)), torch.zeros(3), cut="whole")
    with pytest.raises(ModelError, match=r"Pair: does not take the example request: it raised RuntimeError"):
        bm.layers(Pair(tuple), torch.zeros(4), cut="whole")


def test_an_encoder_that_cannot_be_traced_without_an_example_says_to_give_one():
    class Looking(Encoder):
        def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
            return super().forward(input_ids) if len(list(input_ids.shape)) == 2 else None

    with pytest.raises(ModelError, match=r"give an example request, bm\.layers\(module, example_request\)"):
        bm.layers(Looking())


@pytest.mark.slow
def test_encoders_of_hugging_face_are_cut_kept_whole_and_called():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=20
    )
    network, words = transformers.BertModel(config).eval(), torch.arange(5)
    with torch.no_grad():
        expected = network(words[None])
    for model in (bm.layers(network, words), bm.layers(network, words, cut="whole"), Called(network)):
        with bm.Engine(model) as engine:
            (result,) = engine.map([words], progress=False)
        found = result["last_hidden_state"] if isinstance(result, dict) else result[0]
        torch.testing.assert_close(found, expected["last_hidden_state"][0], atol=1e-4, rtol=1e-4)


class Called(bm.Model):
    def __init__(self, network: nn.Module) -> None:
        self.encoder = bm.Cell(network)

    def unfold(self, words: Any) -> Any:
        return self.encoder(words)


def test_an_encoder_with_further_keywords_is_a_cell():
    network, words = Encoder(), torch.arange(5)
    with bm.Engine(Called(network)) as engine, torch.no_grad():
        hidden, pooled = engine.map([words], progress=False)[0]
        expected = network(words[None])
    torch.testing.assert_close(hidden, expected["last_hidden_state"][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pooled, expected["pooler_output"][0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bm.layers(nn.LSTM), r"got the class LSTM; make one: LSTM\(\.\.\.\)"),
        (lambda: bm.layers("model.onnx"), r"takes a torch\.nn\.Module, got str\. Write bm\.layers\(bm\.onnx\("),
        (lambda: bm.layers("model.pt"), r"bm\.layers takes a torch\.nn\.Module, got str; read the file"),
        (lambda: bm.Cell(nn.Linear), r"got the class Linear"),
        (lambda: bm.Engine(nn.Linear(3, 4)), r"got Linear; a network without control flow.*bm\.layers.*bm\.recurrent"),
        (lambda: bm.Engine(nn.LSTM), r"got the class LSTM; a network without control flow.*bm\.recurrent"),
    ],
)
def test_what_is_no_network_is_refused_with_the_line_to_write(make, message):
    with pytest.raises(ModelError, match=message):
        make()
