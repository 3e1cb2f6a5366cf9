"""The sufficient condition for a best order (ED-Batch, Lemma 1) as a rule: the type nearest to it runs first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, final

from batchmaker.graph.spec import TypeId
from batchmaker.policies.base import CellPolicy, ReadyView


def sufficient_order(view: ReadyView) -> list[TypeId]:
    """Return the ready types by num_ready / independent, highest first. The policy must declare needs_frontiers.

    At 1 no ancestor of another type holds back a node that its own type would let run, and some shortest sequence of
    batches goes on with the type. Ties go to the type with more ready nodes, since its batch does more of what is to be
    done, and then to the lower type id.
    """
    ready, independent = view.num_ready, view.frontiers.independent
    return sorted(view.ready, key=lambda t: (-ready(t) / independent(t), -ready(t), t))


@final
class SufficientPolicy(CellPolicy):
    """Rank types by the share of their frontier that is ready (Chen et al., ICML 2023, section 2.3).

    max_steps: steps per task; 1 looks at the order before every batch, as the paper does. The paper plans a closed
    mini-batch, forwards or backwards from the sinks. Here requests come and go, so it is forwards: what is in flight
    when a step is chosen is the mini-batch.
    """

    name = "sufficient"
    needs_frontiers: ClassVar[bool] = True
    node_by_node: ClassVar[bool] = True
    urgent_first: ClassVar[bool] = True

    def rank(self, view: ReadyView) -> Sequence[TypeId]:
        return view.ready if len(view.ready) < 2 else sufficient_order(view)
