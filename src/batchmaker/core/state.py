"""The scheduler's state: everything that it knows between two events.

Admission, batching and completion share it. What is true of every request, node and cell type is in the arena's tables;
here is what few requests have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.core.admission import GraphAdmission
from batchmaker.core.arena import Arena
from batchmaker.core.commands import Grow, RunTask, always
from batchmaker.core.depths import Depths
from batchmaker.core.events import GraphExtended, RequestArrived, RequestId, SequenceId, TaskId
from batchmaker.core.frontiers import FrontierCounts, Frontiers
from batchmaker.core.layout import (
    ALIVE,
    BASE,
    FIRST,
    FIRST_LOCAL,
    ID,
    IN_USE,
    KEEPS,
    LAST,
    NEXT_SERIAL,
    NODES,
    NOWHERE,
    NUM_NODES,
    NUM_STEP_INPUTS,
    NUM_SUBGRAPHS,
    OPEN,
    OWNS,
    SERIAL_LIMIT,
    SLOTS,
    STORED,
    SUBGRAPHS,
)
from batchmaker.core.numbering import Extent, LocalNumbers
from batchmaker.core.priorities import Priorities
from batchmaker.core.progress import count_submitted, free_rows
from batchmaker.core.queues import order_again
from batchmaker.core.rows import RowPool, Tables
from batchmaker.core.sequence_store import KeptLists, SequenceStore, StoredNodes
from batchmaker.core.watched import WatchedRequests
from batchmaker.errors import InvariantError
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.spec import CellType, TypeId
from batchmaker.policies.ageing import AGED_EVERY
from batchmaker.policies.base import CellPolicy
from batchmaker.policies.line import WaitingLine

NO_NODES: Final[Ints] = np.empty(0, np.int64)


@dataclass(slots=True)
class TypeEntry:
    """One cell type, and its rows."""

    cell: CellType
    pool: RowPool
    num_step_inputs: int | None = None  # None until the type is used in a run
    has_lane_tables: bool = False


@dataclass(slots=True)
class ChunkNodes:
    """What is known of a request that is a chunk of a sequence.

    - stored: the stored nodes of the sequence when the request arrived.
    - kept_nodes: those that the sequence will keep after this request, by local number; node n that began as values
      decided is -1 - n. It may be an array of the request's graph, so it is not written.
    """

    sequence: SequenceId
    stored: StoredNodes | None
    kept_nodes: Ints


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
    """One task on a worker. steps: see `packed`. num_finished: number of finished steps."""

    steps: Ints
    run: RunTask
    num_finished: int = 0

    @property
    def unfinished(self) -> Ints:
        """The nodes of the steps that have not finished."""
        return self.run.nodes[self.run.begin_of(self.num_finished) :]


@final
class SchedulerState:
    """Mutable state, shared by the parts of the scheduler.

    - aged_every: see Scheduler.
    - plan_rows: steps say where values are. grow: whether there is memory for tables to grow.
    - own_type_follows: single nodes wait for those of their own type that they read until these are submitted, not
      until they are done. So they follow within a task, which is sound on one worker, whose tasks run in order.
    - watched, depths, frontiers: kept only for policies that read them; otherwise None.
    - observed: at least one of these three is kept.
    - chunks: by slot, of the requests that are chunks of sequences. num_keeping: how many nodes these will keep.
    - deadlines_s: by slot, of the requests that have one. early: by slot, extensions that came while the request was
      waiting.
    - attached: by slot. numbers: by slot, cache of `known_numbers`.
    - dying: slots of the requests that have ended while a worker had steps of them.
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
        self.arena = arena = Arena(num_workers)
        self.watched = WatchedRequests(self.num_submitted, self.num_begun) if policy.watches_requests else None
        self.depths = Depths(arena) if policy.needs_depth else None
        self.frontiers = Frontiers(arena, self.in_flight) if policy.needs_frontiers else None
        self.observed = policy.watches_requests or policy.needs_depth or policy.needs_frontiers
        self.priorities = Priorities(arena)
        self.tables = Tables(arena)
        self.admission = GraphAdmission(
            arena, self.tables, plan_rows=plan_rows, node_by_node=policy.node_by_node, own_type_follows=own_type_follows
        )
        self.types: list[TypeEntry] = []
        self.requests: dict[RequestId, int] = {}  # living request -> slot
        self.chunks: dict[int, ChunkNodes] = {}
        self.deadlines_s: dict[int, float] = {}
        self.early: dict[int, list[GraphExtended]] = {}
        self.attached: defaultdict[int, Attached] = defaultdict(Attached)  # only of requests that have some
        self.numbers: dict[int, LocalNumbers] = {}
        self.dying = NO_NODES
        self.tasks: dict[TaskId, TaskEntry] = {}
        self.store = SequenceStore(arena)
        self.num_keeping = 0
        self._kept_lists = KeptLists(arena)

    @property
    def num_workers(self) -> int:
        return len(self.arena.workers[0])

    # --- requests ------------------------------------------------------------------------------------------------

    def open(self, events: Sequence[RequestArrived]) -> list[int]:
        """Make the state of requests that have arrived; return their slots. InvariantError if one arrived twice."""
        arena, ids = self.arena, [event.request for event in events]
        self.check_new(ids)
        ones = np.ones(len(ids), np.int64)
        slots: list[int] = arena.allocate(SLOTS, ones).tolist()
        fresh = np.zeros((len(arena.requests), len(ids)), np.int64)
        fresh[ID], fresh[OPEN] = ids, [event.open for event in events]
        fresh[OWNS], fresh[IN_USE], fresh[ALIVE] = fresh[OPEN], 1, 1
        fresh[FIRST] = fresh[LAST] = NOWHERE
        stored, fresh[STORED] = self.store.latest(events)
        arena.requests[:, slots] = fresh
        self.enter(slots, events, stored)
        for event, slot in zip(events, slots, strict=True):
            if event.priority or event.sequence is not None:
                self.priorities.enter(slot, event.precedence)
        return slots

    def note_extents(self, slots: Sequence[int], graphs: Sequence[CellGraph]) -> None:
        """Note that requests have got one more graph each."""
        if self.numbers or self.depths is not None:
            for slot, graph in zip(slots, graphs, strict=True):
                if slot in self.numbers:
                    self.known_numbers(slot)
                if self.depths is not None:
                    self.depths.admit(slot, graph, self.known_extents(slot))

    def check_new(self, ids: Sequence[RequestId]) -> None:
        """Raise InvariantError if one of these requests is in flight, or is twice among them."""
        if not self.requests.keys().isdisjoint(ids) or len(set(ids)) < len(ids):
            twice = [one for i, one in enumerate(ids) if one in self.requests or one in ids[:i]]
            raise InvariantError(f"request {twice[0]} arrived twice")

    def enter(
        self, slots: Sequence[int], events: Sequence[RequestArrived], stored: Sequence[StoredNodes | None]
    ) -> None:
        """List requests that have their slots. stored: what their sequences keep, which is lent to them."""
        for event, slot, mine in zip(events, slots, stored, strict=True):
            self.requests[event.request] = slot
            if event.deadline_s is not None:
                self.deadlines_s[slot] = event.deadline_s
            if event.sequence is not None:
                self.chunks[slot] = ChunkNodes(event.sequence, mine, NO_NODES)
                if mine is not None:
                    mine.num_users += 1

    def keep(self, keeping: Sequence[tuple[int, Ints]]) -> None:
        """Let the sequences of requests keep nodes after them: of each its slot, and nodes as in `ChunkNodes`."""
        chunks, lists = self.chunks, self._kept_lists
        for slot, nodes in keeping:
            self.num_keeping += len(nodes) - len(chunks[slot].kept_nodes)
            chunks[slot].kept_nodes = nodes
        if is_full := lists.is_full:
            lists.clear()
            keeping = [(slot, chunk.kept_nodes) for slot, chunk in chunks.items()]
        places = lists.places_of([nodes for _, nodes in keeping])
        self.arena.requests[KEEPS, [slot for slot, _ in keeping]] = places
        if is_full:
            lists.settle()

    def fit_kept(self) -> bool:
        """Have numbers for all that sequences keep after the requests in flight. Returns whether nodes have grown."""
        arena, most = self.arena, 2 * self.num_keeping  # a size class is at most a quarter larger
        arena.make_room(SUBGRAPHS, int(arena.counts[SUBGRAPHS]) + most)
        return arena.make_room(NODES, int(arena.counts[NODES]) + most)

    def forgotten(self, slots: Iterable[int]) -> None:
        """Drop what is known of requests whose slots are free now."""
        given_back = list[StoredNodes]()
        tables: list[dict[int, Any]] = [self.deadlines_s, self.early, self.attached, self.numbers]
        tables = list(filter(None, tables))  # most have nothing
        for slot in slots:
            chunk = self.chunks.pop(slot, None) if self.chunks else None
            if chunk is not None:
                self.num_keeping -= len(chunk.kept_nodes)
                if chunk.stored is not None:
                    given_back.append(chunk.stored)
            for few in tables:
                few.pop(slot, None)
        if given_back:
            self.store.give_back(given_back)

    @property
    def slots(self) -> list[int]:
        """The slots in use, ascending: of living requests and of dying ones."""
        in_use: list[int] = np.flatnonzero(self.arena.requests[IN_USE]).tolist()
        return in_use

    @property
    def living(self) -> Iterable[int]:
        """The slots of living requests, in the order in which they arrived."""
        return self.requests.values()

    def id_of(self, slot: int) -> RequestId:
        """Return the number of the request that has a slot."""
        return RequestId(int(self.arena.requests[ID, slot]))

    def deadline_s(self, slot: int) -> float | None:
        """Return the deadline of a request; None if it has none."""
        return self.deadlines_s.get(slot)

    def own_extents(self, slot: int) -> list[Extent]:
        """Return the extents of a request, in the order of its graphs."""
        own = self.arena.extents[FIRST_LOCAL : NUM_SUBGRAPHS + 1, self.arena.extents_of(slot)]
        return [Extent(*columns) for columns in own.T.tolist()]

    def known_extents(self, slot: int) -> list[Extent]:
        """Return the extents of the nodes that a request's graphs may refer to.

        First its sequence's stored nodes, then its own.
        """
        chunk = self.chunks.get(slot)
        stored = [] if chunk is None or chunk.stored is None else [chunk.stored.extent]
        return stored + self.own_extents(slot)

    def known_numbers(self, slot: int) -> LocalNumbers | None:
        """Return the map from local numbers to node numbers for these nodes, or None if there are none yet."""
        extents = self.known_extents(slot)
        if not extents:
            return None
        numbers = self.numbers.setdefault(slot, LocalNumbers())
        for extent in extents[len(numbers) :]:
            numbers.add(extent)
        return numbers

    def numbers_of(self, slot: int, local: Ints) -> Ints:
        """Return the node numbers of local nodes; InvariantError if the request has no nodes yet."""
        numbers = self.known_numbers(slot)
        if numbers is None:
            raise InvariantError(f"request {self.id_of(slot)} has no nodes {local.tolist()}")
        return numbers.of(local)

    # --- cell types ----------------------------------------------------------------------------------------------

    def add_type(self, cell: CellType) -> None:
        """Add a cell type, also to what policies read."""
        pool = self.admission.add_type(cell)
        self.types.append(TypeEntry(cell, pool))
        for account in (self.watched, self.depths):
            if account is not None:
                account.add_type()

    def learn_form(self, type_id: TypeId, num_step_inputs: int) -> None:
        """Note how many inputs per step a run of a type takes. All runs of a type must take the same number.

        InvariantError if they do not.
        """
        entry = self.types[type_id]
        if entry.num_step_inputs is None:
            entry.num_step_inputs = num_step_inputs
            self.arena.types[NUM_STEP_INPUTS, type_id] = num_step_inputs
        elif entry.num_step_inputs != num_step_inputs:
            raise InvariantError(f"chains of cell {entry.cell.name!r} take different numbers of inputs per step")

    # --- queues and rows -----------------------------------------------------------------------------------------

    @property
    def is_plain(self) -> bool:
        """Whether what follows from steps that do not fail is all in the tables."""
        is_apart = self.attached or len(self.dying) or self.depths is not None
        return not is_apart and (self.frontiers is None or not self.frontiers.is_kept)

    def fit_sequence(self) -> None:
        """Have places in the queues for all subgraphs that can be released before this is called again.

        If the numbers would run out, the subgraphs in flight first get new ones, from 0 and in the same order. This
        takes milliseconds, once in tens of millions of subgraphs.
        """
        arena = self.arena
        if arena.counts[NEXT_SERIAL] + arena.subgraphs.shape[1] > SERIAL_LIMIT:
            self._renumber()

    def _renumber(self) -> None:
        """Give the subgraphs in flight the lowest serial numbers, in the same order.

        Numbers of subgraphs that are not released yet are old values without a meaning. They are changed too, which
        does no harm.
        """
        arena = self.arena
        extents = [extent for slot in self.slots for extent in self.own_extents(slot)]
        spans = [np.arange(e.first_subgraph, e.first_subgraph + e.num_subgraphs) for e in extents]
        living = np.concatenate(spans) if spans else NO_NODES
        serials, arena.serial[living] = np.unique(arena.serial[living], return_inverse=True)
        arena.counts[NEXT_SERIAL] = len(serials)
        self.order_again()

    def order_again(self) -> None:
        """Bring the queues into order again, after ranks or serial numbers have changed."""
        arena = self.arena
        order_again(arena.nodes, arena.subgraphs, arena.requests, arena.types, arena.queue)

    def free_rows(self, nodes: Ints) -> None:
        """Free the rows of these nodes. The nodes are distinct, and each has a row."""
        arena = self.arena
        free_rows(arena.nodes, arena.subgraphs, arena.types, arena.pools, arena.free_rows, nodes)

    # --- state that only some policies read ----------------------------------------------------------------------

    def in_flight(self) -> FrontierCounts:
        """Return what living requests have in the arena. Takes time in proportion to their number."""
        living = sorted(self.living)
        late = [self.attached[slot].edges for slot in living if slot in self.attached]
        late_edges = [(node, fed) for edges in late for node, consumers in edges.items() for fed in consumers]
        return FrontierCounts(self.arena.spans_of(living), late_edges, self._on_workers())

    def num_submitted(self, slots: Sequence[int]) -> Ints:
        """Return how many nodes of each type of these requests were submitted: [requests, types].

        No value may end a run of theirs. Takes time in proportion to what is in flight.
        """
        arena = self.arena
        extents = [(slot, extent) for slot in range(len(slots)) for extent in arena.extents_of(slots[slot])]
        spans = np.empty((len(extents), 3), np.int64)
        for i, (row, extent) in enumerate(extents):
            spans[i] = arena.extents[BASE, extent], arena.extents[NUM_NODES, extent], row
        ready = [arena.ready_keys(e.cell.type_id) for e in self.types if e.num_step_inputs is not None]
        counts = np.zeros((len(slots), len(self.types)), np.int64)
        count_submitted(
            arena.nodes, arena.subgraphs, spans, self._on_workers(), np.concatenate((NO_NODES, *ready)), counts
        )
        return counts

    def num_begun(self, slots: Sequence[int]) -> Ints:
        """Return how many nodes of each type these requests have got since they began: [requests, types]."""
        arena = self.arena
        counts = np.zeros((len(slots), len(self.types)), np.int64)
        for row, slot in enumerate(slots):
            for extent in self.own_extents(slot)[1:]:
                nodes = slice(extent.base, extent.base + extent.num_nodes)
                np.add.at(counts[row], arena.type[arena.subgraph[nodes]], 1)
        return counts

    def _on_workers(self) -> Ints:
        """Return the nodes of steps that have not finished."""
        return np.concatenate((NO_NODES, *(task.unfinished for task in self.tasks.values())))

    def note_begun(self, slots: Ints, graphs: Sequence[CellGraph], bases: Ints) -> None:
        """Note that nodes have begun as values decided: for each graph its request, and its first node."""
        if self.watched is not None:
            self.watched.begun(slots, graphs)
        if self.frontiers is not None:
            self.frontiers.admit(np.stack((bases, np.array([graph.num_nodes for graph in graphs])), axis=1), ())
        if self.depths is not None:
            for slot, base, graph in zip(slots.tolist(), bases.tolist(), graphs, strict=True):
                self.depths.admit(slot, graph, [Extent(0, base, graph.num_nodes, 0, 0)])

    def submitted(self, type_id: TypeId, nodes: Ints) -> None:
        """Note that these nodes of one type are on a worker. Called only if `observed`."""
        if self.frontiers is not None and self.frontiers.is_kept:
            self.frontiers.submitted(type_id, nodes)
        if self.watched is not None and self.watched.counts:
            self.watched.submitted(self.arena.request[nodes], type_id)
        if self.depths is not None:
            self.depths.submitted(self.arena.request[nodes], type_id, nodes)

    def stopped(self, type_id: TypeId, nodes: Ints, ends: Ints, submitted: Ints) -> None:
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
