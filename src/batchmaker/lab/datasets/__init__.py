"""Readers of real data sets and seeded generators, in NumPy alone."""

from batchmaker.lab.datasets.arrivals import mmpp_arrivals, poisson_arrivals, trace_arrivals, with_season
from batchmaker.lab.datasets.dependencies import DependencyTree, read_conllu
from batchmaker.lab.datasets.generators import (
    EUROPARL_MAX_LENGTH,
    EUROPARL_MEAN_LENGTH,
    Seed,
    complete_tree,
    europarl_lengths,
    fixed_lengths,
    lazybatching_lengths,
    random_binary_tree,
    random_dependencies,
    random_lattices,
    random_sentences,
    random_tagged_sentences,
    random_trees,
    translation_lengths,
)
from batchmaker.lab.datasets.lattices import Lattice, read_lattices
from batchmaker.lab.datasets.sexpr import parse_tree, read_trees, to_sexpr
from batchmaker.lab.datasets.signals import librispeech_lengths, random_images, random_spectrograms
from batchmaker.lab.datasets.tags import TaggedSentence, read_columns, read_numbered_characters, read_tagged
from batchmaker.lab.datasets.text import AlignedText, SentencePair, read_aligned, read_lines, tokenize
from batchmaker.lab.datasets.trees import Tree, tree_depth
from batchmaker.lab.datasets.vocabulary import (
    BOS_ID,
    EOS_ID,
    NUM_RESERVED,
    RESERVED_WORDS,
    UNK_ID,
    Vocabulary,
)
from batchmaker.lab.datasets.words import WordList, lattice_of, read_word_list

__all__ = [
    "BOS_ID",
    "EOS_ID",
    "EUROPARL_MAX_LENGTH",
    "EUROPARL_MEAN_LENGTH",
    "NUM_RESERVED",
    "RESERVED_WORDS",
    "UNK_ID",
    "AlignedText",
    "DependencyTree",
    "Lattice",
    "Seed",
    "SentencePair",
    "TaggedSentence",
    "Tree",
    "Vocabulary",
    "WordList",
    "complete_tree",
    "europarl_lengths",
    "fixed_lengths",
    "lattice_of",
    "lazybatching_lengths",
    "librispeech_lengths",
    "mmpp_arrivals",
    "parse_tree",
    "poisson_arrivals",
    "random_binary_tree",
    "random_dependencies",
    "random_images",
    "random_lattices",
    "random_sentences",
    "random_spectrograms",
    "random_tagged_sentences",
    "random_trees",
    "read_aligned",
    "read_columns",
    "read_conllu",
    "read_lattices",
    "read_lines",
    "read_numbered_characters",
    "read_tagged",
    "read_trees",
    "read_word_list",
    "to_sexpr",
    "tokenize",
    "trace_arrivals",
    "translation_lengths",
    "tree_depth",
    "with_season",
]
