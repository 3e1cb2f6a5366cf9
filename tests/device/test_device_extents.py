"""Extents never overlap, and what comes back can be taken again as a whole."""

from __future__ import annotations

import random

import pytest

from batchmaker.device.extents import ALIGNMENT, Extents, aligned


@pytest.mark.parametrize("seed", range(20))
def test_extents_never_overlap_and_all_of_it_comes_back(seed: int) -> None:
    chance, extents, held = random.Random(seed), Extents(4096), list[tuple[int, int]]()
    for _ in range(300):
        if held and chance.random() < 0.5:
            extents.give_back(*held.pop(chance.randrange(len(held))))
            continue
        size = chance.randint(1, 700)
        start = extents.take(size)
        if start is None:
            assert extents.free < 4096
            continue
        assert start % ALIGNMENT == 0
        assert start + size <= 4096
        assert all(start >= other + aligned(n) or start + aligned(size) <= other for other, n in held)
        held.append((start, size))
        assert extents.free == 4096 - sum(aligned(n) for _, n in held)
    for start, size in held:
        extents.give_back(start, size)
    assert extents.take(4096) == 0


def test_nothing_takes_no_room() -> None:
    extents = Extents(64)
    assert extents.take(64) == 0
    assert extents.take(0) == 0
    assert extents.take(1) is None
    extents.give_back(0, 0)
    assert extents.free == 0
