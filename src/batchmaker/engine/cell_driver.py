"""The live driver of cellular batching: joins unfolding, the scheduler and an executor. Worker turns it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence, Sized
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, cast, final

import torch
from torch import Tensor

from batchmaker.clock import Clock
from batchmaker.compile.export import torch_dtype
from batchmaker.core.commands import (
    Admit,
    Collect,
    Command,
    Decided,
    Fail,
    NodesBegun,
    Read,
    Reply,
    Reserve,
    RunTask,
    StateStored,
    StoredRow,
)
from batchmaker.core.events import (
    Event,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestId,
    SequenceClosed,
    SequenceId,
    SequenceRestored,
    StepsFinished,
    TaskId,
    TimePassed,
)
from batchmaker.core.scheduler import Scheduler
from batchmaker.engine import lone_runs
from batchmaker.engine.arrivals import Arrivals
from batchmaker.engine.bulks import Bulks
from batchmaker.engine.driver import OnDevice
from batchmaker.engine.failures import at_fault, blamed, error_of, stopped
from batchmaker.engine.lone_runs import LoneRuns, results_of
from batchmaker.engine.observers import Onlooker, call_quietly
from batchmaker.engine.open_sequences import Sequences
from batchmaker.engine.request import GoOn, InFlight, Reset, Settled, TakeState, Ticket, apart
from batchmaker.engine.results import Results
from batchmaker.engine.stats import DriverStats, StepCounts, StepsSeen
from batchmaker.engine.stop_tests import StopTests
from batchmaker.engine.unfolder import Unfolder
from batchmaker.errors import RAISED_BY_USERS, BatchmakerError, SequenceStateError
from batchmaker.executor.base import Executor, StepsResult
from batchmaker.executor.inline import InlineExecutor
from batchmaker.graph.spec import TypeId, ValueSpec
from batchmaker.model.cell import Cell, copy_type
from batchmaker.model.moved_state import MovedState, written
from batchmaker.model.registry import CellRegistry
from batchmaker.model.scope import CellTypes, OpenLoop
from batchmaker.model.sequence_state import NOTHING_KEPT
from batchmaker.model.structure import Handle
from batchmaker.model.template_cache import ProvenTemplates, TemplateCache
from batchmaker.model.template_values import TemplateValues
from batchmaker.model.unfolding import computed, end_of_loop

if TYPE_CHECKING:
    from batchmaker.engine.decided_tasks import DecidedTasks

_DATA: Final = "its data"

MOST_UNKNOWN: Final = 16
"""Kinds of kept nodes whose cells have not run here, for which a state is taken."""


@final
class CellDriver:
    """Unfolds requests, gives events to the scheduler and carries out its commands.

    on_device: takes the requests that a device can schedule itself, so that the scheduler never hears of them; None if
    no device can.

    models: for each model, by number, what gives its cells their types: the registry, with the prefix of its names.
    max_nodes: the most nodes of one request. sequences: the open sequences, whose chunks it runs. proven: see
    TemplateCache. lone: runs short requests that come while nothing is in flight; None if the policy decides of them,
    too.
    """

    def __init__(
        self,
        registry: CellRegistry,
        models: Sequence[CellTypes[Cell]],
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        max_nodes: int,
        sequences: Sequences,
        proven: ProvenTemplates | None = None,
        lone: LoneRuns | None = None,
    ) -> None:
        self._registry = registry
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self.sequences = sequences
        sequences.on_decided = scheduler.decide
        self._in_flight: dict[RequestId, InFlight] = {}
        self._tasks: dict[TaskId, RunTask] = {}
        self.own_tasks: Sized = self._tasks if isinstance(executor, InlineExecutor) else ()  # see Driver
        self._brought = Results()
        self._arrivals = Arrivals(registry.types, max_nodes, executor.write, proven)
        self.bulks = Bulks(self._arrivals, self._brought)
        self._unwritten: list[tuple[InFlight, Admit]] = []
        self._going_on: dict[SequenceId, Ticket] = {}
        self._num_unknown = 0
        self._results: list[StepsResult] = []
        self._decided_tasks: DecidedTasks | None = None  # made when there is use for it
        self._ran: StepsFinished | None = None
        self._settle: Callable[[Sequence[Settled]], None] = lambda _: None
        self.stats = DriverStats()
        self._unfolder = Unfolder(registry, models, self._arrivals, clock, max_nodes, self.stats)
        self._counts = StepCounts(self.stats, scheduler.owners)
        self._record: Onlooker[[Sequence[Event], Sequence[Command]]] | None = None
        self._lone = lone
        self._alone_s = 0.0  # expected of the requests that ran alone in this turn
        self.on_device: OnDevice | None = None

    @property
    def observer(self) -> Callable[[StepsSeen], None] | None:
        """Called with the finished steps that are reported together."""
        return self._counts.observer

    @observer.setter
    def observer(self, observer: Callable[[StepsSeen], None] | None) -> None:
        self._counts.observer = observer

    @property
    def record(self) -> Callable[[Sequence[Event], Sequence[Command]], None] | None:
        """Called after each call of the scheduler, with its events and its commands."""
        return self._record

    @record.setter
    def record(self, record: Callable[[Sequence[Event], Sequence[Command]], None] | None) -> None:
        self._record = None if record is None else Onlooker(record, "what records events")

    @property
    def executor(self) -> Executor:
        """What computes the tasks."""
        return self._executor

    def count_on(self, before: CellDriver) -> None:
        """Go on with the counts and the observers of a driver in whose place this one is. Nothing has come yet."""
        self.stats = self._unfolder.stats = before.stats
        self._counts = StepCounts(self.stats, self._scheduler.owners)
        self._counts.observer = before.observer
        self._record = before._record

    def start(self, notify: Callable[[], None], settle: Callable[[Sequence[Settled]], None]) -> None:
        """See Driver.start. Chunks that fail while they wait are settled with `settle`, too."""
        self._settle = self.sequences.settle = self.bulks.settle = settle
        if self.on_device is not None:
            self.on_device.settle = settle
        self._executor.start(notify)

    @property
    def stop_tests(self) -> StopTests:
        """The stop tests of the loops in flight, for an executor that applies them between the steps of a task."""
        return self._brought.tests

    def await_materialise(self) -> None:
        """Call before example requests if `materialise` follows. Requests that came earlier may be in flight."""
        self._executor.await_materialise()
        if self._lone is not None:
            self._lone.is_on = False

    def materialise(self) -> None:
        """Let the executor prepare every known cell. Nothing may be in flight."""
        self._executor.materialise(self._registry.num_step_inputs)
        if self._lone is not None:
            self._lone.is_on = True
        if self.on_device is not None:
            self.on_device.materialise()

    @property
    def wants_requests(self) -> bool:
        """Whether nothing is in flight, or more may begin and fewer nodes are ready than one of the largest batches
        holds."""
        if self.on_device is not None and self.on_device.is_full:
            return False
        if not self._in_flight and not self.bulks.members:
            return True
        if self.begin_together is not None:
            return not self._scheduler.num_in_cohort
        types = self._unfolder.known
        num_ready = sum([self._scheduler.num_ready(cell.type_id) for cell in types])
        if self._scheduler.live_streams.are_served:  # to decide which of many begin takes long
            num_ready += self._scheduler.num_waiting
        return num_ready < max([cell.max_batch for cell in types], default=1)

    @property
    def begin_together(self) -> int | None:
        """See Driver."""
        return self._scheduler.begin_together

    @property
    def has_live_streams(self) -> bool:
        """See Driver."""
        return self._scheduler.live_streams.are_served

    @property
    def templates(self) -> TemplateCache:
        """The templates: shapes of requests that need no unfolding."""
        return self._arrivals.templates

    @property
    def num_in_flight(self) -> int:
        """Number of requests in flight, with the chunks that wait for the one before them."""
        apart = 0 if self.on_device is None else self.on_device.num_in_flight
        return len(self._in_flight) + len(self.bulks.members) + self.sequences.num_waiting + apart

    @property
    def num_sequences(self) -> int:
        """Number of open sequences."""
        return self.sequences.num_open

    def next_wakeup_s(self) -> float | None:
        """The next deadline or end of an idle sequence, in engine seconds; None if there is none."""
        due_s, wakeup_s = self._scheduler.next_deadline_s, self.sequences.next_wakeup_s()
        if self.on_device is not None and (there_s := self.on_device.next_wakeup_s) is not None:
            due_s = there_s if due_s is None else min(due_s, there_s)
        return due_s if wakeup_s is None else wakeup_s if due_s is None else min(due_s, wakeup_s)

    def finish(self) -> None:
        """See Driver.finish. Ends all sequences, too."""
        self._executor.stop()
        self.poll()
        while self._results:
            self.advance([])
            self.poll()
        self.sequences.close_all("the engine has been stopped")
        self._handle(self._following())

    def stop(self) -> None:
        """See Driver.stop."""
        self._executor.stop()

    # --- a turn: poll, handle, carry out ---------------------------------------------------------------------------

    def poll(self) -> None:
        """See Driver.poll. Tasks that only values decide follow each other here, see DecidedTasks."""
        executor = self._executor
        decides = bool(self._scheduler.frames.slots) and isinstance(executor, InlineExecutor)
        if not (decides and self._run_decided(cast(InlineExecutor, executor))):
            self._results.extend(executor.poll())

    def _run_decided(self, executor: InlineExecutor) -> bool:
        """Compute tasks in one call, if only values decide what follows. False if nothing has run."""
        if self._record is not None:
            return False
        if self._decided_tasks is None:
            from batchmaker.engine.decided_tasks import DecidedTasks

            self._decided_tasks = DecidedTasks(self._scheduler, executor, self._brought, self._counts)
        self._ran = self._decided_tasks.run(self._clock.now_s())
        if self._ran is not None:
            del self._tasks[self._ran.task]
        return self._ran is not None

    def advance(self, tickets: Sequence[Ticket]) -> None:
        """Make events of the polled results and of these requests; let the scheduler handle them, and obey it."""
        events, now_s = list[Event](), self._clock.now_s()
        if self._results:
            self._take_results(now_s, events)
        if tickets:
            self._begin(self.sequences.may_begin(tickets), events)
        if self.sequences.opened:
            self.sequences.expire(now_s)
        if self.sequences.has_news:
            events += self._following()
        if events or self._in_flight or self.bulks.members or self._tasks:
            self._handle(events or ([] if self._ran is not None else [TimePassed(now_s)]))
        if self.on_device is not None:
            self.on_device.turn()

    def _handle(self, events: Sequence[Event]) -> None:
        """Give events to the scheduler and carry out its commands; repeat with the events that follow from these.

        First among them what has run since: the tables know of it already.
        """
        if self._ran is not None:
            events, self._ran = [self._ran, *events], None
        while events:
            begin = time.perf_counter()
            commands = self._scheduler.handle(*events)
            self.stats.scheduler_s += time.perf_counter() - begin
            if self._record is not None:
                self._record(events, commands)
            woken: list[InFlight] = []  # a value was read for them
            admits, reads = list[Admit](), list[Read]()
            for kind, alike in groupby(commands, type):
                if kind is Admit:
                    admits += cast(Iterable[Admit], alike)
                    continue
                if kind is Read:
                    reads += cast(Iterable[Read], alike)
                    continue
                if admits or reads:
                    self._admit(admits, reads, woken)
                    admits, reads = [], []
                if kind is Reply:
                    self._reply(cast(Iterable[Reply], alike))
                    continue
                for command in alike:
                    if kind is RunTask:
                        self._run(cast(RunTask, command), woken)
                    else:
                        self._carry_out(command, woken)
            if admits or reads:
                self._admit(admits, reads, woken)
            if self._unwritten:
                self._fill(woken)
            has_news = woken or self.sequences.has_news or self.bulks.failed
            events = self._following(woken) if has_news else ()

    def _carry_out(self, command: Command, woken: list[InFlight]) -> None:
        """Carry out a command that is not carried out together with those beside it."""
        match command:
            case Reserve():
                self._executor.reserve(command)
            case NodesBegun():
                loops = list[tuple[int, OpenLoop]]()
                for request_id, base, open_loops in command.loops:
                    loops += self._in_flight[request_id].begin_loops(base, open_loops)
                self._brought.enter((), loops, command.num_nodes)
            case Collect():
                self._brought.collect(command)
            case Decided():
                self._brought.decided(command)
            case Fail():
                self._fail(command)
            case StateStored():
                self._go_on(command)

    def _run(self, task: RunTask, woken: list[InFlight]) -> None:
        self.stats.tasks += 1
        self._tasks[task.task] = task
        if self._unwritten:
            self._fill(woken)
        self._executor.submit(task)

    def _fail(self, command: Fail) -> None:
        if self.bulks.members and self.bulks.fail(command, self._clock.now_s()):
            return
        request = self._in_flight.pop(command.request)
        self._brought.leave([request])
        if request.is_withdrawn:
            return
        call_quietly(request.unfolding.close, "an unfold function that was closed")
        self._settle([(request.ticket, None, request.error or error_of(command, request.ticket))])

    def _read(self, command: Read, woken: list[InFlight]) -> None:
        """Read a value that was asked for late, which its request may have waited for."""
        request = self._in_flight[command.request]
        woken.append(request)
        try:
            value = self._executor.read(command.table, command.row)
        except RAISED_BY_USERS as error:  # lost with its device, or too large for the host
            request.error = blamed(error, "a value that was asked for")
            return
        local = request.local(command.node)
        ends_loop = request.loop_at(command.node) is not None  # it is the result of a loop
        request.store(end_of_loop(local) if ends_loop else local, command.output, value)

    def _following(self, woken: Sequence[InFlight] = ()) -> list[Event]:
        """Resume requests that have the values they waited for, begin chunks, end sequences. Returns their events."""
        events: list[Event] = []
        if woken:
            failed = [request for request in woken if request.error is not None]
            self._resume([request for request in dict.fromkeys(woken) if request.error is None], events)
            events += [
                RequestFailed(request_id, self._clock.now_s(), str(request.error))
                for request in failed
                if (request_id := request.ticket.request_id) in self._in_flight
            ]
        if self.bulks.failed:
            events += self.bulks.take_failed(self._clock.now_s())
        while due := self.sequences.take_due():
            self._begin(due, events)
        events += [SequenceClosed(number, self._clock.now_s()) for number in self.sequences.take_closed()]
        return events

    # --- requests that come, and answers ---------------------------------------------------------------------------

    def _begin(self, tickets: Sequence[Ticket], events: list[Event]) -> None:
        controls = [ticket for ticket in tickets if ticket.chunk is not None and ticket.chunk.control is not None]
        requests = [ticket for ticket in tickets if ticket not in controls] if controls else tickets
        alone, self._alone_s = self._run_alone if self._may_run_alone(requests) else None, 0.0
        if self.on_device is not None:
            requests = apart(requests)
        num_in_flight = len(self._in_flight) + len(self.bulks.members)
        begun = self._unfolder.begin(requests, events, self._settle, num_in_flight, alone, self.bulks)
        if self.on_device is not None and self._record is None and (on_gpu := self.on_device.take(begun)):
            begun = [request for request in begun if request.ticket.request_id not in on_gpu]
            events[:] = [one for one in events if type(one) is not RequestArrived or one.request not in on_gpu]
        for request in begun:
            self._in_flight[request.ticket.request_id] = request
        for ticket in controls:
            self._control(ticket, events)

    def _may_run_alone(self, tickets: Sequence[Ticket]) -> bool:
        """Whether requests may run one after another: nothing is in flight, they are few, and no event is recorded."""
        runs = self._lone
        is_idle = runs is not None and runs.is_on and not (self._in_flight or self.bulks.members or self._tasks)
        num_requests = 0
        for ticket in tickets:
            num_requests += ticket.num_requests
        return is_idle and num_requests <= lone_runs.MOST and self._record is None

    def _run_alone(self, ticket: Ticket, values: TemplateValues) -> bool:
        """Answer a request at once, if it is short. False if it must begin as others do: nothing has happened."""
        if ticket.chunk is not None or ticket.on_value is not None or self._lone is None:
            return False
        run = self._lone.run_of(values[0], lone_runs.SHORT_S - self._alone_s)
        began_s, deadline_s = self._clock.now_s(), ticket.deadline_s
        if run is None or (deadline_s is not None and began_s + run.seconds >= deadline_s):
            return False
        try:
            results = self._lone.compute(run, values)
            result = None if results is None else results_of(values[0], run, results)
        except RAISED_BY_USERS:  # the same is raised again, by what knows whose error it is
            return False
        now_s = self._clock.now_s()
        if results is None or (deadline_s is not None and now_s >= deadline_s):
            return False
        for task, done in run.with_tasks(results):
            self._counts.add(task, self._registry.types[task.type_id], done, now_s, ticket.request_id)
        self.stats.tasks += len(run.tasks)
        self._alone_s += run.seconds
        ticket.started_s = began_s
        ticket.num_cells += values[0].num_nodes
        self._settle([(ticket, result, None)])
        return True

    def _control(self, ticket: Ticket, events: list[Event]) -> None:
        """Carry out what a sequence is told, of which no chunk is in flight."""
        assert ticket.chunk is not None
        entry, control, now_s = ticket.chunk.sequence, ticket.chunk.control, self._clock.now_s()
        result: bytes | None = None
        try:
            if isinstance(control, GoOn):
                of = zip(control.state.cells, control.state.specs, strict=True)
                types = tuple([self._type_of(cell, specs) for cell, specs in of])
                self._unfolder.learn_types(events)
                self._going_on[entry.sequence_id] = ticket
                events.append(SequenceRestored(entry.sequence_id, types, now_s))
                return
            if isinstance(control, TakeState):
                rows = self._scheduler.stored(entry.sequence_id)
                values = [self._outputs(row) for row in rows]
                cells = [self._registry.types[row.type_id].name for row in rows]
                result = written(MovedState(entry.state, values, cells), control.identity)
            elif isinstance(control, Reset):
                entry.state = NOTHING_KEPT
                events.append(SequenceClosed(entry.sequence_id, now_s))
        except RAISED_BY_USERS as error:  # the state cannot be moved, or is lost with its device
            self._settle([(ticket, None, blamed(error, "the state of its sequence"))])
        else:
            self._settle([(ticket, result, None)])

    def _type_of(self, name: str, outputs: tuple[ValueSpec, ...]) -> TypeId:
        """Return the type for a node that came from elsewhere: of the cell of this name, or one with the same outputs.

        If none has run here, it is that of copies, which are bound for it: only MOST_UNKNOWN times, since the bytes of
        a state may be anybody's, and a type stays. SequenceStateError then.
        """
        wanted = [one.row_signature for one in outputs]
        alike = [cell for cell in self._registry.types if [one.row_signature for one in cell.outputs] == wanted]
        if alike:
            return next((cell for cell in alike if cell.name == name), alike[0]).type_id
        if self._num_unknown >= MOST_UNKNOWN:
            raise SequenceStateError(
                f"the state keeps outputs of cell {name[:64]!r} that no cell of this engine has; give the model "
                "example_chunks, so that its cells have run when it starts"
            )
        self._num_unknown += 1
        return copy_type(self._registry, *outputs).type_id

    def _outputs(self, row: StoredRow) -> list[Tensor]:
        """Return the outputs of a node that a sequence keeps."""
        specs = self._registry.types[row.type_id].outputs
        values = [self._executor.read(table, row.row) for table in row.tables]
        return [
            value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch_dtype(spec.dtype))
            for value, spec in zip(values, specs, strict=True)
        ]

    def _go_on(self, command: StateStored) -> None:
        """Fill the rows of a sequence that goes on from a state from elsewhere."""
        ticket = self._going_on.pop(command.sequence)
        assert ticket.chunk is not None
        assert isinstance(ticket.chunk.control, GoOn)
        state = ticket.chunk.control.state
        try:
            if command.reason:
                raise SequenceStateError(f"the state cannot be kept here: {command.reason}")
            for row, values in zip(command.rows, state.values, strict=True):
                for table, value in zip(row.tables, values, strict=True):
                    self._executor.put(table, row.row, value)
        except RAISED_BY_USERS as error:  # there is no memory, or the device is lost
            self._settle([(ticket, None, blamed(error, "the state of its sequence"))])
        else:
            ticket.chunk.sequence.state = self.templates.canonical(state.kept)
            self._settle([(ticket, None, None)])

    def _admit(self, commands: Sequence[Admit], reads: Sequence[Read], woken: list[InFlight]) -> None:
        """Note the node numbers of requests, and write their data there; `_fill` writes that of templates. Then read
        what requests have asked for late.

        Adds requests whose data cannot be written to `woken`, with their error.
        """
        entered, loops, top = list[InFlight](), list[tuple[int, OpenLoop]](), 0
        for command in self.bulks.admit(commands, self._clock.now_s()) if self.bulks.members else commands:
            request, base = self._in_flight[command.request], command.base
            top = max(top, base + command.num_nodes)
            graph = request.graphs.pop(0)
            if not request.admitted:
                entered.append(request)
            request.admitted += (command,)
            request.shift = shift = base - command.first_local
            if open_loops := request.unfolding.loops:
                shifted = [(shift, open_loops[run.first]) for run in graph.runs if run.open_ended]
                request.loops += tuple(shifted)
                loops += shifted
            if request.template_values is not None:
                self._unwritten.append((request, command))
                continue
            try:
                for host, table in zip(graph.host_inputs, command.host_tables, strict=True):
                    self._executor.write(table, host.rows(shift), host.values)
            except RAISED_BY_USERS as error:
                self._cannot_go_on(request, blamed(error, _DATA), woken)
        self._brought.enter(entered, loops, top)
        for read in reads:
            self._read(read, woken)

    def _fill(self, woken: list[InFlight]) -> None:
        """Write the values of requests with templates that were admitted. Must run before a task reads them."""
        unwritten, self._unwritten = self._unwritten, []
        for (request, _), error in at_fault(self._arrivals.fill, unwritten, _DATA):
            self._cannot_go_on(request, error, woken)

    @staticmethod
    def _cannot_go_on(request: InFlight, error: BatchmakerError, woken: list[InFlight]) -> None:
        """Let a request fail when all commands are carried out. What is computed of it until then is dropped."""
        request.error = error
        woken.append(request)

    def _reply(self, commands: Iterable[Reply]) -> None:
        """All values that these requests need are computed: answer them together."""
        finished = list[InFlight]()
        for command in self.bulks.reply(commands, self._clock.now_s()) if self.bulks.members else commands:
            finished.append(self._in_flight.pop(command.request))
        if not finished:
            return
        for request, error in at_fault(self._brought.gather, finished, "its result"):
            request.error = request.error or error
        self._brought.leave(finished)
        alike: dict[int, list[InFlight]] = {}
        for request in finished:
            if request.ticket.chunk is not None:
                request.ticket.chunk.sequence.computed = request.unfolding.after  # see Sequences.decide
            if request.error is None:  # otherwise a value that it needs could not be written or read
                alike.setdefault(id(request if request.awaits_values else request.gathered), []).append(request)
        for members in alike.values():
            for request, error in at_fault(_make_results, members):
                request.error = error
        outcomes: list[Settled] = []
        for request in finished:
            ticket = request.ticket
            if ticket.on_value is not None and request.error is None and request.unfolding.streams_result:
                ticket.stream(request.result)
            outcomes.append((ticket, request.result, request.error))
        self._settle(outcomes)

    def cancel(self, request_id: RequestId) -> None:
        """Give up a request in flight, or a chunk that waits; otherwise do nothing."""
        if request_id in self._in_flight:
            self._handle([RequestCancelled(request_id, self._clock.now_s())])
        elif self.sequences.cancel(request_id):
            self._handle(self._following())
        elif self.on_device is not None:
            self.on_device.cancel(request_id)

    def stop_all(self) -> None:
        """Give up every request in flight and every chunk that waits, because the engine is stopped."""
        self.sequences.stop_all()
        if self.on_device is not None:
            self.on_device.stop_all()
        for request in self._in_flight.values():
            request.error = request.error or stopped(request.ticket.request_id)
        for request_id, (bulk, place) in self.bulks.members.items():
            bulk.errors[place] = stopped(request_id)
        ids = [*self._in_flight, *self.bulks.members]
        self._handle([RequestCancelled(request_id, self._clock.now_s()) for request_id in ids])

    def withdraw(self, most: int) -> list[Ticket]:
        """See Driver.withdraw. Only requests with templates, which need not be unfolded again; those that came last."""
        running = {owner for task in self._tasks.values() for owner in self._scheduler.owners(task.nodes)}
        spare = [
            request
            for request_id, request in reversed(self._in_flight.items())
            if request.template_values is not None
            and request.ticket.started_s is None
            and request.ticket.worker is None
            and request.ticket.member_of is None
            and request.error is None
            and request_id not in running
        ]
        leaving = spare[: min(most, (len(spare) + 1) // 2)]
        for request in leaving:
            request.is_withdrawn = True
            request.ticket.num_cells = 0
        now_s = self._clock.now_s()
        self._handle([RequestCancelled(request.ticket.request_id, now_s) for request in leaving])
        return [request.ticket for request in leaving if request.ticket.request_id not in self._in_flight]

    def tickets(self) -> Sequence[Ticket]:
        """Return the tickets of requests in flight and of chunks that wait."""
        apart = [] if self.on_device is None else self.on_device.tickets()
        return [*(request.ticket for request in self._in_flight.values()), *self.sequences.waiting, *apart]

    # --- steps that have run, and unfold functions that wait for them ----------------------------------------------

    def _take_results(self, now_s: float, events: list[Event]) -> None:
        """Make events of the polled results. Unfold functions that waited for their values go on."""
        touched: dict[RequestId, InFlight] = {}
        for result in self._results:
            self._take_result(result, now_s, touched, events)
        self._results.clear()
        if touched:
            self._resume(touched.values(), events)

    def _take_result(
        self, result: StepsResult, now_s: float, touched: dict[RequestId, InFlight], events: list[Event]
    ) -> None:
        """Store the values that steps brought to the host, and make the scheduler's event of these steps."""
        task = self._tasks[result.task]
        if result.end == len(task.ends):
            del self._tasks[result.task]
        cell = self._registry.types[task.type_id]
        begin, end = int(task.ends[result.first - 1]) if result.first else 0, int(task.ends[result.end - 1])
        slots = self._scheduler.slots(task.nodes[begin:end])
        self._counts.add(task, cell, result, now_s)
        self._brought.begin(slots, now_s - result.busy_s)
        for request in self._brought.take(cell, task, result, begin, slots):
            touched[request.ticket.request_id] = request
        stopped, failed = result.stopped, result.failed
        looked_at = self._brought.whole_numbers(task, result, begin, len(slots)) if self._scheduler.frames.slots else ()
        if stopped is None and task.may_stop is not None and task.may_stop[result.first : result.end].any():
            stopped, untested = self._brought.stopped(cell, task, result, begin, len(slots))
            failed += untested
        if stopped is not None:
            self._brought.loops_ended(task, begin, slots, stopped)
        events.append(
            StepsFinished(result.task, result.first, result.end, now_s, stopped, failed, result.busy_s, looked_at)
        )

    def _resume(self, requests: Iterable[InFlight], events: list[Event]) -> None:
        """Continue unfold functions that have the values they wait for, of requests that have not ended meanwhile."""
        self._unfolder.resume([one for one in requests if one.ticket.request_id in self._in_flight], events)


def _make_results(requests: Sequence[InFlight]) -> None:
    """Set the results of ended requests that were gathered together, or of one. They may contain code of the user."""
    gathered = requests[0].gathered

    def column(handle: Handle) -> list[Any]:
        values = gathered.get(handle)
        if values is None and gathered and requests[0].unfolding.result_form is not None:
            (values,) = gathered.values()  # under the handle of another request, with which it was gathered
        if values is None:
            return [computed(handle, request.value) for request in requests]
        return values if len(values) == len(requests) else [values[request.place] for request in requests]

    results = requests[0].unfolding.results(len(requests), column)
    for request, result in zip(requests, results, strict=True):
        request.result = result
