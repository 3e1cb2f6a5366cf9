"""A part of a cell on a device: reads rows by address, computes, writes rows by address. Recorded for every batch size.

Only a block of numbers changes from launch to launch (blocks.py). Used by DeviceCells.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from batchmaker.compile.export import torch_dtype
from batchmaker.errors import RAISED_BY_USERS, said_by
from batchmaker.executor.cuda.device import HEADER_WORDS, CannotRecordError, Device, DeviceLostError, Launch
from batchmaker.executor.cuda.place import Place
from batchmaker.graph.spec import ValueSpec

LANE, KEEP, FETCH = range(TARGETS_OF_STEP := 3)
"""The targets of an output of a step: the lane of its chain, a row of a state table, the host."""

Work = Callable[..., tuple[Tensor, ...]]
Failures = tuple[tuple[int, str], ...]


@final
@dataclass(frozen=True, slots=True)
class _Recording:
    """The launch for one batch size; None if it cannot be recorded. keeps: tensors that must stay for as long."""

    launch: Launch | None
    keeps: tuple[Tensor, ...] = ()


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
        self._buffers = tuple(device.zeros((sizes[-1], *spec.shape), torch_dtype(spec.dtype)) for spec in inputs)
        self._buffer_columns = described(place, self._buffers)
        self._made: tuple[Tensor, ...] = ()  # outputs that are computed without a recording
        self._recordings: dict[int, _Recording] = {}
        self.note: str | None = None

    @property
    def num_inputs(self) -> int:
        """Number of inputs of `work`."""
        return len(self._buffers)

    def padded(self, count: int) -> int:
        """Return the smallest supported size for `count` rows."""
        return self._sizes[bisect_left(self._sizes, count)]

    def num_words(self, count: int) -> int:
        """Return the words of a block's body for `count` rows: a column for each input, then for each target.

        A column has the addresses of a padded batch. A row whose address is 0 is zero, and is written nowhere.
        """
        return self._num_columns * self.padded(count)

    def prepare(self, sizes: Iterable[int]) -> None:
        """Record these sizes, so that no request waits for a recording."""
        for size in sizes:
            self._recording(size)

    def recorded(self, count: int) -> Launch | None:
        """Return the recording for `count` rows; None if the cell runs without one, see `run`.

        The first call for a size records, and then the launches submitted next have no block of a task.
        """
        return self._recording(self.padded(count)).launch

    def run(self, count: int) -> Failures:
        """Submit a batch without a recording. Returns the rows at which the cell raised, with the reason."""
        padded, device = self.padded(count), self._place.device
        self._gather(padded)
        failures = self._run_now(padded, count)
        self._scatter(padded, self._made_columns)
        device.signal(self._place.where)
        return failures

    # --- recording -----------------------------------------------------------------------------------------------

    def _recording(self, size: int) -> _Recording:
        recording = self._recordings.get(size)
        if recording is None:
            recording = self._recordings[size] = self._record(size)
        return recording

    def _record(self, size: int) -> _Recording:
        device = self._place.device
        if self.note is None:
            columns = device.zeros((len(self._outputs) * self._num_targets, 2), torch.int64)
            made: list[Tensor] = []

            def work() -> None:
                self._gather(size)
                made[:] = device.compute(lambda: self._compute(size))  # the last call is recorded
                self._scatter(size, columns)
                device.signal(self._place.where)

            self._place.aim_at(device.zeros((HEADER_WORDS + self._num_columns * size,), torch.int64))
            try:
                launch = device.record(work)
            except CannotRecordError as reason:
                self.note = f"cell {self._name!r} is not recorded: {reason}"
            else:
                describe(self._place, columns, self._for_targets(made))
                return _Recording(launch, (columns, *made))
        if not self._made:
            self._made = tuple(
                device.zeros((self._sizes[-1], *spec.shape), torch_dtype(spec.dtype)) for spec in self._outputs
            )
            self._made_columns = described(self._place, self._for_targets(self._made))
        return _Recording(None)

    def _compute(self, count: int) -> tuple[Tensor, ...]:
        return tuple(value.contiguous() for value in self._work(*(one[:count] for one in self._buffers)))

    def _gather(self, count: int) -> None:
        place = self._place
        place.device.move_rows(place.where, HEADER_WORDS, self._buffer_columns, count, to_addresses=False)

    def _scatter(self, count: int, columns: Tensor) -> None:
        place, first = self._place, HEADER_WORDS + self.num_inputs * count
        place.device.move_rows(place.where, first, columns, count, to_addresses=True)

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
            rows = tuple(one[position : position + 1] for one in self._buffers)
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
        place.device.upload((columns.view(-1), words))
        place.hold(memory)
