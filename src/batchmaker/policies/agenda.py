"""Agenda batching: the cell type whose nodes are the least deep runs first (DyNet, and ED-Batch's variant)."""

from __future__ import annotations

from typing import ClassVar, final

from batchmaker.policies.base import CellPolicy
from batchmaker.policies.order import MEAN_DEPTH, MEAN_DEPTH_LEFT


@final
class AgendaPolicy(CellPolicy):
    """Rank types by the mean depth of all their nodes in the mini-batch, run or not (Neubig et al., NeurIPS 2017).

    max_steps: steps per task; 1 looks at the order before every batch, as the paper does. A mini-batch is the requests
    in flight between two moments at which none is. DyNet computes the means once, with the whole mini-batch at hand.
    Here every request that begins is added and none is removed, so the order is DyNet's if all begin together. Under a
    load without pauses the means settle, and so does the order.
    """

    name = "agenda"
    order: ClassVar[int] = MEAN_DEPTH
    needs_depth: ClassVar[bool] = True
    node_by_node: ClassVar[bool] = True


@final
class AgendaRemainingPolicy(CellPolicy):
    """Rank types by the mean depth of their nodes that have not been submitted (ED-Batch's agenda).

    max_steps: steps per task; 1 looks at the order before every batch, as the paper does. The nodes are those of all
    requests in flight, so the order follows the load.
    """

    name = "agenda-remaining"
    order: ClassVar[int] = MEAN_DEPTH_LEFT
    needs_depth: ClassVar[bool] = True
    node_by_node: ClassVar[bool] = True
