"""Values that steps bring to the host, and how requests get them. Used by CellDriver.

Most requests need only their result. Their values go into tables: one assignment for all steps that are reported
together, at any batch size. Requests that await each value, and values that are very wide, cost an object each.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.arrays import Ints, spans
from batchmaker.compile.export import row_bytes, torch_dtype
from batchmaker.core.commands import Collect, Decided, RunTask, within
from batchmaker.core.layout import OUTPUTS
from batchmaker.engine.request import InFlight
from batchmaker.engine.stop_tests import Failures, StopTests
from batchmaker.executor.base import StepsResult
from batchmaker.executor.state_tables import as_array
from batchmaker.graph.spec import CellType, ValueSpec
from batchmaker.graph.values import ValueSequence
from batchmaker.model.region_recorder import Recorded
from batchmaker.model.scope import OpenLoop
from batchmaker.model.structure import Handle

_UNBIND_COPY: Final[Any] = torch.unbind_copy
_SPLIT_COPY: Final[Any] = torch.split_with_sizes_copy
"""Their stubs say that they return nothing."""
NARROW_BYTES: Final = 256
"""The table of values of up to this size has a row for every node. That of wider ones has a row for every value."""
WIDE_BYTES: Final = 1 << 15
"""Wider values have no table: copying one there takes longer than making a Python object."""
KEPT_BYTES: Final = 1 << 24
"""A larger table of wide values gives its memory back when it is empty."""


@final
class ResultTable:
    """Values of one output, one shape and one dtype, by node number. ResultTables makes it.

    places: [nodes] of wide values, the row of the node's value, or -1 if it has none. Of narrow values it is None: the
    row of a node is the one with its number. So memory for wide values is needed for those only that have come and are
    not answered. (What comes for a request that has ended stays until its node numbers are used again.) free: numbers
    of rows; the first `num_free` of them are free.
    """

    __slots__ = ("_free", "_num_free", "_places", "_rows", "_spec", "_width")

    def __init__(self, spec: ValueSpec, num_nodes: int) -> None:
        self._spec = spec
        self._width = math.prod(spec.shape)
        is_wide = row_bytes(spec) > NARROW_BYTES
        self._places: Ints | None = np.full(num_nodes, -1) if is_wide else None
        self._free: Ints = np.zeros(0, np.int64)
        self._num_free = 0
        self._rows: NDArray[Any] = self._zeros(0 if is_wide else num_nodes)

    def _zeros(self, num_rows: int) -> NDArray[Any]:
        shape = (num_rows,) if self._width == 1 else (num_rows, self._width)
        return np.zeros(shape, as_array(torch.empty(0, dtype=torch_dtype(self._spec.dtype))).dtype)

    @property
    def is_wide(self) -> bool:
        """Whether it has rows for those nodes only whose values have come."""
        return self._places is not None

    @property
    def address(self) -> int | None:
        """The address of the row of node 0, until there are more nodes; None if only some nodes have a row."""
        return None if self.is_wide else self._rows.ctypes.data

    @property
    def nbytes(self) -> int:
        """The memory that its rows take."""
        return self._rows.nbytes

    def fit(self, num_nodes: int) -> None:
        """Make room for node numbers below `num_nodes`. Values stay."""
        if self._places is None:
            self._rows = np.concatenate((self._rows, self._zeros(num_nodes - len(self._rows))))
        else:
            self._places = np.concatenate((self._places, np.full(num_nodes - len(self._places), -1)))

    def write(self, nodes: Ints, values: Tensor) -> None:
        """Store the values of these nodes. nodes: [count], each once. values: [count, *shape], or [count].

        In the second form a number fills all parts of its value. NullExecutor gives such numbers.
        """
        rows = nodes if self._places is None else self._taken(self._places, nodes)
        self._rows[rows] = (
            as_array(values).reshape(-1) if self._width == 1 else as_array(values).reshape(len(nodes), -1)
        )

    def _taken(self, places: Ints, nodes: Ints) -> Ints:
        """Return the rows of nodes. Those that had none have one then."""
        rows = places[nodes]
        missing = np.flatnonzero(rows < 0)
        if len(missing) > self._num_free:
            more = max(len(missing) - self._num_free, len(self._rows))
            free = np.arange(len(self._rows), len(self._rows) + more)
            self._rows = np.concatenate((self._rows, self._zeros(more)))
            self._free = np.concatenate((self._free[: self._num_free], free, np.zeros(len(free), np.int64)))
            self._num_free += more
        self._num_free -= len(missing)
        rows[missing] = self._free[self._num_free : self._num_free + len(missing)]
        places[nodes] = rows
        return rows

    def read(self, nodes: Ints) -> Tensor:
        """Return the stored values of these nodes, [count, *shape], in memory of their own."""
        rows = self._rows.take(nodes if self._places is None else self._places[nodes], 0)
        values = torch.from_numpy(rows.reshape(len(nodes), *self._spec.shape))
        return values.view(torch.bfloat16) if self._spec.dtype == "bfloat16" else values

    def read_each(self, nodes: Ints) -> list[Any]:
        """As `read`, a value for each node: Python numbers or tensors, each with memory of its own."""
        values = self.read(nodes)
        return [values[0]] if len(values) == 1 and values.ndim > 1 else objects(values)

    def read_parts(self, nodes: Sequence[Ints]) -> list[Tensor]:
        """As `read`, a tensor [its nodes, *shape] for each of these, each with memory of its own."""
        parts: list[Tensor] = _SPLIT_COPY(self.read(np.concatenate(nodes)), list(map(len, nodes)))
        return parts

    def leave(self, nodes: Ints) -> None:
        """Let go of the values of nodes, each once, whether they have come or not."""
        if self._places is None:
            return
        rows = self._places[nodes]
        rows = rows[rows >= 0]
        self._places[nodes] = -1
        self._free[self._num_free : self._num_free + len(rows)] = rows
        self._num_free += len(rows)
        if self._num_free == len(self._rows) and self.nbytes > KEPT_BYTES:
            self._rows, self._free, self._num_free = self._zeros(0), np.zeros(0, np.int64), 0


@final
class ResultTables:
    """All tables, by output, shape and dtype. num_nodes: node numbers below have room; `fit` makes more."""

    __slots__ = ("_tables", "num_nodes", "wide")

    def __init__(self) -> None:
        self.num_nodes = 1024
        self._tables: dict[tuple[int, tuple[int, ...], str], ResultTable | None] = {}
        self.wide: list[ResultTable] = []

    def fit(self, num_nodes: int) -> None:
        """Make room for node numbers below `num_nodes`."""
        if num_nodes <= self.num_nodes:
            return
        self.num_nodes = max(2 * self.num_nodes, num_nodes)
        for table in self._tables.values():
            if table is not None:
                table.fit(self.num_nodes)

    def find(self, output: int, spec: ValueSpec) -> ResultTable | None:
        """Return the table of an output; None if its values are empty or too wide for a table."""
        key = (output, spec.shape, spec.dtype)
        try:
            return self._tables[key]
        except KeyError:
            made = ResultTable(spec, self.num_nodes) if 0 < row_bytes(spec) <= WIDE_BYTES else None
            self._tables[key] = made
            if made is not None and made.is_wide:
                self.wide.append(made)
            return made


@final
class Results:
    """Gives the values that steps have brought to the requests in flight.

    tables: the values, except those that somebody awaits. Wide ones are kept until `leave`. tests: the stop tests of
    their loops. waits: [slots] whether nothing of the request has run. num_awaiting: requests somebody of whom awaits
    values.
    """

    def __init__(self) -> None:
        self.tables = ResultTables()
        self.tests = StopTests()
        self._num_nodes = 0
        self._by_slot: list[InFlight | None] = []
        self._awaits_values: NDArray[np.bool_] = np.zeros(256, np.bool_)  # by slot
        self.waits: NDArray[np.bool_] = np.zeros(256, np.bool_)
        self.num_awaiting = 0

    def enter(self, requests: Sequence[InFlight], loops: Sequence[tuple[int, OpenLoop]], num_nodes: int) -> None:
        """Note that requests have their slots. From now on steps may bring values for them.

        loops: of new graphs, each with its shift. num_nodes: one past the highest number of a node that may run.
        """
        if num_nodes > self._num_nodes:
            self.fit(num_nodes)
        if loops:
            self.tests.enter(loops)
        for request in requests:
            slot = request.admitted[0].slot
            if slot >= len(self._by_slot):
                self._fit(slot + 1)
            self._by_slot[slot] = request
            self.waits[slot] = True
            if request.awaits_values:
                self._awaits_values[slot] = True
                self.num_awaiting += 1

    def fit(self, num_nodes: int, num_slots: int = 0) -> None:
        """Have room for node numbers below `num_nodes`, and slots below `num_slots`."""
        if num_nodes > self._num_nodes:
            self.tables.fit(num_nodes)
            self.tests.fit(num_nodes)
            self._num_nodes = num_nodes
        if num_slots > len(self._by_slot):
            self._fit(num_slots)

    def let_go(self, extents: Ints) -> None:
        """Let go of the values of nodes: [extents, 2] first node, and number of nodes."""
        nodes = spans(*extents.T)
        for table in self.tables.wide:
            table.leave(nodes)

    def _fit(self, num_slots: int) -> None:
        self._by_slot += [None] * (max(num_slots, 2 * len(self._by_slot)) - len(self._by_slot))
        missing = np.zeros(max(0, len(self._by_slot) - len(self._awaits_values)), np.bool_)
        self._awaits_values, self.waits = (
            np.concatenate((self._awaits_values, missing)),
            np.concatenate((self.waits, missing)),
        )

    def leave(self, requests: Sequence[InFlight]) -> None:
        """Note that requests have ended, admitted or not. Values that steps still bring for them are not used."""
        decides = False
        for request in requests:
            decides |= request.unfolding.decided is not None
            if not request.admitted:
                continue
            slot = request.admitted[0].slot
            self._by_slot[slot] = None
            if request.loops:
                self.tests.leave(request.loops)
            if request.awaits_values:
                self._awaits_values[slot] = False
                self.num_awaiting -= 1
        if self.tables.wide:
            nodes = _nodes_of(requests, decides=decides)
            for table in self.tables.wide:
                table.leave(nodes)

    def gather(self, requests: Sequence[InFlight]) -> None:
        """Read the values of the results of these ended requests from the tables, into `InFlight.gathered`.

        All values of one table are read together. Each value and each sequence has memory of its own.
        """
        alike: dict[Hashable, list[InFlight]] = {}  # by form, template or unfolding
        has_table: dict[Hashable, bool] = {None: False}
        for request in requests:
            if request.awaits_values:
                continue
            of = request.unfolding
            form = of.result_form if len(requests) > 1 else None
            if form not in has_table:
                has_table[form] = self.tables.find(of.handles[0].output, of.handles[0].spec) is not None
            alike.setdefault(form if has_table[form] else id(of), []).append(request)
        reads: dict[tuple[ResultTable, bool], tuple[list[Any], _Owners]] = {}  # by table, and whether of sequences
        for members in alike.values():
            columns: dict[Handle, list[Any]] = {}
            of_each, decided = list[tuple[Handle, ...]](), members[0].unfolding.decided
            for place, request in enumerate(members):
                request.gathered, request.place = columns, place
                of_each.append(request.unfolding.handles)
            if decided is not None:
                self._gather_decided(members, decided, columns)
            for handle, *others in zip(*of_each, strict=True):
                if decided is not None and (handle in decided.values or handle in decided.collections):
                    continue
                table = self.tables.find(handle.output, handle.spec)
                if table is None:  # somebody awaits each value
                    continue
                nodes, owners = reads.setdefault((table, isinstance(handle, ValueSequence)), ([], []))
                for request, mine in zip(members, (handle, *others), strict=True):
                    if isinstance(mine, ValueSequence):
                        nodes.append(request.nodes(mine))
                    else:
                        ends = request.ended and mine.ends_open_loop
                        nodes.append(request.shift + (request.ended[mine.node] if ends else mine.node))
                owners.append((columns, handle, len(members)))
        for (table, are_sequences), (nodes, owners) in reads.items():
            _share(table.read_parts(nodes) if are_sequences else table.read_each(np.array(nodes, np.int64)), owners)

    def decided(self, command: Decided) -> None:
        """Note what requests return, whose last decisions are made."""
        for slot, outputs, count in zip(command.slots, command.outputs, command.num_nodes.tolist(), strict=True):
            request = self._by_slot[slot]
            assert request is not None
            request.outputs, request.ticket.num_cells = outputs, count

    def collect(self, command: Collect) -> None:
        """Note what loops have collected, and stream it to callers that want that."""
        of = zip(command.slots.tolist(), command.numbers.tolist(), command.places.tolist(), strict=True)
        for slot, number, place in of:
            request = self._by_slot[slot]
            assert request is not None
            request.collected[number].append(place)
            if request.ticket.on_value is not None and request.unfolding.streamed_collection == number:
                assert request.unfolding.decided is not None
                collections = request.unfolding.decided.collections
                (spec,) = [handle.spec for handle, other in collections.items() if other == number]
                (value,) = objects(self._values_at([request], np.array([place], np.int64), [1], spec))
                request.ticket.stream(value)

    def _gather_decided(self, members: Sequence[InFlight], decided: Recorded, columns: dict[Handle, list[Any]]) -> None:
        """Read the values of these requests that depend on decisions. All have the same handles."""
        count, outputs = len(members), np.stack([one.outputs for one in members])
        for handle, places in decided.values.items():
            if isinstance(places, int):
                columns[handle] = objects(self._values_at(members, outputs[:, places], [1] * count, handle.spec))
            else:
                sizes = [len(places)] * count
                columns[handle] = self._sequences_at(members, outputs[:, list(places)].reshape(-1), sizes, handle.spec)
        for handle, number in decided.collections.items():
            sizes = [len(one.collected[number]) for one in members]
            collected = np.array([place for one in members for place in one.collected[number]], np.int64)
            columns[handle] = self._sequences_at(members, collected, sizes, handle.spec)

    def _sequences_at(
        self, requests: Sequence[InFlight], places: Ints, sizes: list[int], spec: ValueSpec
    ) -> list[Tensor]:
        """As `_values_at`, as one tensor [size, *shape] of each request, in memory of its own."""
        return list(_SPLIT_COPY(self._values_at(requests, places, sizes, spec), sizes))

    def _values_at(self, requests: Sequence[InFlight], places: Ints, sizes: list[int], spec: ValueSpec) -> Tensor:
        """Return the values of this spec at `node * OUTPUTS + output`, [places, *shape]. sizes: how many of each
        request."""
        nodes, outputs = np.divmod(places, int(OUTPUTS))
        values = torch.empty((len(places), *spec.shape), dtype=torch_dtype(spec.dtype))
        for output in np.unique(outputs).tolist():
            mine = np.flatnonzero(outputs == output)
            table = self.tables.find(output, spec)
            if table is not None:
                read = table.read(nodes[mine])
                if len(mine) == len(places):
                    return read
                values[torch.from_numpy(mine)] = read
                continue
            owners = np.repeat(np.arange(len(requests)), sizes)  # of values so wide that each is told
            for at in mine.tolist():
                owner = requests[owners[at]]
                values[at] = owner.value(owner.local(int(nodes[at])), output)
        return values

    def begin(self, slots: Ints, at_s: float) -> None:
        """Note when requests began. slots: of the nodes of a step that began at `at_s`; repeats allowed."""
        first = slots[self.waits[slots]]
        if len(first):
            self.waits[first] = False
            for slot in set(first.tolist()):
                request = self._by_slot[slot]
                if request is not None:
                    request.ticket.started_s = at_s

    def take(self, cell: CellType, task: RunTask, result: StepsResult, begin: int, slots: Ints) -> list[InFlight]:
        """Store the values that steps have brought. Returns the requests whose unfold function may wait for one.

        begin: the first position of these steps in the task. slots: [positions] the slot of each node's request.
        """
        missing = {position for position, _ in result.failed} if result.failed else set[int]()
        if result.skipped is not None:
            missing.update((begin + np.flatnonzero(result.skipped)).tolist())
        touched: dict[int, InFlight] = {}
        for fetch, values in zip(task.fetches, result.fetched, strict=False):  # none where the steps failed as a whole
            positions = fetch.positions[within(fetch.positions, begin, begin + len(slots))]
            if len(positions) == 0:
                continue
            nodes = task.nodes[positions]
            table = self.tables.find(fetch.output, cell.outputs[fetch.output])
            if table is not None and self.num_awaiting == 0:
                table.write(nodes, values)
                continue
            owners = slots[positions - begin]
            if table is not None:
                awaiting = self._awaits_values[owners]
                if not awaiting.all():
                    table.write(nodes[~awaiting], values[torch.from_numpy(~awaiting)])
                positions, nodes, owners, values = (
                    positions[awaiting],
                    nodes[awaiting],
                    owners[awaiting],
                    values[torch.from_numpy(awaiting)],
                )
            self._tell(fetch.output, positions, nodes, owners, values, missing, touched)
        return list(touched.values())

    @staticmethod
    def whole_numbers(task: RunTask, result: StepsResult, begin: int, count: int) -> tuple[tuple[int, Ints, Ints], ...]:
        """Return the bools and integers that steps have brought: (output, nodes, values). See `take`."""
        numbers = []
        for fetch, values in zip(task.fetches, result.fetched, strict=False):
            positions = fetch.positions[within(fetch.positions, begin, begin + count)]
            if len(positions) and values.ndim == 1 and not values.is_floating_point():
                numbers.append((fetch.output, task.nodes[positions], as_array(values).astype(np.int64)))
        return tuple(numbers)

    def _tell(
        self,
        output: int,
        positions: Ints,
        nodes: Ints,
        owners: Ints,
        values: Tensor,
        missing: set[int],
        touched: dict[int, InFlight],
    ) -> None:
        """Give values to their requests one by one, except at `missing` positions."""
        for slot, node, position, value in zip(
            owners.tolist(), nodes.tolist(), positions.tolist(), objects(values), strict=True
        ):
            request = self._by_slot[slot]
            if request is None or position in missing:
                continue
            request.store(request.local(node), output, value)
            if request.unfolding.open:
                touched[slot] = request

    def stopped(
        self, cell: CellType, task: RunTask, result: StepsResult, begin: int, count: int
    ) -> tuple[NDArray[np.bool_], Failures]:
        """Apply the stop tests after steps, if the executor has not. No two of these steps are of the same loop.

        begin, count: the positions of these steps. Returns which positions end their loop, [count], and the positions
        of the task at which a test raised, with the reason.
        """
        stopped, failed = np.zeros(count, np.bool_), dict[int, str]()
        # There are no values if the steps failed as a whole.
        for fetch, values in zip(task.fetches, result.fetched, strict=False):
            if fetch.output not in self.tests.outputs:
                continue
            positions = fetch.positions[within(fetch.positions, begin, begin + count)]
            good = ~np.isin(positions, [position for position, _ in result.failed])
            positions, values = positions[good], values[torch.from_numpy(good)]
            if len(positions) == 0:
                continue
            ended, untested = self.tests.apply(cell.name, task.nodes[positions], values, fetch.output)
            stopped[positions[ended] - begin] = True
            failed |= {int(positions[place]): reason for place, reason in untested}
        return stopped, tuple(failed.items())

    def loops_ended(self, task: RunTask, begin: int, slots: Ints, stopped: NDArray[np.bool_]) -> None:
        """Note for each request which of its loops have ended, and where; their final values are found there.

        slots, stopped: [count] of the positions from `begin` on.
        """
        fetched = [fetch.output for fetch in task.fetches]
        for place in np.flatnonzero(stopped).tolist():
            request, node = self._by_slot[int(slots[place])], int(task.nodes[begin + place])
            at = None if request is None else request.loop_at(node)
            if request is not None and at is not None:
                request.end_loop(at[1].last, at[0], fetched)


def _nodes_of(requests: Sequence[InFlight], *, decides: bool) -> Ints:
    """Return the nodes whose values these requests may have, each once: those of their graphs, and if some of them
    decide by values what they read so, of which several may be outputs of one node."""
    extents = [(own.base, own.num_nodes) for request in requests for own in request.admitted]
    own = spans(*np.array(extents, np.int64).reshape(-1, 2).T)
    if not decides:
        return own
    collected = [place for request in requests for some in request.collected.values() for place in some]
    decided = np.concatenate((np.array(collected, np.int64), *[request.outputs for request in requests]))
    return np.unique(np.concatenate((own, decided // OUTPUTS)))


def objects(values: Tensor) -> list[Any]:
    """Return values [count, *shape] as a list: Python numbers if they are scalars, else tensors.

    Each tensor has memory of its own, because each may leave with another request: what keeps, saves or pickles one
    would carry the others along.
    """
    return values.tolist() if values.ndim == 1 else list(_UNBIND_COPY(values))


_Owners = list[tuple[dict[Handle, list[Any]], Handle, int]]
"""For whom values are read: columns, the handle in them, and how many requests."""


def _share(values: list[Any], owners: _Owners) -> None:
    """Give values to the columns that they were read for, in order."""
    first = 0
    for columns, handle, count in owners:
        columns[handle] = values[first : first + count]
        first += count
