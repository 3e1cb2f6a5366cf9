import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmaker.errors import DataError
from batchmaker.lab.datasets import (
    Tree,
    parse_tree,
    random_binary_tree,
    read_lines,
    read_trees,
    to_sexpr,
    tree_depth,
)

WORDS = st.text(st.characters(codec="utf-8", exclude_characters=" \t\r\n()"), min_size=1, max_size=5)


def test_leaves_are_numbered_first_and_children_before_parents():
    tree = parse_tree("(3 (2 (1 The) (2 Rock)) (4 (0 is) (2 .)))")
    assert tree.words == ("The", "Rock", "is", ".")
    assert tree.children.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert tree.labels.tolist() == [1, 2, 0, 2, 2, 4, 3]
    assert (tree.children.dtype, tree.labels.dtype) == (np.int32, np.int64)


def test_one_leaf_is_a_tree():
    tree = parse_tree("(4 Good)")
    assert tree.words == ("Good",)
    assert tree.children.shape == (0, 2)
    assert tree.labels.tolist() == [4]


def test_escapes_numbers_and_other_blanks_are_plain_words():
    text = "(1 (2 -LRB-) (0 (2 and\\/or) (-7 (2 12) (2 8\u00a01/2))))"
    tree = parse_tree(text)
    assert tree.words == ("-LRB-", "and\\/or", "12", "8\u00a01/2")
    assert to_sexpr(tree) == text


def test_blanks_between_brackets_do_not_matter():
    assert parse_tree("  ( 3(2 a )\t(1  b) )\n") == parse_tree("(3 (2 a) (1 b))")


@given(st.data(), st.integers(1, 40), st.integers(0, 2**32))
def test_a_tree_comes_back_from_its_brackets(data, num_leaves, seed):
    form = random_binary_tree(num_leaves, seed)
    words = data.draw(st.lists(WORDS, min_size=num_leaves, max_size=num_leaves))
    tree = Tree(tuple(words), form.children, form.labels - 2)
    assert parse_tree(to_sexpr(tree)) == tree


def test_a_very_deep_tree_needs_no_recursion():
    depth = 20_000
    text = "(0 " * depth + "(1 a)" + " (2 b))" * depth
    tree = parse_tree(text)
    assert tree_depth(tree) == depth + 1
    assert to_sexpr(tree) == text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", r"column 1: .*empty"),
        ("  ", r"column 1: .*empty"),
        ("()", r"column 1: .*empty"),
        ("(3)", r"column 1: .*empty"),
        ("(3 (2 a) ())", r"column 10: .*empty"),
        ("((2 a) (2 b))", r"column 1: .*missing label"),
        ("(2 (a) (2 b))", r"column 4: got the label 'a', .*missing label"),
        ("(NP (2 a) (2 b))", r"column 1: got the label 'NP'"),
        ("(1234567890123456789 a)", r"column 1: .*at most 18 digits"),
        ("(2", r"column 1: .*unbalanced"),
        ("(2 a", r"column 1: .*unbalanced"),
        ("(", r"column 1: .*unbalanced"),
        ("(3 (2 a) (4 (2 b) (2 c))", r"column 1: .*unbalanced"),
        ("(2 a))", r"column 6: .*unbalanced"),
        (")", r"column 1: .*unbalanced"),
        ("(3 (2 a))", r"column 1: got a node with 1 children; .*not binary"),
        ("(3 (2 a) (1 (2 b) (2 c) (2 d)))", r"column 10: got a node with 3 children; .*not binary"),
        ("(2 a b)", r"column 1: .*neither"),
        ("(3 a (2 b))", r"column 1: .*neither"),
        ("(3 (2 a) b)", r"column 10: got the bare word 'b'"),
        ("a", r"column 1: got the bare word 'a'"),
        ("(2 a) (2 b)", r"column 7: .*after the end"),
        ("(2 a) b", r"column 7: .*after the end"),
    ],
)
def test_a_malformed_tree_is_explained(text, complaint):
    with pytest.raises(DataError, match=complaint):
        parse_tree(text)


@given(st.text("(()) 2a\t\u00a0-", max_size=30))
def test_any_text_is_a_tree_or_a_data_error(text):
    try:
        tree = parse_tree(text)
    except DataError:
        return
    assert parse_tree(to_sexpr(tree)) == tree


@pytest.mark.parametrize("word", ["", "a b", "(", "a\n"])
def test_a_word_that_brackets_cannot_hold_is_refused(word):
    tree = Tree((word,), np.empty((0, 2), np.int32), np.zeros(1, np.int64))
    with pytest.raises(DataError, match="no bracket or blank"):
        to_sexpr(tree)


def test_a_file_has_one_tree_a_line(write):
    assert [t.words for t in read_trees(write("(1 a)\n\n(3 (2 b) (2 c))\n"))] == [("a",), ("b", "c")]


def test_file_line_and_column_of_a_malformed_tree_are_named(write):
    with pytest.raises(DataError, match=r"data\.txt, line 3, column 4: got the label 'x'"):
        read_trees(write("(1 a)\n\n(3 (x b) (2 c))\n"))


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_trees_is_refused(write, content):
    with pytest.raises(DataError, match=r"data\.txt: the file has no trees"):
        read_trees(write(content))


@pytest.mark.slow
def test_the_sentiment_treebank_is_read_whole(real_data):
    path = real_data("sst/train.txt")
    trees = read_trees(path)
    assert len(trees) == 8544
    assert max(tree.num_leaves for tree in trees) == 52
    assert np.mean([tree.num_leaves for tree in trees]) == pytest.approx(19.1, abs=0.05)
    assert np.mean([tree_depth(tree) for tree in trees]) == pytest.approx(10.8, abs=0.05)
    assert [to_sexpr(tree) for tree in trees] == read_lines(path)
