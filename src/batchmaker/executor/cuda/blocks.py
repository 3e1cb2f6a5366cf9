"""The numbers of a task's launches: in pinned memory, copied to the device at once, one block for each launch in turn.

Because of the addresses in them, one recording can be used for all tables, lanes and rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled
from batchmaker.executor.cuda.device import HEADER_WORDS
from batchmaker.executor.cuda.place import Place


@final
class Blocks:
    """The blocks of one task, for launches in this order. Nothing else may be laid out on the place before `upload`.

    sizes: words of each block after its header. body: [launches] the first word after each header. stamps: [launches,
    2] int64, where the device notes when a launch began and ended, if it is asked to. extra: memory for fetched rows.
    """

    __slots__ = ("_base", "_place", "_starts", "body", "extra", "memory", "stamps", "words")

    def __init__(self, place: Place, sizes: Sequence[int], extra_bytes: int = 0) -> None:
        ends = np.cumsum(np.asarray(sizes, np.int64) + HEADER_WORDS)
        num_words, count = int(ends[-1]), len(sizes)
        stamps_at = 8 * num_words
        extra_at = stamps_at + 16 * count
        extra_at += -extra_at % 16
        self.memory = place.take(extra_at + extra_bytes)
        self.words: Ints = self.memory[:stamps_at].view(np.int64)
        self.words[:] = 0
        self.stamps: Ints = self.memory[stamps_at : stamps_at + 16 * count].view(np.int64).reshape(count, 2)
        self.extra = self.memory[extra_at:]
        self._place = place
        self._starts = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
        self.body: Ints = self._starts + HEADER_WORDS
        self._base = place.room_for_blocks(num_words)
        self.words[self._starts[:-1] + 4] = self._base + 8 * self._starts[1:]

    def note_begin(self, launch: int) -> None:
        """Ask the device to note when it begins a launch that has no step's number."""
        self.words[self._starts[launch] + 1] = self.stamps[launch].ctypes.data

    def announce(self, launch: int, number: int) -> None:
        """Number the launches from this one on: the device notes their times, and that they have finished."""
        starts = self._starts[launch:]
        order = np.arange(len(starts))
        begins = self.stamps.ctypes.data + 16 * (launch + order)
        self.words[starts] = number + order
        self.words[starts + 1] = begins
        self.words[starts + 2] = begins + 8
        self.words[starts + 3] = self._place.counter_address

    def body_of(self, launch: int) -> Ints:
        """Return the words of a block after its header."""
        end = len(self.words) if launch + 1 == len(self._starts) else int(self._starts[launch + 1])
        return self.words[int(self.body[launch]) : end]

    def address(self, launch: int, word: int) -> int:
        """Return the address on the device of a word of a block's body."""
        return self._base + 8 * (int(self.body[launch]) + word)

    def upload(self) -> None:
        """Copy the blocks to the device. The launches that are submitted next read them in turn."""
        self._place.upload_blocks(self.words)


@compiled
def put_rows(words: Ints, at: Ints, stride: Ints, column: int, rows: Ints, base: int, row_bytes: int) -> None:
    """Write the addresses of rows of one buffer into a column of blocks.

    at: [n] for each row, its word in the first column. stride: [n] words from one column to the next there.
    """
    for i in range(len(at)):
        words[at[i] + column * stride[i]] = base + rows[i] * row_bytes


@compiled
def put_sources(
    words: Ints, at: Ints, stride: Ints, column: int, tables: Ints, rows: Ints, bases: Ints, row_bytes: Ints
) -> None:
    """As put_rows, for rows of tables. tables, rows: [n]. bases, row_bytes: [tables], both 0 for the zero table."""
    for i in range(len(at)):
        words[at[i] + column * stride[i]] = bases[tables[i]] + rows[i] * row_bytes[tables[i]]


def prepare() -> None:
    """Compile the loops, or load them from the disk cache, so that no request waits for it."""
    none = np.zeros(0, np.int64)
    put_rows(none, none, none, 0, none, 0, 0)
    put_sources(none, none, none, 0, none, none, none, none)
