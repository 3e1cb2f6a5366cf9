"""Kin: the nearest ancestors of a unit that are of its own type.

A unit is what a scheduler sees as one: a single node or a run. A unit of type a is in ED-Batch's Frontier(G^a) when no
ancestor of its type is left to run. Ancestors run first, so it is enough that its kin have run: those of its ancestors
of the type that are no ancestors of another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import final

import numpy as np

from batchmaker.graph.cell_graph import CellGraph, Kin, NodeBlock, Run


def kin_of(graph: CellGraph) -> Kin:
    """Return the kin in a request's first graph, where nothing that it begins from is left to run. Found once."""
    if graph.known_kin is None:
        graph.known_kin = Family(graph.first).add(graph)
    return graph.known_kin


@final
class Family:
    """The units of a request and their ancestors, graph by graph.

    num_kept: nodes before its first graph; they have run. Ancestors are kept as bits of whole numbers: n units take at
    most n * n / 8 bytes, and as little time as that says.
    """

    __slots__ = ("_above", "_keys", "_of_type", "_unit_of")

    def __init__(self, num_kept: int = 0) -> None:
        self._above: list[int] = []  # bit u of entry v: unit u is an ancestor of unit v
        self._of_type: dict[int, int] = {}  # bit u: unit u is of the type
        self._keys: list[int] = []
        self._unit_of: list[int] = [-1] * num_kept  # by node

    def add(self, graph: CellGraph) -> Kin:
        """Take the next graph of the request."""
        first = len(self._keys)
        types: list[int] = []
        group: list[int] = []
        feeders: list[int] = []
        fed: list[int] = []
        groups: dict[tuple[int, int], int] = {}  # by type and ancestors of the type
        for type_id, sources, length in self._units(graph):
            above = 0
            for source in sources:
                above |= self._above[source] | 1 << source
            same = above & self._of_type.get(type_id, 0)
            number = groups.get((type_id, same), -1) if same else -1
            if same and number < 0:
                number = groups[type_id, same] = len(groups)
                kin = self._nearest(same)
                feeders += [self._keys[unit] for unit in kin]
                fed += [number] * len(kin)
            self._of_type[type_id] = self._of_type.get(type_id, 0) | 1 << len(self._above)
            self._unit_of += [len(self._above)] * length
            self._above.append(above)
            self._keys.append(len(self._unit_of) - 1)
            types.append(type_id)
            group.append(number)
        columns = (self._keys[first:], types, group, feeders, fed)
        return Kin(*(np.array(column, np.int64) for column in columns))

    def _nearest(self, same: int) -> list[int]:
        """Return the units that are no ancestors of others among these. An ancestor has the smaller number."""
        kin = []
        while same:
            last = same.bit_length() - 1
            kin.append(last)
            same &= ~(self._above[last] | 1 << last)
        return kin

    def _units(self, graph: CellGraph) -> Iterator[tuple[int, set[int], int]]:
        """Yield type, source units and number of nodes of each unit, in order. The caller adds each to `_unit_of`."""
        for part in graph.parts:
            if isinstance(part, Run):
                yield int(part.type_id), self._sources(_fed_to_run(part)), part.length
            else:
                yield from self._of_block(part)

    def _of_block(self, block: NodeBlock) -> Iterator[tuple[int, set[int], int]]:
        for type_id, fed in zip(block.types.tolist(), block.sources.T.tolist(), strict=True):
            yield type_id, self._sources(fed), 1

    def _sources(self, nodes: Iterable[int]) -> set[int]:
        found = {self._unit_of[node] for node in nodes if node >= 0}
        found.discard(-1)
        return found


def _fed_to_run(run: Run) -> list[int]:
    nodes = [source for source, _ in run.init]
    for column in run.sequences:
        if column is not None:
            nodes += column[0].tolist()
    return nodes
