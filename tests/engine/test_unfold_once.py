"""An engine that unfolds once per shape answers as one that unfolds every request."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import HIDDEN, VOCABULARY, Decode, Encode, LoopTranslator, translate
from torch import nn

import batchmaker as bm
from batchmaker.engine.cell_driver import CellDriver
from batchmaker.errors import BatchmakerError, InvalidRequestError
from batchmaker.lab import zoo
from batchmaker.lab.simulator.replay import EventLog, SchedulerOptions, check_replay
from batchmaker.model.template_cache import TemplateCache


def book_of(engine: bm.Engine) -> TemplateCache:
    assert isinstance(engine.driver, CellDriver)
    return engine.driver.templates


@contextmanager
def always_unfolded() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TemplateCache, "look", lambda _, requests: [None] * len(requests))
        yield


def answers(model: bm.Model, requests: list[Any], **options: Any) -> tuple[list[Any], int]:
    """What an engine answers, errors as text, and how many templates it has."""
    with bm.Engine(model, threads=1, **options) as engine:
        futures = [engine.submit(request) for request in requests]
        found = []
        for future in futures:
            try:
                found.append(future.result())
            except BatchmakerError as error:
                found.append(f"{type(error).__name__}: {error}")
        return found, book_of(engine).num_templates


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) or torch.allclose(one, other, atol=1e-6)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return all(same(one[name], other[name]) for name in one)
    return bool(one == other)


MODELS: dict[str, Any] = {
    "lstm": lambda: zoo.make("lstm", vocabulary_size=50, hidden=8, max_batch=8),
    "gru": lambda: zoo.make("gru", vocabulary_size=50, hidden=8, layers=2, max_batch=8),
    "bilstm-tagger": lambda: zoo.make("bilstm-tagger", vocabulary_size=50, hidden=8, max_batch=8),
}


def words(rng: random.Random) -> Any:
    request = [rng.randrange(50) for _ in range(rng.randint(1, 4))]
    odd = rng.random()
    if odd < 0.06:
        return [*request, rng.choice([50, -1, 2**70, 1.5, None])]
    return np.array(request) if odd < 0.3 else torch.tensor(request) if odd < 0.4 else [] if odd < 0.42 else request


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", ["auto", "cellular", "lazy"])
def test_answers_and_errors_are_the_same_with_templates(name: str, policy: str) -> None:
    rng = random.Random(0)
    requests = [words(rng) for _ in range(160)]
    found, num_templates = answers(MODELS[name](), requests, policy=policy)
    with always_unfolded():
        wanted, none = answers(MODELS[name](), requests, policy=policy)
    assert none == 0
    assert num_templates > 3
    for request, one, other in zip(requests, found, wanted, strict=True):
        if isinstance(one, str) or isinstance(other, str):
            assert str(one).partition("request ")[0] == str(other).partition("request ")[0], request
        else:
            assert same(one, other)


DECIDING: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "early-exit": ({"width": 8, "layers": 3}, (8,)),
    "experts": ({"width": 8, "layers": 2, "gated": False}, (8,)),
    "rnnt": ({"hidden": 8, "layers": 1, "vocabulary_size": 6, "pitches": 4}, (3, 4)),
}


@pytest.mark.parametrize("name", DECIDING)
def test_models_of_the_zoo_that_decide_by_values_have_templates(name: str) -> None:
    options, shape = DECIDING[name]
    with bm.Engine(zoo.make(name, **options), threads=1) as engine:
        for _ in range(4):
            engine.map([torch.randn(*shape)], progress=False)
        assert book_of(engine).num_templates == 1


def test_loops_that_end_by_a_value_and_streams_have_templates() -> None:
    encode, decode = Encode(), Decode()
    rng = random.Random(1)
    sources = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 3))] for _ in range(60)]
    with bm.Engine(LoopTranslator(encode, decode), threads=1) as engine:
        translations = engine.map(sources, progress=False)
        assert book_of(engine).num_templates == 3
        streamed = [list(engine.submit(source, stream=True)) for source in sources[:6]]
    assert [text.tolist() for text in translations] == [translate(encode, decode, source) for source in sources]
    assert streamed == [translate(encode, decode, source) for source in sources[:6]]


def test_images_through_layers_have_a_template() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)).eval()
    model = bm.layers(network, torch.zeros(1, 4, 4), max_batch=4)
    images = [torch.randn(1, 4, 4) for _ in range(20)]
    with bm.Engine(model, threads=1) as engine:
        scores = engine.map(images, progress=False)
        assert book_of(engine).num_templates == 1
    with torch.no_grad():
        assert torch.allclose(torch.stack(scores), network(torch.stack(images)), atol=1e-5)


class Chunked(bm.Model):
    """A sentence in parts."""

    def __init__(self) -> None:
        self.encode = bm.Cell(Encode(), max_batch=4)

    def unfold(self, words: Any) -> Any:
        return self.encode.run(words)

    def unfold_chunk(self, words: Any, state: Any) -> Any:
        h, c = self.encode.run(words, None if state is None else (state["h"], state["c"]))
        return h, {"h": h, "c": c, "what": "state"}


def test_sequences_go_on_from_state_that_a_template_has_kept() -> None:
    model, rng = Chunked(), random.Random(2)
    texts = [[[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 2))] for _ in range(5)] for _ in range(12)]
    with bm.Engine(model, threads=1) as engine:
        open_ = [engine.open_sequence() for _ in texts]
        futures = [[seq.submit(part) for part in parts] for seq, parts in zip(open_, texts, strict=True)]
        found = [[future.result() for future in of_one] for of_one in futures]
        assert book_of(engine).num_templates == 4  # one word or two, at the beginning or after another part
        for sequence in open_:
            sequence.close()
        whole = engine.map([[word for part in parts for word in part] for parts in texts], progress=False)
    for of_one, (h, _) in zip(found, whole, strict=True):
        assert torch.allclose(of_one[-1], h, atol=1e-5)
        assert of_one[0].shape == (HIDDEN,)


def test_requests_that_are_looked_at_leave_the_templates_of_chunks_alone() -> None:
    class Looking(Chunked):
        def unfold(self, words: Any) -> Any:
            return self.encode.run(words if sum(words) else words[:1])  # looks at values

    with bm.Engine(Looking(), threads=1) as engine:
        engine.map([[1] * length for length in range(1, 30) for _ in range(3)], progress=False)
        assert book_of(engine).num_templates == 0
        with engine.open_sequence() as sequence:
            for _ in range(6):
                sequence.submit([1, 2]).result()
        assert book_of(engine).num_templates == 1  # of the chunks after the first


def test_a_log_of_requests_that_share_graphs_is_replayed(tmp_path: Any) -> None:
    log, rng = EventLog(SchedulerOptions("cellular", take_turns=True, loops_ahead=True)), random.Random(3)
    requests = [[rng.randrange(50) for _ in range(rng.randint(1, 3))] for _ in range(60)]
    engine = bm.Engine(MODELS["lstm"](), "cellular", threads=1)
    assert isinstance(engine.driver, CellDriver)
    engine.driver.record = log.record
    with engine:
        engine.map(requests, progress=False)
        assert book_of(engine).num_templates == 3
    log.save(tmp_path / "log")
    assert check_replay(EventLog.load(tmp_path / "log")) > 60


def test_a_request_that_was_changed_after_its_turn_is_what_it_was() -> None:
    with bm.Engine(MODELS["lstm"](), threads=1) as engine:
        request = np.array([1, 2, 3])
        wanted = [engine.submit(request).result() for _ in range(4)][-1]
        future = engine.submit(request)
        found = future.result()
        request[:] = 0
        torch.testing.assert_close(found, wanted)


def test_one_wrong_request_among_many_fails_alone() -> None:
    with bm.Engine(MODELS["lstm"](), threads=1) as engine:
        engine.map([[1, 2]] * 40, progress=False)
        futures = [engine.submit([1, 50 if i == 7 else 2]) for i in range(20)]
        with pytest.raises(InvalidRequestError, match="token 50 at position 1"):
            futures[7].result()
        assert all(future.result().shape == (8,) for i, future in enumerate(futures) if i != 7)
