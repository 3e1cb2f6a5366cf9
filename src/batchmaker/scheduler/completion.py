"""What follows when a step has finished and when a request ends: rows freed, subgraphs released, numbers returned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.errors import InvariantError
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.spec import TypeId
from batchmaker.scheduler.arena import DONE, NOWHERE, READY
from batchmaker.scheduler.books import Books, Nodes, RequestBook, StepRecord, TaskBook, TypeBook
from batchmaker.scheduler.commands import Read, Reserve
from batchmaker.scheduler.events import RequestId, StepFinished, TaskId, WorkerId
from batchmaker.scheduler.ready import NODE_BITS, Keys, nodes_of


@dataclass(slots=True)
class Finished:
    """What a finished step means for requests: those without work left, those whose rows failed, late reads.

    type_id, batch: what ran.
    """

    type_id: TypeId
    batch: int
    finished: list[RequestBook] = field(default_factory=list)
    failed: list[tuple[RequestId, str]] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)


@final
class Completion:
    """Keeps the books of what is on workers and of what ends."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._dying: list[RequestBook] = []

    def started(self, task: TaskId, worker: WorkerId, type_id: TypeId, records: Sequence[StepRecord]) -> None:
        """A task was submitted."""
        self._books.tasks[task] = TaskBook(task, worker, type_id, list(records))

    def step_finished(self, event: StepFinished) -> Finished:
        """Put right what one step has changed and say which requests it finished or failed."""
        books, arena = self._books, self._books.arena
        task = books.tasks.get(event.task)
        if task is None or event.step != task.num_finished:
            raise InvariantError(f"step {event.step} of task {event.task} finished out of turn")
        record = task.steps[task.num_finished]
        task.num_finished += 1
        if task.num_finished == len(task.steps):
            del books.tasks[event.task]
        book = books.types[task.type_id]
        book.num_running -= 1
        books.worker_steps[task.worker] -= 1
        books.worker_steering[task.worker] -= record.steers
        nodes, subgraphs = record.nodes, record.subgraphs
        np.subtract.at(arena.in_flight, subgraphs, 1)
        arena.pin[subgraphs[arena.in_flight[subgraphs] == 0]] = NOWHERE
        for lane_map, lanes in record.leased:
            lane_map.leave(lanes)
        result = Finished(task.type_id, len(nodes))
        if event.failed:
            positions = [position for position, _ in event.failed]
            for slot, (_, reason) in zip(arena.request[nodes[positions]].tolist(), event.failed, strict=True):
                owner = books.by_slot[slot]
                if owner.alive:
                    result.failed.append((owner.request, reason))
        finished = nodes if record.finished is None else record.finished
        if record.open_ended:
            finished = self._stop_or_go_on(book, record, finished, event.stopped, task.worker)
        self._release_sources(book, record)
        if len(finished):
            self._finish(finished, result)
        return result

    def _stop_or_go_on(
        self,
        book: TypeBook,
        record: StepRecord,
        finished: Nodes,
        stopped: NDArray[np.bool_] | None,
        worker: WorkerId,
    ) -> Nodes:
        """Runs that stop here are done (under the number of their last node); the others' next node is ready."""
        books, arena = self._books, self._books.arena
        subgraphs = record.subgraphs
        open_ended = arena.open_ended[subgraphs]
        ends = arena.end[subgraphs]
        last = record.nodes + 1 == ends
        if stopped is not None:
            last |= stopped
        over = open_ended & last
        on = open_ended & ~last
        if self._dying:
            on &= np.array([books.by_slot[slot].alive for slot in arena.request[record.nodes].tolist()])
        if over.any():
            if books.plan_rows:
                chains = subgraphs[over]
                books.lane_map(worker, book.cell.type_id).leave(arena.lane[chains])
                arena.lane[chains] = NOWHERE
                arena.lane_worker[chains] = NOWHERE
            if books.observed:
                books.stopped(book.cell.type_id, record.nodes[over], ends[over])
        book.ready.merge(np.sort((arena.sequence[subgraphs[on]] << NODE_BITS) | (record.nodes[on] + 1)))
        return np.concatenate((finished, ends[over] - 1))

    def _release_sources(self, book: TypeBook, record: StepRecord) -> None:
        """The step has read its inputs: rows without further readers are free."""
        if not book.value_ports:
            return
        arena, is_host = self._books.arena, self._books.tables.is_host
        for port in book.value_ports:
            nodes = record.nodes
            if (
                record.entering is not None
                and book.num_sequence_inputs is not None
                and port >= book.num_sequence_inputs
            ):
                nodes = record.entering
            if len(nodes) == 0:
                continue
            tables = arena.source_table[port, nodes]
            from_node = (tables != 0) & ~is_host[tables]
            sources = arena.source[port, nodes[from_node]]
            np.subtract.at(arena.uses, sources, 1)
            self._free_unused(sources)

    def _free_unused(self, nodes: Nodes) -> None:
        arena = self._books.arena
        unused = nodes[(arena.uses[nodes] == 0) & ~arena.held[nodes] & (arena.row[nodes] != NOWHERE)]
        if len(unused):
            self._books.free_rows(np.unique(unused))

    def _finish(self, nodes: Nodes, result: Finished) -> None:
        """These nodes are done: release the subgraphs that waited for them, count down their requests."""
        books, arena = self._books, self._books.arena
        arena.state[nodes] = DONE
        consumers, producers = arena.consumers(nodes)
        if len(consumers):
            external = arena.subgraph[consumers] != arena.subgraph[producers]
            waiting = arena.subgraph[consumers[external]]
            np.subtract.at(arena.external, waiting, 1)
            self.release(np.unique(waiting[arena.external[waiting] == 0]))
        slots = arena.request[nodes]
        np.subtract.at(books.left, slots, 1)
        over = sorted(set(slots[books.left[slots] == 0].tolist()))  # whatever the order of rows
        result.finished.extend(books.by_slot[slot] for slot in over)
        if books.attached:
            self._finish_late(nodes, result)

    def _finish_late(self, nodes: Nodes, result: Finished) -> None:
        """The same for what an extension has attached to nodes that were already on their way."""
        books, arena = self._books, self._books.arena
        for node in nodes.tolist():
            book = books.by_slot[int(arena.request[node])]
            if book.request not in books.attached:
                continue
            consumers = np.array(book.waiting_edges.pop(node, ()), np.int64)
            if len(consumers):
                waiting = arena.subgraph[consumers]
                np.subtract.at(arena.external, waiting, 1)
                self.release(np.unique(waiting[arena.external[waiting] == 0]))
            for fetched, bits in book.late_fetches.pop(node, ()):
                result.reads.extend(self._reads(book, fetched, bits))
            if node in book.late_drops:
                dropped = np.array(book.late_drops.pop(node), np.int64)
                arena.held[dropped] = False
                self._free_unused(dropped)
            if not book.waiting_edges and not book.late_fetches and not book.late_drops:
                del books.attached[book.request]

    # --- readiness -------------------------------------------------------------------------------------------

    def release(self, subgraphs: NDArray[np.int64]) -> None:
        """These subgraphs have all their external inputs: they join their type's queue with their ready nodes."""
        books, arena = self._books, self._books.arena
        if len(subgraphs) == 0:
            return
        if self._dying:
            slots = arena.request[arena.head[subgraphs]].tolist()
            subgraphs = subgraphs[[books.by_slot[slot].alive for slot in slots]]
        arena.sequence[subgraphs] = books.sequence + np.arange(len(subgraphs))
        books.sequence += len(subgraphs)
        types = arena.type[subgraphs]
        for type_id in set(types.tolist()):
            mine = subgraphs[types == type_id]
            first, counts = self._first_nodes(mine)
            keys: Keys = (np.repeat(arena.sequence[mine], counts) << NODE_BITS) | first
            arena.state[first] = READY
            books.types[type_id].ready.append(keys)

    def _first_nodes(self, subgraphs: Nodes) -> tuple[Nodes, Nodes]:
        """The nodes of these subgraphs that wait for no other node of theirs, in order, and how many each has."""
        arena = self._books.arena
        heads = arena.head[subgraphs]
        spans = np.where(arena.end[subgraphs] > 0, 1, arena.span[subgraphs])
        if (spans == 1).all():
            return heads, spans
        owners = np.repeat(np.arange(len(subgraphs)), spans)
        nodes = np.repeat(heads - np.cumsum(spans) + spans, spans) + np.arange(spans.sum())
        first = (arena.subgraph[nodes] == subgraphs[owners]) & (arena.pending[nodes] == 0)
        return nodes[first], np.bincount(owners[first], minlength=len(subgraphs))

    # --- unfold functions that wait --------------------------------------------------------------------------

    def fetch_late(self, book: RequestBook, graph: CellGraph) -> list[Read]:
        """Serve fetches of nodes from before this extension: at once if they are done, else when they finish."""
        arena = self._books.arena
        reads: list[Read] = []
        for fetch in graph.fetches:
            for node in map(book.number, fetch.nodes[fetch.nodes < graph.first].tolist()):
                end = int(arena.end[arena.subgraph[node]])
                tail = end - 1 if end > 0 else node
                if arena.state[tail] == DONE:
                    reads.extend(self._reads(book, node, 1 << fetch.output))
                elif arena.row[node] != NOWHERE:  # it was held when it was submitted, so it was given a row then
                    book.late_fetches.setdefault(tail, []).append((node, 1 << fetch.output))
                    self._books.attached[book.request] = book
        return reads

    def _reads(self, book: RequestBook, node: int, bits: int) -> list[Read]:
        arena = self._books.arena
        if arena.row[node] == NOWHERE:  # a step that an open-ended run did not reach
            return []
        pool = self._books.types[int(arena.type[arena.subgraph[node]])].pool
        return [
            Read(book.request, node, output, spec.table, int(arena.row[node]))
            for output, spec in enumerate(pool.tables)
            if bits >> output & 1
        ]

    def drop_handles(self, book: RequestBook, dropped: Iterable[tuple[int, int]]) -> None:
        """The unfold function can no longer use these local nodes (first, count).

        A node on a worker, or of a run that goes on, is let go when it ends: nobody may take over its row before.
        """
        arena = self._books.arena
        for local, count in dropped:
            first = book.number(local) if count else 0
            nodes = np.arange(first, first + count)
            ends = arena.end[arena.subgraph[nodes]]
            tails = np.where(ends > 0, ends - 1, nodes)
            done = arena.state[tails] == DONE
            under_way = ~done & arena.held[nodes] & (arena.row[nodes] != NOWHERE)
            arena.held[nodes[~under_way]] = False
            self._free_unused(nodes[done])
            for node, tail in zip(nodes[under_way].tolist(), tails[under_way].tolist(), strict=True):
                book.late_drops.setdefault(tail, []).append(node)
                self._books.attached[book.request] = book

    # --- sequences ---------------------------------------------------------------------------------------------

    def will_keep(self, book: RequestBook, local: Nodes) -> None:
        """The request's sequence is a reader of these nodes, each named once; what it had kept before it has anyway."""
        book.kept = np.array([book.number(node) for node in local.tolist()], np.int64)
        fresh = book.kept if book.shelf is None else book.kept[local >= book.shelf.extent.num_nodes]
        self._books.arena.uses[fresh] += 1

    def keep(self, book: RequestBook) -> list[Reserve]:
        """The request was answered: its sequence has what it wanted to keep, in place of what it had."""
        books = self._books
        if book.sequence is None:
            return []
        nodes = np.empty(0, np.int64) if book.kept is None else book.kept
        shelf, grown = books.shelves.put(book.sequence, nodes)
        if books.depths is not None and shelf is not None:
            books.depths.rest(shelf.nodes)
        return [Reserve(books.tables.all_host(), books.arena.node_capacity)] if grown and books.plan_rows else []

    # --- endings -----------------------------------------------------------------------------------------------

    def forget(self, book: RequestBook) -> None:
        """A request is over: give back everything that it still owns. None of its steps is on a worker."""
        for extent in book.extents:
            if book.may_own_rows:
                nodes = np.arange(extent.base, extent.base + extent.num_nodes)
                owners = nodes[self._books.arena.row[nodes] != NOWHERE]
                if len(owners):
                    self._books.free_rows(owners)
            self._books.admission.release(extent)
        if self._books.frontiers is not None:
            self._books.frontiers.forget(book.slot, book.extents)
        self._books.attached.pop(book.request, None)
        del self._books.by_slot[book.slot]
        self._books.priorities.leave(book.slot)
        self._books.slots.release(book.slot, 1)
        if book.shelf is not None:
            self._books.shelves.give_back(book.shelf)

    def kill(self, book: RequestBook) -> None:
        """A request ends early: nothing more of it is submitted; what is on a worker finishes first."""
        books, arena = self._books, self._books.arena
        book.may_own_rows = True
        books.attached.pop(book.request, None)
        for type_book in books.types:
            if len(type_book.ready):
                type_book.ready.discard(lambda keys: arena.request[nodes_of(keys)] == book.slot)
        if books.frontiers is not None:
            books.frontiers.withdraw(book.extents)
        self._dying.append(book)
        self.bury()

    def bury(self) -> None:
        """Forget ended requests of which no worker holds a step any more."""
        arena = self._books.arena
        if not self._dying:
            return
        still = []
        for book in self._dying:
            spans = [slice(e.first_subgraph, e.first_subgraph + e.num_subgraphs) for e in book.extents]
            if any(arena.in_flight[span].any() for span in spans):
                still.append(book)
                continue
            for span in spans:
                self._leave_lanes(np.arange(span.start, span.stop))
            self.forget(book)
        self._dying = still

    def _leave_lanes(self, subgraphs: NDArray[np.int64]) -> None:
        arena = self._books.arena
        for subgraph in subgraphs[arena.lane[subgraphs] != NOWHERE].tolist():
            worker = WorkerId(int(arena.lane_worker[subgraph]))
            lanes = self._books.lane_map(worker, TypeId(int(arena.type[subgraph])))
            lanes.leave(arena.lane[subgraph : subgraph + 1])
            arena.lane[subgraph] = NOWHERE
            arena.lane_worker[subgraph] = NOWHERE
