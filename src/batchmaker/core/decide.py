"""Decisions as one compiled loop: values are looked at, and copies of the regions that they choose begin.

A *frame* is a region that has begun. It has a block of int64: a word for each slot, then for each item how many items
it still waits for. In a slot is a node with one of its outputs (`node * OUTPUTS + output`), or a number, or the first
place of a list, or NOWHERE.

The code of regions is one array of int64; `Frames` writes it. A region is known by where it begins there.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled, compiled_inline, compiled_within, number
from batchmaker.core.addresses import row_at, state_at, table_at
from batchmaker.core.arrive import begin_copy, has_room_for
from batchmaker.core.copies import forms_at, ready_of
from batchmaker.core.layout import (
    ALIVE,
    BASE,
    DONE,
    END,
    FIRST,
    FIRST_TABLE,
    HELD,
    NEXT,
    NOWHERE,
    NUM_NODES,
    OPEN,
    OUTPUTS,
    PLAN_ROWS,
    POOL,
    ROW,
    STATE,
    STEP_SHIFT,
    SUBGRAPH,
    TYPE,
    USES,
)
from batchmaker.core.lists import IN_LIST, NEXT_IN_LIST, add_to_list, end_list
from batchmaker.core.progress import free_row, release

# --- regions: the words of a header, and of the items that it leads to -----------------------------------------------

(
    NUM_SLOTS, NUM_ITEMS, ITEMS_AT, OUTPUTS_AT, NUM_OUTPUTS, CONSTANTS_AT, NUM_CONSTANTS, HELD_AT, NUM_HELD, LISTS_AT,
    NUM_LISTS, FREE, HEADER_WORDS,
) = map(number, range(13))  # fmt: skip
"""ITEMS_AT: where the places of the items are. CONSTANTS_AT: pairs of a slot and a number. HELD_AT: threes of a slot,
the slot of a count, and a step. LISTS_AT: slots of lists. FREE: the first of the region's frames that are free, or
NOWHERE."""

KIND, NUM_NEEDS, FOLLOWS_AT, NUM_FOLLOWS, ITEM_WORDS = map(number, range(5))
SEGMENT, CHOICE, LOOP, PICK, TELL = map(number, range(5))
(
    OF_FORM, ARGUMENTS_AT, NUM_ARGUMENTS, READS_AT, NUM_READS, EXPORTS_AT, NUM_EXPORTS, SPANS_AT, NUM_SPANS,
    COLUMNS_AT, NUM_COLUMNS, MEMORIES_AT, NUM_MEMORIES, SIZE_AT, ENDS_AT, NUM_ENDS, FORMS_AT, NUM_FORMS,
) = map(number, range(4, 22))  # fmt: skip
"""Of a segment. OF_FORM: NOWHERE for the request's own graph. READS_AT: threes of an input, a node and an argument.
EXPORTS_AT: threes of a slot, a node and an output. SPANS_AT: threes as in `Segment.spans`. COLUMNS_AT: pairs of an
input and a span, of which each node takes an element. MEMORIES_AT: fives of an input, the first node that reads, how
many do (NOWHERE: all), whether they are a run, and a span.

Of one with a size: SIZE_AT: the slot of its size, otherwise NOWHERE. OF_FORM: the number of its kind. ENDS_AT: threes
as in `Segment.ends`. FORMS_AT: for each size below NUM_FORMS the form, or NOWHERE."""
INDEX, IS_COND, BRANCHES_AT, NUM_BRANCHES, RESULTS_AT, NUM_RESULTS = map(number, range(4, 10))
"""Of a choice. BRANCHES_AT: for each branch its region, and where and how many the pairs of slots are that it captures:
its own, and the one outside."""
(
    GOING, BODY_AT, STATE_AT, NUM_STATE, INIT_AT, LIMIT, PROGRESS, TESTS, FILTERS, COLLECTED_AT, NUM_COLLECTED,
    LISTED_AT, NUM_LISTED,
) = map(number, range(4, 17))  # fmt: skip
"""Of a loop. BODY_AT: as for a branch. PROGRESS: the first of four slots: iterations so far, what the body last said
about going on and about collecting, and how many iterations were collected. LISTED_AT: pairs as in `WhileLoop.listed`.
"""
PICK_INDEX, FIRST_OF, COUNT_OF, STEP_OF, RESULT = map(number, range(4, 9))
COLLECTION, TOLD = map(number, (4, 8))
"""Of what is told, beside FIRST_OF to STEP_OF. TOLD: the slot of how many elements have been."""

# --- frames, who waits, messages ---------------------------------------------------------------------------------

OF_REGION, OF_REQUEST, PARENT, PARENT_ITEM, BLOCK, ITEMS_LEFT, NEXT_FRAME, PREVIOUS_FRAME, FRAME_FIELDS = map(
    number, range(9)
)
"""OF_REQUEST: the slot of its request. PARENT, PARENT_ITEM: who gets its outputs. NEXT_FRAME, PREVIOUS_FRAME: of the
same request, or of the region's free ones."""
WAITING_FRAME, WAITING_ITEM, NEXT_WAITING, WAITING_FIELDS = map(number, range(4))
"""Who waits for a node to be done. WAITING_FRAME is NOWHERE for a node that is to be let go then: WAITING_ITEM."""
(
    NUM_FRAMES, HEAP_TOP, NUM_WAITING, FREE_WAITING, NUM_QUEUED, NUM_MESSAGE_WORDS, NUM_BEGINNING, WANTED_FORM,
    WANTED_SLOT, MOST_WORDS, MOST_NODES, NUM_FAILED, WANTED_SIZE, MOST_HELD, NUM_COLLECTING, MACHINE_COUNTS,
) = map(number, range(16))  # fmt: skip
"""WANTED_FORM, WANTED_SLOT: for which segment of which request there is no room, or where in the code the segment is
that has no form for WANTED_SIZE. MOST_WORDS: what one item of any region may need of any table; MOST_HELD: beside
it, of those that wait, because of spans whose length values decide. MOST_NODES: of one request."""
FINISHED, FAILED = map(number, range(2))
"""Messages, as words: FINISHED, slot, number of outputs, outputs. FAILED, slot, where the item is in the code, reason,
what was wanted, what there is."""
COLLECTING_SLOT, COLLECTING_NUMBER, COLLECTING_WORD, COLLECTING_FIELDS = map(number, range(4))
"""What loops have collected: the request's slot, the number of the collection, and a node with one of its outputs."""
BEGINNING_SLOT, BEGINNING_FORM, BEGINNING_BASE, BEGINNING_SUBGRAPH, BEGINNING_FIELDS = map(number, range(5))
"""The segments that have begun, each with its first node and its first subgraph."""
BAD_INDEX, BAD_BRANCH, TOO_MANY_NODES, NO_STEP = map(number, range(4))
MESSAGE_WORDS: Final = number(6)
ALL_DONE, SOME_FAILED, NOT_BEGUN, LACKS_MACHINE, LACKS_NUMBERS, LACKS_FORM = map(number, range(6))
ZERO, ONE = map(number, range(2))
A_LIST: Final = number(0)
"""See `batchmaker.graph.regions`."""


class Machine(NamedTuple):
    """The tables of decisions.

    - code: see the module. frames: [FRAME_FIELDS, room]. heap: [room] the blocks.
    - waits: [nodes] who waits for each node first, or NOWHERE. waiting: [WAITING_FIELDS, room].
    - values: [outputs, nodes] of outputs that have come to the host.
    - first_frame, num_nodes: [slots] of each request its first frame, or NOWHERE; and its nodes so far, or NOWHERE once
      it has failed.
    - queue: [2, room] frames and items that can go on. messages: [room]. beginning: [BEGINNING_FIELDS, room].
    - counts: [MACHINE_COUNTS]. lists: [LIST_FIELDS, room] what loops have collected for later segments.
    - collecting: [COLLECTING_FIELDS, room] what loops have collected for the result.
    """

    code: Ints
    frames: Ints
    heap: Ints
    waits: Ints
    waiting: Ints
    values: Ints
    first_frame: Ints
    num_nodes: Ints
    queue: Ints
    messages: Ints
    beginning: Ints
    counts: Ints
    lists: Ints
    collecting: Ints


@compiled_within
def machine_at(a: Ints) -> Machine:
    """Return the tables at these addresses; see `addresses_of`."""
    return Machine(
        row_at(a, 0), table_at(a, 1), row_at(a, 2), row_at(a, 3), table_at(a, 4), table_at(a, 5), row_at(a, 6),
        row_at(a, 7), table_at(a, 8), row_at(a, 9), table_at(a, 10), row_at(a, 11), table_at(a, 12), table_at(a, 13),
    )  # fmt: skip


@compiled_inline
def _tail(nodes: Ints, subgraphs: Ints, node: int) -> int:
    """Return the node whose end is the end of this one: the last of a run."""
    end = subgraphs[END, nodes[SUBGRAPH, node]]
    return int(end - 1) if end > 0 else node


@compiled_inline
def _not_done(nodes: Ints, subgraphs: Ints, word: int) -> int:
    """Return the node that what is in a slot waits for; NOWHERE if it is done."""
    tail = _tail(nodes, subgraphs, word // OUTPUTS)
    return int(NOWHERE) if nodes[STATE, tail] == DONE else tail


@compiled_within
def _first_not_done(nodes: Ints, subgraphs: Ints, code: Ints, heap: Ints, block: int, at: int, count: int) -> int:
    """Return the node that the first of these slots waits for; NOWHERE if all are done."""
    for k in range(at, at + count):
        tail = _not_done(nodes, subgraphs, heap[block + code[k]])
        if tail != NOWHERE:
            return tail
    return int(NOWHERE)


@compiled_within
def _first_of_spans_not_done(
    nodes: Ints, subgraphs: Ints, code: Ints, heap: Ints, block: int, at: int, count: int
) -> int:
    """As `_first_not_done`, for these spans. What is in a list was done when it was collected."""
    for k in range(at, at + 3 * count, 3):
        first, step = heap[block + code[k]], code[k + 2]
        for i in range(heap[block + code[k + 1]] if step != A_LIST else ZERO):
            tail = _not_done(nodes, subgraphs, first + i * step * OUTPUTS)
            if tail != NOWHERE:
                return tail
    return int(NOWHERE)


@compiled_inline
def _add_frame(
    code: Ints, frames: Ints, heap: Ints, queue: Ints, first_frame: Ints, counts: Ints, region: int, slot: int,
    parent: int, parent_item: int,
) -> int:  # fmt: skip
    """Let a region begin; return its frame. What it captures is not there yet. There must be room."""
    size = code[region + NUM_SLOTS] + code[region + NUM_ITEMS]
    frame = code[region + FREE]
    if frame != NOWHERE:
        code[region + FREE] = frames[NEXT_FRAME, frame]
    else:
        frame = counts[NUM_FRAMES]
        counts[NUM_FRAMES] += 1
        frames[OF_REGION, frame], frames[BLOCK, frame] = region, counts[HEAP_TOP]
        counts[HEAP_TOP] += size
    block, num_slots, num_items = frames[BLOCK, frame], code[region + NUM_SLOTS], code[region + NUM_ITEMS]
    frames[OF_REQUEST, frame], frames[PARENT, frame], frames[PARENT_ITEM, frame] = slot, parent, parent_item
    frames[ITEMS_LEFT, frame] = num_items
    before = first_frame[slot]
    frames[NEXT_FRAME, frame], frames[PREVIOUS_FRAME, frame] = before, NOWHERE
    if before != NOWHERE:
        frames[PREVIOUS_FRAME, before] = frame
    first_frame[slot] = frame
    for k in range(num_slots):
        heap[block + k] = NOWHERE
    at = code[region + CONSTANTS_AT]
    for k in range(at, at + 2 * code[region + NUM_CONSTANTS], 2):
        heap[block + code[k]] = code[k + 1]
    for item in range(num_items):
        needs = code[code[code[region + ITEMS_AT] + item] + NUM_NEEDS]
        heap[block + num_slots + item] = needs
        if needs == 0:
            queue[0, counts[NUM_QUEUED]], queue[1, counts[NUM_QUEUED]] = frame, item
            counts[NUM_QUEUED] += 1
    if num_items == 0:
        queue[0, counts[NUM_QUEUED]], queue[1, counts[NUM_QUEUED]] = frame, NOWHERE
        counts[NUM_QUEUED] += 1
    return int(frame)


@compiled_inline
def _free_frame(code: Ints, frames: Ints, first_frame: Ints, frame: int) -> None:
    before, after = frames[PREVIOUS_FRAME, frame], frames[NEXT_FRAME, frame]
    if before != NOWHERE:
        frames[NEXT_FRAME, before] = after
    else:
        first_frame[frames[OF_REQUEST, frame]] = after
    if after != NOWHERE:
        frames[PREVIOUS_FRAME, after] = before
    region = frames[OF_REGION, frame]
    frames[NEXT_FRAME, frame] = code[region + FREE]
    code[region + FREE] = frame


@compiled_inline
def _ended(code: Ints, frames: Ints, heap: Ints, queue: Ints, counts: Ints, frame: int, item: int) -> None:
    """Note that an item has filled its slots: others may begin, or the frame is over."""
    region, block = frames[OF_REGION, frame], frames[BLOCK, frame]
    record = code[code[region + ITEMS_AT] + item]
    at = code[record + FOLLOWS_AT]
    for k in range(at, at + code[record + NUM_FOLLOWS]):
        counter = block + code[region + NUM_SLOTS] + code[k]
        heap[counter] -= 1
        if heap[counter] == 0:
            queue[0, counts[NUM_QUEUED]], queue[1, counts[NUM_QUEUED]] = frame, code[k]
            counts[NUM_QUEUED] += 1
    frames[ITEMS_LEFT, frame] -= 1
    if frames[ITEMS_LEFT, frame] == 0:
        queue[0, counts[NUM_QUEUED]], queue[1, counts[NUM_QUEUED]] = frame, NOWHERE
        counts[NUM_QUEUED] += 1


@compiled_inline
def _wait(waits: Ints, waiting: Ints, counts: Ints, node: int, frame: int, item: int) -> None:
    """Let an item wait until a node is done."""
    place = counts[FREE_WAITING]
    if place != NOWHERE:
        counts[FREE_WAITING] = waiting[NEXT_WAITING, place]
    else:
        place = counts[NUM_WAITING]
        counts[NUM_WAITING] += 1
    waiting[WAITING_FRAME, place], waiting[WAITING_ITEM, place] = frame, item
    waiting[NEXT_WAITING, place] = waits[node]
    waits[node] = place


@compiled_inline
def _hold_less(nodes: Ints, subgraphs: Ints, types: Ints, pools: Ints, rows: Ints, node: int) -> None:
    """Let one slot less hold a node that is done, or that has no row; its row is freed if nobody needs it."""
    nodes[HELD, node] -= 1
    if nodes[HELD, node] == 0 and nodes[USES, node] == 0 and nodes[ROW, node] != NOWHERE:
        free_row(nodes, subgraphs, types, pools, rows, node)


@compiled_inline
def _let_go(
    nodes: Ints, subgraphs: Ints, types: Ints, pools: Ints, rows: Ints, waits: Ints, waiting: Ints, counts: Ints,
    node: int,
) -> None:  # fmt: skip
    """Let one slot less keep a node alive. A node on a worker is let go when it is done."""
    tail = _tail(nodes, subgraphs, node)
    if nodes[ROW, node] != NOWHERE and nodes[STATE, tail] != DONE:
        _wait(waits, waiting, counts, tail, NOWHERE, node)
    else:
        _hold_less(nodes, subgraphs, types, pools, rows, node)


@compiled_inline
def _fail(messages: Ints, counts: Ints, slot: int, record: int, reason: int, wanted: int, there: int) -> None:
    at = counts[NUM_MESSAGE_WORDS]
    messages[at], messages[at + 1], messages[at + 2] = FAILED, slot, record
    messages[at + 3], messages[at + 4], messages[at + 5] = reason, wanted, there
    counts[NUM_FAILED] += ONE
    counts[NUM_MESSAGE_WORDS] += MESSAGE_WORDS


@compiled_inline
def _collect(collecting: Ints, counts: Ints, slot: int, collection: int, word: int) -> None:
    at = counts[NUM_COLLECTING]
    collecting[COLLECTING_SLOT, at], collecting[COLLECTING_NUMBER, at] = slot, collection
    collecting[COLLECTING_WORD, at] = word
    counts[NUM_COLLECTING] += ONE


@compiled_inline
def _hold(nodes: Ints, code: Ints, heap: Ints, region: int, block: int, base: int, num_nodes: int) -> None:
    """Hold those nodes of a segment that has begun which are in slots of its region."""
    at = code[region + HELD_AT]
    for k in range(at, at + 3 * code[region + NUM_HELD], 3):
        begin = heap[block + code[k]]
        if begin != NOWHERE and base <= begin // OUTPUTS < base + num_nodes:
            for j in range(heap[block + code[k + 1]]):
                nodes[HELD, begin // OUTPUTS + j * code[k + 2]] += 1


@compiled
def begin_frames(
    addresses: Ints, machine_addresses: Ints, slots: Ints, regions: Ints, bases: Ints, stored: Ints, firsts: Ints
) -> None:
    """Let the regions of requests begin. There must be room for their frames, and in the queue.

    [requests] slots; regions; bases: the first nodes of their own graphs, whose first local numbers are `firsts`;
    stored: the first of the stored nodes of their sequences.
    """
    nodes, m = state_at(addresses).nodes, machine_at(machine_addresses)
    for i in range(len(slots)):
        frame = _add_frame(
            m.code, m.frames, m.heap, m.queue, m.first_frame, m.counts, regions[i], slots[i], NOWHERE, NOWHERE
        )
        record, block = m.code[m.code[regions[i] + ITEMS_AT]], m.frames[BLOCK, frame]
        at = m.code[record + EXPORTS_AT]
        for k in range(at, at + 3 * m.code[record + NUM_EXPORTS], 3):
            local = m.code[k + 1]
            node = local - firsts[i] + bases[i] if local >= firsts[i] else stored[i] + local
            m.heap[block + m.code[k]] = node * OUTPUTS + m.code[k + 2]
        _hold(nodes, m.code, m.heap, regions[i], block, bases[i], m.num_nodes[slots[i]])


@compiled
def decide(addresses: Ints, forms_addresses: Ints, machine_addresses: Ints, done: Ints) -> int:
    """Let go on what waited for these nodes, which are done, and all that follows from it.

    Returns ALL_DONE, or SOME_FAILED if that has failed requests; or, if some table lacks room, LACKS_MACHINE or
    LACKS_NUMBERS, and LACKS_FORM if a segment has no form of the size: then call it again, without the nodes; or
    NOT_BEGUN: then with them.
    """
    state, forms, m = state_at(addresses), forms_at(forms_addresses), machine_at(machine_addresses)
    num_begun = m.counts[NUM_BEGINNING]
    status = _go_on(addresses, forms_addresses, machine_addresses, done)
    begun = m.beginning[:, num_begun : m.counts[NUM_BEGINNING]]
    ready = ready_of(forms, begun[BEGINNING_FORM], begun[BEGINNING_SUBGRAPH])
    release(state.nodes, state.subgraphs, state.requests, state.types, state.queue, state.counts, ready)
    return status


@compiled_within
def _go_on(addresses: Ints, forms_addresses: Ints, machine_addresses: Ints, done: Ints) -> int:
    """As `decide`, but for the nodes that have become ready."""
    state, forms, m = state_at(addresses), forms_at(forms_addresses), machine_at(machine_addresses)
    nodes, subgraphs, requests, types = state.nodes, state.subgraphs, state.requests, state.types
    code, frames, heap, queue, counts = m.code, m.frames, m.heap, m.queue, m.counts
    waits, waiting, messages, lists = m.waits, m.waiting, m.messages, m.lists
    if counts[NUM_QUEUED] + counts[NUM_WAITING] + counts[MOST_WORDS] > queue.shape[1]:
        return int(NOT_BEGUN)
    for i in range(len(done)):
        place = waits[done[i]]
        waits[done[i]] = NOWHERE
        while place != NOWHERE:
            following = waiting[NEXT_WAITING, place]
            waiting[NEXT_WAITING, place] = counts[FREE_WAITING]
            counts[FREE_WAITING] = place
            if waiting[WAITING_FRAME, place] == NOWHERE:
                _hold_less(nodes, subgraphs, types, state.pools, state.free_rows, waiting[WAITING_ITEM, place])
            else:
                queue[0, counts[NUM_QUEUED]] = waiting[WAITING_FRAME, place]
                queue[1, counts[NUM_QUEUED]] = waiting[WAITING_ITEM, place]
                counts[NUM_QUEUED] += 1
            place = following
    while counts[NUM_QUEUED] > 0:
        if (
            counts[NUM_FRAMES] + 1 > frames.shape[1]
            or counts[HEAP_TOP] + counts[MOST_WORDS] > len(heap)
            or counts[NUM_WAITING] + counts[MOST_WORDS] + counts[MOST_HELD] > waiting.shape[1]
            or counts[NUM_QUEUED] + counts[MOST_WORDS] > queue.shape[1]
            or counts[NUM_MESSAGE_WORDS] + counts[MOST_WORDS] > len(messages)
            or counts[NUM_BEGINNING] + 1 > m.beginning.shape[1]
            or lists[IN_LIST, 0] + counts[MOST_WORDS] > lists.shape[1]
            or counts[NUM_COLLECTING] + counts[MOST_WORDS] > m.collecting.shape[1]
        ):
            return int(LACKS_MACHINE)
        top = counts[NUM_QUEUED] - 1
        frame, item = queue[0, top], queue[1, top]
        slot, region, block = frames[OF_REQUEST, frame], frames[OF_REGION, frame], frames[BLOCK, frame]
        if m.num_nodes[slot] < 0 or not requests[ALIVE, slot]:
            counts[NUM_QUEUED] = top
            continue
        if item == NOWHERE:  # all of the region has ended: whoever began it gets its outputs
            counts[NUM_QUEUED] = top
            parent, at = frames[PARENT, frame], code[region + OUTPUTS_AT]
            if parent == NOWHERE:
                messages[counts[NUM_MESSAGE_WORDS]], messages[counts[NUM_MESSAGE_WORDS] + 1] = FINISHED, slot
                messages[counts[NUM_MESSAGE_WORDS] + 2] = code[region + NUM_OUTPUTS]
                for k in range(code[region + NUM_OUTPUTS]):
                    messages[counts[NUM_MESSAGE_WORDS] + 3 + k] = heap[block + code[at + k]]
                counts[NUM_MESSAGE_WORDS] += 3 + code[region + NUM_OUTPUTS]
                requests[OPEN, slot] = 0
                _free_frame(code, frames, m.first_frame, frame)
                continue
            above, of_parent = frames[PARENT_ITEM, frame], frames[OF_REGION, parent]
            record, outside = code[code[of_parent + ITEMS_AT] + above], frames[BLOCK, parent]
            if code[record + KIND] == CHOICE:
                first, count = code[record + RESULTS_AT], code[record + NUM_RESULTS]
            else:
                first, count = code[record + STATE_AT], code[record + NUM_STATE]
            is_loop = code[record + KIND] == LOOP  # then what it had before is let go, but for nodes that stay
            for k in range(count):
                node = heap[block + code[at + k]] // OUTPUTS
                if not is_loop or node != heap[outside + code[first + k]] // OUTPUTS:
                    nodes[HELD, node] += 1
            if is_loop:
                for k in range(count):
                    before = heap[outside + code[first + k]] // OUTPUTS
                    if before >= 0 and before != heap[block + code[at + k]] // OUTPUTS:
                        _let_go(state.nodes, subgraphs, types, state.pools, state.free_rows, waits, waiting, counts,
                                before)  # fmt: skip
                progress = outside + code[record + PROGRESS]
                heap[progress] += 1
                more = at + count
                if code[record + TESTS]:
                    heap[progress + 1] = heap[block + code[more]]
                    more += 1
                if code[record + FILTERS]:
                    heap[progress + 2] = heap[block + code[more]]
            for k in range(count):
                heap[outside + code[first + k]] = heap[block + code[at + k]]
            held = code[region + HELD_AT]
            for k in range(held, held + 3 * code[region + NUM_HELD], 3):
                begin = heap[block + code[k]]
                for j in range(heap[block + code[k + 1]] if begin != NOWHERE else ZERO):
                    _let_go(state.nodes, subgraphs, types, state.pools, state.free_rows, waits, waiting, counts,
                            begin // OUTPUTS + j * code[k + 2])  # fmt: skip
            _free_frame(code, frames, m.first_frame, frame)
            if code[record + KIND] == CHOICE:
                _ended(code, frames, heap, queue, counts, parent, above)
            else:
                queue[0, counts[NUM_QUEUED]], queue[1, counts[NUM_QUEUED]] = parent, above
                counts[NUM_QUEUED] += 1
            continue
        record = code[code[region + ITEMS_AT] + item]
        kind = code[record + KIND]
        if kind == SEGMENT and code[record + OF_FORM] == NOWHERE:
            counts[NUM_QUEUED] = top
            _ended(code, frames, heap, queue, counts, frame, item)
            continue
        if kind == SEGMENT:
            form, arguments = code[record + OF_FORM], code[record + ARGUMENTS_AT]
            spans = code[record + SPANS_AT]
            tail = _first_not_done(nodes, subgraphs, code, heap, block, arguments, code[record + NUM_ARGUMENTS])
            if tail == NOWHERE:
                tail = _first_of_spans_not_done(nodes, subgraphs, code, heap, block, spans, code[record + NUM_SPANS])
            if tail != NOWHERE:
                counts[NUM_QUEUED] = top
                _wait(waits, waiting, counts, tail, frame, item)
                continue
            size = ONE
            if code[record + SIZE_AT] != NOWHERE:
                size = heap[block + code[record + SIZE_AT]]
            if size == 0:  # no node: what the last one would return is the state at first
                counts[NUM_QUEUED] = top
                has_ends, at = True, code[record + ENDS_AT]
                for k in range(at, at + 3 * code[record + NUM_ENDS], 3):
                    if code[k + 2] == NOWHERE:
                        has_ends = False
                        continue
                    heap[block + code[k]] = heap[block + code[k + 2]]
                    nodes[HELD, heap[block + code[k]] // OUTPUTS] += 1
                if has_ends:
                    _ended(code, frames, heap, queue, counts, frame, item)
                else:
                    m.num_nodes[slot] = NOWHERE
                    _fail(messages, counts, slot, record, NO_STEP, ZERO, ZERO)
                continue
            num_nodes = forms.counts[1, form] if code[record + SIZE_AT] == NOWHERE else size
            if m.num_nodes[slot] + num_nodes > counts[MOST_NODES]:
                counts[NUM_QUEUED] = top
                m.num_nodes[slot] = NOWHERE
                _fail(messages, counts, slot, record, TOO_MANY_NODES, num_nodes, counts[MOST_NODES])
                continue
            if code[record + SIZE_AT] != NOWHERE:
                form = code[code[record + FORMS_AT] + size] if size < code[record + NUM_FORMS] else NOWHERE
                if form == NOWHERE:
                    counts[WANTED_FORM], counts[WANTED_SLOT], counts[WANTED_SIZE] = record, slot, size
                    return int(LACKS_FORM)
            if not has_room_for(state, forms, form):
                counts[WANTED_FORM], counts[WANTED_SLOT] = form, slot
                return int(LACKS_NUMBERS)
            counts[NUM_QUEUED] = top
            m.num_nodes[slot] += num_nodes
            base, first_subgraph = begin_copy(state, forms, slot, form)
            at = code[record + READS_AT]
            for k in range(at, at + 3 * code[record + NUM_READS], 3):
                read = heap[block + code[arguments + code[k + 2]]]
                source, node = read // OUTPUTS, base + code[k + 1]
                nodes[USES, source] += 1
                if state.rules[PLAN_ROWS]:
                    pool = types[POOL, subgraphs[TYPE, nodes[SUBGRAPH, source]]]
                    state.source[code[k], node] = source
                    state.source_table[code[k], node] = state.pools[FIRST_TABLE, pool] + read % OUTPUTS
            at = code[record + COLUMNS_AT]
            for k in range(at, at + 2 * code[record + NUM_COLUMNS], 2):
                span = spans + 3 * code[k + 1]
                read, step, place = heap[block + code[span]], code[span + 2], heap[block + code[span]]
                for i in range(size):
                    if step == A_LIST:
                        read = lists[IN_LIST, place]
                        place = lists[NEXT_IN_LIST, place]
                    source, node = read // OUTPUTS, base + i
                    nodes[USES, source] += 1
                    if state.rules[PLAN_ROWS]:
                        pool = types[POOL, subgraphs[TYPE, nodes[SUBGRAPH, source]]]
                        state.source[code[k], node] = source
                        state.source_table[code[k], node] = state.pools[FIRST_TABLE, pool] + read % OUTPUTS
                    read += step * OUTPUTS
                if step == A_LIST:
                    place = heap[block + code[span]]
                    while place != NOWHERE:
                        _hold_less(nodes, subgraphs, types, state.pools, state.free_rows,
                                   lists[IN_LIST, place] // OUTPUTS)  # fmt: skip
                        place = lists[NEXT_IN_LIST, place]
                    end_list(lists, heap, block + code[span])
            at = code[record + MEMORIES_AT]
            for k in range(at, at + 5 * code[record + NUM_MEMORIES], 5):
                span = spans + 3 * code[k + 4]
                read, length, step = heap[block + code[span]], heap[block + code[span + 1]], code[span + 2]
                num_readers = size if code[k + 2] == NOWHERE else code[k + 2]
                for i in range(length):
                    nodes[USES, read // OUTPUTS + i * step] += ONE if code[k + 3] else num_readers
                if length > 0 and state.rules[PLAN_ROWS]:
                    source = read // OUTPUTS
                    pool = types[POOL, subgraphs[TYPE, nodes[SUBGRAPH, source]]]
                    for node in range(base + code[k + 1], base + code[k + 1] + num_readers):
                        state.source[code[k], node] = source
                        state.source_table[code[k], node] = state.pools[FIRST_TABLE, pool] + read % OUTPUTS
                        state.reach[code[k], node] = length + (step << STEP_SHIFT)
            at = code[record + EXPORTS_AT]
            for k in range(at, at + 3 * code[record + NUM_EXPORTS], 3):
                heap[block + code[k]] = (base + code[k + 1]) * OUTPUTS + code[k + 2]
            at = code[record + ENDS_AT]
            for k in range(at, at + 3 * code[record + NUM_ENDS], 3):
                heap[block + code[k]] = (base + size - 1) * OUTPUTS + code[k + 1]
            _hold(nodes, code, heap, region, block, base, num_nodes)
            at = counts[NUM_BEGINNING]
            m.beginning[BEGINNING_SLOT, at], m.beginning[BEGINNING_FORM, at] = slot, form
            m.beginning[BEGINNING_BASE, at], m.beginning[BEGINNING_SUBGRAPH, at] = base, first_subgraph
            counts[NUM_BEGINNING] += 1
            _ended(code, frames, heap, queue, counts, frame, item)
            continue
        counts[NUM_QUEUED] = top
        if kind == PICK:
            index = heap[block + code[record + PICK_INDEX]]
            tail = _not_done(nodes, subgraphs, index)
            if tail != NOWHERE:
                _wait(waits, waiting, counts, tail, frame, item)
                continue
            value = m.values[index % OUTPUTS, index // OUTPUTS]
            count = heap[block + code[record + COUNT_OF]]
            if value < 0 or value >= count:
                m.num_nodes[slot] = NOWHERE
                _fail(messages, counts, slot, record, BAD_INDEX, value, count)
                continue
            element = heap[block + code[record + FIRST_OF]] + value * code[record + STEP_OF] * OUTPUTS
            heap[block + code[record + RESULT]] = element
            _ended(code, frames, heap, queue, counts, frame, item)
            continue
        if kind == TELL:
            num_told = max(heap[block + code[record + TOLD]], ZERO)
            if num_told >= heap[block + code[record + COUNT_OF]]:
                _ended(code, frames, heap, queue, counts, frame, item)
                continue
            word = heap[block + code[record + FIRST_OF]] + num_told * code[record + STEP_OF] * OUTPUTS
            tail = _not_done(nodes, subgraphs, word)
            if tail != NOWHERE:
                _wait(waits, waiting, counts, tail, frame, item)
                continue
            _collect(m.collecting, counts, slot, code[record + COLLECTION], word)
            heap[block + code[record + TOLD]] = num_told + 1
            queue[0, top], queue[1, top] = frame, item
            counts[NUM_QUEUED] = top + 1
            continue
        if kind == CHOICE:
            index = heap[block + code[record + INDEX]]
            tail = _not_done(nodes, subgraphs, index)
            if tail != NOWHERE:
                _wait(waits, waiting, counts, tail, frame, item)
                continue
            value, count = m.values[index % OUTPUTS, index // OUTPUTS], code[record + NUM_BRANCHES]
            if code[record + IS_COND]:
                value = ZERO if value != 0 else ONE
            if value < 0 or value >= count:
                m.num_nodes[slot] = NOWHERE
                _fail(messages, counts, slot, record, BAD_BRANCH, value, count)
                continue
            branch = code[record + BRANCHES_AT] + 3 * value
        else:  # a loop: at its beginning, or after an iteration
            progress, first = block + code[record + PROGRESS], code[record + STATE_AT]
            if heap[progress] == NOWHERE:
                going = code[record + GOING]
                says = heap[block + going] if going != NOWHERE else NOWHERE
            else:
                says = heap[progress + 1]
            tail = _not_done(nodes, subgraphs, says) if says != NOWHERE else NOWHERE
            collected, num_collected = code[record + COLLECTED_AT], code[record + NUM_COLLECTED]
            listed, num_listed = code[record + LISTED_AT], code[record + NUM_LISTED]
            if tail == NOWHERE and heap[progress] != NOWHERE and num_collected + num_listed > 0:
                if code[record + FILTERS]:
                    tail = _not_done(nodes, subgraphs, heap[progress + 2])
                for k in range(collected + 1, collected + 2 * num_collected, 2):
                    if tail == NOWHERE:
                        tail = _not_done(nodes, subgraphs, heap[block + code[first + code[k]]])
                for k in range(listed + 1, listed + 2 * num_listed, 2):
                    if tail == NOWHERE:
                        tail = _not_done(nodes, subgraphs, heap[block + code[first + code[k]]])
            if tail != NOWHERE:
                _wait(waits, waiting, counts, tail, frame, item)
                continue
            if heap[progress] == NOWHERE:
                heap[progress] = heap[progress + 3] = 0
                at = code[record + INIT_AT]
                for k in range(code[record + NUM_STATE]):
                    if code[at + k] != NOWHERE:
                        heap[block + code[first + k]] = heap[block + code[at + k]]
                        nodes[HELD, heap[block + code[at + k]] // OUTPUTS] += 1
            else:
                keeps = True
                if code[record + FILTERS]:
                    where_at = heap[progress + 2]
                    keeps = m.values[where_at % OUTPUTS, where_at // OUTPUTS] != 0
                for k in range(collected, collected + 2 * num_collected if keeps else ZERO, 2):
                    _collect(m.collecting, counts, slot, code[k], heap[block + code[first + code[k + 1]]])
                for k in range(listed, listed + 2 * num_listed if keeps else ZERO, 2):
                    word = heap[block + code[first + code[k + 1]]]
                    nodes[HELD, word // OUTPUTS] += 1
                    add_to_list(lists, heap, block + code[k], word)
                heap[progress + 3] += keeps
            goes_on = heap[progress] < heap[block + code[record + LIMIT]]
            if says != NOWHERE:
                goes_on &= m.values[says % OUTPUTS, says // OUTPUTS] != 0
            if not goes_on:
                _ended(code, frames, heap, queue, counts, frame, item)
                continue
            branch = code[record + BODY_AT]
        inner = _add_frame(code, frames, heap, queue, m.first_frame, counts, code[branch], slot, frame, item)
        into, at = frames[BLOCK, inner], code[branch + 1]
        for k in range(at, at + 2 * code[branch + 2], 2):
            heap[into + code[k]] = heap[block + code[k + 1]]
    return int(SOME_FAILED if counts[NUM_FAILED] > 0 else ALL_DONE)


@compiled
def forget_frames(addresses: Ints, machine_addresses: Ints, slots: Ints) -> None:
    """Free all frames of these requests, which have ended, and whoever waits for their nodes."""
    state, m = state_at(addresses), machine_at(machine_addresses)
    for i in range(len(slots)):
        slot = slots[i]
        frame = m.first_frame[slot]
        while frame != NOWHERE:
            following = m.frames[NEXT_FRAME, frame]
            region = m.frames[OF_REGION, frame]
            at = m.code[region + LISTS_AT]
            for k in range(at, at + m.code[region + NUM_LISTS]):
                end_list(m.lists, m.heap, m.frames[BLOCK, frame] + m.code[k])
            m.frames[NEXT_FRAME, frame] = m.code[region + FREE]
            m.code[region + FREE] = frame
            frame = following
        m.first_frame[slot] = NOWHERE
        extent = state.requests[FIRST, slot]
        while extent != NOWHERE:
            base = state.extents[BASE, extent]
            for node in range(base, base + state.extents[NUM_NODES, extent]):
                place = m.waits[node]
                m.waits[node] = NOWHERE
                while place != NOWHERE:
                    following = m.waiting[NEXT_WAITING, place]
                    m.waiting[NEXT_WAITING, place] = m.counts[FREE_WAITING]
                    m.counts[FREE_WAITING] = place
                    place = following
            extent = state.extents[NEXT, extent]
