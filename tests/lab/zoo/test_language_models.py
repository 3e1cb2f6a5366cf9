"""RWKV and Mamba: each policy gives what a request gives alone, and transformers' models give the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.errors import InvalidRequestError, ModelError, OptionError
from batchmaker.lab import zoo
from batchmaker.lab.zoo.mamba import MambaModel
from batchmaker.lab.zoo.parts import seeded
from batchmaker.lab.zoo.reference import interpreted
from batchmaker.lab.zoo.rwkv import RwkvModel
from covering import covering
from insides import network_of

WORDS = 40
TINY: dict[str, dict[str, Any]] = {
    "rwkv": {"hidden": 16, "layers": 3, "inner": 24, "rescale_every": 2},
    "mamba": {"hidden": 12, "layers": 2, "state": 5},
}


def make(name: str, **options: Any) -> Any:
    model = zoo.make(name, **{"vocabulary_size": WORDS, "max_batch": 8, "eos": 2, **TINY[name], **options})
    liven(network_of(model))
    return model


def liven(network: nn.Module) -> None:
    """Give the weights such values that what is written depends on all that was read."""
    with seeded(1), torch.no_grad():
        for weight in network.parameters():
            weight += 0.3 * torch.randn_like(weight, dtype=torch.float32).to(weight.dtype)


@st.composite
def requests(draw: Any) -> Any:
    prompt = draw(st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=12))
    if draw(st.booleans()):
        return prompt
    request = {"prompt": prompt, "max_tokens": draw(st.integers(1, 12))}
    if draw(st.booleans()):
        request |= {"temperature": draw(st.sampled_from([0.0, 0.5, 1.0])), "seed": draw(st.integers(-9, 9))}
        request |= draw(st.sampled_from([{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.9}]))
    return request if draw(st.booleans()) else {**request, "ignore_eos": True}


@pytest.fixture(scope="module")
def engines():
    """Engines by network and policy, started at first use and kept."""
    made: dict[tuple[str, str], tuple[Any, bm.Engine]] = {}

    def get(name: str, policy: str = "cellular") -> tuple[Any, bm.Engine]:
        if (name, policy) not in made:
            model = make(name)
            made[name, policy] = model, bm.Engine(model, policy, threads=1).start()
        return made[name, policy]

    yield get
    for _, engine in made.values():
        engine.stop()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "policy"), covering(TINY, ["cellular", "auto", "padded", "serial"]))
def test_each_policy_gives_what_a_request_gives_alone(engines, name, policy):
    model, engine = engines(name, policy)

    @settings(max_examples=5, derandomize=True)  # other words would be as likely where two scores are nearly equal
    @given(st.lists(requests(), min_size=1, max_size=12))
    def check(asked):
        for result, request in zip(engine.map(asked, progress=False), asked, strict=True):
            assert result.tolist() == model.alone(request).tolist()

    check()


@pytest.mark.parametrize("name", TINY)
def test_the_cell_graph_means_what_the_network_does(name):
    model = make(name)
    for request in (*model.examples, [5], {"prompt": [3, 4], "max_tokens": 6, "temperature": 1, "seed": 4}):
        assert interpreted(model, request).tolist() == model.alone(request).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_tokens_stream_end_at_the_end_token_and_depend_on_the_prompt(engines, name):
    model, engine = engines(name)
    prompts = [np.random.default_rng(n).integers(0, WORDS, 1 + n % 9) for n in range(40)]
    asked = [{"prompt": prompt, "max_tokens": 30} for prompt in prompts]
    texts = [list(answer) for answer in [engine.submit(request, stream=True) for request in asked]]
    assert texts == [model.alone(request).tolist() for request in asked]
    assert len({tuple(text) for text in texts}) > 10
    ended = [text for text in texts if len(text) < 30]
    assert ended
    assert all(text.index(2) == len(text) - 1 for text in ended)
    endless = engine.map([{**request, "ignore_eos": True} for request in asked], progress=False)
    assert [len(text) for text in endless] == [30] * 40
    assert [text[: len(start)].tolist() for text, start in zip(endless, texts, strict=True)] == texts


@pytest.mark.parametrize("name", TINY)
def test_a_seed_gives_the_same_tokens_whoever_shares_the_batch(engines, name):
    _, engine = engines(name)
    drawn = [
        {"prompt": [3, 4, 5], "max_tokens": 9, "temperature": 1.0, "seed": seed, "ignore_eos": True}
        for seed in (7, 8, 9)
    ]
    others = [{"prompt": [seed % WORDS], "temperature": 1.5, "seed": seed} for seed in range(30)]
    alone = [engine.submit(request).result().tolist() for request in drawn]
    together = engine.map([*others, *drawn, [1, 2]], progress=False)[30:33]
    assert [text.tolist() for text in together] == alone
    assert len({tuple(text) for text in alone}) == 3
    greedy = engine.submit({**drawn[0], "temperature": 0}).result().tolist()
    assert engine.submit({**drawn[0], "top_k": 1}).result().tolist() == greedy


@pytest.mark.parametrize("policy", ["cellular", "padded"])
def test_a_bad_request_fails_alone_and_says_why(engines, policy):
    model, engine = engines("rwkv", policy)
    bad = {
        "the prompt is empty": [],
        "outside the vocabulary": [WORDS],
        "max_tokens must be a whole number of at least 1": {"prompt": [1], "max_tokens": 0},
        "temperature must be a number of at least 0": {"prompt": [1], "temperature": -1},
        "top_p must be a number of at least 0 and at most 1": {"prompt": [1], "top_p": 1.5},
        "top_k must be a whole number of at least -1": {"prompt": [1], "top_k": 1.5},
        "seed must be a whole number": {"prompt": [1], "seed": "a"},
        r"got the keys \['heat', 'prompt'\]": {"prompt": [1], "heat": 1},
        "a dict with 'prompt'": {"max_tokens": 3},
    }
    answers = [(said, engine.submit(request), engine.submit([1, 2])) for said, request in bad.items()]
    for said, failed, answered in answers:
        with pytest.raises(InvalidRequestError, match=said):
            failed.result()
        assert answered.result().tolist() == model.alone([1, 2]).tolist()


one_layer_or_all = pytest.mark.parametrize(
    ("name", "options"),
    [("mamba", {"layers": 1}), *[pytest.param(name, {}, id=name, marks=pytest.mark.slow) for name in TINY]],
)


@one_layer_or_all
def test_a_saved_network_answers_as_before(name, options, tmp_path):
    model = make(name, **options)
    bm.save(model, tmp_path / "saved")
    request = {"prompt": [3, 4, 5], "max_tokens": 8, "temperature": 1.0, "seed": 3}
    with bm.Engine(bm.load(tmp_path / "saved"), threads=1) as engine:
        texts = engine.map([request, [3, 4, 5]], progress=False)
    assert [text.tolist() for text in texts] == [model.alone(request).tolist(), model.alone([3, 4, 5]).tolist()]


@pytest.mark.slow
@one_layer_or_all
def test_bfloat16_keeps_its_sums_in_float32(name, options):
    model = make(name, dtype="bfloat16", eos=None, **options)
    with bm.Engine(model, threads=1) as engine:
        text = engine.submit({"prompt": [3, 4, 5], "max_tokens": 7}).result()
    assert len(text) == 7
    assert {weight.dtype for weight in network_of(model).parameters()} == {torch.bfloat16}
    assert {part.dtype for part in network_of(model).parts} == {"bfloat16", "float32"}


PUBLISHED = {"rwkv": 169_342_464, "mamba": 129_135_360}


@pytest.mark.parametrize("name", PUBLISHED)
def test_full_size_has_the_published_number_of_weights(name):
    with torch.device("meta"):
        model: Any = zoo.make(name)
    network = network_of(model)
    counted = sum(weight.numel() for weight in network.parameters())
    counted -= network.embeddings.weight.numel() if name == "mamba" else 0  # published with one table for both ends
    assert counted == PUBLISHED[name]


def test_impossible_options_are_refused():
    for options, said in (({"layers": 0}, "at least 1"), ({"eos": WORDS}, "eos must be"), ({"dtype": "int8"}, "dtype")):
        with pytest.raises(OptionError, match=said):
            make("rwkv", **options)
    for kind in (RwkvModel, MambaModel):
        with pytest.raises(ModelError, match="expected a model of transformers"):
            kind.of(nn.Linear(2, 2))


# --- transformers ----------------------------------------------------------------------------------------------------


def of_transformers(name: str, layers: int = 3) -> Any:
    """A small model of transformers with random weights."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": layers, "eos_token_id": 2}
    if name == "rwkv":
        config = transformers.RwkvConfig(**sizes, rescale_every=2, attention_hidden_size=16, intermediate_size=24)
        model = transformers.RwkvForCausalLM(config).eval()
    else:
        config = transformers.MambaConfig(**sizes, state_size=5, use_bias=True)
        model = transformers.MambaForCausalLM(config).eval()
    liven(model)
    return model


OURS: dict[str, Any] = {"rwkv": RwkvModel, "mamba": MambaModel}


PROMPTS = torch.from_numpy(np.random.default_rng(0).integers(3, WORDS, (6, 9)))


def theirs_and_ours(name: str, has_run: bool) -> tuple[Any, Any]:
    """A model of transformers, and the same as one of ours. RWKV divides its weights when it first runs."""
    theirs = of_transformers(name)
    if has_run:
        with torch.no_grad():
            theirs(PROMPTS[:1])
    return theirs, OURS[name].of(theirs, max_batch=8)


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("name", OURS)
def test_a_model_of_transformers_gives_the_same_scores(name, has_run):
    theirs, model = theirs_and_ours(name, has_run)
    with torch.no_grad():
        expected, network = theirs(PROMPTS).logits, network_of(model)
        state = network.start(6)
        for step in range(9):
            x, state = network.through(PROMPTS[:, step], state)
            torch.testing.assert_close(network.head(x), expected[:, step], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "has_run"), covering(OURS, [False, True]))
def test_a_model_of_transformers_gives_the_same_words(name, has_run):
    theirs, model = theirs_and_ours(name, has_run)
    with bm.Engine(model, threads=1) as engine:
        texts = engine.map([{"prompt": prompt, "max_tokens": 12} for prompt in PROMPTS.numpy()], progress=False)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert text.tolist() == greedy(theirs, prompt, 12)


@pytest.mark.parametrize("name", OURS)
def test_a_folder_of_transformers_is_loaded_by_its_model_type(name, tmp_path):
    theirs = of_transformers(name)
    theirs.save_pretrained(tmp_path)
    model = bm.load(tmp_path)
    assert type(model) is OURS[name]
    expected = network_of(OURS[name].of(theirs)).state_dict()
    for weight, own in network_of(model).state_dict().items():
        torch.testing.assert_close(own, expected[weight], atol=0, rtol=0)
    assert model.eos == 2


def test_weights_of_another_network_are_refused():
    config, weights = of_transformers("rwkv").config.to_dict(), of_transformers("mamba").state_dict()
    with pytest.raises(ModelError, match=r"lack rwkv.blocks.0.attention.key.weight"):
        RwkvModel.of_weights(config, weights)
    with pytest.raises(ModelError, match="only silu is known"):
        MambaModel.of_weights({"hidden_act": "relu"}, weights)
    weights.popitem()
    weights.pop("backbone.layers.1.mixer.D")
    with pytest.raises(ModelError, match=r"blocks.1.D"):
        MambaModel.of_weights({}, weights)


@torch.no_grad()
def greedy(model: Any, prompt: Tensor, most: int) -> list[int]:
    """What a model of transformers writes, reading all of the text for each token."""
    text = prompt[None]
    while text.shape[1] < len(prompt) + most and int(text[0, -1]) != 2:
        text = torch.cat([text, model(text).logits[:, -1:].argmax(-1)], 1)
    return text[0, len(prompt) :].tolist()


class TheirMamba(nn.Module):
    """One step of transformers' MambaForCausalLM as it is: (token, its cache's tensors) -> (next token, the same)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, token: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        layers = range(self.model.config.num_hidden_layers)
        for layer in layers:
            window, h = state[2 * layer : 2 * layer + 2]
            cache.update_conv_state(window.clone(), layer, conv_kernel_size=self.model.config.conv_kernel)
            cache.update_recurrent_state(h.clone(), layer)
        scores = self.model(token[:, None], cache=cache, use_cache=True).logits[:, -1]
        after = [
            part
            for layer in layers
            for part in (cache.get_conv_state(layer, state_idx=0), cache.get_recurrent_state(layer, state_idx=0))
        ]
        return scores.argmax(-1), *after


class Writer(bm.Model):
    """Goes on with a prompt by a step of transformers."""

    def __init__(self, model: Any) -> None:
        self.step = bm.Cell(TheirMamba(model), max_batch=8, host_outputs=(0,))
        inner, config = model.config.intermediate_size, model.config
        self.state = (torch.zeros(inner, config.conv_kernel), torch.zeros(inner, config.state_size))
        self.state *= config.num_hidden_layers

    def unfold(self, prompt: Any) -> Any:
        state = self.step.run(prompt[:-1], self.state)[1:]
        return self.step.loop((prompt[-1], *state), until=2, max_steps=12)[0].steps


@pytest.mark.slow
def test_a_step_of_transformers_mamba_is_a_cell_as_it_is():
    theirs = of_transformers("mamba", layers=2)
    with bm.Engine(Writer(theirs), threads=1) as engine:
        texts = engine.map(list(PROMPTS.numpy()), progress=False)
    assert [text.tolist() for text in texts] == [greedy(theirs, prompt, 12) for prompt in PROMPTS]


class Bytes:
    encode = staticmethod(lambda text: list(text.encode()))
    decode = staticmethod(lambda tokens: bytes(tokens).decode(errors="replace"))


def test_a_model_with_a_tokenizer_answers_completions():
    model = make("rwkv", vocabulary_size=256)
    assert model.serving_completions() is None
    model.tokenizer = Bytes()
    answered = model.serving_completions()
    assert (answered.encode("ab"), answered.decode([97]), answered.end) == ([97, 98], "a", 2)


@pytest.mark.slow
def test_a_tokenizer_is_not_saved(tmp_path):
    model = make("rwkv", vocabulary_size=256)
    model.tokenizer = Bytes()
    bm.save(model, tmp_path / "saved")
    assert bm.load(tmp_path / "saved").serving_completions() is None


@pytest.mark.parametrize("name", TINY)
def test_whole_sequences_give_what_the_steps_give(name):
    network = network_of(make(name))
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, WORDS, (4, 9)))
    _, begun = network.through(tokens[:, :2], network.start(4))  # shorter than the window of a convolution
    whole, end = network.through(tokens[:, 2:], begun)
    state = network.start(4)
    for step in range(9):
        x, state = network.through(tokens[:, step], state)
        if step >= 2:
            torch.testing.assert_close(whole[:, step - 2], x, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(end, state, atol=1e-5, rtol=1e-5)
