"""The CUDA executor: one worker per device, several tasks in flight. Counters in host memory show finished steps."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.compile.binding import BoundCell
from batchmaker.compile.run_form import RunForm
from batchmaker.core.commands import ZERO_TABLE, Reserve, RowSource, RunTask, TableId
from batchmaker.errors import RAISED_BY_USERS, DeviceError, OptionError
from batchmaker.executor.base import RunCounts, StepsResult, failed_result
from batchmaker.executor.cuda.at_once import PlannedTask
from batchmaker.executor.cuda.blocks import Blocks, prepare
from batchmaker.executor.cuda.cells import Bind, DeviceCells, TaskForm
from batchmaker.executor.cuda.chains import prepare as prepare_chains
from batchmaker.executor.cuda.device import Device, DeviceLostError
from batchmaker.executor.cuda.fetches import Fetched, fetched
from batchmaker.executor.cuda.place import Place
from batchmaker.executor.cuda.program import Failures
from batchmaker.executor.cuda.state_tables import DeviceTables
from batchmaker.executor.cuda.step_by_step import SteppedTask, chained_positions, fill_hoisted
from batchmaker.executor.cuda.watcher import Counting, Watcher
from batchmaker.executor.task_loop import MAX_HOISTED_ROWS
from batchmaker.graph.spec import CellType, TypeId


@dataclass(slots=True)
class _Submitted:
    """A task on a device.

    first: the number there of its first step. blocks: of its launches; those before `skipped` are no steps. at_once:
    whether all of its steps are one launch with one number. failed: positions at which its cell raised. submitted,
    reported: numbers of its steps that reached the device, and that were reported.
    """

    task: RunTask
    first: int
    blocks: Blocks
    skipped: int
    fetched: tuple[Fetched, ...]
    at_once: bool = False
    failed: Failures = ()
    submitted: int = 0
    reported: int = 0

    def num_done(self, finished: int) -> int:
        """Return how many of its steps are done, if the device has finished its step of this number."""
        count = max(0, finished - self.first + 1)
        return self.submitted if self.at_once and count else min(count, self.submitted)


@dataclass(frozen=True, slots=True)
class _NotSubmitted:
    """The steps of a task from `step` on failed before they reached the device. Reported after step `number` there."""

    number: int
    task: RunTask
    step: int
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
        self._bind = bind
        self._places = [Place(number, device) for number, device in enumerate(devices)]
        self._tables = DeviceTables(self._places)
        self._cells = [DeviceCells(place, types, bind) for place in self._places]
        self._of_worker: list[Place | None] = list(self._places)
        self._submitted: list[deque[_Submitted | _NotSubmitted]] = [deque() for _ in devices]
        self._last_end_ns = [0] * len(devices)
        self._failed: list[StepsResult] = []
        self.num_whole_tasks = 0  # tasks that ran in one launch
        self._counts: defaultdict[TypeId, RunCounts] = defaultdict(RunCounts)
        self._lost: dict[int, str] = {}
        self._notify: Callable[[], None] = lambda: None
        self._watcher: Watcher | None = None
        self.exclusive = threading.RLock()  # held by who submits: `materialise` records in another thread

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

    @property
    def devices(self) -> list[Device]:
        """All devices, by number."""
        return [place.device for place in self._places]

    def bound(self, number: int, type_id: TypeId) -> BoundCell:
        """Return a cell with its weights on the device of this number."""
        return self._cells[number].bound(type_id)

    def watch(self, watched: Counting) -> None:
        """Notify the engine when something else that a device counts has changed, too. After `start`."""
        assert self._watcher is not None
        self._watcher.watch(watched)

    def wake(self) -> None:
        """Look at the counters: something was submitted."""
        if self._watcher is not None:
            self._watcher.wake()

    def run_form(self, type_id: TypeId, num_step_inputs: int | None, ends: frozenset[str]) -> RunForm:
        """See TellsForms: of the first device that is not lost."""
        living = self._living()
        if not living:
            return RunForm("nothing: every device was lost", "; ".join(self._lost.values()))
        return self._cells[living[0].number].run_form(type_id, num_step_inputs, ends)

    def counted(self, type_id: TypeId) -> RunCounts:
        """See TellsForms."""
        return self._counts[type_id]

    def start(self, notify: Callable[[], None]) -> None:
        """Compile or load the loops that submitting needs, and start the thread that watches the counters."""
        prepare()
        prepare_chains()
        self._tables.bases(self._places[0], np.zeros(0, np.int64))
        self._notify = notify
        self._watcher = Watcher(self._places, notify)

    def await_materialise(self) -> None: ...  # nothing is held back on GPUs
    def materialise(self, forms: Mapping[TypeId, int]) -> None:
        """Bind and record every known cell on every device. A device that fails here counts as lost."""
        with self.exclusive:
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
        with self.exclusive:
            self._tables.write(table, rows, values)

    def put(self, table: TableId, row: int, value: Tensor) -> None:
        """See Executor.put. The value is on the first living device afterwards; others get it when they need it."""
        with self.exclusive:
            if not (living := self._living()):
                raise DeviceError("every device has been lost")
            self._tables.put(table, row, value, living[0])

    def read(self, table: TableId, row: int) -> Any:
        """See Executor.read. Waits for the device that has the row. DeviceError if only a lost device had it."""
        with self.exclusive:
            try:
                value = self._tables.read(table, row)
            except DeviceLostError as error:
                self._lose(error)
                raise
        return value.item() if value.ndim == 0 else value

    def submit(self, task: RunTask) -> None:
        """See Executor.submit. Launches all steps now; `poll` reports what goes wrong."""
        with self.exclusive:
            self._submit(task)
        self.wake()

    def poll(self) -> list[StepsResult]:
        """Return finished steps. If none of a device's steps has finished, ask the device whether it has failed."""
        with self.exclusive:
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

    def anew(self) -> CudaExecutor:
        """See Executor.anew. It has the devices that are not lost, and binds cells to them anew when they are used."""
        return CudaExecutor(self._types, self._bind, [place.device for place in self._living()])

    def _submit(self, task: RunTask) -> None:
        """Submit a task. If this fails, the result of its steps says so."""
        place = self._of_worker[task.worker]
        if place is None:
            reasons = "; ".join(self._lost.values())
            self._failed.append(failed_result(task, 0, DeviceLostError(f"no device is left ({reasons})")))
            self._notify()
            return
        waiting = self._submitted[place.number]
        before = waiting[-1] if waiting else None
        try:
            self._run(place, task)
        except RAISED_BY_USERS as error:  # such as too little memory: only this task fails
            last = waiting[-1] if waiting else None
            done = last.submitted if isinstance(last, _Submitted) and last is not before else 0
            waiting.append(_NotSubmitted(place.num_submitted, task, done, failed_result(task, done, error)))
            if isinstance(error, DeviceLostError):
                self._lose(error)
            self._notify()

    def _poll(self) -> list[StepsResult]:
        results: list[StepsResult] = []
        for place in self._living():
            waiting, finished, heard = self._submitted[place.number], place.num_finished, len(results)
            while waiting:
                one = waiting[0]
                if isinstance(one, _NotSubmitted):
                    if one.number > finished:
                        break
                    results.append(one.result)
                else:
                    done = one.num_done(finished)
                    if done > one.reported:
                        results.append(self._result(place, one, done))
                    if one.reported < one.submitted:
                        break
                    whole = one.submitted == one.task.num_steps  # else a launch that failed may still write there
                    (place.give_back if whole else place.hold)(one.blocks.memory)
                waiting.popleft()
            place.release(finished)  # not steps that finished meanwhile: their results are not read yet
            if waiting and len(results) == heard:
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
        for one in waiting:
            if isinstance(one, _NotSubmitted):
                self._failed.append(failed_result(one.task, one.step, error))
            elif one.reported < one.submitted:
                self._failed.append(failed_result(one.task, one.reported, error, one.submitted))
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
        """Submit a task, in one launch if this is possible and expected to be faster."""
        missing = self._follow(place, task) if len(self._places) > 1 else ()
        whole = None if missing else self._whole(place, task)
        planned = None if whole is None else whole.program.plan(task)
        if whole is not None and planned is not None:
            self._run_at_once(place, task, whole, planned)
            return
        self._counts[task.type_id].one_by_one += task.num_steps
        laid = SteppedTask(place, self._cells[place.number], self._types[task.type_id], task)
        laid.fill(self._tables)
        one = _Submitted(task, place.num_submitted + 1, laid.blocks, laid.num_ahead, laid.fetched, failed=missing)
        self._launch(place, one, laid.launches)

    def _whole(self, place: Place, task: RunTask) -> TaskForm | None:
        """Return the programs for a task of chains as a whole, None if there are none."""
        if task.lanes is None or not task.lanes.used.all():
            return None
        num_step_inputs = len(self._types[task.type_id].inputs) - len(task.lanes.tables)
        return self._cells[place.number].tasks(task.type_id, num_step_inputs)

    def _run_at_once(self, place: Place, task: RunTask, form: TaskForm, planned: PlannedTask) -> None:
        """Submit all steps of a task of chains as one launch."""
        program, hoisted, rows = form.program, form.projected, planned.places
        hoisted.reserve(place, int(rows.max()) + 1)
        ahead = hoisted.launches(len(rows))
        places, num_bytes = fetched(task.fetches, self._types[task.type_id].outputs)
        blocks = Blocks(place, [*(p.num_words(count) for p, count in ahead), program.num_words(planned)], num_bytes)
        fill_hoisted(blocks, hoisted, place, self._tables, task.source_tables, task.source_rows, rows)
        program.fill(blocks, len(ahead), planned, task, self._tables, places)
        one = _Submitted(task, place.num_submitted + 1, blocks, len(ahead), places, at_once=True)
        self._launch(place, one, [*ahead, (program, planned)])
        self.num_whole_tasks += 1
        self._counts[task.type_id].in_loop += task.num_steps

    def _launch(self, place: Place, one: _Submitted, launches: Sequence[tuple[Any, Any]]) -> None:
        """Submit a task whose blocks are filled in. launches: a program and what it runs, for each block."""
        recorded = [program.recorded(size) for program, size in launches]  # records what is new: before the upload
        blocks, skipped = one.blocks, one.skipped
        if skipped:
            blocks.note_begin(0)
        blocks.announce(skipped, one.first)
        blocks.upload()
        self._submitted[place.number].append(one)
        at = 0
        while at < len(launches):
            if recorded[at] is None:  # the cell may wait for the device: alone
                program, size = launches[at]
                self._note_failures(one, at, program.run(size))
                self._count(place, one, at)
                at += 1
                continue
            with place.device.submitting():
                while at < len(launches) and (launch := recorded[at]) is not None:
                    launch()
                    self._count(place, one, at)
                    at += 1

    def _count(self, place: Place, one: _Submitted, launch: int) -> None:
        """Note that a launch has been submitted."""
        if launch >= one.skipped:
            place.num_submitted += 1
            one.submitted = one.task.num_steps if one.at_once else one.submitted + 1

    def _note_failures(self, one: _Submitted, launch: int, failed: Failures) -> None:
        """Note rows of a launch at which its cell raised. In the hoisted part positions count through the task."""
        if failed:
            ahead = launch < one.skipped
            first = launch * MAX_HOISTED_ROWS if ahead else one.task.begin_of(launch - one.skipped)
            chained = chained_positions(one.task) if ahead else np.arange(len(one.task.nodes))
            one.failed += tuple((int(chained[first + row]), reason) for row, reason in failed)

    def _follow(self, place: Place, task: RunTask) -> Failures:
        """Bring the rows that a task reads to its device, of several, and note which it writes; return missing ones."""
        missing: list[int] = []
        for number, step in enumerate(task.steps):
            begin, lanes = task.begin_of(number), step.lanes
            read = list(step.inputs)
            written = [] if step.keep is None else [(table, step.keep.rows) for table in step.keep.tables]
            if lanes is not None:
                rows = np.arange(lanes.count) if lanes.rows is None else lanes.rows
                written += [(table, rows) for table in lanes.tables]
                for table, arriving in zip(lanes.tables, lanes.arriving, strict=True):
                    stays = np.ones(lanes.count, np.bool_)
                    for source in arriving:
                        stays[slice(None) if source.positions is None else source.positions] = False
                    own = np.flatnonzero(stays)
                    read.append((RowSource(table, rows[own], own), *arriving))
            for sources in read:
                gone = self._missing(place, sources, step.batch)
                missing += (begin + np.flatnonzero(gone)).tolist() if self._lost else []
            for table, rows in written:
                self._tables.targets(place, table, rows)
        reason = f"its state is gone: {'; '.join(self._lost.values())}"
        return tuple((position, reason) for position in sorted(set(missing)))

    def _missing(self, place: Place, sources: tuple[RowSource, ...], batch: int) -> NDArray[np.bool_]:
        """Bring rows to a device; return where they are missing, [batch]."""
        missing = np.zeros(batch, np.bool_)
        for source in sources:
            if source.table != ZERO_TABLE:
                gone = self._tables.sources(place, source.table, source.rows) == 0
                missing[slice(None) if source.positions is None else source.positions] = gone
        return missing

    def _result(self, place: Place, one: _Submitted, done: int) -> StepsResult:
        """Read the results of finished steps from the memory of their blocks: of those from `reported` to `done`."""
        task, first = one.task, one.reported
        one.reported = done
        last = one.skipped + (1 if one.at_once else done)
        stamps = one.blocks.stamps[one.skipped + first : last].tolist()
        if first == 0 and one.skipped:
            stamps[0][0] = int(one.blocks.stamps[0, 0])
        busy_ns, last_ns = 0, self._last_end_ns[place.number]
        for begin_ns, end_ns in stamps:
            busy_ns += max(0, end_ns - max(begin_ns, last_ns))
            last_ns = end_ns
        self._last_end_ns[place.number] = last_ns
        begin, end = task.begin_of(first), task.begin_of(done)
        values = tuple(fetch.values(one.blocks, begin, end) for fetch in one.fetched)
        failed = tuple(each for each in one.failed if begin <= each[0] < end)
        return StepsResult(task.task, first, done, values, failed, busy_ns / 1e9)
