"""The sufficient condition for a best order (ED-Batch, Lemma 1) as a heuristic: the type nearest to it runs first."""

from __future__ import annotations

from typing import ClassVar, final

from batchmaker.policies.base import CellPolicy
from batchmaker.policies.order import READY_SHARE


@final
class SufficientPolicy(CellPolicy):
    """Rank types by the ready share of their frontier (Chen et al., ICML 2023, section 2.3).

    Full batches go first; that section has no limit to batches. max_steps: steps per task; 1 looks at the order before
    every batch, as the paper does. The paper plans a closed mini-batch, forwards or backwards from the sinks. Here
    requests come and go, so it works forwards: the mini-batch is everything in flight when a step is chosen.
    """

    name = "sufficient"
    order: ClassVar[int] = READY_SHARE
    needs_frontiers: ClassVar[bool] = True
    node_by_node: ClassVar[bool] = True
    urgent_first: ClassVar[bool] = True
