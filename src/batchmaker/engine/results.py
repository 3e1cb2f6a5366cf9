"""Values that steps bring to the host, and how requests get them. Used by CellDriver.

Most requests need only their result. Their values go into tables: one assignment for all steps that are reported
together, at any batch size. Requests that are told each value, and values too wide for a table, cost a Python object
for each value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.compile.export import torch_dtype
from batchmaker.engine.request import InFlight
from batchmaker.engine.stop_tests import Failures, StopTests
from batchmaker.executor.base import StepsResult
from batchmaker.executor.tables import as_array
from batchmaker.graph.spec import CellType, ValueSpec
from batchmaker.graph.values import ValueSequence
from batchmaker.model.structure import Handle
from batchmaker.scheduler.commands import RunTask, within

Nodes = NDArray[np.int64]

_UNBIND_COPY: Final[Any] = torch.unbind_copy
"""Its stub says that it returns nothing."""
NARROW_BYTES: Final = 256
"""Values of up to this size have a table. Wider ones would need too much memory: a table has a row for every node."""


@final
class ResultTable:
    """Values of one output, one shape and one dtype, by node number. ResultTables makes and grows it."""

    __slots__ = ("_spec", "_width", "rows")

    def __init__(self, spec: ValueSpec, num_rows: int) -> None:
        self._spec = spec
        self._width = math.prod(spec.shape)
        shape = (num_rows,) if self._width == 1 else (num_rows, self._width)
        self.rows: NDArray[Any] = np.zeros(shape, as_array(torch.empty(0, dtype=torch_dtype(spec.dtype))).dtype)

    def write(self, nodes: Nodes, values: Tensor) -> None:
        """Store the values of these nodes. nodes: [count]. values: [count, *shape], or [count].

        In the second form a number fills all parts of its value. NullExecutor gives such numbers.
        """
        self.rows[nodes] = (
            as_array(values).reshape(-1) if self._width == 1 else as_array(values).reshape(len(nodes), -1)
        )

    def read(self, nodes: Nodes) -> Tensor:
        """Return the stored values of these nodes, [count, *shape], in memory of their own."""
        values = torch.from_numpy(self.rows.take(nodes, 0))
        if self._spec.dtype == "bfloat16":
            values = values.view(torch.bfloat16)
        return values.view(len(nodes), *self._spec.shape) if self._spec.shape else values


@final
class ResultTables:
    """All tables, by output, shape and dtype. `fit` makes room for more node numbers."""

    __slots__ = ("_num_rows", "_tables")

    def __init__(self) -> None:
        self._num_rows = 1024
        self._tables: dict[tuple[int, tuple[int, ...], str], ResultTable | None] = {}

    def fit(self, num_rows: int) -> None:
        """Make room for node numbers below `num_rows`."""
        if num_rows <= self._num_rows:
            return
        self._num_rows = max(2 * self._num_rows, num_rows)
        for table in self._tables.values():
            if table is not None:
                grown = np.zeros((self._num_rows, *table.rows.shape[1:]), table.rows.dtype)
                grown[: len(table.rows)] = table.rows
                table.rows = grown

    def find(self, output: int, spec: ValueSpec) -> ResultTable | None:
        """Return the table of an output; None if its values are empty or too wide for a table."""
        key = (output, spec.shape, spec.dtype)
        try:
            return self._tables[key]
        except KeyError:
            size = math.prod(spec.shape) * torch_dtype(spec.dtype).itemsize
            made = self._tables[key] = ResultTable(spec, self._num_rows) if 0 < size <= NARROW_BYTES else None
            return made


@final
class Results:
    """Gives the values that steps have brought to the requests in flight.

    tables: the values, except those that were told one by one. tests: the stop tests of their loops.
    """

    def __init__(self) -> None:
        self.tables = ResultTables()
        self.tests = StopTests()
        self._by_slot: list[InFlight | None] = []
        self._told: NDArray[np.bool_] = np.zeros(256, np.bool_)  # by slot
        self._waits: NDArray[np.bool_] = np.zeros(256, np.bool_)  # by slot: nothing of the request has run
        self._num_told = 0

    def fit(self, num_nodes: int) -> None:
        """Make room for node numbers below `num_nodes`: of every node that may run, whether of a loop or not."""
        self.tables.fit(num_nodes)
        self.tests.fit(num_nodes)

    def enter(self, requests: Sequence[InFlight]) -> None:
        """Note that requests have their slots. From now on steps may bring values for them."""
        slots = [request.admitted[0].slot for request in requests]
        self._fit(max(slots, default=-1) + 1)
        for slot, request in zip(slots, requests, strict=True):
            self._by_slot[slot] = request
            if request.told:
                self._told[slot] = True
                self._num_told += 1
        self._waits[slots] = True

    def _fit(self, num_slots: int) -> None:
        if num_slots > len(self._by_slot):
            self._by_slot += [None] * (max(num_slots, 2 * len(self._by_slot)) - len(self._by_slot))
            missing = np.zeros(max(0, len(self._by_slot) - len(self._told)), np.bool_)
            self._told, self._waits = np.concatenate((self._told, missing)), np.concatenate((self._waits, missing))

    def leave(self, request: InFlight) -> None:
        """Note that a request has ended. Values that steps still bring for it are dropped."""
        slot = request.admitted[0].slot
        self._by_slot[slot] = None
        if request.loops:
            self.tests.leave(request.loops)
        if request.told:
            self._told[slot] = False
            self._num_told -= 1

    def gather(self, requests: Sequence[InFlight]) -> None:
        """Read the values of the results of these ended requests from the tables, into `InFlight.gathered`.

        Single values of one output are read for all requests at once. Each value and each sequence has memory of its
        own.
        """
        alike: dict[int, list[InFlight]] = {}  # by template or unfolding
        for request in requests:
            if not request.told:
                alike.setdefault(id(request.unfolding), []).append(request)
        reads: dict[ResultTable, tuple[list[int], list[tuple[InFlight, Handle]]]] = {}
        for members in alike.values():
            for handle in members[0].unfolding.handles:
                table = self.tables.find(handle.output, handle.spec)
                if table is None:  # too wide: each value was told
                    continue
                if isinstance(handle, ValueSequence):
                    for request in members:
                        request.gathered[handle] = table.read(request.nodes(handle))
                    continue
                nodes, readers = reads.setdefault(table, ([], []))
                if handle.ends_open_loop:
                    nodes += [request.shift + request.ended[handle.node] for request in members]
                else:
                    nodes += [request.shift + handle.node for request in members]
                readers += [(request, handle) for request in members]
        for table, (nodes, readers) in reads.items():
            for (request, handle), value in zip(readers, objects(table.read(np.array(nodes))), strict=True):
                request.gathered[handle] = value

    def begin(self, slots: Nodes, at_s: float) -> None:
        """Note when requests began. slots: of the nodes of a step that began at `at_s`; repeats allowed."""
        first = slots[self._waits[slots]]
        if len(first):
            self._waits[first] = False
            for slot in set(first.tolist()):
                request = self._by_slot[slot]
                if request is not None:
                    request.ticket.started_s = at_s

    def take(self, cell: CellType, task: RunTask, result: StepsResult, begin: int, slots: Nodes) -> list[InFlight]:
        """Store the values that steps have brought. Returns the requests whose unfold function may wait for one.

        begin: the first position of these steps in the task. slots: [positions] the slot of each node's request.
        """
        missing = {position for position, _ in result.failed}
        if result.skipped is not None:
            missing.update((begin + np.flatnonzero(result.skipped)).tolist())
        touched: dict[int, InFlight] = {}
        for fetch, values in zip(task.fetches, result.fetched, strict=False):  # none where the steps failed as a whole
            positions = fetch.positions[within(fetch.positions, begin, begin + len(slots))]
            if len(positions) == 0:
                continue
            nodes = task.nodes[positions]
            table = self.tables.find(fetch.output, cell.outputs[fetch.output])
            if table is not None:
                table.write(nodes, values)
                if self._num_told == 0:
                    continue
            owners = slots[positions - begin]
            self._tell(fetch.output, positions, nodes, owners, values, missing, touched, some=table is not None)
        return list(touched.values())

    def _tell(
        self,
        output: int,
        positions: Nodes,
        nodes: Nodes,
        owners: Nodes,
        values: Tensor,
        missing: set[int],
        touched: dict[int, InFlight],
        *,
        some: bool,
    ) -> None:
        """Give values to their requests one by one, except at `missing` positions. some: only if told each value."""
        if some:
            where = np.flatnonzero(self._told[owners])
            if len(where) < len(nodes):
                nodes, owners, positions = nodes[where], owners[where], positions[where]
                values = values.index_select(0, torch.from_numpy(where))
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
        stopped = np.zeros(count, np.bool_)
        found = [
            (f.positions, v) for f, v in zip(task.fetches, result.fetched, strict=False) if f.output == cell.watched
        ]
        if not found:  # the steps failed as a whole
            return stopped, ()
        ((positions, values),) = found
        positions = positions[within(positions, begin, begin + count)]
        good = ~np.isin(positions, [position for position, _ in result.failed])
        positions, values = positions[good], values[torch.from_numpy(good)]
        if len(positions) == 0:
            return stopped, ()
        stopped[positions - begin], failed = self.tests.apply(cell.name, task.nodes[positions], values)
        return stopped, tuple([(int(positions[place]), reason) for place, reason in failed])

    def loops_ended(self, task: RunTask, begin: int, slots: Nodes, stopped: NDArray[np.bool_]) -> None:
        """Note for each request which of its loops have ended, and where; their final values are found there.

        slots, stopped: [count] of the positions from `begin` on.
        """
        fetched = [fetch.output for fetch in task.fetches]
        for place in np.flatnonzero(stopped).tolist():
            request, node = self._by_slot[int(slots[place])], int(task.nodes[begin + place])
            found = None if request is None else request.loop_at(node)
            if request is not None and found is not None:
                request.end_loop(found[1].last, found[0], fetched)


def objects(values: Tensor) -> list[Any]:
    """Return values [count, *shape] as a list: Python numbers if they are scalars, else tensors.

    Each tensor has memory of its own, because each may leave with another request: what keeps, saves or pickles one
    would carry the others along.
    """
    return values.tolist() if values.ndim == 1 else list(_UNBIND_COPY(values))
