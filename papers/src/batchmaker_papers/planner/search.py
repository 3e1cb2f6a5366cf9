"""The choice of batches inside a cell: the fewest batches, found by search (ED-Batch 3.1, 5)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from batchmaker.graph.bound import lower_bound
from batchmaker.graph.frontier import Frontier
from batchmaker.graph.mini_batch import MiniBatch, mini_batch

MOST_STATES = 5_000
"""The search stops after so many states, with the best result so far."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Batches of nodes in the order in which they run. proven: no schedule has fewer."""

    batches: tuple[tuple[int, ...], ...]
    proven: bool


def fewest_batches(types: Sequence[int], sources: Sequence[Iterable[int]], most_states: int = MOST_STATES) -> Schedule:
    """Return batches of nodes of one type, each run as soon as its sources have run.

    types: for each node, from 0. sources: for each node, the earlier nodes that it reads. The search over sequences of
    types goes depth first. It is cut off when the batches so far plus the lower bound of the rest reach the best known
    result. If all independent nodes of a type are ready, it goes first without other trials (ED-Batch, Lemma 1). Beyond
    most_states the result is the best so far, at worst that of Lemma 1 as a heuristic, forwards or backwards.
    """
    nodes = mini_batch(types, sources, max(types, default=-1) + 1)
    backwards = [tuple(len(nodes) - 1 - node for node in batch) for batch in reversed(_by_rule(nodes.turned))]
    best = min((_by_rule(nodes), backwards), key=len)
    search = _Search(nodes, best, most_states)
    if len(best) > lower_bound(nodes):
        search.visit((1 << len(nodes)) - 1, [])
    return Schedule(tuple(map(tuple, search.best)), search.states_left > 0)


def _by_rule(nodes: MiniBatch) -> list[tuple[int, ...]]:
    """Return the batches if the type nearest to the sufficient condition always goes first."""
    frontier, batches = Frontier(nodes), []
    while frontier.num_left:
        batches.append(tuple(sorted(frontier.run(frontier.nearest_to_sufficient()))))
    return batches


@final
class _Search:
    """The search. Sets of nodes are the bits of one number."""

    def __init__(self, nodes: MiniBatch, best: list[tuple[int, ...]], most_states: int) -> None:
        self.best = best
        self.states_left = most_states
        self._seen: dict[int, int] = {}
        self._types: list[int] = nodes.types.tolist()
        self._sources = [_bits(nodes.sources[a:b]) for a, b in zip(nodes.starts, nodes.starts[1:], strict=False)]
        self._same = _ancestors_of_its_type(self._types, self._sources)
        self._height: list[int] = (nodes.turned.own_depths[::-1] + 1).tolist()

    def visit(self, rest: int, batches: list[tuple[int, ...]]) -> None:
        """Try to run the nodes in `rest` in fewer batches than the best known result; `batches` have already run."""
        if not rest:
            self.best = list(batches)
            return
        if self._seen.get(rest, len(batches) + 1) <= len(batches) or self.states_left <= 0:
            return
        self._seen[rest] = len(batches)
        self.states_left -= 1
        ready, independent, heights = self._look(rest)
        if len(batches) + sum(heights.values()) >= len(self.best):
            return
        sure = [kind for kind, nodes in ready.items() if len(nodes) == independent[kind]]
        for kind in sure[:1] or sorted(ready, key=lambda kind: len(ready[kind]) / independent[kind], reverse=True):
            self.visit(rest & ~_bits(ready[kind]), [*batches, tuple(ready[kind])])

    def _look(self, rest: int) -> tuple[dict[int, list[int]], dict[int, int], dict[int, int]]:
        """Return by type: the ready nodes, the number of independent nodes, the most on any path through the rest."""
        ready: dict[int, list[int]] = {}
        independent: dict[int, int] = {}
        heights: dict[int, int] = {}
        for node, kind in enumerate(self._types):
            if not rest >> node & 1:
                continue
            heights[kind] = max(heights.get(kind, 0), self._height[node])
            if not self._same[node] & rest:
                independent[kind] = independent.get(kind, 0) + 1
            if not self._sources[node] & rest:
                ready.setdefault(kind, []).append(node)
        return ready, independent, heights


def _ancestors_of_its_type(types: Sequence[int], sources: Sequence[int]) -> list[int]:
    """Return, as bits, the ancestors of each node that are of its own type. sources: as bits."""
    above: list[int] = []
    of_type: dict[int, int] = {}
    same = []
    for node, kind in enumerate(types):
        ancestors = sources[node]
        for source in range(node):
            if sources[node] >> source & 1:
                ancestors |= above[source]
        above.append(ancestors)
        same.append(ancestors & of_type.get(kind, 0))
        of_type[kind] = of_type.get(kind, 0) | 1 << node
    return same


def _bits(nodes: Iterable[int]) -> int:
    bits = 0
    for node in nodes:
        bits |= 1 << int(node)
    return bits
