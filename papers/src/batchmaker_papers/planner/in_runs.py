"""Planning for the binding of a cell: for the whole cell, and whether its steps in chains should stay unplanned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from batchmaker.compile.dataflow import TracedCell, copied
from batchmaker.compile.lower import Packer
from batchmaker_papers.planner.plan import Plan, Way, fastest_in_runs, plan_cell


def planner(cell: TracedCell) -> PlannedCell:
    """Return the fastest way to run a cell, as measured by `plan_cell`."""
    return PlannedCell(plan_cell(cell))


@final
@dataclass(frozen=True, slots=True)
class PlannedCell:
    """A plan in the form for binding; see `batchmaker.compile.binding.Planned`."""

    plan: Plan

    @property
    def note(self) -> str:
        return self.plan.note

    @property
    def graph(self) -> TracedCell:
        return self.plan.way.graph

    def packer(self) -> Packer:
        return self.plan.way.packer()

    def unplanned(
        self, cell: TracedCell, fold: Callable[[TracedCell], list[str]]
    ) -> Callable[[int], TracedCell | None]:
        return Unplanned(cell, self.plan.way, fold).preferred


@final
@dataclass(frozen=True, slots=True)
class Unplanned:
    """The remaining choice for a planned cell: whether planning also makes its steps faster.

    graph: the cell as bound without planning. way: as planned. Tokens are folded in neither; `fold` does that in place.
    """

    graph: TracedCell
    way: Way
    fold: Callable[[TracedCell], list[str]]

    def preferred(self, num_step_inputs: int) -> TracedCell | None:
        """Return the graph to split instead of the planned one, None if the planned one is faster."""
        itself = Way(self.graph, fused=True, reuse=False)
        if fastest_in_runs([itself, self.way], num_step_inputs) == 1:
            return None
        graph = copied(self.graph)
        self.fold(graph)
        return graph
