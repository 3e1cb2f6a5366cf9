"""A static network is cut into cells that give together what it gives whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import batchmaker as bm
from batchmaker.errors import InvalidRequestError, ModelError, OptionError
from insides import network_of


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = convolution(inputs, outputs, 2)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, 2)

    def forward(self, x):
        y = self.second(self.first(x))
        y += self.shortcut(x)
        return y.relu()


class Inception(nn.Module):
    """Branches put side by side, and sizes read off the values."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = convolution(3, 4)
        self.left = nn.Conv2d(4, 2, 1)
        self.right = nn.Sequential(convolution(4, 3), nn.Conv2d(3, 3, 1))
        self.out = nn.Linear(9 * 16, 5)
        self.scale = nn.Parameter(torch.ones(9, 1, 1) * 2)

    def forward(self, image):
        batch, _, height, width = image.shape
        x = self.stem(image)
        x = torch.cat([self.left(x), self.right(x), F.max_pool2d(x, 3, 1, 1)], 1) * self.scale
        return self.out(x.view(batch, 9 * height * width))


class TwoInputs(nn.Module):
    """Tokens and features in, a dict out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.mix = nn.Linear(7, 6)
        self.out = nn.Linear(6, 2)

    def forward(self, tokens, features, scale=None):
        x = torch.cat([self.embed(tokens).mean(1), features], 1)
        if scale is not None:
            x = x * scale
        hidden = self.mix(x).tanh()
        return {"scores": self.out(hidden), "hidden": hidden}


class Recurrent(nn.Module):
    """A layer that gives a tuple, of which one part is used."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True, bidirectional=True)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        states, _ = self.lstm(x)
        seen, _ = self.attend(states, states, states, need_weights=False)
        return self.out(states + seen)[:, -1]


class Branches(nn.Module):
    """Python decides on the number of dimensions, which only torch.export follows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x):
        for _ in range(x.shape[1] // 2):
            x = self.first(x).relu_()
        return self.second(x), x


class Decides(nn.Module):
    """Nothing can trace what depends on the values."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        return self.out(x) if bool((x.sum() > 0).item()) else self.out(-x)


def image(rng: np.random.Generator) -> Any:
    return rng.normal(size=(3, 4, 4)).astype(np.float32)


def row(size: int) -> Any:
    return lambda rng: rng.normal(size=size).astype(np.float32)


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3), nn.Softmax(-1))


def residual() -> nn.Module:
    return nn.Sequential(convolution(3, 4), Residual(4, 6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2))


def two_inputs(rng: np.random.Generator) -> Any:
    return {"tokens": rng.integers(0, 10, 5), "features": rng.normal(size=3)}


CASES: dict[str, tuple[Any, Any, list[str]]] = {
    "dense": (dense, row(4), ["0", "3"]),
    "residual": (residual, image, ["0.0", "1.first.0", "1.second", "1.shortcut", "4"]),
    "inception": (Inception, image, ["stem.0", "left", "right.0.0", "right.1", "out"]),
    "two inputs": (TwoInputs, two_inputs, ["embed", "mix", "out"]),
    "recurrent": (Recurrent, row((5, 3)), ["lstm", "attend", "out"]),
    "exported": (Branches, row(4), ["linear", "linear_1", "linear_2"]),
}


def plain(module: nn.Module, request: Any) -> Any:
    """What the module gives for one request."""
    values = request if isinstance(request, dict) else {"x": request}
    rows = [torch.as_tensor(value)[None] for value in values.values()]
    rows = [value.float() if value.is_floating_point() else value for value in rows]
    with torch.no_grad():
        return torch.utils._pytree.tree_map(lambda value: value[0], module.eval()(*rows))


def assert_close(result: Any, expected: Any) -> None:
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_layers_give_what_the_module_gives(case):
    make, draw, names = CASES[case]
    module = make()
    model = bm.layers(module, draw(np.random.default_rng(0)), max_batch=4)
    assert [cell.name for cell in model.cells.values()] == names
    assert [cell.max_batch for cell in model.cells.values()] == [4] * len(names)
    with bm.Engine(model, threads=1) as engine:

        @settings(max_examples=5)
        @given(st.lists(st.integers(0, 999), min_size=1, max_size=11))
        def check(seeds):
            requests = [draw(np.random.default_rng(seed)) for seed in seeds]
            for result, request in zip(engine.map(requests, progress=False), requests, strict=True):
                assert_close(result, plain(module, request))

        check()
        assert engine.stats.steps < engine.stats.cells


@pytest.mark.parametrize("policy", ["padded", "serial"])
@pytest.mark.parametrize("case", ["residual", "two inputs", "exported"])
def test_graph_batching_runs_the_module_itself(case, policy):
    make, draw, _ = CASES[case]
    module = make()
    requests = [draw(np.random.default_rng(seed)) for seed in range(5)]
    with bm.Engine(bm.layers(module, requests[0]), policy, threads=1) as engine:
        for result, request in zip(engine.map(requests, progress=False), requests, strict=True):
            assert_close(result, plain(module, request))


CUTS: list[tuple[Any, list[str]]] = [
    ("blocks", ["0.0", "1", "4"]),
    ("whole", ["whole"]),
    (["1", nn.Linear], ["1", "4"]),
    ([Residual], ["1"]),
]


@pytest.mark.parametrize(("cut", "names"), CUTS, ids=str)
def test_the_user_says_how_fine(cut, names):
    module, request = residual(), image(np.random.default_rng(0))
    model = bm.layers(module, request, cut=cut, max_batch=2)
    assert [cell.name for cell in model.cells.values()] == names
    with bm.Engine(model, threads=1) as engine:
        assert_close(engine.submit(request).result(), plain(module, request))


def test_a_part_that_cannot_be_traced_stays_whole():
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Decides()), nn.Linear(2, 2))
    model = bm.layers(module, torch.zeros(4))
    assert [cell.name for cell in model.cells.values()] == ["0", "1.1", "2"]


def test_what_nothing_can_trace_is_refused_with_advice():
    with pytest.raises(ModelError, match=r"Decides: torch.fx cannot trace it .* give an example request.*torch.export"):
        bm.layers(Decides())
    with pytest.raises(ModelError, match=r"nor can torch.export .*cut=\"whole\""):
        bm.layers(Decides(), torch.zeros(4))
    with pytest.raises(ModelError, match=r"cut=\"whole\""):
        bm.layers(Decides(), cut=[nn.Linear])
    model = bm.layers(Decides(), torch.zeros(4), cut="whole", max_batch=1)
    with bm.Engine(model, threads=1) as engine:
        assert_close(engine.submit(torch.ones(4)).result(), plain(network_of(model), torch.ones(4)))


class Overwrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.first(x)
        return y.add_(self.second(y))


class GivesNoTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.again = nn.LSTMCell(3, 4), nn.LSTMCell(3, 4)

    def forward(self, x):
        return self.again(x, self.lstm(x))[0]


class Nested(nn.Module):
    def forward(self, x):
        return x, (x + 1, x + 2)


class AnyNumber(nn.Module):
    def forward(self, *values):
        return sum(values)


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ModelError, match="writes into the value of an earlier layer"):
        bm.layers(Overwrites())
    with pytest.raises(ModelError, match="nested"):
        bm.layers(Nested())
    with pytest.raises(ModelError, match="any number of inputs"):
        bm.layers(AnyNumber())
    with pytest.raises(ModelError, match=r"forward\(\) takes tokens, features, scale"):
        bm.layers(TwoInputs(), {"tokens": [1, 2], "feature": [0.0]})
    model = bm.layers(GivesNoTensor())
    with bm.Engine(model, threads=1) as engine, pytest.raises(ModelError, match="must be one tensor"):
        engine.submit(torch.zeros(3)).result()


def test_wrong_options_name_what_is_there():
    with pytest.raises(OptionError, match="Did you mean 'layers'"):
        bm.layers(dense(), cut="layer")
    with pytest.raises(OptionError, match=r"Did you mean '1\.first'"):
        bm.layers(residual(), cut=["1.frist"])
    with pytest.raises(OptionError, match="none of the submodules"):
        bm.layers(dense(), cut=[nn.Conv2d])
    with pytest.raises(OptionError, match="max_batch must be at least 1"):
        bm.layers(dense(), max_batch=0)


def test_a_wrong_request_fails_alone():
    model = bm.layers(TwoInputs(), two_inputs(np.random.default_rng(0)))
    good = two_inputs(np.random.default_rng(1))
    bad: list[Any] = [
        {**good, "features": np.zeros(4)},
        {**good, "tokens": np.zeros(5)},
        {**good, "tokens": [10] * 5},
        {"tokens": good["tokens"]},
        (good["tokens"],),
        3,
    ]
    with bm.Engine(model, threads=1) as engine:
        futures = [(engine.submit(request), engine.submit(good)) for request in bad]
        for failed, answered in futures:
            with pytest.raises(InvalidRequestError, match=r"features|tokens|embed"):
                failed.result()
            assert_close(answered.result()["scores"], plain(network_of(model), good)["scores"])
        in_order = engine.submit((good["tokens"], good["features"])).result()
        assert_close(in_order["hidden"], plain(network_of(model), good)["hidden"])


def test_an_optional_input_is_one_where_the_example_gives_it():
    module = TwoInputs()
    request = {**two_inputs(np.random.default_rng(0)), "scale": [2.0]}
    model = bm.layers(module, request)
    assert model.inputs == ("tokens", "features", "scale")
    with bm.Engine(model, threads=1) as engine:
        assert_close(engine.submit(request).result(), plain(module, request))


def test_the_first_request_tells_the_shapes_where_there_is_no_example():
    model = bm.layers(dense())
    with bm.Engine(model, threads=1) as engine:
        request = np.ones(4)
        assert_close(engine.submit(request).result(), plain(network_of(model), request))
        with pytest.raises(InvalidRequestError, match=r"rows of shape \(5,\), expected \(4,\)"):
            engine.submit(np.ones(5)).result()


def test_later_layers_go_first_and_names_clash_with_nothing():
    module = nn.Sequential()
    for name in ("length", "cells", "3rd_part"):
        module.add_module(name, nn.Linear(4, 4))
    model = bm.layers(module, torch.zeros(4))
    assert [cell.priority for cell in model.cells.values()] == [0, 1, 2]
    assert list(model.cells) == ["length_", "cells_", "layer_3rd_part"]
    assert model.length(torch.zeros(4)) == 1


def test_a_saved_model_answers_as_before_without_the_module(tmp_path):
    model = bm.layers(TwoInputs(), {"tokens": [1, 2, 3], "features": [0.5, 1.0, -1.0]})
    request = {"tokens": [4, 5, 6], "features": [1.5, 2.0, -3.0]}
    bm.save(model, tmp_path / "model")
    loaded = bm.load(tmp_path / "model")
    expected = model.alone(request)
    for policy in ("cellular", "padded"):
        with bm.Engine(loaded, policy, threads=1) as engine:
            assert_close(engine.submit(request).result(), expected)


def test_requests_are_rows_of_the_weights_dtype():
    model = bm.layers(dense().to(torch.bfloat16), torch.zeros(4, dtype=torch.bfloat16))
    with bm.Engine(model, threads=1) as engine:
        result = engine.submit(np.ones(4)).result()
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, model.alone(np.ones(4)), atol=0.02, rtol=0.02)
