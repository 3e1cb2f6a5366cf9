"""One device as the executor sees it: the steps submitted, the steps finished, and the pinned memory that they use."""

from __future__ import annotations

from collections import deque
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.executor.cuda.device import Device

Bytes = NDArray[np.uint8]

_SMALLEST_BYTES = 4096
_FIRST_BLOCKS = 1 << 16
"""Words of blocks for which there is room on a device at first."""


@final
class Place:
    """A device, the number of the last step submitted to it, a pool of pinned memory, and room for blocks.

    number: the index of the device in the executor. At the end of each step the device writes the step's number into a
    counter in host memory. So the executor knows which steps have finished without a call of the CUDA driver.

    where: int64 [1] on the device, the address of the block of the launch in turn. The blocks of a task replace those
    of the task before, once that has finished: all work of a device runs in order.
    """

    def __init__(self, number: int, device: Device) -> None:
        self.number = number
        self.device = device
        self.num_submitted = 0
        self._counter: NDArray[np.int64] = device.pinned(8).view(np.int64)
        self._counter[0] = 0
        self._free: dict[int, list[Bytes]] = {}
        self._held: deque[tuple[int, object]] = deque()
        self.where: Tensor = device.zeros((1,), torch.int64)
        self._blocks, self._home = self._room(_FIRST_BLOCKS)

    @property
    def counter_address(self) -> int:
        """The host address to which the device writes the number of the last step that it has finished."""
        return self._counter.ctypes.data

    @property
    def num_finished(self) -> int:
        """The number of the last step that the device has finished."""
        return int(self._counter[0])

    def room_for_blocks(self, num_words: int) -> int:
        """Return the address on the device to which the next blocks go; there is room for this number of words."""
        if num_words > len(self._blocks):
            self.hold((self._blocks, self._home))
            self._blocks, self._home = self._room(1 << (num_words - 1).bit_length())
        return int(self._home[0])

    def upload_blocks(self, words: NDArray[np.int64]) -> None:
        """Copy blocks from pinned memory to the device, and let the next launch have the first of them."""
        self.device.upload((self.where, self._home), (self._blocks, words))

    def aim_at(self, block: Tensor) -> None:
        """Let the launches until the next upload have this block of the device, which names no next one."""
        memory = self.take(8)
        word = memory[:8].view(np.int64)
        word[0] = block.data_ptr()
        self.device.upload((self.where, word))
        self.hold(memory)
        self.hold(block)

    def _room(self, num_words: int) -> tuple[Tensor, NDArray[np.int64]]:
        """Return memory of the device for blocks, and its address in pinned memory."""
        blocks = self.device.zeros((num_words,), torch.int64)
        home = self.device.pinned(8).view(np.int64)
        home[0] = blocks.data_ptr()
        return blocks, home

    def take(self, num_bytes: int) -> Bytes:
        """Return pinned memory of at least this size, with any content. Return it with `hold` or `give_back`."""
        size = max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length())
        free = self._free.get(size)
        return free.pop() if free else self.device.pinned(size)

    def give_back(self, block: Bytes) -> None:
        """Return memory from `take` to the pool. No submitted work may refer to it."""
        self._free.setdefault(len(block), []).append(block)

    def hold(self, thing: object) -> None:
        """Keep an object until the steps submitted so far, and the next one, have finished.

        The next one as well, because work without a step's number, such as hoisting, belongs to the step after it.
        """
        self._held.append((self.num_submitted + 1, thing))

    def abandon(self) -> None:
        """Wait for no more steps of a lost device. What it holds is kept until the engine ends."""
        self.num_submitted = self.num_finished

    def release(self, finished: int) -> None:
        """Drop the objects held for steps up to this number. Pinned memory from `take` returns to the pool."""
        while self._held and self._held[0][0] <= finished:
            thing = self._held.popleft()[1]
            if isinstance(thing, np.ndarray) and thing.dtype == np.uint8:
                self.give_back(thing)
