"""Recording an unfold function: cell calls in, a cell graph out.

The recorder checks arguments against the declared inputs of each cell. So a wrong shape or an impossible tree is an
error of that request before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Ints
from batchmaker.errors import InvalidRequestError, ModelError, NodeLimitError
from batchmaker.graph.argument_errors import (
    check_may_be_fetched,
    common_length,
    foreign,
    input_of,
    misfit,
    never_computed,
)
from batchmaker.graph.calls import LAID_OUT, CallNumbers, Calls, DataLayout, host_input
from batchmaker.graph.cell_graph import HOST, ZERO, CellGraph, Fetch, HostInput, MemoryRead, NodeBlock, Run
from batchmaker.graph.constants import ascending, from_host, nodes_of, of_type
from batchmaker.graph.spec import GIVEN, CellType, TypeId, ValueSpec
from batchmaker.graph.trees import (
    Places,
    SequenceArgument,
    TreePart,
    check_parts,
    fill_children,
    leaves_at,
    specs_of,
)
from batchmaker.graph.values import Chain, Hold, HostValues, Output, Value, ValueSequence
from batchmaker.graph.whole_runs import CONCURRENCIES, PendingRun, WholeForm

Argument = Value | HostValues

DEFAULT_MAX_NODES = 100_000
MOST_ALIKE: Final = 16
"""Nodes of a fragment that is looked up among those of other requests, and values that it asks for."""
MOST_SHARED: Final = 4096
"""Fragments that are remembered. Then all are forgotten."""
_SHARED: Final[dict[tuple[object, ...], CellGraph]] = {}


@final
class Recorder:
    """Collects the nodes of one request; their number so far is `num_nodes`.

    max_nodes: NodeLimitError is raised beyond it, so an unfold function that never ends harms only its request.
    holds_values: record the nodes whose handles have all been dropped (`dropped`: first node, count), for unfold
    functions that wait. num_kept: the first numbers stand for nodes that have already run and whose outputs the
    request's sequence keeps; the caller makes the handles to them. level: of concurrency, see `whole_runs.level_of`.
    """

    def __init__(
        self,
        max_nodes: int = DEFAULT_MAX_NODES,
        *,
        holds_values: bool = False,
        num_kept: int = 0,
        level: int = len(CONCURRENCIES) - 1,
    ) -> None:
        self._level = level
        self.max_nodes = max_nodes
        self.num_kept = num_kept
        self.num_nodes = num_kept
        self._num_laid_out = num_kept  # the nodes from here on are single calls without a block
        self._graph = CellGraph(first=num_kept, num_nodes=0)
        self._calls: list[Calls] = []
        self._of_laid_out: dict[TypeId, Calls] = {}
        self._outputs: dict[TypeId, tuple[Output, ...]] = {}
        self._accepted: dict[object, set[Output | type]] = {}
        self._fetched: set[tuple[int, int]] = set()
        self._fetched_loops: set[tuple[int, int]] = set()  # first node, output
        self._types_of_blocks: set[int] = set()
        self._pending: list[PendingRun] = []  # runs of the fragment that may become one node each
        self._single_values: list[tuple[int, int]] = []  # of the fragment: (node, output) of single values
        self.holds_values = holds_values
        self.dropped: list[tuple[int, int]] = []
        self.pick: Callable[[ValueSequence, Value], Value] = _no_pick

    # --- what an unfold function calls ---------------------------------------------------------------------

    def calls(self, cell: CellType, layout: DataLayout) -> Calls:
        """Return the object that adds nodes for single calls of this cell. layout: for the data of the calls."""
        calls = Calls(cell, self, layout)
        self._calls.append(calls)
        return calls

    def node(
        self, cell: CellType, arguments: Sequence[Argument], memories: Sequence[ValueSequence] = ()
    ) -> tuple[Value, ...]:
        """Add one node whose data is already laid out, and return its outputs. memories: see `remember`."""
        for port, argument in enumerate(arguments[: len(cell.inputs)], start=len(cell.memories)):
            if isinstance(argument, HostValues):
                self.check(cell, port, argument)
        calls = self._of_laid_out.get(cell.type_id)
        if calls is None:
            calls = self._of_laid_out[cell.type_id] = self.calls(cell, LAID_OUT)
        return calls.add(arguments, memories)

    def map(
        self, cell: CellType, arguments: Sequence[SequenceArgument], memories: Sequence[ValueSequence] = ()
    ) -> tuple[ValueSequence, ...]:
        """Add one node per element, without edges between them, and return the outputs as sequences.

        memories: see `remember`; every node reads all of them. Of empty sequences of values it makes empty ones.
        """
        is_empty = len(arguments) > 0 and type(arguments[0]) is ValueSequence and not len(arguments[0])
        if is_empty and all(type(one) is ValueSequence and not len(one) for one in arguments):
            return tuple([ValueSequence(range(0), of) for of in self.outputs_of(cell)])
        count = common_length(cell, arguments)
        first = self._claim(count, cell)
        sources, outputs = self._read(first, cell, count, arguments)
        block = NodeBlock(first, of_type(cell.type_id, count), sources, outputs)
        self._add_block(block, {cell.type_id}, plain=True)
        self.remember(cell, first, count, memories)
        return self._sequences(block, cell)

    def tree(
        self,
        cell: CellType,
        children: NDArray[np.int64],
        leaves: Sequence[SequenceArgument],
        inputs: Sequence[SequenceArgument],
    ) -> tuple[ValueSequence, ...]:
        """Add the nodes of a tree or DAG with one cell; see `mixed_tree`."""
        return self.mixed_tree(leaves, (TreePart(cell, slice(None), np.ascontiguousarray(children, np.int64), inputs),))

    def mixed_tree(self, leaves: Sequence[SequenceArgument], parts: Sequence[TreePart]) -> tuple[ValueSequence, ...]:
        """Add the nodes of a tree or DAG given by arrays of children, and return its outputs.

        A node calls its part's cell with its element of each of the inputs, then with the state of each child in order.
        The state is the outputs that `leaves` lists; they are the last outputs of every cell. Leaves may be data.
        """
        count, cell = check_parts(parts), parts[0].cell
        common_length(cell, leaves)
        first = self._claim(count, cell)
        at, is_child = leaves_at(leaves), np.zeros(count, np.bool_)
        block = _empty_block(first, count, max([len(part.cell.inputs) for part in parts]))
        for part in parts:
            own = part.child_outputs(leaves)
            self._check_children(part, leaves)
            num_reads = fill_children(
                (block.types, block.sources, block.outputs),
                is_child,
                part.numbers,
                part.children,
                (at.nodes, at.outputs, at.count),
                first,
                part.cell.type_id,
                len(part.inputs),
                own.start,
            )
            if num_reads < 0:
                raise part.fault(-1 - num_reads, count, at.count)
            self._fill(block, part.cell, part.places, part.inputs)
            if at.has_data and num_reads > 0:
                self._give_leaves(first, part, leaves)
        block.connected = len(parts) == 1 and bool(np.count_nonzero(is_child) == count - 1)
        self._add_block(block, {part.cell.type_id for part in parts}, plain=block.connected)
        return self._sequences(block, cell)

    def run(
        self,
        cell: CellType,
        sequences: Sequence[SequenceArgument],
        init: Sequence[Argument | None] | None,
        *,
        max_steps: int | None = None,
        open_ended: bool = False,
        memories: Sequence[ValueSequence] = (),
        whole: WholeForm | None = None,
    ) -> tuple[Value, ...]:
        """Add a chain as one entry and return its final outputs, each with `.steps`.

        init: the initial state. It starts from zeros if it is None, and so does each part that is None. memories: see
        `remember`; every step reads all of them. whole: the chain becomes one node of this form if it is long enough
        and nothing has asked for its steps when its part of the graph is taken.
        """
        length = common_length(cell, sequences) if sequences else max_steps
        if length is None or length < 1:
            raise InvalidRequestError(f"cell {cell.name!r}: a loop needs max_steps >= 1, got {max_steps}")
        num_memories = len(cell.memories)
        num_state = len(cell.inputs) - num_memories - len(sequences)
        if num_state < 0 or num_state > len(cell.outputs):
            raise InvalidRequestError(
                f"cell {cell.name!r}: {len(sequences)} sequences given, but the cell has "
                f"{len(cell.inputs) - num_memories} inputs "
                f"and {len(cell.outputs)} outputs; the inputs after the sequences are the state"
            )
        if init is not None and len(init) != num_state:
            raise InvalidRequestError(f"cell {cell.name!r}: init has {len(init)} values, the state has {num_state}")
        first = self._claim(length, cell)
        init = tuple(init or (None,) * num_state)
        for port, argument in enumerate((*sequences, *init), start=num_memories):
            if argument is not None:
                self.check(cell, port, argument)
        pending: PendingRun | None = None
        if whole is not None and length >= whole.least[self._level]:
            pending = PendingRun(cell, whole, first, length, sequences, init)
            self._pending.append(pending)
        else:
            self._add_run(cell, first, length, sequences, init, open_ended=open_ended)
            self.remember(cell, first, length, memories, is_run=True)
        holds = self.hold(first, length)
        chain = Chain(first, open_ended, on_steps=None if pending is None else pending.read_steps)
        return tuple([Value(first + length - 1, of, holds, chain) for of in self.outputs_of(cell)])

    # --- called by the driver ------------------------------------------------------------------------------

    def fetch(self, value: Value | ValueSequence) -> None:
        """Mark outputs that the host needs, as results or because the unfold function waits for them.

        The steps of an open-ended run must be marked before its part of the graph is taken; ModelError afterwards.
        """
        if value.origin is not self:
            raise foreign("the result or a `yield` of unfold")
        check_may_be_fetched(value.output)
        if isinstance(value, Value):
            if value.is_missing:
                raise never_computed("the result or a `yield` of unfold")
            key = (value.node, value.output)
            if key not in self._fetched:
                self._fetched.add(key)
                self._single_values.append(key)
            return
        if len(value.numbers) == 0:
            return
        self._add_single_values()
        if value.open_ended:
            key = (int(value.numbers[0]), value.output)
            if key[0] < self._graph.first and key not in self._fetched_loops:
                raise ModelError(
                    f"output {value.output} of a loop with `until`: its steps were first asked for after the loop had "
                    "been handed over, and some may be gone; take `.steps` before the next `yield`"
                )
            if key[0] < self._graph.first:
                return
            self._fetched_loops.add(key)
        self._graph.fetches.append(Fetch(nodes_of(value), value.output))

    def keep(self, nodes: Ints) -> None:
        """Note the nodes, each once, whose outputs stay for the next request of the sequence."""
        self._graph.kept_nodes = nodes

    def take(self) -> CellGraph:
        """Return the recording since the last call and start the next fragment."""
        graph = self._fragment()
        self._graph = CellGraph(first=self.num_nodes, num_nodes=0)
        return graph

    def take_last(self) -> CellGraph:
        """As `take`, for the last call. Also drops references to the recorder, so that both can be freed."""
        graph = self._fragment()
        for table in (self._calls, self._of_laid_out, self._outputs, self._accepted):
            table.clear()
        return graph

    # --- called by `Calls` ---------------------------------------------------------------------------------

    def outputs_of(self, cell: CellType) -> tuple[Output, ...]:
        """Return the outputs of a cell in this request."""
        outputs = self._outputs.get(cell.type_id)
        if outputs is None:
            outputs = tuple([Output(k, spec, self, cell.type_id) for k, spec in enumerate(cell.outputs)])
            self._outputs[cell.type_id] = outputs
        return outputs

    def accepted_as(self, spec: ValueSpec) -> set[Output | type]:
        """Return the arguments known to fit an input of this spec: the request's own outputs, and types of data."""
        return self._accepted.setdefault(spec.row_signature, set())

    def check(self, cell: CellType, port: int, argument: Argument | SequenceArgument) -> None:
        """ShapeError unless the input accepts the argument, InvalidRequestError if it belongs to another request."""
        of = argument if isinstance(argument, HostValues) else argument.of
        if type(argument) is Value and argument.is_missing:
            raise never_computed(input_of(cell.name, cell.places, port))
        spec, declared = of.spec, cell.inputs[port]
        if spec is not declared and not spec.is_like(declared):
            raise misfit(cell, port, spec)
        if not isinstance(of, HostValues) and of.origin is not self:
            raise foreign(input_of(cell.name, cell.places, port))

    def remember(
        self, cell: CellType, first: int, count: int, sequences: Sequence[ValueSequence], *, is_run: bool = False
    ) -> None:
        """Note the memories of consecutive nodes of one cell: single nodes, or the steps of a run.

        sequences: one for each memory that is not the run's own, whose nodes are of one call, none of them kept from
        an earlier request, and equally far from each other. ModelError if a memory is the own one outside a run.
        """
        sequences_left = iter(sequences)
        for port, output in enumerate(cell.memories):
            if output != GIVEN:
                if not is_run:
                    raise ModelError(
                        f"cell {cell.name!r}: memory {port} is its own earlier steps, which only `run` and `loop` have"
                    )
                self._graph.memories.append(
                    MemoryRead(port, first, count, first, 1, count, output, is_run=True, own=True)
                )
                continue
            sequence = next(sequences_left)
            self.check(cell, port, sequence)
            numbers = sequence.numbers
            assert type(numbers) is range
            read = (numbers.start, numbers.step, len(numbers)) if len(numbers) else (first, 1, 0)
            self._graph.memories.append(MemoryRead(port, first, count, *read, sequence.output, is_run))

    def hold(self, first: int, count: int) -> Hold | None:
        """Return the object shared by all handles to the outputs of these nodes, if dropped handles are recorded."""
        if not self.holds_values:
            return None
        dropped = self.dropped
        return Hold(first, count, lambda first, count: dropped.append((first, count)))

    def too_many(self, cell: CellType) -> NodeLimitError:
        """Return the error of a request that calls a cell beyond its node limit."""
        return NodeLimitError(
            f"the request needs more than {self.max_nodes} nodes (at cell {cell.name!r}); "
            "does its unfold function end? Raise max_nodes if it should"
        )

    # --- inside ----------------------------------------------------------------------------------------------

    def _fragment(self) -> CellGraph:
        """Return the complete fragment that is recorded now."""
        if self._pending:
            self._settle()
        graph, calls = self._graph, self._as_numbers()
        types = {type_id for type_id, _, _ in calls or ()}
        key = (graph.first, calls, tuple(self._single_values), types.isdisjoint(self._types_of_blocks))
        if calls is not None and (shared := _SHARED.get(key)) is not None:
            for called in self._calls:
                called.forget()
            self._num_laid_out = self.num_nodes
            self._types_of_blocks |= types
            self._single_values.clear()
            return shared
        self._add_single_values()
        if self.num_nodes > self._num_laid_out:
            self._flush()
        graph.num_nodes = self.num_nodes - graph.first
        if calls is not None:
            if len(_SHARED) >= MOST_SHARED:
                _SHARED.clear()
            graph.shared, _SHARED[key] = True, graph
        return graph

    def _as_numbers(self) -> tuple[CallNumbers, ...] | None:
        """Return the calls of the fragment that is recorded now, if it is one that other requests may have, too.

        It consists of few single calls that read no data, in a request that has waited: such requests do the same at
        the same value, and each of them adds as many fragments as it waits.
        """
        graph, count = self._graph, self.num_nodes - self._graph.first
        if not (self.holds_values and graph.first and max(count, len(self._single_values)) <= MOST_ALIKE):
            return None
        if (
            graph.blocks
            or graph.runs
            or graph.host_inputs
            or graph.fetches
            or graph.kept_nodes is not None
            or graph.memories
        ):
            return None
        called = []
        for calls in self._calls if count else ():
            if calls.waiting:
                numbers = calls.as_numbers()
                if numbers is None:
                    return None
                called.append(numbers)
        return tuple(called)

    def _add_single_values(self) -> None:
        """Add the values that were asked for one by one to the fragment."""
        for node, output in self._single_values:
            self._graph.fetches.append(Fetch(ascending(node, 1), output))
        self._single_values.clear()

    def _claim(self, count: int, cell: CellType) -> int:
        """Reserve consecutive numbers for the caller's layout, return the first.

        Earlier single calls get a block now.
        """
        first = self.num_nodes
        if first > self._num_laid_out:
            self._flush()
        if first + count > self.max_nodes:
            raise self.too_many(cell)
        self.num_nodes = self._num_laid_out = first + count
        return first

    def _fill(self, block: NodeBlock, cell: CellType, places: Places, arguments: Sequence[SequenceArgument]) -> None:
        """Write the first inputs of the nodes at these places of a block: an element of each argument per node."""
        for port, argument in enumerate(arguments):
            self.check(cell, port, argument)
            if isinstance(argument, HostValues):
                nodes = block.first if isinstance(places, slice) else block.first + places
                self._graph.host_inputs.append(host_input(cell, port, nodes, argument))
            else:
                block.sources[port, places] = argument.nodes
                block.outputs[port, places] = argument.output

    def _read(
        self, first: int, cell: CellType, count: int, arguments: Sequence[SequenceArgument]
    ) -> tuple[Ints, NDArray[np.int16]]:
        """Return read-only sources and outputs of `count` nodes whose inputs are the elements of the arguments."""
        values = []
        for port, argument in enumerate(arguments, start=len(cell.memories)):
            self.check(cell, port, argument)
            if isinstance(argument, HostValues):
                self._graph.host_inputs.append(HostInput(cell.type_id, port, first, argument.count, argument.values))
            else:
                values.append((port, argument))
        sources, outputs = from_host(len(cell.inputs), count)
        if values:
            sources, outputs = sources.copy(), outputs.copy()
            for port, sequence in values:
                sources[port], outputs[port] = nodes_of(sequence), sequence.of.index
        return sources, outputs

    def _check_children(self, part: TreePart, leaves: Sequence[SequenceArgument]) -> None:
        """ShapeError unless the part's cell accepts these leaves as children; otherwise as `check`."""
        states = part.cell.inputs[len(part.inputs) :]
        if states == specs_of(leaves) * part.children.shape[1]:
            for leaf in leaves:
                if not isinstance(leaf, HostValues) and leaf.of.origin is not self:
                    break
            else:
                return
        for port, leaf in zip(range(len(part.inputs), len(part.cell.inputs)), cycle(leaves), strict=False):
            self.check(part.cell, port, leaf)

    def _give_leaves(self, first: int, part: TreePart, leaves: Sequence[SequenceArgument]) -> None:
        """Pass leaves that are data to the nodes of a part. first: node of the tree's place 0."""
        data = [(k, leaf) for k, leaf in enumerate(leaves, start=len(part.inputs)) if isinstance(leaf, HostValues)]
        for i, child in enumerate(part.children.T if data else ()):
            rows = np.flatnonzero(child < len(leaves[0]))
            if len(rows):
                nodes, child = first + part.numbers[rows], child[rows]
                for k, leaf in data:
                    host = host_input(part.cell, k + i * len(leaves), nodes, leaf.picked(child))
                    self._graph.host_inputs.append(host)

    def _add_run(
        self,
        cell: CellType,
        first: int,
        length: int,
        sequences: Sequence[SequenceArgument],
        init: Sequence[Argument | None],
        *,
        open_ended: bool = False,
    ) -> None:
        """Add a chain whose arguments have been checked as one entry."""
        num_memories = len(cell.memories)
        columns: list[tuple[Ints, int] | None] = [None] * num_memories
        for port, sequence in enumerate(sequences, start=num_memories):
            if isinstance(sequence, HostValues):
                self._graph.host_inputs.append(host_input(cell, port, first, sequence))
                columns.append(None)
            else:
                columns.append((sequence.nodes, sequence.output))
        start = [(ZERO, 0)] * len(init)
        for i, value in enumerate(init):
            if isinstance(value, Value):
                start[i] = (value.node, value.output)
            elif value is not None:
                self._graph.host_inputs.append(host_input(cell, len(columns) + i, first, value))
                start[i] = (HOST, 0)
        self._graph.runs.append(Run(cell.type_id, first, length, tuple(columns), tuple(start), open_ended))

    def _settle(self) -> None:
        """Add the runs that could become one node each: as such, or as steps if something reads these."""
        for run in self._pending:
            if run.steps_are_read:
                self._add_run(run.cell, run.first, run.length, run.sequences, run.init)
                continue
            blocks, host_inputs, memories = run.as_one_node()
            for block in blocks:
                self._add_block(block, {TypeId(int(block.types[0]))}, plain=True)
            self._graph.host_inputs += host_inputs
            self._graph.memories += memories
        if self._pending:
            self._pending.clear()
            self._graph.runs.sort(key=lambda run: run.first)
            self._graph.blocks.sort(key=lambda block: block.first)

    def _add_block(self, block: NodeBlock, types: set[TypeId], *, plain: bool) -> None:
        """Add a block of nodes of these types. plain: no edge joins two nodes of one type in it, or it is connected."""
        if not plain or not types.isdisjoint(self._types_of_blocks):
            self._graph.plain = False
        self._types_of_blocks |= types
        self._graph.blocks.append(block)

    def _sequences(self, block: NodeBlock, cell: CellType) -> tuple[ValueSequence, ...]:
        first, count = block.first, len(block.types)
        holds, nodes = self.hold(first, count) if self.holds_values else None, range(first, first + count)
        return tuple([ValueSequence(nodes, of, holds=holds) for of in self.outputs_of(cell)])

    def _flush(self) -> None:
        """Lay out the single calls since the last block as a block of their own. There must be some."""
        first, count = self._num_laid_out, self.num_nodes - self._num_laid_out
        self._num_laid_out = self.num_nodes
        called = [calls for calls in self._calls if calls.waiting]
        block = _empty_block(first, count, max([len(calls.cell.inputs) for calls in called]))
        for calls in called:
            self._graph.host_inputs += calls.lay_out(block)
        self._add_block(block, {calls.cell.type_id for calls in called}, plain=count == 1)


def _no_pick(sequence: ValueSequence, index: Value) -> Value:
    raise ModelError("`at` was called outside Model.unfold; hand the request to an Engine instead")


def _empty_block(first: int, count: int, num_ports: int, type_id: int = -1) -> NodeBlock:
    """Return a block of nodes without sources yet. type_id: None if the types are written later."""
    types, sources = np.empty(count, np.int16), np.empty((num_ports, count), np.int64)
    types.fill(type_id)
    sources.fill(HOST)
    return NodeBlock(first, types, sources, np.zeros((num_ports, count), np.int16))
