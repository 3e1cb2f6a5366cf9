"""A request's graph as the words that a device which schedules itself works on: entries, places of rows, readers.

All places are counted from the request's own first byte, so one plan serves all requests that share a graph. A run is
one entry, at any length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, final

import numpy as np

from batchmaker.arrays import Flags, Ints
from batchmaker.compile.export import row_bytes
from batchmaker.compiled import compiled, compiled_inline, compiled_within
from batchmaker.device.extents import ALIGNMENT, aligned
from batchmaker.device.layout import AT_END, LISTED, NONE, EntryWord, InputWord, OutputWord, RequestWord
from batchmaker.graph.cell_graph import HOST, CellGraph
from batchmaker.graph.spec import CellType, TypeId

_TYPE, _HEAD, _STEPS, _SEQUENCES = range(4)
"""Columns of a node: its type in the core; the first node of its run, or itself; the steps of the run that begins
there, 1 for a single node and 0 inside of a run; how many of the inputs are sequences, in a run."""
_INPUTS, _OUTPUTS, _BYTES = range(3)
"""Columns of a type: numbers of inputs and outputs, and from the third on the bytes of each output."""
_ENTRIES, _READY, _AGAIN = range(3)
"""Columns of what is counted for each type."""
_REQUEST_WORDS, _ENTRY_WORDS, _INPUT_WORDS, _OUTPUT_WORDS = map(len, (RequestWord, EntryWord, InputWord, OutputWord))
_LEFT, _READY_AT, _NUM_READY = map(int, (RequestWord.LEFT, RequestWord.READY, RequestWord.NUM_READY))
_E_TYPE, _E_MISSING, _E_STEPS, _E_HOME = map(int, (EntryWord.TYPE, EntryWord.MISSING, EntryWord.STEPS, EntryWord.HOME))
_E_READERS, _E_NUM_READERS = map(int, (EntryWord.READERS, EntryWord.NUM_READERS))
_E_UNTIL, _E_VALUE, _E_LENGTH = map(int, (EntryWord.UNTIL, EntryWord.VALUE, EntryWord.LENGTH))
_I_WHERE, _I_STRIDE, _I_STATE = map(int, InputWord)
_O_KEPT, _O_KEPT_STRIDE, _O_STATE, _O_ANSWER, _O_ANSWER_STRIDE = map(int, OutputWord)
_ALIGNMENT: Final = ALIGNMENT


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


@final
@dataclass(frozen=True, slots=True)
class RequestPlan:
    """The words of a request but for its slot, the address of its results, and its data.

    image: the first words. feeds: for each host input of the graph, the bytes at which its values lie, and their
    number. num_words: with the data; only these are sent. num_bytes: with the rows. answer_bytes: of the results.
    entries, ready: (type of the core, how many): all, and those that wait for nothing. again: the types of which one
    step or node follows another. answers: [nodes, outputs] the byte of the results, or NONE. lengths: [nodes] at the
    first node of a loop that ends at a value, the byte of its number of steps; NONE elsewhere.
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
    lengths: Ints
    num_nodes: int


Stops = Mapping[int, tuple[int, int]]
"""First node of a loop -> the output, an integer of 4 or 8 bytes, and the value at which the loop ends."""
NO_STOPS: Final[Stops] = MappingProxyType({})


def plan_of(graph: CellGraph, types: Mapping[TypeId, PlannedType], stops: Stops = NO_STOPS) -> RequestPlan:
    """Return the plan of a whole request. types: all that it uses. The graph has nodes, no regions and no memories.

    stops: of its open-ended runs. Of these, other nodes read the end alone.
    """
    used = {int(kind) for block in graph.blocks for kind in np.unique(block.types)}
    used.update(int(run.type_id) for run in graph.runs)
    mine = {kind: types[TypeId(kind)] for kind in used}
    num_inputs = max(len(kind.inputs) for kind in mine.values())
    num_outputs = max(len(kind.outputs) for kind in mine.values())
    numbers = np.zeros(max(used) + 1, np.int64)
    kinds = np.zeros((max(kind.number for kind in mine.values()) + 1, _BYTES + num_outputs), np.int64)
    for type_id, kind in mine.items():
        numbers[type_id] = kind.number
        kinds[kind.number, : _BYTES + len(kind.outputs)] = (len(kind.inputs), len(kind.outputs), *kind.outputs)

    count = graph.num_nodes
    nodes = np.zeros((count, 4), np.int64)
    sources, outputs = np.full((num_inputs, count), HOST, np.int64), np.zeros((num_inputs, count), np.int64)
    for block in graph.blocks:
        first, end = block.first, block.first + block.count
        nodes[first:end, _TYPE] = numbers[block.types]
        nodes[first:end, _HEAD] = np.arange(first, end)
        nodes[first:end, _STEPS] = 1
        rows = min(num_inputs, len(block.sources))
        sources[:rows, first:end], outputs[:rows, first:end] = block.sources[:rows], block.outputs[:rows]
    for run in graph.runs:
        first, end = run.first, run.first + run.length
        nodes[first:end] = (numbers[run.type_id], first, 0, len(run.sequences))
        nodes[first, _STEPS] = run.length
        for k, sequence in enumerate(run.sequences):
            if sequence is not None:
                sources[k, first:end], outputs[k, first:end] = sequence
        for k, (node, output) in enumerate(run.init, start=len(run.sequences)):
            sources[k, first], outputs[k, first] = node, output
    until = np.full((count, 2), NONE, np.int64)
    for first, stop in stops.items():
        until[first] = stop
    wanted = np.zeros((count, num_outputs), np.bool_)
    for fetch in graph.fetches:
        wanted[fetch.nodes, fetch.output] = True
    data, feeds, num_bytes = np.full((num_inputs, count), NONE, np.int64), [], 0
    for host in graph.host_inputs:
        size = types[host.type_id].inputs[host.port]
        data[host.port, host.rows(0)] = num_bytes + size * np.arange(host.count)
        feeds.append((num_bytes, size * host.count))
        num_bytes += aligned(size * host.count)

    image, answers, lengths, counts, ends = _laid_out(nodes, sources, outputs, data, num_bytes, wanted, kinds, until)
    data_at, rows_at, end, answer_bytes = ends.tolist()
    counted = counts.tolist()
    return RequestPlan(
        image,
        tuple([(data_at + first, size) for first, size in feeds]),
        rows_at // 8,
        end,
        answer_bytes,
        tuple([(number, one[_ENTRIES]) for number, one in enumerate(counted) if one[_ENTRIES]]),
        tuple([(number, one[_READY]) for number, one in enumerate(counted) if one[_READY]]),
        frozenset([number for number, one in enumerate(counted) if one[_AGAIN]]),
        answers,
        lengths,
        count,
    )


@compiled_inline
def _up(num_bytes: int) -> int:
    return (num_bytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


@compiled_inline
def _place(at: Ints, wanted: Flags, first: int, steps: int, output: int, size: int, stride: int, num_bytes: int) -> int:
    """Give room to an output of a node or run, from byte `num_bytes` on; of a run only to its end if that suffices.

    at: [nodes, outputs] is updated. Returns one past the last byte.
    """
    last = first + steps - 1
    some = False
    for node in range(first, last):
        some = some or wanted[node, output]
    if some:
        for node in range(first, last + 1):
            at[node, output] = num_bytes
            num_bytes += stride
    elif wanted[last, output]:
        at[last, output] = num_bytes
        num_bytes += stride
    return num_bytes


@compiled_within
def _entries(nodes: Ints, kinds: Ints, counts: Ints) -> tuple[Ints, int, int]:
    """Return the word of the entry that begins at each node, one past the last word, and the number of entries."""
    entry, word, num_entries = np.zeros(len(nodes), np.int64), _REQUEST_WORDS, 0
    for node in range(len(nodes)):
        steps, kind = nodes[node, _STEPS], nodes[node, _TYPE]
        if steps > 0:
            entry[node] = word
            word += _ENTRY_WORDS + _INPUT_WORDS * kinds[kind, _INPUTS] + _OUTPUT_WORDS * kinds[kind, _OUTPUTS]
            num_entries += 1
            counts[kind, _ENTRIES] += 1
            if steps > 1:
                counts[kind, _AGAIN] = 1
    return entry, word, num_entries


@compiled_within
def _readers(
    nodes: Ints, sources: Ints, outputs: Ints, kinds: Ints, counts: Ints, num_outputs: int
) -> tuple[Flags, Ints, Ints]:
    """Return who reads whom: [nodes, outputs] whether a node reads it; [nodes] for how many entries each entry waits,
    and how many wait for it.

    A reader waits for an entry once, however many of its rows it reads; all its reads come together.
    """
    num_nodes = len(nodes)
    read = np.zeros((num_nodes, num_outputs), np.bool_)
    missing, num_readers, seen = np.zeros(num_nodes, np.int64), np.zeros(num_nodes, np.int64), np.full(num_nodes, -1)
    for node in range(num_nodes):
        reader, kind = nodes[node, _HEAD], nodes[node, _TYPE]
        for k in range(kinds[kind, _INPUTS]):
            source = sources[k, node]
            if source >= 0:
                read[source, outputs[k, node]] = True
                writer = nodes[source, _HEAD]
                if seen[writer] != reader:
                    seen[writer] = reader
                    num_readers[writer] += 1
                    missing[reader] += 1
                    if nodes[writer, _TYPE] == kind:
                        counts[kind, _AGAIN] = 1
    return read, missing, num_readers


@compiled_within
def _rows(nodes: Ints, kinds: Ints, read: Flags, wanted: Flags) -> tuple[Ints, Ints, Ints, int, int]:
    """Return the bytes of rows that are kept, of states, and of results, [nodes, outputs] each; and the ends of both.

    Rows of one output of nodes of one type lie one after the other, so that sequences of them have a stride.
    """
    num_nodes, num_outputs = wanted.shape
    kept_rows, states = np.full((num_nodes, num_outputs), NONE), np.full((num_nodes, num_outputs), NONE)
    answers = np.full((num_nodes, num_outputs), NONE)
    row_end, answer_end = 0, 0
    for output in range(num_outputs):
        for node in range(num_nodes):
            steps, kind = nodes[node, _STEPS], nodes[node, _TYPE]
            if steps == 0 or output >= kinds[kind, _OUTPUTS]:
                continue
            size = kinds[kind, _BYTES + output]
            row_end = _place(kept_rows, read, node, steps, output, size, _up(size), row_end)
            if size % _ALIGNMENT == 0:
                answer_end = _up(answer_end)
            answer_end = _place(answers, wanted, node, steps, output, size, size, answer_end)
            num_states = kinds[kind, _INPUTS] - nodes[node, _SEQUENCES]
            if steps > 1 and output >= kinds[kind, _OUTPUTS] - num_states:
                end = kept_rows[node + steps - 1, output]
                if end != NONE and kept_rows[node, output] == NONE:  # only the end is kept, in the same place
                    states[node, output] = end
                else:
                    states[node, output] = row_end
                    row_end += _up(size)
    return kept_rows, states, answers, row_end, answer_end


@compiled_within
def _without_stride(nodes: Ints, sources: Ints, outputs: Ints, data: Ints, kept_rows: Ints) -> tuple[Flags, int]:
    """Return which inputs of runs are sequences of places without a stride, [inputs, nodes], and their steps in all."""
    listed, num_listed = np.zeros((len(sources), len(nodes)), np.bool_), 0
    for node in range(len(nodes)):
        steps = nodes[node, _STEPS]
        for k in range(nodes[node, _SEQUENCES] if steps > 2 else 0):
            stride, last = 0, 0
            for step in range(steps):
                source = sources[k, node + step]
                here = data[k, node + step] if source < 0 else kept_rows[source, outputs[k, node + step]]
                if step == 1:
                    stride = here - last
                elif step > 1 and here - last != stride:
                    listed[k, node] = True
                last = here
            if listed[k, node]:
                num_listed += steps
    return listed, num_listed


@compiled_within
def _write_readers(image: Ints, nodes: Ints, sources: Ints, kinds: Ints, entry: Ints, first_reader: Ints) -> None:
    """Write who waits for each entry. first_reader: [nodes] the word at which its list begins."""
    seen, filled = np.full(len(nodes), -1), np.zeros(len(nodes), np.int64)
    for node in range(len(nodes)):
        reader = nodes[node, _HEAD]
        for k in range(kinds[nodes[node, _TYPE], _INPUTS]):
            source = sources[k, node]
            if source >= 0:
                writer = nodes[source, _HEAD]
                if seen[writer] != reader:
                    seen[writer] = reader
                    image[first_reader[writer] + filled[writer]] = entry[reader]
                    filled[writer] += 1


@compiled
def _laid_out(
    nodes: Ints, sources: Ints, outputs: Ints, data: Ints, data_bytes: int, wanted: Flags, kinds: Ints, until: Ints
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Return the image, the places of results and of the numbers of steps, what is counted by type, and four ends.

    nodes, kinds: see the columns above. sources, outputs: [inputs, nodes] what each input reads; at a run's first node
    also its initial state. data: [inputs, nodes] the byte of the data, from the first. wanted: [nodes, outputs] whether
    the host wants it. until: [nodes, 2] at a loop's first node, the output and the value at which it ends. The ends:
    the bytes at which the data and the rows begin and the rows end; of the results.
    """
    num_nodes, num_outputs = wanted.shape
    counts = np.zeros((len(kinds), 3), np.int64)
    entry, readers_at, num_entries = _entries(nodes, kinds, counts)
    read, missing, num_readers = _readers(nodes, sources, outputs, kinds, counts, num_outputs)
    kept_rows, states, answers, row_end, answer_end = _rows(nodes, kinds, read, wanted)
    listed, num_listed = _without_stride(nodes, sources, outputs, data, kept_rows)

    lengths = np.full(num_nodes, NONE)
    for node in range(num_nodes):
        if until[node, 0] != NONE:
            lengths[node] = _up(answer_end)
            answer_end = lengths[node] + 8

    first_reader, ready_at, num_ready = np.zeros(num_nodes, np.int64), readers_at, 0
    for node in range(num_nodes):
        first_reader[node] = ready_at
        ready_at += num_readers[node]
        num_ready += nodes[node, _STEPS] > 0 and missing[node] == 0
    lists_at = ready_at + num_ready
    data_at = _up(8 * (lists_at + num_listed))
    rows_at = data_at + data_bytes
    image = np.zeros(data_at // 8, np.int64)
    image[_LEFT], image[_READY_AT], image[_NUM_READY] = num_entries, ready_at, num_ready
    _write_readers(image, nodes, sources, kinds, entry, first_reader)
    next_ready, next_listed = ready_at, lists_at
    for node in range(num_nodes):
        kind, steps = nodes[node, _TYPE], nodes[node, _STEPS]
        if steps == 0:
            continue
        at, num_inputs = entry[node], kinds[kind, _INPUTS]
        image[at + _E_TYPE], image[at + _E_MISSING], image[at + _E_STEPS] = kind, missing[node], steps
        image[at + _E_HOME], image[at + _E_READERS] = at, first_reader[node]
        image[at + _E_NUM_READERS], image[at + _E_LENGTH] = num_readers[node], lengths[node]
        image[at + _E_UNTIL], image[at + _E_VALUE] = until[node]
        if missing[node] == 0:
            image[next_ready] = at
            next_ready += 1
            counts[kind, _READY] += 1
        at += _ENTRY_WORDS
        for k in range(num_inputs):
            image[at + _I_STATE] = NONE
            if listed[k, node]:
                image[at + _I_WHERE], image[at + _I_STRIDE] = 8 * next_listed, LISTED
            for step in range(steps if k < nodes[node, _SEQUENCES] else 1):
                source = sources[k, node + step]
                if source >= 0:
                    where = rows_at + kept_rows[source, outputs[k, node + step]]
                elif source == HOST and data[k, node + step] != NONE:
                    where = data_at + data[k, node + step]
                else:
                    where = NONE
                if listed[k, node]:
                    image[next_listed] = where
                    next_listed += 1
                elif step == 0:
                    image[at + _I_WHERE] = where
                elif step == 1:
                    image[at + _I_STRIDE] = where - image[at + _I_WHERE]
                    break
            if steps > 1 and k >= nodes[node, _SEQUENCES]:
                image[at + _I_STATE] = rows_at + states[node, kinds[kind, _OUTPUTS] - num_inputs + k]
            at += _INPUT_WORDS
        last = node + steps - 1
        for output in range(kinds[kind, _OUTPUTS]):
            image[at + _O_STATE] = NONE if states[node, output] == NONE else rows_at + states[node, output]
            size = kinds[kind, _BYTES + output]
            every = steps > 1 and kept_rows[node, output] != NONE
            where = kept_rows[node if every else last, output]
            image[at + _O_KEPT] = NONE if where == NONE else rows_at + where
            image[at + _O_KEPT_STRIDE] = _up(size) if every else AT_END
            every = steps > 1 and answers[node, output] != NONE
            image[at + _O_ANSWER] = answers[node if every else last, output]
            image[at + _O_ANSWER_STRIDE] = size if every else AT_END
            at += _OUTPUT_WORDS
    ends = np.array([data_at, rows_at, rows_at + row_end, answer_end])
    return image, answers, lengths, counts, ends
