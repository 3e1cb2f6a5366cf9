"""The seam between the CUDA executor and a GPU: one stream of work, submitted and never waited for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.errors import DeviceError
from batchmaker.kernels.layer import CallBuffers, LayerWeights

Launch = Callable[[], None]
"""Submits once more what was recorded."""

HEADER_WORDS = 4
"""A block begins with the step's number, the addresses where the times of its begin and end go, and the counter's.
Times are nanoseconds of the device's own clock. Number and addresses are 0 for work that nobody is told of."""


class DeviceLostError(DeviceError):
    """The device has failed: nothing that was submitted to it will finish, and what it holds is gone.

    device: which, None if no device is left.
    """

    def __init__(self, reason: str, device: Device | None = None) -> None:
        super().__init__(reason)
        self.device = device


class CannotRecordError(Exception):
    """The work waits for a value, or does something else that cannot be recorded; the reason is the message."""


@final
@dataclass(frozen=True, slots=True)
class RecurrentKernel:
    """What computes many steps of a recurrent layer in one launch.

    least_steps: from how many on it is taken to be faster than a recording for each step. prepare: given the buffers of
    a call, returns what submits it, also while something is recorded; that must stay for as long as the recording.
    """

    least_steps: int
    prepare: Callable[[CallBuffers], Launch]


class Device(Protocol):
    """What the executor asks of a GPU. Everything runs in the order in which it was submitted, and nothing waits.

    torch_device: where its tensors live. name: what people know it by. Any call raises DeviceLostError once the device
    has failed, and torch.OutOfMemoryError where memory runs out. Host memory that work refers to must stay until the
    work is done, which the step's number in the counter tells.
    """

    torch_device: torch.device
    name: str

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory of the device, zero once what is submitted before its first use is done."""

    def pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return host memory that the device reads and writes at the address it has here. Waits for nothing."""

    def upload(self, target: Tensor, source: NDArray[Any]) -> None:
        """Copy pinned memory to the beginning of a tensor of the device."""

    def compute(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Submit operations; their results are in the tensors returned for whatever is submitted next."""

    def compute_waiting(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """As `compute`, for work that looks at values: it finds what was submitted before it done."""

    def move_rows(self, block: Tensor, first: int, columns: Tensor, count: int, *, to_addresses: bool) -> None:
        """Copy rows between buffers and the addresses that a block names.

        block: int64 on the device, HEADER_WORDS and then addresses; those of column k are at first + k * count.
        columns: int64 [num_columns, 2], each buffer's address and the bytes of its rows. Row i of buffer k comes from,
        or goes to, address i of column k. Address 0: the row becomes zero, or goes nowhere. Towards the buffers, the
        time of the begin is noted if the block says where.
        """

    def signal(self, block: Tensor) -> None:
        """Note the time of the end and then set the counter to the step's number, as the block's header says."""

    def record(self, work: Callable[[], None]) -> Launch:
        """Record what `work` submits without running it. CannotRecordError if it cannot be."""

    def recurrent(self, weights: LayerWeights, rows: int, steps: int) -> RecurrentKernel | None:
        """Return what computes up to so many steps of so many rows of a layer in one launch; None where recorded steps
        are taken to be faster, or nothing can. Each has the weights, packed for it. Calls of one must not overlap."""

    def copy_rows(self, other: Device, source: Tensor, rows: NDArray[np.int64], target: Tensor) -> None:
        """Copy rows of another device's table into the same rows of one of this device's.

        After what is submitted to the other now, before what is submitted to this one next.
        """

    def read(self, row: Tensor) -> Tensor:
        """Return a copy on the host of what finished work has left; the one call that waits."""

    def check(self) -> None:
        """Raise DeviceLostError if the device has failed; for when nothing has been heard of it for long."""

    def stop(self) -> None:
        """Wait for what was submitted and let go of everything."""
