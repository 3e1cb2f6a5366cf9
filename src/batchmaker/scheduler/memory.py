"""What happens where there is no memory for tables to grow: which requests it is that want it, or have it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchmaker.graph.cell_graph import CellGraph
from batchmaker.scheduler.arena import NOWHERE
from batchmaker.scheduler.commands import Command, TableSpec
from batchmaker.scheduler.rows import NoMemoryError
from batchmaker.scheduler.state import RequestEntry, SchedulerState


def fitting(
    state: SchedulerState, graphs: Sequence[CellGraph], owners: Sequence[RequestEntry], commands: list[Command]
) -> tuple[Sequence[CellGraph], Sequence[RequestEntry], list[tuple[RequestEntry, str]]]:
    """Make room for graphs that are about to be admitted. Adds how host tables must grow first to `commands`.

    Returns the graphs for which there is memory, with their requests, and the requests of the others, with the reason.
    These have the most nodes, earlier ones included: host tables have a row for each.
    """
    too_large: list[tuple[RequestEntry, str]] = []
    while graphs:
        try:
            commands += state.admission.make_room(graphs, state.grow)
            break
        except NoMemoryError as error:
            sizes = [
                graph.num_nodes + sum([extent.num_nodes for extent in owner.extents])
                for graph, owner in zip(graphs, owners, strict=True)
            ]
            largest = sizes.index(max(sizes))
            too_large.append((owners[largest], str(error)))
        graphs = [*graphs[:largest], *graphs[largest + 1 :]]
        owners = [*owners[:largest], *owners[largest + 1 :]]
    return graphs, owners, too_large


def largest_holder(state: SchedulerState, tables: tuple[TableSpec, ...]) -> RequestEntry | None:
    """Return the request in flight that has the most rows of a pool, by its tables; None if none is in flight."""
    arena = state.arena
    ours = np.array([entry.pool.tables is tables for entry in state.types], np.bool_)
    alive = [entry for entry in state.by_slot.values() if entry.alive]

    def num_rows(entry: RequestEntry) -> int:
        spans = [slice(extent.base, extent.base + extent.num_nodes) for extent in entry.extents]
        return sum(
            int(np.count_nonzero(ours[arena.type[arena.subgraph[s]]] & (arena.row[s] != NOWHERE))) for s in spans
        )

    return max(alive, key=num_rows, default=None)
