"""One device as the executor sees it: what was submitted, what has finished, and the host memory in between."""

from __future__ import annotations

from collections import deque
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.executor.cuda.device import Device

Bytes = NDArray[np.uint8]

_SMALLEST_BYTES = 4096


@final
class Place:
    """A device, the number of the last step submitted to it, and pinned memory that is used again and again.

    number: which of the executor's devices it is. The device itself sets the counter to a step's number at its end, so
    that what has finished is known without asking the driver.
    """

    def __init__(self, number: int, device: Device) -> None:
        self.number = number
        self.device = device
        self.num_submitted = 0
        self._counter: NDArray[np.int64] = device.pinned(8).view(np.int64)
        self._counter[0] = 0
        self._free: dict[int, list[Bytes]] = {}
        self._held: deque[tuple[int, object]] = deque()

    @property
    def counter_address(self) -> int:
        """Where the device writes the number of the last step that it has finished."""
        return self._counter.ctypes.data

    @property
    def num_finished(self) -> int:
        """The number of the last step that the device has finished."""
        return int(self._counter[0])

    def take(self, num_bytes: int) -> Bytes:
        """Return pinned memory of at least this size, with anything in it. It comes back with `hold` or `give_back`."""
        size = max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length())
        free = self._free.get(size)
        return free.pop() if free else self.device.pinned(size)

    def give_back(self, block: Bytes) -> None:
        """Let memory from `take` be used again: nothing submitted refers to it."""
        self._free.setdefault(len(block), []).append(block)

    def hold(self, thing: object) -> None:
        """Keep something until the steps submitted so far, and the one after them, have finished.

        The one after, since work that is announced to nobody belongs to the step that follows it.
        """
        self._held.append((self.num_submitted + 1, thing))

    def release(self, finished: int) -> None:
        """Let go of what was held for the steps up to this number; pinned memory from `take` is used again."""
        while self._held and self._held[0][0] <= finished:
            thing = self._held.popleft()[1]
            if isinstance(thing, np.ndarray) and thing.dtype == np.uint8:
                self.give_back(thing)
