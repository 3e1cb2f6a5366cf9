"""Compiles all compiled loops of the scheduler before the first request, so that no request waits for a compiler.

The engine calls `prepare` when it starts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import ClassVar, Final, final

import numpy as np

from batchmaker.core import sequence_store
from batchmaker.core.arena import Arena
from batchmaker.core.commands import Command, RunTask
from batchmaker.core.copies import GraphCopies, earlier_nodes, fetch_late, num_fitting
from batchmaker.core.events import (
    CellTypeAdded,
    GraphExtended,
    RequestArrived,
    RequestCancelled,
    RequestId,
    SequenceId,
    StepsFinished,
)
from batchmaker.core.layout import NODES
from batchmaker.core.progress import count_submitted, free_rows
from batchmaker.core.queues import order_again
from batchmaker.core.scheduler import Scheduler
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.recorder import Recorder
from batchmaker.graph.spec import CellType, TypeId, ValueSpec
from batchmaker.graph.values import HostValues, are_below
from batchmaker.policies.base import CellPolicy, ReadyView
from batchmaker.policies.cellular import CellularPolicy

_NUMBER: Final = ValueSpec((), "int64")
_LEAF = CellType(TypeId(0), "leaf", (_NUMBER,), (_NUMBER,), (1, 4))
_INNER = CellType(TypeId(1), "inner", (_NUMBER, _NUMBER), (_NUMBER,), (1, 4))
_CHAIN = CellType(TypeId(2), "chain", (_NUMBER, _NUMBER), (_NUMBER,), (1, 4))
_LOOP = CellType(TypeId(3), "loop", (_NUMBER, _NUMBER), (_NUMBER,), (1, 4))
_CELLS: Final = (_LEAF, _INNER, _CHAIN, _LOOP)


@cache
def prepare() -> None:
    """Compile every loop, or load it from the disk cache: small requests run through a scheduler of their own.

    Later calls in the same process do nothing. The policy reads requests, depths and frontiers. The requests are
    chains, loops, trees and lattices, a request that waits for a value and a chunk of a sequence. Two requests share a
    graph, and one is cancelled.
    """
    scheduler = Scheduler(_LookingAtAll(max_steps=5), num_workers=2)
    graphs = 2 * (_chain(), _loop(), _tree(), _lattice())
    first, second = _waiting()
    waiting = RequestId(len(graphs))
    arrivals = [
        *(RequestArrived(RequestId(i), graph, 0.0, priority=i % 2) for i, graph in enumerate(graphs)),
        RequestArrived(waiting, first, 0.0, open=True),
        RequestArrived(RequestId(waiting + 1), _chunk(), 0.0, sequence=SequenceId(0)),
    ]
    following = deque(scheduler.handle(*(CellTypeAdded(cell, 0.0) for cell in _CELLS), *arrivals))
    following.extend(scheduler.handle(RequestCancelled(RequestId(0), 0.0), GraphExtended(waiting, second, 0.0)))
    while following:
        following.extend(_carried_out(scheduler, following.popleft()))
    plain, chain = Scheduler(CellularPolicy()), _chain()
    plain.handle(*(CellTypeAdded(cell, 0.0) for cell in _CELLS))
    for request in range(2):
        plain.handle(RequestArrived(RequestId(request), chain, 0.0))
    _call_the_rest()


def _call_the_rest() -> None:
    """Call what those requests do not need."""
    arena, none = Arena(), np.empty(0, np.int64)
    are_below(none, 0)
    arena.add_type(_LEAF, arena.add_pool((1,)))
    order_again(arena.nodes, arena.subgraphs, arena.requests, arena.types, arena.queue)
    free_rows(arena.nodes, arena.subgraphs, arena.types, arena.pools, arena.free_rows, none)
    arena.release(NODES, none, none)
    sequence_store.free(arena.tables, np.empty((0, 3), np.int64))
    earlier_nodes(arena.tables, np.empty((3, 0), np.int64))
    fetch_late(arena.tables, np.empty((3, 0), np.int64))
    num_fitting(arena.tables, GraphCopies(arena, keeps_sources=True).tables, none, none)
    count_submitted(arena.nodes, arena.subgraphs, np.empty((0, 3), np.int64), none, none, np.empty((0, 0), np.int64))


def _carried_out(scheduler: Scheduler, command: Command) -> list[Command]:
    """Carry out a command; return the commands that follow. If runs may stop, every second position stops."""
    following: list[Command] = []
    if isinstance(command, RunTask):
        stopped = np.arange(len(command.nodes)) % 2 == 1 if command.may_stop is not None else None
        following += scheduler.handle(StepsFinished(command.task, 0, command.num_steps, 0.0, stopped))
    return following


@final
class _LookingAtAll(CellPolicy):
    name = "looking at all"
    watches_requests: ClassVar[bool] = True
    needs_depth: ClassVar[bool] = True
    one_depth: ClassVar[bool] = True
    needs_frontiers: ClassVar[bool] = True

    def rank(self, view: ReadyView) -> Sequence[TypeId]:
        def key(type_id: TypeId) -> tuple[int, ...]:
            steps = view.requests.left[:, type_id]
            return view.depths.lowest_ready(type_id), view.frontiers.independent(type_id), int(steps.sum()), type_id

        return sorted(view.ready, key=key)


def _host_values(*numbers: int) -> HostValues:
    return HostValues(np.array(numbers), len(numbers), _NUMBER)


def _chain() -> CellGraph:
    recorder = Recorder()
    recorder.fetch(recorder.run(_CHAIN, [_host_values(1, 2, 3)], None)[0])
    graph = recorder.take()
    graph.shared = True
    return graph


def _loop() -> CellGraph:
    recorder = Recorder()
    recorder.run(_LOOP, [_host_values(1, 2, 3)], None, open_ended=True)
    return recorder.take()


def _tree() -> CellGraph:
    recorder = Recorder()
    leaves = recorder.map(_LEAF, [_host_values(1, 2, 3)])
    recorder.fetch(recorder.tree(_INNER, np.array([[0, 1], [3, 2]]), leaves, [])[0][-1])
    return recorder.take()


def _lattice() -> CellGraph:
    """A graph of single calls: only its edges tell which nodes form a subgraph."""
    recorder = Recorder()
    (leaf,) = recorder.node(_LEAF, [_host_values(1)])
    (inner,) = recorder.node(_INNER, [leaf, leaf])
    recorder.fetch(recorder.node(_INNER, [inner, leaf])[0])
    return recorder.take()


def _chunk() -> CellGraph:
    """The graph of a sequence's chunk, which keeps the node that it computes."""
    recorder = Recorder()
    recorder.fetch(recorder.node(_LEAF, [_host_values(1)])[0])
    recorder.keep(np.zeros(1, np.int64))
    return recorder.take()


def _waiting() -> tuple[CellGraph, CellGraph]:
    """The graph of a request that waits for a value, and its extension."""
    recorder = Recorder()
    (value,) = recorder.node(_LEAF, [_host_values(1)])
    recorder.fetch(value)
    first = recorder.take()
    recorder.fetch(recorder.node(_INNER, [value, value])[0])
    return first, recorder.take()
