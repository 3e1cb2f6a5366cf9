"""Seeded lengths, sentences, trees and lattices, if no real data is at hand.

Every function depends on its arguments only: the same seed gives the same values. A `seed` is an int or a
`numpy.random.Generator`, which is then drawn from. Arguments out of range raise OptionError.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchmaker.errors import OptionError, unknown_name
from batchmaker.lab.datasets.dependencies import DependencyTree
from batchmaker.lab.datasets.lattices import Lattice
from batchmaker.lab.datasets.tags import TaggedSentence
from batchmaker.lab.datasets.trees import Tree
from batchmaker.lab.datasets.vocabulary import NUM_RESERVED

Seed: TypeAlias = int | np.random.Generator

EUROPARL_MEAN_LENGTH: Final = 24
EUROPARL_MAX_LENGTH: Final = 330
# A lognormal of mean 24 has 99.1 % of its mass under 100 at this width, and all but 2e-5 up to 330.
_EUROPARL_SIGMA: Final = 0.7
_LAZYBATCHING_MEDIAN: Final = 16.5
_LAZYBATCHING_SIGMA: Final = 0.5
_LAZYBATCHING_MAX_LENGTH: Final = 80
_WORD_SHARES: Final = {2: 0.42, 3: 0.07, 4: 0.03}  # share of places where a word of this length ends, as in ED-Batch's
_NUM_LABELS: Final = 5  # sentiment 0 to 4, as in the Stanford treebank


def europarl_lengths(n: int, seed: Seed, clip: int | None = None) -> NDArray[np.int64]:
    """Return sentence lengths distributed like those of WMT-15 Europarl: [n] int64, in tokens, 1 to 330.

    A clipped lognormal that meets the published figures: mean 24, maximum 330, about 99 % under 100. `clip` shortens
    longer sentences to that many tokens. Source: BatchMaker (EuroSys 2018), section 7.1 and figure 10; figure 11 for
    clips of 50 and 100.
    """
    _at_least("n", n, 0)
    longest = EUROPARL_MAX_LENGTH if clip is None else min(_at_least("clip", clip, 1), EUROPARL_MAX_LENGTH)
    mu = math.log(EUROPARL_MEAN_LENGTH) - _EUROPARL_SIGMA**2 / 2
    raw = _generator(seed).lognormal(mu, _EUROPARL_SIGMA, size=n)
    return np.clip(np.rint(raw), 1, longest).astype(np.int64)


def fixed_lengths(n: int, length: int = EUROPARL_MEAN_LENGTH) -> NDArray[np.int64]:
    """Return n times the same length: [n] int64, in tokens (BatchMaker, figure 11: length 24)."""
    return np.full(_at_least("n", n, 0), _at_least("length", length, 1), dtype=np.int64)


def translation_lengths(source_lengths: ArrayLike, seed: Seed, sigma: float = 0.15) -> NDArray[np.int64]:
    """Return a target length for each source length: source x lognormal(0, sigma), rounded, at least 1.

    source_lengths: [n] integers, in tokens. Returns [n] int64.
    """
    if not (math.isfinite(sigma) and sigma >= 0):
        raise OptionError(f"sigma: got {sigma}, expected a finite number of at least 0.")
    lengths = _lengths("source_lengths", source_lengths)
    ratios = _generator(seed).lognormal(0.0, sigma, size=lengths.shape)
    return np.maximum(np.rint(lengths * ratios), 1).astype(np.int64)


def lazybatching_lengths(count: int, seed: Seed) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return lengths of sentences and translations as described by LazyBatching: [count] int64 each, in tokens.

    90 % of the translations are within 32 words and not within 31, 16 % within 10 and not within 9. Sources are
    lognormal around 16.5, at most 80; a translation is its source x lognormal(0, 0.15). Source: LazyBatching (HPCA
    2021), figure 11 and its dec_timesteps.
    """
    generator = _generator(seed)
    raw = generator.lognormal(math.log(_LAZYBATCHING_MEDIAN), _LAZYBATCHING_SIGMA, size=_at_least("count", count, 0))
    source = np.clip(np.rint(raw), 1, _LAZYBATCHING_MAX_LENGTH).astype(np.int64)
    return source, translation_lengths(source, generator)


def random_sentences(
    lengths: ArrayLike,
    vocabulary_size: int,
    seed: Seed,
    distribution: Literal["zipf", "uniform"] = "zipf",
) -> list[NDArray[np.int64]]:
    """Return one sentence of token ids per length: [length] int64 each, never a reserved id.

    lengths: [n] integers, in tokens. vocabulary_size: number of ids, reserved ones included; ids are drawn from
    NUM_RESERVED up to it. distribution: "zipf" draws the k-th ordinary word in proportion to 1/k, as in a vocabulary
    ranked by frequency; "uniform" draws all with the same probability. The sentences are views of one array and do not
    overlap.
    """
    counts = _lengths("lengths", lengths)
    num_words = _at_least("vocabulary_size", vocabulary_size, NUM_RESERVED + 1) - NUM_RESERVED
    generator, total = _generator(seed), int(counts.sum())
    if distribution == "uniform":
        words = generator.integers(0, num_words, size=total)
    elif distribution == "zipf":
        cumulative = np.cumsum(1.0 / np.arange(1, num_words + 1))
        words = np.searchsorted(cumulative, generator.random(total) * cumulative[-1], side="right")
        words = np.minimum(words, num_words - 1)  # rounding can reach the end of the range
    else:
        raise unknown_name("distribution", distribution, ("zipf", "uniform"))
    tokens = words.astype(np.int64) + NUM_RESERVED
    return np.split(tokens, np.cumsum(counts)[:-1]) if counts.size else []


def random_binary_tree(num_leaves: int, seed: Seed, vocabulary: int | Sequence[str] = 1000) -> Tree:
    """Return a tree in which each span is split at a uniformly drawn place.

    So it is neither flat nor balanced. vocabulary: the words to draw from, or their number for "w0", "w1", ... Labels
    are uniform, 0 to 4. Internal nodes are in postorder.
    """
    generator = _generator(seed)
    children = np.empty((_at_least("num_leaves", num_leaves, 1) - 1, 2), dtype=np.int32)
    cuts = generator.random(num_leaves - 1)
    # A node takes its own number, then the right span is numbered before the left: postorder from the back.
    free = num_leaves - 2
    todo = [(0, num_leaves, -1, 0)]  # first leaf, leaf after the last, parent, side
    while todo:
        first, end, parent, side = todo.pop()
        node = first
        if end - first > 1:
            node = num_leaves + free
            cut = first + 1 + int(cuts[free] * (end - first - 1))
            todo += ((first, cut, free, 0), (cut, end, free, 1))
            free -= 1
        if parent >= 0:
            children[parent, side] = node
    return _dressed(children, generator, vocabulary)


def random_trees(
    n: int,
    seed: Seed,
    min_leaves: int = 10,
    max_leaves: int = 30,
    vocabulary: int | Sequence[str] = 1000,
) -> list[Tree]:
    """Return n trees of `random_binary_tree` with uniform numbers of leaves from min_leaves to max_leaves."""
    _at_least("max_leaves", max_leaves, _at_least("min_leaves", min_leaves, 1))
    generator = _generator(seed)
    sizes = generator.integers(min_leaves, max_leaves, size=_at_least("n", n, 0), endpoint=True)
    return [random_binary_tree(size, generator, vocabulary) for size in sizes.tolist()]


def random_dependencies(
    n: int, seed: Seed, min_words: int = 5, max_words: int = 30, vocabulary: int | Sequence[str] = 1000
) -> list[DependencyTree]:
    """Return n random recursive trees with uniform numbers of words from min_words to max_words.

    Each word but the root has as its head one drawn uniformly of those before it, in a random order of the words.
    Words as in `random_binary_tree`.
    """
    _at_least("max_words", max_words, _at_least("min_words", min_words, 1))
    generator, trees = _generator(seed), list[DependencyTree]()
    for size in generator.integers(min_words, max_words, size=_at_least("n", n, 0), endpoint=True).tolist():
        order = generator.permutation(size)
        heads = np.zeros(size, np.int64)
        heads[order[1:]] = order[(generator.random(size - 1) * np.arange(1, size)).astype(np.int64)] + 1
        trees.append(DependencyTree(_words(size, generator, vocabulary), heads))
    return trees


def complete_tree(num_leaves: int = 16, seed: Seed = 0, vocabulary: int | Sequence[str] = 1000) -> Tree:
    """Return the complete tree with this number of leaves, a power of two; internal nodes level by level.

    Words and labels as in `random_binary_tree`. Source: the identical trees of BatchMaker, figure 15.
    """
    if _at_least("num_leaves", num_leaves, 1) & (num_leaves - 1):
        raise OptionError(f"num_leaves: got {num_leaves}, expected a power of two.")
    # Level by level, nodes 2j and 2j + 1 are the children of internal node j.
    children = np.arange(2 * (num_leaves - 1), dtype=np.int32).reshape(-1, 2)
    return _dressed(children, _generator(seed), vocabulary)


def random_lattices(
    n: int,
    seed: Seed,
    min_characters: int = 10,
    max_characters: int = 60,
    num_characters: int = 1000,
    num_words: int = 5000,
) -> list[Lattice]:
    """Return n lattices with uniform numbers of characters from min_characters to max_characters.

    At each place a word of 2, 3 or 4 characters may end, with the shares of ED-Batch's lattices: about half a word for
    each character. Ids are uniform below num_characters and num_words, all labels 0.
    """
    _at_least("max_characters", max_characters, _at_least("min_characters", min_characters, 1))
    _at_least("num_characters", num_characters, 1)
    _at_least("num_words", num_words, 1)
    generator = _generator(seed)
    sizes = generator.integers(min_characters, max_characters, size=_at_least("n", n, 0), endpoint=True)
    lattices: list[Lattice] = []
    for size in sizes.tolist():
        place = np.arange(1, size + 1)
        rows = [np.stack((place - 1, place, generator.integers(0, num_characters, size)), 1)]
        for length, share in _WORD_SHARES.items():
            target = place[(generator.random(size) < share) & (place >= length)]
            rows.append(np.stack((target - length, target, generator.integers(0, num_words, len(target))), 1))
        arcs = np.concatenate(rows).astype(np.int64)
        order = np.argsort(arcs[:, 1], kind="stable")
        lattices.append(Lattice(arcs[order], np.zeros(size + 1, np.int64)))
    return lattices


def random_tagged_sentences(
    lengths: ArrayLike, seed: Seed, vocabulary: int = 5000, tags: Sequence[str] = ("O", "I-PER", "I-LOC", "I-ORG")
) -> list[TaggedSentence]:
    """Return one sentence of words per length, drawn as in `random_sentences`, with a uniformly drawn tag per word.

    The words are `w1`, `w2`, ... up to `vocabulary`, in order of frequency.
    """
    _at_least("tags", len(tags), 1)
    generator = _generator(seed)
    sentences = random_sentences(lengths, _at_least("vocabulary", vocabulary, 1) + NUM_RESERVED, generator)
    return [
        TaggedSentence(
            tuple(f"w{word - NUM_RESERVED + 1}" for word in sentence.tolist()),
            tuple(tags[i] for i in generator.integers(0, len(tags), len(sentence)).tolist()),
        )
        for sentence in sentences
    ]


def _dressed(children: NDArray[np.int32], generator: np.random.Generator, vocabulary: int | Sequence[str]) -> Tree:
    """Return the tree of this form with drawn words and labels."""
    num_leaves = len(children) + 1
    words = _words(num_leaves, generator, vocabulary)
    return Tree(words, children, generator.integers(0, _NUM_LABELS, size=2 * num_leaves - 1))


def _words(count: int, generator: np.random.Generator, vocabulary: int | Sequence[str]) -> tuple[str, ...]:
    num_words = vocabulary if isinstance(vocabulary, int) else len(vocabulary)
    numbers = generator.integers(0, _at_least("vocabulary", num_words, 1), size=count).tolist()
    return tuple([f"w{i}" for i in numbers] if isinstance(vocabulary, int) else [vocabulary[i] for i in numbers])


def _generator(seed: Seed) -> np.random.Generator:
    if isinstance(seed, int):
        _at_least("seed", seed, 0)
    return np.random.default_rng(seed)


def _at_least(name: str, value: int, least: int) -> int:
    if value < least:
        raise OptionError(f"{name}: got {value}, expected at least {least}.")
    return value


def _lengths(name: str, lengths: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(lengths)
    if array.ndim != 1 or (array.size and (array.dtype.kind not in "iu" or array.min() < 1)):
        raise OptionError(f"{name}: expected a one-dimensional list of integers of at least 1.")
    return array.astype(np.int64)
