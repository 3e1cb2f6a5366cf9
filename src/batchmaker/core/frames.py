"""The regions of requests in flight: their code for the compiled loop, its tables, and its messages. See `decide`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, final

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.core.addresses import addresses_of
from batchmaker.core.arena import Arena
from batchmaker.core.commands import FailureKind, Reserve
from batchmaker.core.events import RequestId
from batchmaker.core.layout import EDGES, EXTENTS, FIRST, NODES, NOWHERE, NUM_PORTS, PLACES, STORED, SUBGRAPHS
from batchmaker.core.lists import IN_LIST, LIST_FIELDS
from batchmaker.core.region_code import (
    ALL_DONE,
    BAD_BRANCH,
    BAD_INDEX,
    BEGINNING_FIELDS,
    BEGINNING_SUBGRAPH,
    CHOICE,
    COLLECTING_FIELDS,
    FINISHED,
    FORMS_AT,
    FRAME_FIELDS,
    FREE_WAITING,
    HEAP_TOP,
    LACKS_FORM,
    LACKS_MACHINE,
    LACKS_NUMBERS,
    LOOP,
    MACHINE_COUNTS,
    MESSAGE_WORDS,
    MOST_HELD,
    MOST_NODES,
    MOST_WORDS,
    NO_STEP,
    NOT_BEGUN,
    NUM_BEGINNING,
    NUM_COLLECTING,
    NUM_FAILED,
    NUM_FORMS,
    NUM_FRAMES,
    NUM_MESSAGE_WORDS,
    NUM_QUEUED,
    NUM_WAITING,
    OF_FORM,
    PICK,
    SEGMENT,
    SOME_FAILED,
    TELL,
    WAITING_FIELDS,
    WANTED_FORM,
    WANTED_SIZE,
    WANTED_SLOT,
    Machine,
)
from batchmaker.core.region_decisions import begin_frames, decide, forget_frames
from batchmaker.core.rows import NoMemoryError
from batchmaker.core.state import NO_NODES, SchedulerState
from batchmaker.graph.cell_graph import HOST, CellGraph
from batchmaker.graph.regions import (
    ARGUMENT,
    NO_SLOT,
    SPAN,
    Branch,
    Choice,
    Item,
    Pick,
    Region,
    Segment,
    WhileLoop,
    sized,
)
from batchmaker.graph.spec import CellType

MOST_CODE: Final = 1 << 20
"""With more words of code, or nodes in segments with a size, all regions are forgotten once no request has any."""


@final
@dataclass(slots=True)
class Outcome:
    """What followed from values.

    - finished: slots of requests whose last decision is made. outputs: of each, what its region returns: nodes with one
      of their outputs, `node * OUTPUTS + output`. failed: (slot, kind, reason).
    - begun: [3, segments] slot, form, and first node. collected: [3, values] slot, number of the collection, and node
      with output. reserves: tables that must grow first.
    """

    finished: list[int] = field(default_factory=list)
    outputs: list[Ints] = field(default_factory=list)
    failed: list[tuple[int, FailureKind, str]] = field(default_factory=list)
    begun: Ints = field(default_factory=lambda: np.empty((int(BEGINNING_SUBGRAPH), 0), np.int64))
    collected: Ints = field(default_factory=lambda: np.empty((int(COLLECTING_FIELDS), 0), np.int64))
    reserves: list[Reserve] = field(default_factory=list)


@final
class Frames:
    """The regions in flight of one scheduler. max_nodes: the most nodes of one request.

    slots: of the requests that have decisions to make. keeps: of these, see CellGraph. patterns: form -> its graph.
    segments: form -> the segment whose graph it is, unless it has a size.
    """

    def __init__(self, state: SchedulerState, max_nodes: int) -> None:
        self._state = state
        self._max_nodes = max_nodes
        self.slots: set[int] = set()
        self.keeps: dict[int, tuple[int, ...]] = {}
        self.patterns: dict[int, CellGraph] = {}
        self.segments: dict[int, Segment] = {}
        self._forget()

    def _forget(self) -> None:
        state = self._state
        self._pattern_arena = Arena()
        self._patterns = state.admission.elsewhere(self._pattern_arena)
        self._patterns.copies.max_forms = self._patterns.copies.max_nodes = 1 << 62
        self.patterns.clear()
        self.segments.clear()
        self._kinds: list[_Kind] = []
        self._num_sized = self._longest = self._spans_held = self._num_loops = 0
        self._places: dict[int, int] = {}
        self._lines: dict[int, str] = {}  # of the items that say where they are called, by their places in the code
        self._regions: list[Region] = []  # so that their ids stay theirs
        self._code, self._num_words = np.zeros(1024, np.int64), 0
        counts = np.zeros(MACHINE_COUNTS, np.int64)
        counts[FREE_WAITING], counts[MOST_NODES], counts[MOST_WORDS] = NOWHERE, self._max_nodes, 16
        lists = np.zeros((LIST_FIELDS, 64), np.int64)
        lists[:, 0] = 1, NOWHERE
        self._machine = Machine(
            self._code,
            np.zeros((FRAME_FIELDS, 64), np.int64),
            np.zeros(1024, np.int64),
            np.full(64, NOWHERE, np.int64),
            np.zeros((WAITING_FIELDS, 256), np.int64),
            np.zeros((1, 64), np.int64),
            np.full(64, NOWHERE, np.int64),
            np.zeros(64, np.int64),
            np.zeros((2, 256), np.int64),
            np.zeros(1024, np.int64),
            np.zeros((BEGINNING_FIELDS, 64), np.int64),
            counts,
            lists,
            np.zeros((COLLECTING_FIELDS, 256), np.int64),
        )
        self._addresses: Ints | None = None
        for entry in state.types:
            self.add_type(entry.cell)

    def add_type(self, cell: CellType) -> None:
        """Note a cell type that the scheduler has added."""
        self._patterns.add_type(cell)
        if len(cell.outputs) > len(self._machine.values):
            more = np.zeros((len(cell.outputs) - len(self._machine.values), self._machine.values.shape[1]), np.int64)
            self._change(values=np.concatenate((self._machine.values, more)))

    # --- requests -----------------------------------------------------------------------------------------------------

    def begin(self, slots: Sequence[int], graphs: Sequence[CellGraph], bases: Sequence[int]) -> None:
        """Let the regions of requests begin, whose own graphs have been admitted.

        bases: the first nodes of these graphs.
        """
        if not self.slots and max(self._num_words, self._num_sized) > MOST_CODE:
            self._forget()
        places = [self._place_of(graph.region) for graph in graphs]
        self._fit()
        self._fit_machine(len(slots), int(self._machine.counts[MOST_WORDS]) * len(slots))
        numbers = np.array(slots, np.int64)
        self._machine.first_frame[numbers] = NOWHERE
        self._machine.num_nodes[numbers] = [graph.num_nodes for graph in graphs]
        begin_frames(
            self._state.arena.tables,
            self.addresses,
            numbers,
            np.array(places, np.int64),
            np.array(bases, np.int64),
            self._state.arena.requests[STORED, numbers],
            np.array([graph.first for graph in graphs], np.int64),
        )
        self.slots.update(slots)
        self.keeps.update({slot: graph.keeps for slot, graph in zip(slots, graphs, strict=True) if graph.keeps})

    @property
    def have_loops(self) -> bool:
        """Whether segments may begin with loops of which the driver must know."""
        return self._num_loops > 0

    def tables(self) -> tuple[Ints, Ints]:
        """Return `patterns_at` and `addresses`, with room for the values of all nodes."""
        self._fit()
        return self.patterns_at, self.addresses

    def note_values(self, values: Sequence[tuple[int, Ints, Ints]]) -> None:
        """Note values that have come to the host: output, nodes, and values."""
        self._fit()
        for output, nodes, numbers in values:
            self._machine.values[output, nodes] = numbers

    def decide(self, done: Ints) -> Outcome:
        """Let go on what waited for these nodes, which are done, and all that follows."""
        self._fit()
        return self.outcome(self._decide(done), done)

    def _decide(self, done: Ints) -> int:
        return decide(self._state.arena.tables, self.patterns_at, self.addresses, done)

    def outcome(self, status: int, done: Ints) -> Outcome:
        """Return what followed from these nodes. status: what the loop returned; it goes on if it lacked room."""
        outcome = Outcome()
        while True:
            if status == LACKS_MACHINE:  # while it is full of messages: as many will have room next time
                self._fit_machine(64, 64 * int(self._machine.counts[MOST_WORDS]))
            self._read_messages(outcome)
            if status in (ALL_DONE, SOME_FAILED):
                return outcome
            if status == NOT_BEGUN:
                self._fit_machine(1, int(self._machine.counts[NUM_WAITING]))
                status = self._decide(done)
                continue
            if status == LACKS_FORM:
                self._add_size(int(self._machine.counts[WANTED_FORM]), int(self._machine.counts[WANTED_SIZE]))
            elif status == LACKS_NUMBERS:
                slot = int(self._machine.counts[WANTED_SLOT])
                try:
                    outcome.reserves += self._make_room(int(self._machine.counts[WANTED_FORM]))
                except NoMemoryError as error:
                    self._machine.num_nodes[slot] = NOWHERE
                    outcome.failed.append((slot, FailureKind.MEMORY, str(error)))
            status = self._decide(NO_NODES)

    def forget(self, slot: int) -> None:
        """Note that a request ends early. Its numbers must still be its own."""
        self.keeps.pop(slot, None)
        if slot in self.slots:
            self.slots.remove(slot)
            forget_frames(self._state.arena.tables, self.addresses, np.array([slot], np.int64))

    @property
    def num_nodes(self) -> Ints:
        """How many nodes each request has had so far, in all its graphs, by slot."""
        return self._machine.num_nodes

    def loops_begun(self, begun: Ints) -> tuple[tuple[RequestId, int, tuple[Any, ...]], ...]:
        """Return the loops among segments that have begun, as `NodesBegun` tells of them. begun: see Outcome."""
        entries = begun.T.tolist() if self._num_loops else ()
        loops = [(slot, base, self.segments[form].loops) for slot, form, base in entries if form in self.segments]
        return tuple([(self._state.id_of(slot), base, some) for slot, base, some in loops if some])

    def leave(self, slots: Sequence[int]) -> None:
        """Note that requests have been answered: all their nodes are done."""
        self.slots.difference_update(slots)

    def _read_messages(self, outcome: Outcome) -> None:
        """Read the messages of the compiled loop."""
        machine, counts = self._machine, self._machine.counts
        messages = machine.messages[: counts[NUM_MESSAGE_WORDS]].copy()
        words: list[int] = messages.tolist()
        at = 0
        while at < len(words):
            if words[at] == FINISHED:
                end = at + 3 + words[at + 2]
                outcome.finished.append(words[at + 1])
                outcome.outputs.append(messages[at + 3 : end])
                at = end
            else:
                line, (kind, reason) = self._lines.get(words[at + 2], ""), _failure(*words[at + 3 : at + 6])
                outcome.failed.append((words[at + 1], kind, line + reason))
                at += int(MESSAGE_WORDS)
        if counts[NUM_BEGINNING]:
            begun = machine.beginning[:BEGINNING_SUBGRAPH, : counts[NUM_BEGINNING]]
            outcome.begun = np.concatenate((outcome.begun, begun), axis=1)
        if counts[NUM_COLLECTING]:
            collected = machine.collecting[:, : counts[NUM_COLLECTING]]
            outcome.collected = np.concatenate((outcome.collected, collected), axis=1)
        counts[NUM_MESSAGE_WORDS] = counts[NUM_BEGINNING] = counts[NUM_COLLECTING] = counts[NUM_FAILED] = 0

    # --- room ---------------------------------------------------------------------------------------------------------

    @property
    def patterns_at(self) -> Ints:
        """The addresses of the tables of the segments of regions; see `forms_at`."""
        return self._patterns.copies.tables

    @property
    def addresses(self) -> Ints:
        """The addresses of all tables; see `machine_at`."""
        if self._addresses is None:
            self._addresses = addresses_of(self._machine)
        return self._addresses

    def _change(self, **tables: Ints) -> None:
        self._machine, self._addresses = self._machine._replace(**tables), None

    def _fit(self) -> None:
        """Have a place for every node number and every slot."""
        machine, arena = self._machine, self._state.arena
        missing = arena.node_capacity - len(machine.waits)
        if missing > 0:
            self._change(
                waits=np.concatenate((machine.waits, np.full(missing, NOWHERE, np.int64))),
                values=np.concatenate((machine.values, np.zeros((len(machine.values), missing), np.int64)), axis=1),
            )
        missing = arena.requests.shape[1] - len(machine.num_nodes)
        if missing > 0:
            self._change(
                first_frame=np.concatenate((machine.first_frame, np.full(missing, NOWHERE, np.int64))),
                num_nodes=np.concatenate((machine.num_nodes, np.zeros(missing, np.int64))),
            )

    def _fit_machine(self, frames: int, words: int) -> None:
        """Have room for more frames, and for more words in each of the other tables."""
        machine, counts = self._machine, self._machine.counts
        words += int(counts[MOST_WORDS])
        for name, used, wanted in (
            ("frames", counts[NUM_FRAMES], frames + 1),
            ("heap", counts[HEAP_TOP], words),
            ("waiting", counts[NUM_WAITING], words + int(counts[MOST_HELD])),
            ("queue", counts[NUM_QUEUED], words),
            ("messages", counts[NUM_MESSAGE_WORDS], words),
            ("beginning", counts[NUM_BEGINNING], frames + 1),
            ("lists", machine.lists[IN_LIST, 0], words),
            ("collecting", counts[NUM_COLLECTING], words),
        ):
            table = getattr(machine, name)
            room = table.shape[-1]
            if used + wanted > room:
                grown = np.zeros((*table.shape[:-1], max(2 * room, int(used) + wanted)), np.int64)
                grown[..., :room] = table
                self._change(**{name: grown})

    def _make_room(self, form: int) -> list[Reserve]:
        """Have room for more copies of a form. NoMemoryError as in `GraphAdmission.make_room`."""
        state, arena, graph = self._state, self._state.arena, self.patterns[form]
        counts = self._patterns.copies.counts_of(form)
        reserves = state.admission.make_room([graph] * 16, state.grow)
        if not state.plan_rows:
            arena.fit(NODES, np.full(16, graph.num_nodes, np.int64))
        for kind, count in ((SUBGRAPHS, counts[2]), (EDGES, counts[3]), (EXTENTS, 1)):
            arena.fit(kind, np.full(16, count, np.int64))
        types, added = np.unique(np.concatenate([_types_of(part) for part in graph.parts]), return_counts=True)
        arena.types[PLACES, types] += 16 * added
        arena.fit_queues()
        arena.types[PLACES, types] -= 16 * added
        self._fit()
        return reserves

    # --- code ---------------------------------------------------------------------------------------------------------

    def _place_of(self, region: Region) -> int:
        """Return where the code of a region begins; it is written at first."""
        place = self._places.get(id(region))
        if place is None:
            place = self._places[id(region)] = self._write(region)
            self._regions.append(region)
        return place

    def _add(self, words: Sequence[int]) -> int:
        """Add words of code; return where they begin."""
        at, end = self._num_words, self._num_words + len(words)
        if end > len(self._code):
            self._code = np.concatenate((self._code, np.zeros(max(len(self._code), len(words)), np.int64)))
            self._change(code=self._code)
        self._code[at:end] = words
        self._num_words = end
        return at

    def _write(self, region: Region) -> int:
        needs = region.num_needs
        items = [self._write_item(item, needs[k], region.follows[k], region) for k, item in enumerate(region.items)]
        lists = [slot for item in region.items if isinstance(item, WhileLoop) for slot, _ in item.listed]
        header = [region.num_slots, len(items), self._add(items)]  # in the order of its words
        for part in ([(slot,) for slot in region.outputs], region.constants, region.held, [(slot,) for slot in lists]):
            header += [self._add([word for group in part for word in group]), len(part)]
        header.append(NOWHERE)
        collected = sum([len(item.collected) for item in region.items if isinstance(item, WhileLoop)])
        fixed = dict(region.constants)
        words = region.num_slots + 2 * len(items) + len(region.outputs) + len(lists) + 16
        words += sum([fixed.get(count, 0) for _, count, _ in region.held]) + int(MESSAGE_WORDS) * (collected + 2)
        self._machine.counts[MOST_WORDS] = max(self._machine.counts[MOST_WORDS], words)
        self._note_held(sum([count not in fixed for _, count, _ in region.held]), 0)
        return self._add(header)

    def _note_held(self, spans: int, length: int) -> None:
        """Note that a region has so many spans whose length values decide, or that one is so long."""
        self._spans_held, self._longest = max(self._spans_held, spans), max(self._longest, length)
        self._machine.counts[MOST_HELD] = self._spans_held * self._longest

    def _write_item(self, item: Item, needs: int, follows: Sequence[int], region: Region) -> int:
        following = self._add(follows)
        if isinstance(item, Segment):
            kind, words = SEGMENT, self._segment_words(item)
        elif isinstance(item, Choice):
            branches = self._add([word for branch in item.branches for word in self._branch_words(branch)])
            kind, words = (
                CHOICE,
                [
                    item.index,
                    int(item.is_cond),
                    branches,
                    len(item.branches),
                    self._add(item.results),
                    len(item.results),
                ],
            )
        elif isinstance(item, WhileLoop):
            kind, words = (
                LOOP,
                [
                    item.going,
                    self._add(self._branch_words(item.body)),
                    self._add(item.state),
                    len(item.state),
                    self._add(item.init),
                    item.limit,
                    item.progress,
                    int(item.tests),
                    int(item.filters),
                    self._add([number for pair in item.collected for number in pair]),
                    len(item.collected),
                    self._add([number for pair in item.listed for number in pair]),
                    len(item.listed),
                ],
            )
        elif isinstance(item, Pick):
            kind, words = PICK, [item.index, item.first, item.count, item.step, item.result]
        else:
            kind, words = TELL, [item.number, item.first, item.count, item.step, item.progress]
        at = self._add([int(kind), needs, following, len(follows), *words])
        if isinstance(item, Choice | Pick):
            self._lines[at] = item.line
        return at

    def _branch_words(self, branch: Branch) -> list[int]:
        place = self._place_of(branch.region)
        return [place, self._add([slot for pair in branch.captured for slot in pair]), len(branch.captured)]

    def _segment_words(self, segment: Segment) -> list[int]:
        form, reads = int(NOWHERE), _Reads()
        if segment.graph is not None:
            graph, reads = _without_arguments(segment.graph, is_sized=segment.size != NO_SLOT)
            if segment.size == NO_SLOT:
                form = self._form_of(graph, reads)
                self.segments[form] = segment
                self._num_loops += len(segment.loops)
            else:
                form = len(self._kinds)
                self._kinds.append(_Kind(graph, reads, segment.fetched))
        words = [form]
        for numbers, width in (
            (segment.arguments, 1),
            (reads.single, 3),
            ([n for three in segment.exports for n in three], 3),
            ([n for three in segment.spans for n in three], 3),
            (reads.columns, 2),
            (reads.memories, 5),
        ):
            words += [self._add(numbers), len(numbers) // width]
        ends = self._add([number for three in segment.ends for number in three])
        return [*words, segment.size, ends, len(segment.ends), 0, 0]

    def _add_size(self, record: int, size: int) -> None:
        """Write the form that a segment has for a size. record: where its code is."""
        kind = self._kinds[int(self._code[record + OF_FORM])]
        room = int(self._code[record + NUM_FORMS])
        if size >= room:
            forms = self._code[self._code[record + FORMS_AT] :][:room].tolist()
            forms += [int(NOWHERE)] * (max(2 * room, size + 1) - room)
            place = self._add(forms)
            self._code[record + FORMS_AT], self._code[record + NUM_FORMS] = place, len(forms)
        form = self._form_of(sized(kind.graph, size, kind.fetched), kind.reads)
        self._code[self._code[record + FORMS_AT] + size] = form
        self._num_sized += size
        self._note_held(0, size)

    def _form_of(self, graph: CellGraph, reads: _Reads) -> int:
        """Return the number of a graph's form. Its nodes are admitted to an arena of their own for that."""
        state, arena = self._state, self._pattern_arena
        arena.is_host = state.arena.is_host
        arena.forget_numbers()
        arena.requests[FIRST, 0] = NOWHERE
        for run in graph.runs:
            state.learn_form(run.type_id, len(run.sequences))
            if state.watched is not None:
                state.watched.kinds.run_types.add(run.type_id)
        self._patterns.admit([graph], [0])
        form = self._patterns.copies.number_of(graph)
        self.patterns[form] = graph
        if state.plan_rows:
            types = np.concatenate([_types_of(part, every_step=True) for part in graph.parts])
            for type_id in np.unique(types).tolist():
                for port in arena.ports[type_id, : int(arena.types[NUM_PORTS, type_id])].tolist():
                    state.arena.note_port(type_id, port)
            for port, node in zip(reads.single[::3], reads.single[1::3], strict=True):
                state.arena.note_port(int(types[node]), port)
            for port in reads.columns[::2]:
                state.arena.note_port(int(types[0]), port)
        return form


def _types_of(part: object, *, every_step: bool = False) -> Ints:
    """Return the cell types of a block's nodes; of a run, once, or of every step."""
    types = getattr(part, "types", None)
    if types is not None:
        return np.asarray(types, np.int64)
    return np.full(part.length if every_step else 1, part.type_id, np.int64)  # type: ignore[attr-defined]


@final
@dataclass(slots=True)
class _Reads:
    """What a segment reads, as numbers: see READS_AT, COLUMNS_AT and MEMORIES_AT in `decide`."""

    single: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    memories: list[int] = field(default_factory=list)


@final
@dataclass(slots=True)
class _Kind:
    """Of the segments with a size. graph: of size 1. fetched: see Segment."""

    graph: CellGraph
    reads: _Reads
    fetched: tuple[int, ...]


def _without_arguments(graph: CellGraph, *, is_sized: bool) -> tuple[CellGraph, _Reads]:
    """Return a graph that reads nothing instead of its arguments and spans; and what it reads.

    is_sized: it is of a segment with a size.
    """
    reads, blocks, runs, memories = _Reads(), [], [], []
    for block in graph.blocks:
        ports, places = np.nonzero(block.sources <= ARGUMENT)
        for port, place in zip(ports.tolist(), places.tolist(), strict=True):
            source = int(block.sources[port, place])
            if source <= SPAN:
                reads.columns += [port, SPAN - source]
            else:
                reads.single += [port, block.first + place, ARGUMENT - source]
        blocks.append(replace(block, sources=np.where(block.sources <= ARGUMENT, HOST, block.sources)))
    for run in graph.runs:
        init, sequences = [], list(run.sequences)
        for port, column in enumerate(sequences):
            if column is not None and column[0][0] <= SPAN:
                reads.columns += [port, SPAN - int(column[0][0])]
                sequences[port] = None
        for k, (source, output) in enumerate(run.init):
            if source <= ARGUMENT:
                reads.single += [len(run.sequences) + k, run.first, ARGUMENT - source]
                source, output = HOST, 0
            init.append((source, output))
        runs.append(replace(run, sequences=tuple(sequences), init=tuple(init)))
    for read in graph.memories:
        if read.source <= SPAN:
            num_readers = int(NOWHERE) if is_sized else read.count
            reads.memories += [read.port, read.first, num_readers, int(read.is_run), SPAN - read.source]
            read = replace(read, source=read.first, length=0)
        memories.append(read)
    made = CellGraph(0, graph.num_nodes, blocks, runs, [], graph.fetches, graph.plain, shared=True, memories=memories)
    return made, reads


def _failure(kind: int, wanted: int, there: int) -> tuple[FailureKind, str]:
    if kind == BAD_INDEX:
        return FailureKind.UNFOLD, f"`at` got index {wanted} for a sequence of {there} values"
    if kind == BAD_BRANCH:
        return FailureKind.UNFOLD, f"`switch` got index {wanted} for {there} branches"
    if kind == NO_STEP:
        return FailureKind.UNFOLD, "there is no value: it is of the last step of a run over an empty sequence"
    return FailureKind.NODES, f"it needs more than {there} nodes; does its while_loop end? Raise max_nodes if it should"
