"""The sufficient condition for a best order (ED-Batch, Lemma 1) as a heuristic: the type nearest to it runs first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, final

from batchmaker.graph.spec import TypeId
from batchmaker.policies.base import CellPolicy, ReadyView


def full_first(view: ReadyView, ranked: Sequence[TypeId]) -> Sequence[TypeId]:
    """Return the order with the types first whose ready nodes fill a batch.

    Orders that save batches wait until more nodes of a type gather. If they already fill a batch, waiting saves
    nothing, and running the full batch lets other types gather earlier.
    """
    cells = view.cells
    full = [type_id for type_id in ranked if view.num_ready(type_id) >= cells[type_id].max_batch]
    return [*full, *(type_id for type_id in ranked if type_id not in full)] if full else ranked


def sufficient_order(view: ReadyView) -> list[TypeId]:
    """Return the ready types by num_ready / independent, highest first. The policy must declare needs_frontiers.

    At a ratio of 1, no node that its own type would let run is held back by an ancestor of another type. Then some
    shortest sequence of batches continues with the type. Ties go to the type with more ready nodes, because its batch
    does more of the work, and then to the lower type id.
    """
    independent = view.frontiers.independent
    counts = [(view.num_ready(type_id), type_id) for type_id in view.ready]
    return [type_id for *_, type_id in sorted((-count / independent(t), -count, t) for count, t in counts)]


@final
class SufficientPolicy(CellPolicy):
    """Rank types by the ready share of their frontier (Chen et al., ICML 2023, section 2.3).

    Full batches go first; that section has no limit to batches. max_steps: steps per task; 1 looks at the order before
    every batch, as the paper does. The paper plans a closed mini-batch, forwards or backwards from the sinks. Here
    requests come and go, so it works forwards: the mini-batch is everything in flight when a step is chosen.
    """

    name = "sufficient"
    needs_frontiers: ClassVar[bool] = True
    node_by_node: ClassVar[bool] = True
    urgent_first: ClassVar[bool] = True

    def rank(self, view: ReadyView) -> Sequence[TypeId]:
        ready = view.ready
        return ready if len(ready) < 2 else full_first(view, sufficient_order(view))
