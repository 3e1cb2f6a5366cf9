"""A request between its arrival and its answer, as the cell driver keeps it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.engine.arrivals import Drawn
from batchmaker.engine.ticket import Ticket
from batchmaker.errors import BatchmakerError
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.values import ValueSequence
from batchmaker.model.scope import OpenLoop
from batchmaker.model.structure import Handle
from batchmaker.model.templates import Template
from batchmaker.model.unfolding import Unfolding, end_of_loop
from batchmaker.scheduler.commands import Admit


class InFlight:
    """A request between its arrival and its answer. What only some have is set where it is needed.

    told: whether it must hear of every value when it comes, since an unfold function waits for it, it is streamed, or
    the result has some that an earlier request of its sequence has computed. drawn: its values, where a template stands
    for its unfolding. graphs: those handed to the scheduler and not admitted yet; admitted: where the others are;
    shift: what leads from the request's own numbers to those of the nodes, in the last of them. loops: those that a
    value may end, after their shift; ended: last node of each that has ended -> the node at which it did. values: those
    it was told of, by the request's own number and output. gathered: the others that its result takes; see
    Results.gather.
    """

    admitted: tuple[Admit, ...] = ()
    loops: tuple[tuple[int, OpenLoop], ...] = ()
    waiting_for: set[tuple[int, int]] | None = None
    shift = 0
    streamed = 0
    error: BatchmakerError | None = None

    def __init__(self, ticket: Ticket, unfolding: Unfolding | Template, drawn: Drawn | None = None) -> None:
        self.ticket = ticket
        self.unfolding = unfolding
        self.drawn = drawn
        streams = unfolding.streamed_sequence is not None and ticket.on_value is not None
        self.told = unfolding.open or streams or (ticket.chunk is not None and unfolding.returns_kept)
        self.graphs = [unfolding.graph]
        self.values: dict[tuple[int, int], Any] = {}
        self.ended: dict[int, int] = {}
        self.gathered: dict[Handle, Tensor] = {}
        if unfolding.open:
            self.waiting_for = set(unfolding.awaited)

    def admit(self, command: Admit) -> CellGraph:
        """Take the numbers of the nodes of its next graph, and return that."""
        graph = self.graphs.pop(0)
        self.admitted += (command,)
        self.shift = command.base - command.first_local
        if self.unfolding.loops:
            found = (self.unfolding.loops[run.first] for run in graph.runs if run.open_ended)
            self.loops += tuple([(self.shift, loop) for loop in found])
        return graph

    def local(self, node: int) -> int:
        """Return the request's own number of a node; fast for those added last, which are those that run."""
        for command in reversed(self.admitted):
            if command.base <= node < command.base + command.num_nodes:
                return node - command.base + command.first_local
        kept = self.admitted[0]
        if kept.kept_base <= node < kept.kept_base + kept.first_local:
            return node - kept.kept_base
        raise KeyError(node)

    def nodes(self, sequence: ValueSequence) -> NDArray[np.int64]:
        """Return the numbers of the nodes of a sequence, as far as it has come to be. It has not been extended."""
        local = sequence.nodes
        if sequence.open_ended:
            local = local[: self.ended[int(local[-1])] - int(local[0]) + 1]
        return local + self.shift

    def loop_at(self, node: int) -> tuple[int, OpenLoop] | None:
        """Return the request's own number of a node, and the loop that it is a step of, if a value may end it."""
        for shift, loop in reversed(self.loops):
            if loop.first <= node - shift <= loop.last:
                return node - shift, loop
        return None

    def store(self, local: int, output: int, value: Any) -> None:
        """Keep a value that has come, and hand it to whoever reads the stream as far as that has come in order."""
        self.values[local, output] = value
        if self.waiting_for:
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
