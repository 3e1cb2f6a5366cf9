"""The code of regions and the tables that it runs on: what each of their words means.

A *frame* is a region that has begun. It has a block of int64: a word for each slot, then for each item how many items
it still waits for. In a slot is a node with one of its outputs (`node * OUTPUTS + output`), or a number, or the first
place of a list, or NOWHERE.

The code of regions is one array of int64; `Frames` writes it. A region is known by where it begins there.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled_merged, number
from batchmaker.core.addresses import row_at, table_at

# --- regions: the words of a header, and of the items that it leads to -----------------------------------------------

(
    NUM_SLOTS, NUM_ITEMS, ITEMS_AT, OUTPUTS_AT, NUM_OUTPUTS, CONSTANTS_AT, NUM_CONSTANTS, HELD_AT, NUM_HELD, LISTS_AT,
    NUM_LISTS, FREE, HEADER_WORDS,
) = map(number, range(13))  # fmt: skip
"""ITEMS_AT: where the places of the items are. CONSTANTS_AT: pairs of a slot and a number. HELD_AT: threes of a slot,
the slot of a count, and a step. LISTS_AT: slots of lists. FREE: the first of the region's frames that are free, or
NOWHERE."""

KIND, NUM_NEEDS, FOLLOWS_AT, NUM_FOLLOWS, ITEM_WORDS = map(number, range(5))
SEGMENT, CHOICE, LOOP, PICK, TELL = map(number, range(5))
(
    OF_FORM, ARGUMENTS_AT, NUM_ARGUMENTS, READS_AT, NUM_READS, EXPORTS_AT, NUM_EXPORTS, SPANS_AT, NUM_SPANS,
    COLUMNS_AT, NUM_COLUMNS, MEMORIES_AT, NUM_MEMORIES, SIZE_AT, ENDS_AT, NUM_ENDS, FORMS_AT, NUM_FORMS,
) = map(number, range(4, 22))  # fmt: skip
"""Of a segment. OF_FORM: NOWHERE for the request's own graph. READS_AT: threes of an input, a node and an argument.
EXPORTS_AT: threes of a slot, a node and an output. SPANS_AT: threes as in `Segment.spans`. COLUMNS_AT: pairs of an
input and a span, of which each node takes an element. MEMORIES_AT: fives of an input, the first node that reads, how
many do (NOWHERE: all), whether they are a run, and a span.

Of one with a size: SIZE_AT: the slot of its size, otherwise NOWHERE. OF_FORM: the number of its kind. ENDS_AT: threes
as in `Segment.ends`. FORMS_AT: for each size below NUM_FORMS the form, or NOWHERE."""
INDEX, IS_COND, BRANCHES_AT, NUM_BRANCHES, RESULTS_AT, NUM_RESULTS = map(number, range(4, 10))
"""Of a choice. BRANCHES_AT: for each branch its region, and where and how many the pairs of slots are that it captures:
its own, and the one outside."""
(
    GOING, BODY_AT, STATE_AT, NUM_STATE, INIT_AT, LIMIT, PROGRESS, TESTS, FILTERS, COLLECTED_AT, NUM_COLLECTED,
    LISTED_AT, NUM_LISTED,
) = map(number, range(4, 17))  # fmt: skip
"""Of a loop. BODY_AT: as for a branch. PROGRESS: the first of four slots: iterations so far, what the body last said
about going on and about collecting, and how many iterations were collected. LISTED_AT: pairs as in `WhileLoop.listed`.
"""
PICK_INDEX, FIRST_OF, COUNT_OF, STEP_OF, RESULT = map(number, range(4, 9))
COLLECTION, TOLD = map(number, (4, 8))
"""Of what is told, beside FIRST_OF to STEP_OF. TOLD: the slot of how many elements have been."""

# --- frames, who waits, messages ---------------------------------------------------------------------------------

OF_REGION, OF_REQUEST, PARENT, PARENT_ITEM, BLOCK, ITEMS_LEFT, NEXT_FRAME, PREVIOUS_FRAME, FRAME_FIELDS = map(
    number, range(9)
)
"""OF_REQUEST: the slot of its request. PARENT, PARENT_ITEM: who gets its outputs. NEXT_FRAME, PREVIOUS_FRAME: of the
same request, or of the region's free ones."""
WAITING_FRAME, WAITING_ITEM, NEXT_WAITING, WAITING_FIELDS = map(number, range(4))
"""Who waits for a node to be done. WAITING_FRAME is NOWHERE for a node that is to be let go then: WAITING_ITEM."""
(
    NUM_FRAMES, HEAP_TOP, NUM_WAITING, FREE_WAITING, NUM_QUEUED, NUM_MESSAGE_WORDS, NUM_BEGINNING, WANTED_FORM,
    WANTED_SLOT, MOST_WORDS, MOST_NODES, NUM_FAILED, WANTED_SIZE, MOST_HELD, NUM_COLLECTING, MACHINE_COUNTS,
) = map(number, range(16))  # fmt: skip
"""WANTED_FORM, WANTED_SLOT: for which segment of which request there is no room, or where in the code the segment is
that has no form for WANTED_SIZE. MOST_WORDS: what one item of any region may need of any table; MOST_HELD: beside
it, of those that wait, because of spans whose length values decide. MOST_NODES: of one request."""
FINISHED, FAILED = map(number, range(2))
"""Messages, as words: FINISHED, slot, number of outputs, outputs. FAILED, slot, where the item is in the code, reason,
what was wanted, what there is."""
COLLECTING_SLOT, COLLECTING_NUMBER, COLLECTING_WORD, COLLECTING_FIELDS = map(number, range(4))
"""What loops have collected: the request's slot, the number of the collection, and a node with one of its outputs."""
BEGINNING_SLOT, BEGINNING_FORM, BEGINNING_BASE, BEGINNING_SUBGRAPH, BEGINNING_FIELDS = map(number, range(5))
"""The segments that have begun, each with its first node and its first subgraph."""
BAD_INDEX, BAD_BRANCH, TOO_MANY_NODES, NO_STEP = map(number, range(4))
MESSAGE_WORDS: Final = number(6)
ALL_DONE, SOME_FAILED, NOT_BEGUN, LACKS_MACHINE, LACKS_NUMBERS, LACKS_FORM = map(number, range(6))
ZERO, ONE = map(number, range(2))
A_LIST: Final = number(0)
"""See `batchmaker.graph.regions`."""


class Machine(NamedTuple):
    """The tables of decisions.

    - code: see the module. frames: [FRAME_FIELDS, room]. heap: [room] the blocks.
    - waits: [nodes] who waits for each node first, or NOWHERE. waiting: [WAITING_FIELDS, room].
    - values: [outputs, nodes] of outputs that have come to the host.
    - first_frame, num_nodes: [slots] of each request its first frame, or NOWHERE; and its nodes so far, or NOWHERE once
      it has failed.
    - queue: [2, room] frames and items that can go on. messages: [room]. beginning: [BEGINNING_FIELDS, room].
    - counts: [MACHINE_COUNTS]. lists: [LIST_FIELDS, room] what loops have collected for later segments.
    - collecting: [COLLECTING_FIELDS, room] what loops have collected for the result.
    """

    code: Ints
    frames: Ints
    heap: Ints
    waits: Ints
    waiting: Ints
    values: Ints
    first_frame: Ints
    num_nodes: Ints
    queue: Ints
    messages: Ints
    beginning: Ints
    counts: Ints
    lists: Ints
    collecting: Ints


@compiled_merged
def machine_at(a: Ints) -> Machine:
    """Return the tables at these addresses; see `addresses_of`."""
    return Machine(
        code=row_at(a, 0),
        frames=table_at(a, 1),
        heap=row_at(a, 2),
        waits=row_at(a, 3),
        waiting=table_at(a, 4),
        values=table_at(a, 5),
        first_frame=row_at(a, 6),
        num_nodes=row_at(a, 7),
        queue=table_at(a, 8),
        messages=row_at(a, 9),
        beginning=table_at(a, 10),
        counts=row_at(a, 11),
        lists=table_at(a, 12),
        collecting=table_at(a, 13),
    )
