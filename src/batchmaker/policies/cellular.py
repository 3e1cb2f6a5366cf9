"""Cellular batching: Algorithm 1 of BatchMaker (section 4.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled
from batchmaker.graph.spec import TypeId
from batchmaker.policies.base import CellPolicy, ReadyView

Ids = NDArray[np.int64]

BUDGET_MS: Final = 4.0
"""Milliseconds of a task, as measured in decision 14: shorter tasks cost small networks more than newcomers gain."""

MOST_STEPS: Final = 64
"""Most steps of a task, however short they are. All positions of a task are reported together."""


@compiled
def by_algorithm_one(ready: Ids, num_ready: Ids, num_running: Ids, max_batch: Ids, priority: Ids) -> Ids:
    """Return the ready types by the three criteria of Algorithm 1, then by priority, then by id.

    ready: [types] ascending. num_ready, num_running, max_batch, priority: [types] of each, in this order.
    """
    order = np.arange(len(ready))
    criterion = np.empty(len(ready), np.int64)
    for i in range(len(ready)):
        criterion[i] = 0 if num_ready[i] >= max_batch[i] else 2 if num_running[i] > 0 else 1
        k = i
        while k > 0:
            before = order[k - 1]
            if criterion[before] < criterion[i] or (
                criterion[before] == criterion[i] and priority[before] >= priority[i]
            ):
                break
            order[k] = before
            k -= 1
        order[k] = i
    return ready[order]


@final
class CellularPolicy(CellPolicy):
    """Prefer a full batch, then a type that is not running, then any ready type; within each, the highest priority.

    A task has as many steps as fit into budget_ms, by recent step times. It is long enough that deciding costs little
    beside it, and short enough for newcomers and other types, which wait for it. max_steps: a fixed number of steps
    instead (MaxTasksToSubmit, 5 in the paper), however long they take.
    """

    name = "cellular"

    def __init__(self, max_steps: int | None = None, budget_ms: float = BUDGET_MS) -> None:
        by_algorithm_one(*np.zeros((5, 0), np.int64))  # compiled now, and not while a request waits
        if max_steps is None:
            super().__init__(MOST_STEPS, budget_ms)
        else:
            super().__init__(max_steps)

    def rank(self, view: ReadyView) -> Sequence[TypeId]:
        """Rank the ready types; see `by_algorithm_one`."""
        ready, cells = view.ready, view.cells
        if len(ready) < 2:
            return ready
        of_ready = [(t, view.num_ready(t), view.num_running(t), cells[t].max_batch, cells[t].priority) for t in ready]
        facts = np.array(of_ready, np.int64).T.copy()
        ranked: list[TypeId] = by_algorithm_one(*facts).tolist()
        return ranked
