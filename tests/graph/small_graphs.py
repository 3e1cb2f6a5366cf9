"""Small graphs of nodes with types, and what is said of them worked out from the definitions."""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st

from batchmaker.graph.mini_batch import MiniBatch, mini_batch

NUM_TYPES = 3


@st.composite
def graphs(draw: st.DrawFn, max_nodes: int = 8) -> MiniBatch:
    """Any graph without cycles of up to `max_nodes` nodes of up to three types."""
    types = draw(st.lists(st.integers(0, NUM_TYPES - 1), min_size=1, max_size=max_nodes))
    sources = [draw(st.lists(st.integers(0, node - 1), max_size=3)) if node else [] for node in range(len(types))]
    return mini_batch(types, sources, NUM_TYPES)


def sources_of(given: MiniBatch) -> list[list[int]]:
    bounds = given.starts.tolist()
    return [given.sources[bounds[i] : bounds[i + 1]].tolist() for i in range(len(given))]


def ancestors_of(given: MiniBatch) -> list[set[int]]:
    above: list[set[int]] = []
    for sources in sources_of(given):
        above.append(set(sources).union(*(above[source] for source in sources)))
    return above


def ready_of(given: MiniBatch, done: frozenset[int]) -> list[set[int]]:
    """Frontier_a of what is left, for every type a."""
    ready: list[set[int]] = [set() for _ in range(given.num_types)]
    for node, sources in enumerate(sources_of(given)):
        if node not in done and done.issuperset(sources):
            ready[int(given.types[node])].add(node)
    return ready


def independent_of(given: MiniBatch, done: frozenset[int]) -> list[int]:
    """The size of the frontier of G^a, for every type a."""
    counts = [0] * given.num_types
    for node, above in enumerate(ancestors_of(given)):
        kind = int(given.types[node])
        counts[kind] += node not in done and not any(given.types[up] == kind for up in above - done)
    return counts


def fewest_batches(given: MiniBatch, done: frozenset[int] = frozenset()) -> int:
    """The length of a shortest sequence of types that runs what is left, by trying all."""

    @cache
    def fewest(done: frozenset[int]) -> int:
        choices = [nodes for nodes in ready_of(given, done) if nodes]
        return min((1 + fewest(done | nodes) for nodes in choices), default=0)

    return fewest(done)
