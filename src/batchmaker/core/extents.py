"""Gives out extents (consecutive numbers) and takes them back, in compiled loops.

Freed extents are used again, by size class. Those of one class are a list through the numbers themselves: in `links`, a
field that a free number does not need otherwise.

free: [kinds, size classes] the first free extent of each, or NOWHERE. counts: see `layout`. links: [numbers] of a
kind.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled, number
from batchmaker.core.layout import NOWHERE, USED

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
def allocate_each(free: Ints, counts: Ints, kind: int, links: Ints, wanted: Ints) -> Ints:
    """Return the result of `allocate` for each of these counts, in order."""
    firsts = np.empty(len(wanted), np.int64)
    for i in range(len(wanted)):
        firsts[i] = allocate(free, counts, kind, links, wanted[i])
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
def release_each(free: Ints, counts: Ints, kind: int, links: Ints, firsts: Ints, given: Ints) -> None:
    """Call `release` for each of these extents, in order. given: the count of each."""
    for i in range(len(firsts)):
        release(free, counts, kind, links, firsts[i], given[i])


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
