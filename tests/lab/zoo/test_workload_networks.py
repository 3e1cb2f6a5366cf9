"""The networks of ED-Batch's evaluation: graphs of the agreed shape, and in the engine what each gives node by node."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmaker import Engine
from batchmaker.errors import InvalidRequestError, ModelError, OptionError
from batchmaker.lab import datasets, zoo
from batchmaker.lab.zoo.reference import reference
from batchmaker.lab.zoo.shapes import ShapeRegistry
from batchmaker.model.unfolding import Unfolding

WORDS, LETTERS, ARITY = 30, 12, 4
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "bilstm-tagger": ("bilstm-tagger", {"embedding": 6, "output": "scores", "labels": 4}),
    "bilstm-tagger-char": ("bilstm-tagger-char", {"embedding": 6, "alphabet": LETTERS, "output": "scores"}),
    "lstm-nmt": ("lstm-nmt", {"embedding": 6}),
    "treelstm": ("treelstm", {"embedding": 6, "output": "labels"}),
    "treelstm-2type": ("treelstm-2type", {"embedding": 6, "output": "state"}),
    "treegru": ("treegru", {"output": "state"}),
    "mvrnn": ("mvrnn", {}),
    "latticelstm": ("latticelstm", {"embedding": 6, "words": WORDS, "max_arity": ARITY}),
    "latticegru": ("latticegru", {"embedding": 6, "words": WORDS, "max_arity": ARITY}),
}


def make(network: str, **options: Any) -> Any:
    name, own = NETWORKS[network]
    return zoo.make(name, **{"vocabulary_size": WORDS, "hidden": 8, "max_batch": 6, **own, **options})


def is_tree(network: str) -> bool:
    return network.startswith(("tree", "mvrnn"))


@st.composite
def lattices(draw: Any) -> dict[str, Any]:
    """Any lattice: nodes with words alone, nodes without arcs in the middle, several words between two nodes."""
    arcs = [[0, 1, draw(st.integers(0, WORDS - 1))]]
    for target in range(1, draw(st.integers(2, 12))):
        sources = draw(st.lists(st.integers(0, target - 1), max_size=ARITY if target > 1 else ARITY - 1))
        arcs += [[source, target, draw(st.integers(0, WORDS - 1))] for source in sources]
    return {"arcs": arcs}


@st.composite
def trees(draw: Any, network: str) -> dict[str, Any]:
    words = draw(st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=12))
    children = datasets.random_binary_tree(len(words), draw(st.integers(0, 999))).children
    request = {"words": words, "children": children}
    if network == "treelstm-2type":
        request["kinds"] = draw(st.lists(st.integers(0, 1), min_size=len(children), max_size=len(children)))
    return request


@st.composite
def sentences(draw: Any, network: str) -> Any:
    if network == "bilstm-tagger-char":
        words = draw(st.lists(st.integers(-1, WORDS - 1), min_size=1, max_size=9))
        letters = st.lists(st.integers(0, LETTERS - 1), min_size=1, max_size=6)
        return {"words": words, "spellings": [draw(letters) for word in words if word < 0]}
    source = draw(st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=12))
    return {"source": source, "words": draw(st.integers(1, 9))} if network == "lstm-nmt" else source


def requests_of(network: str) -> st.SearchStrategy[Any]:
    if network.startswith("lattice"):
        return lattices()
    return trees(network) if is_tree(network) else sentences(network)


@pytest.fixture(scope="module")
def engines():
    """Engines by network, started at first use and kept."""
    made: dict[str, tuple[Any, Engine]] = {}

    def get(network: str) -> tuple[Any, Engine]:
        if network not in made:
            model = make(network)
            made[network] = (model, Engine(model, threads=1).start())
        return made[network]

    yield get
    for _, engine in made.values():
        engine.stop()


@pytest.mark.parametrize("network", NETWORKS)
def test_requests_together_give_what_each_gives_node_by_node(engines, network):
    model, engine = engines(network)

    @settings(max_examples=4)
    @given(st.lists(requests_of(network), min_size=1, max_size=12))
    def check(requests):
        results = engine.map(requests, progress=False)
        for result, plain, request in zip(results, model.batched(requests), requests, strict=True):
            torch.testing.assert_close(result, plain, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(plain, reference(model, request), atol=1e-5, rtol=1e-5)

    check()


def cells_in(model: Any, request: Any) -> Counter[str]:
    """How often each cell is called for a request, by name; the steps of runs too."""
    registry = ShapeRegistry()
    unfolding = Unfolding(model, registry, request)
    unfolding.start()
    assert not unfolding.open
    called: Counter[int] = Counter()
    for block in unfolding.graph.blocks:
        called.update(block.types.tolist())
    for run in unfolding.graph.runs:
        assert not run.open_ended
        called[run.type_id] += run.length
    return Counter({registry.types[number].name: times for number, times in called.items()})


@pytest.mark.parametrize("network", ["treelstm", "treelstm-2type", "treegru", "mvrnn"])
@given(data=st.data())
@settings(max_examples=10)
def test_a_tree_has_a_leaf_or_inner_cell_and_an_output_for_each_node(network, data):
    request = data.draw(trees(network))
    called = cells_in(make(network, output="labels"), request)
    assert called.pop("leaf") == len(request["words"])
    assert called.pop("classify") == 2 * len(request["words"]) - 1
    others = sum(request.get("kinds", []))
    assert called == Counter({"inner": len(request["words"]) - 1 - others, "other": others}) - Counter()


@pytest.mark.parametrize("network", ["latticelstm", "latticegru"])
@given(request_=lattices())
@settings(max_examples=10)
def test_a_lattice_has_a_cell_for_each_arc_a_sum_by_arity_and_a_label_for_each_node_with_arcs(network, request_):
    called = cells_in(make(network), request_)
    arities = Counter(target for _, target, _ in request_["arcs"])
    assert called.pop("label") == len(arities)
    expected = Counter({"character": sum(target - source == 1 for source, target, _ in request_["arcs"])})
    expected["word"] = len(request_["arcs"]) - expected["character"]
    expected.update(f"sum{arity}" for arity in arities.values() if arity > 1)
    assert called == +expected


def test_a_tagger_spells_rare_words_in_both_directions():
    request = {"words": [3, -1, 4, -1], "spellings": [[1, 5, 2], [1, 6, 7, 2]]}
    called = cells_in(make("bilstm-tagger-char"), request)
    assert called == {
        "embed": 2, "spell_forwards": 7, "spell_backwards": 7, "spell": 2, "forwards": 4, "backwards": 4, "tag": 4,
    }  # fmt: skip
    assert cells_in(make("bilstm-tagger"), [1, 2, 3]) == {"forwards": 3, "backwards": 3, "tag": 3}


def test_a_translation_of_known_length_takes_as_many_steps():
    assert cells_in(make("lstm-nmt"), {"source": [3, 4], "words": 5}) == {"encoder": 2, "decoder": 5}


@pytest.mark.parametrize("network", NETWORKS)
def test_the_example_request_uses_every_cell(network):
    model = make(network)
    assert set(cells_in(model, model.example_request)) == set(model.cells)


def test_a_lattice_is_the_equations_by_hand():
    model = make("latticegru", embedding=None)
    arcs = [[0, 1, 3], [1, 2, 4], [0, 2, 5]]
    state = torch.zeros(8)

    def arc(cell, token, h):
        one, x = cell.module, cell.module.embedding.weight[token]
        r, z, n = one.given(x).split(8)
        recurrent_r, recurrent_z = (one.gates.weight @ h).split(8)
        r, z = (r + recurrent_r).sigmoid(), (z + recurrent_z).sigmoid()
        return z * h + (1 - z) * (n + one.candidate.weight @ (r * h)).tanh()

    first = arc(model.character, 3, state)
    second = arc(model.character, 4, first) + arc(model.word, 5, state)
    expected = [model.label.module.scores(h).argmax() for h in (first, second)]
    assert model.batched([{"arcs": arcs}])[0].tolist() == expected


def test_a_matrix_and_vector_node_is_the_equations_by_hand():
    model = make("mvrnn", output="state")
    leaf, inner = model.leaf.module, model.inner.module

    def word(token):
        return leaf.vector.weight[token], leaf.matrix.weight[token].view(8, 8).T  # kept transposed

    def node(left, right):
        (v1, m1), (v2, m2) = left, right
        both = torch.cat((m1 @ v2, m2 @ v1))
        matrix = torch.cat((inner.left.weight, inner.right.weight), 1) @ torch.cat((m1, m2)) + inner.left.bias[:, None]
        return (inner.vector.weight @ both + inner.vector.bias).tanh(), matrix

    expected = node(node(word(3), word(4)), word(5))[0]
    torch.testing.assert_close(model.batched([{"words": [3, 4, 5], "children": [[0, 1], [3, 2]]}])[0], expected)


def test_a_tree_of_gated_units_is_the_equations_by_hand():
    model = make("treegru")
    leaf, inner = model.leaf.module, model.inner.module

    def share(gates, candidate, h):
        r, z = gates(h).sigmoid().split(8)
        return z * h + (1 - z) * candidate(r * h).tanh()

    left, right = (share(leaf.gates, leaf.candidate, leaf.embedding.weight[word]) for word in (3, 4))
    expected = sum(share(inner.gates[k], inner.candidates[k], h) for k, h in enumerate((left, right))) / 2
    torch.testing.assert_close(model.batched([{"words": [3, 4], "children": [[0, 1]]}])[0], expected)


def test_a_tagger_is_torch_s_own_layers():
    model = make("bilstm-tagger")
    words = [3, 1, 4, 1, 5]
    tops = []
    for cell in (model.forwards, model.backwards):
        layers = torch.nn.LSTM(6, 8, 2)
        for number, one in enumerate(cell.module.layers):
            for key, weight in one.named_parameters():
                getattr(layers, f"{key}_l{number}").data.copy_(weight)
        order = words if cell is model.forwards else words[::-1]
        with torch.no_grad():
            tops.append(layers(cell.module.embedding(torch.tensor(order)))[0])
    torch.testing.assert_close(model.batched([words])[0], model.tag.module(tops[0], tops[1].flip(0)))


@pytest.mark.parametrize("network", ["bilstm-tagger-char", "mvrnn"])
def test_bfloat16_stays_within_its_precision(network):
    model = make(network, dtype="bfloat16", output="state" if network == "mvrnn" else "scores", max_batch=4)
    requests = [model.example_request] * 3
    with Engine(model, threads=1) as engine:
        for result, plain in zip(engine.map(requests, progress=False), model.batched(requests), strict=True):
            assert result.dtype == torch.bfloat16
            torch.testing.assert_close(result, plain, atol=0.03, rtol=0.03)


def test_coins_are_fair_and_depend_on_the_sentence_and_the_seed_alone():
    trees = datasets.random_trees(60, 0, vocabulary=20)
    vocabulary = datasets.Vocabulary.from_sentences(tree.words for tree in trees)
    kinds = [make("treelstm-2type", seed=seed).encode(tree, vocabulary)["kinds"].tolist()
             for seed in (0, 0, 1) for tree in trees]  # fmt: skip
    assert kinds[:60] == kinds[60:120] != kinds[120:]
    tosses = [kind for row in kinds for kind in row]
    assert np.mean(tosses) == pytest.approx(0.5, abs=0.03)


def test_data_sets_become_requests():
    vocabulary = datasets.Vocabulary.from_sentences([["a", "b"]])
    alphabet = datasets.Vocabulary.from_sentences([list("abcx")])
    sentence = datasets.TaggedSentence(("b", "cab", "a"), ("O", "O", "O"))
    model = make("bilstm-tagger-char")
    request = model.encode(sentence, vocabulary, alphabet)
    assert request["words"].tolist() == [4, -1, 3]
    assert request["spellings"] == [[1, *alphabet.encode_words(list("cab")).tolist(), 2]]
    assert model.length(request) == 3
    with pytest.raises(ModelError, match="alphabet"):
        model.encode(sentence, vocabulary)
    assert make("bilstm-tagger").encode(sentence, vocabulary).tolist() == [4, 0, 3]
    lattice = datasets.random_lattices(1, 0)[0]
    assert make("latticegru").encode(lattice)["arcs"] is lattice.arcs
    pair = datasets.SentencePair("a b c", "d e", 1)
    request = make("lstm-nmt").encode(pair, vocabulary)
    assert (request["source"].tolist(), request["words"]) == ([3, 4, 0], 2)


TREE = {"words": [1, 2], "children": [[0, 1]]}
BAD: dict[str, tuple[Any, ...]] = {
    "bilstm-tagger": ([], [WORDS], [-1], [[1]], None),
    "bilstm-tagger-char": (
        [1, 2],
        {"words": [1]},
        {"words": [], "spellings": []},
        {"words": [1, -2], "spellings": []},
        {"words": [1.5], "spellings": []},
        {"words": "ab", "spellings": []},
        {"words": [1, -1], "spellings": []},
        {"words": [1], "spellings": [[1]]},
        {"words": [-1], "spellings": 3},
        {"words": [-1], "spellings": [[]]},
        {"words": [-1], "spellings": [[LETTERS]]},
    ),
    "treelstm-2type": (
        TREE,
        {**TREE, "kinds": []},
        {**TREE, "kinds": [2]},
        {**TREE, "kinds": [0.5]},
        {"words": [1, 2], "children": [[0, 2]], "kinds": [0]},
        {"words": [1, WORDS], "children": [[0, 1]], "kinds": [0]},
        {"words": [1, 2, 3], "children": [[0, 4], [1, 2]], "kinds": [0, 1]},
    ),
    "treegru": ({**TREE, "kinds": [0]}, {"words": [1, WORDS], "children": [[0, 1]]}),
    "latticelstm": (
        [[0, 1, 0]],
        {"arcs": []},
        {"arcs": [[0, 1]]},
        {"arcs": [[0, 1, 0], [0]]},
        {"arcs": [[0, 1, 0.5]]},
        {"arcs": [[1, 1, 0]]},
        {"arcs": [[2, 1, 0]]},
        {"arcs": [[-1, 1, 0]]},
        {"arcs": [[0, 2, 0], [0, 1, 0]]},
        {"arcs": [[0, 1, WORDS]]},
        {"arcs": [[0, 2, -1]]},
        {"arcs": [[0, 1, 0]] * (ARITY + 1)},
    ),
}
GOOD = {
    "bilstm-tagger-char": {"words": [1, -1], "spellings": [[1, 2]]},
    "treelstm-2type": {**TREE, "kinds": [1]},
    "treegru": TREE,
    "latticelstm": {"arcs": [[0, 1, 0]]},
}


@pytest.mark.parametrize("network", BAD)
def test_a_bad_request_fails_alone_and_says_why(engines, network):
    model, engine = engines(network)
    good = GOOD.get(network, [1, 2])
    futures = [(engine.submit(bad), engine.submit(good)) for bad in BAD[network]]
    for (failed, answered), bad in zip(futures, BAD[network], strict=True):
        with pytest.raises(InvalidRequestError, match=r"token|words|children|sentence|keys|kinds|spelling|arc"):
            failed.result()
        with pytest.raises(InvalidRequestError):
            model.batched([bad])
        torch.testing.assert_close(answered.result(), model.batched([good])[0], atol=1e-5, rtol=1e-5)


def test_more_arcs_than_there_are_sums_for_are_refused_with_the_option_that_helps():
    with pytest.raises(InvalidRequestError, match=r"node 1 has 5 of them, .*at most 4 \(option max_arity\)"):
        make("latticelstm").batched([{"arcs": [[0, 1, 0]] * 5}])


@pytest.mark.parametrize(
    ("network", "options", "complaint"),
    [
        ("latticelstm", {"max_arity": 1}, "max_arity must be at least 2"),
        ("bilstm-tagger-char", {"embedding": 7}, "embedding must be even"),
        ("bilstm-tagger-char", {"alphabet": 2}, "alphabet must be above 2"),
        ("bilstm-tagger", {"output": "state"}, "output must be one of"),
        ("treegru", {"embedding": 3}, "unknown option of model 'treegru' 'embedding'"),
        ("mvrnn", {"hidden": 0}, "hidden must be at least 1"),
    ],
)
def test_options_that_cannot_be_are_refused(network, options, complaint):
    with pytest.raises(OptionError, match=complaint):
        make(network, **options)


@pytest.mark.parametrize("network", ["treelstm", "treelstm-2type", "latticelstm", "bilstm-tagger-char"])
def test_what_has_no_padded_form_is_refused_by_padding(network):
    with pytest.raises(ModelError, match="cannot be padded"):
        Engine(make(network), "padded")
