"""A virtual device that carries out the scheduler's commands on integers, and programs for it to run.

Every value is a 64-bit number and every cell a hash of its inputs, so a wrong row, a value overwritten too early or a
node computed in the wrong order changes the outcome. What a step computes is compared with a direct evaluation of the
graph.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from batchmaker.core.commands import ZERO_TABLE, Admit, Fail, Read, Reply, Reserve, RowSource, RunTask, Step
from batchmaker.core.events import (
    CellTypeAdded,
    Event,
    GraphExtended,
    RequestArrived,
    RequestCancelled,
    SequenceClosed,
    StepsFinished,
    TimePassed,
)
from batchmaker.core.scheduler import Scheduler
from batchmaker.graph.cell_graph import HOST, ZERO, CellGraph
from batchmaker.graph.recorder import Recorder
from batchmaker.graph.spec import CellType, ValueSpec
from batchmaker.graph.values import HostValues, Output, Value, ValueSequence
from batchmaker.policies.ageing import AGED_EVERY, PATIENCE
from batchmaker.policies.cellular import CellularPolicy

NUMBER = ValueSpec((), "int64")
GARBAGE = np.uint64(0xDEADBEEFDEADBEEF)
Program = Callable[[Recorder], Generator[list[Value | ValueSequence], None, list[Value | ValueSequence]]]
ChunkProgram = Callable[
    [Recorder, list[list[Value]]], Generator[list[Value | ValueSequence], None, list[Value | ValueSequence]]
]
"""As a Program; it is also given the outputs of each node that its sequence has kept."""


def cell_type(
    type_id: int, name: str, inputs: int = 1, outputs: int = 1, sizes: tuple[int, ...] = (1, 4), priority: int = 0
) -> CellType:
    """A cell type whose values are all numbers."""
    return CellType(type_id, name, (NUMBER,) * inputs, (NUMBER,) * outputs, sizes, priority)  # type: ignore[arg-type]


def host(*numbers: int) -> HostValues:
    return HostValues(np.array(numbers, np.uint64), len(numbers), NUMBER)


# --- programs: unfold functions as generators --------------------------------------------------------------------


def chain(cell: CellType, length: int, *, open_ended: bool = False) -> Program:
    """A request that is one run of `length` steps over numbers of its own."""

    def program(recorder: Recorder) -> Any:
        if open_ended:
            ends = recorder.run(cell, [], None, max_steps=length, open_ended=True)
            recorder.fetch(ends[0].steps)
        else:
            ends = recorder.run(cell, [host(*range(1, length + 1))], None)
        return list(ends)
        yield

    return program


def complete_tree(leaf: CellType, inner: CellType, num_leaves: int) -> Program:
    """A request that is a complete binary tree."""
    return tree(leaf, inner, num_leaves, np.arange(2 * (num_leaves - 1)).reshape(-1, 2))


def tree(leaf: CellType, inner: CellType, num_leaves: int, children: np.ndarray) -> Program:
    """A request given by an array of children; the root's outputs come back."""

    def program(recorder: Recorder) -> Any:
        leaves = recorder.map(leaf, [host(*range(1, num_leaves + 1))])
        nodes = recorder.tree(inner, children, leaves, [])
        return [sequence[-1] for sequence in nodes]
        yield

    return program


# --- what a graph means ------------------------------------------------------------------------------------------


def compute(cell: CellType, columns: Sequence[np.ndarray], count: int) -> list[np.ndarray]:
    """All outputs of a batch: a hash of type, output and inputs."""
    number = np.full(count, 0x9E3779B97F4A7C15 ^ (cell.type_id + 1), np.uint64)
    for column in columns:
        number = (number ^ column) * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        number ^= number >> np.uint64(29)
    outputs = []
    for _ in cell.outputs:
        number = number * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(1)
        number ^= number >> np.uint64(31)
        outputs.append(number)
    return outputs


def stops(tokens: np.ndarray) -> np.ndarray:
    """The stop test of every open-ended run: one token in four ends it."""
    return tokens % np.uint64(4) == 0


class Reference:
    """Evaluates a request's graph node by node, in the order of its numbers."""

    def __init__(self, cells: Sequence[CellType]) -> None:
        self._cells = cells
        self.read: dict[tuple[int, int], np.uint64] = {}  # what a consumer of (node, output) finds
        self.computed: dict[tuple[int, int], np.uint64] = {}  # what the node itself gives
        self.last_step: dict[int, int] = {}  # last node of an open-ended run -> node at which it stops
        self.types: dict[int, int] = {}

    def extend(self, graph: CellGraph) -> None:
        given = {
            (values.port, node): np.uint64(value)
            for values in graph.host_inputs
            for node, value in zip(np.r_[values.rows(0)].tolist(), values.values, strict=True)
        }
        for part in sorted([*graph.blocks, *graph.runs], key=lambda part: part.first):
            if hasattr(part, "types"):
                for i, type_id in enumerate(part.types.tolist()):
                    node, cell = part.first + i, self._cells[type_id]
                    inputs = []
                    for port in range(len(cell.inputs)):
                        source = int(part.sources[port, i])
                        inputs.append(
                            given[port, node] if source == HOST else self.read[source, int(part.outputs[port, i])]
                        )
                    self._put(cell, node, inputs)
            else:
                self._run(part, given)

    def _run(self, run: Any, given: dict[tuple[int, int], np.uint64]) -> None:
        cell, num_sequences = self._cells[run.type_id], len(run.sequences)
        state = []
        for i, (source, output) in enumerate(run.init):
            if source == ZERO:
                state.append(np.uint64(0))
            elif source == HOST:
                state.append(given[num_sequences + i, run.first])
            else:
                state.append(self.read[source, output])
        for step in range(run.length):
            node = run.first + step
            inputs = [
                given[port, node] if column is None else self.read[int(column[0][step]), column[1]]
                for port, column in enumerate(run.sequences)
            ]
            outputs = self._put(cell, node, inputs + state)
            state = outputs[len(outputs) - len(state) :]
            if run.open_ended and stops(np.array([outputs[0]], np.uint64))[0]:
                break
        if run.open_ended:
            self.last_step[run.last] = node
            for k, value in enumerate(outputs):
                self.read[run.last, k] = value

    def _put(self, cell: CellType, node: int, inputs: list[np.uint64]) -> list[np.uint64]:
        outputs = [o[0] for o in compute(cell, [np.array([v], np.uint64) for v in inputs], 1)]
        self.types[node] = cell.type_id
        for k, value in enumerate(outputs):
            self.read[node, k] = self.computed[node, k] = value
        return outputs


# --- the device --------------------------------------------------------------------------------------------------


@dataclass
class Ran:
    """One step that ran."""

    start_s: float
    finish_s: float
    worker: int
    cell: str
    requests: tuple[int, ...]
    task: int
    step: Step


class _Request:
    def __init__(self, program: Program, cells: Sequence[CellType], kept: Sequence[list[np.uint64]] = ()) -> None:
        self.recorder = Recorder(holds_values=True, num_kept=len(kept))
        self.generator = program(self.recorder)
        self.reference = Reference(cells)
        for node, outputs in enumerate(kept):
            for k, value in enumerate(outputs):
                self.reference.read[node, k] = self.reference.computed[node, k] = value
        self.num_kept = len(kept)
        self.keeps: list[list[np.uint64]] = []
        self.graphs: deque[CellGraph] = deque()
        self.fetches: list[tuple[int, int]] = []
        self.delivered: dict[tuple[int, int], np.uint64] = {}
        self.waiting: set[tuple[int, int]] = set()
        self.open = True
        self.result: list[Value | ValueSequence] = []

    def advance(self) -> CellGraph:
        """Let the program go on to its next `yield` or its end; return what it has recorded."""
        try:
            wanted = next(self.generator)
        except StopIteration as end:
            self.open = False
            self.result = wanted = end.value
        for value in wanted:
            self.recorder.fetch(value)
        graph = self.recorder.take()
        fetched = [(int(node), fetch.output) for fetch in graph.fetches for node in fetch.nodes]
        self.fetches += fetched
        awaited = [
            (int(node), value.output)
            for value in wanted
            for node in (value.nodes if isinstance(value, ValueSequence) else [value.node])
        ]
        self.waiting = {key for key in awaited if key not in self.delivered} if self.open else set()
        self.reference.extend(graph)
        if graph.kept_nodes is not None:  # of a loop that a value ends, its last node
            read = self.reference.read
            self.keeps = [[read[node, k] for k in range(2) if (node, k) in read] for node in graph.kept_nodes.tolist()]
        self.graphs.append(graph)
        return graph

    def take_dropped(self) -> tuple[tuple[int, int], ...]:
        dropped = tuple(self.recorder.dropped)
        self.recorder.dropped.clear()
        return dropped


class Harness:
    """A scheduler with virtual workers. Time is in units; steps of one worker run one after another.

    policy: one, or what makes one: the replay begins with a fresh one then, which has learnt nothing. duration: units
    that a step takes. mode: when a step touches tables: all at its "start", all at its "finish", or
    "split": it reads at its start and writes at its finish. reports: steps of a task that are told of at once, all of
    which touch tables when the last of them finishes. tells_time: whether the scheduler hears how long steps took, from
    which a policy may learn: one that does cannot be used again for the replay. loops_ahead, task_s: see Scheduler.
    fails: positions of a step that fail.
    """

    def __init__(
        self,
        cells: Sequence[CellType],
        *,
        policy: Any = None,
        max_steps: int = 1,
        num_workers: int = 1,
        run_ahead: int = 0,
        duration: Callable[[], float] = lambda: 1.0,
        mode: Callable[[], str] = lambda: "split",
        reports: Callable[[], int] = lambda: 1,
        tells_time: bool = False,
        loops_ahead: bool = False,
        task_s: float = 0.0,
        fails: Callable[[int], tuple[int, ...]] = lambda batch: (),
        check_always: bool = True,
        patience: int = PATIENCE,
        aged_every: int | None = AGED_EVERY,
    ) -> None:
        self.cells = list(cells)
        self.make = lambda: Scheduler(
            (policy() if callable(policy) else policy) or CellularPolicy(max_steps=max_steps),
            num_workers=num_workers,
            run_ahead=run_ahead,
            loops_ahead=loops_ahead,
            task_s=task_s,
            patience=patience,
            aged_every=aged_every,
        )
        self.scheduler = self.make()
        self._duration, self._mode, self._reports, self._fails = duration, mode, reports, fails
        self._check_always, self._tells_time = check_always, tells_time
        self.now_s = 0.0
        self._actions: list[tuple[float, int, Callable[[], list[Event]]]] = []
        self._queues: list[deque[tuple[RunTask, int]]] = [deque() for _ in range(num_workers)]
        self._current: list[tuple[float, Callable[[], StepsFinished]] | None] = [None] * num_workers
        self._tables: dict[int, np.ndarray] = {}
        self._requests: dict[int, _Request] = {}
        self._owner: dict[int, tuple[int, int]] = {}
        self._computed: set[tuple[int, int]] = set()
        self._woken: list[int] = []
        self._over: set[tuple[int, int]] = set()  # task and subgraph of loops that have ended while the task runs
        self._on_answer: dict[int, Callable[[str], None]] = {}
        self.accepted: list[int] = []
        self.log: list[Ran] = []
        self.answers: dict[int, tuple[float, str]] = {}
        self.events: list[tuple[Event, ...]] = []
        self.commands: list[Any] = []
        self.handle([CellTypeAdded(cell, 0.0) for cell in self.cells])

    # --- what a test says ------------------------------------------------------------------------------------

    def arrive(
        self,
        request: int,
        program: Program,
        at_s: float = 0.0,
        deadline_s: float | None = None,
        priority: int = 0,
    ) -> None:
        def arrived() -> list[Event]:
            state = self._requests[request] = _Request(program, self.cells)
            self.accepted.append(request)
            graph = state.advance()
            arrival = RequestArrived(request, graph, self.now_s, deadline_s, state.open, priority)  # type: ignore[arg-type]
            events: list[Event] = [arrival]
            self._wake(request)
            return events

        self._at(at_s, arrived)

    def arrive_chunks(
        self, sequence: int, chunks: Sequence[tuple[int, ChunkProgram, float | None]], at_s: float, gap_s: float = 0.0
    ) -> None:
        """A sequence of requests (number, program, deadline), each `gap_s` after the answer to the one before; then it
        is closed."""
        kept: list[list[np.uint64]] = []

        def go_on(number: int) -> list[Event]:
            if number == len(chunks):
                return [SequenceClosed(sequence, self.now_s)]  # type: ignore[arg-type]
            request, program, deadline_s = chunks[number]
            handles = [
                [Value(node, Output(k, NUMBER, None)) for k in range(len(outputs))]  # type: ignore[arg-type]
                for node, outputs in enumerate(kept)
            ]

            def start(recorder: Recorder) -> Any:
                for value in (value for outputs in handles for value in outputs):
                    value.of.origin = recorder
                return program(recorder, handles)

            def answered(how: str) -> None:
                if how == "reply":
                    kept[:] = state.keeps
                self._at(self.now_s + gap_s, lambda: go_on(number + 1))

            state = self._requests[request] = _Request(start, self.cells, kept)
            self._on_answer[request] = answered
            self.accepted.append(request)
            graph = state.advance()
            self._wake(request)
            at_s = None if deadline_s is None else self.now_s + deadline_s
            return [RequestArrived(request, graph, self.now_s, at_s, state.open, 0, 0, sequence)]  # type: ignore[arg-type]

        self._at(at_s, lambda: go_on(0))

    def cancel(self, request: int, at_s: float) -> None:
        self._at(at_s, lambda: [RequestCancelled(request, self.now_s)])  # type: ignore[arg-type]

    def tick(self, at_s: float) -> None:
        self._at(at_s, lambda: [TimePassed(self.now_s)])

    def run(self, until_s: float = float("inf")) -> Harness:
        """Go on until nothing is left to do, or to a time."""
        while True:
            times = [action[0] for action in self._actions[:1]] + [c[0] for c in self._current if c is not None]
            if not times or min(times) > until_s:
                break
            self.now_s = min(times)
            events: list[Event] = []
            for worker, current in enumerate(self._current):
                if current is not None and current[0] == self.now_s:
                    self._current[worker] = None
                    events.append(current[1]())
            events += self._resume()
            while self._actions and self._actions[0][0] == self.now_s:
                events += heapq.heappop(self._actions)[2]()
            self.handle(events)
        return self

    def check_nothing_left(self) -> None:
        """Every accepted request was answered and the state are empty."""
        self.scheduler.check_invariants()
        assert sorted(self.answers) == sorted(self.accepted)
        assert (self.scheduler.num_requests, self.scheduler.num_rows, self.scheduler.num_tasks) == (0, 0, 0)
        assert not self.scheduler.state.store.in_use
        for type_id in range(len(self.cells)):
            assert self.scheduler.num_ready(type_id) == 0  # type: ignore[arg-type]
            assert self.scheduler.num_running(type_id) == 0  # type: ignore[arg-type]
        assert (self.scheduler.state.arena.occupant < 0).all()

    def check_replay(self) -> None:
        """The recorded events make a new scheduler give the same commands."""
        again = self.make()
        commands = [command for events in self.events for command in again.handle(*events)]
        assert len(commands) == len(self.commands)
        for one, other in zip(commands, self.commands, strict=True):
            assert same(one, other)

    # --- what a test asks ------------------------------------------------------------------------------------

    def timeline(self) -> list[tuple[float, str, tuple[int, ...]]]:
        """(start, cell, requests) of every step, in order."""
        return [(ran.start_s, ran.cell, tuple(sorted(ran.requests))) for ran in self.log]

    def left_s(self, request: int) -> float:
        return self.answers[request][0]

    def steps_per_task(self) -> list[int]:
        sizes: dict[int, int] = {}
        for ran in self.log:
            sizes[ran.task] = sizes.get(ran.task, 0) + 1
        return list(sizes.values())

    # --- inside ------------------------------------------------------------------------------------------------

    def _at(self, at_s: float, action: Callable[[], list[Event]]) -> None:
        self._order = getattr(self, "_order", 0) + 1
        heapq.heappush(self._actions, (at_s, self._order, action))

    def handle(self, events: list[Event]) -> None:
        while events:
            self.events.append(tuple(events))
            commands = self.scheduler.handle(*events)
            self.commands += commands
            if self._check_always:
                self.scheduler.check_invariants()
            for command in commands:
                self._carry_out(command)
            events = self._resume()
        for worker, queue in enumerate(self._queues):
            if self._current[worker] is None and queue:
                self._start(worker, *queue.popleft())

    def _carry_out(self, command: Any) -> None:
        match command:
            case Reserve():
                for spec in command.tables:
                    old = self._tables.get(spec.table, np.empty(0, np.uint64))
                    new = np.full(max(command.num_rows, len(old)), GARBAGE)
                    new[: len(old)] = old
                    self._tables[spec.table] = new
            case Admit():
                request = self._requests[command.request]
                graph = request.graphs.popleft()
                for i in range(command.num_nodes):
                    self._owner[command.base + i] = (command.request, command.first_local + i)
                for i in range(request.num_kept):
                    self._owner[command.kept_base + i] = (command.request, i)
                for values, table in zip(graph.host_inputs, command.host_tables, strict=True):
                    self._tables[table][values.rows(command.base - command.first_local)] = values.values
            case RunTask():
                assert len({step.batch for step in command.steps if step.batch == 0}) == 0
                self._queues[command.worker].extend((command, i) for i in range(command.num_steps))
            case Read():
                assert command.row >= 0
                self._deliver(
                    *self._owner[command.node], command.output, self._tables[command.table][command.row], read=True
                )
            case Reply():
                self._answer(command.request, "reply")
                self._check_answer(self._requests[command.request])
            case Fail():
                self._answer(command.request, command.kind.value)

    def _answer(self, request: int, how: str) -> None:
        assert request not in self.answers, f"request {request} is answered twice"
        assert request in self.accepted
        self.answers[request] = (self.now_s, how)
        if request in self._on_answer:
            self._on_answer.pop(request)(how)

    @staticmethod
    def _check_answer(request: _Request) -> None:
        reference = request.reference
        for node, output in request.fetches:
            if node in reference.last_step and (node, output) not in request.delivered:
                node = reference.last_step[node]
            if (node, output) in reference.computed and node not in reference.last_step:
                assert request.delivered.get((node, output)) == reference.computed[node, output], (node, output)

    def _deliver(self, request: int, local: int, output: int, value: np.uint64, *, read: bool = False) -> None:
        if request in self.answers:
            return
        state = self._requests[request]
        known = state.reference.read if read else state.reference.computed
        assert value == known[local, output], "a wrong value came to the host"
        state.delivered[local, output] = value
        state.waiting.discard((local, output))
        self._wake(request)

    def _wake(self, request: int) -> None:
        if self._requests[request].open and not self._requests[request].waiting and request not in self._woken:
            self._woken.append(request)

    def _resume(self) -> list[Event]:
        events: list[Event] = []
        while self._woken:
            request = self._woken.pop(0)
            state = self._requests[request]
            if request in self.answers or not state.open or state.waiting:
                continue
            graph = state.advance()
            events.append(GraphExtended(request, graph, self.now_s, state.open, state.take_dropped()))  # type: ignore[arg-type]
            self._wake(request)
        return events

    def _start(self, worker: int, task: RunTask, first: int) -> None:
        end = first + min(self._reports(), task.num_steps - first)
        for _ in range(first + 1, end):
            self._queues[worker].popleft()
        steps, mode = task.steps[first:end], self._mode() if end == first + 1 else "finish"
        owners = [[self._owner[node] for node in step.nodes.tolist()] for step in steps]
        begin_s = started_s = self.now_s
        for step, owned in zip(steps, owners, strict=True):
            finish_s = begin_s + self._duration()
            requests = tuple(request for request, _ in owned)
            self.log.append(Ran(begin_s, finish_s, worker, self.cells[task.type_id].name, requests, task.task, step))
            begin_s = finish_s
        outputs: list[np.ndarray] = []
        if mode != "finish":
            outputs = self._compute(task, steps[0])
        if mode == "start":
            self._write(steps[0], outputs, self._runs(task, steps[0]))

        def finish() -> StepsFinished:
            stopped, failed = [], []
            begin = 0 if first == 0 else int(task.ends[first - 1])
            for step, owned in zip(steps, owners, strict=True):
                computed = outputs if mode != "finish" else self._compute(task, step)
                runs = self._runs(task, step)
                if mode != "start":
                    self._write(step, computed, runs)
                self._check_step(owned, task, computed, runs)
                failing = [position for position in self._fails(step.batch) if runs[position]]
                for fetch in step.fetches:
                    for position in fetch.positions.tolist():
                        if position not in failing and runs[position]:
                            self._deliver(*owned[position], fetch.output, computed[fetch.output][position])
                stopped.append(runs & stops(computed[0]) if step.may_stop else np.zeros(step.batch, bool))
                arena = self.scheduler.state.arena
                subgraphs = arena.subgraph[step.nodes[stopped[-1]]]
                loops = subgraphs[arena.open_ended[subgraphs] > 0]
                self._over.update((task.task, subgraph) for subgraph in loops.tolist())
                failed += [(begin + position, "it broke") for position in failing]
                begin += step.batch
            busy_s = finish_s - started_s if self._tells_time else 0.0
            stop = np.concatenate(stopped) if any(step.may_stop for step in steps) else None
            return StepsFinished(task.task, first, end, self.now_s, stop, tuple(failed), busy_s)

        self._current[worker] = (finish_s, finish)

    def _runs(self, task: RunTask, step: Step) -> np.ndarray:
        """Which rows of a step run: not those of loops that have ended earlier in the task."""
        subgraphs = self.scheduler.state.arena.subgraph[step.nodes].tolist()
        return np.array([(task.task, subgraph) not in self._over for subgraph in subgraphs])

    def _check_step(
        self, owners: list[tuple[int, int]], task: RunTask, outputs: list[np.ndarray], runs: np.ndarray
    ) -> None:
        for position, (request, local) in enumerate(owners):
            if not runs[position]:
                continue
            assert (request, local) not in self._computed, f"node {local} of request {request} ran twice"
            self._computed.add((request, local))
            reference = self._requests[request].reference
            assert reference.types[local] == task.type_id
            for k, values in enumerate(outputs):
                assert values[position] == reference.computed[local, k], f"request {request}, node {local}: wrong value"

    def _compute(self, task: RunTask, step: Step) -> list[np.ndarray]:
        cell = self.cells[task.type_id]
        columns = [self._gather(sources, step.batch) for sources in step.inputs]
        if step.lanes is not None:
            lanes = step.lanes
            assert lanes.count == step.batch
            rows = np.arange(step.batch) if lanes.rows is None else lanes.rows
            assert len(np.unique(rows)) == step.batch
            for table, sources in zip(lanes.tables, lanes.arriving, strict=True):
                brought = [(source, self._values(source)) for source in sources]
                for source, values in brought:
                    places = rows if source.positions is None else rows[source.positions]
                    self._tables[table][places] = values
            columns += [self._tables[table][rows] for table in lanes.tables]
        assert len(columns) == len(cell.inputs)
        return compute(cell, columns, step.batch)

    def _write(self, step: Step, outputs: list[np.ndarray], runs: np.ndarray) -> None:
        if step.lanes is not None:
            rows = np.arange(step.batch) if step.lanes.rows is None else step.lanes.rows
            following = outputs[len(outputs) - len(step.lanes.tables) :]
            for table, values in zip(step.lanes.tables, following, strict=True):
                self._tables[table][rows] = np.where(runs, values, GARBAGE)
        if step.keep is not None:
            assert len(np.unique(step.keep.rows)) == len(step.keep.rows)
            for table, values in zip(step.keep.tables, outputs, strict=True):
                positions = np.arange(step.batch) if step.keep.positions is None else step.keep.positions
                mine = runs[positions]
                self._tables[table][step.keep.rows[mine]] = values[positions[mine]]

    def _gather(self, sources: tuple[RowSource, ...], count: int) -> np.ndarray:
        column = np.full(count, GARBAGE)
        for source in sources:
            column[slice(None) if source.positions is None else source.positions] = self._values(source)
        return column

    def _values(self, source: RowSource) -> np.ndarray:
        if source.table == ZERO_TABLE:
            return np.zeros(len(source.rows), np.uint64)
        assert (source.rows >= 0).all(), "a source has no row"
        return self._tables[source.table][source.rows]


def same(one: Any, other: Any) -> bool:
    """Deep equality of commands, arrays included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
