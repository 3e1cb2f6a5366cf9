"""Frames of regions, and the items in them: who goes on, who waits, and what a region leaves behind.

An item waits for the first node that it needs and that is not done; once all are, it fills its slots, and the items
behind it may go on. Compiled loops only; `region_code` says what the words mean.
"""

from __future__ import annotations

from typing import NamedTuple

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled_inline, compiled_merged
from batchmaker.core.addresses import State
from batchmaker.core.layout import DONE, END, HELD, NOWHERE, OPEN, OUTPUTS, ROW, STATE, SUBGRAPH, USES
from batchmaker.core.progress import free_row
from batchmaker.core.region_code import (
    BLOCK,
    COLLECTING_NUMBER,
    COLLECTING_SLOT,
    COLLECTING_WORD,
    CONSTANTS_AT,
    FAILED,
    FILTERS,
    FINISHED,
    FOLLOWS_AT,
    FREE,
    FREE_WAITING,
    HEAP_TOP,
    HELD_AT,
    ITEMS_AT,
    ITEMS_LEFT,
    KIND,
    LOOP,
    MESSAGE_WORDS,
    NEXT_FRAME,
    NEXT_WAITING,
    NUM_COLLECTING,
    NUM_CONSTANTS,
    NUM_FAILED,
    NUM_FOLLOWS,
    NUM_FRAMES,
    NUM_HELD,
    NUM_ITEMS,
    NUM_MESSAGE_WORDS,
    NUM_NEEDS,
    NUM_OUTPUTS,
    NUM_QUEUED,
    NUM_RESULTS,
    NUM_SLOTS,
    NUM_STATE,
    NUM_WAITING,
    OF_REGION,
    OF_REQUEST,
    ONE,
    OUTPUTS_AT,
    PARENT,
    PARENT_ITEM,
    PREVIOUS_FRAME,
    PROGRESS,
    RESULTS_AT,
    STATE_AT,
    TESTS,
    WAITING_FRAME,
    WAITING_ITEM,
    ZERO,
    Machine,
)


class Item(NamedTuple):
    """An item of a frame that can go on.

    frame, number: which. slot: of its request. region: of its frame. block: of its frame, in the heap. record: where
    it is in the code; all are int.
    """

    frame: int
    number: int
    slot: int
    region: int
    block: int
    record: int


@compiled_inline
def item_of(m: Machine, frame: int, number: int) -> Item:
    region = m.frames[OF_REGION, frame]
    record = m.code[m.code[region + ITEMS_AT] + number]
    return Item(frame, number, m.frames[OF_REQUEST, frame], region, m.frames[BLOCK, frame], record)


# --- who goes on, and who waits --------------------------------------------------------------------------------------


@compiled_inline
def go_on_with(m: Machine, frame: int, number: int) -> None:
    """Let an item go on; NOWHERE: the frame is over."""
    m.queue[0, m.counts[NUM_QUEUED]], m.queue[1, m.counts[NUM_QUEUED]] = frame, number
    m.counts[NUM_QUEUED] += 1


@compiled_inline
def _tail(state: State, node: int) -> int:
    """Return the node whose end is the end of this one: the last of a run."""
    end = state.subgraphs[END, state.nodes[SUBGRAPH, node]]
    return int(end - 1) if end > 0 else node


@compiled_inline
def node_not_done(state: State, word: int) -> int:
    """Return the node that what is in a slot waits for; NOWHERE if it is done."""
    tail = _tail(state, word // OUTPUTS)
    return int(NOWHERE) if state.nodes[STATE, tail] == DONE else tail


@compiled_inline
def wait(m: Machine, node: int, frame: int, number: int) -> None:
    """Let an item wait until a node is done."""
    place = m.counts[FREE_WAITING]
    if place != NOWHERE:
        m.counts[FREE_WAITING] = m.waiting[NEXT_WAITING, place]
    else:
        place = m.counts[NUM_WAITING]
        m.counts[NUM_WAITING] += 1
    m.waiting[WAITING_FRAME, place], m.waiting[WAITING_ITEM, place] = frame, number
    m.waiting[NEXT_WAITING, place] = m.waits[node]
    m.waits[node] = place


@compiled_inline
def hold_less(state: State, node: int) -> None:
    """Let one slot less hold a node that is done, or that has no row; its row is freed if nobody needs it."""
    nodes = state.nodes
    nodes[HELD, node] -= 1
    if nodes[HELD, node] == 0 and nodes[USES, node] == 0 and nodes[ROW, node] != NOWHERE:
        free_row(nodes, state.subgraphs, state.types, state.pools, state.free_rows, node)


@compiled_inline
def _let_go(state: State, m: Machine, node: int) -> None:
    """Let one slot less keep a node alive. A node on a worker is let go when it is done."""
    tail = _tail(state, node)
    if state.nodes[ROW, node] != NOWHERE and state.nodes[STATE, tail] != DONE:
        wait(m, tail, NOWHERE, node)
    else:
        hold_less(state, node)


@compiled_inline
def wake(state: State, m: Machine, done: Ints) -> None:
    """Let those go on that waited for these nodes."""
    for i in range(len(done)):
        place = m.waits[done[i]]
        m.waits[done[i]] = NOWHERE
        while place != NOWHERE:
            following = m.waiting[NEXT_WAITING, place]
            m.waiting[NEXT_WAITING, place] = m.counts[FREE_WAITING]
            m.counts[FREE_WAITING] = place
            if m.waiting[WAITING_FRAME, place] == NOWHERE:
                hold_less(state, m.waiting[WAITING_ITEM, place])
            else:
                go_on_with(m, m.waiting[WAITING_FRAME, place], m.waiting[WAITING_ITEM, place])
            place = following


@compiled_inline
def fail(m: Machine, slot: int, record: int, reason: int, wanted: int, there: int) -> None:
    """Let a request fail: it is told, and nothing of it goes on."""
    at = m.counts[NUM_MESSAGE_WORDS]
    m.messages[at], m.messages[at + 1], m.messages[at + 2] = FAILED, slot, record
    m.messages[at + 3], m.messages[at + 4], m.messages[at + 5] = reason, wanted, there
    m.counts[NUM_FAILED] += ONE
    m.counts[NUM_MESSAGE_WORDS] += MESSAGE_WORDS
    m.num_nodes[slot] = NOWHERE


@compiled_inline
def collect(m: Machine, slot: int, collection: int, word: int) -> None:
    """Add a value to what is collected for a request's result."""
    at = m.counts[NUM_COLLECTING]
    m.collecting[COLLECTING_SLOT, at], m.collecting[COLLECTING_NUMBER, at] = slot, collection
    m.collecting[COLLECTING_WORD, at] = word
    m.counts[NUM_COLLECTING] += ONE


# --- frames ----------------------------------------------------------------------------------------------------------


@compiled_inline
def add_frame(m: Machine, region: int, slot: int, parent: int, parent_item: int) -> int:
    """Let a region begin; return its frame. What it captures is not there yet. There must be room."""
    code, frames, heap = m.code, m.frames, m.heap
    num_slots, num_items = code[region + NUM_SLOTS], code[region + NUM_ITEMS]
    frame = code[region + FREE]
    if frame != NOWHERE:
        code[region + FREE] = frames[NEXT_FRAME, frame]
    else:
        frame = m.counts[NUM_FRAMES]
        m.counts[NUM_FRAMES] += 1
        frames[OF_REGION, frame], frames[BLOCK, frame] = region, m.counts[HEAP_TOP]
        m.counts[HEAP_TOP] += num_slots + num_items
    block = frames[BLOCK, frame]
    frames[OF_REQUEST, frame], frames[PARENT, frame], frames[PARENT_ITEM, frame] = slot, parent, parent_item
    frames[ITEMS_LEFT, frame] = num_items
    before = m.first_frame[slot]
    frames[NEXT_FRAME, frame], frames[PREVIOUS_FRAME, frame] = before, NOWHERE
    if before != NOWHERE:
        frames[PREVIOUS_FRAME, before] = frame
    m.first_frame[slot] = frame
    for k in range(num_slots):
        heap[block + k] = NOWHERE
    at = code[region + CONSTANTS_AT]
    for k in range(at, at + 2 * code[region + NUM_CONSTANTS], 2):
        heap[block + code[k]] = code[k + 1]
    for number in range(num_items):
        needs = code[code[code[region + ITEMS_AT] + number] + NUM_NEEDS]
        heap[block + num_slots + number] = needs
        if needs == 0:
            go_on_with(m, frame, number)
    if num_items == 0:
        go_on_with(m, frame, NOWHERE)
    return int(frame)


@compiled_inline
def _free_frame(m: Machine, frame: int) -> None:
    frames = m.frames
    before, after = frames[PREVIOUS_FRAME, frame], frames[NEXT_FRAME, frame]
    if before != NOWHERE:
        frames[NEXT_FRAME, before] = after
    else:
        m.first_frame[frames[OF_REQUEST, frame]] = after
    if after != NOWHERE:
        frames[PREVIOUS_FRAME, after] = before
    region = frames[OF_REGION, frame]
    frames[NEXT_FRAME, frame] = m.code[region + FREE]
    m.code[region + FREE] = frame


@compiled_merged
def item_ended(m: Machine, frame: int, number: int) -> None:
    """Note that an item has filled its slots: others may begin, or the frame is over."""
    region, block = m.frames[OF_REGION, frame], m.frames[BLOCK, frame]
    record = m.code[m.code[region + ITEMS_AT] + number]
    at = m.code[record + FOLLOWS_AT]
    for k in range(at, at + m.code[record + NUM_FOLLOWS]):
        counter = block + m.code[region + NUM_SLOTS] + m.code[k]
        m.heap[counter] -= 1
        if m.heap[counter] == 0:
            go_on_with(m, frame, m.code[k])
    m.frames[ITEMS_LEFT, frame] -= 1
    if m.frames[ITEMS_LEFT, frame] == 0:
        go_on_with(m, frame, NOWHERE)


@compiled_merged
def end_frame(state: State, m: Machine, frame: int) -> None:
    """Give the outputs of a region, all of which has ended, to whoever began it."""
    code, frames, heap, nodes = m.code, m.frames, m.heap, state.nodes
    region, block, parent = frames[OF_REGION, frame], frames[BLOCK, frame], frames[PARENT, frame]
    at = code[region + OUTPUTS_AT]
    if parent == NOWHERE:
        slot, words = frames[OF_REQUEST, frame], m.counts[NUM_MESSAGE_WORDS]
        m.messages[words], m.messages[words + 1] = FINISHED, slot
        m.messages[words + 2] = code[region + NUM_OUTPUTS]
        for k in range(code[region + NUM_OUTPUTS]):
            m.messages[words + 3 + k] = heap[block + code[at + k]]
        m.counts[NUM_MESSAGE_WORDS] += 3 + code[region + NUM_OUTPUTS]
        state.requests[OPEN, slot] = 0
        _free_frame(m, frame)
    else:
        above, outside = frames[PARENT_ITEM, frame], frames[BLOCK, parent]
        record = code[code[frames[OF_REGION, parent] + ITEMS_AT] + above]
        is_loop = code[record + KIND] == LOOP  # then what it had before is let go, but for nodes that stay
        first = code[record + (STATE_AT if is_loop else RESULTS_AT)]
        count = code[record + (NUM_STATE if is_loop else NUM_RESULTS)]
        for k in range(count):
            node = heap[block + code[at + k]] // OUTPUTS
            if not is_loop or node != heap[outside + code[first + k]] // OUTPUTS:
                nodes[HELD, node] += 1
        if is_loop:
            for k in range(count):
                before = heap[outside + code[first + k]] // OUTPUTS
                if before >= 0 and before != heap[block + code[at + k]] // OUTPUTS:
                    _let_go(state, m, before)
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
                _let_go(state, m, begin // OUTPUTS + j * code[k + 2])
        _free_frame(m, frame)
        if is_loop:
            go_on_with(m, parent, above)
        else:
            item_ended(m, parent, above)


@compiled_inline
def begin_inside(m: Machine, item: Item, branch: int) -> None:
    """Let a branch or a body begin, with what it captures. branch: where it is in the code; see BRANCHES_AT."""
    inner = add_frame(m, m.code[branch], item.slot, item.frame, item.number)
    into, at = m.frames[BLOCK, inner], m.code[branch + 1]
    for k in range(at, at + 2 * m.code[branch + 2], 2):
        m.heap[into + m.code[k]] = m.heap[item.block + m.code[k + 1]]
