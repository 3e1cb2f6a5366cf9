"""The example `transducer`: what it hears live is what it hears alone, and its training teaches it the symbols."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import batchmaker as bm
from batchmaker.server.formats.derived_signature import signature_of
from batchmaker.server.formats.tensors import Tensor
from batchmaker.server.formats.transcriptions import transcriber_of
from batchmaker.server.formats.wav import read_wav
from batchmaker.server.limits import Limits

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "transducer"


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    sys.path.insert(0, str(EXAMPLE))
    try:
        import transducer

        yield transducer
    finally:
        sys.path.remove(str(EXAMPLE))
        sys.modules.pop("transducer", None)


@pytest.fixture(scope="module")
def talkative(example) -> Any:
    """A network that knows nothing, with weights by which the frames decide and many symbols are written."""
    torch.manual_seed(0)
    network = example.Network(16).eval()
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.dim() > 1 and "embed" not in name:
                weight.normal_(0, (6 if "heard" in name else 2.5) / weight.shape[1] ** 0.5)
        network.decide.out.bias[example.BLANK] = 3
    return network


def said(example: Any, count: int, symbols: int = 5) -> list[Any]:
    draw = np.random.default_rng(0)
    return [example.Voice().say(draw, symbols, 0.5) for _ in range(count)]


def floats(example: Any, pcm: Any) -> Any:
    """Sound in rows of a frame, from -1 to 1."""
    return (pcm / 32768).astype(np.float32).reshape(-1, example.FRAME)


@pytest.mark.parametrize("chunk", [1, 7, pytest.param(16, marks=pytest.mark.slow)])
def test_live_streams_hear_what_the_network_hears_alone(example, talkative, chunk):
    utterances = said(example, 6)
    alone = [example.one_by_one(talkative, one.frames) for one in utterances]
    assert len({symbol for symbols in alone for symbol in symbols}) > 5
    with bm.Engine(example.Transducer(talkative), threads=1) as engine:
        heard = example.serve(engine, utterances, chunk=chunk, speed=1e6, show=0)
        whole = engine.map([one.frames for one in utterances], progress=False)
    assert heard.symbols == alone == [symbols.tolist() for symbols in whole]
    assert len(heard.latency_ms) == sum(-(-len(one.frames) // chunk) for one in utterances)


def test_the_script_prints_hypotheses_and_what_counts(example, talkative, capsys, monkeypatch):
    monkeypatch.setattr(example, "trained", lambda *_: talkative)
    example.main(["--streams", "4", "--symbols", "4", "--speed", "1000", "--show", "1"])
    printed = capsys.readouterr().out
    shown = re.findall(r"stream 0: ([a-t]+)$", printed, re.MULTILINE)
    assert all(after.startswith(before) for before, after in itertools.pairwise(shown))
    first = example.filled(example.Voice().say(np.random.default_rng(1), 4, 0.5), 16)
    assert len(first.frames) % 16 == 0
    assert shown[-1] == example.letters(example.one_by_one(talkative, first.frames))
    assert re.search(r"4 streams at once, \d+ chunks of 160 ms", printed)
    assert re.search(r"p50 [\d.]+ ms, p99 [\d.]+ ms", printed)
    live, alone = re.search(r"symbol error rate: live ([\d.]+)%, one by one ([\d.]+)%", printed).groups()
    assert live == alone
    assert re.search(r"second of processor: live \d+, one by one in PyTorch, whole utterances, \d+", printed)
    assert "4 of 4 streams have the symbols that one by one has" in printed


def test_an_utterance_has_a_path_with_each_symbol_once_and_a_blank_at_each_frame(example):
    (one,) = said(example, 1, 8)
    path = example.path(one, 3)
    assert [wanted for *_, wanted in path if wanted != example.BLANK] == one.symbols
    assert [t for t, *_, wanted in path if wanted == example.BLANK] == list(range(len(one.frames)))
    assert [t for t, *_, wanted in path if wanted != example.BLANK] == one.heard_at
    followers = example.Voice().followers
    assert all(after in followers[before] for before, after in itertools.pairwise(one.symbols))
    named = example.named_frames(one)
    assert len(named) == len(one.frames)
    assert [named[at] for at in one.heard_at] == one.symbols


@pytest.mark.parametrize(
    ("written", "wanted", "count"),
    [("", "", 0), ("abc", "abc", 0), ("ac", "abc", 1), ("abcd", "abc", 1), ("b", "ca", 2)],
)
def test_errors_are_what_must_be_changed(example, written, wanted, count):
    assert example.errors([*map(ord, written)], [*map(ord, wanted)]) == count


@pytest.mark.slow
def test_training_teaches_most_symbols(example):
    torch.set_num_threads(1)
    network = example.trained(700, 48)
    utterances = said(example, 10, 20)
    alone = [example.one_by_one(network, one.frames) for one in utterances]
    assert example.error_rate(alone, utterances) < 0.4


def test_frames_are_what_their_sound_has_in_each_band(example):
    (one,) = said(example, 1, 20)
    pcm = example.sound_of(one.frames)
    assert np.abs(pcm).max() < 32767
    heard = example.frames_of(floats(example, pcm))
    np.testing.assert_allclose(heard, one.frames, atol=0.02)  # a step of 16 bits in the quietest band
    assert np.isfinite(example.frames_of(np.zeros((2, example.FRAME), np.float32))).all()


def test_the_file_that_it_writes_is_the_sound_of_what_it_says(example, tmp_path, capsys):
    file = tmp_path / "said.wav"
    example.main(["--wav", str(file), "--symbols", "5"])
    one = example.Voice().say(np.random.default_rng(1), 5, 0.5)
    assert capsys.readouterr().out == example.letters(one.symbols) + "\n"
    sound = read_wav(file.read_bytes())
    assert (sound.rate, sound.num_samples) == (example.RATE, example.FRAME * len(one.frames))
    assert bytes(sound.data) == example.sound_of(one.frames).tobytes()


def test_the_symbols_of_a_sound_are_those_of_its_frames_alone(example, talkative):
    (one,) = said(example, 1, 8)
    model = example.Transducer(talkative)
    signature = signature_of(model, None, [])
    pcm = example.sound_of(one.frames)
    tensor = Tensor("sound", "INT16", pcm.reshape(-1, example.FRAME))
    frames = signature.encode(signature.to_request([tensor], Limits()))
    with bm.Engine(model, threads=1) as engine:
        symbols = engine.submit(frames).result().tolist()
    assert len(symbols) > 10
    assert symbols == example.one_by_one(talkative, example.frames_of(floats(example, pcm)))


@pytest.mark.slow
def test_a_server_builds_it_and_its_clients_get_symbols(example, talkative, monkeypatch):
    monkeypatch.setattr(example, "trained", lambda steps: talkative)
    model = example.build()
    signature = signature_of(model, None, [])
    assert [spec.name for spec in (*signature.inputs, *signature.outputs)] == ["sound", "symbols"]
    assert transcriber_of(model, signature, Limits()).chunk_size == example.RATE
    with bm.Engine(model, threads=1) as engine:
        answer = engine.submit(torch.zeros(9, example.BANDS), stream=True)
        assert list(answer) == answer.result().tolist()
