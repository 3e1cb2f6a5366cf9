"""Every network under every policy gives what it gives alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmaker import Engine
from batchmaker.errors import InvalidRequestError, ModelError, OptionError
from batchmaker.lab import datasets, zoo
from batchmaker.lab.zoo import seq2seq
from batchmaker.lab.zoo.reference import reference
from covering import covering

VOCABULARY = 40
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "lstm": ("lstm", {"hidden": 16}),
    "lstm-2-layers-scores": ("lstm", {"hidden": 8, "embedding": 12, "layers": 2, "output": "scores"}),
    "gru": ("gru", {"hidden": 32, "embedding": 8}),
    "gru-2-layers": ("gru", {"hidden": 8, "layers": 2}),
    "seq2seq": ("seq2seq", {"hidden": 16, "max_words": 9}),
    "seq2seq-2-layers": ("seq2seq", {"hidden": 8, "embedding": 12, "layers": 2}),
    "treelstm": ("treelstm", {"hidden": 16, "embedding": 8}),
    "treelstm-label": ("treelstm", {"hidden": 8, "output": "label"}),
}
POLICIES = ("cellular", "padded", "serial")


def can_run(network: str, policy: str, *_: object) -> bool:
    """Whole trees are not padded."""
    return not (network.startswith("treelstm") and policy == "padded")


def make(network: str, **options: Any) -> Any:
    name, own = NETWORKS[network]
    return zoo.make(name, vocabulary_size=VOCABULARY, max_batch=8, **{**own, **options})


def draw_request(network: str, draw: Any) -> Any:
    words = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12)
    if network.startswith("treelstm"):
        sentence = draw(words)
        tree = datasets.random_binary_tree(len(sentence), draw(st.integers(0, 999)))
        return {"words": sentence, "children": tree.children}
    if network.startswith("seq2seq") and draw(st.booleans()):
        return {"source": draw(words), "words": draw(st.integers(1, 12))}
    return draw(words)


@pytest.fixture(scope="module")
def engines():
    """Engines by case, started at first use and kept."""
    made: dict[tuple[str, str, int], tuple[Any, Engine]] = {}

    def get(network: str, policy: str, workers: int) -> tuple[Any, Engine]:
        if (network, policy, workers) not in made:
            model = make(network)
            made[network, policy, workers] = (model, Engine(model, policy, workers=workers, threads=1).start())
        return made[network, policy, workers]

    yield get
    for _, engine in made.values():
        engine.stop()


@pytest.mark.parametrize(("network", "policy", "workers"), covering(NETWORKS, POLICIES, (1, 2), has=can_run))
def test_each_policy_gives_what_the_request_gives_alone(engines, network, policy, workers):
    model, engine = engines(network, policy, workers)

    @settings(max_examples=6)
    @given(st.data())
    def check(data):
        requests = [draw_request(network, data.draw) for _ in range(data.draw(st.integers(1, 20)))]
        for result, request in zip(engine.map(requests, progress=False), requests, strict=True):
            torch.testing.assert_close(result, reference(model, request), atol=1e-5, rtol=1e-5)

    check()


@pytest.mark.parametrize(("network", "policy"), covering(["lstm", "gru", "treelstm"], ["cellular", "padded"]))
def test_bfloat16_stays_within_its_precision(network, policy):
    model = make(network, dtype="bfloat16")
    policy = "serial" if network == "treelstm" and policy == "padded" else policy
    rng = np.random.default_rng(0)
    requests: list[Any] = [rng.integers(0, VOCABULARY, n) for n in rng.integers(1, 15, 30)]
    if network == "treelstm":
        trees = [datasets.random_binary_tree(len(words), 3).children for words in requests]
        requests = [{"words": words, "children": tree} for words, tree in zip(requests, trees, strict=True)]
    with Engine(model, policy, threads=1) as engine:
        for result, request in zip(engine.map(requests, progress=False), requests, strict=True):
            assert result.dtype == torch.bfloat16
            torch.testing.assert_close(result, reference(model, request), atol=0.03, rtol=0.03)


def test_words_stream_in_order_and_end_with_eos():
    model = make("seq2seq", max_words=30)
    project = model.decoder.module.project
    for weight in (*model.encoder.module.parameters(), *model.decoder.module.parameters()):
        weight *= 5  # so that translations differ
    requests = [np.random.default_rng(n).integers(0, VOCABULARY, 1 + n % 7) for n in range(60)]
    endless = [reference(model, {"source": request, "words": 30}).tolist() for request in requests]
    common = min(range(VOCABULARY), key=lambda word: abs(sum(word in words for words in endless) - 30))
    order = torch.arange(VOCABULARY)
    order[[common, datasets.EOS_ID]] = order[[datasets.EOS_ID, common]]
    for weight in (project.weight, project.bias):
        weight.copy_(weight[order].clone())  # the word that about half of them use now is EOS
    expected = [reference(model, request).tolist() for request in requests]
    with Engine(model, threads=1) as engine:
        streams = [engine.submit(request, stream=True) for request in requests]
        assert [list(map(int, stream)) for stream in streams] == expected
    assert [result.tolist() for result in model.batched(requests)] == expected
    ended = [words for words in expected if len(words) < 30]
    assert 0 < len(ended) < len(expected)
    assert len({tuple(words) for words in expected}) > 10
    for words in ended:
        assert words.index(datasets.EOS_ID) == len(words) - 1


def test_a_number_of_words_is_decoded_exactly_even_past_eos():
    model = make("seq2seq")
    model.decoder.module.project.bias[seq2seq.EOS] += 100
    with Engine(model, threads=1) as engine:
        assert engine.submit({"source": [5], "words": 7}).result().tolist() == [2] * 7
        assert engine.submit([5]).result().tolist() == [2]
    assert [len(words) for words in model.batched([{"source": [5], "words": 7}, [5], [6, 7]])] == [7, 1, 1]


BAD = {
    "lstm": ([], [3, VOCABULARY], [-1], [[1], [2]], ["a"], [1.5], 3),
    "seq2seq": ([], [VOCABULARY], {"source": [], "words": 1}, {"source": [1], "words": 0}, {"source": [1]}),
    "treelstm": (
        [1, 2],
        {"words": [], "children": []},
        {"words": [1, VOCABULARY], "children": [[0, 1]]},
        {"words": [1, 2], "children": []},
        {"words": [1, 2], "children": [[0, 2]]},
        {"words": [1, 2], "children": [[0, -1]]},
        {"words": [1, 2, 3], "children": [[0, 1], [0, 2]]},
        {"words": [1, 2, 3], "children": [[0, 1], [3]]},
        {"words": [1, 2], "children": [["a", "b"]]},
    ),
}
GOOD = {"lstm": [1, 2], "seq2seq": [1, 2], "treelstm": {"words": [1, 2], "children": [[1, 0]]}}


@pytest.mark.parametrize(("network", "policy"), covering(BAD, POLICIES, has=can_run))
def test_a_bad_request_fails_alone_and_says_why(engines, network, policy):
    model, engine = engines(network, policy, 1)
    good = GOOD[network]
    futures = [(engine.submit(bad), engine.submit(good)) for bad in BAD[network]]
    for failed, answered in futures:
        with pytest.raises(InvalidRequestError, match=r"token|words|children|sentence|source|keys"):
            failed.result()
        torch.testing.assert_close(answered.result(), reference(model, good), atol=1e-5, rtol=1e-5)


def test_trees_are_refused_by_padding_and_taken_from_data_sets():
    model = make("treelstm")
    with pytest.raises(ModelError, match="cannot be padded"):
        Engine(model, "padded")
    tree = datasets.parse_tree("(3 (2 a) (4 (1 b) (0 a)))")
    vocabulary = datasets.Vocabulary.from_sentences([tree.words])
    request = model.encode(tree, vocabulary)
    assert request["words"].tolist() == vocabulary.encode_words(["a", "b", "a"]).tolist()
    assert model.length(request) == 5
    torch.testing.assert_close(model.batched([request])[0], reference(model, request))


def test_unknown_names_and_options_name_the_nearest():
    with pytest.raises(OptionError, match="'lstm'"):
        zoo.make("lsmt")
    with pytest.raises(OptionError, match="Did you mean 'hidden'"):
        zoo.make("gru", hiden=3)
    with pytest.raises(OptionError, match="bfloat16"):
        zoo.make("gru", vocabulary_size=3, hidden=2, dtype="int8")
    with pytest.raises(OptionError, match="at least 1"):
        zoo.make("lstm", layers=0)
    assert "labels" in zoo.option_names("treelstm")
    assert (seq2seq.BOS, seq2seq.EOS) == (datasets.BOS_ID, datasets.EOS_ID)


def test_a_seed_gives_the_same_weights_and_leaves_torch_alone():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first, same, other = (make("lstm", seed=seed).batched([[1, 2]])[0] for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
