"""The scheduler's state: everything that it knows between two events.

Admission, batching and completion share it. It has nearly no behaviour of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.errors import InvariantError
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.spec import CellType, TypeId
from batchmaker.policies.ageing import AGED_EVERY
from batchmaker.policies.base import CellPolicy
from batchmaker.policies.line import WaitingLine
from batchmaker.scheduler.admission import GraphAdmission
from batchmaker.scheduler.arena import Arena, Extents
from batchmaker.scheduler.commands import Grow, always
from batchmaker.scheduler.depths import Depths
from batchmaker.scheduler.events import GraphExtended, RequestArrived, RequestId, SequenceId, TaskId, WorkerId
from batchmaker.scheduler.frontiers import FrontierCounts, Frontiers
from batchmaker.scheduler.lanes import LaneMap
from batchmaker.scheduler.numbering import Extent, LocalNumbers
from batchmaker.scheduler.priorities import Priorities, RankedQueue
from batchmaker.scheduler.progress import count_submitted
from batchmaker.scheduler.ready import SEQUENCE_LIMIT, Keys
from batchmaker.scheduler.row_release import vacate
from batchmaker.scheduler.rows import RowPool, Tables
from batchmaker.scheduler.sequence_store import SequenceStore, StoredNodes
from batchmaker.scheduler.step_times import StepTimes
from batchmaker.scheduler.watched import WatchedRequests

Nodes = NDArray[np.int64]
NO_NODES: Final[Nodes] = np.empty(0, np.int64)


@dataclass(slots=True)
class TypeEntry:
    """One cell type: its queue of ready nodes, its rows, and its number of steps on workers."""

    cell: CellType
    pool: RowPool
    value_ports: set[int]  # inputs that some node has fed so far; admission adds to it
    ready: RankedQueue
    step_times: StepTimes
    num_running: int = 0
    num_passed: int = 0  # batches in a row of another depth than the first node in the queue
    num_sequence_inputs: int | None = None  # None until the type is used in a run
    _ports: Nodes = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def ports(self) -> Nodes:
        """The value_ports, ascending."""
        if len(self._ports) < len(self.value_ports):
            self._ports = np.array(sorted(self.value_ports), np.int64)
        return self._ports

    def learn_form(self, num_sequence_inputs: int) -> None:
        """Note how many inputs per step a run of this type takes. All runs of a type must take the same number.

        InvariantError if they do not.
        """
        if self.num_sequence_inputs is None:
            self.num_sequence_inputs = num_sequence_inputs
        elif self.num_sequence_inputs != num_sequence_inputs:
            raise InvariantError(f"chains of cell {self.cell.name!r} take different numbers of inputs per step")


@final
class RequestEntry:
    """One request in flight. Optional fields are class attributes, set on the object only when needed.

    - slot: a small number that belongs to the request alone while it is in flight.
    - open: its unfold function waits and may add nodes.
    - may_own_rows: it may still have rows when it ends, because its unfold function could have used them, or because it
      or one of its runs ends early.
    - waiting: it is in the waiting line and has not begun.
    - early: its extensions that came while it was waiting.
    - alive: it has no Reply and no Fail yet.
    - extents: of its graphs, in order.
    - sequence: the sequence that it is a chunk of.
    - stored: the stored nodes of the sequence when the request arrived.
    - kept: the nodes that the sequence will keep after this request. A part of an array of several requests, so it is
      not written.
    - numbers: cache of `known_numbers`.
    """

    waiting = False
    early: tuple[GraphExtended, ...] = ()
    alive = True
    extents: tuple[Extent, ...] = ()
    sequence: SequenceId | None = None
    stored: StoredNodes | None = None
    kept: Nodes | None = None
    numbers: LocalNumbers | None = None

    def __init__(
        self, request: RequestId, slot: int, arrived_s: float, deadline_s: float | None, is_open: bool
    ) -> None:
        self.request = request
        self.slot = slot
        self.arrived_s = arrived_s
        self.deadline_s = deadline_s
        self.open = self.may_own_rows = is_open

    @property
    def known_extents(self) -> tuple[Extent, ...]:
        """The extents of the nodes that its graphs may refer to: first its sequence's stored nodes, then its own."""
        return self.extents if self.stored is None else (self.stored.extent, *self.extents)

    def known_numbers(self) -> LocalNumbers | None:
        """Return the map from local numbers to node numbers for these nodes, or None if there are none yet."""
        num_kept = 0 if self.stored is None else 1
        if not self.extents and not num_kept:
            return None
        if self.numbers is None:
            self.numbers = LocalNumbers()
            if self.stored is not None:
                self.numbers.add(self.stored.extent)
        for extent in self.extents[len(self.numbers) - num_kept :]:
            self.numbers.add(extent)
        return self.numbers

    def numbers_of(self, local: Nodes) -> Nodes:
        """Return the node numbers of local nodes; InvariantError if the request has no nodes yet."""
        numbers = self.known_numbers()
        if numbers is None:
            raise InvariantError(f"request {self.request} has no nodes {local.tolist()}")
        return numbers.of(local)

    def number(self, local: int) -> int:
        """Return the node number of one local node."""
        return int(self.numbers_of(np.array([local]))[0])


@dataclass(slots=True)
class Attached:
    """What extensions of a request have attached to earlier nodes that are not done.

    - edges: node -> consumers in later extensions.
    - fetches: node -> (node, bits of outputs) of nodes whose outputs were asked for after their submission.
    - drops: node -> nodes whose handles were dropped after their submission.

    Keys are the nodes whose completion is awaited. For a run this is its last node.
    """

    edges: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    fetches: defaultdict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    drops: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))


@dataclass(slots=True)
class TaskEntry:
    """One task on a worker, and what must be updated when its steps finish. See `scheduler.steps.Steps`.

    - nodes, subgraphs: [positions].
    - ends: [NUM_ENDS, steps].
    - done: the nodes that are done when their step has run: single nodes, and last steps of runs.
    - entering: nodes whose state inputs came from rows of other nodes, not from a lane. In steps without lanes: all
      nodes.
    - left: (lanes, lane) on other workers that chains have left.
    - may_stop: [steps] whether a step has runs that may stop.
    - steers: [steps] whether values of the step decide which nodes come next: it has runs that may stop, or nodes that
      a waiting unfold function holds.
    - num_finished: number of finished steps.
    """

    task: TaskId
    worker: WorkerId
    type_id: TypeId
    nodes: Nodes
    subgraphs: Nodes
    ends: Nodes
    done: Nodes
    entering: Nodes
    left: list[tuple[LaneMap, int]]
    may_stop: NDArray[np.bool_]
    steers: NDArray[np.bool_]
    num_finished: int = 0

    @property
    def num_steps(self) -> int:
        return len(self.may_stop)

    def before(self, step: int) -> tuple[int, int, int, int]:
        """Return how many positions, done nodes, entering nodes and left lanes come before a step."""
        return tuple(self.ends[:, step - 1].tolist()) if step else (0, 0, 0, 0)

    @property
    def unfinished(self) -> Nodes:
        """The nodes of the steps that have not finished."""
        return self.nodes[self.before(self.num_finished)[0] :]


@final
class SchedulerState:
    """Mutable state, shared by the parts of the scheduler.

    - aged_every: see Scheduler.
    - plan_rows: steps say where values are. grow: whether there is memory for tables to grow.
    - own_type_follows: single nodes wait for those of their own type that they read until these are submitted, not
      until they are done. So they follow within a task, which is sound on one worker, whose tasks run in order.
    - watched, depths, frontiers: kept only for policies that read them; otherwise None.
    - observed: at least one of these three is kept.
    - left: [slots] units of the request that are not done (see `CellGraph.num_work_units`).
    - worker_steps: [workers] steps that are submitted and not finished.
    - sequence: the next place in the queues for a released subgraph.
    """

    def __init__(
        self,
        policy: CellPolicy,
        num_workers: int,
        *,
        plan_rows: bool = True,
        own_type_follows: bool = False,
        grow: Grow = always,
        aged_every: int | None = AGED_EVERY,
    ) -> None:
        self.plan_rows = plan_rows
        self.grow = grow
        self.own_type_follows = own_type_follows
        self.line: WaitingLine[CellGraph] = WaitingLine(aged_every)
        self.aged_every = aged_every
        self.arena = Arena()
        self.watched = WatchedRequests(self.num_submitted) if policy.watches_requests else None
        self.depths = Depths(self.ready_keys) if policy.needs_depth else None
        self.frontiers = Frontiers(self.arena, self.in_flight) if policy.needs_frontiers else None
        self.observed = policy.watches_requests or policy.needs_depth or policy.needs_frontiers
        self.priorities = Priorities(self.arena)
        self.tables = Tables()
        self.admission = GraphAdmission(
            self.arena, self.tables, plan_rows=plan_rows, node_by_node=policy.node_by_node,
            own_type_follows=own_type_follows,
        )  # fmt: skip
        self.types: list[TypeEntry] = []
        self.slots = Extents()
        self.left: NDArray[np.int64] = np.zeros(256, np.int64)
        self.requests: dict[RequestId, RequestEntry] = {}
        self.by_slot: dict[int, RequestEntry] = {}
        self.attached: defaultdict[RequestId, Attached] = defaultdict(Attached)  # only of requests that have some
        self.tasks: dict[TaskId, TaskEntry] = {}
        self.lane_maps: dict[tuple[WorkerId, TypeId], LaneMap] = {}
        self.worker_steps = [0] * num_workers
        self.worker_steering = [0] * num_workers  # those of worker_steps whose values decide which nodes come next
        self.sequence = 0
        self.store = SequenceStore(self.arena, self.free_rows)

    def ready_keys(self, type_id: int) -> Keys:
        """Return the ready nodes of a type, in the order of their queue."""
        return self.types[type_id].ready.keys()

    def open(self, events: Sequence[RequestArrived]) -> list[RequestEntry]:
        """Make the state of requests that have arrived; InvariantError if one arrived twice."""
        slots = self.slots.allocate_each((1,) * len(events))
        while self.slots.top > len(self.left):
            self.left = np.concatenate((self.left, np.zeros_like(self.left)))
        self.left[slots] = 0
        opened = []
        for event, slot in zip(events, slots, strict=True):
            request = event.request
            if request in self.requests:
                raise InvariantError(f"request {request} arrived twice")
            entry = RequestEntry(request, slot, event.at_s, event.deadline_s, event.open)
            if event.sequence is not None:
                entry.sequence, entry.stored = event.sequence, self.store.lend(event.sequence, event.graph.first)
            if event.priority:
                self.priorities.enter(slot, event.priority)
            self.requests[request] = self.by_slot[slot] = entry
            opened.append(entry)
        return opened

    def places(self, count: int) -> int:
        """Return the first of `count` sequence numbers for subgraphs that are released now.

        If the numbers would run out, the subgraphs in flight first get new ones, from 0 and in the same order. This
        takes milliseconds, once in tens of millions of subgraphs.
        """
        if self.sequence + count > SEQUENCE_LIMIT:
            self._renumber()
        first = self.sequence
        self.sequence += count
        return first

    def _renumber(self) -> None:
        """Give the subgraphs in flight the lowest sequence numbers, in the same order.

        Numbers of subgraphs that are not released yet are old values without a meaning. They are changed too, which
        does no harm.
        """
        sequence = self.arena.sequence
        extents = [extent for entry in self.by_slot.values() for extent in entry.extents]
        spans = [np.arange(e.first_subgraph, e.first_subgraph + e.num_subgraphs) for e in extents]
        living = np.concatenate(spans) if spans else np.empty(0, np.int64)
        known, sequence[living] = np.unique(sequence[living], return_inverse=True)
        self.sequence = len(known)
        for entry in self.types:
            entry.ready.renumber()

    def free_rows(self, nodes: Nodes) -> None:
        """Free the rows of these nodes. The nodes are distinct, and each has a row."""
        arena = self.arena
        rows, begins = vacate(arena.of_nodes, arena.of_subgraphs, len(self.types), nodes)
        for entry, (begin, end) in zip(self.types, pairwise(begins.tolist()), strict=True):
            if begin < end:
                entry.pool.release(rows[begin:end])

    # --- state that only some policies read ----------------------------------------------------------------------

    def add_type(self) -> None:
        """Add a cell type to what policies read."""
        for kept in (self.watched, self.depths, self.frontiers):
            if kept is not None:
                kept.add_type()

    def in_flight(self) -> FrontierCounts:
        """Return what living requests have in the arena. Takes time in proportion to their number."""
        alive = [entry for entry in self.by_slot.values() if entry.alive]
        edges = [self.attached[entry.request].edges for entry in alive if entry.request in self.attached]
        late_edges = [(node, fed) for late in edges for node, consumers in late.items() for fed in consumers]
        return FrontierCounts([extent for entry in alive for extent in entry.extents], late_edges, self._on_workers())

    def num_submitted(self, slots: Sequence[int]) -> Nodes:
        """Return how many nodes of each type of these requests were submitted: [requests, types].

        No value may end a run of theirs. Takes time in proportion to what is in flight.
        """
        extents = [(e.base, e.num_nodes, i) for i, slot in enumerate(slots) for e in self.by_slot[slot].extents]
        ready = [entry.ready.keys() for entry in self.types if entry.num_sequence_inputs is not None]
        counts = np.zeros((len(slots), len(self.types)), np.int64)
        count_submitted(
            self.arena.of_nodes, self.arena.of_subgraphs, np.array(extents, np.int64).reshape(-1, 3),
            self._on_workers(), np.concatenate((NO_NODES, *ready)), counts,
        )  # fmt: skip
        return counts

    def _on_workers(self) -> Nodes:
        """Return the nodes of steps that have not finished."""
        return np.concatenate((NO_NODES, *(task.unfinished for task in self.tasks.values())))

    def submitted(self, type_id: TypeId, nodes: Nodes, subgraphs: Nodes) -> None:
        """Note that these nodes of one type are on a worker. Called only if `observed`."""
        if self.frontiers is not None:
            self.frontiers.submitted(type_id, nodes)
        if self.watched is not None and self.watched.counts:
            self.watched.submitted(self.arena.request[nodes], type_id)
        if self.depths is not None:
            self.depths.submitted(self.arena.request[nodes], type_id, nodes)

    def stopped(self, type_id: TypeId, nodes: Nodes, ends: Nodes, submitted: Nodes) -> None:
        """Note that runs ended early, after these nodes. ends: [runs] one past the last node of each run.

        submitted: the nodes of the task, of which some follow the end of a run and did not run.
        """
        slots = self.arena.request[nodes]
        if self.watched is not None:
            in_order = np.sort(submitted)
            ahead = np.searchsorted(in_order, ends) - np.searchsorted(in_order, nodes, side="right")
            self.watched.stopped(slots, type_id, ends - 1 - nodes, ahead)
        if self.depths is not None:
            for slot, node, end in zip(slots.tolist(), nodes.tolist(), ends.tolist(), strict=True):
                self.depths.stopped(slot, type_id, node + 1, end)
        if self.frontiers is not None:
            self.frontiers.stopped(type_id, ends)

    def leave(self, slots: Sequence[int]) -> None:
        """Note that requests have ended, so policies no longer see them."""
        if self.watched is not None:
            self.watched.leave(slots)
        if self.depths is not None:
            for slot in slots:
                self.depths.leave(slot)

    def lane_map(self, worker: WorkerId, type_id: TypeId) -> LaneMap:
        """Return the lanes of a cell type on a worker."""
        key = (worker, type_id)
        if key not in self.lane_maps:
            self.lane_maps[key] = LaneMap()
        return self.lane_maps[key]
