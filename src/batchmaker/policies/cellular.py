"""Cellular batching: Algorithm 1 of BatchMaker (section 4.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from batchmaker.graph.spec import TypeId
from batchmaker.policies.base import CellPolicy, ReadyView


@final
class CellularPolicy(CellPolicy):
    """Prefer a full batch, then a type that is not running, then anything ready; within each, the highest priority.

    max_steps: MaxTasksToSubmit, the paper's 5. Small lets newcomers and other types in sooner, large saves scheduling
    and gathering.
    """

    name = "cellular"

    def __init__(self, max_steps: int = 5) -> None:
        super().__init__(max_steps)

    def rank(self, view: ReadyView) -> Sequence[TypeId]:
        def criterion(type_id: TypeId) -> int:
            if view.num_ready(type_id) >= view.cells[type_id].max_batch:
                return 0
            return 2 if view.num_running(type_id) else 1

        ready = view.ready
        if len(ready) < 2:
            return ready
        return sorted(ready, key=lambda t: (criterion(t), -view.cells[t].priority, t))
