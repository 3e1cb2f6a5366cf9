"""Runs that are recorded as one node of another cell type, if nothing reads their steps.

Such a run has the node numbers of its steps. The first of them copy the inputs of the steps, and the last, at which
everybody finds the run's outputs, is the node that computes the whole run: the copies are its memories.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from batchmaker.errors import ModelError
from batchmaker.graph.calls import host_input
from batchmaker.graph.cell_graph import HOST, HostInput, MemoryRead, NodeBlock
from batchmaker.graph.misuse import at_line
from batchmaker.graph.spec import CellType
from batchmaker.graph.trees import SequenceArgument
from batchmaker.graph.values import HostValues, Value


@final
@dataclass(frozen=True, slots=True)
class WholeForm:
    """The second form of a cell's runs: one node for a whole run.

    copy: takes the inputs of a step and returns them. whole: takes, as memories, all inputs of the steps but the last,
    then those of the last step, then the initial state; it returns what the last step returns. least: for each of
    CONCURRENCIES, the fewest steps of a run that takes this form. zeros: for each part of the state, one value.
    """

    copy: CellType
    whole: CellType
    least: tuple[int, ...]
    zeros: tuple[HostValues, ...]


CONCURRENCIES: Final = (1, 4, 16)
"""Numbers of requests in flight for which it is known which form is faster; more than the last are as the last."""


def level_of(num_requests: int) -> int:
    """Return the level of concurrency: the place in CONCURRENCIES of the first that is not below these requests."""
    return bisect_left(CONCURRENCIES[:-1], num_requests)


@final
class PendingRun:
    """A run of which it is not known yet whether its steps are read. See `Recorder.run` for the arguments."""

    __slots__ = ("_is_whole", "cell", "first", "form", "init", "length", "sequences", "steps_are_read")

    def __init__(
        self,
        cell: CellType,
        form: WholeForm,
        first: int,
        length: int,
        sequences: Sequence[SequenceArgument],
        init: Sequence[Value | HostValues | None],
    ) -> None:
        self.cell, self.form, self.first, self.length = cell, form, first, length
        self.sequences, self.init = tuple(sequences), tuple(init)
        self.steps_are_read = self._is_whole = False

    def read_steps(self) -> None:
        """Note that its steps are read. ModelError if they will not be computed."""
        if self._is_whole:
            raise ModelError(
                f"{at_line()}cell {self.cell.name!r}: the steps of this run were first asked for after the run had "
                "been handed over as one node, its whole form; take `.steps` before the next `yield`"
            )
        self.steps_are_read = True

    def as_one_node(self) -> tuple[list[NodeBlock], list[HostInput], list[MemoryRead]]:
        """Return its nodes, their data and their memories. Its steps cannot be read from now on."""
        self._is_whole = True
        form, first, count = self.form, self.first, self.length - 1
        columns, last, host_inputs = len(self.sequences), first + count, list[HostInput]()
        copies, node = _block(form.copy, first, count), _block(form.whole, last, 1)
        for port, sequence in enumerate(self.sequences):
            if isinstance(sequence, HostValues):
                if count:
                    host_inputs.append(host_input(form.copy, port, first, _rows(sequence, slice(0, count))))
                host_inputs.append(
                    host_input(form.whole, columns + port, last, _rows(sequence, slice(count, count + 1)))
                )
                continue
            copies.sources[port], copies.outputs[port] = sequence.nodes[:count], sequence.output
            node.sources[columns + port], node.outputs[columns + port] = sequence.nodes[count], sequence.output
        for port, (value, zero) in enumerate(zip(self.init, form.zeros, strict=True), start=2 * columns):
            if isinstance(value, Value):
                node.sources[port], node.outputs[port] = value.node, value.output
            else:
                host_inputs.append(host_input(form.whole, port, last, zero if value is None else value))
        reads = [MemoryRead(port, last, 1, first, 1, count, port) for port in range(columns)]
        return [copies, node] if count else [node], host_inputs, reads


def _block(cell: CellType, first: int, count: int) -> NodeBlock:
    """Return nodes of one cell without sources yet."""
    shape = (len(cell.inputs), count)
    return NodeBlock(first, np.full(count, cell.type_id, np.int16), np.full(shape, HOST), np.zeros(shape, np.int16))


def _rows(values: HostValues, rows: slice) -> HostValues:
    return HostValues(values.values[rows], rows.stop - rows.start, values.spec)
