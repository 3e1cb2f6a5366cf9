"""Cellular batching: Algorithm 1 of BatchMaker (section 4.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from batchmaker.graph.spec import TypeId
from batchmaker.policies.base import CellPolicy, ReadyView

BUDGET_MS: Final = 4.0
"""Milliseconds of a task, as measured in decision 14: shorter tasks cost small networks more than newcomers gain."""

MOST_STEPS: Final = 64
"""Most steps of a task, however short they are. All positions of a task are reported together."""


@final
class CellularPolicy(CellPolicy):
    """Prefer a full batch, then a type that is not running, then any ready type; within each, the highest priority.

    A task has as many steps as fit into budget_ms, by recent step times. It is long enough that deciding costs little
    beside it, and short enough for newcomers and other types, which wait for it. max_steps: a fixed number of steps
    instead (MaxTasksToSubmit, 5 in the paper), however long they take.
    """

    name = "cellular"

    def __init__(self, max_steps: int | None = None, budget_ms: float = BUDGET_MS) -> None:
        if max_steps is None:
            super().__init__(MOST_STEPS, budget_ms)
        else:
            super().__init__(max_steps)

    def rank(self, view: ReadyView) -> Sequence[TypeId]:
        """Rank the ready types by the three criteria of Algorithm 1, then by priority, then by id."""

        def criterion(type_id: TypeId) -> int:
            if view.num_ready(type_id) >= view.cells[type_id].max_batch:
                return 0
            return 2 if view.num_running(type_id) else 1

        ready = view.ready
        if len(ready) < 2:
            return ready
        return sorted(ready, key=lambda t: (criterion(t), -view.cells[t].priority, t))
