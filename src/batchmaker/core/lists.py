"""Lists of words through one table, in compiled loops. A list is known by two words: its first place, and its last.

lists: [LIST_FIELDS, room]. heap: what contains the two words of a list; its first place is NOWHERE if it is empty.
"""

from __future__ import annotations

from typing import Final

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled_within, number
from batchmaker.core.layout import NOWHERE

IN_LIST, NEXT_IN_LIST, LIST_FIELDS = map(number, range(3))
"""A word of a list, and the place of the next one, or NOWHERE. At place 0 are how many places of the table have been
used, and the first free one, or NOWHERE."""
FIRST_PLACE: Final = number(0)


@compiled_within
def add_to_list(lists: Ints, heap: Ints, head: int, word: int) -> None:
    """Put a word at the end of a list. head: where in the heap the list's first place is, and behind it its last."""
    place = lists[NEXT_IN_LIST, FIRST_PLACE]
    if place != NOWHERE:
        lists[NEXT_IN_LIST, FIRST_PLACE] = lists[NEXT_IN_LIST, place]
    else:
        place = lists[IN_LIST, FIRST_PLACE]
        lists[IN_LIST, FIRST_PLACE] += 1
    lists[IN_LIST, place], lists[NEXT_IN_LIST, place] = word, NOWHERE
    if heap[head] == NOWHERE:
        heap[head] = place
    else:
        lists[NEXT_IN_LIST, heap[head + 1]] = place
    heap[head + 1] = place


@compiled_within
def end_list(lists: Ints, heap: Ints, head: int) -> None:
    """Give back the places of a list; it is empty then."""
    place = heap[head]
    heap[head] = NOWHERE
    while place != NOWHERE:
        following = lists[NEXT_IN_LIST, place]
        lists[NEXT_IN_LIST, place] = lists[NEXT_IN_LIST, FIRST_PLACE]
        lists[NEXT_IN_LIST, FIRST_PLACE] = place
        place = following
