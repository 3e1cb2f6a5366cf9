"""A closed mini-batch as policies of the live scheduler see it."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Final, NoReturn, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.errors import InvariantError, OptionError
from batchmaker.graph.frontier import Frontier
from batchmaker.graph.mini_batch import MiniBatch
from batchmaker.graph.spec import CellType, TypeId
from batchmaker.policies.base import CellPolicy

UNLIMITED: Final = sys.maxsize
"""The largest batch of every type, so that none is ever full."""


@final
class ClosedView:
    """A ReadyView in which a mini-batch is all that there ever is, in flight from the beginning, nothing of it run. No
    worker computes while a policy chooses.

    ready: the types with ready nodes when the policy last chose. seconds: that it has taken to choose, with what is
    kept for it alone; what frontiers cost to keep is not in it. Raises OptionError where a policy looks at requests one
    by one: here there are only nodes.
    """

    num_waiting = num_requests = num_in_cohort = 0
    now_s = 0.0

    def __init__(self, policy: CellPolicy, frontier: Frontier) -> None:
        frontier.reset()
        self.policy, self.frontier, self.frontiers = policy, frontier, ClosedFrontiers(frontier)
        num_types = frontier.mini_batch.num_types
        self.cells = [CellType(TypeId(k), f"type {k}", (), (), (UNLIMITED,)) for k in range(num_types)]
        self._types = [cell.type_id for cell in self.cells]
        self.ready: Sequence[TypeId] = ()
        self._depths = ClosedDepths(frontier) if policy.needs_depth else None
        self.seconds = 0.0

    def choose(self) -> TypeId:
        """Return the type that the policy ranks first. InvariantError if it has no ready node."""
        began_s = time.perf_counter()
        nodes = self.frontier.ready
        self.ready = [kind for kind in self._types if nodes[kind]]
        kind = self.policy.rank(self)[0]
        self.seconds += time.perf_counter() - began_s
        if not nodes[kind]:
            raise InvariantError(f"policy {self.policy.name!r} chose type {kind}, which has no ready node")
        return kind

    def run(self, type_id: TypeId, nodes: Sequence[int] | None = None) -> Sequence[int]:
        """Run ready nodes of one type, all of them or those named, and return them."""
        nodes = self.frontier.run(type_id, nodes)
        if self._depths is not None:
            began_s = time.perf_counter()
            self._depths.ran(type_id, nodes)
            self.seconds += time.perf_counter() - began_s
        return nodes

    # --- what policies ask -----------------------------------------------------------------------------------

    def num_ready(self, type_id: TypeId) -> int:
        return len(self.frontier.ready[type_id])

    def num_running(self, type_id: TypeId) -> int:
        return 0

    def ready_since(self, type_id: TypeId) -> NoReturn:
        raise OptionError(f"policy {self.policy.name!r} asks who waits, and in a closed mini-batch nobody does")

    def waiting(self, limit: int) -> NDArray[np.int64]:
        return np.empty(0, np.int64)

    @property
    def depths(self) -> ClosedDepths:
        if self._depths is None:
            raise InvariantError(f"policy {self.policy.name!r} reads depths and does not declare needs_depth")
        return self._depths

    @property
    def requests(self) -> NoReturn:
        raise OptionError(
            f"policy {self.policy.name!r} looks at requests, and a closed mini-batch has only nodes; simulate it"
        )

    kinds = requests


@final
class ClosedFrontiers:
    """A FrontierView of a mini-batch while it is computed."""

    __slots__ = ("_frontier",)

    def __init__(self, frontier: Frontier) -> None:
        self._frontier = frontier

    def independent(self, type_id: TypeId) -> int:
        return self._frontier.independent[type_id]


@final
class ClosedDepths:
    """A DepthView of a mini-batch while it is computed. of: [nodes] their depths."""

    __slots__ = ("_counts", "_frontier", "_means", "_sums", "of")

    def __init__(self, frontier: Frontier) -> None:
        mini_batch: MiniBatch = frontier.mini_batch
        self._frontier = frontier
        self.of: list[int] = mini_batch.depths.tolist()
        self._counts: list[int] = np.bincount(mini_batch.types, minlength=mini_batch.num_types).tolist()
        sums = np.bincount(mini_batch.types, weights=mini_batch.depths, minlength=mini_batch.num_types)
        self._sums: list[float] = sums.tolist()
        self._means: list[float] = [
            total / max(count, 1) for total, count in zip(self._sums, self._counts, strict=True)
        ]

    def ran(self, type_id: int, nodes: Sequence[int]) -> None:
        """These nodes have run."""
        self._counts[type_id] -= len(nodes)
        self._sums[type_id] -= sum([self.of[node] for node in nodes])

    def mean(self, type_id: TypeId) -> float:
        return self._means[type_id]

    def mean_left(self, type_id: TypeId) -> float:
        count, total = self._counts[type_id], self._sums[type_id]
        return total / count if count else 0.0

    def lowest_ready(self, type_id: TypeId) -> int:
        return min([self.of[node] for node in self._frontier.ready[type_id]])
