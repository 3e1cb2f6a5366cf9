"""The Child-Sum TreeLSTM: the paper's equations, under every policy, with any number of children."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmaker import Engine
from batchmaker.errors import InvalidRequestError, OptionError
from batchmaker.lab import datasets, zoo
from batchmaker.lab.zoo.reference import reference
from covering import covering

WORDS = 20
NEAR = {"atol": 1e-5, "rtol": 1e-5}


def make(**options: Any) -> Any:
    return zoo.make("treelstm-childsum", **{"vocabulary_size": WORDS, "hidden": 8, "max_batch": 8, **options})


def by_the_paper(model: Any, request: Any) -> list[torch.Tensor]:
    """h of every word, by section 3.1, equations 2 to 8: one node after the other."""
    weights, children = model.leaf.module.weights, [[] for _ in request["words"]]
    for parent, child in np.asarray(request["edges"]).reshape(-1, 2).tolist():
        children[parent].append(child)
    known: dict[int, Any] = {}

    def node(number: int) -> Any:
        if number not in known:
            below = [node(child) for child in children[number]]
            x = weights.embedding.weight[request["words"][number]]
            f, i, o, u = (weights.given.weight @ x + weights.given.bias).split(8)
            ui, uo, uu = weights.sums.weight.split(8)
            total = sum((h for h, _ in below), torch.zeros(8))
            i, o, u = (i + ui @ total).sigmoid(), (o + uo @ total).sigmoid(), (u + uu @ total).tanh()
            c = i * u + sum(((f + weights.forget.weight @ h).sigmoid() * cell for h, cell in below), torch.zeros(8))
            known[number] = o * c.tanh(), c
        return known[number]

    return [node(number)[0] for number in range(len(request["words"]))]


def root_of(request: Any) -> int:
    (root,) = set(range(len(request["words"]))) - {child for _, child in np.asarray(request["edges"]).tolist()}
    return root


@st.composite
def graphs(draw: Any) -> dict[str, Any]:
    """Trees, also with words that have many children, and with edges besides those of the tree."""
    count = draw(st.integers(1, 16))
    names = draw(st.permutations(range(count)))
    edges = []
    for node in range(1, count):
        is_star = draw(st.booleans())
        edges.append((0 if is_star else draw(st.integers(0, node - 1)), node))
    if count > 1:
        more = draw(st.lists(st.tuples(st.integers(0, count - 2), st.integers(1, count - 1)), max_size=5))
        edges += [(a, b) for a, b in more if a < b]
    words = draw(st.lists(st.integers(0, WORDS - 1), min_size=count, max_size=count))
    return {"words": words, "edges": [[names[parent], names[child]] for parent, child in edges]}


@pytest.fixture(scope="module")
def engines():
    """Engines by output, policy and workers, started at first use and kept."""
    made: dict[Any, tuple[Any, Engine]] = {}

    def get(output: str, policy: str, workers: int) -> tuple[Any, Engine]:
        if (output, policy, workers) not in made:
            model = make(output=output)
            made[output, policy, workers] = model, Engine(model, policy, workers=workers, threads=1).start()
        return made[output, policy, workers]

    yield get
    for _, engine in made.values():
        engine.stop()


CASES = covering(("cellular", "padded", "serial"), (1, 2))


@pytest.mark.parametrize(("policy", "workers"), CASES)
def test_each_policy_gives_what_the_paper_does(engines, policy, workers):
    model, engine = engines("state", policy, workers)

    @settings(max_examples=4)
    @given(st.lists(graphs(), min_size=1, max_size=12))
    def check(requests):
        for result, request in zip(engine.map(requests, progress=False), requests, strict=True):
            torch.testing.assert_close(result, by_the_paper(model, request)[root_of(request)], **NEAR)
            torch.testing.assert_close(result, reference(model, request), **NEAR)

    check()


@pytest.mark.parametrize("policy", ["cellular", "padded"])
def test_every_word_gets_a_label_in_the_order_of_the_words(engines, policy):
    model, engine = engines("labels", policy, 1)
    scores = model.classify.module.scores

    @settings(max_examples=4)
    @given(st.lists(graphs(), min_size=1, max_size=6))
    def check(requests):
        for result, request in zip(engine.map(requests, progress=False), requests, strict=True):
            given_scores = scores(torch.stack(by_the_paper(model, request)))
            assert result.shape == (len(request["words"]),)
            chosen = given_scores.gather(1, torch.as_tensor(result)[:, None])[:, 0]
            torch.testing.assert_close(chosen, given_scores.amax(1), **NEAR)

    check()


@pytest.mark.parametrize("children", [1, 2, 3, 4, 5, 8, 9, 40])
def test_a_word_may_have_any_number_of_children(engines, children):
    model, engine = engines("state", "cellular", 1)
    request = {"words": list(np.arange(children + 1) % WORDS), "edges": [[0, child + 1] for child in range(children)]}
    torch.testing.assert_close(engine.submit(request).result(), by_the_paper(model, request)[0], **NEAR)


def test_a_label_is_the_likeliest_of_the_root():
    model = make(output="label")
    request = {"words": [1, 2, 3], "edges": [[1, 0], [1, 2]]}
    expected = model.classify.module.scores(by_the_paper(model, request)[1]).argmax()
    with Engine(model, threads=1) as engine:
        assert engine.submit(request).result() == expected
    assert model.batched([request])[0] == expected


BAD = [
    ([1, 2], "keys 'words' and 'edges'"),
    ({"words": [], "edges": []}, "words is empty"),
    ({"words": [1, WORDS], "edges": [[0, 1]]}, f"token {WORDS} at position 1"),
    ({"words": [1, -1], "edges": [[0, 1]]}, "token -1"),
    ({"words": ["a"], "edges": []}, "token ids"),
    ({"words": [1, 2], "edges": [[0, 2]]}, r"edge 0 is \[0, 2\], expected numbers of the 2 words"),
    ({"words": [1, 2], "edges": [[0, 1, 0]]}, r"expected integers \[edges, 2\]"),
    ({"words": [1, 2], "edges": [[0, 1], [1]]}, r"integers \[edges, 2\]"),
    ({"words": [1, 2], "edges": [[0.0, 1.0]]}, r"expected integers \[edges, 2\]"),
    ({"words": [1, 2, 3], "edges": [[0, 1], [1, 2], [2, 1]]}, "1 -> 2 -> 1 are a cycle"),
    ({"words": [1, 2], "edges": [[0, 1], [1, 0]]}, "0 -> 1 -> 0 are a cycle"),
    ({"words": [1], "edges": [[0, 0]]}, "0 -> 0 are a cycle"),
    (
        {"words": [1] * 20_000, "edges": [[n, (n + 1) % 20_000] for n in range(20_000)]},
        r"words 0 -> 1 -> 2 -> 3 -> 4 -> 5 -> 6 -> 7 -> \.\.\. are a cycle",
    ),
    ({"words": [1] * 20, "edges": [[0, 1]]}, r"words 0, 2, 3, 4, 5, 6, 7, 8, \.\.\. have no parent"),
    ({"words": [1, 2, 3], "edges": [[0, 1]]}, "words 0, 2 have no parent; expected one root"),
]


@pytest.mark.parametrize("policy", ["cellular", "padded"])
@pytest.mark.parametrize(("bad", "message"), BAD)
def test_a_bad_request_fails_alone_and_says_why(engines, policy, bad, message):
    model, engine = engines("state", policy, 1)
    good = {"words": [1, 2], "edges": [[1, 0]]}
    failed, answered = engine.submit(bad), engine.submit(good)
    with pytest.raises(InvalidRequestError, match=message):
        failed.result()
    torch.testing.assert_close(answered.result(), by_the_paper(model, good)[1], **NEAR)


def test_a_request_is_made_of_a_dependency_tree():
    tree = datasets.DependencyTree(("she", "reads", "old", "books"), np.array([2, 0, 4, 2]))
    vocabulary, model = datasets.Vocabulary.from_sentences([tree.words]), make()
    request = model.encode(tree, vocabulary)
    assert request["words"].tolist() == vocabulary.encode_words(tree.words).tolist()
    assert request["edges"].tolist() == [[1, 0], [3, 2], [1, 3]]
    assert model.length(request) == 4


def test_the_example_request_uses_every_cell():
    with Engine(make(), threads=1) as engine:
        engine.submit(make().example_request).result()
        assert {cell.cell for cell in engine.explain().cells} == {"leaf", "group", "inner"}


def test_options_are_checked():
    with pytest.raises(OptionError, match="output must be one of"):
        make(output="h")
    with pytest.raises(OptionError, match="hidden must be at least 1"):
        make(hidden=0)
