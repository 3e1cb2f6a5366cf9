"""Cells of look-ups, layers and pointwise operations: all steps of a task of single nodes in one compiled call.

For the CPU, in float32. What else a cell computes is computed step by step (see `find_node_loop`).
"""

from __future__ import annotations

import operator
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from batchmaker.compile.dataflow import CannotRewriteError, TracedCell, extract
from batchmaker.compile.fold import is_lookup
from batchmaker.compile.node_steps import (
    ADDRESS,
    BEST,
    GATHER,
    LOOKUP,
    PASS,
    PASS_FIELDS,
    PRODUCT,
    STAYS,
    VALUE_BYTES,
    VALUE_FIELDS,
    WIDTH,
    run_nodes,
)
from batchmaker.compile.passes.atoms import gate_by_gate
from batchmaker.compile.passes.cheaper import cheaper_sums
from batchmaker.compile.passes.fusion import fuse_pointwise
from batchmaker.compile.passes.interpreter import LINE, Words, is_available
from batchmaker.compile.passes.nodes import is_linear, width_of
from batchmaker.compile.passes.pointwise import Pass
from batchmaker.compile.passes.products import merge_products, parameters
from batchmaker.graph.spec import ValueSpec
from batchmaker.kernels.cpu.choice import least_s
from batchmaker.kernels.cpu.products import address_of, library, pack
from batchmaker.kernels.cpu.steps import BLOCK, COPY_FIELDS, NUM_ADDRESSES, SET_THREADS, SGEMM, note_copy

_aten = torch.ops.aten
_NONE: Final = np.zeros(0, np.int64)
_SIZES: Final = (1, BLOCK, 8, 4 * BLOCK)
"""Rows at which the loop is tried, the most informative first; those between them go by interpolated ratios."""
_ALL_S: Final = 40e-3
_FEW_WEIGHTS: Final = 1 << 17
"""With more weights than this a cell has no loop: each block would read them again from the third cache."""


@final
@dataclass(slots=True)
class NodeTask:
    """The work: nodes, step by step. Integers are int64, all arrays contiguous.

    ends: [steps], as in RunTask. largest: the most positions of a step. source_tables, source_rows: [inputs, positions]
    the place of each input. tables: the address of row 0 by table number; 0 stands for zeros. keep_at, keep_rows,
    keep_tables and fetch_at, fetch_of, fetched: as in LoopTask.
    """

    ends: Words
    largest: int
    source_tables: Words
    source_rows: Words
    tables: Words
    keep_at: Words
    keep_rows: Words
    keep_tables: Words
    fetch_at: tuple[Words, ...]
    fetch_of: tuple[int, ...]
    fetched: tuple[NDArray[Any], ...]


@final
class NodeLoop:
    """Runs tasks of one cell. inputs, outputs: their rows. Threads may run tasks at once.

    limits: [inputs] the number of tokens; 0 for values. operations, values, passes, programs, slots, base_values: as
    for run_nodes, with values that have no addresses yet. made: [outputs] which value each is. kept: what is behind the
    addresses of operations and slots.
    """

    def __init__(self, writer: _Writer, outputs: Sequence[int]) -> None:
        self._operations = np.array(writer.operations, np.int64)
        self._values = np.array(writer.values, np.int64)
        self._passes = np.array(writer.passes, np.int64).reshape(-1, PASS_FIELDS)
        self._programs = np.concatenate([np.zeros((0, 5), np.int64), *writer.programs])
        self._slots = np.concatenate([np.zeros((0, 4), np.int64), *writer.slots])
        self._base_values = np.array(writer.base_values, np.int64)
        self._limits = np.array(writer.limits, np.int64)
        self._made = np.array(outputs, np.int64)
        self._parts = np.arange(len(outputs))
        self._kept = writer.kept
        self._addresses = np.zeros(NUM_ADDRESSES, np.int64)
        if writer.num_weights:
            functions = library()
            self._addresses[SGEMM] = address_of(functions.sgemm)
            self._addresses[SET_THREADS] = address_of(functions.set_threads)
        self._values[self._made, STAYS] = 1
        self.block = BLOCK
        self._rooms: list[_Room] = []  # threads take one and put it back, each in one operation

    def run(self, task: NodeTask) -> bool:
        """Compute all steps of a task. Returns False, with nothing written, if a token has no row."""
        room = self._room(task.largest)
        copies = room.copies_of(len(task.keep_tables), task)
        done = run_nodes(
            task.ends, task.source_tables, task.source_rows, task.tables, self._limits, self._operations, room.values,
            self._passes, self._programs, self._slots, self._base_values, room.bases, self._addresses, self._made,
            self._parts, task.keep_at, task.keep_rows, task.keep_tables, copies,
            room.places_of(task.source_rows.shape[1]), self.block,
        )  # fmt: skip
        self._rooms.append(room)
        return done

    def call(self, inputs: Sequence[Tensor], outputs: Sequence[ValueSpec]) -> tuple[Tensor, ...]:
        """Compute one step: inputs [n, *shape] -> outputs [n, *shape]. ValueError if a token has no row."""
        columns = [values.contiguous() for values in inputs]
        count, ports = len(columns[0]), len(columns)
        places = np.arange(count)
        made = [torch.empty((count, *spec.shape), dtype=getattr(torch, spec.dtype)) for spec in outputs]
        task = NodeTask(
            np.array([count]), count, np.repeat(np.arange(1, ports + 1), count).reshape(ports, count),
            np.tile(places, (ports, 1)), np.array([0, *[column.data_ptr() for column in columns]]), _NONE, _NONE, _NONE,
            (places,) * len(made), tuple(range(len(made))), tuple([values.numpy() for values in made]),
        )  # fmt: skip
        if not self.run(task):
            raise ValueError("a token has no row")
        return tuple(made)

    def _room(self, largest: int) -> _Room:
        try:
            room = self._rooms.pop()
        except IndexError:
            room = _Room(self._values, len(self._base_values), largest, self.block)
        return room if room.largest >= largest else _Room(self._values, len(self._base_values), largest, self.block)


@final
class _Room:
    """The memory of a call, for steps of up to `largest` rows. values: with their addresses."""

    __slots__ = ("_copies", "_memory", "_places", "bases", "largest", "values")

    def __init__(self, values: Words, num_bases: int, largest: int, block: int) -> None:
        self.largest = largest
        self.values = values.copy()
        rows = np.where(values[:, STAYS] == 1, largest, min(largest, block))
        sizes = -(-rows * values[:, VALUE_BYTES] // LINE) * LINE + LINE  # rows of values do not share cache lines
        self._memory = np.empty(int(sizes.sum()) + LINE, np.uint8)
        start = -(-self._memory.ctypes.data // LINE) * LINE
        self.values[:, ADDRESS] = start + np.cumsum(sizes) - sizes
        self.bases = np.zeros(num_bases, np.int64)
        self._copies, self._places = np.empty((8, COPY_FIELDS), np.int64), np.empty(1024, np.int64)

    def copies_of(self, kept: int, task: NodeTask) -> Words:
        """Return room for the copies of a task, with its fetches entered."""
        count = kept + len(task.fetched)
        if len(self._copies) < count:
            self._copies = np.empty((2 * count, COPY_FIELDS), np.int64)
        copies = self._copies[:count]
        for i, (output, at, values) in enumerate(zip(task.fetch_of, task.fetch_at, task.fetched, strict=True), kept):
            note_copy(copies, i, output, at, values)
        return copies

    def places_of(self, count: int) -> Words:
        """Return room for `count` places."""
        if len(self._places) < count:
            self._places = np.empty(2 * count, np.int64)
        return self._places[:count]


# --- a graph as operations -------------------------------------------------------------------------------------------


class _OtherError(Exception):
    """The graph has something else in it."""


@final
class _Writer:
    """Writes the operations of a graph. Numbers of values are their places in `values`."""

    def __init__(self, cell: TracedCell, inputs: Sequence[ValueSpec]) -> None:
        self.operations: list[list[int]] = []
        self.values: list[list[int]] = []
        self.passes: list[list[int]] = []
        self.programs: list[Words] = []
        self.slots: list[Words] = []
        self.base_values: list[int] = []
        self.limits: list[int] = [0] * len(inputs)
        self.kept: list[Any] = []
        self.num_weights = 0
        self._cell = cell
        self._value_of: dict[fx.Node, int] = {}
        self._ports: dict[fx.Node, int] = {}
        self._results: dict[fx.Node, list[int]] = {}  # of passes with several
        for port, (node, spec) in enumerate(zip(cell.inputs, inputs, strict=True)):
            self._ports[node] = port
            if spec.dtype == "float32" and len(spec.shape) == 1:
                self._value_of[node] = self._add(GATHER, spec.shape[0], port)
            elif spec.dtype != "int64" or spec.shape:
                raise _OtherError

    def write(self, node: fx.Node) -> None:
        """Append what a node computes. _OtherError if there is no operation for it."""
        if node.target is operator.getitem and node.args[0] in self._results:
            self._value_of[node] = self._results[node.args[0]][node.args[1]]  # type: ignore[index]
        elif is_lookup(node):
            self._look_up(node)
        elif is_linear(self._cell, node):
            self._multiply(node)
        elif isinstance(node.target, Pass):
            self._pass(node, node.target)
        elif node.target is _aten.argmax.default and node.args[1:] in ((-1,), (1,)) and not node.kwargs:
            scores = self.value(node.args[0])
            self._value_of[node] = self._add(BEST, 0, scores, num_bytes=8)
        else:
            raise _OtherError

    def value(self, node: Any) -> int:
        """Return the number of a node's value. _OtherError if it has none."""
        if node not in self._value_of:
            raise _OtherError
        return self._value_of[node]

    def _look_up(self, node: fx.Node) -> None:
        table, width = self._cell.value(node.args[0]), width_of(node)
        token = next(argument for argument in node.args[1:] if isinstance(argument, fx.Node))
        if table is None or width is None or table.dtype is not torch.float32 or table.dim() != 2:
            raise _OtherError
        table = table.contiguous()
        self.kept.append(table)
        port = self._ports[token]
        self.limits[port] = min(self.limits[port] or len(table), len(table))
        self._value_of[node] = self._add(LOOKUP, width, port, table.data_ptr())

    def _multiply(self, node: fx.Node) -> None:
        weight, bias = parameters(self._cell, node)
        source, functions = self.value(node.args[0]), library()
        if weight.dtype is not torch.float32 or functions.sgemm is None or self.values[source][WIDTH] == 0:
            raise _OtherError
        packed, address = pack(weight.detach().t().contiguous().numpy(), functions)
        row = None if bias is None else bias.detach().contiguous()
        self.kept += [packed, row]
        self.num_weights += weight.numel()
        self._value_of[node] = self._add(PRODUCT, len(weight), source, address, 0 if row is None else row.data_ptr())

    def _pass(self, node: fx.Node, made: Pass) -> None:
        parts = made.for_machine
        if parts is None:
            raise _OtherError
        program, slots, num_arguments, num_results = parts
        read = [self.value(argument) for argument in node.args]
        assert len(read) == num_arguments
        number, width = len(self.passes), made.width
        results = [self._value(width, 4 * width) for _ in range(num_results)]
        low = [sum(map(len, self.programs)), sum(map(len, self.slots)), len(self.base_values)]
        self.programs.append(program)
        self.slots.append(slots)
        self.base_values += [*read, *results, -1, -1]  # of constants, which have addresses of their own; of registers
        self.passes.append([
            low[0], low[0] + len(program), low[1], low[1] + len(slots), low[2], len(self.base_values),
            made.num_registers, width,
        ])  # fmt: skip
        self.kept.append(made)
        self.operations.append([PASS, results[0], number, 0, 0])
        if num_results == 1:
            self._value_of[node] = results[0]
        else:
            self._results[node] = results

    def _add(self, code: int, width: int, a: int, b: int = 0, c: int = 0, num_bytes: int = 0) -> int:
        value = self._value(width, num_bytes or 4 * width)
        self.operations.append([code, value, a, b, c])
        return value

    def _value(self, width: int, num_bytes: int) -> int:
        fields = [0] * VALUE_FIELDS
        fields[VALUE_BYTES], fields[WIDTH] = num_bytes, width
        self.values.append(fields)
        return len(self.values) - 1


def find_node_loop(cell: TracedCell, inputs: Sequence[ValueSpec], outputs: Sequence[ValueSpec]) -> NodeLoop | None:
    """Return the loop of a cell's graph; None if it has other operations, or they cannot be compiled here.

    Inputs are rows of float32 or tokens. Tokens that are both read and made are left alone: a step of a task could read
    what an earlier one has made, and it would be too late to find that it has no row.
    """
    if not is_available():
        return None
    tokens = [any(spec.dtype == "int64" for spec in side) for side in (inputs, outputs)]
    if all(tokens):
        return None
    try:
        made = extract(cell, cell.inputs, cell.outputs)
        merge_products(made)
        made = gate_by_gate(made, layers=False)
        cheaper_sums(made)
        fuse_pointwise(made, fewest_saved=0)
        writer = _Writer(made, inputs)
        for node in made.graph.nodes:
            if node.op == "call_function":
                writer.write(node)
        results = [writer.value(node) for node in made.outputs]
    except (_OtherError, CannotRewriteError):
        return None
    if writer.num_weights > _FEW_WEIGHTS:
        return None
    if any(node.op != "call_function" for node in made.outputs):  # an input that is handed on
        return None
    return NodeLoop(writer, results)


# --- whether it is used ----------------------------------------------------------------------------------------------


@final
class NodeChoice:
    """The loop of a cell, and the largest steps for which it is faster than `call` with the executor's copies."""

    def __init__(self, loop: NodeLoop) -> None:
        self._loop = loop
        self._faster: NDArray[np.bool_] = np.zeros(0, np.bool_)

    def measure(
        self, call: Callable[..., tuple[Tensor, ...]], example: Callable[[int], tuple[Tensor, ...]],
        batch_sizes: Sequence[int],
    ) -> None:  # fmt: skip
        """Find out for up to the largest size. example: makes rows. Takes some 10 ms."""
        ratios: dict[int, float] = {}
        end_s = time.thread_time() + _ALL_S
        for n in dict.fromkeys(min(size, batch_sizes[-1]) for size in _SIZES):
            if len(ratios) > 1 and time.thread_time() > end_s:
                break
            padded = batch_sizes[bisect_left(batch_sizes, n)]
            rows = example(padded)
            looped, stepped = _trial(self._loop, call, rows, call(*rows), n)
            looped()  # compile or load it
            mine, others = least_s([looped, stepped])
            ratios[n] = mine / max(others, 1e-9)
        sizes = sorted(ratios)
        every = np.arange(batch_sizes[-1] + 1)
        self._faster = np.interp(every, sizes, [ratios[n] for n in sizes]) < 1

    @property
    def faster(self) -> NDArray[np.bool_]:
        """[n] whether it is faster for so many rows; empty before it is measured."""
        return self._faster

    def fastest(self, batch: int) -> NodeLoop | None:
        """Return the loop if it is faster for tasks whose largest step has `batch` rows; None if that is not known."""
        return self._loop if batch < len(self._faster) and self._faster[batch] else None


def _trial(
    loop: NodeLoop, call: Callable[..., tuple[Tensor, ...]], rows: tuple[Tensor, ...], made: tuple[Tensor, ...], n: int
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return a step of n nodes in the loop, and by `call`, both from rows of tables into rows of tables.

    rows: as many as `call` is to take, at least n. made: what it gives for them.
    """
    given = [values.contiguous().numpy() for values in rows]
    kept = [values.contiguous().numpy().copy() for values in made]
    places = np.arange(n)[::-1].copy()  # in another order, so that `take` copies as it does for other rows
    padded = np.concatenate((places, np.zeros(len(rows[0]) - n, np.int64)))
    ports, outputs = len(given), len(kept)
    task = NodeTask(
        np.array([n]), n, np.repeat(np.arange(1, ports + 1), n).reshape(ports, n), np.tile(places, (ports, 1)),
        np.array([0, *[values.ctypes.data for values in (*given, *kept)]]), np.arange(n), places,
        np.arange(ports + 1, ports + 1 + outputs), (), (), (),
    )  # fmt: skip

    def stepped() -> None:
        taken = [torch.from_numpy(values.take(padded, 0)) for values in given]
        for table, values in zip(kept, call(*taken), strict=True):
            table[places] = values.numpy()[:n]

    def looped() -> tuple[Any, ...]:
        return loop.run(task), given, kept  # which the addresses need

    return looped, stepped
