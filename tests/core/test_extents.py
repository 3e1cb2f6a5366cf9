"""Numbers that are given out and taken back: each belongs to one at a time, and freed ones are used again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmaker.core.arena import Arena
from batchmaker.core.extents import size_class
from batchmaker.core.layout import EDGES, EXTENTS, KINDS, NODES, SLOTS, SUBGRAPHS

counts = st.lists(st.integers(0, 40) | st.integers(0, 5000), max_size=12)


@pytest.mark.parametrize("kind", [NODES, SUBGRAPHS, EDGES, SLOTS, EXTENTS])
@settings(max_examples=30)
@given(st.lists(st.tuples(counts, st.integers(0, 12)), max_size=8))
def test_no_number_is_given_out_twice_and_the_tables_have_room_for_all(
    kind: int, turns: list[tuple[list[int], int]]
) -> None:
    arena = Arena()
    held: list[tuple[int, int]] = []
    for wanted, num_released in turns:
        asked = np.array(wanted, np.int64)
        top = arena.top_after(kind, asked)
        arena.fit(kind, asked)
        held += zip(arena.allocate(kind, asked).tolist(), wanted, strict=True)
        assert arena.counts[kind] == top
        numbers = [number for first, count in held for number in range(first, first + count)]
        assert len(set(numbers)) == len(numbers) == arena.num_used(kind)
        assert max(numbers, default=0) < room_for(arena, kind)
        given_back, held = held[:num_released], held[num_released:]
        firsts, released = (np.array([one[part] for one in given_back], np.int64) for part in (0, 1))
        arena.release(kind, firsts, released)


@given(st.integers(1, 2**40))
def test_a_size_class_is_at_most_a_quarter_larger_and_has_a_number_of_its_own(count: int) -> None:
    size, number = size_class(count)
    assert count <= size <= max(count, count * 5 // 4)
    assert size_class(size) == (size, number)
    assert size_class(size + 1)[1] == number + 1


def room_for(arena: Arena, kind: int) -> int:
    tables = (arena.nodes, arena.subgraphs, arena.consumer, arena.requests, arena.extents)
    return int(tables[kind].shape[-1])


def test_what_is_freed_is_used_again() -> None:
    arena = Arena()
    wanted = np.array([5, 100, 5], np.int64)
    firsts = arena.allocate(NODES, wanted)
    arena.release(NODES, firsts, wanted)
    assert sorted(arena.allocate(NODES, np.array([97, 5, 5], np.int64)).tolist()) == sorted(firsts.tolist())
    assert KINDS == 5
