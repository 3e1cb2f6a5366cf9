"""Which nodes in flight wait for no other node of their type, for policies that ask. Kept as nodes come, run and go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.graph.cell_graph import CellGraph, Kin
from batchmaker.graph.kin import Family, kin_of
from batchmaker.scheduler.arena import Arena, Extents
from batchmaker.scheduler.numbering import Extent, LocalNumbers

Nodes = NDArray[np.int64]


@final
class FrontierBook:
    """Counts, for each type, the units in flight that have no ancestor of their type left to submit.

    A unit is a single node, or what is left of a run: only its next node can come first. As everywhere in the
    scheduler, what reads any step of a run waits for its last one, and a run waits for what feeds any of its steps.

    counts: [types]. left: [nodes] the last node of a unit that is not submitted yet (of a run, not wholly). A group is
    units that wait for the same kin (see `Kin`), under the number of its first one. group: [nodes] of each unit, -1
    without kin. waits, size: [nodes] of each group, how many of its kin are left and how many units it has.
    """

    __slots__ = (
        "_arena",
        "_edges",
        "_families",
        "_fed",
        "_first_edge",
        "_group",
        "_late",
        "_num_edges",
        "_numbers",
        "_size",
        "_waits",
        "counts",
        "left",
    )

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.counts: Nodes = np.zeros(0, np.int64)
        self.left = np.zeros(0, np.bool_)
        self._group: Nodes = np.zeros(0, np.int64)
        self._waits: Nodes = np.zeros(0, np.int64)
        self._size: Nodes = np.zeros(0, np.int64)
        self._first_edge: Nodes = np.zeros(0, np.int64)
        self._num_edges: Nodes = np.zeros(0, np.int64)
        self._numbers = Extents()  # of edges
        self._fed: Nodes = np.zeros(1024, np.int64)  # [edges] the group that a unit feeds
        self._edges: dict[int, tuple[int, int]] = {}  # by first node of an extent: first edge, edges
        self._families: dict[int, Family] = {}  # by slot, of requests that may get more nodes
        self._late: dict[int, list[int]] = {}  # unit -> groups in later extensions that it feeds

    def independent(self, type_id: int) -> int:
        """Return how many nodes of a type are not submitted and have no ancestor of the type that is not."""
        return int(self.counts[type_id])

    def add_type(self) -> None:
        """One more cell type."""
        self.counts = np.append(self.counts, 0)

    def admit(
        self, slot: int, graph: CellGraph, extent: Extent, earlier: LocalNumbers | None, *, is_open: bool
    ) -> None:
        """A request has got these nodes. earlier: the numbers of those before. is_open: it may get more."""
        kin = self._kin(slot, graph, is_open=is_open)
        self._fit()
        shift = extent.base - graph.first
        keys = kin.keys + shift
        self.left[extent.base : extent.base + extent.num_nodes] = False
        self.left[keys] = True
        self._num_edges[keys] = 0
        self._group[keys] = -1
        free = kin.group < 0
        if not free.all():
            members = np.flatnonzero(~free)[::-1]
            number: Nodes = np.zeros(kin.num_groups, np.int64)
            number[kin.group[members]] = keys[members]
            self._group[keys[members]] = number[kin.group[members]]
            self._size[number] = np.bincount(kin.group[members])
            self._waits[number] = 0
            self._feed(kin, graph, extent, number, earlier)
            free[members] = self._waits[self._group[keys[members]]] == 0
        self.counts += np.bincount(kin.types[free], minlength=len(self.counts))

    def _kin(self, slot: int, graph: CellGraph, *, is_open: bool) -> Kin:
        family = self._families.get(slot)
        if family is None and not is_open:
            return kin_of(graph)
        if family is None:
            family = self._families[slot] = Family(graph.first)
        if not is_open:
            del self._families[slot]
        return family.add(graph)

    def _feed(self, kin: Kin, graph: CellGraph, extent: Extent, number: Nodes, earlier: LocalNumbers | None) -> None:
        """Let units know the groups that wait for them. number: [groups]."""
        feeders, fed = kin.feeders, number[kin.fed]
        own = feeders >= graph.first
        if earlier is not None and not own.all():
            before = earlier.of(feeders[~own])
            for unit, group in zip(before.tolist(), fed[~own].tolist(), strict=True):
                if self.left[unit]:
                    self._late.setdefault(unit, []).append(group)
                    self._waits[group] += 1
        order = np.argsort(feeders[own], kind="stable")
        units, fed = feeders[own][order] + (extent.base - graph.first), fed[own][order]
        if len(units) == 0:
            return
        np.add.at(self._waits, fed, 1)
        first = self._numbers.allocate(len(units))
        if self._numbers.top > len(self._fed):
            self._fed = np.concatenate(
                (self._fed, np.zeros(max(len(self._fed), self._numbers.top - len(self._fed)), np.int64))
            )
        self._edges[extent.base] = (first, len(units))
        self._fed[first : first + len(units)] = fed
        distinct, begins, counts = np.unique(units, return_index=True, return_counts=True)
        self._first_edge[distinct] = first + begins
        self._num_edges[distinct] = counts

    def submitted(self, type_id: int, nodes: Nodes, subgraphs: Nodes) -> None:
        """These nodes of one type are on a worker."""
        ends = self._arena.end[subgraphs]
        self._gone(type_id, nodes[(ends == 0) | (nodes + 1 == ends)])

    def stopped(self, type_id: int, ends: Nodes) -> None:
        """Runs that end before these nodes have ended early, if they had not come to their last step."""
        last = ends - 1
        self._gone(type_id, last[self.left[last]])

    def _gone(self, type_id: int, units: Nodes) -> None:
        """These units of one type are submitted as a whole."""
        self.left[units] = False
        freed = -len(units)
        edge_counts = self._num_edges[units]
        total = int(edge_counts.sum())
        if total:
            within = np.arange(total) - np.repeat(np.cumsum(edge_counts) - edge_counts, edge_counts)
            groups = self._fed[np.repeat(self._first_edge[units], edge_counts) + within]
            freed += self._fewer(groups)
        if self._late:
            late = [group for unit in units.tolist() for group in self._late.pop(unit, ())]
            freed += self._fewer(np.array(late, np.int64))
        self.counts[type_id] += freed

    def _fewer(self, groups: Nodes) -> int:
        """Each of these groups waits for one unit less; return how many units wait for none now."""
        np.subtract.at(self._waits, groups, 1)
        return int(self._size[np.unique(groups[self._waits[groups] == 0])].sum())

    def withdraw(self, extents: Sequence[Extent]) -> None:
        """What is left of these nodes will not be submitted: their request has failed."""
        for extent in extents:
            units = extent.base + np.flatnonzero(self.left[extent.base : extent.base + extent.num_nodes])
            group = self._group[units]
            free = units[(group < 0) | (self._waits[group] == 0)]
            np.subtract.at(self.counts, self._arena.type[self._arena.subgraph[free]], 1)
            self.left[units] = False
            if self._late:
                for unit in units.tolist():
                    self._late.pop(unit, None)

    def forget(self, slot: int, extents: Sequence[Extent]) -> None:
        """A request is over, and its numbers are free."""
        self._families.pop(slot, None)
        for extent in extents:
            if extent.num_nodes and extent.base in self._edges:  # an empty one may begin where another does
                self._numbers.release(*self._edges.pop(extent.base))

    def _fit(self) -> None:
        """Make the arrays hold every node number given out."""
        size = self._arena.node_capacity
        if size > len(self.left):
            more = size - len(self.left)
            self.left = np.concatenate((self.left, np.zeros(more, np.bool_)))
            for name in ("_group", "_waits", "_size", "_first_edge", "_num_edges"):
                setattr(self, name, np.concatenate((getattr(self, name), np.zeros(more, np.int64))))
