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
