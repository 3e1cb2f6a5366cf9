"""What follows when steps finish and when a request ends: rows freed, subgraphs released, numbers given back.

The scheduler core calls it for every StepsFinished, extension, Reply and Fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.errors import InvariantError
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.spec import TypeId
from batchmaker.scheduler.arena import DONE, NOWHERE
from batchmaker.scheduler.commands import Read, Reserve
from batchmaker.scheduler.events import RequestId, StepsFinished, WorkerId
from batchmaker.scheduler.numbering import Extent
from batchmaker.scheduler.progress import end_step, finish, release, stop_or_go_on
from batchmaker.scheduler.ready import nodes_of
from batchmaker.scheduler.row_release import let_go
from batchmaker.scheduler.state import NO_NODES, Nodes, RequestEntry, SchedulerState, TaskEntry, TypeEntry
from batchmaker.scheduler.steps import DONE as DONE_NODES

NEVER: Final = np.empty(0, np.bool_)


@dataclass(slots=True)
class Finished:
    """What finished steps mean for requests.

    - type_id, num_steps, num_rows: what has run.
    - finished: requests without work left.
    - failed: (request, reason) of rows for which the cell raised.
    - reads: outputs that were asked for while their nodes were on the worker.
    """

    type_id: TypeId
    num_steps: int
    num_rows: int
    finished: list[RequestEntry] = field(default_factory=list)
    failed: list[tuple[RequestId, str]] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)


@final
class Completion:
    """Updates the state when steps finish and when requests end.

    A *dying* request has ended while a worker still had steps of it. Its numbers and rows are freed when no worker has
    any.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._dying: list[RequestEntry] = []
        self._dying_slots: Nodes = np.empty(0, np.int64)

    def started(self, task: TaskEntry) -> None:
        """Note that a task was submitted."""
        self._state.tasks[task.task] = task

    def steps_finished(self, event: StepsFinished) -> Finished:
        """Update the state after steps; return the requests that they finished or failed.

        InvariantError if the steps are not the next ones of a task that is on a worker.
        """
        state, arena = self._state, self._state.arena
        task = state.tasks.get(event.task)
        if task is None or event.first != task.num_finished or not event.first < event.end <= task.num_steps:
            raise InvariantError(f"steps {event.first} to {event.end} of task {event.task} finished out of turn")
        begin, end = task.before(event.first), task.before(event.end)
        num_steps = event.end - event.first
        task.num_finished = event.end
        if task.num_finished == task.num_steps:
            del state.tasks[event.task]
        entry = state.types[task.type_id]
        entry.num_running -= num_steps
        state.worker_steps[task.worker] -= num_steps
        state.worker_steering[task.worker] -= int(np.count_nonzero(task.steers[event.first : event.end]))
        nodes, subgraphs = task.nodes[begin[0] : end[0]], task.subgraphs[begin[0] : end[0]]
        self._read(entry, nodes, subgraphs, task.entering[begin[2] : end[2]])
        for lane_map, lane in task.left[begin[3] : end[3]]:
            lane_map.leave(np.array([lane]))
        result = Finished(task.type_id, num_steps, len(nodes))
        if event.failed:
            positions = [position for position, _ in event.failed]
            for slot, (_, reason) in zip(arena.request[task.nodes[positions]].tolist(), event.failed, strict=True):
                owner = state.by_slot[slot]
                if owner.alive:
                    result.failed.append((owner.request, reason))
        done, of_step = task.done[begin[1] : end[1]], task.ends[DONE_NODES, event.first : event.end] - begin[1]
        if task.may_stop[event.first : event.end].any():
            last = self._stop_or_go_on(entry, task, nodes, subgraphs, event.stopped)
            done = np.concatenate((done, last))
        if len(done):
            self._finish(done, of_step, result)
        return result

    def _read(self, entry: TypeEntry, nodes: Nodes, subgraphs: Nodes, entering: Nodes) -> None:
        """Note that steps have run and have read their inputs: free the rows that have no more readers."""
        arena = self._state.arena
        unused, found = end_step(
            arena.of_nodes, arena.of_subgraphs, arena.source, arena.source_table, self._state.tables.is_host,
            entry.ports, entry.num_sequence_inputs or 0, nodes, subgraphs, entering,
        )  # fmt: skip
        if len(unused):
            for begin, end in pairwise((0, *found.tolist())):
                if begin < end:
                    unused[begin:end].sort()
                    self._state.free_rows(unused[begin:end])

    def _stop_or_go_on(
        self, entry: TypeEntry, task: TaskEntry, nodes: Nodes, subgraphs: Nodes, stopped: NDArray[np.bool_] | None
    ) -> Nodes:
        """Return the last nodes of the runs that stop here. The next nodes of the other runs become ready."""
        state, arena, type_id = self._state, self._state.arena, entry.cell.type_id
        over_at, last, following = stop_or_go_on(
            arena.of_nodes, arena.of_subgraphs, state.lane_map(task.worker, type_id).occupant, self._dying_slots,
            NEVER if stopped is None else np.array(stopped, np.bool_), nodes, subgraphs,
        )  # fmt: skip
        if len(last) and state.observed:
            state.stopped(type_id, over_at, last + 1, task.nodes)
        entry.ready.merge(following)
        return last

    def _free_unused(self, nodes: Nodes) -> None:
        """Free the rows of those of these nodes that have no readers left and are not held."""
        arena = self._state.arena
        unused = nodes[(arena.uses[nodes] == 0) & (arena.held[nodes] == 0) & (arena.row[nodes] != NOWHERE)]
        if len(unused):
            self._state.free_rows(np.unique(unused))

    def _finish(self, nodes: Nodes, of_step: Nodes, result: Finished) -> None:
        """Note that these nodes are done: release the subgraphs that waited for them, and count down their requests.

        of_step: [steps] how many of the nodes were done by the end of each step. Nodes beyond the last of these counts
        belong to the last step.
        """
        state, arena = self._state, self._state.arena
        subgraphs, slots, places = finish(
            arena.of_nodes, arena.of_subgraphs, arena.consumer, state.left, state.own_type_follows, nodes
        )
        subgraphs.sort()
        self.release(subgraphs)
        if len(slots) > 1:  # by step, then by slot, so that the order of the rows has no effect
            slots = slots[np.lexsort((slots, np.searchsorted(of_step[:-1], places, side="right")))]
        result.finished.extend([state.by_slot[slot] for slot in slots.tolist()])
        if state.attached:
            self._finish_late(nodes, result)

    def _finish_late(self, nodes: Nodes, result: Finished) -> None:
        """Serve what extensions have attached to these nodes: consumers, fetches and dropped handles."""
        state, arena = self._state, self._state.arena
        for node in nodes.tolist():
            entry = state.by_slot[int(arena.request[node])]
            attached = state.attached.get(entry.request)
            if attached is None:
                continue
            consumers = np.array(attached.edges.pop(node, ()), np.int64)
            if len(consumers):
                waiting = arena.subgraph[consumers]
                np.subtract.at(arena.external, waiting, 1)
                self.release(np.unique(waiting[arena.external[waiting] == 0]))
            for fetched, bits in attached.fetches.pop(node, ()):
                result.reads.extend(self._reads(entry, fetched, bits))
            if node in attached.drops:
                dropped = np.array(attached.drops.pop(node), np.int64)
                arena.held[dropped] = 0
                self._free_unused(dropped)
            if not attached.edges and not attached.fetches and not attached.drops:
                del state.attached[entry.request]

    # --- readiness -------------------------------------------------------------------------------------------

    def release(self, subgraphs: NDArray[np.int64]) -> None:
        """Queue the ready nodes of these subgraphs, whose external inputs are all done."""
        state, arena = self._state, self._state.arena
        if len(subgraphs) == 0:
            return
        keys, begins, _ = release(
            arena.of_nodes, arena.of_subgraphs, self._dying_slots, len(state.types), state.places(len(subgraphs)),
            subgraphs,
        )  # fmt: skip
        for entry, (begin, end) in zip(state.types, pairwise(begins.tolist()), strict=True):
            if begin < end:
                entry.ready.append(keys[begin:end])

    # --- unfold functions that wait --------------------------------------------------------------------------

    def fetch_late(self, entry: RequestEntry, graph: CellGraph) -> list[Read]:
        """Serve fetches of nodes from before this extension.

        Returns a Read for each output of nodes that are done. For nodes on a worker the Read comes when they are done.
        Nodes that are not submitted need none: their own step fetches the output.
        """
        arena = self._state.arena
        reads: list[Read] = []
        for fetch in graph.fetches:
            for node in map(entry.number, fetch.nodes[fetch.nodes < graph.first].tolist()):
                end = int(arena.end[arena.subgraph[node]])
                tail = end - 1 if end > 0 else node
                if arena.state[tail] == DONE:
                    reads.extend(self._reads(entry, node, 1 << fetch.output))
                elif arena.row[node] != NOWHERE:  # submitted; it was held then, so it has a row
                    self._state.attached[entry.request].fetches[tail].append((node, 1 << fetch.output))
        return reads

    def _reads(self, entry: RequestEntry, node: int, bits: int) -> list[Read]:
        """Return the reads of these outputs of a node that is done."""
        arena = self._state.arena
        if arena.row[node] == NOWHERE:  # the run ended before this step
            return []
        pool = self._state.types[int(arena.type[arena.subgraph[node]])].pool
        return [
            Read(entry.request, node, output, spec.table, int(arena.row[node]))
            for output, spec in enumerate(pool.tables)
            if bits >> output & 1
        ]

    def drop_handles(self, dropped: Sequence[tuple[RequestEntry, int, int]]) -> None:
        """Note that unfold functions can no longer use some nodes: (request, first local node, count)."""
        places = [(entry.number(local), count) for entry, local, count in dropped if count]
        if places:
            self._drop(places)

    def drop_all(self, ended: Iterable[RequestEntry]) -> None:
        """Note that the unfold functions of these requests have ended: they can use no node any more."""
        places = [(extent.base, extent.num_nodes) for entry in ended for extent in entry.extents if extent.num_nodes]
        if places:
            self._drop(places)

    def _drop(self, places: Sequence[tuple[int, int]]) -> None:
        """Let go of nodes (first, count) that were held for unfold functions.

        A node that is on a worker, or in a run that continues, stays held until it ends. Otherwise another node could
        take over its row before that.
        """
        arena = self._state.arena
        nodes, under_way, tails = let_go(np.array(places, np.int64), arena.of_nodes, arena.of_subgraphs)
        if len(nodes):
            self._state.free_rows(np.unique(nodes))
        for node, tail in zip(under_way.tolist(), tails.tolist(), strict=True):
            owner = self._state.by_slot[int(arena.request[node])]
            self._state.attached[owner.request].drops[tail].append(node)

    # --- sequences ---------------------------------------------------------------------------------------------

    def will_keep(self, entries: Sequence[RequestEntry], local: Sequence[Nodes]) -> None:
        """Count the requests' sequences as readers of local nodes, [nodes] of each request. Each is named once.

        Stored nodes already have their sequence as a reader.
        """
        num_stored = [0 if entry.stored is None else entry.stored.extent.num_nodes for entry in entries]
        counts = [len(nodes) for nodes in local]
        joined, ends = np.concatenate(local), np.cumsum(counts)
        is_fresh = joined >= np.repeat(num_stored, counts)
        if all(len(entry.extents) == 1 for entry in entries):
            own = [entry.extents[0].base - entry.extents[0].first_local for entry in entries]
            before = [0 if entry.stored is None else entry.stored.extent.base for entry in entries]
            kept = joined + np.where(is_fresh, np.repeat(own, counts), np.repeat(before, counts))
        else:
            kept = np.concatenate([entry.numbers_of(nodes) for entry, nodes in zip(entries, local, strict=True)])
        for entry, end, count in zip(entries, ends.tolist(), counts, strict=True):
            entry.kept = kept[end - count : end]
        self._state.arena.uses[kept[is_fresh]] += 1

    def keep(self, answered: Sequence[RequestEntry]) -> list[Reserve]:
        """Store the nodes that the sequences of these computed requests keep; see SequenceStore.put.

        Returns a Reserve for the host tables if the arena has grown.
        """
        state = self._state
        kept = [(b.sequence, NO_NODES if b.kept is None else b.kept) for b in answered if b.sequence is not None]
        if not kept:
            return []
        made, grown = state.store.put(kept)
        if state.depths is not None:
            for stored in made:
                state.depths.rest(stored.nodes)
        return [Reserve(state.tables.all_host(), state.arena.node_capacity)] if grown and state.plan_rows else []

    # --- endings -----------------------------------------------------------------------------------------------

    def leave(self, answered: Sequence[RequestEntry]) -> None:
        """Forget answered requests. Those with steps of loops on a worker, submitted ahead, are forgotten later."""
        over: list[RequestEntry] = []
        for entry in answered:
            (self._dying if entry.may_own_rows and self._is_on_worker(entry) else over).append(entry)
        self.forget(over)

    def _is_on_worker(self, entry: RequestEntry) -> bool:
        in_flight = self._state.arena.in_flight
        return any(in_flight[e.first_subgraph : e.first_subgraph + e.num_subgraphs].any() for e in entry.extents)

    def forget(self, over: Sequence[RequestEntry]) -> None:
        """Give back all that these ended requests still own. No worker has a step of them."""
        state = self._state
        slots = [entry.slot for entry in over]
        for entry in over:
            if entry.may_own_rows:
                self._free_rows_of(entry.extents)
            del state.by_slot[entry.slot]
            if state.attached:
                state.attached.pop(entry.request, None)
            if state.priorities.differ:
                state.priorities.leave(entry.slot)
        state.admission.release([extent for entry in over for extent in entry.extents])
        state.slots.release_each(slots, (1,) * len(slots))
        if state.watched is not None and slots:
            state.watched.forget(slots)
        state.store.give_back([entry.stored for entry in over if entry.stored is not None])

    def _free_rows_of(self, extents: Iterable[Extent]) -> None:
        for extent in extents:
            nodes = np.arange(extent.base, extent.base + extent.num_nodes)
            owners = nodes[self._state.arena.row[nodes] != NOWHERE]
            if len(owners):
                self._state.free_rows(owners)

    def kill(self, entry: RequestEntry) -> None:
        """End a request early: nothing more of it is submitted. Its steps on workers finish first."""
        state, arena = self._state, self._state.arena
        entry.may_own_rows = True
        state.attached.pop(entry.request, None)
        for type_entry in state.types:
            if len(type_entry.ready):
                type_entry.ready.discard(lambda keys: arena.request[nodes_of(keys)] == entry.slot)
        if state.frontiers is not None:
            state.frontiers.withdraw(entry.extents)
        if not self._is_on_worker(entry):
            self._bury(entry)
            return
        self._dying.append(entry)
        self._dying_slots = np.append(self._dying_slots, entry.slot)

    def bury(self) -> None:
        """Forget the dying requests of which no worker has a step any more."""
        if not self._dying:
            return
        still = []
        for entry in self._dying:
            if self._is_on_worker(entry):
                still.append(entry)
            else:
                self._bury(entry)
        self._dying = still
        self._dying_slots = np.array([entry.slot for entry in still], np.int64)

    def _bury(self, entry: RequestEntry) -> None:
        for extent in entry.extents:
            self._leave_lanes(extent.first_subgraph + np.arange(extent.num_subgraphs))
        self.forget((entry,))

    def _leave_lanes(self, subgraphs: NDArray[np.int64]) -> None:
        """Free the lanes of those of these subgraphs that have one."""
        arena = self._state.arena
        for subgraph in subgraphs[arena.lane[subgraphs] != NOWHERE].tolist():
            worker = WorkerId(int(arena.lane_worker[subgraph]))
            lanes = self._state.lane_map(worker, TypeId(int(arena.type[subgraph])))
            lanes.leave(arena.lane[subgraph : subgraph + 1])
            arena.lane[subgraph] = NOWHERE
            arena.lane_worker[subgraph] = NOWHERE
