"""Binary TreeLSTM over parsed sentences (Tai et al. 2015, N-ary; the form of DyNet's benchmark).

Also with inner nodes of two types, TreeLSTM-2Type of ED-Batch's evaluation.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from batchmaker.errors import InvalidRequestError
from batchmaker.lab.zoo.parts import Classify, WordIds, check_positive, frozen, joined, parts_of, seeded
from batchmaker.lab.zoo.trees import Output, TreeModel, WordTree, parse_tree
from batchmaker.model.cell import Cell
from batchmaker.model.trees import tree


@final
class LstmLeaf(nn.Module):
    """word -> (h, c): i, o, u from the word's embedding, c = i u, h = o tanh(c)."""

    def __init__(self, vocabulary_size: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, embedding)
        self.gates = nn.Linear(embedding, 3 * hidden)

    def forward(self, word: Tensor) -> tuple[Tensor, Tensor]:
        i, o, u = self.gates(self.embedding(word)).chunk(3, 1)
        c = i.sigmoid() * u.tanh()
        return o.sigmoid() * c.tanh(), c


@final
class LstmInner(nn.Module):
    """(h1, c1, h2, c2) -> (h, c): c = i u + f1 c1 + f2 c2, h = o tanh(c).

    i, o, u = U [h1; h2] + b. The forget gate of each child depends on its own h alone: f_k = sigmoid(U_k h_k + b_k).
    One linear layer per child computes everything that the child adds to, in the order f, i, o, u: two products, and
    nothing is concatenated.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.left = nn.Linear(hidden, 4 * hidden)
        self.right = nn.Linear(hidden, 4 * hidden)

    def forward(self, h1: Tensor, c1: Tensor, h2: Tensor, c2: Tensor) -> tuple[Tensor, Tensor]:
        f1, first = self.left(h1).split((self.hidden, 3 * self.hidden), 1)
        f2, second = self.right(h2).split((self.hidden, 3 * self.hidden), 1)
        i, o, u = (first + second).chunk(3, 1)
        c = i.sigmoid() * u.tanh() + f1.sigmoid() * c1 + f2.sigmoid() * c2
        return o.sigmoid() * c.tanh(), c


@final
class TreeLstmModel(TreeModel):
    """A parse tree through a binary TreeLSTM.

    Requests and output as for TreeModel; a state is h [hidden] and c. labels: number of labels. Other options as for
    LstmModel.
    """

    def __init__(
        self,
        vocabulary_size: int = 20_000,
        hidden: int = 256,
        embedding: int | None = None,
        dtype: str = "float32",
        output: Output = "state",
        labels: int = 5,
        max_batch: int = 256,
        seed: int = 0,
    ) -> None:
        width = hidden if embedding is None else embedding
        check_positive(vocabulary_size=vocabulary_size, hidden=hidden, embedding=width, labels=labels)
        with seeded(seed):
            leaf, inner, classify = (
                LstmLeaf(vocabulary_size, width, hidden),
                LstmInner(hidden),
                Classify(hidden, labels),
            )
        super().__init__(
            leaf, inner, classify, vocabulary_size=vocabulary_size, dtype=dtype, output=output, max_batch=max_batch
        )


@final
class TreeLstm2TypeModel(TreeModel):
    """A TreeLSTM whose inner nodes are of two types, cells with weights of their own.

    A request is a request for TreeLstmModel with "kinds" in addition: for each inner node 0, the cell `inner`, or 1,
    `other`. `encode` tosses a fair coin for each, from `seed` and the sentence alone, so the result is the same for
    every caller. Other options as for TreeLstmModel.
    """

    def __init__(
        self,
        vocabulary_size: int = 20_000,
        hidden: int = 256,
        embedding: int | None = None,
        dtype: str = "float32",
        output: Output = "labels",
        labels: int = 5,
        max_batch: int = 256,
        seed: int = 0,
    ) -> None:
        width = hidden if embedding is None else embedding
        check_positive(vocabulary_size=vocabulary_size, hidden=hidden, embedding=width, labels=labels)
        with seeded(seed):
            leaf, inner, classify = (
                LstmLeaf(vocabulary_size, width, hidden),
                LstmInner(hidden),
                Classify(hidden, labels),
            )
            other = LstmInner(hidden)
        super().__init__(
            leaf, inner, classify, vocabulary_size=vocabulary_size, dtype=dtype, output=output, max_batch=max_batch
        )
        self.other = Cell(frozen(other, dtype), max_batch=max_batch, priority=1)
        self.seed = seed
        self.example_request = {"words": [0, 0, 0], "children": [[0, 1], [3, 2]], "kinds": [0, 1]}

    def encode(self, tree: WordTree, vocabulary: WordIds) -> dict[str, Any]:
        request = super().encode(tree, vocabulary)
        return {**request, "kinds": tossed(request["words"], request["children"], self.seed)}

    def unfold(self, request: Any) -> Any:
        """Return the result by the option `output` for a tree whose inner nodes are of kind 0 or 1 (`kinds`)."""
        words, children = self._parse(request)
        leaves = parts_of(self.leaf.map(words))
        if len(children) == 0:
            return self._result(leaves[0], leaves[0][0])
        others = _kinds(request, len(children)) == 1
        cells = ((self.inner, np.flatnonzero(~others)), (self.other, np.flatnonzero(others)))
        inner = tree(leaves, *[cell.at(places, children[places]) for cell, places in cells])[0]
        return self._result(joined(leaves[0], inner) if self.output == "labels" else inner, inner[-1])

    def _inner_modules(self, request: Any, count: int) -> list[nn.Module]:
        return [(self.other if kind else self.inner).module for kind in _kinds(request, count).tolist()]

    def _parse(self, request: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if not isinstance(request, Mapping) or set(request) != {"words", "children", "kinds"}:
            got = sorted(map(str, request)) if isinstance(request, Mapping) else type(request).__name__
            raise InvalidRequestError(f"a request has the keys 'words', 'children' and 'kinds', got {got}")
        tree = parse_tree({name: request[name] for name in ("words", "children")}, self.vocabulary_size)
        _kinds(request, len(tree[1]))
        return tree


def tossed(words: NDArray[np.int64], children: NDArray[Any], seed: int) -> NDArray[np.int64]:
    """Return 0 or 1 for each inner node of a tree: [inner nodes], a function of words, children and seed."""
    content = np.concatenate((words, children.astype(np.int64).ravel())).tobytes()
    return np.random.default_rng((seed, zlib.crc32(content))).integers(0, 2, len(children))


def _kinds(request: Any, count: int) -> NDArray[np.int64]:
    """Return the type of each inner node. InvalidRequestError unless there is a 0 or 1 for each."""
    kinds = np.asarray(request["kinds"])
    if kinds.shape != (count,) or (count and (kinds.dtype.kind not in "iu" or ((kinds < 0) | (kinds > 1)).any())):
        raise InvalidRequestError(f"kinds: expected {count} numbers, 0 or 1 for each inner node, got {kinds.tolist()}")
    return kinds
