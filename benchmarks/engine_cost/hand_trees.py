"""Binary TreeLSTMs batched by hand, level by level: no gathers, since a node's state is written where its parent reads.

The same sums as lab/zoo/treelstm.py: the leaves' input is a folded table; each child's h goes through a product of its
own, whose gates are f, i, o, u; a forget gate depends on its own child alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from engine_cost.hand_kernels import FAST, Product, folded, sigmoid, tanh


@njit(**FAST)
def places(children, leaves, nodes, level, row, start, parent):
    """Lay the inner nodes of several trees out by level.

    children: [inner nodes, 2] of all trees, one after the other; leaves, nodes: [trees] how many each has. level, row:
    [all nodes] are filled for inner nodes: level from 1, and the place among all inner nodes in order of level. start:
    [levels + 1], where each begins. parent: [all nodes, 2] row and side of the parent, -1 for a root. Returns the
    number of levels.
    """
    node, inner, top = 0, 0, 0
    start[:] = 0
    parent[:] = -1
    for tree in range(len(leaves)):
        first = node
        for _ in range(leaves[tree]):
            level[node] = 0
            node += 1
        for _ in range(nodes[tree] - leaves[tree]):
            height = max(level[first + children[inner, 0]], level[first + children[inner, 1]]) + 1
            level[node] = height
            start[height] += 1
            top = max(top, height)
            node += 1
            inner += 1
    total = 0
    for height in range(1, top + 2):
        count = start[height]
        start[height] = total
        total += count
    fill = start[: top + 2].copy()
    node = inner = 0
    for tree in range(len(leaves)):
        first = node
        node += leaves[tree]
        for _ in range(nodes[tree] - leaves[tree]):
            place = fill[level[node]]
            fill[level[node]] += 1
            row[place] = node
            for side in range(2):
                child = first + children[inner, side]
                parent[child, 0], parent[child, 1] = place, side
            node += 1
            inner += 1
    return top


@njit(**FAST)
def leaf_states(table, words, node, parent, root, h, c, results):
    """Write the leaves' states where their parents read. table: [words, 3 H], gates i, o, u. node: [leaves]."""
    width = results.shape[1]
    spare = np.empty(width, np.float32)
    for leaf in range(len(words)):
        gates, place, side = table[words[leaf]], parent[node[leaf], 0], parent[node[leaf], 1]
        if place < 0:
            hidden, cell = results[root[node[leaf]]], spare
        else:
            hidden, cell = h[side, place], c[side, place]
        for j in range(width):
            value = sigmoid(gates[j]) * tanh(gates[2 * width + j])
            cell[j] = value
            hidden[j] = sigmoid(gates[width + j]) * tanh(value)


@njit(**FAST)
def inner_states(left, right, bias, row, begin, end, parent, root, h, c, results):
    """Write the states of one level's inner nodes where their parents read; roots' h are results. bias: [2, 4 H]."""
    width = results.shape[1]
    spare = np.empty(width, np.float32)
    for place in range(begin, end):
        one, other = left[place - begin], right[place - begin]
        c_one, c_other = c[0, place], c[1, place]
        node = row[place]
        above, side = parent[node, 0], parent[node, 1]
        if above < 0:
            hidden, cell = results[root[node]], spare
        else:
            hidden, cell = h[side, above], c[side, above]
        for j in range(width):
            keep_one = sigmoid(one[j] + bias[0, j])
            keep_other = sigmoid(other[j] + bias[1, j])
            i = sigmoid(one[width + j] + other[width + j] + bias[0, width + j])
            o = sigmoid(one[2 * width + j] + other[2 * width + j] + bias[0, 2 * width + j])
            u = tanh(one[3 * width + j] + other[3 * width + j] + bias[0, 3 * width + j])
            value = i * u + keep_one * c_one[j] + keep_other * c_other[j]
            cell[j] = value
            hidden[j] = o * tanh(value)


@final
class TreesByHand:
    """Runs closed batches of trees: requests as lab/zoo/trees.py takes them, the roots' h."""

    def __init__(self, model: Any) -> None:
        leaf, inner = (model.cells[name].module for name in ("leaf", "inner"))
        self._table = folded(leaf.embedding, leaf.gates.weight, leaf.gates.bias)
        self._left, self._right = Product(inner.left.weight), Product(inner.right.weight)
        self._width = width = inner.hidden
        bias = torch.stack((inner.left.bias, inner.right.bias)).numpy().copy()
        bias[0, width:] += bias[1, width:]
        self._bias = bias
        self._h, self._c = (np.zeros((2, 1, width), np.float32) for _ in "hc")

    @torch.no_grad()
    def __call__(self, requests: Sequence[Any]) -> NDArray[np.float32]:
        """Return the roots' h: [requests, hidden]."""
        leaves = np.array([len(request["words"]) for request in requests])
        nodes = 2 * leaves - 1
        words = np.concatenate([request["words"] for request in requests])
        children = np.concatenate([request["children"] for request in requests]).astype(np.int64).reshape(-1, 2)
        total, num_inner = int(nodes.sum()), int((leaves - 1).sum())
        self._make_room(num_inner)
        level, row = np.zeros(total, np.int64), np.empty(num_inner, np.int64)
        start, parent = np.zeros(int(nodes.max()) + 2, np.int64), np.empty((total, 2), np.int64)
        top = places(children, leaves, nodes, level, row, start, parent)
        root = np.zeros(total, np.int64)
        root[np.cumsum(nodes) - 1] = np.arange(len(requests))
        first = np.repeat(np.cumsum(nodes) - nodes, leaves)
        within = np.arange(len(words)) - np.repeat(np.cumsum(leaves) - leaves, leaves)
        results = np.empty((len(requests), self._width), np.float32)
        h, c = self._h, self._c
        leaf_states(self._table, words, first + within, parent, root, h, c, results)
        for height in range(1, top + 1):
            begin, end = int(start[height]), int(start[height + 1])
            left = self._left(torch.from_numpy(h[0, begin:end])).numpy()
            right = self._right(torch.from_numpy(h[1, begin:end])).numpy()
            inner_states(left, right, self._bias, row, begin, end, parent, root, h, c, results)
        return results

    def _make_room(self, rows: int) -> None:
        if rows > self._h.shape[1]:
            self._h, self._c = (np.zeros((2, rows, self._width), np.float32) for _ in "hc")
