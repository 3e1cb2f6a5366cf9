"""Mini-batches of trees with two inner types and of lattices, small and seeded."""

from __future__ import annotations

import random

from batchmaker.graph.mini_batch import MiniBatch, mini_batch

LEAF, INNER, OTHER, OUTPUT = range(4)


def tree(num_leaves: int, seed: int, kinds: tuple[int, ...] = (INNER,)) -> MiniBatch:
    """A random binary tree with an output for every node; each inner node is of one of `kinds`, by chance."""
    chance = random.Random(seed)
    types, sources = [LEAF] * num_leaves, [[] for _ in range(num_leaves)]
    roots = list(range(num_leaves))
    while len(roots) > 1:
        pair = [roots.pop(chance.randrange(len(roots))) for _ in range(2)]
        roots.append(len(types))
        types.append(chance.choice(kinds))
        sources.append(sorted(pair))
    nodes = len(types)
    return mini_batch([*types, *[OUTPUT] * nodes], [*sources, *([node] for node in range(nodes))], 4)


def trees(count: int, seed: int, kinds: tuple[int, ...] = (INNER,)) -> list[MiniBatch]:
    chance = random.Random(seed)
    return [tree(chance.randint(2, 20), chance.getrandbits(32), kinds) for _ in range(count)]


def lattice(length: int, seed: int) -> MiniBatch:
    """Characters (0) in a row, words (1) over two or three of them, sums (2) where both end, an output (3) each."""
    chance = random.Random(seed)
    types: list[int] = []
    sources: list[list[int]] = []
    state: dict[int, int] = {}

    def add(kind: int, fed: list[int]) -> int:
        types.append(kind)
        sources.append(fed)
        return len(types) - 1

    for place in range(1, length + 1):
        arcs = [add(0, [state[place - 1]] if place > 1 else [])]
        back = chance.choice((0, 0, 2, 3))
        if back and place - back >= 1:
            arcs.append(add(1, [state[place - back]]))
        state[place] = add(2, arcs) if len(arcs) > 1 else arcs[0]
        add(3, [state[place]])
    return mini_batch(types, sources, 4)
