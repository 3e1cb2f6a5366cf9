"""A request between its arrival and its answer, as the cell driver keeps it."""

from __future__ import annotations

from collections import deque
from typing import Any

from batchmaker.cells.unfolding import Unfolding
from batchmaker.engine.ticket import Ticket
from batchmaker.graph.cell_graph import CellGraph


class InFlight:
    """A request between its arrival and its answer."""

    __slots__ = ("bases", "error", "graphs", "slot", "streamed", "ticket", "unfolding", "values", "waiting_for")

    def __init__(self, ticket: Ticket, unfolding: Unfolding) -> None:
        self.ticket = ticket
        self.unfolding = unfolding
        self.graphs: deque[CellGraph] = deque()  # handed to the scheduler and not admitted yet
        self.bases: list[tuple[int, int, int]] = []  # base, first local node, number of nodes
        self.slot: int | None = None  # once it is admitted
        self.values: dict[tuple[int, int], Any] = {}
        self.waiting_for: set[tuple[int, int]] = set()
        self.streamed = 0
        self.error: Exception | None = None

    def local(self, node: int) -> int:
        """Return the request's own number of a node; fast for those added last, which are those that run."""
        for base, first, count in reversed(self.bases):
            if base <= node < base + count:
                return node - base + first
        raise KeyError(node)

    def value(self, node: int, output: int) -> Any:
        """Return what has come back to the host of a node, by the request's own number."""
        return self.values[node, output]
