"""The networks of LazyBatching's evaluation, tiny, in the engine: each gives what plain PyTorch gives alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import batchmaker as bm
from batchmaker.errors import InvalidRequestError, OptionError
from batchmaker.lab import zoo
from batchmaker.lab.zoo.parts import seeded
from batchmaker.lab.zoo.reference import PlainTypes, interpreted, reference
from covering import covering
from insides import network_of

WORDS = 40
TINY: dict[str, dict[str, Any]] = {
    "resnet50": {"width": 4, "blocks": (2, 1), "image": 32, "classes": 10},
    "vgg16": {"width": 4, "dense": 16, "image": 32, "classes": 10},
    "mobilenet": {"multiplier": 0.125, "image": 32, "classes": 10},
    "bert": {"vocabulary_size": WORDS, "hidden": 16, "heads": 2, "inner": 32, "layers": 2, "length": 12},
    "deepspeech2": {"pitches": 9, "channels": 3, "convolutions": 3, "hidden": 8, "layers": 2, "output": "scores"},
    "las": {"pitches": 5, "vocabulary_size": WORDS, "listener": 6, "hidden": 10, "pyramid": 2, "positions": 20},
    "gnmt": {"vocabulary_size": WORDS, "hidden": 12, "layers": 4, "positions": 20},
    "transformer": {
        "vocabulary_size": WORDS, "hidden": 16, "heads": 2, "inner": 32, "layers": 2, "positions": 20,
    },
}  # fmt: skip
WRITERS = ("las", "gnmt", "transformer")
POLICIES = ("cellular", "padded", "serial")


def enliven(module: nn.Module, gain: float = 2.5) -> None:
    """Give weights and statistics such values that what comes out depends on all that is read."""
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm)
    with seeded(1):
        for part in module.modules():
            for name, weight in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
                if isinstance(part, norms) and weight.is_floating_point():
                    if name in ("weight", "running_var"):
                        weight.data.uniform_(0.8, 1.2)
                    else:
                        weight.data.normal_(0, 0.1)
                elif isinstance(part, nn.Embedding):
                    weight.data.normal_()
                elif isinstance(weight, nn.Parameter):
                    weight.data.normal_(0, gain / weight[0].numel() ** 0.5 if weight.dim() > 1 else 0.1)


def make(name: str, **options: Any) -> Any:
    model: Any = zoo.make(name, max_batch=8, **{**TINY[name], **options})
    if name == "transformer":  # with weights of its own, so that a word does not ask for itself
        project = network_of(model).project
        project.weight = nn.Parameter(project.weight.clone(), requires_grad=False)
    enliven(network_of(model), 1.0 if name == "transformer" else 2.5)
    return model


def draw_request(name: str, draw: Any) -> Any:
    seed = draw(st.integers(0, 999))
    rng = np.random.default_rng(seed)
    if name in ("resnet50", "vgg16", "mobilenet"):
        return rng.normal(size=(3, 32, 32))
    if name == "bert":
        return rng.integers(0, WORDS, draw(st.integers(1, 12)))
    if name == "deepspeech2":
        return rng.normal(size=(draw(st.integers(1, 40)), 9))
    source = rng.integers(0, WORDS, draw(st.integers(1, 20)))
    if name == "las":
        source = rng.normal(size=(draw(st.integers(4, 83)), 5))
    return {"source": source, "words": draw(st.integers(1, 15))} if draw(st.booleans()) else source


@pytest.fixture(scope="module")
def engines():
    """Engines by network and policy, started at first use and kept."""
    made: dict[tuple[str, str], bm.Engine] = {}
    networks: dict[str, Any] = {}

    def get(name: str, policy: str) -> tuple[Any, bm.Engine]:
        if name not in networks:
            networks[name] = make(name)
        if (name, policy) not in made:
            made[name, policy] = bm.Engine(networks[name], policy, threads=1).start()
        return networks[name], made[name, policy]

    yield get
    for engine in made.values():
        engine.stop()


def check_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-5 of the largest value; words are the same."""
    assert result.dtype == expected.dtype
    scale = float(expected.abs().max()) if expected.is_floating_point() else 0.0
    torch.testing.assert_close(result, expected, atol=1e-5 * scale, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "policy"), covering(TINY, POLICIES))
def test_each_policy_gives_what_the_network_gives_alone(engines, name, policy):
    model, engine = engines(name, policy)

    @settings(max_examples=4, derandomize=True)  # other words would be as likely where two scores are nearly equal
    @given(st.data())
    def check(data):
        requests = [draw_request(name, data.draw) for _ in range(data.draw(st.integers(1, 12)))]
        for result, request in zip(engine.map(requests, progress=False), requests, strict=True):
            check_close(result, reference(model, request))

    check()


@pytest.mark.parametrize("name", TINY)
def test_the_cell_graph_means_what_the_network_does(engines, name):
    model, _ = engines(name, "cellular")
    request = model.example_request
    check_close(interpreted(model, request), reference(model, request))


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_depends_on_the_source_and_streams(engines, name):
    _, engine = engines(name, "cellular")
    rng = np.random.default_rng(0)
    shapes = [(n, 5) if name == "las" else n for n in (19, 8, 9, 17, 12, 5)]
    sources = [rng.normal(size=n) if name == "las" else rng.integers(0, WORDS, n) for n in shapes]
    texts = engine.map([{"source": source, "words": 12} for source in sources], progress=False)
    assert len({tuple(text.tolist()) for text in texts}) > 3
    assert len(set(torch.cat(texts).tolist())) > 5
    streamed = list(engine.submit({"source": sources[0], "words": 12}, stream=True))
    assert streamed == texts[0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_a_text_ends_with_the_end_word(name):
    model = make(name, max_words=12)
    (project,) = [part for part in network_of(model).modules() if getattr(part, "out_features", 0) == WORDS]
    rng = np.random.default_rng(0)
    sources = [rng.normal(size=(n, 5)) if name == "las" else rng.integers(0, WORDS, n) for n in range(4, 20)]
    endless = torch.stack([model.alone({"source": source, "words": 12}) for source in sources])
    begins = [{(row == word).tolist().index(True) for row in endless if word in row} for word in range(WORDS)]
    ending = max(range(WORDS), key=lambda word: len(begins[word]))  # written at different places
    order = torch.arange(WORDS)
    order[[ending, 2]] = order[[2, ending]]
    for weight in project.parameters():
        weight.copy_(weight[order].clone())
    with bm.Engine(model, threads=1) as engine:
        texts = engine.map(sources, progress=False)
    for text, source in zip(texts, sources, strict=True):
        assert text.tolist() == model.alone(source).tolist()
        assert text.tolist().index(2) == len(text) - 1 if 2 in text else len(text) == 12
    assert len({len(text) for text in texts}) > 1


BAD: dict[str, list[Any]] = {
    "resnet50": [np.zeros((3, 32, 31)), np.full((3, 32, 32), 2**24 + 1), "image", {"image": np.zeros((3, 32, 32))}],
    "bert": [[], [WORDS], [1] * 13, [[1, 2], [3, 4]], [0.5]],
    "deepspeech2": [np.zeros((0, 9)), np.zeros((4, 8)), np.zeros((4, 9), np.int64), [[1.0], [1.0, 2.0]]],
    "las": [np.zeros((3, 5)), np.zeros((84, 5)), np.zeros(5), {"source": np.zeros((8, 5)), "words": 0}],
    "gnmt": [[], [1] * 21, [WORDS], {"source": [1], "words": 0}, {"source": [1]}],
    "transformer": [[], [1] * 21, {"source": [1], "words": 21}, [-1], {"words": 1}],
}


@pytest.mark.parametrize("policy", ["cellular", "serial"])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_fails_alone(engines, name, policy):
    model, engine = engines(name, policy)
    futures = [(engine.submit(bad), engine.submit(model.example_request)) for bad in BAD[name]]
    expected = reference(model, model.example_request)
    for failed, answered in futures:
        with pytest.raises(InvalidRequestError):
            failed.result()
        check_close(answered.result(), expected)


def test_a_source_that_is_too_long_is_told_the_limit(engines):
    _, engine = engines("gnmt", "cellular")
    with pytest.raises(InvalidRequestError, match=r"got 21, the network takes at most 20 \(option positions\)"):
        engine.submit([1] * 21).result()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "transformer"])
def test_a_saved_network_answers_as_before(name, tmp_path):
    model = make(name)
    bm.save(model, tmp_path / "saved")
    loaded = bm.load(tmp_path / "saved")
    loaded.example_request = None  # nothing is materialised for one request
    with bm.Engine(loaded, threads=1) as engine:
        check_close(engine.submit(model.example_request).result(), reference(model, model.example_request))


PUBLISHED = {
    "resnet50": (25_557_032, 54),
    "vgg16": (138_357_544, 16),
    "mobilenet": (4_231_976, 28),
    "bert": (109_482_240, 14),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_full_size_has_the_published_number_of_weights_and_layers(name):
    with torch.device("meta"):
        model: Any = zoo.make(name)
    assert all(weight.is_meta for weight in network_of(model).parameters())
    counted = sum(weight.numel() for weight in network_of(model).parameters())
    assert (counted, len(model.cells)) == PUBLISHED[name]


CELLS = {
    "deepspeech2": 2 + 2 * 5 + 1,
    "las": 2 * 4 + 2 + 1,
    "gnmt": 9 + 2 + 1,
    "transformer": 1 + 6 + 1 + 1,
    **{name: cells for name, (_, cells) in PUBLISHED.items()},
}


@pytest.mark.parametrize("name", CELLS)
def test_full_size_unfolds_without_any_memory_for_it(name):
    from batchmaker.model.unfolding import Unfolding

    with torch.device("meta"), torch.no_grad():
        model = zoo.make(name)
        types = PlainTypes()
        unfolding = Unfolding(model, types, model.example_request)
        unfolding.start()
    assert len(types.types) == len(model.cells) == CELLS[name]
    assert unfolding.graph.num_nodes >= CELLS[name]


def test_bert_can_be_cut_between_attention_and_feed_forward():
    with torch.device("meta"):
        assert len(zoo.make("bert", split=True).cells) == 26
    split = make("bert", split=True)
    with bm.Engine(split, threads=1) as engine:
        check_close(engine.submit([3, 1, 4]).result(), reference(make("bert"), [3, 1, 4]))


def test_impossible_sizes_are_refused():
    for name, options, said in (
        ("bert", {"hidden": 10, "heads": 3}, "multiple of heads"),
        ("bert", {"length": 600}, "at most positions"),
        ("transformer", {"hidden": 12, "heads": 4}, "multiple of twice the heads"),
        ("gnmt", {"layers": 1}, "at least 2"),
        ("deepspeech2", {"convolutions": 4}, "must be one of"),
        ("las", {"vocabulary_size": 2}, "above 2"),
        ("vgg16", {"image": 16}, "at least 1"),
    ):
        with pytest.raises(OptionError, match=said):
            zoo.make(name, **options)
