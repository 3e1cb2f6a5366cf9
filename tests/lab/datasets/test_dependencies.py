"""Dependency trees: from CoNLL-U, checked, and generated."""

import numpy as np
import pytest

from batchmaker.errors import DataError
from batchmaker.lab.datasets import DependencyTree, random_dependencies, read_conllu


def line(number, word, head):
    return "\t".join([str(number), word, "_", "_", "_", "_", str(head), "_", "_", "_"]) + "\n"


def test_words_and_heads_are_read_and_ranges_and_empty_nodes_are_not(write):
    text = "# text = can't go\n" + line("1-2", "can't", "_") + line(1, "ca", 3) + line(2, "n't", 3)
    text += line(3, "go", 0) + line("3.1", "went", "_") + "\n" + line(1, "yes", 0)
    found = read_conllu(write(text))
    assert found == [
        DependencyTree(("ca", "n't", "go"), np.array([3, 3, 0])),
        DependencyTree(("yes",), np.array([0])),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\ta\t0\n", r"data\.txt, line 1: got 3 columns, expected 10"),
        (line(2, "a", 0), "line 1: got word '2' with head '0', expected word 1"),
        (line(1, "a", "x"), "got word '1' with head 'x'"),
        (line(1, "a", 2) + line(2, "b", 1), r"the sentence before line 3.*words \[\] have head 0"),
        ("# nothing\n", "found no sentence"),
    ],
)
def test_a_line_that_is_none_is_named(write, text, message):
    with pytest.raises(DataError, match=message):
        read_conllu(write(text))


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ([0, 0], r"words \[1, 2\] have head 0, expected one root"),
        ([0, 3], "the head of word 2 is 3, expected 0 to 2"),
        ([0, 3, 2], "heads of word 2 lead into a cycle"),
        ([], "expected int64, as many as words"),
    ],
)
def test_heads_that_make_no_tree_are_refused(heads, message):
    with pytest.raises(DataError, match=message):
        DependencyTree(("a",) * len(heads), np.array(heads, np.int64))


def test_generated_trees_depend_on_the_seed_alone():
    one, other = random_dependencies(20, 1), random_dependencies(20, 1)
    assert one == other
    assert random_dependencies(20, 2) != one
    assert {len(tree.words) for tree in one} <= set(range(5, 31))
    assert max(np.bincount(tree.heads).max() for tree in one) > 2
