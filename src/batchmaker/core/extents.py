"""Gives out extents (consecutive numbers) and takes them back, in compiled loops.

Freed extents are used again, by size class. Those of one class are a list through the numbers themselves: in `links`, a
field that a free number does not need otherwise.

free: [kinds, size classes] the first free extent of each, or NOWHERE. counts: see `layout`. links: [numbers] of a
kind. addresses: of all tables; see `state_at`.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled, compiled_inline, number
from batchmaker.core.addresses import State, state_at
from batchmaker.core.layout import (
    EDGES,
    FIRST_EDGE,
    HEAD,
    NEXT,
    NEXT_SLOT,
    NODES,
    NOWHERE,
    SLOTS,
    SUBGRAPHS,
    USED,
)

ONE: Final = number(1)


@compiled
def size_class(count: int) -> tuple[int, int]:
    """Round a count up to one of four sizes per doubling, so that later requests can use freed extents again.

    Returns the size and the number of its class.
    """
    if count <= 8:
        return count, count
    bits = 4
    while count >> bits:
        bits += 1
    step = 1 << (bits - 3)
    quarters = -(-count // step)
    return quarters * step, 4 * (bits - 3) + quarters


@compiled_inline
def _links_of(state: State, kind: int) -> Ints:
    """Return where free extents of a kind are linked."""
    links: Ints = state.extents[NEXT]
    if kind == NODES:
        links = state.nodes[FIRST_EDGE]
    elif kind == SUBGRAPHS:
        links = state.subgraphs[HEAD]
    elif kind == EDGES:
        links = state.consumer
    elif kind == SLOTS:
        links = state.requests[NEXT_SLOT]
    return links


@compiled
def allocate(free: Ints, counts: Ints, kind: int, links: Ints, count: int) -> int:
    """Return the first of `count` consecutive numbers of a kind. `links` has room for what `top_after` says."""
    size, which = size_class(count)
    counts[USED + kind] += count
    first = free[kind, which]
    if count > 0 and first != NOWHERE:
        free[kind, which] = links[first]
    else:
        first = counts[kind]
        counts[kind] += size
    return int(first)


@compiled
def top_after(free: Ints, counts: Ints, kind: int, links: Ints, wanted: Ints) -> int:
    """Return one past the highest number after `allocate` of each of these counts, in order. Changes nothing."""
    following = np.empty(free.shape[1], np.int64)
    for which in range(len(following)):
        following[which] = free[kind, which]
    top = counts[kind]
    for i in range(len(wanted)):
        size, which = size_class(wanted[i])
        if wanted[i] > 0 and following[which] != NOWHERE:
            following[which] = links[following[which]]
        else:
            top += size
    return int(top)


@compiled
def allocate_each(addresses: Ints, kind: int, wanted: Ints) -> Ints:
    """Return the result of `allocate` for each of these counts, in order; none, with nothing changed, without room."""
    state = state_at(addresses)
    links, most = _links_of(state, kind), state.counts[kind]
    for count in wanted:
        most += 2 * count  # a size class is at most a quarter larger
    if most > len(links) and top_after(state.free, state.counts, kind, links, wanted) > len(links):
        return np.empty(0, np.int64)
    firsts = np.empty(len(wanted), np.int64)
    for i in range(len(wanted)):
        firsts[i] = allocate(state.free, state.counts, kind, links, wanted[i])
    return firsts


@compiled
def release(free: Ints, counts: Ints, kind: int, links: Ints, first: int, count: int) -> None:
    """Give back the extent that `allocate` returned as `first`."""
    counts[USED + kind] -= count
    if count > 0:
        _, which = size_class(count)
        links[first] = free[kind, which]
        free[kind, which] = first


@compiled
def release_each(addresses: Ints, kind: int, firsts: Ints, sizes: Ints) -> None:
    """Call `release` for each of these extents, in order. sizes: the count of each."""
    state = state_at(addresses)
    links = _links_of(state, kind)
    for i in range(len(firsts)):
        release(state.free, state.counts, kind, links, firsts[i], sizes[i])


@compiled
def top_of_kind(addresses: Ints, kind: int, wanted: Ints) -> int:
    """Return what `top_after` returns for extents of a kind."""
    state = state_at(addresses)
    return top_after(state.free, state.counts, kind, _links_of(state, kind), wanted)
