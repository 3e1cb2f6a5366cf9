"""The CUDA executor: one worker per device, several tasks in flight. Counters in host memory show finished steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from batchmaker.errors import RAISED_BY_USERS, OptionError
from batchmaker.executor.base import StepsResult, failed_result
from batchmaker.executor.cuda.at_once import PlannedTask
from batchmaker.executor.cuda.cells import Bind, DeviceCells, HoistedRows, TaskForm
from batchmaker.executor.cuda.device import Device, DeviceLostError
from batchmaker.executor.cuda.fetches import Fetched, fetched, in_task, of_task
from batchmaker.executor.cuda.place import Place
from batchmaker.executor.cuda.program import FETCH, KEEP, LANE, Block, DeviceProgram, Failures
from batchmaker.executor.cuda.tables import DeviceTables
from batchmaker.executor.cuda.watcher import Watcher
from batchmaker.executor.task_steps import MAX_HOISTED_ROWS
from batchmaker.graph.spec import CellType, TypeId
from batchmaker.scheduler.commands import ZERO_TABLE, Lanes, Reserve, RowSource, RunTask, Step, TableId

Addresses = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Submitted:
    """One step on a device: its number there, and where its results will be.

    fetched: for each fetch of the task, the place of its values; None if none are of this step. failed: its positions.
    begun: where the device notes the begin of the task, if not in the block. part: the step's index in its launch, and
    the launch's number of steps. They finish together, and are reported with equal shares of the time.
    """

    number: int
    task: RunTask
    step: int
    block: Block
    fetched: tuple[Fetched | None, ...]
    failed: Failures
    begun: NDArray[np.int64] | None = None
    part: tuple[int, int] = (0, 1)


@dataclass(frozen=True, slots=True)
class _NotSubmitted:
    """Steps `step` to before `end`, which failed before they reached the device. Reported after step `number` there."""

    number: int
    task: RunTask
    step: int
    end: int
    result: StepsResult


@final
class CudaExecutor:
    """Runs tasks on devices, with one worker for each. Only `read` and `stop` wait for a device.

    types: by type id; may grow while running. bind: returns a type's cell with its weights on a device. devices: at
    least one, otherwise OptionError. If a device is lost, all steps in flight there fail with a clear error. Its worker
    goes on with the device that has the fewest workers. Requests fail if they need rows that only the lost device held.
    """

    def __init__(self, types: Sequence[CellType], bind: Bind, devices: Sequence[Device]) -> None:
        if not devices:
            raise OptionError("devices is empty; the CUDA executor needs at least one")
        self._types = types
        self._places = [Place(number, device) for number, device in enumerate(devices)]
        self._tables = DeviceTables(self._places)
        self._cells = [DeviceCells(place, types, bind) for place in self._places]
        self._of_worker: list[Place | None] = list(self._places)
        self._submitted: list[deque[_Submitted | _NotSubmitted]] = [deque() for _ in devices]
        self._last_end_ns = [0] * len(devices)
        self._failed: list[StepsResult] = []
        self.num_whole_tasks = 0  # tasks that ran in one launch
        self._lost: dict[int, str] = {}
        self._notify: Callable[[], None] = lambda: None
        self._watcher: Watcher | None = None
        self._turn = threading.RLock()  # `materialise` records in another thread: nothing may be submitted meanwhile

    @property
    def num_workers(self) -> int:
        """One for each device, lost ones included."""
        return len(self._of_worker)

    @property
    def table_bytes(self) -> int:
        """Bytes of state tables on all devices and in pinned memory."""
        return self._tables.num_bytes

    @property
    def notes(self) -> list[str]:
        """Texts for the user: which devices were lost, and which cells run without a recording, and why."""
        return [*self._lost.values(), *sorted({note for cells in self._cells for note in cells.notes})]

    def start(self, notify: Callable[[], None]) -> None:
        """Start the thread that watches the counters of all devices."""
        self._notify = notify
        self._watcher = Watcher(self._places, notify)

    def await_materialise(self) -> None: ...  # nothing is held back on GPUs
    def materialise(self, forms: Mapping[TypeId, int]) -> None:
        """Bind and record every known cell on every device. A device that fails here counts as lost."""
        with self._turn:
            for place in self._living():
                try:
                    for cell_type in self._types:
                        self._cells[place.number].prepare(cell_type.type_id, forms.get(cell_type.type_id))
                except DeviceLostError as error:
                    self._lose(error)

    def reserve(self, command: Reserve) -> None:
        """See Executor.reserve. Waits for nothing: memory is taken at the next use."""
        self._tables.reserve(command)

    def write(self, table: TableId, rows: slice | NDArray[np.int64], values: Any) -> None:
        """See Executor.write. Writes to pinned host memory, where every device reads the rows."""
        with self._turn:
            self._tables.write(table, rows, values)

    def read(self, table: TableId, row: int) -> Any:
        """See Executor.read. Waits for the device that has the row. DeviceError if only a lost device had it."""
        with self._turn:
            try:
                value = self._tables.read(table, row)
            except DeviceLostError as error:
                self._lose(error)
                raise
        return value.item() if value.ndim == 0 else value

    def submit(self, task: RunTask) -> None:
        """See Executor.submit. Launches all steps now; `poll` reports what goes wrong."""
        with self._turn:
            self._submit(task)
        if self._watcher is not None:
            self._watcher.wake()

    def poll(self) -> list[StepsResult]:
        """Return finished steps. If none of a device's steps has finished, ask the device whether it has failed."""
        with self._turn:
            return self._poll()

    def stop(self) -> None:
        """Wait for all devices, then end the thread that watches them."""
        for place in self._living():
            try:
                place.device.stop()
            except DeviceLostError as error:
                self._lose(error)
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher = None

    def _submit(self, task: RunTask) -> None:
        """Submit a task. If this fails, the result of its steps says so."""
        place = self._of_worker[task.worker]
        if place is None:
            reasons = "; ".join(self._lost.values())
            self._failed.append(failed_result(task, 0, DeviceLostError(f"no device is left ({reasons})")))
            self._notify()
            return
        waiting = self._submitted[place.number]
        before = len(waiting)
        try:
            self._run(place, task)
        except RAISED_BY_USERS as error:  # such as too little memory: only this task fails
            number, done = place.num_submitted, len(waiting) - before
            waiting.append(_NotSubmitted(number, task, done, task.num_steps, failed_result(task, done, error)))
            if isinstance(error, DeviceLostError):
                self._lose(error)
            self._notify()

    def _poll(self) -> list[StepsResult]:
        results: list[StepsResult] = []
        for place in self._living():
            waiting = self._submitted[place.number]
            finished = place.num_finished
            heard = bool(waiting) and waiting[0].number <= finished
            while waiting and waiting[0].number <= finished:
                results.append(self._result(place, waiting.popleft()))
            place.release(finished)  # not steps that finished meanwhile: their results are not read yet
            if waiting and not heard:
                try:
                    place.device.check()
                except DeviceLostError as error:
                    self._lose(error)
        results += self._failed
        self._failed.clear()
        return results

    # --- failure -------------------------------------------------------------------------------------------------

    def _living(self) -> list[Place]:
        return [place for place in self._places if place.number not in self._lost]

    def _lose(self, error: DeviceLostError) -> None:
        """Fail the steps in flight on the lost device, and give its workers other devices."""
        place = next((place for place in self._living() if place.device is error.device), None)
        if place is None:
            return
        self._lost[place.number] = f"device {place.number} ({place.device.name}) was lost: {error}"
        waiting = self._submitted[place.number]
        for step in waiting:
            end = step.end if isinstance(step, _NotSubmitted) else step.step + 1
            self._failed.append(failed_result(step.task, step.step, error, end))
        waiting.clear()
        self._notify()
        self._tables.lose(place)
        living = self._living()
        workers = [living.index(p) for p in self._of_worker if p is not None and p in living]
        for worker, mine in enumerate(self._of_worker):
            if mine is place and living:
                least = min(range(len(living)), key=workers.count)
                workers.append(least)
                self._of_worker[worker] = living[least]
            elif mine is place:
                self._of_worker[worker] = None

    # --- a task ----------------------------------------------------------------------------------------------------

    def _run(self, place: Place, task: RunTask) -> None:
        """Submit a task's steps in order."""
        cells = self._cells[place.number]
        steps = task.steps
        chains = [step for step in steps if step.lanes is not None]
        hoisted: HoistedRows | None = None
        bad: dict[int, str] = {}
        begun: NDArray[np.int64] | None = None
        if chains:
            lanes = chains[0].lanes
            assert lanes is not None
            num_sequence_inputs = len(self._types[task.type_id].inputs) - len(lanes.tables)
            whole = cells.tasks(task.type_id, num_sequence_inputs) if len(chains) == len(steps) else None
            planned = None if whole is None or self._lost else whole.program.plan(steps)
            if whole is not None and planned is not None:
                self._run_at_once(place, task, steps, whole, planned)
                return
            form = cells.chains(task.type_id, num_sequence_inputs)
            hoisted = form.hoisted
            if hoisted is not None:
                bad, begun = self._hoist(place, hoisted, chains, np.arange(sum(step.batch for step in chains)))
        offset = 0
        for number, step in enumerate(steps):
            program = cells.nodes(task.type_id) if step.lanes is None else form.step
            cell = self._types[task.type_id]
            places, num_bytes = fetched(step.fetches, cell.outputs)
            block = program.new_block(step.batch, num_bytes)
            failed: dict[int, str] = {}
            if step.lanes is None or hoisted is None:
                self._fill_inputs(place, block, step, failed)
            else:
                for part in range(len(hoisted.specs)):
                    block.source(part)[: step.batch] = hoisted.addresses(part, np.arange(offset, offset + step.batch))
                failed.update({i: bad[offset + i] for i in range(step.batch) if offset + i in bad})
                offset += step.batch
            if step.lanes is not None:
                self._fill_lanes(place, block, program, step.lanes, len(cell.outputs), failed)
            if step.keep is not None:
                positions = slice(step.batch) if step.keep.positions is None else step.keep.positions
                for output, table in enumerate(step.keep.tables):
                    block.target(output, KEEP)[: step.batch][positions] = self._tables.targets(
                        place, table, step.keep.rows
                    )
            for fetch, where in zip(step.fetches, places, strict=True):
                block.target(fetch.output, FETCH)[fetch.positions] = where.addresses(block)
            block.announce(place.num_submitted + 1, place.counter_address)
            failed.update(program.submit(block, step.batch))
            place.num_submitted += 1
            told = of_task(task, step, places), in_task(task, number, sorted(failed.items()))
            submitted = _Submitted(place.num_submitted, task, number, block, *told, begun)
            self._submitted[place.number].append(submitted)
            begun = None

    def _run_at_once(
        self, place: Place, task: RunTask, steps: Sequence[Step], form: TaskForm, planned: PlannedTask
    ) -> None:
        """Submit all steps of a task of chains as one launch."""
        program = form.program
        rows = np.concatenate([planned.places(number) for number in range(len(steps))])
        bad, begun = self._hoist(place, form.projected, steps, rows)
        places, num_bytes = [], 0
        for step in steps:
            found, num_bytes = fetched(step.fetches, self._types[task.type_id].outputs, num_bytes)
            places.append(found)
        block = program.new_block(planned, num_bytes)
        program.fill(
            block, planned, steps, lambda sources, count: self._sources(place, sources, count, {}),
            lambda table, kept: self._tables.targets(place, table, kept),
        )  # fmt: skip
        for number, step in enumerate(steps):
            for fetch, where in zip(step.fetches, places[number], strict=True):
                program.fetch(block, planned, number, fetch, where.addresses(block))
        block.announce(place.num_submitted + 1, place.counter_address)
        program.submit(block, planned)
        place.num_submitted += 1
        self.num_whole_tasks += 1
        first = 0
        for number, step in enumerate(steps):
            failed = tuple((i, bad[first + i]) for i in range(step.batch) if first + i in bad) if bad else ()
            first += step.batch
            part = (number, len(steps))
            told = of_task(task, step, places[number]), in_task(task, number, failed)
            submitted = _Submitted(place.num_submitted, task, number, block, *told, begun, part)
            self._submitted[place.number].append(submitted)

    def _hoist(
        self, place: Place, hoisted: HoistedRows, chains: Sequence[Step], rows: Addresses
    ) -> tuple[dict[int, str], NDArray[np.int64] | None]:
        """Compute the part that does not depend on state, for all steps. rows: for each position, where it is written.

        Returns the positions that failed, and where the device notes the begin: valid until the next step is released.
        """
        begun = None
        total = sum(step.batch for step in chains)
        failed: dict[int, str] = {}
        columns = []
        for port in range(hoisted.program.num_inputs):
            parts, first = [], 0
            for step in chains:
                parts.append(self._sources(place, step.inputs[port], step.batch, failed, first))
                first += step.batch
            columns.append(np.concatenate(parts))
        hoisted.reserve(place, int(rows.max()) + 1)
        for at in range(0, total, MAX_HOISTED_ROWS):
            count = min(MAX_HOISTED_ROWS, total - at)
            block = hoisted.program.new_block(count)
            if begun is None:
                block.note_begin()
                begun = block.stamps
            for port, column in enumerate(columns):
                block.source(port)[:count] = column[at : at + count]
            for part in range(len(hoisted.specs)):
                block.target(part)[:count] = hoisted.addresses(part, rows[at : at + count])
            failed.update({at + i: why for i, why in hoisted.program.submit(block, count)})
            place.hold(block.memory)
        return failed, begun

    def _fill_inputs(self, place: Place, block: Block, step: Step, failed: dict[int, str]) -> None:
        for port, sources in enumerate(step.inputs):
            block.source(port)[: step.batch] = self._sources(place, sources, step.batch, failed)

    def _fill_lanes(
        self, place: Place, block: Block, program: DeviceProgram, lanes: Lanes, num_outputs: int, failed: dict[int, str]
    ) -> None:
        """Set the addresses of the state: from each chain's lane, or from where it lies before; to the chain's lane."""
        rows = np.arange(lanes.count, dtype=np.int64) if lanes.rows is None else lanes.rows
        for i, table in enumerate(lanes.tables):
            stays = np.ones(lanes.count, bool)
            for source in lanes.arriving[i]:
                stays[slice(None) if source.positions is None else source.positions] = False
            own = np.flatnonzero(stays)
            sources = (RowSource(table, rows[own], own), *lanes.arriving[i]) if len(own) else lanes.arriving[i]
            port = program.num_inputs - len(lanes.tables) + i
            block.source(port)[: lanes.count] = self._sources(place, sources, lanes.count, failed)
        first = num_outputs - len(lanes.tables)
        for i, table in enumerate(lanes.tables):
            block.target(first + i, LANE)[: lanes.count] = self._tables.targets(place, table, rows)

    def _sources(
        self, place: Place, sources: tuple[RowSource, ...], batch: int, failed: dict[int, str], first: int = 0
    ) -> Addresses:
        """Return the address of one input for each position. Positions with missing rows fail, counted from `first`."""
        found = np.zeros(batch, np.int64)
        for source in sources:
            if source.table == ZERO_TABLE:
                continue
            addresses = self._tables.sources(place, source.table, source.rows)
            positions = np.arange(batch) if source.positions is None else source.positions
            found[positions] = addresses
            for position in positions[addresses == 0].tolist() if self._lost else ():
                failed[first + position] = f"its state is gone: {'; '.join(self._lost.values())}"
        return found

    def _result(self, place: Place, step: _Submitted | _NotSubmitted) -> StepsResult:
        """Read the results of a finished step from its block, and return the block to the pool."""
        if isinstance(step, _NotSubmitted):
            return step.result
        begin_ns, end_ns = step.block.stamps.tolist()
        if step.begun is not None:
            begin_ns = int(step.begun[0])
        which, count = step.part
        span_ns = end_ns - begin_ns
        begin_ns, end_ns = begin_ns + span_ns * which // count, begin_ns + span_ns * (which + 1) // count
        busy_ns = end_ns - max(begin_ns, self._last_end_ns[place.number])
        self._last_end_ns[place.number] = end_ns
        outputs = self._types[step.task.type_id].outputs
        values = tuple(
            torch.empty((0, *outputs[fetch.output].shape)) if where is None else where.values(step.block)
            for fetch, where in zip(step.task.fetches, step.fetched, strict=True)
        )
        if which + 1 == count:
            place.give_back(step.block.memory)
        return StepsResult(step.task.task, step.step, step.step + 1, values, step.failed, max(0, busy_ns) / 1e9)
