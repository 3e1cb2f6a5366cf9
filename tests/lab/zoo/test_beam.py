"""Beam search over a memory: under every policy the best hypothesis that a plain search of one request finds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmaker import Engine
from batchmaker.errors import InvalidRequestError, OptionError
from batchmaker.lab import zoo
from batchmaker.lab.zoo.beam import traced_back
from batchmaker.lab.zoo.translation import BOS, EOS
from covering import covering

WORDS, HIDDEN = 12, 8


def make(**options: Any) -> Any:
    """A small model whose words differ much in likelihood, and that often writes EOS."""
    given = {"vocabulary_size": WORDS, "hidden": HIDDEN, "max_batch": 8, "beam": 3, "max_words": 9, **options}
    model = zoo.make("seq2seq-attention", **given)
    for weight in (*model.encoder.module.parameters(), *model.step.module.parameters()):
        weight *= 3
    model.step.module.project.bias[EOS] += 1.5
    return model


def encoded(model: Any, source: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    h = c = torch.zeros(1, HIDDEN)
    steps = []
    for word in source:
        h, c = model.encoder.module(torch.tensor([int(word)]), h, c)
        steps.append(h[0])
    return torch.stack(steps), h[0], c[0]


def read(model: Any, word: int, memory: Any, h: Any, c: Any) -> tuple[Any, Any, Any]:
    """One hypothesis after one word: log probabilities of the next one [words], and the state, by Luong et al. 2015."""
    step = model.step.module
    h, c = step.lstm(step.embedding.weight[word][None], (h[None], c[None]))
    h, c = h[0], c[0]
    weights = (memory @ step.attend.weight @ h).softmax(0)
    attentional = (step.combine.weight @ torch.cat((weights @ memory, h))).tanh()
    return (step.project.weight @ attentional + step.project.bias).log_softmax(0), h, c


def rank(model: Any, score: float, length: int) -> float:
    return score / ((5 + length) / 6) ** model.length_penalty


def searched(model: Any, source: Any, most: int, end: int | None) -> float:
    """The rank of the best hypothesis, found one request at a time in plain lists."""
    beam = model.begin.module.beam
    memory, h, c = encoded(model, source)
    hypotheses = [(0.0, [BOS], h, c)]
    for _ in range(most):
        longer = []
        for score, words, h, c in hypotheses:
            if words[-1] == end and len(words) > 1:
                longer.append((score, words, h, c))
                continue
            rises, after_h, after_c = read(model, words[-1], memory, h, c)
            longer += [(score + rise, [*words, word], after_h, after_c) for word, rise in enumerate(rises.tolist())]
        hypotheses = sorted(longer, key=lambda one: -one[0])[:beam]
        if all(words[-1] == end for _, words, _, _ in hypotheses):
            break
    return max(rank(model, score, len(words) - 1) for score, words, _, _ in hypotheses)


def rank_of(model: Any, source: Any, words: list[int]) -> float:
    """The rank of a text."""
    memory, h, c = encoded(model, source)
    score, last = 0.0, BOS
    for word in words:
        rises, h, c = read(model, last, memory, h, c)
        score, last = score + float(rises[word]), word
    return rank(model, score, len(words))


def check_best(model: Any, request: Any, result: Any) -> None:
    exact = isinstance(request, dict)
    source, words = request["source"] if exact else request, torch.as_tensor(result).tolist()
    most = request["words"] if exact else model.max_words
    if exact:
        assert len(words) == most
    else:
        assert 1 <= len(words) <= most
        assert EOS not in words[:-1]
    expected = searched(model, source, most, None if exact else EOS)
    assert rank_of(model, source, words) == pytest.approx(expected, abs=1e-3, rel=1e-4)


@pytest.fixture(scope="module")
def engines():
    """Engines by policy and workers, started at first use and kept."""
    made: dict[Any, tuple[Any, Engine]] = {}

    def get(policy: str, workers: int) -> tuple[Any, Engine]:
        if (policy, workers) not in made:
            model = make()
            made[policy, workers] = model, Engine(model, policy, workers=workers, threads=1).start()
        return made[policy, workers]

    yield get
    for _, engine in made.values():
        engine.stop()


sources = st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=12)
requests_of = st.one_of(sources, st.fixed_dictionaries({"source": sources, "words": st.integers(1, 8)}))
CASES = covering(("cellular", "padded", "serial"), (1, 2))


@pytest.mark.parametrize(("policy", "workers"), CASES)
def test_each_policy_finds_what_a_search_alone_does(engines, policy, workers):
    model, engine = engines(policy, workers)

    @settings(max_examples=6)
    @given(st.lists(requests_of, min_size=1, max_size=12))
    def check(requests):
        for result, request in zip(engine.map(requests, progress=False), requests, strict=True):
            check_best(model, request, result)

    check()


def test_texts_end_early_and_at_the_limit(engines):
    engine = engines("cellular", 1)[1]
    requests = [np.random.default_rng(k).integers(0, WORDS, 1 + k % 9) for k in range(40)]
    texts = [text.tolist() for text in engine.map(requests, progress=False)]
    assert {text[-1] == EOS for text in texts} == {True, False}
    assert len({len(text) for text in texts}) > 2


def test_a_beam_of_one_takes_the_likeliest_word_each_time():
    model = make(beam=1)
    with Engine(model, threads=1) as engine:
        texts = engine.map([[3, 4, 5], [6], [7, 8]], progress=False)
    for source, text in zip(([3, 4, 5], [6], [7, 8]), texts, strict=True):
        memory, h, c = encoded(model, source)
        last = BOS
        for word in text.tolist():
            rises, h, c = read(model, last, memory, h, c)
            assert rises[word] == pytest.approx(float(rises.max()), abs=1e-5)
            last = word


def test_a_wider_beam_is_at_least_as_likely_over_many_texts():
    requests = [{"source": np.random.default_rng(k).integers(0, WORDS, 5), "words": 6} for k in range(30)]
    total = []
    for beam in (1, 4):
        model = make(beam=beam)
        texts = model.batched(requests)
        total.append(sum(rank_of(model, r["source"], t.tolist()) for r, t in zip(requests, texts, strict=True)))
    assert total[1] > total[0]


def test_a_length_penalty_prefers_longer_texts():
    requests = [np.random.default_rng(k).integers(0, WORDS, 5) for k in range(30)]
    short, long = (sum(len(text) for text in make(length_penalty=alpha).batched(requests)) for alpha in (0.0, 3.0))
    assert short < long


def test_words_are_traced_back_from_the_last_step():
    choices = np.array([[3, 4], [10 + 5, 6], [7, 10 + 8]])  # of 10 words: parent * 10 + word
    assert traced_back(choices, 0, 10).tolist() == [4, 5, 7]
    assert traced_back(choices, 1, 10).tolist() == [3, 6, 8]


@pytest.mark.parametrize("policy", ["cellular", "padded"])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "source is empty"),
        ([WORDS], f"token {WORDS}"),
        ({"source": [1], "words": 0}, "words must be a whole number"),
        ({"source": [1]}, "keys"),
    ],
)
def test_a_bad_request_fails_alone_and_says_why(engines, policy, bad, message):
    model, engine = engines(policy, 1)
    failed, answered = engine.submit(bad), engine.submit([1, 2])
    with pytest.raises(InvalidRequestError, match=message):
        failed.result()
    check_best(model, [1, 2], answered.result())


def test_options_are_checked():
    with pytest.raises(OptionError, match="beam must be at most vocabulary_size, 12"):
        make(beam=13)
    with pytest.raises(OptionError, match="beam must be at least 1"):
        make(beam=0)


def test_bfloat16_gives_texts_of_about_the_same_likelihood():
    model, same = make(dtype="bfloat16"), make()
    requests = [{"source": [3, 4, 5], "words": 5}, {"source": [6], "words": 3}]
    with Engine(model, threads=1) as engine:
        texts = engine.map(requests, progress=False)
    assert [len(text) for text in texts] == [5, 3]
    for request, text in zip(requests, texts, strict=True):
        best = searched(same, request["source"], request["words"], None)
        assert rank_of(same, request["source"], text.tolist()) > best - 0.5
        assert math.isfinite(best)
