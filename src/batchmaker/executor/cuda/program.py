"""A part of a cell on a device: reads rows by address, computes, writes rows by address. Recorded for every batch size.

Because of the addresses, one recording can be used for all tables, lanes and rows. Only a block of numbers changes from
launch to launch. Used by DeviceCells.
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
"""The targets of an output of a step: the lane of its chain, a row of a state table, the host."""

Work = Callable[..., tuple[Tensor, ...]]
Failures = tuple[tuple[int, str], ...]


@final
class Block:
    """The numbers of one launch, in pinned memory: a header, then addresses, one for each row of each input and target.

    memory: all of its memory. words: header and addresses, int64. stamps: [2] int64, where the device notes when the
    step began and ended. extra: memory for fetched rows.
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
        """Ask the device to note the step's times, and to write `number` into the counter when it has finished."""
        self.words[0] = number
        self.words[1] = self.stamps.ctypes.data
        self.words[2] = self.words[1] + 8
        self.words[3] = counter_address

    def note_begin(self) -> None:
        """Ask the device to note when it begins this launch, which is no step and does not change the counter."""
        self.words[1] = self.stamps.ctypes.data

    def source(self, index: int) -> NDArray[np.int64]:
        """Return the addresses from which input `index` is read, [padded batch], to be filled in."""
        start = HEADER_WORDS + index * self._count
        return self.words[start : start + self._count]

    def target(self, output: int, kind: int = LANE) -> NDArray[np.int64]:
        """Return the addresses to which an output is written, [padded batch], to be filled in."""
        start = HEADER_WORDS + (self._num_inputs + output * self._num_targets + kind) * self._count
        return self.words[start : start + self._count]


@dataclass(frozen=True, slots=True)
class _Recording:
    """The launch for one batch size; None if it cannot be recorded. block: on the device, read by the launch.

    keeps: tensors that must stay for as long as the launch.
    """

    launch: Launch | None
    block: Tensor
    keeps: tuple[Tensor, ...]


@final
class DeviceProgram:
    """Runs `work` on batches of the supported sizes.

    work: inputs [n, *shape] -> outputs [n, *shape], on the device. num_targets: the number of targets of each output.
    sizes: supported batch sizes, ascending. note: why it is not recorded; None if it is, or before this is known.
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
        self._made: tuple[Tensor, ...] = ()  # outputs that are computed without a recording
        self._recordings: dict[int, _Recording] = {}
        self.note: str | None = None

    @property
    def num_inputs(self) -> int:
        """Number of inputs of `work`."""
        return len(self._given)

    def padded(self, count: int) -> int:
        """Return the smallest supported size for `count` rows."""
        return self._sizes[bisect_left(self._sizes, count)]

    def new_block(self, count: int, extra_bytes: int = 0) -> Block:
        """Return an empty block for a batch. A row that is not filled in is zero, and is written nowhere."""
        padded = self.padded(count)
        num_bytes = 8 * (HEADER_WORDS + self._num_columns * padded + 2) + 16 + extra_bytes
        return Block(self._place.take(num_bytes), padded, self.num_inputs, self._num_columns, self._num_targets)

    def prepare(self, sizes: Iterable[int]) -> None:
        """Record these sizes, so that no request waits for a recording."""
        for size in sizes:
            self._recording(size)

    def submit(self, block: Block, count: int) -> Failures:
        """Submit a batch. Returns the rows at which the cell raised, with the reason; none if it is recorded."""
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
                made[:] = device.compute(lambda: self._compute(size))  # the last call is recorded
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
        """Compute the outputs into `_made`. If the cell raises, compute row by row: only the rows at fault fail."""
        device = self._place.device
        try:
            self._keep(device.compute_waiting(lambda: self._compute(padded)), 0)
        except (DeviceLostError, torch.OutOfMemoryError):
            raise
        except RAISED_BY_USERS:  # a cell may raise anything; find the rows at fault
            return tuple(self._one_by_one(device, count))
        return ()

    def _one_by_one(self, device: Device, count: int) -> Iterable[tuple[int, str]]:
        for position in range(count):
            rows = tuple(given[position : position + 1] for given in self._given)
            try:
                self._keep(device.compute_waiting(lambda rows=rows: self._work(*rows)), position)  # type: ignore[misc]
            except (DeviceLostError, torch.OutOfMemoryError):
                raise
            except RAISED_BY_USERS as error:  # the cell's own error; the row's request gets it
                yield position, f"cell {self._name!r} raised {said_by(error)}"

    def _keep(self, outputs: tuple[Tensor, ...], first: int) -> None:
        def copy() -> tuple[Tensor, ...]:
            pairs = zip(self._made, outputs, strict=True)
            return tuple(made[first : first + len(output)].copy_(output) for made, output in pairs)

        self._place.device.compute(copy)


def described(place: Place, buffers: Sequence[Tensor]) -> Tensor:
    """Return the columns of buffers for `Device.move_rows`: [buffers, 2], the address and the bytes of one row."""
    columns = place.device.zeros((len(buffers), 2), torch.int64)
    describe(place, columns, buffers)
    return columns


def describe(place: Place, columns: Tensor, buffers: Sequence[Tensor]) -> None:
    """Write what `described` returns into a tensor of the device."""
    if buffers:
        numbers = np.array([(buffer.data_ptr(), buffer[:1].nbytes) for buffer in buffers], np.int64).ravel()
        memory = place.take(numbers.nbytes)
        words = memory[: numbers.nbytes].view(np.int64)
        words[:] = numbers
        place.device.upload(columns.view(-1), words)
        place.hold(memory)
