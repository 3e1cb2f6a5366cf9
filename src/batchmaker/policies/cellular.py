"""Cellular batching: Algorithm 1 of BatchMaker (section 4.3)."""

from __future__ import annotations

from typing import ClassVar, Final, final

from batchmaker.policies.base import CellPolicy
from batchmaker.policies.order import ALGORITHM_1

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
    order: ClassVar[int] = ALGORITHM_1

    def __init__(self, max_steps: int | None = None, budget_ms: float = BUDGET_MS) -> None:
        if max_steps is None:
            super().__init__(MOST_STEPS, budget_ms)
        else:
            super().__init__(max_steps)
