"""Common parts of networks over parsed sentences: their requests, and leaves, inner nodes and labels as cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from batchmaker.compiled import compiled, int64s
from batchmaker.errors import InvalidRequestError
from batchmaker.graph.trees import tree_fault
from batchmaker.lab.zoo.parts import Classify, WordIds, check_choice, checked_tokens, frozen, joined, parts_of
from batchmaker.model.cell import Cell
from batchmaker.model.model import Model

Output = Literal["state", "label", "labels"]


class WordTree(Protocol):
    """An argument of `encode`, such as a datasets.Tree: leaves in order, and children of the inner nodes."""

    @property
    def words(self) -> Sequence[str]: ...
    @property
    def children(self) -> NDArray[np.int32]: ...


class TreeModel(Model):
    """A binary tree over words: a leaf cell for each word, an inner cell for each inner node.

    A request is {"words": token ids, "children": integers [inner nodes, 2]}: an entry below the number of words is a
    leaf, any other is inner node `entry - number of words`; children come before parents and the root is last. `encode`
    makes one from a datasets.Tree. output: "state", the first part of the root's state; "label", its likeliest label;
    or "labels", the likeliest label of each node, leaves first, from an output cell for every node of the tree.
    """

    can_pad = False

    def __init__(
        self,
        leaf: nn.Module,
        inner: nn.Module,
        classify: Classify,
        *,
        vocabulary_size: int,
        dtype: str,
        output: Output,
        max_batch: int,
    ) -> None:
        check_choice("output", output, ("state", "label", "labels"))
        self.leaf = Cell(frozen(leaf, dtype), max_batch=max_batch)
        self.inner = Cell(frozen(inner, dtype), max_batch=max_batch, priority=1)
        if output != "state":
            self.classify = Cell(frozen(classify, dtype), max_batch=max_batch, priority=2)
        self.vocabulary_size = vocabulary_size
        self.output = output
        self.example_request = {"words": [0, 0], "children": [[0, 1]]}

    def encode(self, tree: WordTree, vocabulary: WordIds) -> dict[str, Any]:
        """Return the request for a tree of words."""
        return {"words": vocabulary.encode_words(tree.words), "children": tree.children}

    def unfold(self, request: Any) -> Any:
        words, children = self._parse(request)  # cells check the tokens and the order of the children
        leaves = parts_of(self.leaf.map(words))
        if len(children) == 0:
            return self._result(leaves[0], leaves[0][0])
        inner = parts_of(self.inner.tree(children, leaves))[0]
        return self._result(joined(leaves[0], inner) if self.output == "labels" else inner, inner[-1])

    def length(self, request: Any) -> int:
        """Return the number of nodes."""
        words, children = self._parse(request)
        return len(words) + len(children)

    def batched(self, requests: Sequence[Any]) -> list[Any]:
        """Compute requests one by one, node by node, for policy `serial`: trees have no padded form."""
        with torch.no_grad():
            return [self._alone(request) for request in requests]

    def _result(self, nodes: Any, root: Any) -> Any:
        """Return the requested result, from the first parts of the states of all nodes, and of the root's."""
        if self.output == "labels":
            return self.classify.map(nodes)
        return self.classify(root) if self.output == "label" else root

    def _alone(self, request: Any) -> Tensor:
        words, children = self._parse(request)
        checked_tokens(words, self.vocabulary_size, "words")
        if (children >= np.arange(len(words), len(words) + len(children))[:, None]).any():
            raise InvalidRequestError(tree_fault(children, len(words)))
        nodes = [parts_of(self.leaf.module(word)) for word in torch.from_numpy(words)[:, None]]
        for (left, right), inner in zip(children.tolist(), self._inner_modules(request, len(children)), strict=True):
            nodes.append(parts_of(inner(*nodes[left], *nodes[right])))
        if self.output == "labels":
            return torch.cat([self.classify.module(node[0]) for node in nodes])
        root: Tensor = nodes[-1][0]
        return (self.classify.module(root) if self.output == "label" else root)[0]

    def _inner_modules(self, request: Any, count: int) -> list[nn.Module]:
        """Return the module of each inner node."""
        return [self.inner.module] * count

    def _parse(self, request: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return parse_tree(request, self.vocabulary_size)


def parse_tree(request: Any, vocabulary_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return words and children. InvalidRequestError unless the children make one tree over the words."""
    is_dict = type(request) is dict or isinstance(request, Mapping)
    if not is_dict or len(request) != 2 or "words" not in request or "children" not in request:
        got = sorted(map(str, request)) if isinstance(request, Mapping) else type(request).__name__
        raise InvalidRequestError(f"a request has the keys 'words' and 'children', got {got}")
    words = np.asarray(request["words"])
    if words.ndim != 1 or words.dtype.kind not in "iu":
        checked_tokens(request["words"], vocabulary_size, "words")
    if len(words) == 0:
        raise InvalidRequestError("words is empty; at least one token is needed")
    return words, _checked_children(request["children"], len(words))


def _checked_children(children: Any, num_leaves: int) -> NDArray[np.int64]:
    """Return children as an array [num_leaves - 1, 2]. InvalidRequestError unless they make one tree."""
    try:
        array = np.asarray(children)
    except ValueError as error:
        raise InvalidRequestError(f"children must be integers [inner nodes, 2] ({error})") from None
    if array.size == 0:
        array = np.empty((0, 2), np.int64)
    if array.dtype.kind not in "iu" or array.shape != (num_leaves - 1, 2):
        raise InvalidRequestError(
            f"children: got {array.dtype} of shape {array.shape}, expected integers of shape ({num_leaves - 1}, 2) for "
            f"{num_leaves} words"
        )
    pairs = int64s(array)
    if not _are_each_once(pairs):
        raise InvalidRequestError(tree_fault(array, num_leaves))
    return pairs


@compiled
def _are_each_once(children: NDArray[np.int64]) -> bool:
    """Whether children [inner nodes, 2] are the numbers from 0 on, each exactly once."""
    is_there = np.zeros(children.size, np.bool_)
    for child in children.flat:
        if not 0 <= child < len(is_there) or is_there[child]:
            return False
        is_there[child] = True
    return True
