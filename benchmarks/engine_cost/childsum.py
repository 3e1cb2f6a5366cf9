"""Lines of a Child-Sum TreeLSTM over dependency trees: over one by one, and over levels by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from batchmaker.lab import zoo
from batchmaker.lab.datasets import Vocabulary, read_conllu
from batchmaker.lab.zoo.childsum import by_height
from engine_cost.decisions import Sides, Targets, over_alone_and_by_hand
from engine_cost.measuring import Row, Settings

HIDDEN: Final = 256


@final
class ChildSumByHand:
    """The same sums as lab/zoo/childsum.py; a word's share of the gates is a row of a folded table."""

    def __init__(self, model: Any) -> None:
        weights = model.leaf.module.weights
        with torch.no_grad():
            self._table = weights.given(weights.embedding.weight)
        self._sums, self._forget = weights.sums.weight.t().contiguous(), weights.forget.weight.t().contiguous()

    def alone(self, request: Any) -> Tensor:
        """One tree, node by node, children first; the products of a node's children are one."""
        gates = self._table[torch.from_numpy(request["words"])]
        children: list[list[int]] = [[] for _ in gates]
        for parent, child in request["edges"].tolist():
            children[parent].append(child)
        states: list[Any] = [None] * len(gates)
        (root,) = set(range(len(gates))) - set(request["edges"][:, 1].tolist())
        stack = [root]
        while stack:
            node = stack[-1]
            missing = [child for child in children[node] if states[child] is None]
            if missing:
                stack += missing
                continue
            stack.pop()
            f, iou = gates[node : node + 1].split((HIDDEN, 3 * HIDDEN), 1)
            kept: Any = 0.0
            if children[node]:
                h, c = (torch.cat(part) for part in zip(*[states[child] for child in children[node]], strict=True))
                kept = ((f + h @ self._forget).sigmoid() * c).sum(0, keepdim=True)
                iou = iou + h.sum(0, keepdim=True) @ self._sums
            i, o, u = iou.chunk(3, 1)
            c = i.sigmoid() * u.tanh() + kept
            states[node] = o.sigmoid() * c.tanh(), c
        return states[root][0][0]

    def by_hand(self, requests: Sequence[Any]) -> list[Tensor]:
        """A closed batch of trees, level by level from the leaves: each level is two products."""
        counts = np.array([len(request["words"]) for request in requests])
        begins = np.cumsum(counts) - counts
        words = np.concatenate([request["words"] for request in requests])
        sizes = [len(request["edges"]) for request in requests]
        edges = np.concatenate([request["edges"] for request in requests]) + np.repeat(begins, sizes)[:, None]
        level = np.zeros(len(words), np.int64)
        by_height(edges, level)
        order, edges = np.argsort(level, kind="stable"), edges[np.argsort(level[edges[:, 0]], kind="stable")]
        ends = np.cumsum(np.bincount(level))
        bounds = [0, *np.searchsorted(level[edges[:, 0]], np.arange(1, len(ends) + 1)).tolist()]
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        parents, children = torch.from_numpy(place[edges]).unbind(1)
        gates = self._table[torch.from_numpy(words[order])]
        f, iou = gates[:, :HIDDEN], gates[:, HIDDEN:]
        h, c = torch.empty(len(words), HIDDEN), torch.empty(len(words), HIDDEN)
        begin = 0
        for height, end in enumerate(ends.tolist()):
            given = iou[begin:end]
            if height:
                mine = slice(bounds[height], bounds[height + 1])
                parent, below = parents[mine], h[children[mine]]
                kept = torch.addmm(f[parent], below, self._forget).sigmoid_().mul_(c[children[mine]])
                sums = torch.zeros(end - begin, 2 * HIDDEN)
                sums.index_add_(0, parent - begin, torch.cat((below, kept), 1))
                given = torch.addmm(given, sums[:, :HIDDEN], self._sums)
            i, o, u = given.chunk(3, 1)
            cell = i.sigmoid() * u.tanh()
            if height:
                cell += sums[:, HIDDEN:]
            c[begin:end] = cell
            torch.mul(o.sigmoid(), cell.tanh(), out=h[begin:end])
            begin = end
        is_root = np.ones(len(words), np.bool_)
        is_root[edges[:, 1]] = False
        return list(h[torch.from_numpy(place[is_root.nonzero()[0]])])


def childsum(settings: Settings) -> Iterator[Row]:
    """Child-Sum TreeLSTM 256 over dependency trees of EWT: over one by one, and over levels by hand."""
    trees = read_conllu(settings.data / "ud_english_ewt" / "en_ewt-ud-dev.conllu.gz")
    vocabulary = Vocabulary.from_sentences(tree.words for tree in trees)
    model: Any = zoo.make("treelstm-childsum", vocabulary_size=len(vocabulary), hidden=HIDDEN)
    hand = ChildSumByHand(model)
    requests = [model.encode(tree, vocabulary) for tree in trees[: settings.of(None, 60)]]
    yield from over_alone_and_by_hand(
        settings, "Child-Sum TreeLSTM 256", Sides(model, hand.alone, hand.by_hand), requests, Targets(8.0, 0.7, 1.5)
    )
