"""Readers of real data sets and seeded generators, in NumPy alone."""

from batchmaker.datasets.arrivals import mmpp_arrivals, poisson_arrivals, trace_arrivals
from batchmaker.datasets.generators import (
    EUROPARL_MAX_LENGTH,
    EUROPARL_MEAN_LENGTH,
    Seed,
    complete_tree,
    europarl_lengths,
    fixed_lengths,
    lazybatching_lengths,
    random_binary_tree,
    random_sentences,
    random_trees,
    translation_lengths,
)
from batchmaker.datasets.sexpr import parse_tree, read_trees, to_sexpr
from batchmaker.datasets.signals import librispeech_lengths, random_images, random_spectrograms
from batchmaker.datasets.text import AlignedText, SentencePair, read_aligned, read_lines, tokenize
from batchmaker.datasets.trees import Tree, tree_depth
from batchmaker.datasets.vocabulary import (
    BOS_ID,
    EOS_ID,
    NUM_RESERVED,
    RESERVED_WORDS,
    UNK_ID,
    Vocabulary,
)

__all__ = [
    "BOS_ID",
    "EOS_ID",
    "EUROPARL_MAX_LENGTH",
    "EUROPARL_MEAN_LENGTH",
    "NUM_RESERVED",
    "RESERVED_WORDS",
    "UNK_ID",
    "AlignedText",
    "Seed",
    "SentencePair",
    "Tree",
    "Vocabulary",
    "complete_tree",
    "europarl_lengths",
    "fixed_lengths",
    "lazybatching_lengths",
    "librispeech_lengths",
    "mmpp_arrivals",
    "parse_tree",
    "poisson_arrivals",
    "random_binary_tree",
    "random_images",
    "random_sentences",
    "random_spectrograms",
    "random_trees",
    "read_aligned",
    "read_lines",
    "read_trees",
    "to_sexpr",
    "tokenize",
    "trace_arrivals",
    "translation_lengths",
    "tree_depth",
]
