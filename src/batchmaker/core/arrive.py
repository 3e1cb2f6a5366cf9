"""Requests that arrive with known graphs, as one compiled call: slots, numbers, nodes, and what is ready."""

from __future__ import annotations

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled, compiled_inline, compiled_within
from batchmaker.core import extents
from batchmaker.core.addresses import State, state_at
from batchmaker.core.admission import enter_extent
from batchmaker.core.copies import (
    FORM_END,
    FORM_SIZE,
    FORM_TYPE,
    Forms,
    all_fit,
    forms_at,
    ready_of,
    write_copy,
)
from batchmaker.core.layout import (
    ALIVE,
    BASE,
    EDGES,
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
from batchmaker.core.progress import release


@compiled_within
def _fits(free: Ints, counts: Ints, kind: int, links: Ints, wanted: Ints) -> bool:
    """Whether there are numbers of a kind for extents of these sizes."""
    most = counts[kind]
    for size in wanted:
        most += extents.size_class(size)[0]
    return most <= len(links) or extents.top_after(free, counts, kind, links, wanted) <= len(links)


@compiled_within
def _fits_one(free: Ints, counts: Ints, kind: int, links: Ints, wanted: int) -> bool:
    """As `_fits`, for one extent."""
    size, which = extents.size_class(wanted)
    return counts[kind] + size <= len(links) or (wanted > 0 and free[kind, which] != NOWHERE)


@compiled_within
def _units(forms: Forms, subgraph: int) -> int:
    """Return how many nodes of a form's subgraph can be ready at once."""
    return 1 if forms.subgraphs[FORM_END, subgraph] > 0 else int(forms.subgraphs[FORM_SIZE, subgraph])


@compiled_inline
def _has_room(state: State, forms: Forms, numbers: Ints) -> bool:
    """Whether all tables have room for copies of these forms."""
    free, counts, types = state.free, state.counts, state.types
    sizes, places = np.ones((4, len(numbers)), np.int64), np.zeros(types.shape[1], np.int64)
    for i in range(len(numbers)):
        form = numbers[i]
        sizes[0, i], sizes[1, i], sizes[2, i] = forms.counts[1, form], forms.counts[2, form], forms.counts[3, form]
        for j in range(forms.subgraphs_begins[form], forms.subgraphs_begins[form + 1]):
            places[forms.subgraphs[FORM_TYPE, j]] += _units(forms, j)
    has_room: bool = _fits(free, counts, NODES, state.nodes[FIRST_EDGE], sizes[0])
    has_room &= _fits(free, counts, SUBGRAPHS, state.subgraphs[HEAD], sizes[1])
    has_room &= _fits(free, counts, EDGES, state.consumer, sizes[2])
    has_room &= _fits(free, counts, EXTENTS, state.extents[NEXT], sizes[3])
    for type_id in range(types.shape[1]):
        room = types[QUEUE_END, type_id] - types[QUEUE_BEGIN, type_id]
        has_room &= 2 * (types[PLACES, type_id] + places[type_id]) <= room
    return has_room


@compiled_inline
def has_room_for(state: State, forms: Forms, form: int) -> bool:
    """Whether all tables have room for a copy of this form."""
    free, counts, types, of_form = state.free, state.counts, state.types, forms.counts
    has_room: bool = _fits_one(free, counts, NODES, state.nodes[FIRST_EDGE], of_form[1, form])
    has_room &= _fits_one(free, counts, SUBGRAPHS, state.subgraphs[HEAD], of_form[2, form])
    has_room &= _fits_one(free, counts, EDGES, state.consumer, of_form[3, form])
    has_room &= _fits_one(free, counts, EXTENTS, state.extents[NEXT], extents.ONE)
    most, has_places = 0, True
    for j in range(forms.subgraphs_begins[form], forms.subgraphs_begins[form + 1]):
        most += _units(forms, j)
    for j in range(forms.subgraphs_begins[form], forms.subgraphs_begins[form + 1]):
        type_id = forms.subgraphs[FORM_TYPE, j]
        room = types[QUEUE_END, type_id] - types[QUEUE_BEGIN, type_id]
        has_places &= 2 * (types[PLACES, type_id] + most) <= room  # as if all were of this type
    if has_room and not has_places:
        has_places = _has_room(state, forms, np.full(1, form))
    return has_room and has_places


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
def begin_copy(state: State, forms: Forms, slot: int, form: int) -> tuple[int, int]:
    """Write a copy of a form for the request in a slot. There must be room. Nothing of it is queued yet.

    Returns its first node, and its first subgraph.
    """
    free, counts, of_extents = state.free, state.counts, state.extents
    num_nodes, num_subgraphs, num_edges = forms.counts[1, form], forms.counts[2, form], forms.counts[3, form]
    base = extents.allocate(free, counts, NODES, state.nodes[FIRST_EDGE], num_nodes)
    first = extents.allocate(free, counts, SUBGRAPHS, state.subgraphs[HEAD], num_subgraphs)
    edge = extents.allocate(free, counts, EDGES, state.consumer, num_edges)
    extent = extents.allocate(free, counts, EXTENTS, of_extents[NEXT], extents.ONE)
    write_copy(state, forms, form, slot, base, first, edge)
    of_extents[FIRST_LOCAL, extent], of_extents[BASE, extent] = forms.counts[0, form], base
    of_extents[NUM_NODES, extent], of_extents[NUM_SUBGRAPHS, extent] = num_nodes, num_subgraphs
    of_extents[FIRST_SUBGRAPH, extent] = first
    of_extents[EXTENT_FIRST_EDGE, extent], of_extents[EXTENT_NUM_EDGES, extent] = edge, num_edges
    enter_extent(of_extents, state.requests, state.subgraphs, state.types, extent, slot)
    return base, first


@compiled_inline
def _begin_copies(state: State, forms: Forms, slots: Ints, numbers: Ints) -> Ints:
    """Write copies of these forms for the requests in these slots, and queue what is ready. There must be room.

    Returns the first nodes of the copies.
    """
    bases, firsts = np.empty(len(numbers), np.int64), np.empty(len(numbers), np.int64)
    for i in range(len(numbers)):
        bases[i], firsts[i] = begin_copy(state, forms, slots[i], numbers[i])
    ready = ready_of(forms, numbers, firsts)
    release(state.nodes, state.subgraphs, state.requests, state.types, state.queue, state.counts, ready)
    return bases


@compiled_within
def arrive(addresses: Ints, forms_addresses: Ints, ids: Ints, ranks: Ints, numbers: Ints, stored: Ints) -> Ints:
    """Take requests with copies of known graphs, none of them empty, and queue what is ready.

    ids, ranks, numbers, stored: [requests] the number of each, its rank, the number of its form, and the first of the
    nodes that its sequence keeps (0 if none). Returns [2, requests] their slots, and the first nodes of their graphs;
    with no columns, and nothing changed, if some table lacks room or a sequence keeps nodes of other types.
    """
    state, forms = state_at(addresses), forms_at(forms_addresses)
    if not (
        all_fit(state, forms, numbers, stored) and _has_room(state, forms, numbers) and _has_slots(state, len(ids))
    ):
        return np.empty((2, 0), np.int64)
    slots = _take_slots(state, ids, ranks)
    for i in range(len(slots)):
        state.requests[STORED, slots[i]] = stored[i]
    bases = _begin_copies(state, forms, slots, numbers)
    places = np.empty((2, len(ids)), np.int64)
    for i in range(len(ids)):  # numba compiles for seconds what it would say of slices that do not fit
        places[0, i], places[1, i] = slots[i], bases[i]
    return places


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
    if not _has_room(state, forms, numbers):
        return np.empty(0, np.int64)
    return _begin_copies(state, forms, slots, numbers)
