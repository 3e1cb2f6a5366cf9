"""The scheduler: events in, commands out. It starts no thread, reads no clock and knows no tensor.

    for command in scheduler.handle(event, ...): ...carry it out...

A request arrives; its steps are submitted and finish; its graph may be extended; it ends with one Reply or one Fail.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import compress, groupby
from typing import Final, cast, final

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.core.batching import TASKS_WORTH, Batcher
from batchmaker.core.commands import (
    Admit,
    Collect,
    Command,
    Decided,
    Fail,
    FailureKind,
    Grow,
    NodesBegun,
    Reply,
    StoredRow,
    always,
)
from batchmaker.core.completion import Completion
from batchmaker.core.copies import GraphForm
from batchmaker.core.events import (
    CellTypeAdded,
    Event,
    GraphExtended,
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
    WorkerId,
)
from batchmaker.core.frames import Frames, Outcome
from batchmaker.core.layout import (
    ASKS_POLICY,
    BASE,
    ID,
    NODES,
    NOWHERE,
    NUM_NODES,
    OPEN,
    OUTPUTS,
    OWNS,
    STEPS_ON,
    STORED,
)
from batchmaker.core.leave import end_those_done
from batchmaker.core.live_streams import LiveStreams
from batchmaker.core.memory import fitting, largest_holder
from batchmaker.core.priorities import CHUNK
from batchmaker.core.rows import NoMemoryError
from batchmaker.core.sequence_store import StoredNodes
from batchmaker.core.state import NO_NODES, SchedulerState, TaskEntry
from batchmaker.core.steps import HEADER, NUM_STEPS, ON_WORKER, ROWS_WANTED
from batchmaker.core.turn import (
    AT_TYPE,
    BY_AGE,
    DECIDED,
    NEXT_WORKER,
    NOBODY,
    NUM_BEGUN,
    NUM_TYPES,
    TURN,
    TaskFor,
    turn,
    turn_by_values,
)
from batchmaker.core.urgency import Urgency
from batchmaker.core.view import View
from batchmaker.errors import InvariantError
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.recorder import DEFAULT_MAX_NODES
from batchmaker.graph.spec import CellType
from batchmaker.policies.ageing import AGED_EVERY, PATIENCE
from batchmaker.policies.base import CellPolicy
from batchmaker.policies.order import READY_SHARE

ArrivalForms = tuple[Sequence[GraphForm], Sequence[StoredNodes | None], Ints]
"""Of requests that arrive, the forms of their graphs; what their sequences keep; and [4, requests] the numbers of the
requests, their ranks, the numbers of these forms, and the first of the nodes that their sequences keep."""
NO_ARRIVALS: Final = np.empty((4, 0), np.int64)
NEVER: Final = np.empty(0, np.bool_)
NO_STEPS: Final = np.zeros(HEADER, np.int64)
"""A packed task without steps."""


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
    - max_nodes: the most nodes of a request that decides by values.
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
        max_nodes: int = DEFAULT_MAX_NODES,
    ) -> None:
        follows = policy.node_by_node and policy.weighs_tasks and task_s > 0 and num_workers == 1
        state = SchedulerState(
            policy, num_workers, plan_rows=plan_rows, own_type_follows=follows, grow=grow, aged_every=aged_every
        )
        super().__init__(policy, state)
        self._give_up_late = give_up_late
        self._urgency = Urgency(state) if policy.urgent_first else None
        self._batcher = Batcher(state)
        self._num_workers = num_workers
        self._for_all = TaskFor(0, num_workers)
        weighs = policy.weighs_tasks and task_s < math.inf
        state.arena.rules[:] = (
            plan_rows, follows, loops_ahead and policy.budget_s < math.inf and not policy.needs_depth, num_workers > 1,
            1 if policy.one_depth else policy.max_steps, weighs, patience if policy.one_depth else NOWHERE,
            aged_every or 0, run_ahead, policy.budget_s < math.inf, take_turns, policy.order, patience,
            policy.urgent_first, 0, 0,
        )  # fmt: skip
        self.live_streams = LiveStreams(state.arena.rules)
        state.arena.budget_s[0, 0] = min(policy.budget_s, TASKS_WORTH * task_s) if weighs else policy.budget_s
        self._completion = Completion(state)
        self._copies = state.admission.copies
        self.frames = Frames(state, max_nodes)
        self._next_task = 0

    # --- interface for drivers -----------------------------------------------------------------------------

    @property
    def state(self) -> SchedulerState:
        """All that it knows. Simulations play on its tables without it."""
        return self._state

    def handle(self, *events: Event) -> list[Command]:
        """Take events in order, then give work to idle workers. Returns commands; carry them out in their order."""
        commands, state, live = list[Command](), self._state, self.live_streams
        state.fit_sequence()
        tail = len(events)
        while tail and type(events[tail - 1]) is RequestArrived:
            tail -= 1
        finished = self._take(events[:tail], commands) if tail else None
        arrivals = cast(Sequence[RequestArrived], events[tail:])
        forms: ArrivalForms | None = None
        if arrivals:
            if finished is not None and (state.observed or self._deadlines.heap or self.frames.slots):
                self._turn(commands, finished)
                finished = None
            self._expire(arrivals[-1].at_s, commands)
            forms, at_once = self._forms_of(arrivals), True
            for event in arrivals:  # what decisions read is held before a task may run it
                at_once &= event.deadline_s is None and event.graph.region is None
            if forms is None or not at_once:
                if finished is not None:
                    self._turn(commands, finished)
                    finished = None
                self._arrived(arrivals, forms, commands)
                arrivals, forms = (), None
                self._expire(self.now_s, commands)  # requests that arrived after their deadline
        if tail < len(events) or live.are_served:
            live.look(cast(Sequence[RequestArrived], events[tail:]), self.now_s)
        if self._urgency is not None:
            self._urgency.look(self.now_s)
        self._schedule(commands, finished, arrivals, forms)
        return commands

    def _take(self, events: Sequence[Event], commands: list[Command]) -> StepsFinished | None:
        """Take events of which the last is no arrival. If it tells of steps that may be retired together with what
        follows, it is returned instead."""
        arrivals: list[RequestArrived] = []
        for kind, alike in groupby(events, type):
            together = list(alike)
            if kind is RequestArrived:
                arrivals = cast(list[RequestArrived], together)
                self._expire(arrivals[-1].at_s, commands)
                continue
            for event in together if kind is not GraphExtended else together[-1:]:
                self._expire(event.at_s, commands)
                if arrivals:
                    self._arrived(arrivals, self._forms_of(arrivals), commands)
                    arrivals = []
                if isinstance(event, StepsFinished):
                    if event is events[-1] and not event.failed and self._is_plain:
                        return event
                    self._turn(commands, event)
                elif isinstance(event, GraphExtended):
                    self._extended(cast(list[GraphExtended], together), commands)
                else:
                    self._handle_one(event, commands)
        return None

    @property
    def _is_plain(self) -> bool:
        """Whether nothing has to be done in Python between steps that do not fail and the next task."""
        state = self._state
        if self.frames.slots and (self._urgency is not None or (state.watched is not None and state.watched.is_kept)):
            return False
        return state.is_plain

    @property
    def only_decides(self) -> bool:
        """Whether the values of steps alone say what follows: `turn_by_values` may be called elsewhere. See WentOn."""
        if not self.frames.slots or self.frames.have_loops or self._num_workers > 1 or len(self._state.line):
            return False
        return self._is_plain and self._policy.order != READY_SHARE and not self._policy.is_asked(self)

    def decide(self, answered: Sequence[SequenceId], unanswered: Sequence[SequenceId]) -> None:
        """Say which of the sequences whose requests had a Reply got their results; the others keep what they kept.

        Call it before the next `handle`. A sequence of which nothing is said counts as answered with its next request.
        """
        self._state.store.decide(answered, unanswered)

    def stored(self, sequence: SequenceId) -> tuple[StoredRow, ...]:
        """Return where the nodes are that a sequence keeps, in their order. No request of it may be in flight."""
        return self._completion.stored(sequence)

    def _handle_one(self, event: Event, commands: list[Command]) -> None:
        match event:
            case RequestCancelled():
                self._end_request(event.request, FailureKind.CANCELLED, "cancelled by the caller", commands)
            case RequestFailed():
                self._end_request(event.request, FailureKind.UNFOLD, event.reason, commands)
            case SequenceRestored():
                commands += self._completion.restore(event.sequence, event.types)
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
        self.frames.add_type(cell)
        self.cells.append(cell)

    def _forms_of(self, events: Sequence[RequestArrived]) -> ArrivalForms | None:
        """Return the forms of requests that begin when they arrive, if all their graphs are known. Otherwise None."""
        state = self._state
        if state.watched is not None:
            state.watched.note_kinds(events)
            if not self._all_begin(events):
                return None
        if self._urgency is not None or state.depths is not None:
            return None
        forms = self._copies.forms_of(events)
        if forms is None:
            return None
        ids, ranks, numbers = list[RequestId](), list[int](), list[int]()
        for event, form in zip(events, forms, strict=True):
            ids.append(event.request)
            ranks.append(CHUNK * (2 * event.priority + (event.sequence is not None)))  # usual_rank, without a call
            numbers.append(form.number)
        state.check_new(ids)
        stored, bases = state.store.latest(events)
        return forms, stored, np.array((ids, ranks, numbers, bases), np.int64)

    def _arrived(self, events: Sequence[RequestArrived], forms: ArrivalForms | None, commands: list[Command]) -> None:
        """Take requests that arrived together. forms: see `_forms_of`."""
        state = self._state
        if forms is not None and self._turn(commands, None, events, forms)[NUM_BEGUN]:
            return
        at_once, slots = state.watched is None or self._all_begin(events), state.open(events)
        self._entered(events, slots)
        begin = [at_once or self._policy.lets_go_on(event) for event in events]
        if any(begin):
            self._begin([one.graph for one in compress(events, begin)], [*compress(slots, begin)], commands)
        rest = [(at, one.graph, one.precedence) for at, one, now in zip(slots, events, begin, strict=True) if not now]
        state.line.join_all(rest)

    def _all_begin(self, events: Sequence[RequestArrived]) -> bool:
        """Whether all these requests begin on arrival, although the policy may hold requests back."""
        nobody_waits = not len(self._state.line) and self._policy.begins_on_arrival(self)
        return nobody_waits or all(map(self._policy.lets_go_on, events))

    def _entered(self, events: Sequence[RequestArrived], slots: Sequence[int]) -> None:
        """Note that requests have their slots."""
        state = self._state
        if state.watched is not None:
            state.watched.arrived(slots, events)
        for event, slot in zip(events, slots, strict=True):
            if self._urgency is not None:
                self._urgency.arrived(event.request, event.graph)
                self._urgency.more_work(slot, event.graph)
            if self._give_up_late and event.deadline_s is not None:
                self._deadlines.add(event.deadline_s, event.request, state.requests, len(state.requests))

    def _begun(
        self,
        events: Sequence[RequestArrived],
        forms: ArrivalForms,
        slots: list[int],
        bases: Sequence[int],
        commands: list[Command],
    ) -> None:
        """Note that requests have arrived and begun in a compiled call. bases: the first nodes of their graphs."""
        state, (of_each, stored, arrived) = self._state, forms
        state.enter(slots, events, stored)
        has_regions = False
        for event, form, slot, base, kept_base in zip(events, of_each, slots, bases, arrived[3].tolist(), strict=True):
            graph = event.graph
            has_regions |= graph.region is not None
            commands.append(Admit(event.request, slot, graph.first, base, graph.num_nodes, form.host_tables, kept_base))
        if state.chunks:
            self._completion.will_keep(slots, [event.graph for event in events])
        self._entered(events, slots)
        if state.watched is not None:
            state.watched.begin(slots, self.now_s)
        if state.frontiers is not None and state.frontiers.is_kept:
            state.frontiers.admit(np.array([(b, e.graph.num_nodes) for b, e in zip(bases, events, strict=True)]), ())
        if has_regions:
            finished = self._begin_regions([event.graph for event in events], slots, bases, commands)
            self._reply_if_done(finished, commands)

    def _begin(self, graphs: Sequence[CellGraph], slots: Sequence[int], commands: list[Command]) -> None:
        if self._state.watched is not None:
            self._state.watched.begin(slots, self.now_s)
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
        self._completion.drop_handles(
            [(slot, first, count) for slot in slots for first, count in together[slot].dropped if count]
        )
        self._completion.drop_all([slot for slot in slots if not arena.requests[OPEN, slot]])
        self._reply_if_done(np.array(slots, np.int64), commands)

    def _take_graphs(self, graphs: Sequence[CellGraph], slots: Sequence[int], commands: list[Command]) -> None:
        """Admit one graph of each of these requests."""
        state, arena = self._state, self._state.arena
        for graph in {id(graph): graph for graph in graphs}.values():
            for run in graph.runs:
                state.learn_form(run.type_id, len(run.sequences))
        admitted = state.admission.admit(
            graphs, slots, lambda i: state.known_numbers(slots[i]) if graphs[i].first else None
        )
        commands.extend(admitted.reserves)
        bases, waits = admitted.extents[BASE].tolist(), (arena.requests[OPEN, slots] > 0).tolist()
        ids, kept_bases = arena.requests[ID, slots].tolist(), arena.requests[STORED, slots].tolist()
        state.note_extents(slots, graphs)
        reads = self._completion.fetch_late(slots, graphs)
        for graph, slot, base, request, is_open, tables, kept_base in zip(
            graphs, slots, bases, ids, waits, admitted.host_tables, kept_bases, strict=True
        ):
            if is_open:
                arena.held[base : base + graph.num_nodes] = 1
            commands.append(Admit(request, slot, graph.first, base, graph.num_nodes, tables, kept_base))
            if slot in reads:
                commands += reads[slot]
        if state.chunks:
            self._completion.will_keep(slots, graphs)
        for producer, consumer in admitted.waiting_sources:
            state.attached[int(arena.request[consumer])].edges[producer].append(consumer)
        if state.frontiers is not None:
            state.frontiers.admit(admitted.extents[[BASE, NUM_NODES]].T, admitted.waiting_sources)
        self._completion.release(admitted.ready[0] if len(admitted.ready) == 1 else np.concatenate(admitted.ready))
        self._begin_regions(graphs, slots, bases, commands)

    def _turn(
        self,
        commands: list[Command],
        finished: StepsFinished | None = None,
        arrivals: Sequence[RequestArrived] = (),
        forms: ArrivalForms | None = None,
        task_for: TaskFor = NOBODY,
    ) -> list[int]:
        """Call `turn`, and command what follows. finished: the steps that have run. arrivals, forms: see `_forms_of`.

        For what is returned, its counts, see `turn`.
        """
        state, arena = self._state, self._state.arena
        task, first, end, stopped, answer, busy_s = NO_STEPS, 0, 0, NEVER, False, 0.0
        if finished is not None:
            entry, first, end = self._completion.entry_of(finished), finished.first, finished.end
            task, busy_s = entry.steps, finished.busy_s
            answer = not (finished.failed or state.attached or self.frames.slots)
            if answer and state.num_keeping:
                commands += self._completion.fit_kept()
            stopped = NEVER if finished.stopped is None else np.array(finished.stopped, np.bool_)
            if busy_s > 0:
                run, step_s = entry.run, busy_s / (end - first)
                num_rows = int(run.ends[end - 1] - (run.ends[first - 1] if first else 0))
                self._policy.step_finished(run.type_id, num_rows // (end - first), step_s)
                if self._urgency is not None:
                    self._urgency.step_finished(run.type_id, step_s)
        if finished is not None and (went_on := finished.went_on) is not None:
            result, formed = went_on.said, went_on.formed
            for ran in went_on.ran:
                self._policy.step_finished(*ran)
        elif finished is not None and self.frames.slots and not finished.failed:
            self.frames.note_values(finished.values)
            patterns, machine = self.frames.patterns_at, self.frames.addresses
            result, formed = turn_by_values(
                arena.tables, patterns, machine, task, first, end, stopped, busy_s, *task_for
            )
        else:
            copies, arrived = self._copies.tables, NO_ARRIVALS if forms is None else forms[2]
            result, formed = turn(arena.tables, copies, task, first, end, stopped, answer, busy_s, arrived, *task_for)
        counts: list[int] = result[:TURN].tolist()
        if finished is not None:
            self._retired(finished, entry, result, counts, answer, commands)
        if forms is not None and counts[NUM_BEGUN]:
            num_begun, end = counts[NUM_BEGUN], len(result) - counts[NUM_TYPES]
            places: list[int] = result[end - 2 * num_begun : end].tolist()
            self._begun(arrivals, forms, places[:num_begun], places[num_begun:], commands)
        if formed[NUM_STEPS]:
            self._batcher.formed(TaskId(self._next_task), formed, commands)
            self._next_task += 1
            if self._urgency is not None:
                self._urgency.task_submitted()
        elif counts[NUM_TYPES]:
            worker = int(formed[ON_WORKER])
            try:
                commands += self._batcher.make_room(formed)
            except NoMemoryError as error:
                goes_on = self._free_memory(error, commands)
                after = worker if goes_on else self._turn(commands, task_for=TaskFor(worker + 1))[NEXT_WORKER]
                counts[NEXT_WORKER] = after
                return counts
            order, may_ask = result[len(result) - counts[NUM_TYPES] :], task_for.may_ask and not formed[ROWS_WANTED]
            again = TaskFor(worker, worker + 1, order, counts[AT_TYPE], counts[BY_AGE] > 0, may_ask)
            counts[NEXT_WORKER:] = self._turn(commands, task_for=again)[NEXT_WORKER:]
        return counts

    def _retired(
        self,
        event: StepsFinished,
        entry: TaskEntry,
        result: Ints,
        counts: list[int],
        answer: bool,
        commands: list[Command],
    ) -> None:
        """Answer the requests that steps have finished, and end those that they failed."""
        finished, ids, failed, reads, done = self._completion.retired(event, entry, result, counts, answer)
        commands += reads
        for request, reason in failed:
            self._end_request(request, FailureKind.CELL, reason, commands)
        if self.frames.slots:
            if event.failed:
                self.frames.note_values(event.values)
            outcome = self.frames.decide(done) if event.failed else self.frames.outcome(counts[DECIDED], done)
            finished = np.concatenate((finished, self._decided(outcome, commands)))
        if not answer and len(finished):
            self._reply_if_done(finished, commands)
        elif ids:
            self._answered(finished, ids, commands)
        if len(self._state.dying):
            self._completion.bury()

    # --- decisions by values -----------------------------------------------------------------------------------

    def _begin_regions(
        self, graphs: Sequence[CellGraph], slots: Sequence[int], bases: Sequence[int], commands: list[Command]
    ) -> Ints:
        """Let the regions of those of these requests begin that have one. Returns the slots of those that are at their
        end already."""
        arena, deciding = self._state.arena, [i for i, graph in enumerate(graphs) if graph.region is not None]
        if not deciding:
            return NO_NODES
        own = [slots[i] for i in deciding]
        arena.requests[OPEN, own] = arena.requests[OWNS, own] = 1
        self.frames.begin(own, [graphs[i] for i in deciding], [bases[i] for i in deciding])
        return self._decided(self.frames.decide(NO_NODES), commands)

    def _decided(self, outcome: Outcome, commands: list[Command]) -> Ints:
        """Command what follows from decisions. Returns the slots of the requests whose last decision is made."""
        state = self._state
        commands += outcome.reserves
        if outcome.begun.shape[1]:
            loops = self.frames.loops_begun(outcome.begun)
            commands.append(NodesBegun(int(state.arena.counts[NODES]), outcome.begun, loops))
            if state.observed or self._urgency is not None:
                graphs = [self.frames.patterns[form] for form in outcome.begun[1].tolist()]
                state.note_begun(outcome.begun[0], graphs, outcome.begun[2])
                if (urgency := self._urgency) is not None:
                    for slot, graph in zip(outcome.begun[0].tolist(), graphs, strict=True):
                        urgency.more_work(slot, graph)
        if outcome.collected.shape[1]:
            commands.append(Collect(*outcome.collected))
        if finished := outcome.finished:
            commands.append(Decided(finished, outcome.outputs, self.frames.num_nodes[finished]))
            for slot, outputs in zip(finished, outcome.outputs, strict=True) if state.chunks else ():
                if slot in state.chunks:
                    self._completion.keep_decided(slot, outputs[list(self.frames.keeps.pop(slot, ()))] // OUTPUTS)
            if state.watched is not None:
                state.watched.decided(finished)
        for slot, kind, reason in outcome.failed:
            self._end(slot, kind, reason, commands)
        return np.array(finished, np.int64)

    # --- endings ---------------------------------------------------------------------------------------------

    def _reply_if_done(self, slots: Ints, commands: list[Command]) -> None:
        """Answer those of these requests that are alive, not open, and have no work left."""
        state = self._state
        done = end_those_done(state.arena.requests, slots)
        if len(done):
            if state.num_keeping:
                commands += self._completion.fit_kept()
            ids = state.arena.requests[ID, done].tolist()
            self._completion.leave(done)
            self._answered(done, ids, commands)

    def _answered(self, slots: Ints, ids: Sequence[RequestId], commands: list[Command]) -> None:
        """Reply to requests that are ended. Their numbers are given back, or they are dying."""
        state = self._state
        for request in ids:
            del state.requests[request]
        if self.frames.slots:
            self.frames.leave(slots.tolist())
        if state.observed:
            gone = slots.tolist()
            if state.watched is not None:
                self._policy.requests_finished(self, gone)
            state.leave(gone)
        self._completion.forgotten(slots)
        commands += map(Reply, ids)

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
        self.frames.forget(slot)
        self._completion.kill(slot)
        commands.append(Fail(request, kind, reason))

    def _expire(self, at_s: float, commands: list[Command]) -> None:
        """Set the time, and fail the requests whose deadlines have passed."""
        self.now_s = at_s
        if not self._deadlines.heap:
            return
        for request in self._deadlines.passed(at_s):
            slot = self._state.requests.get(request)
            if slot is not None:
                self._end(slot, FailureKind.DEADLINE, "not done by its deadline", commands)

    # --- scheduling ------------------------------------------------------------------------------------------

    def _schedule(
        self,
        commands: list[Command],
        finished: StepsFinished | None,
        arrivals: Sequence[RequestArrived],
        forms: ArrivalForms | None,
    ) -> None:
        """Call Schedule (Algorithm 1) for every worker that is idle or nearly idle, until no node is ready.

        In the same call steps are retired and requests begin, if there are some. Before each task policies are asked
        who begins, if somebody waits, and how they rank the types, if they say more than their `order`.
        """
        state, policy = self._state, self._policy
        asks = policy.is_asked(self)
        frontiers = state.frontiers if policy.order == READY_SHARE and not asks else None
        asks_alone, num_tasks = asks and policy.ranks_one, self._next_task
        at_once = not (asks_alone or frontiers is not None or len(state.line))
        state.arena.rules[ASKS_POLICY] = asks
        counts = self._turn(commands, finished, arrivals, forms, self._for_all if at_once else NOBODY)
        if arrivals and not counts[NUM_BEGUN]:
            self._arrived(arrivals, None, commands)
            counts = self._turn(commands)
        if asks and at_once and (self._next_task > num_tasks or not (state.tasks or len(self.ready))):
            policy.not_asked(self)
        while (worker := WorkerId(counts[NEXT_WORKER])) != NOWHERE:
            began = len(state.line) > 0 and self._admit(commands)
            if frontiers is not None and not frontiers.is_kept and len(self.ready) > 1:
                frontiers.keep()
            ranking, num_tasks = NO_NODES, self._next_task
            if asks:
                ranking = np.array(policy.rank(self), np.int64)
            if asks and not len(ranking):
                counts = self._turn(commands, task_for=TaskFor(worker + 1))
            else:
                counts = self._turn(commands, task_for=TaskFor(worker, worker + 1, ranking))
            if counts[NUM_TYPES] or self._next_task > num_tasks:  # there was no memory, or there was work
                continue
            if began or (self._num_workers > 1 and self._begin_for_idle(worker, commands)):
                counts[NEXT_WORKER] = worker  # a request may begin with nothing to compute

    def _free_memory(self, error: NoMemoryError, commands: list[Command]) -> bool:
        """End the request with most of what there is no memory for. Returns whether rows come back before steps end."""
        slot = largest_holder(self._state, error.wanted.tables)
        if slot is not None:
            self._end(slot, FailureKind.MEMORY, str(error), commands)
        return slot is not None and not self._state.tasks

    def _admit(self, commands: list[Command]) -> bool:
        """Let the policy decide which waiting requests begin; return whether one begins."""
        line, admission = self._state.line, self._policy.admit(self)
        for slot in admission.refuse:
            deadline_s = self._state.deadline_s(slot)
            due = "" if deadline_s is None else f" in {deadline_s - self.now_s:.3f} s"
            self._end(slot, FailureKind.REFUSED, f"refused: its deadline{due} cannot be met", commands)
        in_flight = len(self._state.requests) - len(line)
        begin = admission.begin if len(admission.begin) or in_flight else line.first(1).tolist()
        return self._begin_waiting(begin, commands)

    def _begin_for_idle(self, worker: WorkerId, commands: list[Command]) -> bool:
        """Let the first in line begin if a worker would be idle, and the policy wants that; return whether it does."""
        state = self._state
        idle = state.arena.workers[STEPS_ON, worker] == 0
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
