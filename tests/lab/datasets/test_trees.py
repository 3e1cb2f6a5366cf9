import numpy as np
import pytest

from batchmaker.errors import DataError
from batchmaker.lab.datasets import Tree, complete_tree, random_trees, tree_depth


def tree(num_leaves, children, children_dtype=np.int32, labels_dtype=np.int64, num_labels=None):
    return Tree(
        words=tuple("abcdefgh"[:num_leaves]),
        children=np.array(children, dtype=children_dtype).reshape(-1, 2),
        labels=np.zeros(2 * num_leaves - 1 if num_labels is None else num_labels, dtype=labels_dtype),
    )


def test_a_single_leaf_has_no_internal_nodes():
    leaf = tree(1, [])
    assert leaf.children.shape == (0, 2)
    assert (leaf.num_leaves, leaf.num_internal, leaf.num_nodes) == (1, 0, 1)
    assert tree_depth(leaf) == 1


def test_depth_counts_the_nodes_of_the_longest_way():
    assert tree_depth(tree(4, [(0, 1), (4, 2), (5, 3)])) == 4
    assert tree_depth(tree(4, [(0, 1), (2, 3), (4, 5)])) == 3


def test_trees_with_the_same_parts_are_equal():
    assert tree(2, [(0, 1)]) == tree(2, [(0, 1)])
    assert tree(2, [(0, 1)]) != tree(2, [(1, 0)])
    assert tree(1, []) != "a"


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ({"num_leaves": 0, "children": [], "num_labels": 0}, "no leaves"),
        ({"num_leaves": 3, "children": [(0, 1)]}, r"got int32\[1, 2\], expected int32\[2, 2\] for 3"),
        ({"num_leaves": 2, "children": [(0, 1)], "children_dtype": np.int64}, "got int64"),
        ({"num_leaves": 2, "children": [(0, 1)], "num_labels": 2}, r"got int64\[2\], expected int64\[3\]"),
        ({"num_leaves": 2, "children": [(0, 1)], "labels_dtype": np.float32}, "got float32"),
        (
            {"num_leaves": 3, "children": [(0, 4), (1, 2)]},
            "right child of inner node 0 is 4, expected 0 to 2: .* children come first",
        ),
        (
            {"num_leaves": 3, "children": [(0, 1), (0, 3)]},
            "left child of inner node 1 is 0, which is a child of inner node 0 already",
        ),
        ({"num_leaves": 2, "children": [(-1, 0)]}, "left child of inner node 0 is -1, expected 0 to 1"),
    ],
)
def test_parts_that_do_not_make_a_tree_are_refused(parts, complaint):
    with pytest.raises(DataError, match=complaint):
        tree(**parts)


def test_generated_trees_have_consistent_depths():
    assert tree_depth(complete_tree(16)) == 5
    assert all(5 <= tree_depth(t) <= 30 for t in random_trees(20, seed=0))
