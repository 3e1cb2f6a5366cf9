"""What follows when steps finish and when a request ends, and what unfold functions and sequences have to do with it.

`Scheduler` calls it for every StepsFinished, extension, Reply and Fail. `retire` and `leave` are the compiled
loops; here is what only requests have whose unfold functions wait, and chunks of sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Ints
from batchmaker.core import leave
from batchmaker.core.commands import Command, Read, Reserve, StateStored, StoredRow
from batchmaker.core.copies import earlier_nodes, fetch_late
from batchmaker.core.events import RequestId, SequenceId, StepsFinished
from batchmaker.core.layout import ID, NOWHERE
from batchmaker.core.progress import let_go, release
from batchmaker.core.retire import RETIRED
from batchmaker.core.rows import NoMemoryError, RowPool
from batchmaker.core.state import NO_NODES, SchedulerState, TaskEntry
from batchmaker.core.turn import TURN
from batchmaker.errors import InvariantError
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.spec import TypeId


@final
class Completion:
    """Updates the state when steps finish and when requests end."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def entry_of(self, event: StepsFinished) -> TaskEntry:
        """Note that steps have run; return their task.

        InvariantError if they are not the next ones of a task that is on a worker.
        """
        tasks = self._state.tasks
        entry = tasks.get(event.task)
        num_steps = 0 if entry is None else len(entry.run.ends)
        if entry is None or event.first != entry.num_finished or not event.first < event.end <= num_steps:
            raise InvariantError(f"steps {event.first} to {event.end} of task {event.task} finished out of turn")
        entry.num_finished = event.end
        if event.end == num_steps:
            del tasks[event.task]
        return entry

    def retired(
        self, event: StepsFinished, entry: TaskEntry, result: Ints, counts: Sequence[int], answered: bool
    ) -> tuple[Ints, list[RequestId], list[tuple[RequestId, str]], list[Read], Ints]:
        """Update what is not in the tables after steps were retired there. result, answered: see `retire`; counts: the
        first of `result`.

        Returns the slots of requests without work left; if they are answered, their numbers; (request, reason) of rows
        for which the cell raised; outputs that were asked for while their nodes were on the worker; and the nodes that
        are done: single nodes, and the last of runs.
        """
        state, arena, run = self._state, self._state.arena, entry.run
        num_finished, num_dying, num_done, num_stopped = counts[:RETIRED]
        finished, at = result[TURN : TURN + num_finished], TURN + num_finished * (4 if answered else 1) + num_dying
        ids = list[RequestId]()
        if answered and num_finished:
            ids = result[TURN + num_finished : TURN + 2 * num_finished].tolist()
            if state.chunks:
                self._note_keeps(
                    finished, result[TURN + 2 * num_finished : TURN + 4 * num_finished].reshape(2, num_finished)
                )
        if num_dying:
            state.dying = np.concatenate((state.dying, result[at - num_dying : at]))
        if num_stopped and state.observed:
            stops = result[at + num_done : at + num_done + 2 * num_stopped].reshape(2, num_stopped)
            state.stopped(run.type_id, stops[0], stops[1] + 1, run.nodes)
        done = result[at : at + num_done]
        reads = self._finish_late(done) if state.attached else []
        failed = list[tuple[RequestId, str]]()
        for position, reason in event.failed:
            slot = int(arena.request[run.nodes[position]])
            if arena.is_alive(slot):
                failed.append((state.id_of(slot), reason))
        return finished, ids, failed, reads, done

    def _free_unused(self, nodes: Ints) -> None:
        """Free the rows of those of these nodes that have no readers left and are not held."""
        arena = self._state.arena
        unused = nodes[(arena.uses[nodes] == 0) & (arena.held[nodes] == 0) & (arena.row[nodes] != NOWHERE)]
        if len(unused):
            self._state.free_rows(np.unique(unused))

    def _finish_late(self, nodes: Ints) -> list[Read]:
        """Serve what extensions have attached to nodes that are done: consumers, fetches and dropped handles."""
        state, arena, reads = self._state, self._state.arena, list[Read]()
        for node in nodes.tolist():
            slot = int(arena.request[node])
            attached = state.attached.get(slot)
            if attached is None:
                continue
            consumers = np.array(attached.edges.pop(node, ()), np.int64)
            if len(consumers):
                waiting = arena.subgraph[consumers]
                np.subtract.at(arena.external, waiting, 1)
                self.release(np.unique(waiting[arena.external[waiting] == 0]))
            for fetched, bits in attached.fetches.pop(node, ()):
                reads.extend(self._reads(slot, fetched, bits))
            if node in attached.drops:
                dropped = np.array(attached.drops.pop(node), np.int64)
                arena.held[dropped] = 0
                self._free_unused(dropped)
            if not attached.edges and not attached.fetches and not attached.drops:
                del state.attached[slot]
        return reads

    def release(self, subgraphs: NDArray[np.int64]) -> None:
        """Queue the ready nodes of these subgraphs, whose external inputs are all done."""
        if len(subgraphs):
            a = self._state.arena
            release(a.nodes, a.subgraphs, a.requests, a.types, a.queue, a.counts, subgraphs)

    # --- unfold functions that wait --------------------------------------------------------------------------

    def fetch_late(self, slots: Sequence[int], graphs: Sequence[CellGraph]) -> dict[int, list[Read]]:
        """Serve fetches of nodes from before these graphs, which are extensions of the requests in these slots.

        Returns, by slot, a Read for each output of nodes that are done. For nodes on a worker the Read comes when they
        are done. Nodes that are not submitted need none: their own step fetches the output.
        """
        state, wanted = self._state, list[tuple[int, int, int]]()
        for slot, graph in zip(slots, graphs, strict=True):
            if not graph.first or graph.known_fetches_earlier is False or not graph.fetches_earlier:
                continue
            for fetch in graph.fetches:
                for local in fetch.nodes.tolist():
                    if local < graph.first:
                        wanted.append((slot, local, fetch.output))
        reads: dict[int, list[Read]] = {}
        if wanted and state.plan_rows:
            places = np.array(wanted, np.int64).T.copy()
            answers = fetch_late(state.arena.tables, places).T.tolist()
            ids = state.arena.requests[ID, places[0]].tolist()
            for (slot, _, output), request, (node, table, row, tail) in zip(wanted, ids, answers, strict=True):
                if row != NOWHERE:
                    reads.setdefault(slot, []).append(Read(request, node, output, table, row))
                elif tail != NOWHERE:
                    state.attached[slot].fetches[tail].append((node, 1 << output))
        return reads

    def _reads(self, slot: int, node: int, bits: int) -> list[Read]:
        """Return the reads of these outputs of a node that is done."""
        state, arena = self._state, self._state.arena
        if arena.row[node] == NOWHERE:  # the run ended before this step
            return []
        pool = state.types[int(arena.type[arena.subgraph[node]])].pool
        return [
            Read(state.id_of(slot), node, output, spec.table, int(arena.row[node]))
            for output, spec in enumerate(pool.tables)
            if bits >> output & 1
        ]

    def drop_handles(self, dropped: Sequence[tuple[int, int, int]]) -> None:
        """Note that unfold functions can no longer use some nodes: their slot, first local node, and number."""
        if dropped:
            places = np.array(dropped, np.int64).T.copy()
            self._drop(np.stack((earlier_nodes(self._state.arena.tables, places), places[2]), axis=1))

    def drop_all(self, ended: Sequence[int]) -> None:
        """Note that the unfold functions of these requests have ended: they can use no node any more. ended: slots."""
        places = self._state.arena.spans_of(ended)
        if len(places):
            self._drop(places)

    def _drop(self, places: Ints) -> None:
        """Let go of nodes that were held for unfold functions. places: [extents, 2] first node, and number of nodes.

        A node that is on a worker, or in a run that continues, stays held until it ends. Otherwise another node could
        take over its row before that.
        """
        arena = self._state.arena
        nodes, under_way, tails = let_go(np.ascontiguousarray(places), arena.nodes, arena.subgraphs)
        if len(nodes):
            self._state.free_rows(np.unique(nodes))
        for node, tail in zip(under_way.tolist(), tails.tolist(), strict=True):
            self._state.attached[int(arena.request[node])].drops[tail].append(node)

    # --- sequences ---------------------------------------------------------------------------------------------

    def will_keep(self, slots: Sequence[int], graphs: Sequence[CellGraph]) -> None:
        """Note what the sequences of requests keep after them, if these graphs of theirs say it.

        The sequence reads the nodes of these graphs and stored nodes already; here it does earlier nodes of the
        request.
        """
        state = self._state
        keeping = list[tuple[int, Ints]]()
        for slot, graph in zip(slots, graphs, strict=True):
            nodes = graph.kept_nodes
            if nodes is None:
                continue
            keeping.append((slot, nodes))
            stored = state.chunks[slot].stored
            num_stored = 0 if stored is None else stored.num_nodes
            if num_stored < graph.first:
                state.arena.uses[state.numbers_of(slot, nodes[(nodes >= num_stored) & (nodes < graph.first)])] += 1
        if keeping:
            state.keep(keeping)

    def keep_decided(self, slot: int, nodes: Ints) -> None:
        """Let the sequence of a request keep these nodes, too, behind those that were known when it began."""
        self._state.keep([(slot, np.concatenate((self._state.chunks[slot].kept_nodes, -1 - nodes)))])
        self._state.arena.uses[nodes] += 1

    def fit_kept(self) -> list[Reserve]:
        """Have room to store what sequences keep after the requests in flight, before one of these is answered.

        Returns a Reserve for the host tables if the arena has grown.
        """
        state = self._state
        if not state.fit_kept() or not state.plan_rows:
            return []
        return [Reserve(state.tables.all_host(), state.arena.node_capacity)]

    def _note_keeps(self, answered: Ints, stored: Ints) -> None:
        """Note what the sequences of answered requests keep. stored: see `store_kept`."""
        state = self._state
        made = state.store.put(
            [
                (chunk.sequence, base, first, len(chunk.kept_nodes))
                for slot, base, first in zip(answered.tolist(), *stored.tolist(), strict=True)
                if (chunk := state.chunks.get(slot)) is not None
            ]
        )
        if state.depths is not None:
            for nodes in made:
                state.depths.rest(nodes.nodes)

    def restore(self, sequence: SequenceId, types: Sequence[TypeId]) -> list[Command]:
        """Let a sequence that keeps nothing keep new nodes of these types. Returns how tables grow, and StateStored."""
        state = self._state
        wanted = Counter(self._pool(type_id).number for type_id in types) if state.plan_rows else {}
        pools = {pool.number: pool for pool in map(self._pool, types)}
        commands: list[Command] = []
        try:
            for number, count in wanted.items():
                grown = state.tables.fit_rows(pools[number], count, count, state.grow)
                commands += [] if grown is None else [grown]
        except NoMemoryError as error:
            return [*commands, StateStored(sequence, (), str(error))]
        rows = [state.arena.take_row(self._pool(one).number) if state.plan_rows else NOWHERE for one in types]
        if types:
            stored, has_grown = state.store.restore(sequence, types, rows)
            if state.depths is not None:
                state.depths.rest(stored.nodes)
            if has_grown and state.plan_rows:
                commands.append(Reserve(state.tables.all_host(), state.arena.node_capacity))
        return [*commands, StateStored(sequence, self.stored(sequence))]

    def stored(self, sequence: SequenceId) -> tuple[StoredRow, ...]:
        """Return where the nodes are that a sequence keeps, in their order. No request of it may be in flight."""
        state, arena = self._state, self._state.arena
        nodes = state.store.nodes_of(sequence)
        of = zip(arena.type[arena.subgraph[nodes]].tolist(), arena.row[nodes].tolist(), strict=True)
        return tuple([StoredRow(TypeId(one), self._pool(TypeId(one)).table_ids, row) for one, row in of])

    def _pool(self, type_id: TypeId) -> RowPool:
        return self._state.types[type_id].pool

    # --- endings -----------------------------------------------------------------------------------------------

    def leave(self, answered: Ints) -> None:
        """Forget answered requests. Those with steps of loops on a worker, submitted ahead, are forgotten later."""
        state = self._state
        dying, stored = leave.leave(state.arena.tables, answered)
        if state.chunks:
            self._note_keeps(answered, stored)
        if len(dying):
            state.dying = np.concatenate((state.dying, dying))

    def kill(self, slot: int) -> None:
        """End a request early: nothing more of it is submitted. Its steps on workers finish first."""
        state = self._state
        arena = state.arena
        leave.kill(arena.nodes, arena.requests, arena.types, arena.queue, slot)
        state.attached.pop(slot, None)
        if state.frontiers is not None:
            state.frontiers.withdraw(state.arena.spans_of((slot,)))
        self._bury(np.array([slot]), state.dying)

    def bury(self) -> None:
        """Forget the dying requests of which no worker has a step any more."""
        self._bury(self._state.dying, NO_NODES)

    def _bury(self, dying: Ints, others: Ints) -> None:
        state = self._state
        still = leave.bury(state.arena.tables, dying)
        state.dying = np.concatenate((others, still))
        self.forgotten(dying)

    def forgotten(self, slots: Ints) -> None:
        """Drop what is known of those of these ended requests that are not dying: their slots are free."""
        state = self._state
        gone = slots if not len(state.dying) else np.setdiff1d(slots, state.dying)
        if len(gone):
            state.forgotten(gone.tolist())
            if state.watched is not None:
                state.watched.forget(gone.tolist())
