"""All memory of a device that schedules itself. It is made here, once, and never grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.arrays import Ints
from batchmaker.device.layout import BoardWord, CoreWord, PageWord, TypeWord
from batchmaker.executor.cuda.device import Device

MAX_TYPES: Final = 64
NUM_PAGES: Final = 8
"""Pages for the counts of tasks. Fewer tasks than this are in flight, so the host reads none that changes."""
NUM_MAILS: Final = 4


@final
@dataclass(frozen=True, slots=True)
class Sizes:
    """arena_bytes: of requests in flight, on the device. answer_bytes: of their results, in pinned memory. mail_bytes:
    of what enters with one launch. num_slots: requests in flight. ring: entries of one type in flight,
    at least twice its largest batch."""

    arena_bytes: int = 1 << 30
    answer_bytes: int = 1 << 26
    mail_bytes: int = 1 << 23
    num_slots: int = 1 << 16
    ring: int = 1 << 17


@final
@dataclass(slots=True)
class Mail:
    """Pinned memory for the letters of one launch. task: number of the first task after it; 0 if it was never sent."""

    words: Ints
    task: int = 0


@final
class CoreMemory:
    """The memory, and the words that say where it is.

    arena: requests in flight. board: see layout. These are on the device. answers: [bytes] results of requests.
    finished: [slots] a ring of slots of ended requests. pages: [NUM_PAGES, words] counts after tasks. mails: in turn.
    These are in pinned memory, and the device writes the first three.
    """

    def __init__(self, device: Device, sizes: Sizes) -> None:
        self.sizes = sizes
        self._device = device
        self._pinned_buffers: list[NDArray[np.uint8]] = []
        self.arena = device.zeros((sizes.arena_bytes // 8,), torch.int64)
        self.board = device.zeros((len(BoardWord) + MAX_TYPES * len(TypeWord),), torch.int64)
        self._rings: list[Tensor] = []
        self.answers = device.pinned(sizes.answer_bytes)
        self.finished = self._pinned_words(sizes.num_slots)
        self.pages = self._pinned_words(NUM_PAGES * (len(PageWord) + 2 * MAX_TYPES)).reshape(NUM_PAGES, -1)
        self._counter = self._pinned_words(1)
        self.mails = [Mail(self._pinned_words(sizes.mail_bytes // 8)) for _ in range(NUM_MAILS)]
        self.mail = device.zeros((sizes.mail_bytes // 8,), torch.int64)
        self._core = device.zeros((len(CoreWord),), torch.int64)
        self._tell()

    @property
    def address(self) -> int:
        """What every kernel gets first."""
        return self._core.data_ptr()

    @property
    def num_done(self) -> int:
        """The number of the last task that the device has done."""
        return int(self._counter[0])

    def add_type(self) -> int:
        """Make the rings of another type, and return its number."""
        number = len(self._rings)
        self._rings.append(self._device.zeros((2 * self.sizes.ring,), torch.int64))
        first = len(BoardWord) + number * len(TypeWord)
        self._put(self.board[first : first + 2], [self._rings[-1].data_ptr(), self.sizes.ring])
        self._tell()
        return number

    def pause(self, paused: bool) -> None:
        """Let the steps that are submitted from now on take nothing, or go on."""
        self._put(self.board[BoardWord.PAUSED : BoardWord.PAUSED + 1], [int(paused)])

    def columns(self, buffers: Sequence[Tensor]) -> Tensor:
        """Return memory for the columns of so many buffers, [buffers, 2]: their addresses, and bytes of a row."""
        made = self._device.zeros((max(1, len(buffers)), 2), torch.int64)
        self.describe(made, buffers)
        return made

    def describe(self, columns: Tensor, buffers: Sequence[Tensor]) -> None:
        """Write the columns of these buffers."""
        if buffers:
            numbers = [number for buffer in buffers for number in (buffer.data_ptr(), buffer[:1].nbytes)]
            self._put(columns.view(-1), numbers)

    def _tell(self) -> None:
        words = {
            CoreWord.ARENA: self.arena.data_ptr(),
            CoreWord.BOARD: self.board.data_ptr(),
            CoreWord.FINISHED: self.finished.ctypes.data,
            CoreWord.NUM_SLOTS: self.sizes.num_slots,
            CoreWord.PAGES: self.pages.ctypes.data,
            CoreWord.PAGE_WORDS: self.pages.shape[1],
            CoreWord.COUNTER: self._counter.ctypes.data,
            CoreWord.NUM_TYPES: len(self._rings),
        }
        self._put(self._core, [words[one] for one in CoreWord])

    def _put(self, where: Tensor, numbers: Sequence[int]) -> None:
        """Copy numbers to the device. Done a few times in an engine's life, so the pinned memory is kept."""
        words = self._pinned_words(len(numbers))
        words[:] = numbers
        self._device.upload((where, words))

    def _pinned_words(self, count: int) -> Any:
        memory = self._device.pinned(8 * count)
        self._pinned_buffers.append(memory)
        words = memory.view(np.int64)
        words[:] = 0
        return words
