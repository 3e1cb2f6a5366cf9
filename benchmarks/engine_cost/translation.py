"""The line of a Transformer of the base size beside CTranslate2: equal weights, equal words, one thread."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.lab import zoo
from batchmaker.lab.datasets import Vocabulary, read_lines, translation_lengths
from batchmaker.lab.zoo.translation import BOS, EOS
from engine_cost.measuring import NotRunError, Row, Settings, best_of, compared, interleaved, per_second

WORDS: Final = 32_000
PLACES: Final = 80
EVERY: Final = 8
"""Numbers of words are multiples of this, so that CTranslate2, which takes one number for all of a call, gets batches
of equal lengths."""
MAXIMA: Final = (16, 32, 64)
TARGET: Final = 0.8


def translation(settings: Settings) -> Iterator[Row]:
    """Transformer-base, greedy, sentences of Europarl, random weights: over CTranslate2 in float32."""
    peer = _ctranslate2()
    sizes = settings.of({}, {"hidden": 64, "inner": 128, "layers": 2})
    model: Any = zoo.make("transformer", vocabulary_size=WORDS, positions=PLACES, max_batch=max(MAXIMA), **sizes)
    network = model._network
    decouple(network)
    requests = _requests(settings)
    with tempfile.TemporaryDirectory() as folder, bm.Engine(model, threads=1) as engine:
        theirs = Translator(peer, network, Path(folder), requests)
        ours = engine.map(requests, progress=False)
        _check(ours, theirs.words(max(MAXIMA)))
        best, seen = best_of(
            {
                f"{most}": partial(per_second, partial(theirs.words, most), len(requests)) for most in MAXIMA
            },
            settings.of(2, 1),
        )  # fmt: skip
        found = interleaved(
            {
                "ours": lambda: per_second(partial(engine.map, requests, progress=False), len(requests)),
                "theirs": lambda: per_second(partial(theirs.words, int(best)), len(requests)),
            },
            settings.of(5, 2),
        )
    yield compared(
        "Transformer-base, greedy", "all waiting", "requests/s", found["ours"], found["theirs"], better="higher",
        baseline=f"CTranslate2 {peer.__version__}, batches of up to {best}", target=TARGET, seen=seen,
    )  # fmt: skip


def decouple(network: Any) -> None:
    """Give the output weights of its own: with those of the embeddings a network repeats its last word.

    The end is never the best word, as CTranslate2 does not write it before the end.
    """
    made = torch.randn(network.project.weight.shape, generator=torch.Generator().manual_seed(1))
    made[EOS] = 0
    network.project.weight = nn.Parameter(made, requires_grad=False)


def _ctranslate2() -> ModuleType:
    try:
        import ctranslate2
    except ImportError as error:
        raise NotRunError("CTranslate2 is not installed here: pip install ctranslate2") from error
    found: ModuleType = ctranslate2
    return found


def _requests(settings: Settings) -> list[dict[str, Any]]:
    lines = [line for line in read_lines(settings.data / "europarl_deen" / "raw5k.en") if line.strip()]
    vocabulary = Vocabulary.from_lines(lines, max_size=WORDS)
    sources = [vocabulary.encode(line)[:PLACES] for line in lines[: settings.of(128, 12)]]
    words = translation_lengths([len(source) for source in sources], 0)
    words = np.clip(EVERY * np.ceil(words / EVERY), EVERY, PLACES).astype(int).tolist()
    return [{"source": source, "words": count} for source, count in zip(sources, words, strict=True)]


@final
class Translator:
    """CTranslate2 with the weights of a network, and requests in its form, those of equal numbers of words together."""

    def __init__(self, peer: ModuleType, network: Any, folder: Path, requests: Sequence[Mapping[str, Any]]) -> None:
        names = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(3, WORDS))]
        assert (names[BOS], names[EOS]) == ("<s>", "</s>")
        specification(peer, network, names).save(str(folder))
        self._numbers = {name: number for number, name in enumerate(names)}
        self._translator = peer.Translator(
            str(folder), device="cpu", compute_type="float32", inter_threads=1, intra_threads=1
        )
        self._groups: dict[int, list[tuple[int, list[str]]]] = {}
        for place, request in enumerate(requests):
            tokens = [names[word] for word in request["source"].tolist()]
            self._groups.setdefault(request["words"], []).append((place, tokens))
        self._count = len(requests)

    def words(self, most: int) -> list[list[int]]:
        """Translate all, in batches of up to `most` sentences; return their words in order."""
        found: list[list[int]] = [[] for _ in range(self._count)]
        for count, group in self._groups.items():
            results = self._translator.translate_batch(
                [tokens for _, tokens in group], beam_size=1, max_batch_size=most, batch_type="examples",
                min_decoding_length=count, max_decoding_length=count, return_end_token=True,
            )  # fmt: skip
            for (place, _), result in zip(group, results, strict=True):
                found[place] = [self._numbers[name] for name in result.hypotheses[0]]
        return found


def specification(peer: ModuleType, network: Any, names: Sequence[str]) -> Any:
    """Return a zoo Transformer as CTranslate2 describes one. names: of the words."""
    from ctranslate2 import specs

    layers, heads = len(network.encoder), network.encoder[0].attention.heads
    spec: Any = specs.TransformerSpec.from_config(
        layers, heads, pre_norm=False, activation=specs.common_spec.Activation.RELU
    )
    table = _array(network.embed.embedding.weight)
    for side, places in ((spec.encoder, network.embed.places), (spec.decoder, network.embed.places)):
        (embeddings,) = side.embeddings if isinstance(side.embeddings, list) else (side.embeddings,)
        embeddings.weight = table
        side.scale_embeddings = True
        side.position_encodings.encodings = _array(places)
    spec.decoder.projection.weight = _array(network.project.weight)
    for into, layer in zip(spec.encoder.layer, network.encoder, strict=True):
        _own_attention(into.self_attention, layer.attention, layer.attention_norm)
        _feed_forward(into.ffn, layer.feed_forward, layer.norm)
    for into, layer in zip(spec.decoder.layer, network.decoder, strict=True):
        _own_attention(into.self_attention, layer.attention, layer.attention_norm)
        source, read = into.attention, layer.source_attention
        _linear(source.linear[0], read.query)
        _linear(source.linear[1], read.key, read.value)
        _linear(source.linear[2], read.out)
        _norm(source.layer_norm, layer.source_norm)
        _feed_forward(into.ffn, layer.feed_forward, layer.norm)
    spec.register_source_vocabulary(list(names))
    spec.register_target_vocabulary(list(names))
    config = spec.config
    config.bos_token, config.eos_token, config.unk_token = "<s>", "</s>", "<unk>"
    config.decoder_start_token, config.add_source_bos, config.add_source_eos = "<s>", False, False
    spec.validate()
    spec.optimize(quantization=None)
    return spec


def _own_attention(into: Any, attention: Any, norm: nn.LayerNorm) -> None:
    _linear(into.linear[0], attention.query, attention.key, attention.value)
    _linear(into.linear[1], attention.out)
    _norm(into.layer_norm, norm)


def _feed_forward(into: Any, layer: Any, norm: nn.LayerNorm) -> None:
    _linear(into.linear_0, layer.inner)
    _linear(into.linear_1, layer.out)
    _norm(into.layer_norm, norm)


def _linear(into: Any, *layers: nn.Linear) -> None:
    """Set the weights of one layer, or of several on the same input."""
    into.weight = np.concatenate([_array(layer.weight) for layer in layers])
    into.bias = np.concatenate([_array(layer.bias) for layer in layers])


def _norm(into: Any, norm: nn.LayerNorm) -> None:
    into.gamma, into.beta = _array(norm.weight), _array(norm.bias)


def _array(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    return tensor.detach().float().numpy()


def _check(ours: Sequence[Tensor], theirs: Sequence[Sequence[int]]) -> None:
    """Raise AssertionError unless the words are the same, but for a request in fifty: scores may be nearly equal."""
    assert len({tuple(one.tolist()) for one in ours}) > 1, "all translations are alike"
    alike = [one.tolist() == list(other) for one, other in zip(ours, theirs, strict=True)]
    assert np.mean(alike) >= 0.98, f"{len(alike) - sum(alike)} of {len(alike)} translations differ"
