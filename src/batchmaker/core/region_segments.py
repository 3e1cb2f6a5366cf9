"""Segments of regions: copies of graphs that begin once what they read is done.

Compiled loops only; `region_code` says what the words mean.
"""

from __future__ import annotations

from batchmaker.compiled import compiled_inline, compiled_merged
from batchmaker.core.addresses import State
from batchmaker.core.arrive import begin_copy, has_room_for
from batchmaker.core.copies import Forms
from batchmaker.core.layout import (
    FIRST_TABLE,
    HELD,
    NOWHERE,
    OUTPUTS,
    PLAN_ROWS,
    POOL,
    STEP_SHIFT,
    SUBGRAPH,
    TYPE,
    USES,
)
from batchmaker.core.lists import IN_LIST, NEXT_IN_LIST, end_list
from batchmaker.core.region_code import (
    A_LIST,
    ALL_DONE,
    ARGUMENTS_AT,
    BEGINNING_BASE,
    BEGINNING_FORM,
    BEGINNING_SLOT,
    BEGINNING_SUBGRAPH,
    COLUMNS_AT,
    ENDS_AT,
    EXPORTS_AT,
    FORMS_AT,
    HELD_AT,
    LACKS_FORM,
    LACKS_NUMBERS,
    MEMORIES_AT,
    MOST_NODES,
    NO_STEP,
    NUM_ARGUMENTS,
    NUM_BEGINNING,
    NUM_COLUMNS,
    NUM_ENDS,
    NUM_EXPORTS,
    NUM_FORMS,
    NUM_HELD,
    NUM_MEMORIES,
    NUM_READS,
    NUM_SPANS,
    OF_FORM,
    ONE,
    READS_AT,
    SIZE_AT,
    SPANS_AT,
    TOO_MANY_NODES,
    WANTED_FORM,
    WANTED_SIZE,
    WANTED_SLOT,
    ZERO,
    Machine,
)
from batchmaker.core.region_frames import Item, fail, hold_less, item_ended, node_not_done, wait


@compiled_inline
def _first_not_done(state: State, m: Machine, item: Item) -> int:
    """Return the node that a segment waits for: the first of its arguments and spans; NOWHERE if all are done.

    What is in a list was done when it was collected.
    """
    code, heap, block = m.code, m.heap, item.block
    tail, at = NOWHERE, code[item.record + ARGUMENTS_AT]
    for k in range(at, at + code[item.record + NUM_ARGUMENTS]):
        if tail == NOWHERE:
            tail = node_not_done(state, heap[block + code[k]])
    at = code[item.record + SPANS_AT]
    for k in range(at, at + 3 * code[item.record + NUM_SPANS], 3):
        first, step = heap[block + code[k]], code[k + 2]
        for i in range(heap[block + code[k + 1]] if step != A_LIST else ZERO):
            if tail == NOWHERE:
                tail = node_not_done(state, first + i * step * OUTPUTS)
    return tail


@compiled_inline
def _read(state: State, port: int, node: int, word: int, num_uses: int) -> None:
    """Let an input of a node read what is in a slot. num_uses: how many uses that is of the node that computes it."""
    source = word // OUTPUTS
    state.nodes[USES, source] += num_uses
    if state.rules[PLAN_ROWS]:
        pool = state.types[POOL, state.subgraphs[TYPE, state.nodes[SUBGRAPH, source]]]
        state.source[port, node] = source
        state.source_table[port, node] = state.pools[FIRST_TABLE, pool] + word % OUTPUTS


@compiled_merged
def _feed(state: State, m: Machine, item: Item, base: int, size: int) -> None:
    """Let the nodes of a segment, the first of which is `base`, read their arguments, elements and memories."""
    code, heap, lists, block, record = m.code, m.heap, m.lists, item.block, item.record
    arguments, spans = code[record + ARGUMENTS_AT], code[record + SPANS_AT]
    at = code[record + READS_AT]
    for k in range(at, at + 3 * code[record + NUM_READS], 3):
        _read(state, code[k], base + code[k + 1], heap[block + code[arguments + code[k + 2]]], ONE)
    at = code[record + COLUMNS_AT]
    for k in range(at, at + 2 * code[record + NUM_COLUMNS], 2):
        span = spans + 3 * code[k + 1]
        word, step, place = heap[block + code[span]], code[span + 2], heap[block + code[span]]
        for i in range(size):
            if step == A_LIST:
                word = lists[IN_LIST, place]
                place = lists[NEXT_IN_LIST, place]
            _read(state, code[k], base + i, word, ONE)
            word += step * OUTPUTS
        if step == A_LIST:
            place = heap[block + code[span]]
            while place != NOWHERE:
                hold_less(state, lists[IN_LIST, place] // OUTPUTS)
                place = lists[NEXT_IN_LIST, place]
            end_list(lists, heap, block + code[span])
    at = code[record + MEMORIES_AT]
    for k in range(at, at + 5 * code[record + NUM_MEMORIES], 5):
        span = spans + 3 * code[k + 4]
        word, length, step = heap[block + code[span]], heap[block + code[span + 1]], code[span + 2]
        num_readers = size if code[k + 2] == NOWHERE else code[k + 2]
        for i in range(length):
            state.nodes[USES, word // OUTPUTS + i * step] += ONE if code[k + 3] else num_readers
        for node in range(base + code[k + 1], base + code[k + 1] + num_readers if length > 0 else ZERO):
            _read(state, code[k], node, word, ZERO)
            if state.rules[PLAN_ROWS]:
                state.reach[code[k], node] = length + (step << STEP_SHIFT)


@compiled_inline
def hold_new(state: State, m: Machine, region: int, block: int, base: int, num_nodes: int) -> None:
    """Hold those nodes of a segment that has begun which are in slots of its region."""
    code, heap = m.code, m.heap
    at = code[region + HELD_AT]
    for k in range(at, at + 3 * code[region + NUM_HELD], 3):
        begin = heap[block + code[k]]
        if begin != NOWHERE and base <= begin // OUTPUTS < base + num_nodes:
            for j in range(heap[block + code[k + 1]]):
                state.nodes[HELD, begin // OUTPUTS + j * code[k + 2]] += 1


@compiled_inline
def _end_without_nodes(state: State, m: Machine, item: Item) -> None:
    """End a segment of no node: what its last one would return is the state at first, if there is one."""
    code, heap, block, has_ends = m.code, m.heap, item.block, True
    at = code[item.record + ENDS_AT]
    for k in range(at, at + 3 * code[item.record + NUM_ENDS], 3):
        if code[k + 2] == NOWHERE:
            has_ends = False
        else:
            heap[block + code[k]] = heap[block + code[k + 2]]
            state.nodes[HELD, heap[block + code[k]] // OUTPUTS] += 1
    if has_ends:
        item_ended(m, item.frame, item.number)
    else:
        fail(m, item.slot, item.record, NO_STEP, ZERO, ZERO)


@compiled_merged
def begin_segment(state: State, forms: Forms, m: Machine, item: Item) -> int:
    """Let a segment begin, once its arguments are done. Returns ALL_DONE, or what it lacks: then nothing has changed.

    A segment of no node ends at once; see `_end_without_nodes`.
    """
    code, heap, counts, slot, record = m.code, m.heap, m.counts, item.slot, item.record
    form, status = code[record + OF_FORM], ALL_DONE
    has_size = code[record + SIZE_AT] != NOWHERE
    tail = _first_not_done(state, m, item) if form != NOWHERE else NOWHERE
    size = heap[item.block + code[record + SIZE_AT]] if has_size and tail == NOWHERE else ONE
    num_nodes = size if has_size or form == NOWHERE else forms.counts[1, form]
    if form == NOWHERE:  # the request's own graph
        item_ended(m, item.frame, item.number)
    elif tail != NOWHERE:
        wait(m, tail, item.frame, item.number)
    elif size == 0:
        _end_without_nodes(state, m, item)
    elif m.num_nodes[slot] + num_nodes > counts[MOST_NODES]:
        fail(m, slot, record, TOO_MANY_NODES, num_nodes, counts[MOST_NODES])
    else:
        if has_size:
            form = code[code[record + FORMS_AT] + size] if size < code[record + NUM_FORMS] else NOWHERE
        if form == NOWHERE:
            counts[WANTED_FORM], counts[WANTED_SLOT], counts[WANTED_SIZE] = record, slot, size
            status = LACKS_FORM
        elif not has_room_for(state, forms, form):
            counts[WANTED_FORM], counts[WANTED_SLOT] = form, slot
            status = LACKS_NUMBERS
        else:
            m.num_nodes[slot] += num_nodes
            base, first_subgraph = begin_copy(state, forms, slot, form)
            _feed(state, m, item, base, size)
            at = code[record + EXPORTS_AT]
            for k in range(at, at + 3 * code[record + NUM_EXPORTS], 3):
                heap[item.block + code[k]] = (base + code[k + 1]) * OUTPUTS + code[k + 2]
            at = code[record + ENDS_AT]
            for k in range(at, at + 3 * code[record + NUM_ENDS], 3):
                heap[item.block + code[k]] = (base + size - 1) * OUTPUTS + code[k + 1]
            hold_new(state, m, item.region, item.block, base, num_nodes)
            at = counts[NUM_BEGINNING]
            m.beginning[BEGINNING_SLOT, at], m.beginning[BEGINNING_FORM, at] = slot, form
            m.beginning[BEGINNING_BASE, at], m.beginning[BEGINNING_SUBGRAPH, at] = base, first_subgraph
            counts[NUM_BEGINNING] += 1
            item_ended(m, item.frame, item.number)
    return status
