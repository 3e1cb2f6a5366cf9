"""Tasks of requests that decide by values, one after another in one compiled call, with nothing of Python in between.

What such a request computes next is known when a step has run. So its tasks are short, and what Python does for each
would take longer than they do. `run_tasks` computes a task, lets the scheduler take its values (`turn_by_values`), and
goes on with the task that this has formed, until there is something to tell or to ask.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Flags, Ints
from batchmaker.compile.node_loop import NodeLoop, NodeTables
from batchmaker.compile.node_steps import run_nodes
from batchmaker.compiled import compiled_unlocked, compiled_within, external, number
from batchmaker.core.addresses import State, addresses_of, float_table_at, row_at, state_at, table_at
from batchmaker.core.batching import TASK_S
from batchmaker.core.commands import RunTask
from batchmaker.core.events import StepsFinished, WentOn
from batchmaker.core.layout import OPEN, REQUEST
from batchmaker.core.region_code import ALL_DONE, NUM_MESSAGE_WORDS, Machine, machine_at
from batchmaker.core.retire import NUM_DYING, NUM_FINISHED, NUM_STOPPED
from batchmaker.core.scheduler import NEVER, Scheduler
from batchmaker.core.steps import (
    ALL_FLAGS,
    ALL_MARKS,
    AT_NODE,
    FIRST_PART,
    HAS_LANES,
    LARGEST,
    MAY_STOP,
    NUM_FACTS,
    NUM_STEPS,
    OF_TYPE,
    PART_AT,
    PART_ENDS,
    PART_KEPT,
    PART_MARKS,
    POSITIONS,
    part_of,
)
from batchmaker.core.turn import DECIDED, TaskFor, turn_by_values
from batchmaker.engine.results import Results
from batchmaker.engine.stats import StepCounts
from batchmaker.executor.inline import InlineExecutor
from batchmaker.executor.task_steps import REPORT_S
from batchmaker.graph.spec import TypeId, ValueSpec
from batchmaker.kernels.cpu.machine import byte_at, int64_at
from batchmaker.kernels.cpu.steps import AT, COUNT, NEXT_AT, PART, ROWS, TARGET

_CELL_TABLES: Final = 20
(
    OPERATIONS, PASSES, PROGRAMS, SLOTS, BASE_VALUES, RECORDS, FUNCTIONS, VALUES, BASES, FLOATS, INTEGERS, MADE,
    PARTS, ROW_BYTES, COPIES, PLACES, FROM_AT, KEEP_TABLES, FASTER, FETCHED,
) = map(number, range(_CELL_TABLES))  # fmt: skip
"""The tables of a cell: those of NodeTables; the state tables of its outputs; whether its loop is faster, by rows, the
last also for more; and [outputs, FETCHED_FIELDS] where values go that travel to the host. Without FASTER a cell has no
loop."""

RESULTS_AT, DECIDES_AS, FETCHED_FIELDS = range(3)
"""The address of the row of node 0; and the form in which decisions look at a value."""

NOT_FETCHED, NO_DECISION, AS_BYTE, AS_INT64 = map(number, range(4))
"""Nothing here can store the value; it is not looked at; a bool; an integer."""

_FORMS: Final = {"bool": AS_BYTE, "int64": AS_INT64, **dict.fromkeys(("float32", "float64", "bfloat16"), NO_DECISION)}

_FIRST: Final = number(0)
_MOST_TASKS: Final = 4096

RAN_TYPE, RAN_ROWS, RAN_NS, RAN_FIELDS = map(number, range(4))
_NS: Final = 1_000_000_000

_clock_gettime = external("clock_gettime", "intc(intc, intp)")
_CLOCK: Final = time.CLOCK_MONOTONIC


class CallLimits(NamedTuple):
    """How long tasks may follow each other.

    - num_nodes: values have room for nodes below this number.
    - waits: [slots] whether nothing of the request has run; when it begins is noted elsewhere.
    - most_ns: nanoseconds after which a call ends; told_ns: if it has something to tell.
    """

    num_nodes: int
    waits: Flags
    most_ns: int
    told_ns: int


@compiled_within
def _now_ns(clock: Ints) -> int:
    """Return the time of a clock that never goes back. clock: room for [2]."""
    _clock_gettime(_CLOCK, clock.ctypes.data)
    return int(clock[0] * _NS + clock[1])


@compiled_within
def _may_run(state: State, task: Ints, cells: Ints, limits: CallLimits) -> bool:
    """Whether a task can be computed here: a step of single nodes, whose cell has a loop that is faster."""
    stops = task[ALL_FLAGS] >> HAS_LANES & 1 or task[ALL_FLAGS] >> MAY_STOP & 1
    if task[NUM_STEPS] != 1 or stops or task[OF_TYPE] >= len(cells):
        return False
    cell = cells[task[OF_TYPE]]
    faster, places, fetched = row_at(cell, FASTER), row_at(cell, PLACES), table_at(cell, FETCHED)
    rows = task[LARGEST]
    if len(faster) == 0 or rows > len(places) or not faster[min(rows, len(faster) - 1)]:
        return False
    for output in range(len(fetched)):
        if task[ALL_MARKS] >> output & 1 and fetched[output, DECIDES_AS] == NOT_FETCHED:
            return False
    for node in part_of(task, PART_AT, AT_NODE):
        if node >= limits.num_nodes or limits.waits[state.nodes[REQUEST, node]]:
            return False
    return True


@compiled_within
def _all_go_on(state: State, task: Ints) -> bool:
    """Whether every request of a task has decisions to make. At its last one a request leaves a message."""
    all_go_on = True
    for node in part_of(task, PART_AT, AT_NODE):
        all_go_on &= state.requests[OPEN, state.nodes[REQUEST, node]] > 0
    return all_go_on


@compiled_within
def _run(task: Ints, cell: Ints, tables: Ints, m: Machine) -> bool:
    """Compute a task of one step, and note the values that it brings. False, with nothing changed, if a token has no
    row."""
    row_bytes, keep_tables, copies, fetched = (
        row_at(cell, ROW_BYTES),
        row_at(cell, KEEP_TABLES),
        table_at(cell, COPIES),
        table_at(cell, FETCHED),
    )
    nodes, marks, ports = part_of(task, PART_AT, AT_NODE), part_of(task, PART_MARKS, _FIRST), len(row_bytes)
    n, num_kept = len(nodes), len(keep_tables)
    at = task[FIRST_PART + 3 * PART_AT] + NUM_FACTS * n
    sources = task[at : at + ports * n].reshape(ports, n)
    rows = task[at + ports * n : at + 2 * ports * n].reshape(ports, n)
    going = np.empty((2, len(fetched), n), np.int64)  # to the host: positions, nodes. Read after the call: freed later
    num_fetched, counts = 0, np.zeros(len(fetched), np.int64)
    for output in range(len(fetched)):
        if not task[ALL_MARKS] >> output & 1:
            continue
        count = 0
        for p in range(n):
            if marks[p] >> output & 1:
                going[0, output, count], going[1, output, count] = p, nodes[p]
                count += 1
        k = num_kept + num_fetched
        copies[k, NEXT_AT], copies[k, COUNT], copies[k, PART] = 0, count, output
        copies[k, AT] = going.ctypes.data + 8 * n * output
        copies[k, ROWS] = going.ctypes.data + 8 * n * (len(fetched) + output)
        copies[k, TARGET] = fetched[output, RESULTS_AT]
        counts[output] = count
        num_fetched += 1
    from_at = table_at(cell, FROM_AT)
    done = run_nodes(
        part_of(task, PART_ENDS, POSITIONS),
        (sources, rows, row_bytes),
        tables,
        (
            table_at(cell, OPERATIONS),
            table_at(cell, PASSES),
            table_at(cell, PROGRAMS),
            table_at(cell, SLOTS),
            row_at(cell, BASE_VALUES),
            table_at(cell, RECORDS),
            row_at(cell, FUNCTIONS),
        ),
        (table_at(cell, VALUES), row_at(cell, BASES), float_table_at(cell, FLOATS), table_at(cell, INTEGERS)),
        row_at(cell, MADE),
        (part_of(task, PART_KEPT, _FIRST), part_of(task, PART_KEPT, _FIRST + 1), keep_tables, row_at(cell, PARTS)),
        copies[: num_kept + num_fetched],
        row_at(cell, PLACES),
        from_at,
        from_at.shape[1],
    )
    if done == 0:
        return False
    for output in range(len(fetched)):
        for k in range(counts[output]):
            node = going[1, output, k]
            if fetched[output, DECIDES_AS] == AS_INT64:
                m.values[output, node] = int64_at(fetched[output, RESULTS_AT], node)
            elif fetched[output, DECIDES_AS] == AS_BYTE:
                m.values[output, node] = byte_at(fetched[output, RESULTS_AT], node)
    return True


@compiled_unlocked
def run_tasks(
    addresses: Ints,
    patterns: Ints,
    machine: Ints,
    task: Ints,
    cells: Ints,
    tables: Ints,
    limits: CallLimits,
    ran: Ints,
    stopped: Flags,
    task_for: TaskFor,
) -> tuple[Ints, Ints, int]:
    """Compute a task and those that are formed after it, while there is nothing to tell or to ask.

    - addresses, patterns, machine, stopped, task_for: see `turn_by_values`, which is called after each task.
    - task: see `packed`. cells: [types, _CELL_TABLES, 4] the addresses of their tables. tables: of the state tables.
    - ran: room for [RAN_FIELDS, tasks]: the type of each, its rows, and the nanoseconds that it took.

    Returns what the last turn says, the task that it has formed, which has not run, and how many have run. If none has,
    nothing is said, and the task is the given one.
    """
    state, m, clock = state_at(addresses), machine_at(machine), np.zeros(2, np.int64)
    said, count, first, end = task[:0], 0, _FIRST, task[NUM_STEPS]
    worker, until, ranking, at, by_age, may_ask = task_for
    began_ns = _now_ns(clock)
    while count < ran.shape[1] and _may_run(state, task, cells, limits):
        first_ns = _now_ns(clock)
        if not _run(task, cells[task[OF_TYPE]], tables, m):
            break
        now_ns = _now_ns(clock)
        ran[RAN_TYPE, count], ran[RAN_ROWS, count], ran[RAN_NS, count] = (
            task[OF_TYPE],
            task[LARGEST],
            now_ns - first_ns,
        )
        count += 1
        busy_s, all_go_on = (now_ns - first_ns) / _NS, _all_go_on(state, task)
        said, task = turn_by_values(
            addresses, patterns, machine, task, first, end, stopped, busy_s, worker, until, ranking, at, by_age, may_ask
        )
        some_end = said[NUM_DYING] + said[NUM_STOPPED] > 0 or (said[NUM_FINISHED] > 0 and not all_go_on)
        if some_end or said[DECIDED] != ALL_DONE or task[NUM_STEPS] == 0:
            break
        spent_ns = now_ns - began_ns
        if spent_ns >= (limits.told_ns if m.counts[NUM_MESSAGE_WORDS] > 0 else limits.most_ns):
            break
    return said, task, count


@final
class DecidedTasks:
    """Runs tasks of a driver in one call, where this is possible; see the module.

    The tables of a cell are laid out when a first task of it comes, and again if what they lead to has moved.
    """

    def __init__(self, scheduler: Scheduler, executor: InlineExecutor, results: Results, counts: StepCounts) -> None:
        self._scheduler, self._executor, self._results, self._counts = scheduler, executor, results, counts
        self._cells: Ints = np.zeros((0, _CELL_TABLES, 4), np.int64)
        self._laid_out: dict[TypeId, _OfCell] = {}
        self._num_nodes = 0
        self._ran: Ints = np.zeros((RAN_FIELDS, _MOST_TASKS), np.int64)

    def run(self, now_s: float) -> StepsFinished | None:
        """Compute the task that waits, and those that follow. None, with nothing done, if it must be computed step by
        step: another waits as well, somebody observes or awaits values, or what follows is not decided by values alone.
        """
        scheduler, results, task = self._scheduler, self._results, self._executor.only_task
        if task is None or self._counts.observer is not None or results.num_awaiting or not scheduler.only_decides:
            return None
        if task.num_steps != 1 or task.lanes is not None or task.memories is not None or not self._lay_out(task):
            return None
        began_s, state = time.perf_counter(), scheduler.state
        results.begin(scheduler.slots(task.nodes), now_s)
        patterns, machine = scheduler.frames.tables()
        limits = CallLimits(self._num_nodes, results.waits, int(REPORT_S * _NS), int(TASK_S * _NS))
        said, formed, count = run_tasks(
            state.arena.tables, patterns, machine, state.tasks[task.task].steps, self._cells, self._executor.addresses,
            limits, self._ran, NEVER, TaskFor(0, 1),
        )  # fmt: skip
        if count == 0:
            return None
        ran = [(TypeId(of), rows, took / _NS) for of, rows, took in self._ran[:, :count].T.tolist()]
        self._executor.ran([type_id for type_id, _, _ in ran])
        self._counts.add_all(ran, scheduler.cells, time.perf_counter() - began_s)
        return StepsFinished(task.task, 0, 1, now_s, went_on=WentOn(said, formed, ran))

    def _lay_out(self, task: RunTask) -> bool:
        """Have the tables of a task's cell. Returns whether it can be computed with them."""
        cell = self._executor.cells[task.type_id]
        loop = cell.node_loop_for(task.largest)
        if loop is None:
            return False
        laid_out, fetched = self._laid_out.get(task.type_id), {fetch.output for fetch in task.fetches}
        if laid_out is None or task.largest > laid_out.most_rows or not fetched <= laid_out.fetched:
            laid_out = self._laid_out[task.type_id] = self._made(task, loop, laid_out, fetched)
            self._enter(task.type_id, laid_out)
        if self._num_nodes != self._results.tables.num_nodes:  # they have moved
            self._num_nodes = self._results.tables.num_nodes
            for type_id, other in self._laid_out.items():
                self._enter(type_id, other)
        return not laid_out.apart & fetched

    def _made(self, task: RunTask, loop: NodeLoop, before: _OfCell | None, fetched: set[int]) -> _OfCell:
        """Make the tables of a cell, for tasks of as many rows as this one, and for what it and those before fetch."""
        entry, cell = self._scheduler.state.types[task.type_id], self._executor.cells[task.type_id]
        sizes = entry.cell.batch_sizes
        most_rows = sizes[bisect_left(sizes, task.largest)]
        if before is not None:
            most_rows, fetched = max(most_rows, before.most_rows), fetched | before.fetched
        arrays, faster = loop.arrays(most_rows), cell.faster_in_loop
        assert faster is not None
        keep_tables = np.array(entry.pool.table_ids, np.int64)
        of_results: Ints = np.zeros((len(cell.outputs), FETCHED_FIELDS), np.int64)
        tables = [
            *arrays.code, *arrays.scratch, arrays.made, arrays.parts, arrays.row_bytes, arrays.copies, arrays.places,
            arrays.from_at, keep_tables, faster.astype(np.int64), of_results,
        ]  # fmt: skip
        return _OfCell(tables, arrays, cell.outputs, most_rows, fetched)

    def _enter(self, type_id: TypeId, laid_out: _OfCell) -> None:
        """Let the compiled loop know the tables of a cell, and where its values go now."""
        laid_out.apart.clear()
        of_results = laid_out.tables[FETCHED]
        for output in laid_out.fetched:
            spec = laid_out.outputs[output]
            table = self._results.tables.find(output, spec)
            address = None if table is None else table.address
            form = _FORMS.get(spec.dtype, NOT_FETCHED) if spec.shape == () else NO_DECISION
            if address is None or form == NOT_FETCHED:
                laid_out.apart.add(output)
            else:
                of_results[output] = address, form
        if type_id >= len(self._cells):
            more = np.zeros((type_id + 1 - len(self._cells), _CELL_TABLES, 4), np.int64)
            self._cells = np.concatenate((self._cells, more))
        self._cells[type_id] = addresses_of(laid_out.tables)


@final
@dataclass(slots=True)
class _OfCell:
    """The tables of a cell. memory: what their addresses are of. fetched: outputs that may travel to the host; apart:
    those of them whose values have no row in a table, or none that decisions can look at."""

    tables: list[NDArray[Any]]
    memory: NodeTables
    outputs: Sequence[ValueSpec]
    most_rows: int
    fetched: set[int]
    apart: set[int] = field(default_factory=set)
