"""The places of the numbers that the host and the kernels share. `header` gives them to the kernels."""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class CoreWord(IntEnum):
    """Words that every kernel gets the address of: where everything is."""

    ARENA, BOARD, FINISHED, NUM_SLOTS, PAGES, PAGE_WORDS, COUNTER, NUM_TYPES = range(8)


class BoardWord(IntEnum):
    """Words that describe the device as a whole; those of the types follow.

    TASKS: tasks reported. ENDED: requests finished. PAUSED: steps take no nodes. CELLS, STEPS: rows that were computed
    without padding, and steps that had any, since the start.
    """

    TASKS, ENDED, PAUSED, CELLS, STEPS = range(5)


class TypeWord(IntEnum):
    """Words of the board for each type: its two rings, and what the present step has taken from them.

    RINGS: the address of both; that of begun runs is the first. SIZE: of each ring.
    """

    RINGS, SIZE, RUNS_HEAD, RUNS_TAIL, NODES_HEAD, NODES_TAIL, FIRST_RUN, NUM_RUNS, FIRST_NODE, NUM_NODES = range(10)


class PageWord(IntEnum):
    """Words of the page that the device writes after a task; then two for each type, begun runs and other nodes."""

    ENDED, CELLS, STEPS = range(3)


class LetterWord(IntEnum):
    """Words of one letter of the mail. COUNT: words of the request, from word FROM on; 0: cancel the request at WHERE.

    WHERE: byte of the arena.
    """

    WHERE, FROM, COUNT = range(3)


class RequestWord(IntEnum):
    """The first words of a request. LEFT: entries that are not done. ANSWER: host address of its results.

    READY, NUM_READY: the word at which the list of entries begins that wait for nothing, and its length.
    """

    SLOT, LEFT, CANCELLED, ANSWER, READY, NUM_READY = range(6)


class EntryWord(IntEnum):
    """The first words of an entry: a node, or a run as a whole. Then come its inputs, then its outputs.

    MISSING: entries that it waits for. STEP, STEPS: the next step and their number. UNTIL, VALUE: the run ends where
    this output, a whole number, has this value; NONE: at its last step. LENGTH: the byte of the results for its number
    of steps, or NONE. HOME: its own word, counted from
    the request's first. READERS, NUM_READERS: the word at which the list of entries begins that wait for it.
    """

    TYPE, MISSING, STEP, STEPS, HOME, READERS, NUM_READERS, UNTIL, VALUE, LENGTH = range(10)


class InputWord(IntEnum):
    """Words of an input. All places are bytes from the request's first, or NONE for zeros.

    WHERE: of the row of step 0. STRIDE: bytes from step to step; LISTED: WHERE is a list of the places of all steps.
    STATE: the place from step 1 on, if it is not NONE.
    """

    WHERE, STRIDE, STATE = range(3)


class OutputWord(IntEnum):
    """Words of an output: three places to which it is written, or NONE.

    KEPT: for the nodes that read it, and bytes from step to step, or AT_END: written at the last step alone. STATE: for
    the next step. ANSWER: as KEPT, counted from the first byte of the request's results.
    """

    KEPT, KEPT_STRIDE, STATE, ANSWER, ANSWER_STRIDE = range(5)


NONE: Final = -1
LISTED: Final = 1 << 62
AT_END: Final = -1
_GROUPS: Final = (CoreWord, BoardWord, TypeWord, PageWord, LetterWord, RequestWord, EntryWord, InputWord, OutputWord)


def header() -> str:
    """Return all this in C++, as constants such as ENTRY_STEP, and ENTRY_WORDS for the number of words."""
    numbers = {"NONE": NONE, "LISTED": LISTED, "AT_END": AT_END}
    for group in _GROUPS:
        name = group.__name__.removesuffix("Word").upper()
        numbers |= {f"{name}_{one.name}": one.value for one in group} | {f"{name}_WORDS": len(group)}
    return "".join(f"static const long long {name} = {value}LL;\n" for name, value in numbers.items())
