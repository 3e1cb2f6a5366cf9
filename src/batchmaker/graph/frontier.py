"""What of a closed mini-batch can run next, kept up to date as it runs: a few steps for each edge, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from batchmaker.graph.mini_batch import MiniBatch


@final
class Frontier:
    """A mini-batch while it is computed.

    ready: [types] the nodes of each type that have not run and whose sources have (Frontier_a of G_t), in the order
    in which they became ready. independent: [types] how many nodes of each type have neither run nor an ancestor of
    their own type that has not (the size of the frontier of G^a_t, at least that of `ready`). num_left: nodes that have
    not run. Others read; only `run` and `reset` write.
    """

    __slots__ = (
        "_fed",
        "_independent_at_first",
        "_kin",
        "_kin_after",
        "_num_kin",
        "_num_sources",
        "_ready_at_first",
        "_types",
        "_unmet",
        "independent",
        "mini_batch",
        "num_left",
        "ready",
    )

    def __init__(self, mini_batch: MiniBatch) -> None:
        self.mini_batch = mini_batch
        self._types: list[int] = mini_batch.types.tolist()
        self._fed, self._kin_after = mini_batch.fed, mini_batch.kin_after
        self._num_sources: list[int] = (mini_batch.starts[1:] - mini_batch.starts[:-1]).tolist()
        self._num_kin: list[int] = (mini_batch.kin_starts[1:] - mini_batch.kin_starts[:-1]).tolist()
        self._ready_at_first: list[list[int]] = [[] for _ in range(mini_batch.num_types)]
        self._independent_at_first = [0] * mini_batch.num_types
        for node, kind in enumerate(self._types):
            if not self._num_sources[node]:
                self._ready_at_first[kind].append(node)
            self._independent_at_first[kind] += not self._num_kin[node]
        self.reset()

    def reset(self) -> None:
        """Nothing has run."""
        self._unmet = self._num_sources.copy()
        self._kin = self._num_kin.copy()
        self.ready = [list(nodes) for nodes in self._ready_at_first]
        self.independent = self._independent_at_first.copy()
        self.num_left = len(self._types)

    def run(self, type_id: int, nodes: Sequence[int] | None = None) -> Sequence[int]:
        """Run ready nodes of one type, all of them or those named, and return them."""
        ready, unmet, types, fed = self.ready, self._unmet, self._types, self._fed
        if nodes is None:
            nodes, ready[type_id] = ready[type_id], []
        else:
            chosen = set(nodes)
            ready[type_id] = [node for node in ready[type_id] if node not in chosen]
        kin, kin_after, freed = self._kin, self._kin_after, 0
        for node in nodes:
            for after in fed[node]:
                unmet[after] -= 1
                if not unmet[after]:
                    ready[types[after]].append(after)
            for after in kin_after[node]:
                kin[after] -= 1
                if not kin[after]:
                    freed += 1
        self.independent[type_id] += freed - len(nodes)
        self.num_left -= len(nodes)
        return nodes
