"""nn.LSTM, nn.GRU and nn.RNN as they are: one line, and what torch gives."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

import batchmaker as bm
from batchmaker.errors import InvalidRequestError, ModelError, RequestShapeError
from batchmaker.model.registry import CellRegistry
from batchmaker.model.unfolding import Unfolding

WIDTH, HIDDEN = 5, 6
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@st.composite
def recurrent_modules(draw: st.DrawFn) -> nn.RNNBase:
    """A module of any kind with any options. Those on which the result must not depend are among them."""
    kind = draw(st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]))
    options: dict[str, Any] = {
        "num_layers": draw(st.integers(1, 3)),
        "bias": draw(st.booleans()),
        "batch_first": draw(st.booleans()),
        "bidirectional": draw(st.booleans()),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16])),
    }
    if options["num_layers"] > 1:
        options["dropout"] = draw(st.sampled_from([0.0, 0.5]))
    if kind is nn.RNN:
        options["nonlinearity"] = draw(st.sampled_from(["tanh", "relu"]))
    if kind is nn.LSTM and draw(st.booleans()):
        options["proj_size"] = draw(st.integers(1, HIDDEN - 1))
    return kind(WIDTH, HIDDEN, **options)


def by_torch(module: nn.RNNBase, *given: Any) -> Any:
    """What the module gives in float32, whatever its dtype: both sides round on the way."""
    with torch.no_grad():
        return copy.deepcopy(module).float().eval()(*pytree.tree_map(lambda x: x.float(), given))


def assert_same(found: Any, expected: Any) -> None:
    """Compare nested results, whose shapes are equal."""
    if isinstance(expected, tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
        return
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


def check(module: nn.RNNBase, lengths: list[int], part: int) -> None:
    """Whole requests, and the same in chunks where there is one direction."""
    dtype = module.weight_ih_l0.dtype
    sequences = [torch.randn(n, WIDTH).to(dtype) for n in lengths]
    with bm.Engine(bm.recurrent(module, max_batch=4)) as engine:
        results = engine.map(sequences, progress=False)
        if not module.bidirectional:
            whole = torch.cat(sequences)
            with engine.open_sequence() as stream:
                streamed = [stream.submit(chunk).result() for chunk in whole.split(part)]
            output, state = by_torch(module, whole)
            assert_same(torch.cat([part for part, _ in streamed]), output)
            assert_same(streamed[-1][1], state)
    for sequence, result in zip(sequences, results, strict=True):
        assert result[0].dtype is dtype
        assert_same(result, by_torch(module, sequence))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@settings(max_examples=10, deadline=None)
@given(module=recurrent_modules(), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), part=st.integers(1, 4))
def test_a_module_of_any_options_gives_what_torch_gives(module, lengths, part):
    check(module, lengths, part)


@pytest.mark.parametrize(
    "module",
    [nn.LSTM(WIDTH, HIDDEN, 2, bidirectional=True), nn.GRU(WIDTH, HIDDEN, bias=False), nn.RNN(WIDTH, HIDDEN, 2)],
    ids=["LSTM", "GRU", "RNN"],
)
def test_a_module_in_one_line_gives_what_torch_gives(module):
    check(module, [4, 1, 7], 3)


class Tagger(bm.Model):
    """Embedding, both directions of two layers, and a score for every word and for the sentence."""

    def __init__(self, *, join: bool = True) -> None:
        self.embedding, self.network = nn.Embedding(9, WIDTH), nn.LSTM(WIDTH, HIDDEN, 2, bidirectional=True)
        self.score = nn.Linear(2 * HIDDEN, 3)
        self.lstm = bm.recurrent(self.network, embedding=self.embedding, join=join, max_batch=4)
        self.scores = bm.Cell(self.score if join else Beside(self.score), max_batch=4)

    def unfold(self, words: Any) -> Any:
        output, (h_n, c_n) = self.lstm(words)
        scores = self.scores.map(output) if not isinstance(output, tuple) else self.scores.map(*output)
        return scores, h_n[-1], c_n

    def expected(self, words: Any) -> Any:
        with torch.no_grad():
            output, (h_n, c_n) = self.network(self.embedding(torch.as_tensor(words)))
            return self.score(output), h_n[-1], c_n


class Beside(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, forwards: torch.Tensor, backwards: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.cat((forwards, backwards), -1))


@pytest.mark.slow
@pytest.mark.parametrize("join", [True, False])
@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_a_model_takes_words_through_an_embedding_and_hands_the_outputs_on(kind, join):
    model = Tagger(join=join)
    requests = [kind(words) for words in ([3, 4, 5], [6], [7, 8, 1], [2, 2, 2], [0, 1, 2])]
    with bm.Engine(model) as engine:
        for request, result in zip(requests, engine.map(requests, progress=False), strict=True):
            assert_same(result, model.expected(request))
        for request in requests:  # by the template of their shape, from the third on
            assert_same(engine.map([request], progress=False)[0], model.expected(request))


class Chained(bm.Model):
    """Layers over the steps of another cell, from a state that another module ends with."""

    def __init__(self) -> None:
        self.convolution = nn.Linear(3, WIDTH)
        self.first, self.second = nn.GRU(WIDTH, HIDDEN, 2), nn.GRU(WIDTH, HIDDEN, 2)
        self.project = bm.Cell(self.convolution)
        self.encoder, self.decoder = bm.recurrent(self.first), bm.recurrent(self.second)

    def unfold(self, frames: Any, state: Any = None) -> Any:
        frames = self.project.map(frames)
        _, h_n = self.encoder(list(frames), state)
        top, _ = self.decoder(frames, [None, h_n[-1]])
        return top, h_n

    def expected(self, frames: torch.Tensor, state: Any = None) -> Any:
        with torch.no_grad():
            frames = self.convolution(frames)
            _, h_n = self.first(frames, state)
            return self.second(frames, torch.stack([torch.zeros(HIDDEN), h_n[-1]]))[0], h_n


def test_layers_run_over_the_steps_of_other_cells_from_a_state_that_is_given():
    model, frames, state = Chained(), torch.randn(4, 3), torch.randn(2, HIDDEN)
    with bm.Engine(model) as engine:
        assert_same(engine.map([frames], progress=False)[0], model.expected(frames))
        for given_state in (state, state.numpy(), state.tolist()):
            (result,) = engine.map([{"frames": frames, "state": given_state}], progress=False)
            assert_same(result, model.expected(frames, state))


@pytest.mark.parametrize("module", [nn.LSTM(WIDTH, HIDDEN, 2, bidirectional=True), nn.GRU(WIDTH, HIDDEN)])
def test_each_layer_and_direction_becomes_a_loop_with_its_input_projection_hoisted(module):
    registry, model = CellRegistry(), bm.recurrent(module)
    Unfolding(model, registry, torch.randn(3, WIDTH)).start()
    loops = {
        cell.name: registry.bound[cell.type_id].split(count).loop
        for cell in registry.types
        if (count := registry.num_step_inputs.get(cell.type_id)) is not None
    }
    layers = [f"l{layer}{way}" for layer in range(module.num_layers) for way in model.directions]
    assert sorted(loops) == sorted(layers)
    assert None not in loops.values()


def test_an_embedding_becomes_a_table_of_the_first_layer():
    registry = CellRegistry()
    model = bm.recurrent(nn.LSTM(WIDTH, HIDDEN), embedding=nn.Embedding(9, WIDTH))
    Unfolding(model, registry, [1, 2, 3]).start()
    assert any("folded into" in note for note in registry.notes["l0"])


def test_weights_that_are_computed_are_taken_as_they_are():
    module = nn.utils.parametrizations.weight_norm(nn.GRU(WIDTH, HIDDEN), "weight_hh_l0")
    frames = torch.randn(3, WIDTH)
    with bm.Engine(bm.recurrent(module)) as engine, torch.no_grad():
        assert_same(engine.map([frames], progress=False)[0], module(frames))


def test_a_module_that_makes_the_layers_input_may_be_any():
    before, module = nn.Sequential(nn.Linear(3, WIDTH), nn.ReLU()), nn.RNN(WIDTH, HIDDEN)
    frames = torch.randn(3, 3)
    with bm.Engine(bm.recurrent(module, embedding=before)) as engine, torch.no_grad():
        assert_same(engine.map([frames], progress=False)[0], module(before(frames)))


def test_chunks_of_a_bidirectional_module_are_refused():
    with (
        bm.Engine(bm.recurrent(nn.LSTM(WIDTH, HIDDEN, bidirectional=True))) as engine,
        pytest.raises(ModelError, match=r"backward direction begins at the end.*bidirectional=False"),
    ):
        engine.open_sequence()


class Streamed(bm.Model):
    def __init__(self) -> None:
        self.lstm = bm.recurrent(nn.GRU(WIDTH, HIDDEN, bidirectional=True))

    def unfold(self, frames: Any) -> Any:
        return self.lstm(frames)[0]

    def unfold_chunk(self, frames: Any, state: Any) -> Any:
        return self.lstm(frames, state)


def test_a_bidirectional_module_does_not_go_on_from_a_state_that_was_kept():
    with bm.Engine(Streamed()) as engine, engine.open_sequence() as stream:
        stream.submit(torch.randn(2, WIDTH)).result()
        with pytest.raises(ModelError, match="cannot go on from the state of an earlier chunk"):
            stream.submit(torch.randn(2, WIDTH)).result()


def test_layers_are_saved_and_loaded(tmp_path):
    module, frames = nn.LSTM(WIDTH, HIDDEN, 2, bidirectional=True), torch.randn(4, WIDTH)
    bm.save(bm.recurrent(module), tmp_path / "saved")
    with bm.Engine(bm.load(tmp_path / "saved")) as engine, torch.no_grad():
        assert_same(engine.map([frames], progress=False)[0], module(frames))


def refused(module: nn.RNNBase, *arguments: Any) -> Any:
    class Given(bm.Model):
        def __init__(self) -> None:
            self.layers = bm.recurrent(module)

        def unfold(self, request: Any) -> Any:
            return self.layers(*arguments)[0]

    Unfolding(Given(), CellRegistry(), None).start()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (torch.zeros(2, HIDDEN), r"an LSTM's state is a tuple \(h_0, c_0\), got Tensor of 2"),
        ((torch.zeros(1, HIDDEN), torch.zeros(2, HIDDEN)), r"h_0 has one row for each layer and direction, 2 here"),
        ((None, 3), r"c_0 has one row for each layer and direction, 2 here; got int.*\[h\], a list of one"),
        ((torch.zeros(2, 1, HIDDEN), None), r"got rows of shape \(1, 6\), expected \(6,\)"),
    ],
)
def test_a_state_of_another_form_is_refused(state, message):
    with pytest.raises(InvalidRequestError, match=message):
        refused(nn.LSTM(WIDTH, HIDDEN, 2), torch.zeros(3, WIDTH), state)


def test_a_sequence_of_another_width_is_refused_by_the_width_of_the_module():
    with pytest.raises(RequestShapeError, match=r"'layers\.l0', input 0: got rows of shape \(4,\), expected \(5,\)"):
        refused(nn.LSTM(WIDTH, HIDDEN), torch.zeros(3, 4))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.LSTM, "takes an nn.LSTM, nn.GRU or nn.RNN, got the class LSTM"),
        (nn.Linear(3, 4), "got Linear.*bm.Cell.*bm.layers"),
        (nn.LSTMCell(3, 4), r"got LSTMCell. One step is bm.Cell\(module\)"),
    ],
)
def test_any_other_module_is_refused_with_what_to_write(module, message):
    with pytest.raises(ModelError, match=message):
        bm.recurrent(module)


def test_an_embedding_that_does_not_fit_is_refused():
    with pytest.raises(ModelError, match="the embedding gives 4 values, the first layer takes 5"):
        bm.recurrent(nn.LSTM(WIDTH, HIDDEN), embedding=nn.Embedding(9, 4))
    with pytest.raises(ModelError, match=r"embedding must be a torch.nn.Module, got int"):
        bm.recurrent(nn.LSTM(WIDTH, HIDDEN), embedding=4)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_cell_of_whole_layers_is_refused_with_the_line_to_write(kind):
    name = kind.__name__
    with pytest.raises(ModelError, match=rf"one step.*nn\.{name} runs over a whole.*bm\.recurrent\(nn\.{name}\("):
        bm.Cell(kind(3, 4))
