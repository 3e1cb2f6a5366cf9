"""Forming batches: Batch and FormBatchedTask of Algorithm 1 (BatchMaker section 4.3), on arrays.

A step is one batched call of a cell. A task is the steps that one call of Batch submits: up to MaxTasksToSubmit. The
dependencies of a step's nodes are updated when it is submitted, so the next step of the same task may run their
successors: tasks of one worker run in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.graph.spec import TypeId
from batchmaker.scheduler.arena import NOWHERE, READY, SUBMITTED
from batchmaker.scheduler.books import Books, Nodes, StepRecord, TypeBook
from batchmaker.scheduler.commands import (
    ZERO_TABLE,
    FetchOutput,
    Keep,
    Lanes,
    Reserve,
    Rows,
    Source,
    Step,
    TableId,
)
from batchmaker.scheduler.events import WorkerId
from batchmaker.scheduler.lanes import LaneMap, Placement
from batchmaker.scheduler.ready import NODE_BITS, Keys, nodes_of

NONE: Rows = np.empty(0, np.int64)
Allowed = Callable[[Keys], NDArray[np.bool_]]
"""Which ready nodes may be taken, as a mask."""


@dataclass(frozen=True, slots=True)
class Formed:
    """The steps of one task with what must be remembered about them, and tables that must grow first."""

    steps: tuple[Step, ...]
    records: tuple[StepRecord, ...]
    reserves: tuple[Reserve, ...]


@final
class Batcher:
    """Forms tasks from the books. Keeps nothing of its own.

    patience: given where a batch may hold only nodes of one depth: how many batches in a row may leave the first in the
    queue behind (see `_one_depth`).
    """

    def __init__(self, books: Books, *, share_workers: bool, patience: int | None = None) -> None:
        self._books = books
        self._patience = patience
        self._share_workers = share_workers
        self._reserves: list[Reserve] = []

    def form_task(self, type_id: TypeId, worker: WorkerId, max_steps: int) -> Formed | None:
        """Take ready nodes of one type into up to `max_steps` steps; None if all are pinned to other workers."""
        books, book = self._books, self._books.types[type_id]
        arena = books.arena
        steps: list[Step] = []
        records: list[StepRecord] = []
        self._reserves = []

        def unpinned(keys: Keys) -> NDArray[np.bool_]:
            pin = arena.pin[arena.subgraph[nodes_of(keys)]]
            mask: NDArray[np.bool_] = (pin == NOWHERE) | (pin == worker)
            return mask

        allowed: Allowed | None = unpinned if self._share_workers else None
        next_keys: Keys | None = None
        while len(steps) < max_steps:
            if self._patience is not None:
                allowed = self._one_depth(book, unpinned, self._patience)
            keys = book.ready.take(book.cell.max_batch, allowed)
            if len(keys) == 0:
                break
            if len(keys) < book.cell.min_batch and steps:
                book.ready.merge(keys)
                break
            if next_keys is not None and np.array_equal(keys, next_keys):
                step, record = self._repeat(book, worker, steps[-1])
            else:
                step, record = self._form_step(book, worker, nodes_of(keys))
            next_keys = self._submit(book, worker, keys, record)
            steps.append(step)
            records.append(record)
        if not steps:
            return None
        return Formed(tuple(steps), tuple(records), tuple(self._reserves))

    def _one_depth(self, book: TypeBook, unpinned: Allowed, patience: int) -> Allowed:
        """Return a test for the nodes of the lowest depth that is ready; now and then, of the depth of the oldest.

        Otherwise a stream of newcomers, all at depth 0, would keep those before them from ever going on.
        """
        depths = self._books.depths
        assert depths is not None
        keys = book.ready.keys()
        keys = keys[unpinned(keys)]
        if len(keys) == 0:
            return unpinned
        ready = depths.of[nodes_of(keys)]
        depth = ready[0] if book.num_passed >= patience else ready.min()
        book.num_passed = 0 if depth == ready[0] else book.num_passed + 1

        def at_depth(keys: Keys) -> NDArray[np.bool_]:
            mask: NDArray[np.bool_] = unpinned(keys) & (depths.of[nodes_of(keys)] == depth)
            return mask

        return at_depth

    # --- one step ------------------------------------------------------------------------------------------

    def _form_step(self, book: TypeBook, worker: WorkerId, nodes: Nodes) -> tuple[Step, StepRecord]:
        arena = self._books.arena
        if not self._books.plan_rows:
            return self._bare_step(book, nodes, arena.subgraph[nodes])
        if book.num_sequence_inputs is not None:
            subgraphs = arena.subgraph[nodes]
            if arena.end[subgraphs].any():
                return self._lane_step(book, worker, nodes, subgraphs)
        inputs = tuple(self._sources(port, nodes, None) for port in range(len(book.cell.inputs)))
        keep = self._keep(book, nodes, reuse=True)
        step = Step(nodes, inputs, None, keep, self._fetches(book, nodes, nodes))
        steers = bool(arena.held[nodes].any())
        return step, StepRecord(nodes, arena.subgraph[nodes], None, None, open_ended=False, steers=steers)

    def _bare_step(self, book: TypeBook, nodes: Nodes, subgraphs: Nodes) -> tuple[Step, StepRecord]:
        """Form a step that says who runs together and nothing of where values lie."""
        arena = self._books.arena
        steers = bool(arena.held[nodes].any())
        if book.num_sequence_inputs is None:
            return Step(nodes, (), None, None, ()), StepRecord(nodes, subgraphs, None, None, False, steers)
        ends, open_ended = arena.end[subgraphs], arena.open_ended[subgraphs]
        some_open = bool(open_ended.any())
        finished = nodes[((ends == 0) | (nodes + 1 == ends)) & ~open_ended]
        step = Step(nodes, (), None, None, (), subgraphs if some_open else None)
        return step, StepRecord(nodes, subgraphs, finished, NONE, some_open, steers or some_open)

    def _lane_step(self, book: TypeBook, worker: WorkerId, nodes: Nodes, subgraphs: Nodes) -> tuple[Step, StepRecord]:
        books, arena = self._books, self._books.arena
        lane_map = books.lane_map(worker, book.cell.type_id)
        lane = arena.lane[subgraphs]
        if self._share_workers:
            lane[arena.lane_worker[subgraphs] != worker] = NOWHERE
        placement = lane_map.place(subgraphs, lane)
        nodes, subgraphs = nodes[placement.order], subgraphs[placement.order]
        lanes, entering, leased = self._lanes(book, worker, lane_map, placement, nodes)
        if lane_map.capacity > lane_map.num_reserved:
            self._reserve_lanes(book, worker, lane_map)
        rows = np.arange(len(nodes)) if placement.rows is None else placement.rows
        ends = arena.end[subgraphs]
        open_ended = arena.open_ended[subgraphs]
        some_open = bool(open_ended.any())
        arena.lane[subgraphs] = rows
        arena.lane_worker[subgraphs] = worker
        over = ((ends == 0) | (nodes + 1 == ends)) & ~open_ended
        if over.any():
            self._leave(lane_map, subgraphs[over], rows[over])
        # Consumers of a run that may stop at any step look at its last node, so every step writes that node's row.
        owners = np.where(open_ended, ends - 1, nodes) if some_open else nodes
        assert book.num_sequence_inputs is not None
        inputs = tuple(self._sources(port, nodes, None) for port in range(book.num_sequence_inputs))
        runs = subgraphs if some_open else None
        step = Step(nodes, inputs, lanes, self._keep(book, owners), self._fetches(book, nodes, owners), runs)
        return step, StepRecord(
            nodes, subgraphs, nodes[over], entering, some_open, some_open or bool(arena.held[nodes].any()), leased
        )

    def _repeat(self, book: TypeBook, worker: WorkerId, step: Step) -> tuple[Step, StepRecord]:
        """Form the step after `step`, all of whose chains go on: the same lanes, the next nodes."""
        arena, lanes = self._books.arena, step.lanes
        nodes = step.nodes + 1
        if not self._books.plan_rows:
            return self._bare_step(book, nodes, arena.subgraph[nodes])
        assert lanes is not None
        subgraphs = arena.subgraph[nodes]
        over = nodes + 1 == arena.end[subgraphs]
        if over.any():
            chains = subgraphs[over]
            self._leave(self._books.lane_map(worker, book.cell.type_id), chains, arena.lane[chains])
        inputs = tuple(self._sources(port, nodes, None) for port in range(len(step.inputs)))
        if any(lanes.arriving):
            lanes = Lanes(lanes.tables, lanes.count, lanes.rows, ((),) * len(lanes.tables))
        following = Step(nodes, inputs, lanes, self._keep(book, nodes), self._fetches(book, nodes, nodes))
        return following, StepRecord(
            nodes, subgraphs, nodes[over], NONE, open_ended=False, steers=bool(arena.held[nodes].any())
        )

    def _leave(self, lane_map: LaneMap, chains: Rows, lanes: Rows) -> None:
        """These chains have submitted their last step: their lanes are free from the next step on."""
        lane_map.leave(lanes)
        self._books.arena.lane[chains] = NOWHERE
        self._books.arena.lane_worker[chains] = NOWHERE

    def _submit(self, book: TypeBook, worker: WorkerId, keys: Keys, record: StepRecord) -> Keys | None:
        """Update dependencies as if the step had run; return the next step's keys if the whole batch goes on."""
        arena = self._books.arena
        nodes, subgraphs = record.nodes, record.subgraphs
        np.add.at(arena.in_flight, subgraphs, 1)
        arena.pin[subgraphs] = worker
        book.num_running += 1
        self._books.worker_steps[worker] += 1
        self._books.worker_steering[worker] += record.steers
        if self._books.observed:
            self._books.submitted(book.cell.type_id, nodes, subgraphs)
        if record.entering is not None:
            in_order, mine = nodes, subgraphs
            if self._books.plan_rows:  # their lanes have put them into another order
                in_order = nodes_of(keys)
                mine = arena.subgraph[in_order]
            ends = arena.end[mine]
            more = in_order + 1 < ends
            if record.open_ended:
                more &= ~arena.open_ended[mine]
            going_on = (keys if more.all() else keys[more]) + 1
            book.ready.merge(going_on)
            if len(going_on) == len(keys):
                return going_on
            if ends.all():  # a run feeds only other subgraphs
                return None
        arena.state[nodes] = SUBMITTED
        consumers, producers = arena.consumers(nodes)
        if len(consumers):
            internal = arena.subgraph[consumers] == arena.subgraph[producers]
            consumers = consumers[internal]
            np.subtract.at(arena.pending, consumers, 1)
            ready = np.unique(consumers[arena.pending[consumers] == 0])
            if len(ready):
                arena.state[ready] = READY
                sequence = arena.sequence[arena.subgraph[ready]]
                book.ready.merge((sequence << NODE_BITS) | ready)
        return None

    # --- parts of a step -------------------------------------------------------------------------------------

    def _sources(self, port: int, nodes: Nodes, positions: Rows | None) -> tuple[Source, ...]:
        """Where `nodes` find one input; positions are their places in the batch (None: all in order)."""
        arena, is_host = self._books.arena, self._books.tables.is_host
        tables = arena.source_table[port, nodes]
        first = int(tables[0])
        if (tables == first).all():
            own = is_host[first] or first == ZERO_TABLE
            rows = nodes if own else arena.row[arena.source[port, nodes]]
            return (Source(TableId(first), rows, positions),)
        parts = []
        for table in np.unique(tables).tolist():
            where = np.flatnonzero(tables == table)
            rows = nodes[where]
            if not is_host[table] and table != ZERO_TABLE:
                rows = arena.row[arena.source[port, rows]]
            parts.append(Source(TableId(table), rows, where if positions is None else positions[where]))
        return tuple(parts)

    def _lanes(
        self, book: TypeBook, worker: WorkerId, lane_map: LaneMap, placement: Placement, nodes: Nodes
    ) -> tuple[Lanes, Nodes, tuple[tuple[LaneMap, Nodes], ...]]:
        """Where the state of each chain lies and where it must be brought from; which nodes read other nodes' rows."""
        books, arena, s = self._books, self._books.arena, book.num_sequence_inputs
        assert s is not None
        specs = books.tables.lanes(worker, book.cell, s)
        tables = tuple(spec.table for spec in specs)
        moved = placement.moved
        if len(moved) == 0:
            return Lanes(tables, len(nodes), placement.rows, ((),) * len(tables)), NONE, ()
        inside = placement.old != NOWHERE
        fresh = ~inside
        parts: list[list[Source]] = [[] for _ in tables]
        leased: list[tuple[LaneMap, Nodes]] = []
        if self._share_workers:
            chains = arena.subgraph[nodes[moved]]
            home = np.where(inside, NOWHERE, arena.lane_worker[chains])
            fresh &= home == NOWHERE
            for number in np.unique(home[home != NOWHERE]).tolist():
                their_worker, leaving = WorkerId(number), home == number
                lanes = arena.lane[chains[leaving]]
                leased.append((books.lane_map(their_worker, book.cell.type_id), lanes))
                for part, spec in zip(parts, books.tables.lanes(their_worker, book.cell, s), strict=True):
                    part.append(Source(spec.table, lanes, moved[leaving]))
        old, to = placement.old[inside], moved[inside]
        entering, at = nodes[moved[fresh]], moved[fresh]
        for i, (part, table) in enumerate(zip(parts, tables, strict=True)):
            if len(old):
                part.append(Source(table, old, to))
            if len(entering):
                part.extend(self._sources(s + i, entering, at))
        return Lanes(tables, len(nodes), placement.rows, tuple(map(tuple, parts))), entering, tuple(leased)

    def _reserve_lanes(self, book: TypeBook, worker: WorkerId, lane_map: LaneMap) -> None:
        assert book.num_sequence_inputs is not None
        specs = self._books.tables.lanes(worker, book.cell, book.num_sequence_inputs)
        lane_map.num_reserved = max(lane_map.capacity, book.cell.max_batch)
        self._reserves.append(Reserve(specs, lane_map.num_reserved))

    def _keep(self, book: TypeBook, owners: Nodes, *, reuse: bool = False) -> Keep | None:
        """Give rows to the nodes whose outputs others will read.

        owners: [batch] the node under whose number consumers look for each position's outputs. reuse: a node may take
        over the row of its first child where nobody else reads it.
        """
        arena = self._books.arena
        wanted = (arena.uses[owners] > 0) | arena.held[owners]
        if not wanted.any():
            return None
        positions = None if wanted.all() else np.flatnonzero(wanted)
        owners = owners if positions is None else owners[positions]
        rows = arena.row[owners]
        if reuse:
            self._take_over(book, owners, rows)
        missing = np.flatnonzero(rows == NOWHERE)
        if len(missing):
            fresh, grown = book.pool.allocate(len(missing))
            rows[missing] = fresh
            if grown:
                self._reserves.append(Reserve(book.pool.tables, book.pool.num_rows))
        arena.row[owners] = rows
        return Keep(tuple(spec.table for spec in book.pool.tables), rows, positions)

    def _take_over(self, book: TypeBook, owners: Nodes, rows: Rows) -> None:
        """Write each node into its first child's row where it is the child's only reader."""
        arena = self._books.arena
        ports = sorted(book.value_ports)
        if not ports:
            return
        child = arena.source[ports[0], owners]
        tables = arena.source_table[ports[0], owners]
        mine = np.zeros(len(owners), np.int32)
        for port in ports:
            mine += (arena.source[port, owners] == child) & ~self._books.tables.is_host[
                arena.source_table[port, owners]
            ]
        low = min(spec.table for spec in book.pool.tables)
        high = max(spec.table for spec in book.pool.tables)
        free = (tables >= low) & (tables <= high) & (arena.uses[child] == mine) & ~arena.held[child] & (rows == NOWHERE)
        chosen = np.flatnonzero(free)
        child = child[chosen]
        rows[chosen] = arena.row[child]
        arena.row[child] = NOWHERE

    def _fetches(self, book: TypeBook, nodes: Nodes, owners: Nodes) -> tuple[FetchOutput, ...]:
        arena = self._books.arena
        bits = arena.fetch[nodes] if owners is nodes else arena.fetch[nodes] | arena.fetch[owners]
        if not bits.any():
            return ()
        found = []
        for output in range(len(book.cell.outputs)):
            positions = np.flatnonzero(bits & (1 << output))
            if len(positions):
                found.append(FetchOutput(output, positions))
        return tuple(found)
