"""Networks that decide by what they compute: under each policy, live and alone, as their batches written by hand."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import batchmaker as bm
from batchmaker.errors import InvalidRequestError, ModelError, OptionError
from batchmaker.lab import zoo
from batchmaker.lab.zoo.blueprint import blueprint
from batchmaker.lab.zoo.reference import reference
from batchmaker.lab.zoo.rnnt import BLANK
from covering import covering
from insides import network_of

PITCHES, WIDTH = 5, 12
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "rnnt": ("rnnt", {"pitches": PITCHES, "vocabulary_size": 9, "hidden": 16}),
    "rnnt-deep": (
        "rnnt",
        {"pitches": PITCHES, "vocabulary_size": 9, "hidden": 16, "layers": 3, "predictor_layers": 2, "max_symbols": 1},
    ),
    "early-exit": ("early-exit", {"width": WIDTH, "layers": 4}),
    "early-exit-scores": ("early-exit", {"width": WIDTH, "inner": 7, "classes": 5, "output": "scores"}),
    "experts": ("experts", {"width": WIDTH}),
    "experts-many": ("experts", {"width": WIDTH, "inner": 7, "layers": 2, "experts": 9, "gated": False}),
}
TRANSDUCERS = ("rnnt", "rnnt-deep")
POLICIES = ("auto", "cellular", "padded", "serial")


def make(network: str, **options: Any) -> Any:
    name, own = NETWORKS[network]
    return zoo.make(name, **{"max_batch": 8, **own, **options})


def utterance(frames: int, seed: int) -> Any:
    return np.random.default_rng(seed).normal(size=(frames, PITCHES))


@st.composite
def requests_of(draw: Any, network: str) -> Any:
    seed = draw(st.integers(0, 999))
    if network in TRANSDUCERS:
        return utterance(draw(st.integers(1, 20)), seed)
    return np.random.default_rng(seed).normal(size=WIDTH)


@pytest.fixture(scope="module")
def models():
    """Networks by name, made at first use and kept."""
    return cache(make)


@pytest.fixture(scope="module")
def engines(models):
    """Engines by network and policy, started at first use and kept."""
    made: dict[tuple[str, str], bm.Engine] = {}

    def get(network: str, policy: str = "auto") -> tuple[Any, bm.Engine]:
        if (network, policy) not in made:
            made[network, policy] = bm.Engine(models(network), policy, threads=1).start()
        return models(network), made[network, policy]

    yield get
    for engine in made.values():
        engine.stop()


def check_close(result: Any, expected: Any) -> None:
    assert type(result) is type(expected)
    torch.testing.assert_close(torch.as_tensor(result), torch.as_tensor(expected), atol=1e-5, rtol=1e-5)


# Other values would be as likely where two scores, or a score and a threshold, are nearly equal: so no chance here
repeatable = settings(max_examples=5, derandomize=True)


@pytest.mark.slow
@pytest.mark.parametrize(("network", "policy"), covering(NETWORKS, POLICIES))
def test_each_policy_gives_what_the_network_gives_alone(engines, network, policy):
    model, engine = engines(network, policy)

    @repeatable
    @given(st.lists(requests_of(network), min_size=1, max_size=12))
    def check(requests):
        for result, request in zip(engine.map(requests, progress=False), requests, strict=True):
            check_close(result, reference(model, request))

    check()


@pytest.mark.parametrize("network", NETWORKS)
def test_a_closed_batch_gives_what_each_request_gives_alone(models, network):
    model = models(network)

    @repeatable
    @given(st.lists(requests_of(network), min_size=1, max_size=12))
    def check(requests):
        for result, request in zip(model.batched(requests), requests, strict=True):
            check_close(result, model.alone(request))

    check()


def transduced(model: Any, frames: Any) -> list[int]:
    """Greedy decoding in its plainest form: frame after frame, symbol after symbol."""
    network = network_of(model)
    with torch.no_grad():
        heard = network.encoder(torch.as_tensor(frames, dtype=torch.float32))[0]
        state: Any = [torch.zeros(1, model.hidden)] * (2 * model.predictor_layers)
        g, *state = network.predictor(torch.tensor([BLANK]), *state)
        written = list[int]()
        for x in heard:
            for _ in range(model.max_symbols):
                symbol = int(network.joint.scores(torch.tanh(network.listen(x) + g)).argmax())
                if symbol == BLANK:
                    break
                written.append(symbol)
                g, *state = network.predictor(torch.tensor([symbol]), *state)
    return written


@pytest.mark.parametrize("network", TRANSDUCERS)
def test_a_transducer_writes_what_its_equations_say(models, network):
    model = models(network)
    utterances = [utterance(n, n) for n in range(1, 30)]
    texts = [text.tolist() for text in model.batched(utterances)]
    assert texts == [transduced(model, frames) for frames in utterances]
    assert len({symbol for text in texts for symbol in text}) > 3
    assert min(map(len, texts)) < 3 < max(map(len, texts))


@pytest.mark.parametrize("most", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_transducer_that_never_says_blank_writes_its_most_symbols_at_each_frame(most):
    model = make("rnnt", max_symbols=most)
    network_of(model).joint.scores.bias[BLANK] = -1e9
    with bm.Engine(model, threads=1) as engine:
        texts = engine.map([utterance(n, n) for n in (1, 4, 9)], progress=False)
    assert [len(text) for text in texts] == [most, 4 * most, 9 * most]


def test_a_transducer_that_always_says_blank_writes_nothing():
    model = make("rnnt")
    network_of(model).joint.scores.bias[BLANK] = 1e9
    with bm.Engine(model, threads=1) as engine:
        (text,) = engine.map([utterance(4, 0)], progress=False)
        assert list(engine.submit(utterance(4, 0), stream=True)) == []
    assert (text.shape, text.dtype) == ((0,), torch.int64)


@pytest.mark.parametrize("network", TRANSDUCERS)
def test_symbols_stream(engines, network):
    model, engine = engines(network)
    utterances = [utterance(n, n) for n in (25, 14, 30)]
    answers = [engine.submit(frames, stream=True) for frames in utterances]
    assert [list(answer) for answer in answers] == [model.alone(frames).tolist() for frames in utterances]


@pytest.mark.parametrize(("network", "policy"), covering(TRANSDUCERS, ["auto", "cellular"]))
def test_the_chunks_of_a_live_stream_give_the_symbols_of_the_whole(engines, network, policy):
    model, engine = engines(network, policy)
    cuts = st.lists(st.integers(1, 9), min_size=1, max_size=6)

    @repeatable
    @given(st.lists(st.tuples(cuts, st.integers(0, 999)), min_size=1, max_size=6))
    def check(streams):
        utterances = [utterance(sum(sizes), seed) for sizes, seed in streams]
        sequences = [engine.open_sequence() for _ in streams]
        answers: list[list[Any]] = [[] for _ in streams]
        for turn in range(max(len(sizes) for sizes, _ in streams)):
            for (sizes, _), frames, sequence, found in zip(streams, utterances, sequences, answers, strict=True):
                if turn < len(sizes):
                    begin = sum(sizes[:turn])
                    found.append(sequence.submit(frames[begin : begin + sizes[turn]], stream=True))
        for frames, sequence, found in zip(utterances, sequences, answers, strict=True):
            streamed = [list(answer) for answer in found]
            assert [symbol for part in streamed for symbol in part] == model.alone(frames).tolist()
            assert [answer.result().tolist() for answer in found] == streamed
            sequence.close()

    check()


def test_a_chunk_without_a_result_is_sent_again(engines):
    model, engine = engines("rnnt")
    frames = utterance(30, 4)
    with engine.open_sequence() as sequence:
        first = sequence.submit(frames[:10]).result()
        with pytest.raises(InvalidRequestError, match="spectrogram"):
            sequence.submit(frames[10:20, :3]).result()
        sequence.resume()
        rest = [sequence.submit(frames[at : at + 10]).result() for at in (10, 20)]
    assert torch.cat([first, *rest]).tolist() == model.alone(frames).tolist()


@pytest.mark.parametrize("network", ["early-exit", "early-exit-scores"])
def test_requests_leave_after_different_blocks(models, network):
    model = models(network)
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(400, WIDTH))).float()
    left = []
    with torch.no_grad():
        for block in network_of(model):
            x, _, is_sure = block(x)
            left.append(int(is_sure.sum()))
            x = x[~is_sure]
    assert len(x) < 200 > max(left)
    assert all(left)


@pytest.mark.parametrize(("confidence", "blocks"), [(0.0, 1), (1.0, 4)])
def test_who_is_sure_leaves_first_and_who_never_is_leaves_last(confidence, blocks):
    model = make("early-exit-scores", layers=4, confidence=confidence)
    rng = np.random.default_rng(0)
    requests = list(rng.normal(size=(9, WIDTH)).astype(np.float32))
    x = torch.from_numpy(np.stack(requests))
    with torch.no_grad():
        for block in network_of(model)[:blocks]:
            x, expected, _ = block(x)
    with bm.Engine(model, threads=1) as engine:
        found = engine.map(requests, progress=False)
    check_close(torch.stack(list(found)), expected)


def test_each_expert_is_chosen_and_weighted_by_its_probability(engines):
    model, engine = engines("experts")
    requests = list(np.random.default_rng(0).normal(size=(200, WIDTH)).astype(np.float32))
    expected, chosen = [], set()
    for request in requests:
        x = torch.from_numpy(request)
        with torch.no_grad():
            for number, layer in enumerate(network_of(model)):
                shares = layer.router.choose(x).softmax(-1)
                best = int(shares.argmax())
                chosen.add((number, best))
                expert = layer.experts[best]
                x = x + shares[best] * expert.down(torch.nn.functional.gelu(expert.up(x)))
        expected.append(x)
    assert len(chosen) == 3 * 4
    check_close(torch.stack(list(engine.map(requests, progress=False))), torch.stack(expected))


@pytest.mark.parametrize("network", ["rnnt", "early-exit-scores", pytest.param("experts", marks=pytest.mark.slow)])
def test_weights_may_be_bfloat16(network):
    """One rounded number can decide otherwise, so only what holds for every decision is compared."""
    model = make(network, dtype="bfloat16")
    rng = np.random.default_rng(0)
    requests = [utterance(n, n) if network == "rnnt" else rng.normal(size=WIDTH) for n in range(3, 9)]
    with bm.Engine(model, threads=1) as engine:
        results = engine.map(requests, progress=False)
    for result, plain, request in zip(results, model.batched(requests), requests, strict=True):
        assert result.dtype == plain.dtype == (torch.int64 if network == "rnnt" else torch.bfloat16)
        assert len(result) <= 5 * len(request) if network == "rnnt" else result.shape == plain.shape


BAD: dict[str, list[Any]] = {
    "rnnt": [np.zeros((0, 5)), np.zeros((4, 6)), np.zeros((4, 5), np.int64), np.zeros(5), [[1.0], [1.0, 2.0]], "text"],
    "early-exit": [np.zeros(11), np.zeros(12, np.int64), np.zeros((1, 12)), [[1.0], [1.0, 2.0]], "text", None],
    "experts": [np.zeros(13), [1] * 12, {"x": [0.0] * 12}, [], 1.0],
}


@pytest.mark.parametrize(("network", "policy"), covering(BAD, ["cellular", "padded"]))
def test_a_bad_request_fails_alone_and_says_what_was_wanted(engines, network, policy):
    model, engine = engines(network, policy)
    answers = [(engine.submit(bad), engine.submit(model.example_request)) for bad in BAD[network]]
    wanted = r"must be an array \[frames, 5\]|is empty" if network == "rnnt" else r"must be a vector \[12\] of floats"
    for failed, answered in answers:
        with pytest.raises(InvalidRequestError, match=wanted):
            failed.result()
        check_close(answered.result(), model.alone(model.example_request))


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("rnnt", {"vocabulary_size": 1}, "vocabulary_size must be at least 2"),
        ("rnnt", {"max_symbols": 0}, "max_symbols must be at least 1"),
        ("rnnt", {"layers": 0}, "layers must be at least 1"),
        ("early-exit", {"confidence": 1.5}, "confidence must be a probability"),
        ("early-exit", {"output": "state"}, "output must be one of"),
        ("experts", {"experts": 0}, "experts must be at least 1"),
        ("experts", {"dtype": "int8"}, "dtype must be one of"),
    ],
)
def test_options_that_cannot_be_are_refused(name, options, complaint):
    with pytest.raises(OptionError, match=complaint):
        zoo.make(name, **options)


@pytest.mark.parametrize("name", ["rnnt", "early-exit", "experts"])
def test_full_size_unfolds_without_memory_for_its_weights(name):
    from batchmaker.lab.zoo.reference import PlainTypes
    from batchmaker.model.unfolding import Unfolding

    with torch.device("meta"), torch.no_grad():
        model = zoo.make(name)
        unfolding = Unfolding(model, PlainTypes(), model.example_request)
        unfolding.start()
    assert unfolding.decided is not None
    assert all(weight.is_meta for weight in network_of(model).parameters())


@pytest.mark.parametrize("name", ["rnnt", "early-exit", "experts"])
def test_a_simulation_which_has_no_values_refuses_it(name):
    with pytest.raises(ModelError, match="decides by values"):
        blueprint(name, lambda: zoo.make(name))


@pytest.mark.slow
@pytest.mark.parametrize("network", ["rnnt-deep", "early-exit", "experts"])
def test_a_saved_network_answers_as_before(network, tmp_path):
    model = make(network)
    rng = np.random.default_rng(0)
    requests = [utterance(n, n) if network in TRANSDUCERS else rng.normal(size=WIDTH) for n in range(3, 9)]
    bm.save(model, tmp_path / "saved")
    with bm.Engine(bm.load(tmp_path / "saved"), threads=1) as engine:
        for result, request in zip(engine.map(requests, progress=False), requests, strict=True):
            check_close(result, reference(model, request))
