"""Regions: what a request computes depending on values, recorded once and begun as often as values decide.

The whole request is a region; so is each branch of `cond` and `switch`, and the body of a `while_loop`. A region has
*slots*, each for one output of a node, and *items*: segments, which are pieces of graph, and decisions. An item begins
when all items that fill its slots have ended. A region contains no data of requests, so requests share it. The words
are those of structured control flow in MLIR (region, branch, body).

A region never changes once it is made. Equal regions are the same object; see `shared`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from types import FunctionType
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.graph.cell_graph import CellGraph, Fetch

ARGUMENT: Final = -3
"""A source in a segment's graph: ARGUMENT - k is the segment's argument k."""
SPAN: Final = -(1 << 40)
"""A source in a segment's graph: SPAN - k is the segment's span k."""
NO_SLOT: Final = -1
A_LIST: Final = 0
"""The step of a span that is what a loop has collected."""


@final
@dataclass(frozen=True, slots=True)
class Segment:
    """Nodes that begin together. Their numbers in `graph` count from 0.

    - graph: None for the nodes of the request's own graph, which begin with the request.
    - arguments: slots that nodes read; see ARGUMENT. The types of their producers are not fixed, so their tables are
      found when the segment begins.
    - exports: (slot, node, output) that other items read.
    - spans: sequences that nodes read; see SPAN. (slot of the first node, slot of the length, step to the next node);
      of what a loop has collected, the first slot is that of the list, and the step is A_LIST.
    - size: NO_SLOT, or the slot of a length: `graph` has one node, or a run of one step, and the segment begins with so
      many of them (see `sized`). Its inputs that are spans take an element each.
    - ends: of a run of such a length, (slot, output, slot of its first state or NO_SLOT): what the last step returned.
    - fetched: outputs of this step that go to the host.
    - loops: of its graph, that end at a value. Only the driver looks inside.
    """

    graph: CellGraph | None
    arguments: tuple[int, ...]
    exports: tuple[tuple[int, int, int], ...]
    spans: tuple[tuple[int, int, int], ...] = ()
    size: int = NO_SLOT
    ends: tuple[tuple[int, int, int], ...] = ()
    fetched: tuple[int, ...] = ()
    loops: tuple[Any, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Branch:
    """A region that may begin inside another. captured: (its own slot, slot outside) that are filled as it begins."""

    region: Region
    captured: tuple[tuple[int, int], ...]


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """`cond` or `switch`: the value in slot `index` says which branch begins; its outputs fill `results`.

    is_cond: any value but 0 is the first of two branches. Otherwise values count from 0. line: where in the unfold
    function it is called, for the start of an error; see `at_line`.
    """

    index: int
    branches: tuple[Branch, ...]
    results: tuple[int, ...]
    is_cond: bool
    line: str


@final
@dataclass(frozen=True, slots=True)
class WhileLoop:
    """`while_loop`. Its slots `state` hold the state: at first that of `init`, then what the body last gave.

    - going: slot of the value that says whether the body runs at all; NO_SLOT if it always does.
    - body: its outputs are the state after it; then, if `tests`, whether it runs again; then, if `filters`, whether the
      state is collected.
    - limit: slot with the most iterations. progress: first of four slots of the loop's own. The last is how many
      iterations were collected.
    - collected: (number of the collection, place in the state) that are told after each iteration. listed: (slot of the
      list, place in the state) that are kept for spans. After the slot of the list is one more of its own.
    """

    going: int
    body: Branch
    state: tuple[int, ...]
    init: tuple[int, ...]
    limit: int
    progress: int
    tests: bool
    filters: bool
    collected: tuple[tuple[int, int], ...]
    listed: tuple[tuple[int, int], ...]


@final
@dataclass(frozen=True, slots=True)
class Pick:
    """`at`: slot `result` is filled with the element of a sequence that the value in slot `index` names.

    first: slot of the sequence's first node and its output. count: slot with its length. step: from each node to the
    next. line: see Choice.
    """

    index: int
    first: int
    count: int
    step: int
    result: int
    line: str


@final
@dataclass(frozen=True, slots=True)
class Tell:
    """A sequence that is the request's result, told element by element under the number of a collection.

    first, count, step: see Pick. progress: a slot of its own.
    """

    number: int
    first: int
    count: int
    step: int
    progress: int


Item = Segment | Choice | WhileLoop | Pick | Tell


@final
@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """See the module.

    - num_slots. items: in an order in which they can begin. follows: for each item, the items that wait for it.
    - outputs: slots that whoever began it gets. constants: (slot, number). held: (slot, slot of a count, step) of the
      nodes that its slots keep alive: so many nodes from the one in the slot.
    """

    num_slots: int
    items: tuple[Item, ...]
    follows: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]
    constants: tuple[tuple[int, int], ...]
    held: tuple[tuple[int, int, int], ...]

    @property
    def num_needs(self) -> list[int]:
        """For each item, how many items it waits for."""
        needs = [0] * len(self.items)
        for following in self.follows:
            for item in following:
                needs[item] += 1
        return needs


MOST_SHARED: Final = 4096
_SHARED: Final[dict[object, Region]] = {}


def shared(region: Region) -> Region:
    """Return the region that stands for all regions equal to this one. Its inner regions are such already."""
    key = (region.num_slots, tuple(map(_key, region.items)), region.outputs, region.constants, region.held)
    if len(_SHARED) >= MOST_SHARED:
        _SHARED.clear()
    return _SHARED.setdefault(key, region)


@lru_cache(MOST_SHARED)
def repeats(region: Region) -> bool:
    """Whether a request may come to the same place in it several times: by a `while_loop`, or a run in a segment."""
    for item in region.items:
        if isinstance(item, WhileLoop) or (isinstance(item, Segment) and item.graph is not None and item.graph.runs):
            return True
        if isinstance(item, Choice) and any(repeats(branch.region) for branch in item.branches):
            return True
    return False


@lru_cache(MOST_SHARED)
def segments_of(region: Region) -> tuple[Segment, ...]:
    """Return the segments that a region and those inside it may begin, each once, in an order that is always the same.

    The request's own graph is not among them.
    """
    segments, seen = list[Segment](), set[int]()

    def look(inside: Region) -> None:
        if id(inside) in seen:
            return
        seen.add(id(inside))
        for item in inside.items:
            if isinstance(item, Segment):
                segments.extend([item] if item.graph is not None else [])
            elif isinstance(item, Choice | WhileLoop):
                for branch in item.branches if isinstance(item, Choice) else (item.body,):
                    look(branch.region)

    look(region)
    return tuple(segments)


@lru_cache(MOST_SHARED)
def stopping_types(region: Region) -> frozenset[int]:
    """Return the types of the runs in it that a value may end."""
    return frozenset(
        run.type_id for one in segments_of(region) if one.graph for run in one.graph.runs if run.open_ended
    )


def _key(item: Item) -> object:
    """Return what is equal for equal items."""
    if isinstance(item, Segment):
        graph = None if item.graph is None else graph_key(item.graph)
        loops = tuple([_loop_key(loop) for loop in item.loops])
        read = (item.arguments, item.exports, item.spans)
        return (Segment, graph, loops, *read, item.size, item.ends, item.fetched)
    if isinstance(item, Choice):
        return (Choice, item.index, tuple(map(_branch_key, item.branches)), item.results, item.is_cond, item.line)
    if isinstance(item, WhileLoop):
        body = _branch_key(item.body)
        parts = (item.going, item.state, item.init, item.limit, item.progress, item.tests, item.filters)
        return (WhileLoop, body, *parts, item.collected, item.listed)
    if isinstance(item, Tell):
        return (Tell, item.number, item.first, item.count, item.step, item.progress)
    return (Pick, item.index, item.first, item.count, item.step, item.result, item.line)


def _loop_key(loop: Any) -> object:
    """Return what is equal for loops that end at the same values."""
    return (loop.first, loop.last, *[(output, _until_key(until)) for output, until in loop.conditions])


def _until_key(until: Any) -> object:
    """Return what is equal for a function that is made anew for each request. All others are alike if they are one."""
    if type(until) is not FunctionType:
        return (type(until), until if type(until) in (bool, int) else id(until))
    try:
        bound = [cell.cell_contents for cell in until.__closure__ or ()]
    except ValueError:  # a name that has no value yet
        return id(until)
    bound += [*(until.__defaults__ or ()), *(until.__kwdefaults__ or {}).values()]
    return (
        until.__code__,
        id(until.__globals__),
        *[(type(one), one if type(one) in (bool, int, float, str) else id(one)) for one in bound],
    )


def _branch_key(branch: Branch) -> object:
    return (id(branch.region), branch.captured)


def graph_key(graph: CellGraph) -> object:
    """Return what is equal for graphs of equal nodes, runs and fetches. The graphs have no data of a request."""
    blocks = [(b.first, _bytes(b.types), _bytes(b.sources), _bytes(b.outputs), b.connected) for b in graph.blocks]
    runs = [
        (
            run.type_id,
            run.first,
            run.length,
            run.init,
            run.open_ended,
            tuple([None if column is None else (_bytes(column[0]), column[1]) for column in run.sequences]),
        )
        for run in graph.runs
    ]
    fetches = [(_bytes(fetch.nodes), fetch.output) for fetch in graph.fetches]
    memories = [
        (m.port, m.first, m.count, m.source, m.step, m.length, m.output, m.is_run, m.own) for m in graph.memories
    ]
    return (graph.num_nodes, tuple(blocks), tuple(runs), tuple(fetches), graph.plain, tuple(memories))


def _bytes(array: NDArray[Any]) -> tuple[object, ...]:
    return (array.shape, array.tobytes())


def sized(graph: CellGraph, count: int, fetched: tuple[int, ...]) -> CellGraph:
    """Return a graph of `count` nodes, or of a run of so many steps, like the one of `graph`. fetched: see Segment."""
    blocks = [
        replace(
            block,
            types=np.repeat(block.types, count),
            sources=np.repeat(block.sources, count, axis=1),
            outputs=np.repeat(block.outputs, count, axis=1),
        )
        for block in graph.blocks
    ]
    fetches = [Fetch(np.arange(count), fetch.output) for fetch in graph.fetches]
    fetches += [Fetch(np.array([count - 1]), output) for output in fetched]
    return CellGraph(
        0,
        count,
        blocks,
        [replace(run, length=count) for run in graph.runs],
        [],
        fetches,
        graph.plain,
        shared=True,
        memories=[replace(read, count=count) for read in graph.memories],
    )
