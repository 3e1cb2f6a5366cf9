"""Requests that arrive with known graphs, as one compiled call: slots, numbers, nodes, and what is ready."""

from __future__ import annotations

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled, compiled_inline, compiled_within
from batchmaker.scheduler import extents
from batchmaker.scheduler.addresses import State, state_at
from batchmaker.scheduler.admission import enter_extents
from batchmaker.scheduler.copies import (
    COPY_FIELDS,
    EDGES_FROM,
    FORM,
    FORM_BASE,
    FORM_END,
    FORM_SIZE,
    FORM_TYPE,
    SLOT,
    SUBGRAPHS_FROM,
    Forms,
    all_fit,
    forms_at,
    write_copies,
)
from batchmaker.scheduler.layout import (
    ALIVE,
    BASE,
    EDGES,
    EXTENT_FIELDS,
    EXTENT_FIRST_EDGE,
    EXTENT_NUM_EDGES,
    EXTENTS,
    FIRST,
    FIRST_EDGE,
    FIRST_LOCAL,
    FIRST_SUBGRAPH,
    HEAD,
    ID,
    IN_USE,
    LAST,
    NEXT,
    NEXT_SLOT,
    NODES,
    NOWHERE,
    NUM_NODES,
    NUM_RANKED,
    NUM_SUBGRAPHS,
    PLACES,
    QUEUE_BEGIN,
    QUEUE_END,
    RANK,
    REQUEST_FIELDS,
    SLOTS,
    STORED,
    SUBGRAPHS,
)
from batchmaker.scheduler.progress import release


@compiled_within
def _fits(free: Ints, counts: Ints, kind: int, links: Ints, wanted: Ints) -> bool:
    """Whether there are numbers of a kind for extents of these sizes."""
    most = counts[kind]
    for size in wanted:
        most += extents.size_class(size)[0]
    return most <= len(links) or extents.top_after(free, counts, kind, links, wanted) <= len(links)


@compiled_inline
def has_room(state: State, forms: Forms, numbers: Ints) -> bool:
    """Whether all tables have room for copies of these forms."""
    free, counts, types = state.free, state.counts, state.types
    sizes, places = np.ones((4, len(numbers)), np.int64), np.zeros(types.shape[1], np.int64)
    for i in range(len(numbers)):
        form = numbers[i]
        sizes[0, i], sizes[1, i], sizes[2, i] = forms.counts[1, form], forms.counts[2, form], forms.counts[3, form]
        for j in range(forms.subgraphs_begins[form], forms.subgraphs_begins[form + 1]):
            is_run = forms.subgraphs[FORM_END, j] > 0
            places[forms.subgraphs[FORM_TYPE, j]] += 1 if is_run else forms.subgraphs[FORM_SIZE, j]
    has_room: bool = _fits(free, counts, NODES, state.nodes[FIRST_EDGE], sizes[0])
    has_room &= _fits(free, counts, SUBGRAPHS, state.subgraphs[HEAD], sizes[1])
    has_room &= _fits(free, counts, EDGES, state.consumer, sizes[2])
    has_room &= _fits(free, counts, EXTENTS, state.extents[NEXT], sizes[3])
    for type_id in range(types.shape[1]):
        room = types[QUEUE_END, type_id] - types[QUEUE_BEGIN, type_id]
        has_room &= 2 * (types[PLACES, type_id] + places[type_id]) <= room
    return has_room


@compiled_inline
def _has_slots(state: State, count: int) -> bool:
    """Whether there are slots for so many requests."""
    links = state.requests[NEXT_SLOT]
    return _fits(state.free, state.counts, SLOTS, links, np.ones(count, np.int64))


@compiled_inline
def _take_slots(state: State, ids: Ints, ranks: Ints) -> Ints:
    """Give these requests slots; return them. There must be room."""
    requests, counts = state.requests, state.counts
    slots = np.empty(len(ids), np.int64)
    for i in range(len(ids)):
        slot = extents.allocate(state.free, counts, SLOTS, requests[NEXT_SLOT], extents.ONE)
        for field in range(REQUEST_FIELDS):
            requests[field, slot] = 0
        requests[ID, slot], requests[IN_USE, slot], requests[ALIVE, slot] = ids[i], 1, 1
        requests[RANK, slot], requests[FIRST, slot], requests[LAST, slot] = ranks[i], NOWHERE, NOWHERE
        counts[NUM_RANKED] += ranks[i] != 0
        slots[i] = slot
    return slots


@compiled_inline
def begin_copies(state: State, forms: Forms, slots: Ints, numbers: Ints) -> Ints:
    """Write copies of these forms for the requests in these slots, and queue what is ready. There must be room.

    Returns the first nodes of the copies.
    """
    nodes, subgraphs, requests, types, free, counts = (
        state.nodes, state.subgraphs, state.requests, state.types, state.free, state.counts,
    )  # fmt: skip
    count = len(numbers)
    columns, where = np.zeros((EXTENT_FIELDS, count), np.int64), np.zeros((COPY_FIELDS, count), np.int64)
    for i in range(count):
        form = numbers[i]
        columns[FIRST_LOCAL, i], columns[NUM_NODES, i] = forms.counts[0, form], forms.counts[1, form]
        columns[NUM_SUBGRAPHS, i], columns[EXTENT_NUM_EDGES, i] = forms.counts[2, form], forms.counts[3, form]
        where[FORM, i], where[SLOT, i] = form, slots[i]
        base = extents.allocate(free, counts, NODES, nodes[FIRST_EDGE], columns[NUM_NODES, i])
        columns[BASE, i] = where[FORM_BASE, i] = base
    for i in range(count):
        first = extents.allocate(free, counts, SUBGRAPHS, subgraphs[HEAD], columns[NUM_SUBGRAPHS, i])
        columns[FIRST_SUBGRAPH, i] = where[SUBGRAPHS_FROM, i] = first
        edge = extents.allocate(free, counts, EDGES, state.consumer, columns[EXTENT_NUM_EDGES, i])
        columns[EXTENT_FIRST_EDGE, i] = where[EDGES_FROM, i] = edge
    ready = write_copies(state, forms, where)
    extent_numbers = np.empty(count, np.int64)
    for i in range(count):
        extent_numbers[i] = extents.allocate(free, counts, EXTENTS, state.extents[NEXT], extents.ONE)
    enter_extents(columns, extent_numbers, where[SLOT], state.extents, requests, subgraphs, types)
    release(nodes, subgraphs, requests, types, state.queue, counts, ready)
    bases: Ints = columns[BASE]
    return bases


@compiled
def arrive(addresses: Ints, forms_addresses: Ints, ids: Ints, ranks: Ints, numbers: Ints, stored: Ints) -> Ints:
    """Take requests with copies of known graphs, none of them empty, and queue what is ready.

    ids, ranks, numbers, stored: [requests] the number of each, its rank, the number of its form, and the first of the
    nodes that its sequence keeps (0 if none). Returns [2, requests] their slots, and the first nodes of their graphs;
    with no columns, and nothing changed, if some table lacks room or a sequence keeps nodes of other types.
    """
    state, forms = state_at(addresses), forms_at(forms_addresses)
    if not (all_fit(state, forms, numbers, stored) and has_room(state, forms, numbers) and _has_slots(state, len(ids))):
        return np.empty((2, 0), np.int64)
    slots = _take_slots(state, ids, ranks)
    for i in range(len(slots)):
        state.requests[STORED, slots[i]] = stored[i]
    bases = begin_copies(state, forms, slots, numbers)
    found = np.empty((2, len(ids)), np.int64)
    for i in range(len(ids)):  # numba compiles for seconds what it would say of slices that do not fit
        found[0, i], found[1, i] = slots[i], bases[i]
    return found


@compiled
def wait(addresses: Ints, ids: Ints, ranks: Ints) -> Ints:
    """Take requests that do not begin yet; see `arrive`. Returns their slots; none, if the table lacks room."""
    state = state_at(addresses)
    if not _has_slots(state, len(ids)):
        return np.empty(0, np.int64)
    return _take_slots(state, ids, ranks)


@compiled
def begin(addresses: Ints, forms_addresses: Ints, slots: Ints, numbers: Ints) -> Ints:
    """Let requests begin that wait; see `arrive`. Returns the first nodes of their graphs; none, if room lacks."""
    state, forms = state_at(addresses), forms_at(forms_addresses)
    if not has_room(state, forms, numbers):
        return np.empty(0, np.int64)
    return begin_copies(state, forms, slots, numbers)
