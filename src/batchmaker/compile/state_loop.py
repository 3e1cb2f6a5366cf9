"""Chains with any state on the CPU: the steps of a task in one compiled call, with torch for what it does not know.

A counter, a flag, a temperature or a mask in the state are operations as the rest of the cell (see operations.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.arrays import Flags, Ints
from batchmaker.compile.dataflow import CannotRewriteError, TracedCell
from batchmaker.compile.export import row_bytes, torch_dtype
from batchmaker.compile.lower import Packer
from batchmaker.compile.node_steps import CALL, GATHER
from batchmaker.compile.operations import Operations, OtherError, TorchCall, ValueRoom, Writer, write_graph
from batchmaker.compile.passes.interpreter import is_available
from batchmaker.compile.passes.open_steps import open_steps
from batchmaker.compile.state_steps import (
    AT_CALL,
    AT_NO_ROW,
    AT_TEST,
    CURSOR_FIELDS,
    DONE,
    OPERATION,
    RUNNING,
    STEPS,
    run_states,
)
from batchmaker.compile.typed import KINDS
from batchmaker.errors import RAISED_BY_USERS
from batchmaker.graph.spec import ValueSpec
from batchmaker.kernels.cpu.choice import least_s
from batchmaker.kernels.cpu.steps import BLOCK

_NONE: Final = np.zeros(0, np.int64)
_NO_FLAGS: Final = np.zeros(0, np.bool_)
_SIZES: Final = (1, 8, 64)
"""Rows at which the loop is tried, and the largest; those between them go by interpolated ratios."""
_STEPS: Final = 4
_ALL_S: Final = 60e-3
_SLOW_S: Final = 10e-3
"""A step that takes longer is left to torch."""
_LARGE_BYTES: Final = 4096
"""Rows of state that only torch reads are given to it where they are, if they are larger than this."""


@final
@dataclass(slots=True)
class StateTask:
    """The work: chains in lanes, step by step. Integers are int64, all arrays contiguous.

    ends, largest, lanes, tables, move_at, move_tables, move_rows, keep_at, keep_rows, keep_tables, fetch_at, fetch_of,
    fetched: as in kernels.cpu.loop.LoopTask; of every dtype and shape of row. nodes: [positions]. hoisted: values by
    position, [positions or more, ...]. state: the tables of the lanes, [lanes, ...].
    """

    ends: Ints
    largest: int
    lanes: Ints
    nodes: Ints
    tables: Ints
    hoisted: tuple[Tensor, ...]
    state: tuple[Tensor, ...]
    move_at: Ints
    move_tables: Ints
    move_rows: Ints
    keep_at: Ints
    keep_rows: Ints
    keep_tables: Ints
    fetch_at: tuple[Ints, ...]
    fetch_of: tuple[int, ...]
    fetched: tuple[NDArray[Any], ...]


@final
@dataclass(frozen=True, slots=True)
class StateResult:
    """num_steps: how many steps have run; nothing is written of those after them, which are to be run one by one.
    stopped, skipped: [positions] where loops ended, and what did not run. failed: positions at which a test raised.
    """

    num_steps: int
    stopped: Flags
    skipped: Flags
    failed: tuple[tuple[int, str], ...]


class _NoTests:
    """The stop tests of a task: see `batchmaker.engine.stop_tests.StopTests`. No loop ends at a value here."""

    test_of = last = output_of = constants = _NONE
    ended = is_constant = _NO_FLAGS


@final
class StateLoop:
    """Runs tasks of one cell, of which the first inputs are hoisted values and the others state.

    Threads may run tasks at once, on lanes of their own. num_calls: operations of a step that torch does.
    """

    def __init__(self, writer: Writer, made: Sequence[int], fed_by: Sequence[int], inputs: Sequence[ValueSpec]) -> None:
        stays = [*(v for v in (*made, *fed_by) if v >= 0)]
        self._calls = writer.calls
        if self._calls:
            stays = list(range(len(writer.values)))
        self._operations = Operations(writer, stays)
        self._made, self._fed_by = np.array(made, np.int64), np.array(fed_by, np.int64)
        self._parts = np.arange(len(made))
        self._is_number = [shape == () and dtype in KINDS for shape, dtype in writer.shapes]
        self._inputs = inputs
        self._row_bytes = np.array([row_bytes(spec) for spec in inputs], np.int64)
        self._num_hoisted = len(inputs) - len(fed_by)
        self._rooms: list[_StateRoom] = []  # threads take one and put it back, each in one operation

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    @property
    def num_hoisted(self) -> int:
        return self._num_hoisted

    def can_watch(self, outputs: Iterable[int]) -> bool:
        """Whether stop tests can look at these outputs."""
        return all(output >= len(self._made) or self._made[output] >= 0 for output in outputs)

    def run(self, task: StateTask, cell: str, tests: Any = None) -> StateResult:
        """Compute steps of a task, except those of loops that have ended.

        cell: its name, for messages. tests: of the loops; None if none ends at a value before the task does. Not all
        steps run if a token has no row or a call of torch raises.
        """
        loops = _NoTests if tests is None else tests
        count = len(task.lanes)
        stopped, skipped = np.zeros((2, count), np.bool_)
        failed: dict[int, str] = {}
        by_python = tests is not None and not self._compares(tests, task.nodes)
        room, operations = self._room(task.largest, count), self._operations
        room.cursor[:] = 0, 0, -1, 0
        hoisted_at = np.array([values.data_ptr() for values in task.hoisted], np.int64)
        state_at = np.array([values.data_ptr() for values in task.state], np.int64)
        arguments: tuple[Any, ...] = (
            room.cursor,
            (task.ends, task.lanes, task.nodes),
            task.tables,
            (hoisted_at, state_at, self._row_bytes),
            (task.move_at, task.move_tables, task.move_rows),
            (task.keep_at, task.keep_rows, task.keep_tables, self._parts),
            room.copies_of(len(task.keep_tables), task),
            (self._made, self._fed_by),
            operations.code,
            room.scratch,
            (loops.test_of, loops.last, loops.output_of, loops.ended, loops.constants),
            by_python,
            (stopped, skipped),
            room.positions,
            room.from_at,
            room.block,
        )
        cursor = room.cursor
        while (why := run_states(*arguments)) != DONE:
            if why == AT_NO_ROW:
                break
            if why == AT_TEST:
                self._test(room, tests, cell, task.nodes, stopped, failed)
                continue
            assert why == AT_CALL
            number = int(operations.operations[cursor[OPERATION], 2])
            try:
                self._call(self._calls[number], room, task)
            except Exception:  # any exception of the cell; the step is then run again, to find whose it is
                break
            cursor[OPERATION] += 1
        num_steps = int(cursor[STEPS])
        self._rooms.append(room)
        return StateResult(num_steps, stopped, skipped, tuple(failed.items()))

    def call(self, inputs: Sequence[Tensor], outputs: Sequence[ValueSpec]) -> tuple[Tensor, ...]:
        """Compute one step: inputs [n, *shape] -> outputs [n, *shape]. ValueError if it cannot be computed here."""
        copies = tuple([values.clone(memory_format=torch.contiguous_format) for values in inputs])
        made = tuple([torch.empty((len(copies[0]), *spec.shape), dtype=torch_dtype(spec.dtype)) for spec in outputs])
        if self.run(self._example(copies, 1, made), "").num_steps != 1:
            raise ValueError("a token has no row, or torch raised")
        return made

    def _example(self, rows: tuple[Tensor, ...], num_steps: int, made: tuple[Tensor, ...] = ()) -> StateTask:
        """Return a task of equal steps from these rows on. made: where the outputs of the first step go."""
        n, hoisted = len(rows[0]), self._num_hoisted
        places = np.arange(n)
        return StateTask(
            np.arange(1, num_steps + 1) * n,
            n,
            np.tile(places, num_steps),
            np.tile(places, num_steps),
            np.zeros(1, np.int64),
            tuple([v.repeat(num_steps, *[1] * (v.dim() - 1)) for v in rows[:hoisted]]),
            rows[hoisted:],
            _NONE,
            np.zeros((len(rows) - hoisted, 0), np.int64),
            np.zeros((len(rows) - hoisted, 0), np.int64),
            _NONE,
            _NONE,
            _NONE,
            (places,) * len(made),
            tuple(range(len(made))),
            tuple(map(_bits, made)),
        )

    def trial(self, rows: tuple[Tensor, ...], num_steps: int) -> Callable[[], Any]:
        """Return a function that runs so many steps from these rows on."""
        task = self._example(tuple([values.clone() for values in rows]), num_steps)
        return lambda: self.run(task, "")

    def _compares(self, tests: Any, nodes: Ints) -> bool:
        """Whether all stop tests at these nodes compare one number with an integer."""
        numbers = np.unique(tests.test_of[nodes])
        numbers = numbers[numbers >= 0]
        watched = [int(self._made[output]) for output in tests.output_of[numbers] if output < len(self._made)]
        return bool(tests.is_constant[numbers].all()) and all(self._is_number[value] for value in watched)

    # --- what Python does ------------------------------------------------------------------------------------------

    def _test(
        self, room: _StateRoom, tests: Any, cell: str, nodes: Ints, stopped: Flags, failed: dict[int, str]
    ) -> None:
        """Apply the stop tests after a step."""
        count = int(room.cursor[RUNNING])
        if count == 0:
            return
        positions = room.positions[0][:count]
        for output in tests.outputs:
            if output < len(self._made):
                values = room.view(int(self._made[output]), count)
                ended, untested = tests.apply(cell, nodes[positions], values, output)
                stopped[positions[ended]] = True
                failed.update({int(positions[place]): reason for place, reason in untested})

    def _call(self, call: TorchCall, room: _StateRoom, task: StateTask) -> None:
        count = int(room.cursor[RUNNING])
        arguments = [
            room.view(value, count, shape) if value >= 0 else self._from_lanes(room, task, ~value, count)
            for value, shape in call.reads
        ]
        with torch.no_grad():
            made = call.program(*arguments)
        for value, result in zip(call.writes, made, strict=True):
            room.view(value, count).copy_(result)

    def _from_lanes(self, room: _StateRoom, task: StateTask, port: int, count: int) -> Tensor:
        """Return a part of the state of the rows that run: where it lies, if they lie in order, else a copy."""
        lanes, state = task.lanes[room.positions[0][:count]], task.state[port - self._num_hoisted]
        first = int(lanes[0])
        if count == 1 or bool((lanes == np.arange(first, first + count)).all()):
            return state.narrow(0, first, count)
        return state[torch.from_numpy(lanes)]

    def _room(self, largest: int, count: int) -> _StateRoom:
        try:
            room = self._rooms.pop()
        except IndexError:
            room = None
        if room is None or room.largest < largest:
            largest = 1 << max(0, (largest - 1).bit_length())
            room = _StateRoom(self._operations, largest, largest if self._calls else BLOCK, len(self._inputs))
        room.fit(count)
        return room


@final
class _StateRoom(ValueRoom):
    """The memory of a call. positions: running, places and held, as for run_states."""

    def __init__(self, of: Operations, largest: int, block: int, num_inputs: int) -> None:
        super().__init__(of, largest, block)
        self.block = block
        self.cursor = np.zeros(CURSOR_FIELDS, np.int64)
        self.from_at = np.empty((num_inputs, block), np.int64)
        self._shapes = of.shapes
        self._views: dict[tuple[int, int, tuple[int, ...]], Tensor] = {}
        self.positions: tuple[Ints, ...] = tuple(np.empty((3, 256), np.int64))

    def fit(self, count: int) -> None:
        """Make room for so many positions."""
        if len(self.positions[0]) < count:
            self.positions = tuple(np.empty((3, 2 * count), np.int64))

    def view(self, value: int, count: int, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return the rows of a value, by default in its own shape."""
        own, dtype = self._shapes[value]
        key = (value, count, own if shape is None else shape)
        if key not in self._views:
            if len(self._views) > 1024:
                self._views.clear()
            self._views[key] = self.tensor(value, key[2], dtype, count)
        return self._views[key]


def _bits(values: Tensor) -> NDArray[Any]:
    return (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()


def find_state_loop(
    step: TracedCell, inputs: Sequence[ValueSpec], num_hoisted: int, packer: Packer
) -> StateLoop | None:
    """Return the loop of the step of a chain's cell; None if nothing of it can be compiled here.

    inputs: hoisted values, then the state, which the last outputs feed. packer: for what torch does.
    """
    if not is_available() or len(inputs) == num_hoisted:
        return None
    try:
        large = {k for k in range(num_hoisted, len(inputs)) if row_bytes(inputs[k]) > _LARGE_BYTES}
        writer, outputs = write_graph(open_steps(step), inputs, packer, large)
        num_state = len(inputs) - num_hoisted
        ports = {node: port - num_hoisted for node, port in writer.ports.items() if port >= num_hoisted}
        made = []
        for index, node in enumerate(outputs):
            fed = index - (len(outputs) - num_state)
            unchanged = ports.get(node) == fed and len(inputs[fed + num_hoisted].shape) > 0
            made.append(~fed if unchanged else writer.value(node))
        first = len(outputs) - num_state
        fed_by = [-1 if ports.get(outputs[first + k]) == k else made[first + k] for k in range(num_state)]
    except (OtherError, CannotRewriteError):
        return None
    if not any(operation[0] not in (GATHER, CALL) for operation in writer.operations):
        return None
    return StateLoop(writer, made, fed_by, inputs)


# --- whether it is used -----------------------------------------------------------------------------------------------


@final
class StateChoice:
    """The loop of a cell, and the largest steps for which it is faster than `step`, a call of the step's program.

    loop: None if there is none. example: makes rows of hoisted values and state. faster: [n] whether the loop is, for
    so many rows; empty before it is measured.
    """

    def __init__(
        self,
        loop: StateLoop | None,
        step: Callable[..., tuple[Tensor, ...]],
        example: Callable[[int], tuple[Tensor, ...]],
    ) -> None:
        self.loop, self._step, self._example = loop, step, example
        self.faster: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._measuring = threading.Lock()

    def fastest(self, batch: int) -> StateLoop | None:
        """Return the loop if it is faster for tasks whose largest step has `batch` rows. Measured now if not before."""
        if self.loop is None:
            return None
        faster = self.faster  # no lock for each task: workers share the cell
        if batch >= len(faster):
            with self._measuring:
                if batch >= len(self.faster):
                    self._measure(self.loop, batch)
                faster = self.faster
        return self.loop if faster[batch] else None

    def _measure(self, loop: StateLoop, largest: int) -> None:
        ratios: dict[int, float] = {}
        end_s = time.thread_time() + _ALL_S
        for n in sorted({min(size, largest) for size in _SIZES} | {largest}):
            if ratios and time.thread_time() > end_s:
                break
            rows = self._example(n)
            stepped = _stepped(self._step, rows, len(rows) - loop.num_hoisted)
            begin_s = time.thread_time()
            stepped()
            if time.thread_time() - begin_s > _SLOW_S:  # the work around it is little beside
                ratios[n] = 1.0
                continue
            looped = loop.trial(rows, _STEPS)
            try:
                looped()  # compile or load it
                mine, others = least_s([looped, stepped])
            except RAISED_BY_USERS:  # such as a counter that points beyond a table of fixed room after some steps
                ratios[n] = 1.0
                continue
            ratios[n] = mine / (_STEPS * max(others, 1e-9))
        sizes = sorted(ratios)
        self.faster = np.interp(np.arange(largest + 1), sizes, [ratios[n] for n in sizes]) < 1


def _stepped(step: Callable[..., tuple[Tensor, ...]], rows: tuple[Tensor, ...], num_state: int) -> Callable[[], Any]:
    """Return a step from lanes into lanes, without the rest of what an executor does."""
    num_hoisted, n = len(rows) - num_state, len(rows[0])
    lanes = [values.clone() for values in rows[num_hoisted:]]

    def stepped() -> None:
        with torch.no_grad():
            made = step(*rows[:num_hoisted], *[values.narrow(0, 0, n) for values in lanes])
        first = len(made) - num_state
        for values in made[:first]:
            values.clone()
        for lane, values in zip(lanes, made[first:], strict=True):
            lane.copy_(values)

    return stepped
