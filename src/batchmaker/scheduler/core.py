"""The scheduler: events in, commands out. It starts no thread, reads no clock and knows no tensor.

    for command in scheduler.handle(event, ...): ...carry it out...

A request arrives; its steps are submitted and finish; its graph may be extended; it ends with one Reply or one Fail.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import cast, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.errors import InvariantError
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.spec import CellType
from batchmaker.policies.ageing import AGED_EVERY, PATIENCE, Ageing
from batchmaker.policies.base import CellPolicy
from batchmaker.scheduler.arrive import arrive
from batchmaker.scheduler.batching import TASKS_WORTH, Batcher
from batchmaker.scheduler.commands import Admit, Command, Fail, FailureKind, Grow, Reply, always
from batchmaker.scheduler.completion import Completion
from batchmaker.scheduler.events import (
    CellTypeAdded,
    Event,
    GraphExtended,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestId,
    SequenceClosed,
    SequenceId,
    StepsFinished,
    TaskId,
    TimePassed,
    WorkerId,
)
from batchmaker.scheduler.layout import (
    BASE,
    ID,
    NOWHERE,
    NUM_NODES,
    OPEN,
    STEERING_ON,
    STEPS_ON,
    TASKS_ON,
)
from batchmaker.scheduler.leave import end_those_done
from batchmaker.scheduler.memory import fitting, largest_holder
from batchmaker.scheduler.priorities import usual_rank
from batchmaker.scheduler.rows import NoMemoryError
from batchmaker.scheduler.state import SchedulerState
from batchmaker.scheduler.urgency import Urgency
from batchmaker.scheduler.view import View

Slots = NDArray[np.int64]


@final
class Scheduler(View):
    """Cellular batching of any number of requests on any number of workers.

    - policy: decides which cell type runs next. num_workers: one per device. patience: see Ageing.
    - run_ahead: a worker gets its next task while at most this many of its steps are unfinished. 0: when it is idle; 1:
      while it runs its last step. If the policy has a budget of time, tasks are counted instead of steps.
    - take_turns: the type that has just run counts as running when the next task is chosen, as it would with run-ahead.
      With neither of the two, a type of low priority starves while one of high priority is ready.
    - loops_ahead: with a budget of time, a task may hold several steps of a loop that a value may end. Steps after the
      end of the loop do not run. Ignored if the policy reads depths: they count submitted steps.
    - task_s: seconds that a task costs beside its steps; see CellPolicy (`weighs_tasks`).
    - give_up_late: requests fail at their deadlines. Otherwise only policies look at deadlines.
    - grow: whether there is memory for tables to grow. If not, the request that wants or has most of it ends.
    - plan_rows: False if nothing is computed: steps say which nodes run together, not where values are.
    - aged_every: one turn of so many goes to who has waited longest, whatever its priority, in the waiting line, among
      the ready nodes of a type, and among types where priorities order them; None: priorities are strict.
    """

    def __init__(
        self,
        policy: CellPolicy,
        *,
        num_workers: int = 1,
        run_ahead: int = 0,
        take_turns: bool = False,
        loops_ahead: bool = False,
        task_s: float = 0.0,
        give_up_late: bool = True,
        plan_rows: bool = True,
        patience: int = PATIENCE,
        grow: Grow = always,
        aged_every: int | None = AGED_EVERY,
    ) -> None:
        follows = policy.node_by_node and policy.weighs_tasks and task_s > 0 and num_workers == 1
        state = SchedulerState(
            policy, num_workers, plan_rows=plan_rows, own_type_follows=follows, grow=grow, aged_every=aged_every
        )
        super().__init__(policy, state)
        self._run_ahead = run_ahead
        self._give_up_late = give_up_late
        self._ageing = Ageing(patience)
        self._urgency = Urgency(state) if policy.urgent_first else None
        self._batcher = Batcher(state)
        weighs = policy.weighs_tasks and task_s < math.inf
        state.arena.rules[:] = (
            plan_rows, follows, loops_ahead and policy.budget_s < math.inf and not policy.needs_depth, num_workers > 1,
            1 if policy.one_depth else policy.max_steps, weighs, patience if policy.one_depth else NOWHERE,
            aged_every or 0,
        )  # fmt: skip
        state.arena.budget_s[0, 0] = min(policy.budget_s, TASKS_WORTH * task_s) if weighs else policy.budget_s
        self._completion = Completion(self._state)
        self._next_task = 0
        self._take_turns = take_turns

    # --- interface for drivers -----------------------------------------------------------------------------

    @property
    def state(self) -> SchedulerState:
        """All that it knows. Simulations play on its tables without it."""
        return self._state

    def handle(self, *events: Event) -> list[Command]:
        """Take events in order, then give work to idle workers. Returns commands; carry them out in their order."""
        commands: list[Command] = []
        arrivals: list[RequestArrived] = []
        self._state.fit_sequence()
        for kind, alike in groupby(events, type):
            if kind is RequestArrived:
                arrivals.extend(cast(Iterator[RequestArrived], alike))
                self._expire(arrivals[-1].at_s, commands)
                continue
            if kind is GraphExtended:
                extensions = list(cast(Iterator[GraphExtended], alike))
                self._expire(extensions[-1].at_s, commands)
                self._arrived(arrivals, commands)
                self._extended(extensions, commands)
                continue
            for event in alike:
                self._expire(event.at_s, commands)
                self._arrived(arrivals, commands)
                self._handle_one(event, commands)
        self._arrived(arrivals, commands)
        self._expire(self._now_s, commands)  # requests that arrived after their deadline
        if self._urgency is not None:
            self._urgency.look(self._now_s)
        self._schedule(commands)
        return commands

    def decide(self, answered: Sequence[SequenceId], unanswered: Sequence[SequenceId]) -> None:
        """Say which of the sequences whose requests had a Reply got their results; the others keep what they kept.

        Call it before the next `handle`. A sequence of which nothing is said counts as answered with its next request.
        """
        self._state.store.decide(answered, unanswered)

    def _handle_one(self, event: Event, commands: list[Command]) -> None:
        match event:
            case StepsFinished():
                self._steps_finished(event, commands)
            case RequestCancelled():
                self._end_request(event.request, FailureKind.CANCELLED, "cancelled by the caller", commands)
            case RequestFailed():
                self._end_request(event.request, FailureKind.UNFOLD, event.reason, commands)
            case SequenceClosed():
                self._state.store.close(event.sequence)
            case CellTypeAdded():
                self._add_type(event.cell)
            case TimePassed():
                pass

    # --- events ----------------------------------------------------------------------------------------------

    def _add_type(self, cell: CellType) -> None:
        if cell.type_id != len(self._state.types):
            raise InvariantError(f"cell types are numbered in order; got {cell.type_id} after {len(self._state.types)}")
        self._state.add_type(cell)
        self._cells.append(cell)

    def _arrived(self, events: list[RequestArrived], commands: list[Command]) -> None:
        """Take requests that arrived together. Empties the list."""
        if not events:
            return
        state = self._state
        if state.watched is not None:
            state.watched.note_kinds(events)
        begins = state.watched is None or (not len(state.line) and self._policy.begins_on_arrival(self))
        placed = self._arrive(events, commands) if begins else None
        slots = state.open(events) if placed is None else placed
        if state.watched is not None:
            state.watched.arrived(slots, events)
        if self._urgency is not None:
            for event, slot in zip(events, slots, strict=True):
                self._urgency.arrived(event.request, event.graph)
                self._urgency.more_work(slot, event.graph)
        if self._give_up_late:
            for event in events:
                if event.deadline_s is not None:
                    self._deadlines.add(event.deadline_s, event.request, state.requests, len(state.requests))
        if placed is not None:
            if state.watched is not None:
                state.watched.begin(slots, self._now_s)
        elif begins:
            self._begin([event.graph for event in events], slots, commands)
        else:
            waiting = zip(slots, events, strict=True)
            state.line.join_all([(slot, event.graph, event.priority) for slot, event in waiting])
        events.clear()

    def _arrive(self, events: Sequence[RequestArrived], commands: list[Command]) -> list[int] | None:
        """Let requests begin in one call if all their graphs are known; see `arrive`. Returns their slots.

        Otherwise None, and nothing has changed.
        """
        state = self._state
        if self._urgency is not None or state.depths is not None:
            return None
        forms = state.admission.copies.forms_of(events)
        if forms is None:
            return None
        ids = [event.request for event in events]
        state.check_new(ids)
        placed = arrive(
            state.arena.tables, state.admission.copies.tables, np.array(ids, np.int64),
            np.array([usual_rank(event.priority) if event.priority else 0 for event in events], np.int64),
            np.array([form.number for form in forms], np.int64),
        )  # fmt: skip
        if not placed.shape[1]:
            return None
        slots: list[int] = placed[0].tolist()
        state.enter(ids, slots, events)
        if state.frontiers is not None and state.frontiers.kept:
            state.frontiers.admit(np.stack((placed[1], [event.graph.num_nodes for event in events]), axis=1), ())
        commands += [
            Admit(event.request, slot, 0, base, event.graph.num_nodes, form.host_tables)
            for event, slot, base, form in zip(events, slots, placed[1].tolist(), forms, strict=True)
        ]
        return slots

    def _begin(self, graphs: Sequence[CellGraph], slots: Sequence[int], commands: list[Command]) -> None:
        if self._state.watched is not None:
            self._state.watched.begin(slots, self._now_s)
        graphs, slots, too_large = fitting(self._state, graphs, slots, commands)
        for slot, reason in too_large:
            self._end(slot, FailureKind.MEMORY, reason, commands)
        if slots:
            self._take_graphs(graphs, slots, commands)
            self._reply_if_done(np.array(slots, np.int64), commands)

    def _extended(self, events: Sequence[GraphExtended], commands: list[Command]) -> None:
        """Take what unfold functions have added since they went on; the graphs of different requests together."""
        state, together = self._state, dict[int, GraphExtended]()  # by slot
        for event in events:
            slot = state.requests.get(event.request)
            if slot is None:
                continue
            if slot in state.line:
                state.early.setdefault(slot, []).append(event)
                continue
            if slot in together:  # its graph may refer to numbers that the one before gets first
                self._extend(together, commands)
                together.clear()
                if not state.arena.is_alive(slot):
                    continue
            together[slot] = event
        if together:
            self._extend(together, commands)

    def _extend(self, together: Mapping[int, GraphExtended], commands: list[Command]) -> None:
        """Take one graph of each of these requests, by slot, which have begun and are alive."""
        arena = self._state.arena
        for slot, event in together.items():
            arena.requests[OPEN, slot] = event.open
            if self._state.watched is not None:
                self._state.watched.extended(slot, event.graph, is_open=event.open)
            if self._urgency is not None:
                self._urgency.more_work(slot, event.graph)
        graphs, slots, too_large = fitting(
            self._state, [event.graph for event in together.values()], list(together), commands
        )
        for slot, reason in too_large:
            self._end(slot, FailureKind.MEMORY, reason, commands)
        if slots:
            self._take_graphs(graphs, slots, commands)
        self._completion.drop_handles([(slot, *nodes) for slot in slots for nodes in together[slot].dropped])
        self._completion.drop_all([slot for slot in slots if not arena.requests[OPEN, slot]])
        self._reply_if_done(np.array(slots, np.int64), commands)

    def _take_graphs(self, graphs: Sequence[CellGraph], slots: Sequence[int], commands: list[Command]) -> None:
        """Admit one graph of each of these requests."""
        state, arena = self._state, self._state.arena
        for graph in {id(graph): graph for graph in graphs}.values():
            for run in graph.runs:
                state.learn_form(run.type_id, len(run.sequences))
        kept_bases = [0] * len(graphs)
        if any(graph.first for graph in graphs):
            if state.chunks:
                kept_bases = [
                    0 if (chunk := state.chunks.get(slot)) is None or chunk.stored is None else chunk.stored.extent.base
                    for slot in slots
                ]
            admitted = state.admission.admit(
                graphs, slots, lambda i: state.known_numbers(slots[i]) if graphs[i].first else None, kept_bases
            )
        else:
            admitted = state.admission.admit(graphs, slots)
        commands.extend(admitted.reserves)
        bases, waits = admitted.extents[BASE].tolist(), (arena.requests[OPEN, slots] > 0).tolist()
        ids = arena.requests[ID, slots].tolist()
        for graph, slot, base, request, is_open, tables, kept_base in zip(
            graphs, slots, bases, ids, waits, admitted.host_tables, kept_bases, strict=True
        ):
            if slot in state.numbers:
                state.known_numbers(slot)
            if state.depths is not None:
                state.depths.admit(slot, graph, state.known_extents(slot))
            if is_open:
                arena.held[base : base + graph.num_nodes] = 1
            commands.append(Admit(request, slot, graph.first, base, graph.num_nodes, tables, kept_base))
            if graph.first and graph.known_fetches_earlier is not False and graph.fetches_earlier:
                commands.extend(self._completion.fetch_late(slot, graph))
        keeping = [(slot, graph.kept) for slot, graph in zip(slots, graphs, strict=True) if graph.kept is not None]
        if keeping:
            self._completion.will_keep(*zip(*keeping, strict=True))
        for producer, consumer in admitted.waiting_sources:
            state.attached[int(arena.request[consumer])].edges[producer].append(consumer)
        if state.frontiers is not None:
            state.frontiers.admit(admitted.extents[[BASE, NUM_NODES]].T, admitted.waiting_sources)
        self._completion.release(admitted.ready[0] if len(admitted.ready) == 1 else np.concatenate(admitted.ready))

    def _steps_finished(self, event: StepsFinished, commands: list[Command]) -> None:
        done = self._completion.steps_finished(event)
        commands.extend(done.reads)
        if event.busy_s > 0:
            step_s = event.busy_s / done.num_steps
            self._policy.step_finished(done.type_id, done.num_rows // done.num_steps, step_s)
            if self._urgency is not None:
                self._urgency.step_finished(done.type_id, step_s)
        for request, reason in done.failed:
            self._end_request(request, FailureKind.CELL, reason, commands)
        if done.answered:
            self._answered(done.over, done.ids, commands)
        else:
            self._reply_if_done(done.over, commands)
        self._completion.bury()

    # --- endings ---------------------------------------------------------------------------------------------

    def _reply_if_done(self, slots: Slots, commands: list[Command]) -> None:
        """Answer those of these requests that are alive, not open, and have no work left."""
        state = self._state
        done = end_those_done(state.arena.requests, slots)
        if len(done):
            if state.chunks:
                commands += self._completion.keep(done)
            ids = state.arena.requests[ID, done].tolist()
            self._completion.leave(done)
            self._answered(done, ids, commands)

    def _answered(self, slots: Slots, ids: Sequence[RequestId], commands: list[Command]) -> None:
        """Reply to requests that are ended. Their numbers are given back, or they are dying."""
        if not ids:
            return
        state = self._state
        for request in ids:
            del state.requests[request]
        if state.observed:
            if state.watched is not None:
                self._policy.requests_finished(self, slots.tolist())
            state.leave(slots.tolist())
        self._completion.forgotten(slots)
        commands += [Reply(request) for request in ids]

    def _end_request(self, request: RequestId, kind: FailureKind, reason: str, commands: list[Command]) -> None:
        slot = self._state.requests.get(request)
        if slot is not None:
            self._end(slot, kind, reason, commands)

    def _end(self, slot: int, kind: FailureKind, reason: str, commands: list[Command]) -> None:
        """End a living request with an error."""
        state, request = self._state, self._state.id_of(slot)
        del state.requests[request]
        state.leave((slot,))
        if slot in state.line:
            state.line.leave(slot)
        self._completion.kill(slot)
        commands.append(Fail(request, kind, reason))

    def _expire(self, at_s: float, commands: list[Command]) -> None:
        """Set the time, and fail the requests whose deadlines have passed."""
        self._now_s = at_s
        for deadline_s, request in self._deadlines.passed(at_s):
            slot = self._state.requests.get(request)
            if slot is not None:
                late = f"not done by its deadline, {deadline_s - self._state.times_s[slot][0]:.3f} s after it arrived"
                self._end(slot, FailureKind.DEADLINE, late, commands)

    # --- scheduling ------------------------------------------------------------------------------------------

    def _schedule(self, commands: list[Command]) -> None:
        """Call Schedule (Algorithm 1) for every worker that is idle or nearly idle, until no node is ready.

        The scheduler does not run ahead of a worker while values of its steps decide which nodes come next: the
        requests of these steps would miss the next batch, and two groups of requests would alternate for ever in small
        batches.
        """
        for number in range(self._state.num_workers):
            worker = WorkerId(number)
            while self._may_submit(worker):
                began = self._admit(commands)
                try:
                    submitted = self._submit_task(worker, commands)
                except NoMemoryError as error:
                    if self._free_memory(error, commands):
                        continue
                    break
                if submitted or began:  # a request may begin with nothing to compute
                    continue
                if not self._begin_for_idle(worker, commands):
                    break

    def _free_memory(self, error: NoMemoryError, commands: list[Command]) -> bool:
        """End the request that has most of what there is no more memory for. Returns whether to look for tasks again.

        Otherwise its rows come back when the steps that run now have finished.
        """
        slot = largest_holder(self._state, error.wanted.tables)
        if slot is not None:
            self._end(slot, FailureKind.MEMORY, str(error), commands)
        return slot is not None and not self._state.tasks

    def _admit(self, commands: list[Command]) -> bool:
        """Let the policy decide which waiting requests begin; return whether one begins."""
        line = self._state.line
        if not len(line):
            return False
        admission = self._policy.admit(self)
        for slot in admission.refuse:
            deadline_s = self._state.deadline_s(slot)
            due = "" if deadline_s is None else f" in {deadline_s - self._now_s:.3f} s"
            self._end(slot, FailureKind.REFUSED, f"refused: its deadline{due} cannot be met", commands)
        begin = admission.begin if len(admission.begin) or len(self.requests.in_flight) else line.first(1).tolist()
        return self._begin_waiting(begin, commands)

    def _begin_for_idle(self, worker: WorkerId, commands: list[Command]) -> bool:
        """Let the first in line begin if one of several workers would be idle otherwise, and the policy wants that.

        Returns whether it does.
        """
        state = self._state
        idle = state.num_workers > 1 and state.arena.workers[STEPS_ON, worker] == 0
        wanted = idle and self._policy.fills_workers
        return wanted and self._begin_waiting(state.line.first(1).tolist(), commands)

    def _begin_waiting(self, begin: Sequence[int], commands: list[Command]) -> bool:
        """Let these waiting requests begin; return whether there are any."""
        if not len(begin):
            return False
        state = self._state
        self._begin(state.line.begin(begin), begin, commands)
        self._extended([event for slot in begin for event in state.early.pop(slot, ())], commands)
        return True

    def _may_submit(self, worker: WorkerId) -> bool:
        workers = self._state.arena.workers
        is_idle = not workers[STEPS_ON, worker]
        if is_idle or not self._run_ahead or workers[STEERING_ON, worker]:
            return is_idle
        counted = TASKS_ON if self._policy.budget_s < math.inf else STEPS_ON
        return bool(workers[counted, worker] <= self._run_ahead)

    def _submit_task(self, worker: WorkerId, commands: list[Command]) -> bool:
        ranked = self._policy.rank(self)
        urgent, by_age = (ranked, False) if self._urgency is None else self._urgency.order(ranked, worker)
        for type_id in self._ageing.order(urgent):
            formed = self._batcher.form_task(TaskId(self._next_task), type_id, worker, by_age=by_age)
            if formed is None:
                continue
            self._ageing.ran(type_id, ranked)
            if self._urgency is not None:
                self._urgency.task_submitted()
            self._next_task += 1
            self._state.tasks[formed.run.task] = formed.entry
            commands.extend(formed.reserves)
            commands.append(formed.run)
            if self._take_turns:
                self._just_run = type_id
            return True
        return False
