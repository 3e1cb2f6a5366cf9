"""A part of a cell on a device: rows in by address, computed, rows out by address, recorded for every batch size.

Addresses make one recording serve whatever tables, lanes and rows a batch comes from and goes to: only a block of
numbers changes from launch to launch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.compile.export import torch_dtype
from batchmaker.errors import RAISED_BY_USERS, said_by
from batchmaker.executor.cuda.device import HEADER_WORDS, CannotRecordError, Device, DeviceLostError, Launch
from batchmaker.executor.cuda.place import Bytes, Place
from batchmaker.graph.spec import ValueSpec

LANE, KEEP, FETCH = 0, 1, 2
"""Where an output of a step may go: to its chain's lane, to a row of its own, to the host."""

Work = Callable[..., tuple[Tensor, ...]]
Failures = tuple[tuple[int, str], ...]


@final
class Block:
    """The numbers of one launch, in pinned memory: header, an address per row and input, one per row and target.

    memory: what it lies in. stamps: where the device notes when the step began and ended. extra: for fetched rows.
    """

    __slots__ = ("_count", "_num_inputs", "_num_targets", "extra", "memory", "stamps", "words")

    def __init__(self, memory: Bytes, count: int, num_inputs: int, num_columns: int, num_targets: int) -> None:
        num_words = HEADER_WORDS + num_columns * count
        self.memory = memory
        self.words: NDArray[np.int64] = memory[: 8 * num_words].view(np.int64)
        self.words[:] = 0
        self.stamps: NDArray[np.int64] = memory[8 * num_words : 8 * num_words + 16].view(np.int64)
        start = 8 * num_words + 16
        self.extra = memory[start + (-start) % 16 :]
        self._count = count
        self._num_inputs = num_inputs
        self._num_targets = num_targets

    def announce(self, number: int, counter_address: int) -> None:
        """Let the device say when it has finished, and note its times."""
        self.words[0] = number
        self.words[1] = self.stamps.ctypes.data
        self.words[2] = self.words[1] + 8
        self.words[3] = counter_address

    def note_begin(self) -> None:
        """Let the device note when it begins with this launch, of which nobody is told otherwise."""
        self.words[1] = self.stamps.ctypes.data

    def source(self, index: int) -> NDArray[np.int64]:
        """Addresses from which input `index` comes, [padded batch]."""
        start = HEADER_WORDS + index * self._count
        return self.words[start : start + self._count]

    def target(self, output: int, kind: int = LANE) -> NDArray[np.int64]:
        """Addresses to which an output goes, [padded batch]."""
        start = HEADER_WORDS + (self._num_inputs + output * self._num_targets + kind) * self._count
        return self.words[start : start + self._count]


@dataclass(frozen=True, slots=True)
class _Recording:
    """A launch for one batch size, None where it cannot be recorded, and the block on the device that it reads."""

    launch: Launch | None
    block: Tensor
    keeps: tuple[Tensor, ...]


@final
class DeviceProgram:
    """Runs `work` on batches of the supported sizes.

    work: inputs [n, *shape] -> outputs [n, *shape] on the device. num_targets: how many places an output may go to.
    sizes: supported batch sizes, ascending. note: why it is not recorded, None if it is or is not known yet.
    """

    def __init__(
        self,
        place: Place,
        name: str,
        work: Work,
        inputs: Sequence[ValueSpec],
        outputs: Sequence[ValueSpec],
        num_targets: int,
        sizes: Sequence[int],
    ) -> None:
        self._place = place
        self._name = name
        self._work = work
        self._outputs = outputs
        self._num_targets = num_targets
        self._num_columns = len(inputs) + len(outputs) * num_targets
        self._sizes = sizes
        device = place.device
        self._given = tuple(device.zeros((sizes[-1], *spec.shape), torch_dtype(spec.dtype)) for spec in inputs)
        self._given_columns = described(place, self._given)
        self._made: tuple[Tensor, ...] = ()  # where outputs rest that are computed without a recording
        self._recordings: dict[int, _Recording] = {}
        self.note: str | None = None

    @property
    def num_inputs(self) -> int:
        return len(self._given)

    def padded(self, count: int) -> int:
        """Return the supported size for a batch."""
        return self._sizes[bisect_left(self._sizes, count)]

    def new_block(self, count: int, extra_bytes: int = 0) -> Block:
        """Return an empty block for a batch; what is not filled in is zero rows, and goes nowhere."""
        padded = self.padded(count)
        num_bytes = 8 * (HEADER_WORDS + self._num_columns * padded + 2) + 16 + extra_bytes
        return Block(self._place.take(num_bytes), padded, self.num_inputs, self._num_columns, self._num_targets)

    def prepare(self, sizes: Iterable[int]) -> None:
        """Record these sizes, so that no request waits for it."""
        for size in sizes:
            self._recording(size)

    def submit(self, block: Block, count: int) -> Failures:
        """Submit a batch; returns the rows at which the cell raised: never any where it is recorded."""
        padded = self.padded(count)
        recording = self._recording(padded)
        device = self._place.device
        device.upload(recording.block, block.words)
        if recording.launch is not None:
            recording.launch()
            return ()
        self._gather(recording.block, padded)
        failures = self._run_now(padded, count)
        self._scatter(recording.block, padded, self._made_columns)
        device.signal(recording.block)
        return failures

    # --- recording -----------------------------------------------------------------------------------------------

    def _recording(self, size: int) -> _Recording:
        known = self._recordings.get(size)
        if known is None:
            known = self._recordings[size] = self._record(size)
        return known

    def _record(self, size: int) -> _Recording:
        device = self._place.device
        block = device.zeros((HEADER_WORDS + self._num_columns * size,), torch.int64)
        if self.note is None:
            columns = device.zeros((len(self._outputs) * self._num_targets, 2), torch.int64)
            made: list[Tensor] = []

            def work() -> None:
                self._gather(block, size)
                made[:] = device.compute(lambda: self._compute(size))  # of several runs, the last is the one recorded
                self._scatter(block, size, columns)
                device.signal(block)

            try:
                launch = device.record(work)
            except CannotRecordError as reason:
                self.note = f"cell {self._name!r} is not recorded: {reason}"
            else:
                describe(self._place, columns, self._for_targets(made))
                return _Recording(launch, block, (columns, *made))
        if not self._made:
            self._made = tuple(
                device.zeros((self._sizes[-1], *spec.shape), torch_dtype(spec.dtype)) for spec in self._outputs
            )
            self._made_columns = described(self._place, self._for_targets(self._made))
        return _Recording(None, block, ())

    def _compute(self, count: int) -> tuple[Tensor, ...]:
        return tuple(value.contiguous() for value in self._work(*(given[:count] for given in self._given)))

    def _gather(self, block: Tensor, count: int) -> None:
        self._place.device.move_rows(block, HEADER_WORDS, self._given_columns, count, to_addresses=False)

    def _scatter(self, block: Tensor, count: int, columns: Tensor) -> None:
        first = HEADER_WORDS + self.num_inputs * count
        self._place.device.move_rows(block, first, columns, count, to_addresses=True)

    def _for_targets(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        return [buffer for buffer in buffers for _ in range(self._num_targets)]

    # --- without a recording ---------------------------------------------------------------------------------------

    def _run_now(self, padded: int, count: int) -> Failures:
        """Compute the outputs into `_made`, row by row if the cell raises: only the rows that make it raise fail."""
        device = self._place.device
        try:
            self._keep(device.compute_waiting(lambda: self._compute(padded)), 0)
        except (DeviceLostError, torch.OutOfMemoryError):
            raise
        except RAISED_BY_USERS:  # a cell may raise anything; find the rows that make it
            return tuple(self._one_by_one(device, count))
        return ()

    def _one_by_one(self, device: Device, count: int) -> Iterable[tuple[int, str]]:
        for position in range(count):
            rows = tuple(given[position : position + 1] for given in self._given)
            try:
                self._keep(device.compute_waiting(lambda rows=rows: self._work(*rows)), position)  # type: ignore[misc]
            except (DeviceLostError, torch.OutOfMemoryError):
                raise
            except RAISED_BY_USERS as error:  # the cell's own; it is reported to the row's request
                yield position, f"cell {self._name!r} raised {said_by(error)}"

    def _keep(self, outputs: tuple[Tensor, ...], first: int) -> None:
        def copy() -> tuple[Tensor, ...]:
            pairs = zip(self._made, outputs, strict=True)
            return tuple(made[first : first + len(output)].copy_(output) for made, output in pairs)

        self._place.device.compute(copy)


def described(place: Place, buffers: Sequence[Tensor]) -> Tensor:
    """Return what `Device.move_rows` is told of buffers: the address of each, and the bytes of its rows."""
    columns = place.device.zeros((len(buffers), 2), torch.int64)
    describe(place, columns, buffers)
    return columns


def describe(place: Place, columns: Tensor, buffers: Sequence[Tensor]) -> None:
    """Write that down in a tensor of the device that is there already."""
    if buffers:
        numbers = np.array([(buffer.data_ptr(), buffer[:1].nbytes) for buffer in buffers], np.int64).ravel()
        memory = place.take(numbers.nbytes)
        words = memory[: numbers.nbytes].view(np.int64)
        words[:] = numbers
        place.device.upload(columns.view(-1), words)
        place.hold(memory)
