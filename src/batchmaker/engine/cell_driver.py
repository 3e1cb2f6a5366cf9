"""The live driver of cellular batching: joins unfolding, the scheduler and an executor. Loop turns it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import cast, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.clock import Clock
from batchmaker.engine.arrivals import Arrivals
from batchmaker.engine.driver import blamed, error_of
from batchmaker.engine.observers import Onlooker, call_quietly
from batchmaker.engine.open_sequences import Sequences
from batchmaker.engine.request import InFlight, Settled, Ticket
from batchmaker.engine.results import Results
from batchmaker.engine.stats import DriverStats, StepCounts, StepSeen
from batchmaker.engine.stop_tests import StopTests
from batchmaker.errors import RAISED_BY_USERS, DeviceError
from batchmaker.executor.base import Executor, StepsResult
from batchmaker.model.cell import Cell
from batchmaker.model.registry import CellRegistry
from batchmaker.model.scope import CellTypes
from batchmaker.model.template_cache import Sight, TemplateCache
from batchmaker.model.template_values import Drawn
from batchmaker.model.unfolding import Unfolding, end_of_loop
from batchmaker.scheduler.commands import Admit, Command, Fail, Read, Reply, Reserve, RunTask
from batchmaker.scheduler.core import Scheduler
from batchmaker.scheduler.events import (
    CellTypeAdded,
    Event,
    GraphExtended,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestId,
    SequenceClosed,
    StepsFinished,
    TaskId,
    TimePassed,
)

Numbers = NDArray[np.int64]


@final
class CellDriver:
    """Unfolds requests, gives events to the scheduler and carries out its commands.

    models: for each model, by number, what gives its cells their types: the registry, with the prefix of its names.
    max_nodes: the most nodes of one request. sequences: the open sequences, whose chunks it runs.
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
    ) -> None:
        self._registry = registry
        self._models = models
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._max_nodes = max_nodes
        self.sequences = sequences
        self._in_flight: dict[RequestId, InFlight] = {}
        self._tasks: dict[TaskId, RunTask] = {}
        self._brought = Results()
        self._arrivals = Arrivals(registry.types, max_nodes, executor.write)
        self._num_known = 0
        self._results: list[StepsResult] = []
        self._settle: Callable[[Sequence[Settled]], None] = lambda _: None
        self.stats = DriverStats()
        self._counts = StepCounts(self.stats, scheduler.owners)
        self._record: Onlooker[[Sequence[Event], Sequence[Command]]] | None = None

    @property
    def observer(self) -> Callable[[StepSeen], None] | None:
        """Called with every finished step."""
        return self._counts.observer

    @observer.setter
    def observer(self, observer: Callable[[StepSeen], None] | None) -> None:
        self._counts.observer = observer

    @property
    def record(self) -> Callable[[Sequence[Event], Sequence[Command]], None] | None:
        """Called after each call of the scheduler, with its events and its commands."""
        return self._record

    @record.setter
    def record(self, record: Callable[[Sequence[Event], Sequence[Command]], None] | None) -> None:
        self._record = None if record is None else Onlooker(record, "what records events")

    def start(self, notify: Callable[[], None], settle: Callable[[Sequence[Settled]], None]) -> None:
        """See Driver.start. Chunks that fail while they wait are settled with `settle`, too."""
        self._settle = self.sequences.settle = settle
        self._executor.start(notify)

    @property
    def stop_tests(self) -> StopTests:
        """The stop tests of the loops in flight, for an executor that applies them between the steps of a task."""
        return self._brought.tests

    def await_materialise(self) -> None:
        """Call before example requests if `materialise` follows. Requests that came earlier may be in flight."""
        self._executor.await_materialise()

    def materialise(self) -> None:
        """Let the executor prepare every known cell. Nothing may be in flight."""
        self._executor.materialise(self._registry.num_sequence_inputs)

    @property
    def wants_requests(self) -> bool:
        """Whether fewer nodes are ready than one of the largest batches holds."""
        types = self._registry.types[: self._num_known]
        num_ready = sum(self._scheduler.num_ready(cell.type_id) for cell in types)
        return num_ready < max((cell.max_batch for cell in types), default=1)

    @property
    def templates(self) -> TemplateCache:
        """The templates: shapes of requests that need no unfolding."""
        return self._arrivals.templates

    @property
    def num_in_flight(self) -> int:
        """Number of requests in flight, with the chunks that wait for the one before them."""
        return len(self._in_flight) + self.sequences.num_waiting

    def next_wakeup_s(self) -> float | None:
        """The next deadline or end of an idle sequence, in engine seconds; None if there is none."""
        times = (self._scheduler.next_deadline_s, self.sequences.next_wakeup_s())
        return min((time_s for time_s in times if time_s is not None), default=None)

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
        """See Driver.poll."""
        self._results.extend(self._executor.poll())

    def advance(self, tickets: Sequence[Ticket]) -> None:
        """Make events of the polled results and of these requests; let the scheduler handle them, and obey it."""
        touched: dict[RequestId, InFlight] = {}
        events: list[Event] = [self._take_result(result, touched) for result in self._results]
        self._results.clear()
        for request in touched.values():
            self._resume(request, events)
        self._unfold([t for t in tickets if t.chunk is None or self.sequences.may_begin(t, t.chunk)], events)
        now_s = self._clock.now_s()
        self.sequences.expire(now_s)
        self._handle([*events, *self._following()] or [TimePassed(now_s)])

    def _handle(self, events: Sequence[Event]) -> None:
        """Give events to the scheduler and carry out its commands; repeat with the events that follow from these."""
        while events:
            events = self._following(self._carry_out(events))

    def _carry_out(self, events: Sequence[Event]) -> list[InFlight]:
        """Give events to the scheduler and carry out its commands. Returns requests for which a value was read."""
        begin = time.perf_counter()
        commands = self._scheduler.handle(*events)
        self.stats.scheduler_s += time.perf_counter() - begin
        if self._record is not None:
            self._record(events, commands)
        woken: list[InFlight] = []
        for kind, alike in groupby(commands, type):
            if kind is Admit:
                self._admit(cast(Iterator[Admit], alike))
            elif kind is Reply:
                self._reply([command.request for command in cast(Iterator[Reply], alike)])
            else:
                for command in alike:
                    self._carry_out_one(command, woken)
        self._arrivals.fill()
        return woken

    def _carry_out_one(self, command: Command, woken: list[InFlight]) -> None:
        match command:
            case RunTask():
                self.stats.tasks += 1
                self._tasks[command.task] = command
                self._arrivals.fill()
                self._executor.submit(command)
            case Reserve():
                self._executor.reserve(command)
            case Fail():
                request = self._leave(command.request)
                call_quietly(request.unfolding.close, "an unfold function that was closed")
                self._settle([(request.ticket, None, request.error or error_of(command))])
            case Read():
                request = self._in_flight[command.request]
                woken.append(request)
                try:
                    value = self._executor.read(command.table, command.row)
                except DeviceError as error:
                    request.error = error
                    return
                local = request.local(command.node)
                ends_loop = request.loop_at(command.node) is not None  # it is the result of a loop
                request.store(end_of_loop(local) if ends_loop else local, command.output, value)

    def _following(self, woken: Sequence[InFlight] = ()) -> list[Event]:
        """Resume requests that have the values they waited for, begin chunks, end sequences. Returns their events."""
        events: list[Event] = []
        for request in woken:
            if request.error is None:
                self._resume(request, events)
            elif (request_id := request.ticket.request_id) in self._in_flight:
                events.append(RequestFailed(request_id, self._clock.now_s(), str(request.error)))
        while due := self.sequences.take_due():
            self._unfold(due, events)
        events += [SequenceClosed(number, self._clock.now_s()) for number in self.sequences.take_closed()]
        return events

    # --- requests that come, and answers ---------------------------------------------------------------------------

    def _unfold(self, tickets: Sequence[Ticket], events: list[Event]) -> None:
        """Let requests arrive: from their template if they have one, otherwise by running their unfold function."""
        if not tickets:
            return
        begin = time.perf_counter()
        now_s = self._clock.now_s()
        drawn, sights = self._arrivals.draw(tickets)
        for ticket, given, sight in zip(tickets, self._arrivals.current(drawn), sights, strict=True):
            if (over := ticket.over) is not None:  # cancelled or late, perhaps while others were unfolded
                self._settle([(ticket, None, over)])
                continue
            unfolded = self._recorded(ticket, sight, events) if given is None else given[0]
            if unfolded is None:
                continue
            self._in_flight[ticket.request_id] = InFlight(ticket, unfolded, given)
            ticket.num_cells += unfolded.graph.num_nodes
            events.append(RequestArrived(
                ticket.request_id, unfolded.graph, now_s, ticket.deadline_s, unfolded.open, ticket.priority,
                ticket.model_id, None if ticket.chunk is None else ticket.chunk.sequence.sequence_id,
            ))  # fmt: skip
        self.stats.unfold_s += time.perf_counter() - begin

    def _recorded(self, ticket: Ticket, sight: Sight | None, events: list[Event]) -> Unfolding | None:
        """Run a request's unfold function to its first `yield` or its end. None if it raised: then it is answered."""
        types = self._models[ticket.model_id]
        before = None if ticket.chunk is None else ticket.chunk.sequence.state
        unfolding = Unfolding(ticket.model, types, ticket.request, self._max_nodes, before=before)
        try:
            unfolding.start()
        except RAISED_BY_USERS as error:  # the model's own code, or what it returned
            self._learn_types(events)
            self._settle([(ticket, None, blamed(error))])
            return None
        self._learn_types(events)
        self._arrivals.recorded(ticket, types, sight, unfolding)
        return unfolding

    def _learn_types(self, events: list[Event]) -> None:
        types = self._registry.types
        if len(types) > self._num_known:
            now_s = self._clock.now_s()
            events.extend(CellTypeAdded(cell, now_s) for cell in types[self._num_known :])
            self._num_known = len(types)

    def _admit(self, commands: Iterable[Admit]) -> None:
        """Note the node numbers of requests, and write their data there; `Arrivals.fill` writes that of templates."""
        entered: list[InFlight] = []
        drawn: list[tuple[Drawn, Admit]] = []
        num_nodes = 0
        for command in commands:
            request = self._in_flight[command.request]
            if not request.admitted:
                entered.append(request)
            num_loops = len(request.loops)
            graph = request.admit(command)
            if len(request.loops) > num_loops:
                self._brought.tests.enter(request.loops[num_loops:])
            num_nodes = max(num_nodes, command.base + command.num_nodes)
            if request.drawn is not None:
                drawn.append((request.drawn, command))
                continue
            for host, table in zip(graph.host_inputs, command.host_tables, strict=True):
                self._executor.write(table, host.rows(command.base - command.first_local), host.values)
        self._arrivals.admitted(drawn)
        self._brought.tables.fit(num_nodes)
        self._brought.enter(entered)

    def _reply(self, request_ids: Sequence[RequestId]) -> None:
        """All values that these requests need are computed: answer them together."""
        over = [self._leave(request_id) for request_id in request_ids]
        self._brought.gather(over)
        self._settle([self._result(request) for request in over])

    def _result(self, request: InFlight) -> Settled:
        ticket, unfolding = request.ticket, request.unfolding
        if ticket.chunk is not None:
            ticket.chunk.sequence.state = unfolding.after
        try:
            if request.error is not None:  # a value that it needs could not be read
                raise request.error
            result = unfolding.result(request.value, request.gathered.get)
        except RAISED_BY_USERS as error:  # the result may contain classes of the user, whose code runs
            if ticket.chunk is not None:  # the new state is kept already, but the caller gets an error
                self.sequences.close(ticket.chunk.sequence)
            return ticket, None, blamed(error)
        if unfolding.streams_result and ticket.on_value is not None:
            ticket.on_value(result)
        return ticket, result, None

    def _leave(self, request_id: RequestId) -> InFlight:
        request = self._in_flight.pop(request_id)
        if request.admitted:
            self._brought.leave(request)
        return request

    def cancel(self, request_id: RequestId) -> None:
        """Give up a request in flight, or a chunk that waits; otherwise do nothing."""
        if request_id in self._in_flight:
            self._handle([RequestCancelled(request_id, self._clock.now_s())])
        elif self.sequences.cancel(request_id):
            self._handle(self._following())

    def cancel_all(self) -> None:
        """Give up every request in flight and every chunk that waits."""
        self.sequences.cancel_all()
        self._handle([RequestCancelled(request_id, self._clock.now_s()) for request_id in self._in_flight])

    def tickets(self) -> Sequence[Ticket]:
        """Return the tickets of requests in flight and of chunks that wait."""
        return [*(request.ticket for request in self._in_flight.values()), *self.sequences.waiting]

    # --- steps that have run, and unfold functions that wait for them ----------------------------------------------

    def _take_result(self, result: StepsResult, touched: dict[RequestId, InFlight]) -> StepsFinished:
        """Store the values that steps brought to the host, and return the scheduler's event of these steps."""
        task = self._tasks[result.task]
        if result.end == task.num_steps:
            del self._tasks[result.task]
        now_s = self._clock.now_s()
        cell = self._registry.types[task.type_id]
        begin, end = task.begin_of(result.first), task.begin_of(result.end)
        slots = self._scheduler.slots(task.nodes[begin:end])
        self._counts.add(task, cell, result, now_s)
        self._brought.begin(slots, now_s - result.busy_s)
        for request in self._brought.take(cell, task, result, begin, slots):
            touched[request.ticket.request_id] = request
        stopped, failed = result.stopped, result.failed
        if stopped is None and task.may_stop[result.first : result.end].any():
            stopped, untested = self._brought.stopped(cell, task, result, begin, len(slots))
            failed += untested
        if stopped is not None:
            self._brought.loops_ended(task, begin, slots, stopped)
        return StepsFinished(result.task, result.first, result.end, now_s, stopped, failed, result.busy_s)

    def _resume(self, request: InFlight, events: list[Event]) -> None:
        """Continue an unfold function while it has the values that it waits for."""
        while request.unfolding.open and not request.waiting_for and request.ticket.request_id in self._in_flight:
            if not self._resume_once(request, events):
                return

    def _resume_once(self, request: InFlight, events: list[Event]) -> bool:
        """Run an unfold function to its next `yield` or its end; False if it raised."""
        begin, request_id, now_s = time.perf_counter(), request.ticket.request_id, self._clock.now_s()
        unfolding = request.unfolding
        assert isinstance(unfolding, Unfolding)  # a template never waits for values
        try:
            sent = unfolding.resume(request.value)
        except RAISED_BY_USERS as error:  # the model's own code, or what it yielded
            request.error = blamed(error)
            self._learn_types(events)
            events.append(RequestFailed(request_id, now_s, str(request.error)))
            return False
        finally:
            self.stats.unfold_s += time.perf_counter() - begin
        if request.ticket.on_value is not None:
            request.ticket.on_value(sent)
        self._learn_types(events)
        request.graphs.append(unfolding.graph)
        request.waiting_for = {key for key in unfolding.awaited if key not in request.values}
        request.ticket.num_cells += unfolding.graph.num_nodes
        events.append(GraphExtended(request_id, unfolding.graph, now_s, unfolding.open, unfolding.take_dropped()))
        return True
