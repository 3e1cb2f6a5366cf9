"""The scheduler: events in, commands out. It starts no thread, reads no clock and knows no tensor.

    for command in scheduler.handle(event, ...):
        ...carry it out...

A request's life: arrived -> (cells submitted, finished, graph extended)* -> Reply or Fail, exactly one of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import cast, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.errors import InvariantError
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.spec import CellType
from batchmaker.graph.work import work_of
from batchmaker.policies.ageing import PATIENCE, Ageing
from batchmaker.policies.base import CellPolicy
from batchmaker.scheduler.batching import Batcher
from batchmaker.scheduler.books import Books, RequestBook, TypeBook
from batchmaker.scheduler.commands import Admit, Command, Fail, FailureKind, Reply
from batchmaker.scheduler.completion import Completion
from batchmaker.scheduler.deadlines import Deadlines
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
    WorkerId,
)
from batchmaker.scheduler.invariants import check_books
from batchmaker.scheduler.ranked import RankedQueue
from batchmaker.scheduler.step_times import StepTimes
from batchmaker.scheduler.urgency import Urgency
from batchmaker.scheduler.view import View


@final
class Scheduler(View):
    """Cellular scheduling of any number of requests on any number of workers.

    policy: which cell type runs next. num_workers: one per device. run_ahead: a worker gets its next task when at most
    this many of its steps have not finished: 0 schedules when the worker is idle, 1 while it runs its last step. Where
    tasks are bounded by time, and told of as a whole, so many tasks: 1 schedules while the worker runs one.
    take_turns: the type that a worker has just run counts as running when its next task is chosen, as it would with
    run-ahead. Without either, a type of low priority starves for as long as one of high priority is ready.
    loops_ahead: where tasks are bounded by time, one may hold several steps of a loop that a value may end; those after
    the one at which it has ended do not run. Not for policies that watch requests, which count what is submitted.
    give_up_late: requests fail at their deadlines; without it deadlines are only for policies to look at. plan_rows:
    False where nothing is computed: steps then say which nodes run together and not where values lie, and no table is
    ever reserved. Who runs when is the same. patience: see Ageing.
    """

    def __init__(
        self,
        policy: CellPolicy,
        *,
        num_workers: int = 1,
        run_ahead: int = 0,
        take_turns: bool = False,
        loops_ahead: bool = False,
        give_up_late: bool = True,
        plan_rows: bool = True,
        patience: int = PATIENCE,
    ) -> None:
        super().__init__(policy, Books(policy, num_workers, plan_rows=plan_rows))
        self._run_ahead = run_ahead
        self._give_up_late = give_up_late
        self._ageing = Ageing(patience)
        self._urgency = Urgency(self._books) if policy.urgent_first else None
        self._batcher = Batcher(
            self._books, share_workers=num_workers > 1, max_steps=policy.max_steps, budget_s=policy.budget_s,
            loops_ahead=loops_ahead and policy.budget_s < math.inf and not self._books.observed,
            ahead_alone=policy.ahead_alone, patience=patience if policy.one_depth else None,
        )  # fmt: skip
        self._completion = Completion(self._books)
        self._deadlines: Deadlines[RequestId] = Deadlines()
        self._next_task = 0
        self._take_turns = take_turns

    # --- what a driver calls -------------------------------------------------------------------------------

    def handle(self, *events: Event) -> list[Command]:
        """Take events in order, then give idle workers work. Returns commands in the order to carry them out."""
        commands: list[Command] = []
        arrivals: list[RequestArrived] = []
        for kind, alike in groupby(events, type):
            if kind is RequestArrived:
                arrivals.extend(cast(Iterator[RequestArrived], alike))
                self._expire(arrivals[-1].at_s, commands)
                continue
            for event in alike:
                self._expire(event.at_s, commands)
                self._arrived(arrivals, commands)
                self._handle_one(event, commands)
        self._arrived(arrivals, commands)
        self._expire(self._now_s, commands)  # who arrived too late
        if self._urgency is not None:
            self._urgency.look(self._now_s)
        self._schedule(commands)
        return commands

    def owners(self, nodes: NDArray[np.int64]) -> list[RequestId | None]:
        """Return the request that each node belongs to, None where it is no longer in flight."""
        books = self._books
        slots = books.arena.request[nodes].tolist()
        found = (books.by_slot.get(slot) for slot in slots)
        return [book.request if book is not None and book.alive else None for book in found]

    def slots(self, nodes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slot of the request that each node belongs to (see Admit)."""
        return self._books.arena.request[nodes]

    @property
    def next_deadline_s(self) -> float | None:
        """When the driver should send TimePassed at the latest."""
        return self._deadlines.next_s

    # --- what is left ----------------------------------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        """Requests in flight, those that ended while a worker still computes for them included."""
        return len(self._books.by_slot)

    @property
    def num_tasks(self) -> int:
        """Tasks submitted and not finished."""
        return len(self._books.tasks)

    @property
    def num_rows(self) -> int:
        """Rows of state tables in use, lanes not counted."""
        return sum(pool.num_used for pool in self._books.tables.pools)

    def check_invariants(self) -> None:
        """Raise InvariantError unless the books balance. Slow: for tests and after incidents."""
        check_books(self._books)

    def _handle_one(self, event: Event, commands: list[Command]) -> None:
        match event:
            case StepsFinished():
                self._steps_finished(event, commands)
            case GraphExtended():
                self._extended(event, commands)
            case RequestCancelled():
                self._end(event.request, FailureKind.CANCELLED, "cancelled by the caller", commands)
            case RequestFailed():
                self._end(event.request, FailureKind.UNFOLD, event.reason, commands)
            case SequenceClosed():
                self._books.shelves.close(event.sequence)
            case CellTypeAdded():
                self._add_type(event.cell)
            case TimePassed():
                pass

    # --- events ----------------------------------------------------------------------------------------------

    def _add_type(self, cell: CellType) -> None:
        if cell.type_id != len(self._books.types):
            raise InvariantError(f"cell types are numbered in order; got {cell.type_id} after {len(self._books.types)}")
        pool = self._books.admission.add_type(cell)
        self._cells.append(cell)
        value_ports = self._books.admission.value_ports[cell.type_id]
        queue, times = RankedQueue(self._books.priorities, cell.type_id, self._ready), StepTimes(cell.max_batch)
        self._books.types.append(TypeBook(cell, self._books.tables.pools[pool], value_ports, queue, times))
        self._books.add_type()

    def _watch(self, event: RequestArrived, book: RequestBook) -> None:
        """Let those know of a request who look at each."""
        books = self._books
        if books.watched is not None:
            books.watched.enter(book.slot, event.at_s, event.deadline_s, event.model, is_open=event.open)
        self._more_work(book, event.graph)
        if self._urgency is not None:
            self._urgency.arrived(event.request, event.graph)

    def _more_work(self, book: RequestBook, graph: CellGraph) -> None:
        """Let those know who count on what requests have to compute."""
        if self._books.watched is not None:
            self._books.watched.add_work(book.slot, work_of(graph))
        if self._urgency is not None:
            self._urgency.more_work(book, graph)

    def _arrived(self, events: list[RequestArrived], commands: list[Command]) -> None:
        """Take requests that arrived together. Empties the list."""
        if not events:
            return
        books = self._books
        opened = books.open(events)
        if books.watched is not None or self._urgency is not None:
            for event, book in zip(events, opened, strict=True):
                self._watch(event, book)
        if self._give_up_late:
            for event in events:
                if event.deadline_s is not None:
                    self._deadlines.add(event.deadline_s, event.request, books.requests, len(books.requests))
        if books.watched is None:
            self._begin([event.graph for event in events], opened, commands)
        else:
            for event, book in zip(events, opened, strict=True):
                book.waiting = True
                books.line.join(book.slot, event.graph, event.priority)
        events.clear()

    def _begin(self, graphs: list[CellGraph], opened: list[RequestBook], commands: list[Command]) -> None:
        self._take_graphs(graphs, opened, commands)
        self._reply_if_done(opened, commands)

    def _extended(self, event: GraphExtended, commands: list[Command]) -> None:
        book = self._books.requests.get(event.request)
        if book is None or not book.alive:
            return
        if book.waiting:
            book.early += (event,)
            return
        book.open = event.open
        if self._books.watched is not None:
            self._books.watched.open[book.slot] = event.open
        self._more_work(book, event.graph)
        self._take_graphs([event.graph], [book], commands)
        self._completion.drop_handles(book, event.dropped)
        if not event.open:
            self._completion.drop_handles(book, [(e.first_local, e.num_nodes) for e in book.extents])
        self._reply_if_done((book,), commands)

    def _take_graphs(self, graphs: Sequence[CellGraph], owners: Sequence[RequestBook], commands: list[Command]) -> None:
        """Admit the graphs of these requests; several only if all of them are first ones."""
        books = self._books
        for graph, book in zip(graphs, owners, strict=True):
            for run in graph.runs:
                if books.types[run.type_id].num_sequence_inputs != len(run.sequences):
                    books.types[run.type_id].learn_form(len(run.sequences))
                if run.open_ended:
                    book.may_own_rows = True  # where it stops early, what feeds the rest is never read
        slots = [book.slot for book in owners]
        if any(graph.first for graph in graphs):
            kept_bases = [0 if book.shelf is None else book.shelf.extent.base for book in owners]
            earlier = [
                book.known_numbers() if graph.first else None for graph, book in zip(graphs, owners, strict=True)
            ]
            admitted = books.admission.admit(graphs, slots, earlier, kept_bases)
        else:
            kept_bases = [0] * len(graphs)
            admitted = books.admission.admit(graphs, slots)
        commands.extend(admitted.reserves)
        books.left[slots] += admitted.units
        for graph, book, extent, tables, kept_base in zip(
            graphs, owners, admitted.extents, admitted.host_tables, kept_bases, strict=True
        ):
            book.extents += (extent,)
            if books.depths is not None:
                books.depths.admit(book.slot, graph, book.known_extents)
            if book.open:
                books.arena.held[extent.base : extent.base + extent.num_nodes] = 1
            commands.append(
                Admit(book.request, book.slot, graph.first, extent.base, extent.num_nodes, tables, kept_base)
            )
            if graph.kept is not None:
                self._completion.will_keep(book, graph.kept)
            if graph.first:
                commands.extend(self._completion.fetch_late(book, graph))
        for producer, consumer in admitted.waiting_sources:
            books.attached[owners[0].request].edges[producer].append(consumer)
        if books.frontiers is not None:
            books.frontiers.admit(admitted.extents, admitted.waiting_sources)
        self._completion.release(admitted.ready[0] if len(admitted.ready) == 1 else np.concatenate(admitted.ready))

    def _steps_finished(self, event: StepsFinished, commands: list[Command]) -> None:
        done = self._completion.steps_finished(event)
        commands.extend(done.reads)
        if event.busy_s > 0:
            self._books.types[done.type_id].step_times.add(done.num_steps, done.num_rows, event.busy_s)
            step_s = event.busy_s / done.num_steps
            self._policy.step_finished(done.type_id, done.num_rows // done.num_steps, step_s)
            if self._urgency is not None:
                self._urgency.step_finished(done.type_id, step_s)
        for request, reason in done.failed:
            self._end(request, FailureKind.CELL, reason, commands)
        self._reply_if_done(done.finished, commands)
        self._completion.bury()

    # --- endings ---------------------------------------------------------------------------------------------

    def _reply_if_done(self, owners: Sequence[RequestBook], commands: list[Command]) -> None:
        """Answer those of these requests that are not over and have nothing left."""
        books = self._books
        left = books.left[[book.slot for book in owners]].tolist()
        done = [book for book, count in zip(owners, left, strict=True) if count <= 0 and book.alive and not book.open]
        for book in done:
            book.alive = False
            del books.requests[book.request]
            if books.watched is not None:
                self._policy.request_finished(self, book.slot)
            books.leave(book.slot)
        commands += self._completion.keep(done)
        self._completion.leave(done)
        commands += [Reply(book.request) for book in done]

    def _end(self, request: RequestId, kind: FailureKind, reason: str, commands: list[Command]) -> None:
        book = self._books.requests.get(request)
        if book is None:
            return
        book.alive = False
        del self._books.requests[request]
        self._books.leave(book.slot)
        if book.waiting:
            self._books.line.leave(book.slot)
        self._completion.kill(book)
        commands.append(Fail(request, kind, reason))

    def _expire(self, at_s: float, commands: list[Command]) -> None:
        """It is that late: requests that had to be done by then fail."""
        self._now_s = at_s
        for deadline_s, request in self._deadlines.passed(at_s):
            book = self._books.requests.get(request)
            if book is not None:
                late = f"not done by its deadline, {deadline_s - book.arrived_s:.3f} s after it arrived"
                self._end(request, FailureKind.DEADLINE, late, commands)

    # --- scheduling ------------------------------------------------------------------------------------------

    def _schedule(self, commands: list[Command]) -> None:
        """Call Schedule (Algorithm 1) for every worker that is idle, or about to be, until nothing is ready.

        A worker is not run ahead of while its values decide what comes next: those requests would find their batch gone
        and alternate with it for ever.
        """
        for number in range(len(self._books.worker_steps)):
            worker = WorkerId(number)
            while self._may_submit(worker):
                began = self._admit(commands)
                if not self._submit_task(worker, commands) and not began:  # who began may have had nothing to compute
                    break

    def _admit(self, commands: list[Command]) -> bool:
        """Let the policy decide which waiting requests begin; return whether any has."""
        line, watched = self._books.line, self._books.watched
        if watched is None or not len(line):
            return False
        admission = self._policy.admit(self)
        for slot in admission.refuse:
            book = self._books.by_slot[slot]
            late = (
                "its deadline" if book.deadline_s is None else f"its deadline in {book.deadline_s - self._now_s:.3f} s"
            )
            self._end(book.request, FailureKind.REFUSED, f"refused: {late} cannot be met", commands)
        begin = admission.begin if len(admission.begin) or len(watched.in_flight) else line.first(1).tolist()
        if not len(begin):
            return False
        books = [self._books.by_slot[slot] for slot in begin]
        graphs = [line.leave(book.slot) for book in books]
        for book in books:
            book.waiting = False
            watched.begin(book.slot, self._now_s)
        self._begin(graphs, books, commands)
        for event in [event for book in books for event in book.early]:
            self._extended(event, commands)
        return True

    def _may_submit(self, worker: WorkerId) -> bool:
        steps = self._books.worker_steps[worker]
        if steps == 0 or not self._run_ahead or self._books.worker_steering[worker]:
            return steps == 0
        if self._policy.budget_s < math.inf:
            return sum(task.worker == worker for task in self._books.tasks.values()) <= self._run_ahead
        return steps <= self._run_ahead

    def _submit_task(self, worker: WorkerId, commands: list[Command]) -> bool:
        ranked = self._policy.rank(self)
        urgent = ranked if self._urgency is None else self._urgency.order(ranked)
        for type_id in self._ageing.order(urgent):
            formed = self._batcher.form_task(TaskId(self._next_task), type_id, worker)
            if formed is None:
                continue
            self._ageing.ran(type_id, ranked)
            if self._urgency is not None:
                self._urgency.task_submitted()
            self._next_task += 1
            self._completion.started(formed.book)
            commands.extend(formed.reserves)
            commands.append(formed.run)
            if self._take_turns:
                self._just_run = type_id
            return True
        return False
