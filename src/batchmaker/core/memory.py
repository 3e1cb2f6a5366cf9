"""What happens where there is no memory for tables to grow: which requests it is that want it, or have it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchmaker.core.commands import Command, TableSpec
from batchmaker.core.layout import NOWHERE
from batchmaker.core.rows import NoMemoryError
from batchmaker.core.state import SchedulerState
from batchmaker.graph.cell_graph import CellGraph


def fitting(
    state: SchedulerState, graphs: Sequence[CellGraph], owners: Sequence[int], commands: list[Command]
) -> tuple[Sequence[CellGraph], Sequence[int], list[tuple[int, str]]]:
    """Make room for graphs that are about to be admitted. Adds how host tables must grow first to `commands`.

    owners: [graphs] slots. Returns the graphs for which there is memory, with their requests, and the requests of the
    others, with the reason. These have the most nodes, earlier ones included: host tables have a row for each.
    """
    too_large: list[tuple[int, str]] = []
    while graphs:
        try:
            commands += state.admission.make_room(graphs, state.grow)
            break
        except NoMemoryError as error:
            sizes = [
                graph.num_nodes + int(state.arena.spans_of((owner,))[:, 1].sum())
                for graph, owner in zip(graphs, owners, strict=True)
            ]
            largest = sizes.index(max(sizes))
            too_large.append((owners[largest], str(error)))
        graphs = [*graphs[:largest], *graphs[largest + 1 :]]
        owners = [*owners[:largest], *owners[largest + 1 :]]
    return graphs, owners, too_large


def largest_holder(state: SchedulerState, tables: tuple[TableSpec, ...]) -> int | None:
    """Return the slot of the request that has the most rows of a pool, by its tables; None if none is in flight."""
    arena = state.arena
    ours = np.array([entry.pool.tables is tables for entry in state.types], np.bool_)

    def num_rows(slot: int) -> int:
        spans = [slice(base, base + count) for base, count in arena.spans_of((slot,)).tolist()]
        return sum(
            int(np.count_nonzero(ours[arena.type[arena.subgraph[s]]] & (arena.row[s] != NOWHERE))) for s in spans
        )

    return max(state.living, key=num_rows, default=None)
