"""Agenda batching: the cell type whose nodes are the least deep runs first (DyNet, and ED-Batch's variant)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, final

from batchmaker.graph.spec import TypeId
from batchmaker.policies.base import CellPolicy, DepthView, ReadyView


class _ByMeanDepth(CellPolicy):
    """Ranks the ready type of the lowest mean depth first; ties go to the lower type id."""

    needs_depth: ClassVar[bool] = True
    node_by_node: ClassVar[bool] = True

    def rank(self, view: ReadyView) -> Sequence[TypeId]:
        ready = view.ready
        if len(ready) < 2:
            return ready
        return sorted(ready, key=lambda t: (self._mean_depth(view.depths, t), t))

    @abstractmethod
    def _mean_depth(self, depths: DepthView, type_id: TypeId) -> float:
        """Return the depth by which a type is ranked."""


@final
class AgendaPolicy(_ByMeanDepth):
    """Rank types by the mean depth of all their nodes in the mini-batch, run or not (Neubig et al., NeurIPS 2017).

    max_steps: steps per task; 1 looks at the order before every batch, as the paper does. A mini-batch is the requests
    in flight between two moments at which none is. DyNet computes the means once, with the whole mini-batch at hand.
    Here every request that begins is added and none is removed, so the order is DyNet's if all begin together. Under a
    load without pauses the means settle, and so does the order.
    """

    name = "agenda"

    def _mean_depth(self, depths: DepthView, type_id: TypeId) -> float:
        return depths.mean(type_id)


@final
class AgendaRemainingPolicy(_ByMeanDepth):
    """Rank types by the mean depth of their nodes that have not been submitted (ED-Batch's agenda).

    max_steps: steps per task; 1 looks at the order before every batch, as the paper does. The nodes are those of all
    requests in flight, so the order follows the load.
    """

    name = "agenda-remaining"

    def _mean_depth(self, depths: DepthView, type_id: TypeId) -> float:
        return depths.mean_left(type_id)
