"""A request between its arrival and its answer, as the cell driver keeps it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from batchmaker.cells.cell import OpenLoop
from batchmaker.cells.structure import Handle
from batchmaker.cells.templates import Template
from batchmaker.cells.unfolding import Unfolding, end_of_loop
from batchmaker.engine.arrivals import Drawn
from batchmaker.engine.result_tables import ResultTables
from batchmaker.engine.ticket import Ticket
from batchmaker.errors import BatchmakerError
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.values import Value
from batchmaker.scheduler.commands import Admit


class InFlight:
    """A request between its arrival and its answer. tables: where its values are unless it is told of each.

    told: whether it must hear of every value when it comes, since an unfold function waits for it, it is streamed, or
    the request goes on from what its sequence has kept. drawn: its values, where a template stands for its unfolding.
    """

    __slots__ = (
        "_tables", "bases", "drawn", "ended", "error", "graphs", "loops", "slot", "streamed", "ticket", "told",
        "unfolding", "values", "waiting_for",
    )  # fmt: skip

    def __init__(
        self, ticket: Ticket, unfolding: Unfolding | Template, tables: ResultTables, drawn: Drawn | None = None
    ) -> None:
        self.ticket = ticket
        self.unfolding = unfolding
        self.drawn = drawn
        self._tables = tables
        streams = ticket.on_value is not None and unfolding.streamed_sequence is not None
        self.told = unfolding.open or streams or ticket.chunk is not None
        self.graphs = deque((unfolding.graph,))  # handed to the scheduler and not admitted yet
        self.bases: list[tuple[int, int, int]] = []  # base, first local node, number of nodes
        self.slot: int | None = None  # once it is admitted
        self.loops: list[tuple[int, OpenLoop]] = []  # those that a value may end, after what leads from local to number
        self.ended: dict[int, int] = {}  # last node of each that has ended -> the node at which it did
        self.values: dict[tuple[int, int], Any] = {}
        self.waiting_for = set(unfolding.awaited)
        self.streamed = 0
        self.error: BatchmakerError | None = None

    def admit(self, command: Admit) -> CellGraph:
        """Take the numbers of the nodes of its next graph, and return that."""
        graph = self.graphs.popleft()
        self.bases.append((command.base, command.first_local, command.num_nodes))
        if self.slot is None:
            self.slot = command.slot
            if command.first_local:
                self.bases.append((command.kept_base, 0, command.first_local))
        if self.unfolding.loops:
            shift = command.base - command.first_local
            found = (self.unfolding.loops[run.first] for run in graph.runs if run.open_ended)
            self.loops += [(shift, loop) for loop in found]
        return graph

    def local(self, node: int) -> int:
        """Return the request's own number of a node; fast for those added last, which are those that run."""
        for base, first, count in reversed(self.bases):
            if base <= node < base + count:
                return node - base + first
        raise KeyError(node)

    def loop_at(self, node: int) -> tuple[int, OpenLoop] | None:
        """Return the request's own number of a node, and the loop that it is a step of, if a value may end it."""
        for shift, loop in reversed(self.loops):
            if loop.first <= node - shift <= loop.last:
                return node - shift, loop
        return None

    def store(self, local: int, output: int, value: Any) -> None:
        """Keep a value that has come, and hand it to whoever reads the stream as far as that has come in order."""
        self.values[local, output] = value
        self.waiting_for.discard((local, output))
        if self.ticket.on_value is None:
            return
        sequence = self.unfolding.streamed_sequence
        if sequence is not None and sequence.output == output:
            nodes = sequence.nodes
            while self.streamed < len(nodes) and (int(nodes[self.streamed]), output) in self.values:
                self.ticket.on_value(self.values[int(nodes[self.streamed]), output])
                self.streamed += 1

    def end_loop(self, last: int, local: int, fetched: Iterable[int]) -> None:
        """Note where the loop to node `last` has ended, and keep its final outputs where they are looked up.

        fetched: outputs that came to the host.
        """
        self.ended[last] = local
        for output in fetched:
            if (local, output) in self.values:
                self.store(end_of_loop(last), output, self.values[local, output])

    def value(self, node: int, output: int) -> Any:
        """Return what it has been told of a node, by the request's own number."""
        return self.values[node, output]

    def rows(self, handle: Handle) -> Tensor | None:
        """Return what a handle stands for, as a tensor of its own; None where it has been told of it."""
        table = None if self.told else self._tables.find(handle.output, handle.spec)
        if table is None:
            return None
        base, first, _ = self.bases[0]
        if isinstance(handle, Value):
            node = self.ended[handle.node] if handle.ends_open_loop else handle.node
            return table.read_one(node - first + base)
        nodes = handle.nodes
        if handle.open_ended:
            nodes = nodes[: self.ended[int(nodes[-1])] - int(nodes[0]) + 1]
        return table.read(nodes + (base - first))
