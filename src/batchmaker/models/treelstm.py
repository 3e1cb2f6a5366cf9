"""Binary TreeLSTM over parsed sentences (Tai et al. 2015, N-ary; the form of DyNet's benchmark)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from batchmaker.cells.cell import Cell
from batchmaker.cells.model import Model
from batchmaker.errors import InvalidRequestError
from batchmaker.models.building import check_choice, check_positive, checked_tokens, frozen, seeded

Output = Literal["state", "label"]


class WordTree(Protocol):
    """What `encode` takes, as datasets.Tree is: leaves in order, and children of the inner nodes."""

    @property
    def words(self) -> Sequence[str]: ...
    @property
    def children(self) -> NDArray[np.int32]: ...


class WordIds(Protocol):
    """What `encode` asks for ids, as datasets.Vocabulary does."""

    def encode_words(self, words: Sequence[str]) -> NDArray[np.int64]: ...


@final
class Leaf(nn.Module):
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
class Inner(nn.Module):
    """(h1, c1, h2, c2) -> (h, c): c = i u + f1 c1 + f2 c2, h = o tanh(c).

    i, o, u = U [h1; h2] + b; each child's forget gate is from its own h alone: f_k = sigmoid(U_k h_k + b_k). One linear
    layer per child gives all it adds to, in the order f, i, o, u: two products, and nothing is put side by side.
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
class Classify(nn.Module):
    """h -> the likeliest label, int64."""

    def __init__(self, hidden: int, labels: int) -> None:
        super().__init__()
        self.scores = nn.Linear(hidden, labels)

    def forward(self, h: Tensor) -> Tensor:
        label: Tensor = self.scores(h).argmax(-1)
        return label


@final
class TreeLstmModel(Model):
    """A parse tree through a binary TreeLSTM.

    A request is {"words": token ids, "children": integers [inner nodes, 2]}: an entry below the number of words is a
    leaf, any other is inner node `entry - number of words`; children come before parents and the root is last.
    `encode` makes one of a datasets.Tree.
    output: "state", the root's h [hidden], or "label", the likeliest of `labels`.
    """

    can_pad = False

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
        check_choice("output", output, ("state", "label"))
        with seeded(seed):
            leaf, inner, classify = Leaf(vocabulary_size, width, hidden), Inner(hidden), Classify(hidden, labels)
        self.leaf = Cell(frozen(leaf, dtype), max_batch=max_batch)
        self.inner = Cell(frozen(inner, dtype), max_batch=max_batch, priority=1)
        if output == "label":
            self.classify = Cell(frozen(classify, dtype), max_batch=max_batch, priority=2)
        self.vocabulary_size = vocabulary_size
        self.output = output
        self.example_request = {"words": [0, 0], "children": [[0, 1]]}

    def encode(self, tree: WordTree, vocabulary: WordIds) -> dict[str, Any]:
        """Return the request for a tree of words."""
        return {"words": vocabulary.encode_words(tree.words), "children": tree.children}

    def unfold(self, request: Any) -> Any:
        words, children = self._parse(request)  # cells check the tokens and the order of the children
        h, c = self.leaf.map(words)
        root = self.inner.tree(children, (h, c))[0][-1] if len(children) else h[0]
        return self.classify(root) if self.output == "label" else root

    def length(self, request: Any) -> int:
        """Return the number of nodes."""
        words, children = self._parse(request)
        return len(words) + len(children)

    def batched(self, requests: Sequence[Any]) -> list[Any]:
        """Compute requests one by one, node by node, for policy `serial`: trees have no padded form."""
        with torch.no_grad():
            return [self._alone(*self._parse(request)) for request in requests]

    def _alone(self, words: NDArray[np.int64], children: NDArray[np.int64]) -> Tensor:
        checked_tokens(words, self.vocabulary_size, "words")
        if (children >= np.arange(len(words), len(words) + len(children))[:, None]).any():
            raise InvalidRequestError("children: a node comes after its parent; children come first, the root is last")
        leaf, inner = self.leaf.module, self.inner.module
        nodes = [leaf(word) for word in torch.from_numpy(words)[:, None]]
        for left, right in children.tolist():
            nodes.append(inner(*nodes[left], *nodes[right]))
        root: Tensor = nodes[-1][0]
        return (self.classify.module(root) if self.output == "label" else root)[0]

    def _parse(self, request: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if not isinstance(request, Mapping) or set(request) != {"words", "children"}:
            got = sorted(map(str, request)) if isinstance(request, Mapping) else type(request).__name__
            raise InvalidRequestError(f"a request has the keys 'words' and 'children', got {got}")
        words = np.asarray(request["words"])
        if words.ndim != 1 or words.dtype.kind not in "iu":
            checked_tokens(request["words"], self.vocabulary_size, "words")
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
    if array.size:
        times = np.bincount(array.ravel()) if int(array.min()) >= 0 else array[:0, 0]
        if len(times) != 2 * num_leaves - 2 or not (times == 1).all():
            raise InvalidRequestError("children: every node but the last must be a child exactly once")
    return array.astype(np.int64, copy=False)
