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
from batchmaker.scheduler.books import Books, Nodes, StepRecord, TypeBook
from batchmaker.scheduler.commands import FetchOutput, Keep, Lanes, Reserve, Rows, Source, Step, TableId
from batchmaker.scheduler.events import WorkerId
from batchmaker.scheduler.lanes import LaneMap, Seats
from batchmaker.scheduler.placing import fetched, find_inputs, keep_outputs
from batchmaker.scheduler.progress import look_at, submit, unpinned_of
from batchmaker.scheduler.ready import Keys, nodes_of

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
            return unpinned_of(arena.pin, arena.subgraph, worker, keys)

        allowed: Allowed | None = unpinned if self._share_workers else None
        next_keys: Keys | None = None
        while len(steps) < max_steps:
            keys = book.ready.take(book.cell.max_batch, self._one_depth(book, allowed))
            if len(keys) == 0:
                break
            if len(keys) < book.cell.min_batch and steps:
                book.ready.merge(keys)
                break
            if next_keys is not None and len(keys) == len(next_keys) and (keys == next_keys).all():
                step, record = self._repeat(book, worker, steps[-1])
            else:
                step, record = self._form_step(book, worker, nodes_of(keys))
            next_keys = self._submit(book, worker, keys, record)
            steps.append(step)
            records.append(record)
        if not steps:
            return None
        return Formed(tuple(steps), tuple(records), tuple(self._reserves))

    def _one_depth(self, book: TypeBook, allowed: Allowed | None) -> Allowed | None:
        """Return a test for the nodes of the lowest depth that is ready; now and then, of the depth of the oldest.

        Otherwise a stream of newcomers, all at depth 0, would keep those before them from ever going on.
        """
        depths = self._books.depths
        if self._patience is None or depths is None:
            return allowed
        keys = book.ready.keys()
        keys = keys if allowed is None else keys[allowed(keys)]
        if len(keys) == 0:
            return allowed
        lowest, oldest = depths.lowest(keys)
        depth = oldest if book.num_passed >= self._patience else lowest
        book.num_passed = 0 if depth == oldest else book.num_passed + 1

        def at_depth(keys: Keys) -> NDArray[np.bool_]:
            mask = depths.at(depth, keys)
            return mask if allowed is None else mask & allowed(keys)

        return at_depth

    # --- one step ------------------------------------------------------------------------------------------

    def _form_step(self, book: TypeBook, worker: WorkerId, nodes: Nodes) -> tuple[Step, StepRecord]:
        arena = self._books.arena
        subgraphs, finished, some_runs, some_open, some_held = look_at(
            arena.held, arena.subgraph, arena.end, arena.open_ended, nodes
        )
        steers = some_open or some_held
        if some_runs and self._books.plan_rows:
            return self._lane_step(book, worker, nodes, steers)
        if self._books.plan_rows:
            inputs = self._inputs(0, len(book.cell.inputs), nodes, NONE)
            keep, fetches = self._outputs(book, nodes, nodes, book.ports)
            step = Step(nodes, inputs, None, keep, fetches)
        else:  # who runs together, and nothing of where values lie
            step = Step(nodes, (), None, None, (), subgraphs if some_open else None)
        return step, StepRecord(nodes, subgraphs, finished, nodes, some_open, steers)

    def _lane_step(self, book: TypeBook, worker: WorkerId, nodes: Nodes, steers: bool) -> tuple[Step, StepRecord]:
        assert book.num_sequence_inputs is not None
        lane_map = self._books.lane_map(worker, book.cell.type_id)
        seats = lane_map.seat(nodes)
        entering = seats.nodes[seats.entering]
        lanes, leased = self._lanes(book, worker, seats, entering)
        if lane_map.capacity > lane_map.num_reserved:
            self._reserve_lanes(book, worker, lane_map)
        inputs = self._inputs(0, book.num_sequence_inputs, seats.nodes, NONE)
        keep, fetches = self._outputs(book, seats.nodes, seats.owners, NONE)
        step = Step(seats.nodes, inputs, lanes, keep, fetches, seats.subgraphs if seats.open_ended else None)
        return step, StepRecord(
            seats.nodes, seats.subgraphs, seats.finished, entering, seats.open_ended, steers, leased
        )

    def _repeat(self, book: TypeBook, worker: WorkerId, step: Step) -> tuple[Step, StepRecord]:
        """Form the step after `step`, all of whose chains go on: the same lanes, the next nodes."""
        if not self._books.plan_rows:
            return self._form_step(book, worker, step.nodes + 1)
        lanes = step.lanes
        assert lanes is not None
        lane_map = self._books.lane_map(worker, book.cell.type_id)
        nodes, subgraphs, finished, some_held = lane_map.go_on(step.nodes)
        if any(lanes.arriving):
            lanes = Lanes(lanes.tables, lanes.count, lanes.rows, ((),) * len(lanes.tables))
        inputs = self._inputs(0, len(step.inputs), nodes, NONE)
        keep, fetches = self._outputs(book, nodes, nodes, NONE)
        following = Step(nodes, inputs, lanes, keep, fetches)
        return following, StepRecord(nodes, subgraphs, finished, NONE, open_ended=False, steers=some_held)

    def _submit(self, book: TypeBook, worker: WorkerId, keys: Keys, record: StepRecord) -> Keys | None:
        """Update dependencies as if the step had run; return the next step's keys if the whole batch goes on."""
        books, arena = self._books, self._books.arena
        book.num_running += 1
        books.worker_steps[worker] += 1
        books.worker_steering[worker] += record.steers
        if books.observed:
            books.submitted(book.cell.type_id, record.nodes, record.subgraphs)
        ready, all_go_on = submit(
            arena.state, arena.pending, arena.first_edge, arena.num_edges, arena.consumer, arena.subgraph, arena.end,
            arena.open_ended, arena.sequence, arena.in_flight, arena.pin, worker, keys,
        )  # fmt: skip
        book.ready.merge(ready)
        return ready if all_go_on else None

    # --- parts of a step -------------------------------------------------------------------------------------

    def _inputs(self, first_port: int, end_port: int, nodes: Nodes, places: Rows) -> tuple[tuple[Source, ...], ...]:
        """Where `nodes` find these inputs. places: their positions in the batch, NONE where they are the batch."""
        arena = self._books.arena
        rows, positions, parts = find_inputs(
            arena.row, arena.source, arena.source_table, self._books.tables.is_host, first_port, end_port, nodes, places
        )
        found: list[list[Source]] = [[] for _ in range(first_port, end_port)]
        for port, table, begin, end in parts.tolist():
            is_batch = end - begin == len(nodes) and not len(places)
            source = Source(TableId(table), rows[begin:end], None if is_batch else positions[begin:end])
            found[port - first_port].append(source)
        return tuple(map(tuple, found))

    def _outputs(
        self, book: TypeBook, nodes: Nodes, owners: Nodes, value_ports: Rows
    ) -> tuple[Keep | None, tuple[FetchOutput, ...]]:
        """Give rows to the nodes whose outputs others will read, and say what travels to the host.

        owners: [batch] the node under whose number consumers look for each position's outputs. value_ports: the inputs
        that other nodes may have fed, where a node may take over the row of its first child; else NONE.
        """
        arena, pool = self._books.arena, book.pool
        read, rows, positions, num_fresh, marks = keep_outputs(
            arena.uses, arena.held, arena.row, arena.fetch, arena.source, arena.source_table,
            self._books.tables.is_host, value_ports, pool.first_table, pool.end_table, nodes, owners,
        )  # fmt: skip
        if num_fresh and pool.fill(rows, num_fresh, read, arena.row):
            self._reserves.append(Reserve(pool.tables, pool.num_rows))
        keep = Keep(pool.table_ids, rows, None if len(read) == len(nodes) else positions) if len(read) else None
        fetches = tuple(
            FetchOutput(output, fetched(arena.fetch, nodes, owners, output))
            for output in range(len(book.cell.outputs) if marks else 0)
            if marks >> output & 1
        )
        return keep, fetches

    def _lanes(
        self, book: TypeBook, worker: WorkerId, seats: Seats, entering: Nodes
    ) -> tuple[Lanes, tuple[tuple[LaneMap, Nodes], ...]]:
        """Where the state of each chain lies and must be brought from; lanes of other workers that are left."""
        books, s = self._books, book.num_sequence_inputs
        assert s is not None
        tables = tuple(spec.table for spec in books.tables.lanes(worker, book.cell, s))
        parts: list[list[Source]] = [[] for _ in tables]
        leased: list[tuple[LaneMap, Nodes]] = []
        for number in np.unique(seats.home).tolist() if len(seats.home) else ():
            mine = seats.home == number
            leased.append((books.lane_map(WorkerId(number), book.cell.type_id), seats.there[mine]))
            for part, spec in zip(parts, books.tables.lanes(WorkerId(number), book.cell, s), strict=True):
                part.append(Source(spec.table, seats.there[mine], seats.leasing[mine]))
        if len(seats.shifted):
            for part, table in zip(parts, tables, strict=True):
                part.append(Source(table, seats.before, seats.shifted))
        if len(entering):
            for part, sources in zip(parts, self._inputs(s, s + len(tables), entering, seats.entering), strict=True):
                part.extend(sources)
        return Lanes(tables, len(seats.nodes), seats.rows, tuple(map(tuple, parts))), tuple(leased)

    def _reserve_lanes(self, book: TypeBook, worker: WorkerId, lane_map: LaneMap) -> None:
        assert book.num_sequence_inputs is not None
        specs = self._books.tables.lanes(worker, book.cell, book.num_sequence_inputs)
        lane_map.num_reserved = max(lane_map.capacity, book.cell.max_batch)
        self._reserves.append(Reserve(specs, lane_map.num_reserved))
