"""Child-Sum TreeLSTM over dependency trees, and graphs without cycles (Tai, Socher and Manning 2015, section 3.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, Final, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from batchmaker.compiled import compiled, int64s
from batchmaker.errors import InvalidRequestError
from batchmaker.lab.zoo.parts import (
    DTYPES,
    Classify,
    WordIds,
    check_choice,
    check_positive,
    checked_tokens,
    frozen,
    joined,
    seeded,
)
from batchmaker.lab.zoo.trees import Output
from batchmaker.model.cell import Cell
from batchmaker.model.model import Model
from batchmaker.model.trees import tree

GROUP: Final = 4
"""Children that one call takes at most; a node with more has calls that add up groups of them first."""
MOST_NAMED: Final = 8
"""Words that a message names."""


class Dependencies(Protocol):
    """An argument of `encode`, such as a datasets.DependencyTree: words, and the head of each, 0 for the root."""

    @property
    def words(self) -> Sequence[str]: ...
    @property
    def heads(self) -> NDArray[np.int64]: ...


@final
class ChildSumWeights(nn.Module):
    """The weights of all cells of a model: W and b of the gates f, i, o, u; U of i, o, u; U of f.

    A node's state has a third part, U h for its parents' forget gates: so it is computed once, whoever reads it, and
    for a leaf it is part of a table.
    """

    def __init__(self, vocabulary_size: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.hidden, self.nothing = hidden, vocabulary_size
        self.embedding = nn.Embedding(vocabulary_size + 1, embedding)
        self.given = nn.Linear(embedding, 4 * hidden)
        self.sums = nn.Linear(hidden, 3 * hidden, bias=False)
        self.forget = nn.Linear(hidden, hidden, bias=False)

    def of_word(self, word: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a word adds to the gates: f [n, hidden], and i, o, u [n, 3 hidden]."""
        f, iou = self.given(self.embedding(word)).split((self.hidden, 3 * self.hidden), 1)
        return f, iou

    def state(self, gates: Tensor, cell_sum: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return (h, c, U h). gates: i, o, u before their functions, [n, 3 hidden]. cell_sum: of f_k c_k."""
        i, o, u = gates.chunk(3, 1)
        c = i.sigmoid() * u.tanh()
        c = c if cell_sum is None else c + cell_sum
        h = o.sigmoid() * c.tanh()
        return h, c, self.forget(h)


@final
class ChildSumLeaf(nn.Module):
    """word -> (h, c, U h): c = i u, h = o tanh(c). Zeros for the number after the last word: no child."""

    def __init__(self, weights: ChildSumWeights) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, word: Tensor) -> tuple[Tensor, ...]:
        is_word = (word != self.weights.nothing)[:, None]
        return tuple([part * is_word for part in self.weights.state(self.weights.of_word(word)[1])])


@final
class ChildSumNode(nn.Module):
    """(word, h1, c1, Uh1, ..., hK, cK, UhK) -> (h, c, U h).

    i, o, u = W x + U (h1 + ... + hK) + b, c = i u + f1 c1 + ... + fK cK, f_k = sigmoid(W x + U h_k + b).

    The last child stands for others: h is the sum of theirs, c the sum of f_k c_k. is_group: return such a child, and
    not a node's state.
    """

    def __init__(self, weights: ChildSumWeights, *, is_group: bool) -> None:
        super().__init__()
        self.weights, self.is_group = weights, is_group

    def forward(self, word: Tensor, *states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        f, iou = self.weights.of_word(word)
        h, c, messages = states[::3], states[1::3], states[2::3]
        gated_cells = [(f + messages[k]).sigmoid() * c[k] for k in range(len(c) - 1)]
        total, cells = reduce(torch.add, h), reduce(torch.add, gated_cells, c[-1])
        if self.is_group:
            return total, cells, torch.zeros_like(total)
        return self.weights.state(iou + self.weights.sums(total), cells)


@final
class ChildSumModel(Model):
    """A dependency tree through a Child-Sum TreeLSTM; every node has a word, and any number of children.

    A request is {"words": token ids [n], "edges": integers [m, 2]}: each edge is (parent, child), numbers of words.
    The edges have no cycle and one root; a node may have several parents, and is computed once. A child that is named
    twice counts twice. `encode` makes one from a datasets.DependencyTree. output: "state", the root's h [hidden];
    "label", its likeliest label; or "labels", the likeliest label of each word, int64 [n]. Other options as for
    TreeLstmModel.

    A node without children is a `leaf`. An `inner` node has up to four; for one with more, `group` adds up fours first.
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
        check_choice("output", output, ("state", "label", "labels"))
        with seeded(seed):
            weights = ChildSumWeights(vocabulary_size, width, hidden)
            classify = Classify(hidden, labels)
        frozen(weights, dtype)
        group, inner = (ChildSumNode(weights, is_group=is_group).eval() for is_group in (True, False))
        self.leaf = Cell(ChildSumLeaf(weights).eval(), max_batch=max_batch)
        self.group = Cell(group, max_batch=max_batch, priority=1)
        self.inner = Cell(inner, max_batch=max_batch, priority=1)
        if output != "state":
            self.classify = Cell(frozen(classify, dtype), max_batch=max_batch, priority=2)
        self.vocabulary_size, self.hidden, self.dtype = vocabulary_size, hidden, dtype
        self.output = output
        edges = [*((1, child) for child in range(2, 3 + GROUP)), (0, 1)]
        self.example_request = {"words": [0] * (3 + GROUP), "edges": edges}

    def encode(self, dependencies: Dependencies, vocabulary: WordIds) -> dict[str, Any]:
        """Return the request for the dependencies of a sentence."""
        heads = np.asarray(dependencies.heads)
        children = np.flatnonzero(heads)
        return {
            "words": vocabulary.encode_words(dependencies.words),
            "edges": np.stack((heads[children] - 1, children), 1),
        }

    def unfold(self, request: Any) -> Any:
        """Return the result by the option `output`."""
        words, calls = self._calls(request)
        leaves = self.leaf.map(calls.leaf_words)
        groups, count = calls.counts[1:].tolist()
        if count == 0:
            return self._result(leaves[0], leaves[0][0])
        node_words, places, children = words[calls.nodes[:count]], calls.places[:count], calls.children[:count]
        if groups == 0:
            h = self.inner.tree(children, leaves, node_words)[0]
        else:
            one, other = slice(groups), slice(groups, None)
            h = tree(
                leaves,
                self.group.at(places[one], children[one], node_words[one]),
                self.inner.at(places[other], children[other], node_words[other]),
            )[0]
        return self._result(joined(leaves[0], h)[calls.ends] if self.output == "labels" else h, h[-1])

    def _result(self, nodes: Any, root: Any) -> Any:
        """Return the requested result, from h of all nodes in order of the words, and of the root."""
        if self.output == "labels":
            return self.classify.map(nodes)
        return self.classify(root) if self.output == "label" else root

    def length(self, request: Any) -> int:
        """Return the number of words."""
        return len(self._parse(request)[0])

    def batched(self, requests: Sequence[Any]) -> list[Any]:
        """Compute all requests together, level by level from the leaves."""
        parsed = [self._checked(request) for request in requests]
        begins = np.cumsum([0, *[len(words) for words, _ in parsed]])
        words = np.concatenate([words for words, _ in parsed])
        edges = np.concatenate([edges + begin for (_, edges), begin in zip(parsed, begins[:-1], strict=True)])
        with torch.no_grad():
            h = self._by_level(torch.from_numpy(words), edges)
            if self.output == "labels":
                return list(self.classify.module(h).split(np.diff(begins).tolist()))
            is_child = np.zeros(len(words), np.bool_)
            is_child[edges[:, 1]] = True
            roots = h[torch.from_numpy(np.flatnonzero(~is_child))]
            return list(self.classify.module(roots) if self.output == "label" else roots)

    def _by_level(self, words: Tensor, edges: NDArray[np.int64]) -> Tensor:
        """Return h of all nodes [nodes, hidden]. words: [nodes]. edges: as in requests, without a cycle."""
        weights: ChildSumWeights = self.leaf.module.weights  # type: ignore[assignment]
        level = np.zeros(len(words), np.int64)
        by_height(edges, level)
        order, edges = np.argsort(level, kind="stable"), edges[np.argsort(level[edges[:, 0]], kind="stable")]
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        parents, children = torch.from_numpy(place[edges]).unbind(1)
        ends = np.cumsum(np.bincount(level)).tolist()
        bounds = np.searchsorted(level[edges[:, 0]], np.arange(1, len(ends) + 1)).tolist()
        f, iou = weights.of_word(words[torch.from_numpy(order)])
        h, c = torch.empty((2, *f.shape), dtype=DTYPES[self.dtype]).unbind(0)
        begin = 0
        for height, end in enumerate(ends):
            gates, cell_sums = iou[begin:end], torch.zeros_like(f[begin:end])
            if height:
                mine = slice(bounds[height - 1], bounds[height])
                parent, below = parents[mine], h[children[mine]]
                cells = (f[parent] + weights.forget(below)).sigmoid() * c[children[mine]]
                cell_sums.index_add_(0, parent - begin, cells)
                gates = gates + weights.sums(torch.zeros_like(cell_sums).index_add_(0, parent - begin, below))
            i, o, u = gates.chunk(3, 1)
            c[begin:end] = i.sigmoid() * u.tanh() + cell_sums
            h[begin:end] = o.sigmoid() * c[begin:end].tanh()
            begin = end
        return h[torch.from_numpy(place)]

    def _calls(self, request: Any) -> tuple[NDArray[np.int64], ChildSumCalls]:
        words, edges = self._parse(request)
        calls = ChildSumCalls(len(words), len(edges))
        if not lay_out(
            words,
            self.vocabulary_size,
            edges,
            calls.leaf_words,
            calls.places,
            calls.nodes,
            calls.children,
            calls.ends,
            calls.counts,
        ):
            checked_tokens(words, self.vocabulary_size, "words")
            raise InvalidRequestError(edges_fault(edges, len(words)))
        calls.leaf_words = calls.leaf_words[: calls.counts[0]]
        return words, calls

    def _checked(self, request: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return words and edges. InvalidRequestError unless all words are known and the edges have one root."""
        return self._calls(request)[0], self._parse(request)[1]

    def _parse(self, request: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if not isinstance(request, Mapping) or set(request) != {"words", "edges"}:
            got = sorted(map(str, request)) if isinstance(request, Mapping) else type(request).__name__
            raise InvalidRequestError(f"a request has the keys 'words' and 'edges', got {got}")
        words = np.asarray(request["words"])
        if words.ndim != 1 or len(words) == 0 or words.dtype.kind not in "iu":
            words = checked_tokens(request["words"], self.vocabulary_size, "words")
        return int64s(words), _edges(request["edges"])


@final
class ChildSumCalls:
    """The calls of cells for one request: of leaves, and of groups and inner nodes, one after the other.

    leaf_words: [leaves] words of the leaves, and, if there are inner nodes, the number that stands for no child.
    places: [calls] among the inner nodes of the tree that the calls make; each call comes after those that it reads.
    nodes: [calls] the number of the word. children: [calls, GROUP + 1] numbers of leaves, or leaves and places.
    ends: [words] such a number for the state of each word. counts: [3] of leaf words, groups, and all calls.
    """

    def __init__(self, num_words: int, num_edges: int) -> None:
        most = num_words + num_edges // GROUP
        self.leaf_words, self.ends = np.empty((2, num_words + 1), np.int64)
        self.places, self.nodes = np.empty((2, most), np.int64)
        self.children = np.empty((most, GROUP + 1), np.int64)
        self.ends = self.ends[:num_words]
        self.counts = np.zeros(3, np.int64)


def _edges(edges: Any) -> NDArray[np.int64]:
    """Return edges as an array [m, 2]. InvalidRequestError for anything else."""
    try:
        array = np.asarray(edges)
    except ValueError as error:  # rows of different lengths
        raise InvalidRequestError(f"edges must be integers [edges, 2] ({error})") from None
    if array.size == 0:
        array = np.empty((0, 2), np.int64)
    if array.ndim != 2 or array.shape[1] != 2 or array.dtype.kind not in "iu":
        raise InvalidRequestError(
            f"edges: got {array.dtype} of shape {array.shape}, expected integers [edges, 2] (parent, child), numbers "
            "of words from 0"
        )
    return int64s(array)


def edges_fault(edges: NDArray[np.int64], num_nodes: int) -> str:
    """Return what prevents edges, which are known to be wrong, from having one root and no cycle."""
    outside = ((edges < 0) | (edges >= num_nodes)).any(1)
    if outside.any():
        edge = int(outside.argmax())
        return f"edges: edge {edge} is {edges[edge].tolist()}, expected numbers of the {num_nodes} words, from 0"
    children, parents = [list[int]() for _ in range(num_nodes)], [list[int]() for _ in range(num_nodes)]
    for parent, child in edges.tolist():
        children[parent].append(child)
        parents[child].append(parent)
    waits = [len(below) for below in children]
    done = [node for node, count in enumerate(waits) if not count]
    for node in done:  # grows: a node is done when its children are
        for parent in parents[node]:
            waits[parent] -= 1
            if not waits[parent]:
                done.append(parent)
    if len(done) < num_nodes:
        node, path = next(node for node, count in enumerate(waits) if count), dict[int, None]()
        while node not in path:
            path[node] = None
            node = next(child for child in children[node] if waits[child])
        cycle = [*list(path)[list(path).index(node) :], node]
        return f"edges: words {_few(cycle, ' -> ')} are a cycle; no word may be below itself"
    roots = [node for node in range(num_nodes) if not parents[node]]
    return f"edges: words {_few(roots)} have no parent; expected one root"


def _few(words: Sequence[int], between: str = ", ") -> str:
    """Return numbers of words for a message, at most MOST_NAMED."""
    shown = [*map(str, words[:MOST_NAMED]), *(["..."] if len(words) > MOST_NAMED else [])]
    return between.join(shown)


@compiled
def lay_out(
    words: NDArray[np.int64],
    num_tokens: int,
    edges: NDArray[np.int64],
    leaf_words: NDArray[np.int64],
    places: NDArray[np.int64],
    nodes: NDArray[np.int64],
    children: NDArray[np.int64],
    ends: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> bool:
    """Fill the arrays of ChildSumCalls.

    Return whether the words are known, and the edges [m, 2] have one root and no cycle.
    """
    num_nodes = len(words)
    count, above = np.zeros(num_nodes, np.int64), np.zeros(num_nodes + 1, np.int64)
    for edge in range(len(edges)):
        parent, child = edges[edge]
        if not (0 <= parent < num_nodes and 0 <= child < num_nodes):
            return False
        count[parent] += 1
        above[child + 1] += 1
    below = np.zeros(num_nodes + 1, np.int64)
    order, waits, num_ordered, roots = np.empty(num_nodes, np.int64), count.copy(), 0, 0
    groups = 0
    for node in range(num_nodes):
        if not 0 <= words[node] < num_tokens:
            return False
        roots += above[node + 1] == 0
        above[node + 1] += above[node]
        below[node + 1] = below[node] + count[node]
        if count[node] == 0:
            leaf_words[num_ordered], ends[node], order[num_ordered] = words[node], num_ordered, node
            num_ordered += 1
        else:
            groups += (count[node] - 1) // GROUP
    if roots != 1 or num_ordered == 0:
        return False
    nothing = num_ordered
    first = nothing + (num_nodes > 1)
    leaf_words[nothing] = num_tokens
    counts[0], counts[1], counts[2] = first, groups, groups + num_nodes - num_ordered
    parents, at_parent = np.empty(len(edges), np.int64), above.copy()
    child_of, at_child = np.empty(len(edges), np.int64), below.copy()
    for edge in range(len(edges)):
        parent, child = edges[edge]
        parents[at_parent[child]] = parent
        at_parent[child] += 1
        child_of[at_child[parent]] = child
        at_child[parent] += 1
    call_group, call_inner = 0, groups
    place = done = 0
    while done < num_ordered:
        node = order[done]
        done += 1
        num_left, at, before = count[node], below[node], nothing
        while num_left > 0:
            if num_left > GROUP:
                call = call_group
                call_group += 1
            else:
                call = call_inner
                call_inner += 1
            places[call], nodes[call] = place, node
            for k in range(GROUP):
                children[call, k] = ends[child_of[at + k]] if k < num_left else nothing
            children[call, GROUP] = before
            before = ends[node] = first + place
            place += 1
            at += GROUP
            num_left -= GROUP
        for k in range(above[node], above[node + 1]):
            waits[parents[k]] -= 1
            if waits[parents[k]] == 0:
                order[num_ordered] = parents[k]
                num_ordered += 1
    return num_ordered == num_nodes


@compiled
def by_height(edges: NDArray[np.int64], level: NDArray[np.int64]) -> None:
    """Raise the level of each parent above those of its children. level: [nodes], zeros. edges: without a cycle."""
    changed = True
    while changed:
        changed = False
        for edge in range(len(edges)):
            parent, child = edges[edge]
            if level[parent] <= level[child]:
                level[parent] = level[child] + 1
                changed = True
