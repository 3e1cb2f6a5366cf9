"""A request's graph as the words that a device which schedules itself works on: entries, places of rows, readers.

All places are counted from the request's own first byte, so one plan serves all requests that share a graph. A run is
one entry, at any length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Ints
from batchmaker.compile.export import torch_dtype
from batchmaker.device.extents import aligned
from batchmaker.device.layout import AT_END, LISTED, NONE, Entry, Input, Output, Request
from batchmaker.graph.cell_graph import HOST, ZERO, CellGraph, HostInput, NodeBlock, Run
from batchmaker.graph.spec import CellType, TypeId, ValueSpec


def row_bytes(spec: ValueSpec) -> int:
    """Return the bytes of one value."""
    return math.prod(spec.shape) * torch_dtype(spec.dtype).itemsize


@final
@dataclass(frozen=True, slots=True)
class PlannedType:
    """A type of the core. number: there. inputs, outputs: bytes of the rows."""

    number: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @classmethod
    def of(cls, number: int, cell: CellType) -> PlannedType:
        """Return what plans need to know of a cell type."""
        return cls(number, tuple(map(row_bytes, cell.inputs)), tuple(map(row_bytes, cell.outputs)))

    @property
    def num_words(self) -> int:
        """Words of an entry."""
        return len(Entry) + len(Input) * len(self.inputs) + len(Output) * len(self.outputs)


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """The words of a request but for its slot, the address of its results, and its data.

    image: the first words. feeds: for each host input of the graph, the bytes at which its values lie, and their
    number. num_words: with the data; only these are sent. num_bytes: with the rows. answer_bytes: of the results.
    entries, ready: (type of the core, how many): all, and those that wait for nothing. again: the types of which one
    step or node follows another. answers: [nodes, outputs] the byte of the results, or NONE.
    """

    image: Ints
    feeds: tuple[tuple[int, int], ...]
    num_words: int
    num_bytes: int
    answer_bytes: int
    entries: tuple[tuple[int, int], ...]
    ready: tuple[tuple[int, int], ...]
    again: frozenset[int]
    answers: Ints
    num_nodes: int


@dataclass(slots=True)
class _Group:
    """Entries of one type that lie one after the other: nodes of a block, or one run.

    nodes: ascending; all steps of a run. at: their places in the block. word: of the first entry. states: of each
    output of a run, where it lies for the next step, counted from the first row.
    """

    kind: PlannedType
    source: NodeBlock | Run
    nodes: Ints
    at: Ints
    word: int = 0
    states: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        return 1 if isinstance(self.source, Run) else len(self.nodes)

    @property
    def words(self) -> Ints:
        """The word of each entry, [count]."""
        return self.word + self.kind.num_words * np.arange(self.count)


@final
class _Places:
    """Where values of nodes lie. at: [nodes, kinds] the byte, NONE if nowhere. num_bytes: of all."""

    __slots__ = ("at", "num_bytes")

    def __init__(self, num_nodes: int, kinds: int) -> None:
        self.at = np.full((num_nodes, kinds), NONE, np.int64)
        self.num_bytes = 0

    def take(self, num_bytes: int) -> int:
        """Return the first of so many bytes."""
        first = self.num_bytes
        self.num_bytes += aligned(num_bytes)
        return first

    def shift(self, num_bytes: int) -> None:
        """Let all lie so many bytes further on."""
        self.at[self.at != NONE] += num_bytes


def plan_of(graph: CellGraph, types: Mapping[TypeId, PlannedType]) -> Plan:
    """Return the plan of a whole request. types: all that it uses. The graph has nodes, no regions and no memories."""
    groups = list(_groups(graph, types))
    num_nodes, word = graph.num_nodes, len(Request)
    entry = np.zeros(num_nodes, np.int64)
    for group in groups:
        group.word = word
        entry[group.nodes] = group.words
        word += group.kind.num_words * group.count
    writers, readers, read = _edges(groups, entry)
    words = np.concatenate([group.words for group in groups])
    ready = np.setdiff1d(words, readers, assume_unique=False)

    num_outputs = max(len(group.kind.outputs) for group in groups)
    fetched = np.zeros((num_nodes, num_outputs), np.bool_)
    for fetch in graph.fetches:
        fetched[fetch.nodes, fetch.output] = True
    rows, answers = _Places(num_nodes, num_outputs), _Places(num_nodes, num_outputs)
    for group in groups:
        _place_rows(group, read, rows)
        for output, size in enumerate(group.kind.outputs):
            _place(group, output, size, fetched, answers, size)
    data = _Places(num_nodes, max(len(group.kind.inputs) for group in groups))
    feeds = [_place_data(host, types[host.type_id].inputs[host.port], data) for host in graph.host_inputs]

    readers_at = word
    ready_at = readers_at + len(readers)
    lists_at = ready_at + len(ready)
    lists = [_listed(group, k, rows, data) for group in groups for k in range(_num_sequences(group))]
    front = lists_at + sum([0 if listed is None else len(listed) for listed in lists])
    data_at = aligned(8 * front)
    rows_at = data_at + data.num_bytes
    data.shift(data_at)
    rows.shift(rows_at)

    image = np.zeros(data_at // 8, np.int64)
    image[Request.LEFT] = len(words)
    image[Request.READY], image[Request.NUM_READY] = ready_at, len(ready)
    image[readers_at:ready_at] = readers
    image[ready_at:lists_at] = ready
    at = lists_at
    for group in groups:
        group.states = [NONE if place == NONE else rows_at + place for place in group.states]
        at = _write(group, image, rows.at, answers.at, data.at, at)
    if len(readers):
        for places, numbers in (
            (writers, (Entry.READERS, Entry.NUM_READERS)),
            (np.sort(readers), (None, Entry.MISSING)),
        ):
            each, first, count = np.unique(places, return_index=True, return_counts=True)
            if numbers[0] is not None:
                image[each + numbers[0]] = readers_at + first
            image[each + numbers[1]] = count
    return Plan(
        image,
        tuple([(data_at + first, size) for first, size in feeds]),
        rows_at // 8,
        rows_at + rows.num_bytes,
        answers.num_bytes,
        _counted(image[words + Entry.TYPE]),
        _counted(image[ready + Entry.TYPE]),
        _repeated(groups, image, writers, readers),
        answers.at,
        num_nodes,
    )


def _groups(graph: CellGraph, types: Mapping[TypeId, PlannedType]) -> Iterator[_Group]:
    for block in graph.blocks:
        for type_id in np.unique(block.types).tolist():
            at = np.flatnonzero(block.types == type_id)
            yield _Group(types[type_id], block, block.first + at, at)
    for run in graph.runs:
        at = np.arange(run.length)
        yield _Group(types[run.type_id], run, run.first + at, at)


def _num_sequences(group: _Group) -> int:
    return len(group.source.sequences) if isinstance(group.source, Run) else 0


def _edges(groups: Sequence[_Group], entry: Ints) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Return which entries wait for which, and what is read.

    writers, readers: words of entries, ordered by the first; a pair is there once, whatever its rows. read: [nodes,
    outputs].
    """
    read = np.zeros((len(entry), max(len(group.kind.outputs) for group in groups)), np.bool_)
    writers, readers = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for group in groups:
        for nodes, outputs, at in _reads(group):
            read[nodes, outputs] = True
            writers.append(entry[nodes])
            readers.append(group.words[at])
    pairs = np.unique(np.concatenate(writers) << 32 | np.concatenate(readers))
    return pairs >> 32, pairs & ((1 << 32) - 1), read


def _reads(group: _Group) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Yield what entries read of other nodes: the nodes, the outputs, and the places of the entries in the group."""
    if isinstance(group.source, Run):
        run = group.source
        found = [given for given in run.sequences if given is not None]
        found += [(np.array([node]), output) for node, output in run.init if node >= 0]
        for nodes, output in found:
            yield nodes, np.full(len(nodes), output), np.zeros(len(nodes), np.int64)
        return
    for sources, outputs in zip(group.source.sources, group.source.outputs, strict=True):
        mine = sources[group.at]
        at = np.flatnonzero(mine >= 0)
        if len(at):
            yield mine[at], outputs[group.at[at]].astype(np.int64), at


def _place_rows(group: _Group, read: NDArray[np.bool_], rows: _Places) -> None:
    """Give room to what is read of a group's outputs, and to the state of a run."""
    kind, run = group.kind, group.source if isinstance(group.source, Run) else None
    num_states = 0 if run is None or run.length == 1 else len(run.init)
    for output, size in enumerate(kind.outputs):
        _place(group, output, size, read, rows, aligned(size))
        if run is not None:
            is_state = output >= len(kind.outputs) - num_states
            kept = int(rows.at[run.last, output])
            shares = kept != NONE and int(rows.at[run.first, output]) == NONE  # only the end is kept, in its place
            group.states.append((kept if shares else rows.take(size)) if is_state else NONE)


def _place(group: _Group, output: int, size: int, wanted: NDArray[np.bool_], places: _Places, stride: int) -> None:
    """Give room to an output of all nodes of a group if one's is wanted; of a run, to its end if that suffices."""
    mine = wanted[group.nodes, output]
    if isinstance(group.source, Run) and not mine[:-1].any():
        if mine[-1]:
            places.at[group.nodes[-1], output] = places.take(size)
    elif mine.any():
        places.at[group.nodes, output] = places.take(stride * len(mine)) + stride * np.arange(len(mine))


def _place_data(host: HostInput, size: int, data: _Places) -> tuple[int, int]:
    """Give room to the values of a host input, in their order. Returns the first byte and the number of bytes."""
    first = data.take(size * host.count)
    data.at[host.rows(0), host.port] = first + size * np.arange(host.count)
    return first, size * host.count


def _places(group: _Group, k: int, rows: Ints, data: Ints) -> Ints:
    """Return where the rows of sequence input k of a run lie, of each step."""
    assert isinstance(group.source, Run)
    given = group.source.sequences[k]
    found: Ints = data[group.nodes, k] if given is None else rows[given[0], given[1]]
    return found


def _listed(group: _Group, k: int, rows: _Places, data: _Places) -> Ints | None:
    """Return the places of a sequence input if they have no stride."""
    places = _places(group, k, rows.at, data.at)
    steps = np.diff(places)
    return None if len(steps) == 0 or bool((steps == steps[0]).all()) else places


def _write(group: _Group, image: Ints, rows: Ints, answers: Ints, data: Ints, lists_at: int) -> int:
    """Write the entries of a group. Returns where the next list of places goes."""
    kind, source = group.kind, group.source
    entries = image[group.word : group.word + kind.num_words * group.count].reshape(group.count, -1)
    entries[:, Entry.TYPE] = kind.number
    entries[:, Entry.STEPS] = source.length if isinstance(source, Run) else 1
    entries[:, Entry.HOME] = group.words
    inputs = entries[:, len(Entry) : len(Entry) + len(Input) * len(kind.inputs)].reshape(group.count, -1, len(Input))
    inputs[:, :, Input.STATE] = NONE
    if isinstance(source, Run):
        num_sequences = len(source.sequences)
        for k in range(num_sequences):
            places = _places(group, k, rows, data)
            steps = np.diff(places)
            if len(steps) and not (steps == steps[0]).all():
                image[lists_at : lists_at + len(places)] = places
                inputs[0, k, Input.WHERE], inputs[0, k, Input.STRIDE] = 8 * lists_at, LISTED
                lists_at += len(places)
            else:
                inputs[0, k, Input.WHERE] = places[0]
                inputs[0, k, Input.STRIDE] = steps[0] if len(steps) else 0
        states = group.states[len(group.states) - len(source.init) :]
        for k, ((node, output), state) in enumerate(zip(source.init, states, strict=True), start=num_sequences):
            where = NONE if node == ZERO else data[source.first, k] if node == HOST else rows[node, output]
            inputs[0, k, Input.WHERE], inputs[0, k, Input.STATE] = where, state
    else:
        for k in range(len(kind.inputs)):
            nodes, outputs = source.sources[k, group.at], source.outputs[k, group.at]
            inputs[:, k, Input.WHERE] = np.where(nodes < 0, data[group.nodes, k], rows[nodes, outputs])
    outputs_at = len(Entry) + len(Input) * len(kind.inputs)
    made = entries[:, outputs_at:].reshape(group.count, -1, len(Output))
    for output in range(len(kind.outputs)):
        made[:, output, Output.STATE] = group.states[output] if group.states else NONE
        for places, where, stride in (
            (rows, Output.KEPT, Output.KEPT_STRIDE),
            (answers, Output.ANSWER, Output.ANSWER_STRIDE),
        ):
            at = places[group.nodes, output]
            if isinstance(source, Run):
                at_end = at[0] == NONE or source.length == 1
                made[0, output, where], made[0, output, stride] = (
                    at[-1 if at_end else 0],
                    AT_END if at_end else at[1] - at[0],
                )
            else:
                made[:, output, where], made[:, output, stride] = at, AT_END
    return lists_at


def _counted(types: Ints) -> tuple[tuple[int, int], ...]:
    """Return each number with how often it is there."""
    found, counts = np.unique(types, return_counts=True)
    return tuple(zip(found.tolist(), counts.tolist(), strict=True))


def _repeated(groups: Sequence[_Group], image: Ints, writers: Ints, readers: Ints) -> frozenset[int]:
    """Return the types of which a run has several steps, or an entry reads another of its type."""
    runs = [group for group in groups if isinstance(group.source, Run) and group.source.length > 1]
    of = image[writers + Entry.TYPE]
    alike = of[of == image[readers + Entry.TYPE]]
    return frozenset([group.kind.number for group in runs] + np.unique(alike).tolist())
