"""Cellular batching: Algorithm 1 of BatchMaker (section 4.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from batchmaker.errors import OptionError
from batchmaker.graph.spec import TypeId
from batchmaker.policies.base import CellPolicy, ReadyView


@final
class CellularPolicy(CellPolicy):
    """Prefer a full batch, then a type that is not running, then anything ready; within each, the highest priority.

    max_steps: MaxTasksToSubmit, the paper's 5. Small lets newcomers and other types in sooner, large saves scheduling
    and gathering.
    """

    __slots__ = ("_max_steps",)

    name = "cellular"

    def __init__(self, max_steps: int = 5) -> None:
        if max_steps < 1:
            raise OptionError(f"max_steps must be at least 1, got {max_steps}")
        self._max_steps = max_steps

    @property
    def max_steps(self) -> int:
        return self._max_steps

    def rank(self, view: ReadyView) -> Sequence[TypeId]:
        def criterion(type_id: TypeId) -> int:
            if view.num_ready(type_id) >= view.cells[type_id].max_batch:
                return 0
            return 2 if view.num_running(type_id) else 1

        ready = view.ready
        if len(ready) < 2:
            return ready
        return sorted(ready, key=lambda t: (criterion(t), -view.cells[t].priority, t))
