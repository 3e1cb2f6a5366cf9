"""The interface between the CUDA executor and a GPU: one stream of work, which is submitted and not waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.errors import DeviceError
from batchmaker.kernels.layer import CallBuffers, LayerWeights
from batchmaker.kernels.source import joined

Launch = Callable[[], None]
"""Submits the recorded work once more."""


class Kernel(Protocol):
    """A kernel of our own, loaded on a device."""

    def __call__(self, grid: tuple[int, ...], *numbers: int) -> None:
        """Submit a launch of so many blocks. numbers: its arguments, 64 bits each; pointers as addresses."""


HEADER_WORDS = 5
"""Number of int64 words in the header of a block: the step's number, the addresses to which the device writes the
times of its begin and end, the address of the counter, and the address of the block that follows. Times are nanoseconds
of the device's own clock. For work without a step's number the first four are 0, but there may be an address for the
begin. The last is 0 if the next work has the same block."""


def row_copies() -> str:
    """Return what kernels that copy rows share, in CUDA C++: it stands before them."""
    return joined(("copies.cuh",), "batchmaker.executor.cuda")


class DeviceLostError(DeviceError):
    """The device has failed. Work submitted to it will not finish, and its memory is lost.

    device: the lost one; None if no device is left.
    """

    def __init__(self, reason: str, device: Device | None = None) -> None:
        super().__init__(reason)
        self.device = device


class CannotRecordError(Exception):
    """The work waits for a value, or does something else that cannot be recorded. The message is the reason."""


@final
@dataclass(frozen=True, slots=True)
class RecurrentKernel:
    """A kernel that computes many steps of a recurrent layer in one launch.

    least_steps: from this number of steps on it is expected to be faster than one recorded launch per step. prepare:
    takes the buffers of a call and returns a function that submits this call. The function may be called while
    something is recorded. It must then stay for as long as the recording.
    """

    least_steps: int
    prepare: Callable[[CallBuffers], Launch]


class Device(Protocol):
    """What the executor needs of a GPU. All work runs in the order of submission. To submit does not wait.

    torch_device: the device of its tensors. name: for messages. Any call raises DeviceLostError once the device has
    failed, and torch.OutOfMemoryError if memory runs out. Host memory that work refers to must stay until the work is
    done. The counter shows this, with the number of the step.
    """

    torch_device: torch.device
    name: str

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory of the device. It is zero for all work that is submitted after this call."""

    def pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return host memory, [num_bytes], that the device can use at its host address. Waits for nothing."""

    def upload(self, *copies: tuple[Tensor, NDArray[Any]]) -> None:
        """Copy arrays in pinned memory to the beginnings of tensors of the device, all of the same dtype."""

    def compute(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Submit operations. Work that is submitted later may use the tensors returned."""

    def compute_waiting(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """As `compute`, for work that reads values on the host. It finds all work submitted before done."""

    def move_rows(self, where: Tensor, first: int, columns: Tensor, count: int, *, to_addresses: bool) -> None:
        """Copy rows between buffers and the addresses in a block.

        where: int64 [1] on the device, the address of a block there when the work runs. A block is int64: HEADER_WORDS
        words and then addresses; those of column k begin at word first + k * count.
        columns: int64 [num_columns, 2], the address of each buffer and the bytes of one row. to_addresses=False: row i
        of buffer k is read from address i of column k; for address 0 it becomes zero. Also notes the time of the begin
        if the block has an address for it. to_addresses=True: row i of buffer k is written to address i of column k;
        for address 0 it is not written.
        """

    def signal(self, where: Tensor) -> None:
        """End the work of a block, see HEADER_WORDS: write the address of the next block into `where`, then the time of
        the end, and then the step's number into the counter."""

    def kernels(self, source: str, names: Sequence[str]) -> Sequence[Kernel]:
        """Compile kernels of a source in CUDA C++, or take them from a cache, and load them. DeviceError if this fails.

        Each takes integers of 64 bits and pointers only, and works with any number of threads in a block.
        """
        ...

    def record(self, work: Callable[[], None]) -> Launch:
        """Record what `work` submits, to submit it again later, inside `submitting`. CannotRecordError if impossible.

        `work` may be called several times, and what it submits may run. The last call is the one that is recorded.
        """

    def submitting(self) -> AbstractContextManager[None]:
        """Inside, what `record` has returned may be called: each call submits the recorded work once more."""

    def recurrent(self, weights: LayerWeights, rows: int, steps: int) -> RecurrentKernel | None:
        """Return a kernel for up to `steps` steps of `rows` rows of a layer in one launch.

        None if recorded single steps are expected to be faster, or if there is no such kernel. Each kernel has a packed
        copy of the weights. Calls of one kernel must not overlap.
        """

    def copy_rows(self, other: Device, source: Tensor, rows: NDArray[np.int64], target: Tensor) -> None:
        """Copy rows of a table of another device into the same rows of a table of this device.

        This runs after all work submitted to the other device so far, and before the next work of this device.
        """

    def read(self, row: Tensor) -> Tensor:
        """Return a copy of a row on the host. Waits until the work submitted so far is done."""

    def check(self) -> None:
        """Raise DeviceLostError if the device has failed. Called when it has finished nothing for long."""

    def stop(self) -> None:
        """Wait for all submitted work. The device is not used afterwards."""
