"""Cells of look-ups, layers and pointwise operations: all steps of a task of single nodes in one compiled call.

For the CPU, in float32. What else a cell computes is computed step by step (see `find_node_loop`).
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.arrays import Ints
from batchmaker.compile.dataflow import CannotRewriteError, TracedCell
from batchmaker.compile.export import row_bytes
from batchmaker.compile.node_steps import Code, Scratch, run_nodes
from batchmaker.compile.operations import Operations, OtherError, ValueRoom, Writer, write_graph
from batchmaker.compile.passes.interpreter import is_available
from batchmaker.compile.passes.open_steps import open_steps
from batchmaker.graph.spec import ValueSpec
from batchmaker.kernels.cpu.choice import least_s
from batchmaker.kernels.cpu.products import library
from batchmaker.kernels.cpu.steps import BLOCK, COPY_FIELDS

_NONE: Final = np.zeros(0, np.int64)
_SIZES: Final = (1, 64, 8, BLOCK)
"""Rows at which the loop is tried, the most informative first; those between them go by interpolated ratios."""
_ALL_S: Final = 40e-3


@final
@dataclass(slots=True)
class NodeTask:
    """The work: nodes, step by step. Integers are int64, all arrays contiguous.

    ends: [steps], as in RunTask. largest: the most positions of a step. source_tables, source_rows: [inputs, positions]
    the place of each input. tables: the address of row 0 by table number; 0 stands for zeros. keep_at, keep_rows,
    keep_tables and fetch_at, fetch_of, fetched: as in LoopTask.
    """

    ends: Ints
    largest: int
    source_tables: Ints
    source_rows: Ints
    tables: Ints
    keep_at: Ints
    keep_rows: Ints
    keep_tables: Ints
    fetch_at: tuple[Ints, ...]
    fetch_of: tuple[int, ...]
    fetched: tuple[NDArray[Any], ...]


class NodeTables(NamedTuple):
    """What `run_nodes` takes beside a task; see there. row_bytes: [inputs]. copies: for all outputs, kept and fetched.

    memory: what the addresses in these arrays are of.
    """

    code: Code
    scratch: Scratch
    made: Ints
    parts: Ints
    row_bytes: Ints
    copies: Ints
    places: Ints
    from_at: Ints
    memory: object


@final
class NodeLoop:
    """Runs tasks of one cell. outputs: which value each is. Threads may run tasks at once."""

    def __init__(self, writer: Writer, outputs: Sequence[int], inputs: Sequence[ValueSpec]) -> None:
        self._operations = Operations(writer, outputs)
        self._made = np.array(outputs, np.int64)
        self._parts = np.arange(len(outputs))
        self._row_bytes = np.array([row_bytes(spec) for spec in inputs], np.int64)
        self.block = BLOCK
        self._rooms: list[_Room] = []  # threads take one and put it back, each in one operation

    def run(self, task: NodeTask) -> int:
        """Compute the steps of a task; return how many: all, or those before a token without a row."""
        room, operations = self._room(task.largest), self._operations
        copies = room.copies_of(len(task.keep_tables), task)
        done = run_nodes(
            task.ends,
            (task.source_tables, task.source_rows, self._row_bytes),
            task.tables,
            operations.code,
            room.scratch,
            self._made,
            (task.keep_at, task.keep_rows, task.keep_tables, self._parts),
            copies,
            room.places_of(task.source_rows.shape[1]),
            room.from_at,
            self.block,
        )
        self._rooms.append(room)
        return done

    def call(self, inputs: Sequence[Tensor], outputs: Sequence[ValueSpec]) -> tuple[Tensor, ...]:
        """Compute one step: inputs [n, *shape] -> outputs [n, *shape]. ValueError if a token has no row."""
        columns = [values.contiguous() for values in inputs]
        count, ports = len(columns[0]), len(columns)
        places = np.arange(count)
        made = [torch.empty((count, *spec.shape), dtype=getattr(torch, spec.dtype)) for spec in outputs]
        task = NodeTask(
            np.array([count]),
            count,
            np.repeat(np.arange(1, ports + 1), count).reshape(ports, count),
            np.tile(places, (ports, 1)),
            np.array([0, *[column.data_ptr() for column in columns]]),
            _NONE,
            _NONE,
            _NONE,
            (places,) * len(made),
            tuple(range(len(made))),
            tuple([values.numpy() for values in made]),
        )
        if self.run(task) != 1:
            raise ValueError("a token has no row")
        return tuple(made)

    def arrays(self, largest: int) -> NodeTables:
        """Return what `run_nodes` takes beside a task, with memory of their own for steps of up to `largest` rows."""
        room = _Room(self._operations, largest, self.block, len(self._row_bytes))
        return NodeTables(
            self._operations.code,
            room.scratch,
            self._made,
            self._parts,
            self._row_bytes,
            np.zeros((2 * len(self._made), COPY_FIELDS), np.int64),
            room.places_of(largest),
            room.from_at,
            (room, self._operations),
        )

    def _room(self, largest: int) -> _Room:
        try:
            room = self._rooms.pop()
        except IndexError:
            room = None
        if room is None or room.largest < largest or room.from_at.shape[1] < self.block:
            room = _Room(self._operations, largest, self.block, len(self._row_bytes))
        return room


@final
class _Room(ValueRoom):
    """The memory of a call."""

    def __init__(self, of: Operations, largest: int, block: int, num_inputs: int) -> None:
        super().__init__(of, largest, block)
        self._places = np.empty(1024, np.int64)
        self.from_at = np.empty((num_inputs, block), np.int64)

    def places_of(self, count: int) -> Ints:
        """Return room for `count` places."""
        if len(self._places) < count:
            self._places = np.empty(2 * count, np.int64)
        return self._places[:count]


def find_node_loop(cell: TracedCell, inputs: Sequence[ValueSpec], outputs: Sequence[ValueSpec]) -> NodeLoop | None:
    """Return the loop of a cell's graph; None if it has other operations, or they cannot be compiled here."""
    if not is_available() or not library().multiplies:
        return None
    try:
        writer, made = write_graph(open_steps(cell), inputs)
        results = [writer.value(node) for node in made]
    except (OtherError, CannotRewriteError):
        return None
    return NodeLoop(writer, results, inputs)


# --- whether it is used ----------------------------------------------------------------------------------------------


@final
class NodeChoice:
    """The loop of a cell, and the steps for which it is faster than `call` with the executor's copies.

    loop: None if there is none. call: a call of the cell's program. example: makes rows. faster: [n] whether the loop
    is, for so many rows, and for more than the last as for the last; empty before it is measured.
    """

    def __init__(
        self,
        loop: NodeLoop | None,
        call: Callable[..., tuple[Tensor, ...]],
        example: Callable[[int], tuple[Tensor, ...]],
    ) -> None:
        self.loop, self._call, self._example = loop, call, example
        self.faster: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._measuring = threading.Lock()

    def measure(self, batch_sizes: Sequence[int] = ()) -> None:
        """Find out, for up to the largest of these sizes, to which the executor pads. Takes some 10 ms."""
        if self.loop is None:
            return
        ratios: dict[int, float] = {}
        most = batch_sizes[-1] if batch_sizes else _SIZES[-1]
        end_s = time.thread_time() + _ALL_S
        for n in dict.fromkeys(min(size, most) for size in _SIZES):
            if len(ratios) > 1 and time.thread_time() > end_s:
                break
            padded = batch_sizes[bisect_left(batch_sizes, n)] if batch_sizes else n
            rows = self._example(padded)
            looped, stepped = _trial(self.loop, self._call, rows, self._call(*rows), n)
            looped()  # compile or load it
            mine, others = least_s([looped, stepped])
            ratios[n] = mine / max(others, 1e-9)
        sizes = sorted(ratios)
        self.faster = np.interp(np.arange(most + 1), sizes, [ratios[n] for n in sizes]) < 1

    def fastest(self, batch: int) -> NodeLoop | None:
        """Return the loop if it is faster for tasks whose largest step has `batch` rows. Measured now if not before."""
        if self.loop is None:
            return None
        faster = self.faster  # no lock for each task: workers share the cell
        if not len(faster):
            with self._measuring:
                if not len(self.faster):
                    self.measure()
                faster = self.faster
        return self.loop if faster[min(batch, len(faster) - 1)] else None


def _trial(
    loop: NodeLoop, call: Callable[..., tuple[Tensor, ...]], rows: tuple[Tensor, ...], made: tuple[Tensor, ...], n: int
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return a step of n nodes in the loop, and by `call`, both from rows of tables into rows of tables.

    rows: as many as `call` is to take, at least n. made: what it gives for them.
    """
    sources = [values.contiguous().numpy() for values in rows]
    targets = [values.contiguous().numpy().copy() for values in made]
    places = np.arange(n)[::-1].copy()  # in another order, so that `take` copies as it does for other rows
    padded = np.concatenate((places, np.zeros(len(rows[0]) - n, np.int64)))
    ports, outputs = len(sources), len(targets)
    task = NodeTask(
        np.array([n]),
        n,
        np.repeat(np.arange(1, ports + 1), n).reshape(ports, n),
        np.tile(places, (ports, 1)),
        np.array([0, *[values.ctypes.data for values in (*sources, *targets)]]),
        np.arange(n),
        places,
        np.arange(ports + 1, ports + 1 + outputs),
        (),
        (),
        (),
    )

    def stepped() -> None:
        batch = [torch.from_numpy(values.take(padded, 0)) for values in sources]
        for table, values in zip(targets, call(*batch), strict=True):
            table[places] = values.numpy()[:n]

    def looped() -> tuple[Any, ...]:
        return loop.run(task), sources, targets  # which the addresses need

    return looped, stepped
