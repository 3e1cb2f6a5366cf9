"""Numbers that are given out and taken back, one by one and many at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchmaker.scheduler.arena import Extents

counts = st.one_of(
    st.lists(st.integers(0, 40), max_size=12),
    st.tuples(st.integers(0, 40), st.integers(1, 12)).map(lambda alike: [alike[0]] * alike[1]),
)


@given(st.lists(st.tuples(counts, st.integers(0, 12)), max_size=8))
def test_many_extents_at_once_are_those_that_one_by_one_would_be(turns: list[tuple[list[int], int]]) -> None:
    """Replays depend on it: the same requests get the same numbers, however many come together."""
    together, one_by_one = Extents(), Extents()
    held: list[tuple[int, int]] = []
    for wanted, num_released in turns:
        firsts = together.allocate_each(wanted)
        assert firsts == [one_by_one.allocate(count) for count in wanted]
        held += zip(firsts, wanted, strict=True)
        given_back, held = held[:num_released], held[num_released:]
        together.release_each([first for first, _ in given_back], [count for _, count in given_back])
        for first, count in given_back:
            one_by_one.release(first, count)
        assert (together.top, together.num_used) == (one_by_one.top, one_by_one.num_used)
