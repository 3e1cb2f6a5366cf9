import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmaker.errors import OptionError
from batchmaker.lab.datasets import (
    NUM_RESERVED,
    complete_tree,
    europarl_lengths,
    fixed_lengths,
    lazybatching_lengths,
    random_binary_tree,
    random_sentences,
    random_trees,
    translation_lengths,
)

SEEDS = st.integers(0, 2**32)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_europarl_lengths_meet_the_published_figures(seed):
    lengths = europarl_lengths(20_000, seed)
    assert lengths.dtype == np.int64
    assert lengths.min() >= 1
    assert lengths.max() <= 330
    assert lengths.mean() == pytest.approx(24, abs=1)
    assert 0.985 <= (lengths < 100).mean() <= 0.999


@pytest.mark.parametrize("clip", [1, 50, 100])
def test_clipped_lengths_are_the_same_ones_shortened(clip):
    clipped = europarl_lengths(1000, seed=3, clip=clip)
    assert (clipped == np.minimum(europarl_lengths(1000, seed=3), clip)).all()


def test_fixed_lengths_are_all_the_same():
    assert fixed_lengths(3).tolist() == [24, 24, 24]
    assert fixed_lengths(2, length=7).tolist() == [7, 7]


def test_the_same_seed_gives_the_same_values_and_another_does_not():
    assert (europarl_lengths(50, 1) == europarl_lengths(50, 1)).all()
    assert (europarl_lengths(50, 1) != europarl_lengths(50, 2)).any()
    assert random_trees(5, 1) == random_trees(5, 1)
    assert random_trees(5, 1) != random_trees(5, 2)


def test_a_generator_given_as_seed_is_drawn_from():
    generator = np.random.default_rng(0)
    assert (europarl_lengths(50, generator) != europarl_lengths(50, generator)).any()


def test_targets_are_about_as_long_as_their_sources():
    sources = europarl_lengths(20_000, seed=0)
    targets = translation_lengths(sources, seed=1)
    assert targets.dtype == np.int64
    assert targets.min() >= 1
    assert targets.mean() / sources.mean() == pytest.approx(np.exp(0.15**2 / 2), abs=0.02)
    assert np.corrcoef(sources, targets)[0, 1] > 0.95


def test_targets_without_spread_equal_their_sources():
    assert translation_lengths([1, 5, 9], seed=0, sigma=0).tolist() == [1, 5, 9]


@given(st.lists(st.integers(1, 20)), st.integers(4, 50), SEEDS, st.sampled_from(["zipf", "uniform"]))
def test_sentences_have_their_lengths_and_no_reserved_word(lengths, vocabulary_size, seed, distribution):
    sentences = random_sentences(lengths, vocabulary_size, seed, distribution)
    assert [len(sentence) for sentence in sentences] == lengths
    for sentence in sentences:
        assert sentence.dtype == np.int64
        assert sentence.min() >= NUM_RESERVED
        assert sentence.max() < vocabulary_size


def test_zipf_words_fall_off_with_rank_and_uniform_ones_do_not():
    (zipf,) = random_sentences([100_000], 1003, seed=0)
    (uniform,) = random_sentences([100_000], 1003, seed=0, distribution="uniform")
    counts = np.bincount(zipf, minlength=1003)
    assert counts[3] / counts[12] == pytest.approx(10, rel=0.15)
    assert np.bincount(uniform)[3:].max() < 160


@given(st.integers(1, 40), SEEDS)
def test_a_random_tree_joins_neighbouring_spans(num_leaves, seed):
    tree = random_binary_tree(num_leaves, seed, vocabulary=9)
    assert tree.num_leaves == num_leaves
    assert set(tree.words) <= {f"w{i}" for i in range(9)}
    assert set(tree.labels.tolist()) <= set(range(5))
    spans = [(leaf, leaf + 1) for leaf in range(num_leaves)]
    for left, right in tree.children.tolist():
        assert spans[left][1] == spans[right][0]
        spans.append((spans[left][0], spans[right][1]))
    assert spans[-1] == (0, num_leaves)


def test_words_are_drawn_from_the_given_ones():
    assert set(random_binary_tree(50, 0, vocabulary=["yes", "no"]).words) == {"yes", "no"}


def test_random_trees_have_sizes_within_their_bounds():
    sizes = {tree.num_leaves for tree in random_trees(200, seed=0, min_leaves=3, max_leaves=6)}
    assert sizes == {3, 4, 5, 6}
    assert random_trees(0, seed=0) == []


def test_a_complete_tree_is_numbered_level_by_level():
    tree = complete_tree(8)
    assert tree.children.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13]]
    assert complete_tree(1).num_nodes == 1
    assert complete_tree() == complete_tree(16)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: europarl_lengths(-1, 0), "n: got -1, expected at least 0"),
        (lambda: europarl_lengths(1, -5), "seed: got -5, expected at least 0"),
        (lambda: europarl_lengths(1, 0, clip=0), "clip: got 0, expected at least 1"),
        (lambda: fixed_lengths(1, 0), "length: got 0"),
        (lambda: translation_lengths([0], 0), "source_lengths: expected"),
        (lambda: translation_lengths([[1]], 0), "source_lengths: expected"),
        (lambda: translation_lengths([1.5], 0), "source_lengths: expected"),
        (lambda: translation_lengths([1], 0, sigma=-1), "sigma: got -1"),
        (lambda: translation_lengths([1], 0, sigma=float("nan")), "sigma: got nan"),
        (lambda: random_sentences([1], 3, 0), "vocabulary_size: got 3, expected at least 4"),
        (lambda: random_sentences([1], 9, 0, "zip"), "unknown distribution 'zip'.*Did you mean 'zipf'"),
        (lambda: random_binary_tree(0, 0), "num_leaves: got 0"),
        (lambda: random_binary_tree(1, 0, vocabulary=[]), "vocabulary: got 0, expected at least 1"),
        (lambda: random_trees(1, 0, min_leaves=0), "min_leaves: got 0"),
        (lambda: random_trees(1, 0, min_leaves=5, max_leaves=4), "max_leaves: got 4, expected at least 5"),
        (lambda: complete_tree(12), "got 12, expected a power of two"),
    ],
)
def test_an_argument_out_of_range_is_refused(call, complaint):
    with pytest.raises(OptionError, match=complaint):
        call()


def test_lengths_of_lazybatching_are_a_function_of_the_seed():
    source, target = lazybatching_lengths(1000, 3)
    again = lazybatching_lengths(1000, 3)
    assert (source == again[0]).all()
    assert (target == again[1]).all()
    assert (source.dtype, target.dtype) == (np.int64, np.int64)
    assert source.min() >= 1
    assert source.max() <= 80
    assert np.corrcoef(source, target)[0, 1] > 0.9
    assert [len(part) for part in lazybatching_lengths(0, 3)] == [0, 0]
