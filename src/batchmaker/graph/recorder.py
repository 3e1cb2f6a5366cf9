"""Recording an unfold function: cell calls in, a cell graph out.

The recorder checks what it is handed against the declared inputs of each cell, so a wrong shape or an impossible tree
is that request's error before anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.errors import InvalidRequestError, ModelError, NodeLimitError, ShapeError
from batchmaker.graph.cell_graph import HOST, ZERO, CellGraph, Fetch, HostInput, NodeBlock, Run
from batchmaker.graph.spec import CellType, ValueSpec
from batchmaker.graph.values import Hold, HostValues, NodeArray, Value, ValueSequence

Argument = Value | HostValues
SequenceArgument = ValueSequence | HostValues

DEFAULT_MAX_NODES = 100_000


@final
class Recorder:
    """Collects the nodes of one request.

    max_nodes: NodeLimitError is raised beyond it, so that an unfold function which never ends harms only its request.
    holds_values: note which nodes' handles have all been dropped (`dropped`: first node, count), for unfold
    functions that wait. num_kept: the first so many numbers stand for nodes that have run already, whose outputs the
    request's sequence keeps; handles to them are made by whoever knows what they are.
    """

    def __init__(self, max_nodes: int = DEFAULT_MAX_NODES, *, holds_values: bool = False, num_kept: int = 0) -> None:
        self._max_nodes = max_nodes
        self._num_nodes = num_kept
        self._graph = CellGraph(first=num_kept, num_nodes=0)
        self._single: list[tuple[CellType, tuple[int, ...], tuple[int, ...]]] = []
        self._single_first = 0
        self._fetched: set[tuple[int, int]] = set()
        self._fetched_loops: set[tuple[int, int]] = set()  # first node, output
        self._types_of_blocks: set[int] = set()
        self._holds_values = holds_values
        self.dropped: list[tuple[int, int]] = []

    # --- what an unfold function calls ---------------------------------------------------------------------

    def node(self, cell: CellType, arguments: Sequence[Argument]) -> tuple[Value, ...]:
        """Add one node and return its outputs."""
        if len(arguments) != len(cell.inputs):
            raise InvalidRequestError(f"cell {cell.name!r} takes {len(cell.inputs)} inputs, got {len(arguments)}")
        for port, argument in enumerate(arguments):
            _check_spec(cell, port, argument.spec)
        sources: list[int] = []
        outputs: list[int] = []
        number = self._claim(1, cell)
        if not self._single:
            self._single_first = number
        for port, argument in enumerate(arguments):
            if isinstance(argument, Value):
                if argument.origin is not self:
                    raise foreign(f"cell {cell.name!r}, input {port}")
                sources.append(argument.node)
                outputs.append(argument.output)
            else:
                self._host(cell, port, number, argument)
                sources.append(HOST)
                outputs.append(0)
        self._single.append((cell, tuple(sources), tuple(outputs)))
        hold = self._hold(number, 1)
        return tuple(Value(number, k, spec, self, None, hold) for k, spec in enumerate(cell.outputs))

    def map(self, cell: CellType, arguments: Sequence[SequenceArgument]) -> tuple[ValueSequence, ...]:
        """Add one node per element, without edges between them, and return the outputs as sequences."""
        count = _common_length(cell, arguments)
        self._flush()
        first = self._claim(count, cell)
        sources = np.full((len(cell.inputs), count), HOST, np.int64)
        outputs = np.zeros((len(cell.inputs), count), np.int16)
        self._fill(cell, first, arguments, sources, outputs)
        self._block(cell, first, sources, outputs)
        return self._sequences(cell, np.arange(first, first + count))

    def tree(
        self,
        cell: CellType,
        children: NDArray[np.int64],
        leaves: Sequence[ValueSequence],
        inputs: Sequence[SequenceArgument],
    ) -> tuple[ValueSequence, ...]:
        """Add the nodes of a tree or DAG given by an array of children.

        children: [num_nodes, arity]; an entry below len(leaves[0]) is a leaf, any other is node
        `entry - len(leaves[0])` of this call, which must come before its parent. The cell is called with the elements
        of `inputs` (one per node), then with every child's state in order: the outputs that `leaves` lists.
        """
        if children.ndim != 2:
            raise InvalidRequestError(
                f"cell {cell.name!r}: children must be an array [num_nodes, arity], got shape {children.shape}"
            )
        count, arity = children.shape
        num_leaves = _common_length(cell, leaves)
        _check_children(cell, children, num_leaves)
        own = _child_outputs(cell, arity, leaves, len(inputs))
        self._flush()
        first = self._claim(count, cell)
        sources = np.full((len(cell.inputs), count), HOST, np.int64)
        outputs = np.zeros((len(cell.inputs), count), np.int16)
        if inputs:
            if (given := _common_length(cell, inputs)) != count:
                raise InvalidRequestError(f"cell {cell.name!r}: {given} inputs for {count} tree nodes")
            self._fill(cell, first, inputs, sources, outputs)
        nodes = np.arange(first, first + count)
        child = children.T
        for k, (leaf, output) in enumerate(zip(leaves, own, strict=True)):
            port = len(inputs) + k
            if leaf.origin is not self:
                raise foreign(f"cell {cell.name!r}, input {port}")
            _check_spec(cell, port, leaf.spec)
            sources[port :: len(leaves)] = np.concatenate((leaf.nodes, nodes))[child]
            same = leaf.output == output
            outputs[port :: len(leaves)] = output if same else np.where(child < num_leaves, leaf.output, output)
        is_child = np.zeros(num_leaves + count, np.bool_)
        is_child[children] = True
        one_root = np.count_nonzero(is_child[num_leaves:]) == count - 1
        self._block(cell, first, sources, outputs, connected=one_root or None)
        return self._sequences(cell, nodes)

    def run(
        self,
        cell: CellType,
        sequences: Sequence[SequenceArgument],
        init: Sequence[Argument | None] | None,
        *,
        max_steps: int | None = None,
        open_ended: bool = False,
    ) -> tuple[Value, ...]:
        """Add a chain as one entry and return its final outputs, each with `.steps`.

        init: the initial state; parts that are None, or all of it, start from zeros.
        """
        length = _common_length(cell, sequences) if sequences else max_steps
        if length is None or length < 1:
            raise InvalidRequestError(f"cell {cell.name!r}: a loop needs max_steps >= 1, got {max_steps}")
        num_state = len(cell.inputs) - len(sequences)
        if num_state < 0 or num_state > len(cell.outputs):
            raise InvalidRequestError(
                f"cell {cell.name!r}: {len(sequences)} sequences given, but the cell has {len(cell.inputs)} inputs "
                f"and {len(cell.outputs)} outputs; the inputs after the sequences are the state"
            )
        if init is not None and len(init) != num_state:
            raise InvalidRequestError(f"cell {cell.name!r}: init has {len(init)} values, the state has {num_state}")
        self._flush()
        first = self._claim(length, cell)
        columns: list[tuple[NodeArray, int] | None] = []
        for port, sequence in enumerate(sequences):
            _check_spec(cell, port, sequence.spec)
            if isinstance(sequence, HostValues):
                self._host(cell, port, first, sequence)
                columns.append(None)
            else:
                if sequence.origin is not self:
                    raise foreign(f"cell {cell.name!r}, input {port}")
                columns.append((sequence.nodes, sequence.output))
        start = self._initial(cell, first, init or (None,) * num_state)
        self._graph.runs.append(Run(cell.type_id, first, length, tuple(columns), tuple(start), open_ended))
        steps = np.arange(first, first + length)
        hold = self._hold(first, length)
        return tuple(
            Value(
                first + length - 1,
                k,
                spec,
                self,
                ValueSequence(steps, k, spec, self, open_ended=open_ended, hold=hold),
                hold,
            )
            for k, spec in enumerate(cell.outputs)
        )

    # --- what the driver calls -----------------------------------------------------------------------------

    def fetch(self, value: Value | ValueSequence) -> None:
        """Mark outputs that the host must see, as results or because the unfold function waits for them.

        The steps of an open-ended run are seen from its first step on or not at all: ModelError if they are first
        marked after its part of the graph was taken.
        """
        if value.origin is not self:
            raise foreign("the result or a `yield` of unfold")
        if isinstance(value, Value):
            key = (value.node, value.output)
            if key not in self._fetched:
                self._fetched.add(key)
                self._graph.fetches.append(Fetch(np.array([value.node]), value.output))
            return
        if value.open_ended:
            key = (int(value.nodes[0]), value.output)
            if key[0] < self._graph.first and key not in self._fetched_loops:
                raise ModelError(
                    f"output {value.output} of a loop with `until`: its steps were first asked for after the loop had "
                    "been handed over, and some may be gone; take `.steps` before the next `yield`"
                )
            self._fetched_loops.add(key)
        self._graph.fetches.append(Fetch(value.nodes, value.output))

    def keep(self, nodes: NodeArray) -> None:
        """Note the nodes, each once, whose outputs stay for the next request of the sequence."""
        self._graph.kept = nodes

    def take(self) -> CellGraph:
        """Return what has been recorded since the last call and start the next fragment."""
        self._flush()
        graph = self._graph
        graph.num_nodes = self._num_nodes - graph.first
        self._graph = CellGraph(first=self._num_nodes, num_nodes=0)
        return graph

    # --- inside ----------------------------------------------------------------------------------------------

    def _claim(self, count: int, cell: CellType) -> int:
        first = self._num_nodes
        if first + count > self._max_nodes:
            raise NodeLimitError(
                f"the request needs more than {self._max_nodes} nodes (at cell {cell.name!r}); "
                "does its unfold function end? Raise max_nodes if it should"
            )
        self._num_nodes = first + count
        return first

    def _hold(self, first: int, count: int) -> Hold | None:
        if not self._holds_values:
            return None
        dropped = self.dropped
        return Hold(first, count, lambda first, count: dropped.append((first, count)))

    def _host(self, cell: CellType, port: int, first: int, values: HostValues) -> None:
        self._graph.host_inputs.append(HostInput(cell.type_id, port, first, values.count, values.values))

    def _fill(
        self,
        cell: CellType,
        first: int,
        arguments: Sequence[SequenceArgument],
        sources: NodeArray,
        outputs: NDArray[np.int16],
    ) -> None:
        for port, argument in enumerate(arguments):
            _check_spec(cell, port, argument.spec)
            if isinstance(argument, HostValues):
                self._host(cell, port, first, argument)
            else:
                if argument.origin is not self:
                    raise foreign(f"cell {cell.name!r}, input {port}")
                sources[port] = argument.nodes
                outputs[port] = argument.output

    def _initial(self, cell: CellType, first: int, init: Sequence[Argument | None]) -> list[tuple[int, int]]:
        """Return the sources of a run's state: the last inputs of its cell."""
        start = [(ZERO, 0)] * len(init)
        for i, value in enumerate(init):
            if value is None:
                continue
            port = len(cell.inputs) - len(init) + i
            _check_spec(cell, port, value.spec)
            if isinstance(value, Value):
                if value.origin is not self:
                    raise foreign(f"cell {cell.name!r}, input {port}")
                start[i] = (value.node, value.output)
            else:
                self._host(cell, port, first, value)
                start[i] = (HOST, 0)
        return start

    def _block(
        self,
        cell: CellType,
        first: int,
        sources: NodeArray,
        outputs: NDArray[np.int16],
        connected: bool | None = False,
    ) -> None:
        """Add a block. connected: one subgraph; False: no edges between its nodes; None: not known."""
        types = np.full(sources.shape[1], cell.type_id, np.int16)
        self._graph.plain &= cell.type_id not in self._types_of_blocks and connected is not None
        self._types_of_blocks.add(cell.type_id)
        self._graph.blocks.append(NodeBlock(first, types, sources, outputs, bool(connected)))

    def _flush(self) -> None:
        """Turn the single nodes recorded since the last block into one block of their own."""
        if not self._single:
            return
        self._graph.plain = False
        self._types_of_blocks.update(cell.type_id for cell, _, _ in self._single)
        ports = max(len(sources) for _, sources, _ in self._single)
        table = np.full((ports, len(self._single)), HOST, np.int64)
        outputs = np.zeros((ports, len(self._single)), np.int16)
        types = np.empty(len(self._single), np.int16)
        for i, (cell, node_sources, node_outputs) in enumerate(self._single):
            types[i] = cell.type_id
            table[: len(node_sources), i] = node_sources
            outputs[: len(node_outputs), i] = node_outputs
        self._graph.blocks.append(NodeBlock(self._single_first, types, table, outputs))
        self._single = []

    def _sequences(self, cell: CellType, nodes: NodeArray) -> tuple[ValueSequence, ...]:
        hold = self._hold(int(nodes[0]), len(nodes))
        return tuple(ValueSequence(nodes, k, spec, self, hold=hold) for k, spec in enumerate(cell.outputs))


def _check_spec(cell: CellType, port: int, spec: ValueSpec) -> None:
    declared = cell.inputs[port]
    if spec is not declared and spec.row_signature != declared.row_signature:
        raise ShapeError(
            f"cell {cell.name!r}, input {port}: got {spec}, expected {declared}; "
            "match the shape and dtype or unfold through a projection"
        )


def foreign(where: str) -> InvalidRequestError:
    """Return the error for a handle that another request's unfold function was given."""
    return InvalidRequestError(
        f"{where}: got a value of another request, whose unfold function made it; call the cell in this request too"
    )


def _common_length(cell: CellType, arguments: Sequence[SequenceArgument]) -> int:
    lengths = {len(a) if isinstance(a, ValueSequence) else a.count for a in arguments}
    if len(lengths) != 1:
        raise InvalidRequestError(f"cell {cell.name!r}: sequences of different lengths {sorted(lengths)}")
    length = lengths.pop()
    if length == 0:
        raise InvalidRequestError(f"cell {cell.name!r}: the sequence is empty; at least one element is needed")
    return length


def _child_outputs(cell: CellType, arity: int, leaves: Sequence[ValueSequence], num_inputs: int) -> range:
    """Return the indices of the outputs that a tree node's parent reads, once it is proved that leaves look alike."""
    expected = num_inputs + arity * len(leaves)
    if expected != len(cell.inputs):
        raise InvalidRequestError(
            f"cell {cell.name!r}: {num_inputs} inputs and {arity} children with {len(leaves)} values each "
            f"make {expected} arguments, the cell takes {len(cell.inputs)}"
        )
    if len(leaves) > len(cell.outputs):
        raise InvalidRequestError(
            f"cell {cell.name!r}: leaves have {len(leaves)} values, the cell gives {len(cell.outputs)}"
        )
    own = range(len(cell.outputs) - len(leaves), len(cell.outputs))
    for leaf, output in zip(leaves, own, strict=True):
        if leaf.spec.row_signature != cell.outputs[output].row_signature:
            raise ShapeError(
                f"cell {cell.name!r}: leaves give {leaf.spec}, output {output} of the cell gives "
                f"{cell.outputs[output]}; a node's children must look alike"
            )
    return own


def _check_children(cell: CellType, children: NDArray[np.int64], num_leaves: int) -> None:
    if len(children) == 0:
        raise InvalidRequestError(f"cell {cell.name!r}: a tree needs at least one inner node")
    limit = np.arange(num_leaves, num_leaves + len(children))[:, None]
    if int(children.min()) < 0 or (children >= limit).any():
        wrong = (children < 0) | (children >= limit)
        node, child = (int(i[0]) for i in np.nonzero(wrong))
        raise InvalidRequestError(
            f"cell {cell.name!r}: child {child} of tree node {node} is {int(children[node, child])}; allowed are 0 to "
            f"{int(limit[node, 0]) - 1} (leaves 0 to {num_leaves - 1}, then nodes that come before their parent)"
        )
