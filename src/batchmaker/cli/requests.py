"""Requests of ED-Batch's eight workloads in the order of their files, and the models that fit them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from batchmaker.cli import options
from batchmaker.errors import DataError, OptionError, unknown_name
from batchmaker.lab.datasets import (
    NUM_RESERVED,
    Lattice,
    SentencePair,
    TaggedSentence,
    Tree,
    Vocabulary,
    europarl_lengths,
    lattice_of,
    random_lattices,
    random_sentences,
    random_tagged_sentences,
    random_trees,
    read_aligned,
    read_lattices,
    read_numbered_characters,
    read_tagged,
    read_trees,
    read_word_list,
    translation_lengths,
)
from batchmaker.model.model import Model

TREES: Final = ("treelstm", "treelstm-2type", "treegru", "mvrnn")
TAGGERS: Final = ("bilstm-tagger", "bilstm-tagger-char")
LATTICES: Final = ("latticelstm", "latticegru")
WORKLOADS: Final = (*TAGGERS, "lstm-nmt", *TREES, *LATTICES)
GENERATED: Final = 512
"""Default number of generated requests."""
GENERATED_WORDS: Final = 1000
RARE: Final = 5
"""A tagger with characters spells words that were seen less often than this."""
MATRICES: Final = 1000
"""Words with a matrix of their own in an MV-RNN, the most frequent ones; all others share that of the unknown word."""
MAX_ARITY: Final = 8


@final
@dataclass(frozen=True, slots=True)
class ModelRequests:
    """A model and its requests, in the order of the file. source: in words."""

    model: Model
    requests: Sequence[Any]
    source: str


@final
@dataclass(frozen=True, slots=True)
class Fitted:
    """Items of data, the options of a model for them, and the model's encoding of one item. source: in words."""

    items: Sequence[Any]
    options: dict[str, Any]
    encode: Callable[[Any, Any], Any]
    source: str

    def requests(self, model: Model) -> list[Any]:
        """Return the requests for a model made with the options."""
        return [self.encode(model, item) for item in self.items]


def requests_from(
    name: str,
    path: Path | None = None,
    *,
    words: Path | None = None,
    count: int | None = None,
    seed: int = 0,
    **model_options: Any,
) -> ModelRequests:
    """Return a new model and its requests in the order of a file, for closed mini-batches.

    path: trees in brackets (treelstm, treelstm-2type, treegru, mvrnn), all with an output node for every node; lines of
    word|TAG (bilstm-tagger, and -char, which counts words in the `train.txt` beside the file if there is one); the
    source of two aligned files with the same stem (lstm-nmt); lattices of ED-Batch's form, or, with `words`, a list of
    words, CoNLL columns of numbered characters (latticelstm, latticegru). None generates from `seed`. count: only the
    first `count`. model_options: such as hidden; those that are None keep their defaults. Raises
    DataError, naming file and line, and OptionError.
    """
    fitted = fit(name, path, words=words, count=count, seed=seed)
    model = options.make_model(name, **{**fitted.options, "seed": seed, **model_options})
    return ModelRequests(model, fitted.requests(model), fitted.source)


def num_cells(request: Any) -> int:
    """Return the number of cells in one of these requests, if trees and lattices have all their output nodes."""
    if not isinstance(request, dict):  # a sentence, in both directions
        return 3 * len(request)
    if "arcs" in request:
        arcs = np.bincount(request["arcs"][:, 1])
        return int(arcs.sum() + (arcs > 1).sum() + (arcs > 0).sum())
    if "spellings" in request:
        return 4 * len(request["words"]) + 2 * sum(map(len, request["spellings"]))
    return 2 * (len(request["words"]) + len(request["children"]))


def fit(name: str, path: Path | None, *, words: Path | None = None, count: int | None = None, seed: int = 0) -> Fitted:
    """Return the items of a file, or generated ones, and the model options for them; as `requests_from`."""
    if name not in WORKLOADS:
        raise unknown_name("workload", name, WORKLOADS)
    if count is not None and count < 1:
        raise OptionError(f"count must be at least 1, got {count}")
    if words is not None and (name not in LATTICES or path is None):
        raise lattice_words_misplaced()
    number = GENERATED if count is None else count
    if name in TREES:
        items, fitted, encode = _trees(name, path, number, seed)
    elif name in TAGGERS:
        items, fitted, encode = _sentences(name, path, number, seed)
    elif name in LATTICES:
        items, fitted, encode = _lattices(path, words, number, seed)
    else:
        items, fitted, encode = _pairs(path, number, seed)
    kind = {TREES: "trees", TAGGERS: "sentences", LATTICES: "lattices"}
    generated = next((what for names, what in kind.items() if name in names), "pairs")
    return Fitted(items[:count], fitted, encode, f"generated {generated}" if path is None else path.name)


def lattice_words_misplaced() -> OptionError:
    """Return the error for a list of words without lattices."""
    return OptionError(f"a list of words makes lattices ({', '.join(LATTICES)}) of the sentences of a file")


Found = tuple[Sequence[Any], dict[str, Any], Callable[[Any, Any], Any]]


def _trees(name: str, path: Path | None, number: int, seed: int) -> Found:
    trees = random_trees(number, seed, vocabulary=GENERATED_WORDS) if path is None else read_trees(path)
    most = MATRICES if name == "mvrnn" else None
    vocabulary = Vocabulary.from_sentences((tree.words for tree in trees), max_size=most)

    def encode(model: Any, tree: Tree) -> Any:
        return model.encode(tree, vocabulary)

    labels = 1 + max(int(tree.labels.max()) for tree in trees)
    return trees, {"vocabulary_size": len(vocabulary), "labels": labels, "output": "labels"}, encode


def _sentences(name: str, path: Path | None, number: int, seed: int) -> Found:
    if path is None:
        sentences = random_tagged_sentences(europarl_lengths(number, seed), seed)
        counted = sentences
    else:
        sentences = read_tagged(path)
        training = path.with_name("train.txt")
        counted = read_tagged(training) if training.exists() and training != path else sentences
    seen = Counter(word for sentence in counted for word in sentence.words)
    tags = {tag for sentence in (*counted, *sentences) for tag in sentence.tags}
    if name != "bilstm-tagger-char":
        vocabulary = Vocabulary.from_sentences(sentence.words for sentence in counted)
        fitted = {"vocabulary_size": len(vocabulary), "labels": len(tags)}
        return sentences, fitted, lambda model, sentence: model.encode(sentence, vocabulary)
    frequent = sum(times >= RARE for times in seen.values())
    vocabulary = Vocabulary.from_sentences((s.words for s in counted), max_size=NUM_RESERVED + max(frequent, 1))
    alphabet = Vocabulary.from_sentences([list(word) for word in seen])

    def encode(model: Any, sentence: TaggedSentence) -> Any:
        return model.encode(sentence, vocabulary, alphabet)

    return sentences, {"vocabulary_size": len(vocabulary), "alphabet": len(alphabet), "labels": len(tags)}, encode


def _pairs(path: Path | None, number: int, seed: int) -> Found:
    if path is None:
        lengths = europarl_lengths(number, seed)
        sources = random_sentences(lengths, GENERATED_WORDS, seed)
        targets = translation_lengths(lengths, seed).tolist()
        pairs = [
            SentencePair(" ".join(f"w{word}" for word in source.tolist()), "w " * target, line)
            for line, (source, target) in enumerate(zip(sources, targets, strict=True), start=1)
        ]
    else:
        pairs = list(read_aligned(path, _other_side(path)).pairs)
    vocabulary = Vocabulary.from_sentences(pair.source_tokens for pair in pairs)
    target_words = Vocabulary.from_sentences(pair.target_tokens for pair in pairs)
    size = max(len(vocabulary), len(target_words))
    return pairs, {"vocabulary_size": size}, lambda model, pair: model.encode(pair, vocabulary)


def _other_side(path: Path) -> Path:
    """Return the only other file with the stem of `path` beside it. DataError if there is none, or several."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such file. Check the path.")
    others = [other for other in sorted(path.parent.glob(f"{path.stem}.*")) if other != path]
    if len(others) != 1:
        names = ", ".join(other.name for other in others) or "none"
        raise DataError(f"{path}: expected one other file {path.stem}.* beside it, its translation; found {names}.")
    return others[0]


def _lattices(path: Path | None, words: Path | None, number: int, seed: int) -> Found:
    lattices: Sequence[Lattice]
    if path is None:
        lattices = random_lattices(number, seed)
    elif words is None:
        lattices = read_lattices(path)
    else:
        lattices = _lattices_of_sentences(path, words)
    for place, lattice in enumerate(lattices, start=1):
        if len(lattice.arcs) == 0:
            raise DataError(f"{path}: lattice {place} has no arcs; expected at least one.")
    arcs = np.concatenate([lattice.arcs for lattice in lattices])
    are_characters = np.concatenate([lattice.are_characters for lattice in lattices])
    arities = [int(np.bincount(lattice.arcs[:, 1]).max()) for lattice in lattices]
    fitted = {
        "vocabulary_size": 1 + int(arcs[are_characters, 2].max(initial=0)),
        "words": 1 + int(arcs[~are_characters, 2].max(initial=0)),
        "labels": 1 + max(int(lattice.labels.max()) for lattice in lattices),
        "max_arity": max(MAX_ARITY, *arities),
    }
    return lattices, fitted, lambda model, lattice: model.encode(lattice)


def _lattices_of_sentences(path: Path, words: Path) -> list[Lattice]:
    sentences = read_numbered_characters(path)
    word_list = read_word_list(words)
    vocabulary = Vocabulary.from_sentences(sentence.words for sentence in sentences)
    tags = {tag: number for number, tag in enumerate(sorted({tag for s in sentences for tag in s.tags}))}
    lattices = [
        lattice_of(s.words, word_list, vocabulary, np.array([tags[tag] for tag in s.tags], np.int64)) for s in sentences
    ]
    return _with_used_words(lattices)


def _with_used_words(lattices: Sequence[Lattice]) -> list[Lattice]:
    """Return the lattices with new ids for the words in use, so that a model has no weights for unused words.

    In the Weibo sentences 8 000 of 337 000 are used.
    """
    used = np.unique(np.concatenate([lattice.arcs[~lattice.are_characters, 2] for lattice in lattices]))
    renewed: list[Lattice] = []
    for lattice in lattices:
        arcs = lattice.arcs.copy()
        arcs[~lattice.are_characters, 2] = np.searchsorted(used, arcs[~lattice.are_characters, 2])
        renewed.append(Lattice(arcs, lattice.labels))
    return renewed
