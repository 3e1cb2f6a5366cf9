"""Decisions as one compiled loop: values are looked at, and copies of the regions that they choose begin.

Here are the items that a value decides. `region_frames` has what all items have in common, `region_segments` those that
compute, and `region_code` the words of them all.
"""

from __future__ import annotations

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled, compiled_inline, compiled_merged
from batchmaker.core.addresses import State, state_at
from batchmaker.core.copies import Forms, forms_at, ready_of
from batchmaker.core.layout import ALIVE, BASE, FIRST, HELD, NEXT, NOWHERE, NUM_NODES, OUTPUTS
from batchmaker.core.lists import IN_LIST, add_to_list, end_list
from batchmaker.core.progress import release
from batchmaker.core.region_code import (
    ALL_DONE,
    BAD_BRANCH,
    BAD_INDEX,
    BEGINNING_FORM,
    BEGINNING_SUBGRAPH,
    BLOCK,
    BODY_AT,
    BRANCHES_AT,
    CHOICE,
    COLLECTED_AT,
    COLLECTION,
    COUNT_OF,
    EXPORTS_AT,
    FILTERS,
    FIRST_OF,
    FREE,
    FREE_WAITING,
    GOING,
    HEAP_TOP,
    INDEX,
    INIT_AT,
    IS_COND,
    ITEMS_AT,
    KIND,
    LACKS_MACHINE,
    LIMIT,
    LISTED_AT,
    LISTS_AT,
    MOST_HELD,
    MOST_WORDS,
    NEXT_FRAME,
    NEXT_WAITING,
    NOT_BEGUN,
    NUM_BEGINNING,
    NUM_BRANCHES,
    NUM_COLLECTED,
    NUM_COLLECTING,
    NUM_EXPORTS,
    NUM_FAILED,
    NUM_FRAMES,
    NUM_LISTED,
    NUM_LISTS,
    NUM_MESSAGE_WORDS,
    NUM_QUEUED,
    NUM_STATE,
    NUM_WAITING,
    OF_REGION,
    OF_REQUEST,
    ONE,
    PICK,
    PICK_INDEX,
    PROGRESS,
    RESULT,
    SEGMENT,
    SOME_FAILED,
    STATE_AT,
    STEP_OF,
    TELL,
    TOLD,
    ZERO,
    Machine,
    machine_at,
)
from batchmaker.core.region_frames import (
    Item,
    add_frame,
    begin_inside,
    collect,
    end_frame,
    fail,
    go_on_with,
    item_ended,
    item_of,
    node_not_done,
    wait,
    wake,
)
from batchmaker.core.region_segments import begin_segment, hold_new

# --- the other kinds of items ----------------------------------------------------------------------------------------


@compiled_inline
def _value(m: Machine, word: int) -> int:
    """Return the value, which has come to the host, of what is in a slot."""
    return int(m.values[word % OUTPUTS, word // OUTPUTS])


@compiled_merged
def _pick(state: State, m: Machine, item: Item) -> None:
    """Take that element of a sequence of which a value is the place, once the value is there."""
    heap, block, record = m.heap, item.block, item.record
    index = heap[block + m.code[record + PICK_INDEX]]
    tail = node_not_done(state, index)
    if tail != NOWHERE:
        wait(m, tail, item.frame, item.number)
    else:
        value, count = _value(m, index), heap[block + m.code[record + COUNT_OF]]
        if value < 0 or value >= count:
            fail(m, item.slot, record, BAD_INDEX, value, count)
        else:
            element = heap[block + m.code[record + FIRST_OF]] + value * m.code[record + STEP_OF] * OUTPUTS
            heap[block + m.code[record + RESULT]] = element
            item_ended(m, item.frame, item.number)


@compiled_merged
def _tell(state: State, m: Machine, item: Item) -> None:
    """Collect the next element of a sequence for the result, once it is there."""
    heap, block, record = m.heap, item.block, item.record
    num_told = max(heap[block + m.code[record + TOLD]], ZERO)
    if num_told >= heap[block + m.code[record + COUNT_OF]]:
        item_ended(m, item.frame, item.number)
    else:
        word = heap[block + m.code[record + FIRST_OF]] + num_told * m.code[record + STEP_OF] * OUTPUTS
        tail = node_not_done(state, word)
        if tail != NOWHERE:
            wait(m, tail, item.frame, item.number)
        else:
            collect(m, item.slot, m.code[record + COLLECTION], word)
            heap[block + m.code[record + TOLD]] = num_told + 1
            go_on_with(m, item.frame, item.number)


@compiled_merged
def _choose(state: State, m: Machine, item: Item) -> None:
    """Let the branch begin that a value chooses, once the value is there."""
    index, record = m.heap[item.block + m.code[item.record + INDEX]], item.record
    tail = node_not_done(state, index)
    if tail != NOWHERE:
        wait(m, tail, item.frame, item.number)
    else:
        value, count = _value(m, index), m.code[record + NUM_BRANCHES]
        if m.code[record + IS_COND]:
            value = ZERO if value != 0 else ONE
        if value < 0 or value >= count:
            fail(m, item.slot, record, BAD_BRANCH, value, count)
        else:
            begin_inside(m, item, m.code[record + BRANCHES_AT] + 3 * value)


@compiled_inline
def _loop_waits_for(state: State, m: Machine, item: Item, says: int, has_begun: bool) -> int:
    """Return the node that a loop waits for; NOWHERE if all are done. says: what says whether it goes on, or NOWHERE.

    After an iteration these are, too, what the iteration collects, and whether it does.
    """
    code, heap, block, record = m.code, m.heap, item.block, item.record
    tail, first = NOWHERE, code[record + STATE_AT]
    if says != NOWHERE:
        tail = node_not_done(state, says)
    collected, num_collected = code[record + COLLECTED_AT], code[record + NUM_COLLECTED]
    listed, num_listed = code[record + LISTED_AT], code[record + NUM_LISTED]
    if tail == NOWHERE and has_begun and num_collected + num_listed > 0:
        if code[record + FILTERS]:
            tail = node_not_done(state, heap[block + code[record + PROGRESS] + 2])
        for k in range(collected + 1, collected + 2 * num_collected, 2):
            if tail == NOWHERE:
                tail = node_not_done(state, heap[block + code[first + code[k]]])
        for k in range(listed + 1, listed + 2 * num_listed, 2):
            if tail == NOWHERE:
                tail = node_not_done(state, heap[block + code[first + code[k]]])
    return tail


@compiled_inline
def _begin_loop(state: State, m: Machine, item: Item) -> None:
    """Let the state of a loop be what it is at first."""
    code, heap, block, record = m.code, m.heap, item.block, item.record
    progress, first, at = block + code[record + PROGRESS], code[record + STATE_AT], code[record + INIT_AT]
    heap[progress] = heap[progress + 3] = 0
    for k in range(code[record + NUM_STATE]):
        if code[at + k] != NOWHERE:
            heap[block + code[first + k]] = heap[block + code[at + k]]
            state.nodes[HELD, heap[block + code[at + k]] // OUTPUTS] += 1


@compiled_inline
def _collect_iteration(state: State, m: Machine, item: Item) -> None:
    """Collect what an iteration of a loop has computed, if it says so."""
    code, heap, block, record = m.code, m.heap, item.block, item.record
    progress, first = block + code[record + PROGRESS], code[record + STATE_AT]
    if not code[record + FILTERS] or _value(m, heap[progress + 2]) != 0:
        at = code[record + COLLECTED_AT]
        for k in range(at, at + 2 * code[record + NUM_COLLECTED], 2):
            collect(m, item.slot, code[k], heap[block + code[first + code[k + 1]]])
        at = code[record + LISTED_AT]
        for k in range(at, at + 2 * code[record + NUM_LISTED], 2):
            word = heap[block + code[first + code[k + 1]]]
            state.nodes[HELD, word // OUTPUTS] += 1
            add_to_list(m.lists, heap, block + code[k], word)
        heap[progress + 3] += 1


@compiled_merged
def _iterate(state: State, m: Machine, item: Item) -> None:
    """Let a loop go on, or end, at its beginning or after an iteration."""
    code, heap, block, record = m.code, m.heap, item.block, item.record
    progress = block + code[record + PROGRESS]
    has_begun = heap[progress] != NOWHERE
    if has_begun:
        says = heap[progress + 1]
    else:
        says = heap[block + code[record + GOING]] if code[record + GOING] != NOWHERE else NOWHERE
    tail = _loop_waits_for(state, m, item, says, has_begun)
    if tail != NOWHERE:
        wait(m, tail, item.frame, item.number)
    else:
        if has_begun:
            _collect_iteration(state, m, item)
        else:
            _begin_loop(state, m, item)
        goes_on = heap[progress] < heap[block + code[record + LIMIT]]
        if says != NOWHERE:
            goes_on &= _value(m, says) != 0
        if goes_on:
            begin_inside(m, item, code[record + BODY_AT])
        else:
            item_ended(m, item.frame, item.number)


# --- what others call ------------------------------------------------------------------------------------------------


@compiled_inline
def _lacks_room(m: Machine) -> bool:
    """Whether some table might be too small for what one item needs."""
    counts, most = m.counts, m.counts[MOST_WORDS]
    return bool(
        counts[NUM_FRAMES] + 1 > m.frames.shape[1]
        or counts[HEAP_TOP] + most > len(m.heap)
        or counts[NUM_WAITING] + most + counts[MOST_HELD] > m.waiting.shape[1]
        or counts[NUM_QUEUED] + most > m.queue.shape[1]
        or counts[NUM_MESSAGE_WORDS] + most > len(m.messages)
        or counts[NUM_BEGINNING] + 1 > m.beginning.shape[1]
        or m.lists[IN_LIST, 0] + most > m.lists.shape[1]
        or counts[NUM_COLLECTING] + most > m.collecting.shape[1]
    )


@compiled_inline
def _go_on(state: State, forms: Forms, m: Machine) -> int:
    """Let the items go on that are queued, and those behind them. Returns as `decide`."""
    counts = m.counts
    while counts[NUM_QUEUED] > 0:
        if _lacks_room(m):
            return int(LACKS_MACHINE)
        counts[NUM_QUEUED] -= 1
        frame, number = m.queue[0, counts[NUM_QUEUED]], m.queue[1, counts[NUM_QUEUED]]
        slot = m.frames[OF_REQUEST, frame]
        if m.num_nodes[slot] < 0 or not state.requests[ALIVE, slot]:
            continue
        if number == NOWHERE:
            end_frame(state, m, frame)
            continue
        item = item_of(m, frame, number)
        kind = m.code[item.record + KIND]
        if kind == SEGMENT:
            status = begin_segment(state, forms, m, item)
            if status != ALL_DONE:
                counts[NUM_QUEUED] += 1  # it is still there
                return int(status)
        elif kind == PICK:
            _pick(state, m, item)
        elif kind == TELL:
            _tell(state, m, item)
        elif kind == CHOICE:
            _choose(state, m, item)
        else:
            _iterate(state, m, item)
    return int(SOME_FAILED if counts[NUM_FAILED] > 0 else ALL_DONE)


@compiled
def begin_frames(
    addresses: Ints, machine_addresses: Ints, slots: Ints, regions: Ints, bases: Ints, stored: Ints, firsts: Ints
) -> None:
    """Let the regions of requests begin. There must be room for their frames, and in the queue.

    [requests] slots; regions; bases: the first nodes of their own graphs, whose first local numbers are `firsts`;
    stored: the first of the stored nodes of their sequences.
    """
    state, m = state_at(addresses), machine_at(machine_addresses)
    for i in range(len(slots)):
        frame = add_frame(m, regions[i], slots[i], NOWHERE, NOWHERE)
        record, block = m.code[m.code[regions[i] + ITEMS_AT]], m.frames[BLOCK, frame]
        at = m.code[record + EXPORTS_AT]
        for k in range(at, at + 3 * m.code[record + NUM_EXPORTS], 3):
            local = m.code[k + 1]
            node = local - firsts[i] + bases[i] if local >= firsts[i] else stored[i] + local
            m.heap[block + m.code[k]] = node * OUTPUTS + m.code[k + 2]
        hold_new(state, m, regions[i], block, bases[i], m.num_nodes[slots[i]])


@compiled
def decide(addresses: Ints, forms_addresses: Ints, machine_addresses: Ints, done: Ints) -> int:
    """Let go on what waited for these nodes, which are done, and all that follows from it.

    Returns ALL_DONE, or SOME_FAILED if that has failed requests; or, if some table lacks room, LACKS_MACHINE or
    LACKS_NUMBERS, and LACKS_FORM if a segment has no form of the size: then call it again, without the nodes; or
    NOT_BEGUN: then with them.
    """
    state, forms, m = state_at(addresses), forms_at(forms_addresses), machine_at(machine_addresses)
    if m.counts[NUM_QUEUED] + m.counts[NUM_WAITING] + m.counts[MOST_WORDS] > m.queue.shape[1]:
        return int(NOT_BEGUN)
    num_begun = m.counts[NUM_BEGINNING]
    wake(state, m, done)
    status = _go_on(state, forms, m)
    begun = m.beginning[:, num_begun : m.counts[NUM_BEGINNING]]
    ready = ready_of(forms, begun[BEGINNING_FORM], begun[BEGINNING_SUBGRAPH])
    release(state.nodes, state.subgraphs, state.requests, state.types, state.queue, state.counts, ready)
    return status


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
