"""Requests that arrive with known graphs, as one compiled call: slots, numbers, nodes, and what is ready."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled
from batchmaker.scheduler import extents
from batchmaker.scheduler.admission import enter_extents
from batchmaker.scheduler.copies import (
    EDGES_FROM,
    FORM,
    FORM_BASE,
    FORM_END,
    FORM_SIZE,
    FORM_TYPE,
    KEPT,
    SLOT,
    SUBGRAPHS_FROM,
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
    SUBGRAPHS,
)
from batchmaker.scheduler.progress import release
from batchmaker.scheduler.tables import state_at

Ids = NDArray[np.int64]


@compiled
def arrive(addresses: Ids, forms_addresses: Ids, ids: Ids, ranks: Ids, numbers: Ids) -> Ids:
    """Take requests with copies of known graphs, none of them empty, and queue what is ready.

    ids, ranks, numbers: [requests] the number of each, its rank, and the number of its form. Returns [2, requests]
    their slots, and the first nodes of their graphs; with no columns, and nothing changed, if some table lacks room.
    """
    state, forms = state_at(addresses), forms_at(forms_addresses)
    nodes, subgraphs, requests, types, free, counts = (
        state.nodes, state.subgraphs, state.requests, state.types, state.free, state.counts,
    )  # fmt: skip
    count = len(numbers)
    places = np.zeros(types.shape[1], np.int64)
    columns, where = np.zeros((EXTENT_FIELDS, count), np.int64), np.zeros((KEPT + 1, count), np.int64)
    for i in range(count):
        form = numbers[i]
        columns[FIRST_LOCAL, i], columns[NUM_NODES, i] = forms.counts[0, form], forms.counts[1, form]
        columns[NUM_SUBGRAPHS, i], columns[EXTENT_NUM_EDGES, i] = forms.counts[2, form], forms.counts[3, form]
        for j in range(forms.subgraphs_begins[form], forms.subgraphs_begins[form + 1]):
            is_run = forms.subgraphs[FORM_END, j] > 0
            places[forms.subgraphs[FORM_TYPE, j]] += 1 if is_run else forms.subgraphs[FORM_SIZE, j]
    ones = np.ones(count, np.int64)
    has_room = extents.top_after(free, counts, NODES, nodes[FIRST_EDGE], columns[NUM_NODES]) <= nodes.shape[1]
    has_room &= extents.top_after(free, counts, SUBGRAPHS, subgraphs[HEAD], columns[NUM_SUBGRAPHS]) <= len(subgraphs[0])
    has_room &= extents.top_after(free, counts, EDGES, state.consumer, columns[EXTENT_NUM_EDGES]) <= len(state.consumer)
    has_room &= extents.top_after(free, counts, SLOTS, requests[NEXT_SLOT], ones) <= requests.shape[1]
    has_room &= extents.top_after(free, counts, EXTENTS, state.extents[NEXT], ones) <= state.extents.shape[1]
    for type_id in range(types.shape[1]):
        room = types[QUEUE_END, type_id] - types[QUEUE_BEGIN, type_id]
        has_room &= 2 * (types[PLACES, type_id] + places[type_id]) <= room
    if not has_room:
        return np.empty((2, 0), np.int64)
    for i in range(count):
        slot = extents.allocate(free, counts, SLOTS, requests[NEXT_SLOT], 1)
        for field in range(REQUEST_FIELDS):
            requests[field, slot] = 0
        requests[ID, slot], requests[IN_USE, slot], requests[ALIVE, slot] = ids[i], 1, 1
        requests[RANK, slot], requests[FIRST, slot], requests[LAST, slot] = ranks[i], NOWHERE, NOWHERE
        counts[NUM_RANKED] += ranks[i] != 0
        where[FORM, i], where[SLOT, i] = numbers[i], slot
    for i in range(count):
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
        extent_numbers[i] = extents.allocate(free, counts, EXTENTS, state.extents[NEXT], 1)
    enter_extents(columns, extent_numbers, where[SLOT], state.extents, requests, subgraphs, types)
    release(nodes, subgraphs, requests, types, state.queue, counts, ready)
    found = np.empty((2, count), np.int64)
    for i in range(count):
        found[0, i], found[1, i] = where[SLOT, i], where[FORM_BASE, i]
    return found
