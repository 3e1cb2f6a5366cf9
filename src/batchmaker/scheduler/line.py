"""The line of requests that have arrived and not begun."""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain, islice
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.graph.cell_graph import CellGraph


@final
class WaitingLine:
    """Slots with their graphs, the highest priority first, in order of arrival within a priority."""

    __slots__ = ("_graphs", "_priority")

    def __init__(self) -> None:
        self._graphs: dict[int, OrderedDict[int, CellGraph]] = {}  # priority -> slot -> graph
        self._priority: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._priority)

    def join(self, slot: int, graph: CellGraph, priority: int) -> None:
        """Put a request at the end of its priority."""
        if priority not in self._graphs:
            self._graphs[priority] = OrderedDict()
            self._graphs = dict(sorted(self._graphs.items(), reverse=True))
        self._graphs[priority][slot] = graph
        self._priority[slot] = priority

    def leave(self, slot: int) -> CellGraph:
        """Take a request out, wherever it stands; return its graph."""
        priority = self._priority.pop(slot)
        graphs = self._graphs[priority]
        graph = graphs.pop(slot)
        if not graphs:
            del self._graphs[priority]
        return graph

    def first(self, limit: int) -> NDArray[np.int64]:
        """Return the slots of the first `limit` requests."""
        if len(self._graphs) == 1:
            (only,) = self._graphs.values()
            return np.fromiter(islice(only, limit), np.int64, min(limit, len(only)))
        return np.fromiter(islice(chain.from_iterable(self._graphs.values()), limit), np.int64)
