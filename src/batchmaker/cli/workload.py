"""Requests for the built-in models: from files, or seeded without files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from batchmaker.cli.requests import LATTICES, TAGGERS, TREES, fit, num_cells
from batchmaker.errors import DataError, OptionError
from batchmaker.lab import zoo
from batchmaker.lab.datasets import (
    RESERVED_WORDS,
    Vocabulary,
    europarl_lengths,
    fixed_lengths,
    lazybatching_lengths,
    librispeech_lengths,
    random_dependencies,
    random_images,
    random_sentences,
    random_spectrograms,
    random_trees,
    read_aligned,
    read_conllu,
    read_lines,
    read_trees,
    translation_lengths,
)

SYNTHETIC_WORDS: Final = 10_000
TRANSLATION_WORDS: Final = 30_000
TREE_WORDS: Final = 1000
BERT_WORDS: Final = 30_522
DEFAULT_COUNT: Final = 4096
IMAGES: Final = 64
UTTERANCES: Final = 128
VISION: Final = ("resnet50", "vgg16", "mobilenet")
SPEECH: Final = {"deepspeech2": 161, "las": 40, "rnnt": 80}
"""Pitches of the spectrograms."""
VECTORS: Final = {"early-exit": 256, "experts": 256}
"""Widths of vectors that are requests."""
NOISE: Final = {"diffusion": 256}
"""Widths of noise that becomes data in a number of steps."""
FEWEST_STEPS, MOST_STEPS = 10, 50
"""Of those that noise takes, evenly distributed."""
ATTENTION: Final = ("gnmt", "transformer")
"""Translators with a fixed number of positions."""
LANGUAGE: Final = ("rwkv", "mamba")
"""Language models: prompts as long as sentences, continued by as many words as a translation would have."""
RECURRENT: Final = ("seq2seq", "seq2seq-attention", "lstm-nmt")
"""Translators for sentences of any length."""
DEPENDENCIES: Final = "treelstm-childsum"
"""The network over dependency trees."""
UNPADDED: Final = (*TREES, *TAGGERS, *LATTICES)
"""Models without a padded form."""
PLACES: Final = 80
TEXT_PLACES: Final = 128
"""Most tokens of a text for BERT."""
LAS_FRAMES: Final = 1600
CHARACTERS_PER_FRAME: Final = 0.14
"""In read English speech, at 100 frames a second."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one model.

    chains: [num_requests, k] cells in each part of a request that a padded batch pads separately: a sentence, or source
    and target, or all nodes of a tree. A network that is the same for all requests counts as one. vocabulary_size: None
    if requests have no tokens. options: other options of the model for these requests.
    """

    requests: Sequence[Any]
    chains: NDArray[np.int64]
    vocabulary_size: int | None
    source: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cells(self) -> NDArray[np.int64]:
        """Number of cells of each request: [num_requests]."""
        return np.asarray(self.chains.sum(axis=1), np.int64)

    def __len__(self) -> int:
        return len(self.requests)


def make_workload(
    model: str, *, data: Sequence[Path] = (), lengths: str | None = None, count: int | None = None, seed: int = 0
) -> Workload:
    """Return `count` requests for the model in a seeded random order, repeated if the files have fewer.

    data: files. lengths: `fixed:24` or `clip:50`, for generated sentences and utterances. Raises DataError and
    OptionError.
    """
    if data and lengths:
        raise OptionError("--lengths is for generated sentences; leave it out with --data")
    if data and model in (*VISION, *SPEECH, *VECTORS, *NOISE, *LANGUAGE):
        raise OptionError(f"{model} has generated requests only; leave --data out")
    if model == "treelstm":
        whole = _trees(data, count, seed)
    elif model == DEPENDENCIES:
        whole = _dependencies(data, lengths, count, seed)
    elif model in UNPADDED:
        whole = _in_file_order(model, data, lengths, count, seed)
    elif model in RECURRENT or model in ATTENTION:
        whole = _translations(model, data, lengths, count, seed)
    elif model in LANGUAGE:
        whole = _prompts(lengths, count, seed)
    elif model in VISION:
        whole = _images(lengths, count, seed)
    elif model in SPEECH:
        whole = _utterances(model, lengths, count, seed)
    elif model in VECTORS:
        whole = _vectors(VECTORS[model], lengths, count, seed)
    elif model in NOISE:
        whole = _noise(NOISE[model], lengths, count, seed)
    elif model == "bert":
        whole = _texts(data, lengths, count, seed)
    else:
        whole = _sentences(data, lengths, count, seed)
    number = len(whole) if count is None else count
    if number < 1:
        raise OptionError(f"--requests must be at least 1, got {number}")
    order = np.resize(np.random.default_rng(seed).permutation(len(whole)), number)
    requests = [whole.requests[i] for i in order.tolist()]
    return Workload(requests, whole.chains[order], whole.vocabulary_size, whole.source, whole.options)


def sentence_lengths(lengths: str | None, count: int, seed: int) -> NDArray[np.int64]:
    """Return lengths distributed like Europarl's, or by `fixed:N` or `clip:N`."""
    if lengths is None:
        return europarl_lengths(count, seed)
    kind, most = _read_lengths(lengths)
    return fixed_lengths(count, most) if kind == "fixed" else europarl_lengths(count, seed, clip=most)


def _read_lengths(lengths: str) -> tuple[str, int]:
    kind, _, number = lengths.partition(":")
    if kind not in ("fixed", "clip") or not number.isdigit() or int(number) < 1:
        raise OptionError(f"--lengths {lengths!r}: expected fixed:N or clip:N, for example fixed:24 or clip:50")
    return kind, int(number)


def _sentences(data: Sequence[Path], lengths: str | None, count: int | None, seed: int) -> Workload:
    if not data:
        sentences = random_sentences(sentence_lengths(lengths, count or DEFAULT_COUNT, seed), SYNTHETIC_WORDS, seed)
        source = f"generated sentences ({lengths or 'Europarl lengths'})"
        return Workload(sentences, _counts(sentences), SYNTHETIC_WORDS, source)
    lines = [line for path in data for line in read_lines(path) if line.strip()]
    if not lines:
        raise DataError(f"{data[0]}: no line has a word")
    vocabulary = Vocabulary.from_lines(lines, max_size=TRANSLATION_WORDS)
    encoded = [vocabulary.encode(line) for line in lines]
    return Workload(encoded, _counts(encoded), len(vocabulary), ", ".join(path.name for path in data))


def _prompts(lengths: str | None, count: int | None, seed: int) -> Workload:
    sizes = sentence_lengths(lengths, count or DEFAULT_COUNT, seed)
    words = translation_lengths(sizes, seed)
    prompts = random_sentences(sizes, SYNTHETIC_WORDS, seed)
    requests = [
        {"prompt": prompt, "max_tokens": int(most), "ignore_eos": True}
        for prompt, most in zip(prompts, words.tolist(), strict=True)
    ]
    # the last token of a prompt is read by the step that writes the first word
    chains = np.stack((sizes - 1, words), axis=1)
    return Workload(requests, chains, SYNTHETIC_WORDS, f"generated prompts ({lengths or 'Europarl lengths'})")


def _texts(data: Sequence[Path], lengths: str | None, count: int | None, seed: int) -> Workload:
    """Return sentences that fit into BERT. BERT's graph is the same for all of them."""
    whole = _sentences(data, lengths, count, seed)
    requests = [sentence[:TEXT_PLACES] for sentence in whole.requests]
    return Workload(requests, _ones(len(requests)), BERT_WORDS, whole.source)


def _images(lengths: str | None, count: int | None, seed: int) -> Workload:
    if lengths:
        raise OptionError("--lengths is for sentences and utterances; images are all alike")
    images = random_images(min(count or IMAGES, IMAGES), seed)
    return Workload(images, _ones(len(images)), None, "generated images")


def _vectors(width: int, lengths: str | None, count: int | None, seed: int) -> Workload:
    """Return vectors of normal noise. How many cells each takes is decided while it runs; each counts as one."""
    if lengths:
        raise OptionError("--lengths is for sentences and utterances; vectors are all alike")
    vectors = list(random_spectrograms([count or DEFAULT_COUNT], width, seed)[0])
    return Workload(vectors, _ones(len(vectors)), None, "generated vectors")


def _noise(width: int, lengths: str | None, count: int | None, seed: int) -> Workload:
    """Return vectors of normal noise, each with its number of steps; `lengths` says it for all, or the most."""
    number = count or DEFAULT_COUNT
    steps = np.random.default_rng(seed).integers(FEWEST_STEPS, MOST_STEPS + 1, number)
    if lengths is not None:
        kind, most = _read_lengths(lengths)
        steps = fixed_lengths(number, most) if kind == "fixed" else np.minimum(steps, most)
    vectors = random_spectrograms([number], width, seed)[0]
    requests = [{"noise": vector, "steps": int(n)} for vector, n in zip(vectors, steps.tolist(), strict=True)]
    return Workload(requests, steps[:, None], None, f"generated noise ({lengths or '10 to 50 steps'})")


def _utterances(model: str, lengths: str | None, count: int | None, seed: int) -> Workload:
    number = min(count or UTTERANCES, UTTERANCES)
    if lengths is None:
        frames = librispeech_lengths(number, seed)
    else:
        kind, most = _read_lengths(lengths)
        frames = fixed_lengths(number, most) if kind == "fixed" else librispeech_lengths(number, seed, clip=most)
    name = f"generated utterances ({lengths or 'LibriSpeech lengths'})"
    if model == "las":
        frames = np.minimum(frames, LAS_FRAMES)
    spectrograms = random_spectrograms(frames.tolist(), SPEECH[model], seed)
    if model != "las":
        return Workload(spectrograms, frames[:, None], None, name)
    words = np.maximum(np.rint(CHARACTERS_PER_FRAME * frames), 1).astype(np.int64)
    requests = [{"source": source, "words": int(n)} for source, n in zip(spectrograms, words.tolist(), strict=True)]
    return Workload(requests, np.stack((frames, words), axis=1), None, name)


def _translations(model: str, data: Sequence[Path], lengths: str | None, count: int | None, seed: int) -> Workload:
    if not data:
        if model in ATTENTION and lengths is None:
            sizes, words = lazybatching_lengths(count or DEFAULT_COUNT, seed)
            name = "generated pairs (LazyBatching's lengths)"
        else:
            sizes = sentence_lengths(lengths, count or DEFAULT_COUNT, seed)
            words = translation_lengths(sizes, seed)
            name = f"generated pairs ({lengths or 'Europarl lengths'})"
        sources = random_sentences(sizes, TRANSLATION_WORDS, seed)
    else:
        if len(data) != 2:
            raise OptionError(f"{model} reads two aligned files (--data SOURCE --data TARGET), got {len(data)}")
        pairs = read_aligned(data[0], data[1]).pairs
        vocabulary = Vocabulary.from_lines([pair.source for pair in pairs], max_size=TRANSLATION_WORDS)
        sources = [vocabulary.encode(pair.source) for pair in pairs]
        words = np.array([len(pair.target_tokens) for pair in pairs], np.int64)
        name = f"{data[0].name} -> {data[1].name}"
    if model in ATTENTION:
        sources, words = [source[:PLACES] for source in sources], np.minimum(words, PLACES)
    requests = [{"source": source, "words": int(n)} for source, n in zip(sources, words.tolist(), strict=True)]
    return Workload(requests, np.concatenate((_counts(sources), words[:, None]), axis=1), TRANSLATION_WORDS, name)


def _trees(data: Sequence[Path], count: int | None, seed: int) -> Workload:
    if not data:
        trees = random_trees(count or DEFAULT_COUNT // 2, seed, vocabulary=TREE_WORDS)
        vocabulary = Vocabulary((*RESERVED_WORDS, *(f"w{i}" for i in range(TREE_WORDS))))
        source = "generated trees"
    else:
        trees = [tree for path in data for tree in read_trees(path)]
        vocabulary = Vocabulary.from_sentences(tree.words for tree in trees)
        source = ", ".join(path.name for path in data)
    requests = [{"words": vocabulary.encode_words(tree.words), "children": tree.children} for tree in trees]
    return Workload(requests, np.array([[tree.num_nodes] for tree in trees], np.int64), len(vocabulary), source)


def _dependencies(data: Sequence[Path], lengths: str | None, count: int | None, seed: int) -> Workload:
    if lengths:
        raise OptionError("--lengths is for sentences and utterances; trees have lengths of their own")
    if data:
        trees = [tree for path in data for tree in read_conllu(path)]
        source = ", ".join(path.name for path in data)
    else:
        trees = random_dependencies(count or DEFAULT_COUNT // 2, seed, vocabulary=TREE_WORDS)
        source = "generated dependencies"
    vocabulary = Vocabulary.from_sentences(tree.words for tree in trees)
    with torch.device("meta"):
        model: Any = zoo.make(DEPENDENCIES, hidden=2, vocabulary_size=len(vocabulary))
    requests = [model.encode(tree, vocabulary) for tree in trees]
    return Workload(requests, _counts([request["words"] for request in requests]), len(vocabulary), source)


def _in_file_order(name: str, data: Sequence[Path], lengths: str | None, count: int | None, seed: int) -> Workload:
    """Return one of ED-Batch's workloads in the form for learning: one file at most."""
    if len(data) > 1 or lengths:
        raise OptionError(f"{name} takes one file (--data FILE), or generates requests of its own lengths")
    fitted = fit(name, data[0] if data else None, count=None if data else count, seed=seed)
    sizes = dict(fitted.options)
    vocabulary_size = int(sizes.pop("vocabulary_size"))
    with torch.device("meta"):  # encoding needs the options, not the weights
        requests = fitted.requests(zoo.make(name, **fitted.options, hidden=2, seed=seed))
    chains = np.array([[num_cells(request)] for request in requests], np.int64)
    return Workload(requests, chains, vocabulary_size, fitted.source, sizes)


def _ones(count: int) -> NDArray[np.int64]:
    return np.ones((count, 1), np.int64)


def _counts(sentences: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.array([[len(sentence)] for sentence in sentences], np.int64)
