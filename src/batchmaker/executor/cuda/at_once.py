"""All steps of a task of chains in one launch of a persistent kernel, for a cell that is an LSTM or a GRU.

A launch reads the state by address, computes the steps, and writes the kept and fetched outputs and the last state by
address. It is recorded for some numbers of rows, as single steps are (program.py). Used by CudaExecutor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
import torch
from torch import Tensor

from batchmaker.arrays import Ints
from batchmaker.compile.recurrent_cells import C, H, Recurrence
from batchmaker.compiled import int64s
from batchmaker.core.commands import RunTask
from batchmaker.executor.cuda.blocks import Blocks
from batchmaker.executor.cuda.chains import Chains, chains_of
from batchmaker.executor.cuda.device import HEADER_WORDS, CannotRecordError, Launch
from batchmaker.executor.cuda.fetches import Fetched
from batchmaker.executor.cuda.place import Place
from batchmaker.executor.cuda.program import described
from batchmaker.executor.cuda.state_tables import DeviceTables
from batchmaker.kernels.layer import CallBuffers

MOST_STEPS: Final = 8
"""The most steps of a task that runs in one launch. BatchMaker's MaxTasksToSubmit is 5."""


@dataclass(frozen=True, slots=True)
class PlannedTask:
    """A task that can run in one launch.

    chains: its chains. rows, every_c: say which recording it uses, by its number of rows, and whether it gives c of
    every step.
    """

    chains: Chains
    rows: int
    every_c: bool

    @property
    def places(self) -> Ints:
        """The row of each position of the task in buffers of all steps, [rows * MOST_STEPS, ...]."""
        return self.chains.row * MOST_STEPS + self.chains.number


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the parts of a block begin, in words after its header. The parts, in their order:

    - for each state input a column of `rows` words: the addresses of the state
    - a column of `rows` words: the addresses of the lengths, which are in the next part
    - a column of `rows` words: the lengths
    - for each output that is h, two columns of rows * MOST_STEPS words: the targets, kept and fetched, of every step
    - for each output that is c, the same; if only c of the last steps is needed, two columns of `rows` words
    - for each state input a column of `rows` words: the addresses of the lanes
    """

    rows: int
    num_state: int
    num_h: int
    num_c: int
    every_c: bool

    @property
    def size(self) -> int:
        """Words of a column that has every step of every row."""
        return self.rows * MOST_STEPS

    @property
    def c_size(self) -> int:
        """Words of a column of targets of c."""
        return self.size if self.every_c else self.rows

    @property
    def length_at(self) -> int:
        """Where the addresses of the lengths begin."""
        return self.num_state * self.rows

    @property
    def length(self) -> int:
        """Where the lengths begin."""
        return self.length_at + self.rows

    @property
    def h(self) -> int:
        """Where the targets of h begin."""
        return self.length + self.rows

    @property
    def c(self) -> int:
        """Where the targets of c begin."""
        return self.h + 2 * self.num_h * self.size

    @property
    def lanes(self) -> int:
        """Where the addresses of the lanes begin."""
        return self.c + 2 * self.num_c * self.c_size

    @property
    def num_words(self) -> int:
        """Words of a block after its header."""
        return self.lanes + self.num_state * self.rows


@dataclass(frozen=True, slots=True)
class _TaskRecording:
    """A recorded launch for one number of rows. keeps: objects that must stay."""

    launch: Launch
    keeps: object


@final
class TaskProgram:
    """Runs tasks of one cell on one device in one launch each, if this is expected to be faster.

    sizes: numbers of rows that are recorded, ascending. px: [rows * MOST_STEPS, gates * hidden], to be filled with the
    inputs' share of the gates. note: why nothing is recorded; None if something is, or before this is known.
    """

    def __init__(self, place: Place, name: str, cell: Recurrence, sizes: Sequence[int]) -> None:
        self._place = place
        self._name = name
        self._cell = cell
        self._sizes = sizes
        weights, device = cell.weights, place.device
        self._kernels = {size: device.recurrent(weights, size, MOST_STEPS) for size in sizes}
        self._recordings: dict[tuple[int, bool], _TaskRecording] = {}
        self.note: str | None = None
        most, dtype = max((size for size in sizes if self._kernels[size]), default=0), weights.w_hh.dtype
        self.px = device.zeros((most * MOST_STEPS, weights.gates * weights.hidden), dtype)
        self._h_of_steps = device.zeros((most * MOST_STEPS, weights.hidden), dtype)
        self._length = device.zeros((most,), torch.int32)
        self._state = [device.zeros((most, weights.hidden), dtype) for _ in cell.state]  # by part
        self._c: tuple[Tensor, Tensor] | None = None  # c of the last steps, and of all
        if weights.cell == "lstm":  # float32 within a task, the cell's dtype between tasks
            wide = device.zeros(self._h_of_steps.shape, torch.float32)
            narrow = dtype != torch.float32
            self._c = device.zeros((most, weights.hidden), torch.float32) if narrow else self._state[C], wide
            self._c_of_steps = device.zeros(self._h_of_steps.shape, dtype) if narrow else wide

    @property
    def is_used(self) -> bool:
        """Whether there are tasks that may run in one launch."""
        return self.note is None and any(self._kernels.values())

    def prepare(self) -> None:
        """Record all sizes that may be used, so that no request waits for a recording."""
        for size, kernel in self._kernels.items():
            for every_c in (False, True)[: 1 + (C in self._cell.outputs)]:
                if kernel is not None and self.note is None:
                    self._recording(size, every_c)

    def plan(self, task: RunTask) -> PlannedTask | None:
        """Return how a task of chains runs in one launch; None if its steps should run one by one.

        They should if this is expected to be faster, if the task branches (see chains_of), or if nothing is recorded.
        """
        if self.note is not None or not self._pays(task.largest, task.num_steps):
            return None
        chains = chains_of(task)
        if chains is None or not self._pays(len(chains.length), task.num_steps):
            return None
        every_c = C in self._cell.outputs and not self._keeps_last(chains, task)
        planned = PlannedTask(chains, self._sizes[bisect_left(self._sizes, len(chains.length))], every_c)
        return planned if self._recording(planned.rows, every_c) is not None else None

    def num_words(self, planned: PlannedTask) -> int:
        """Return the words of a block's body. A row that is not filled in has zero state and no steps."""
        return self._layout(planned.rows, planned.every_c).num_words

    def fill(
        self,
        blocks: Blocks,
        launch: int,
        planned: PlannedTask,
        task: RunTask,
        tables: DeviceTables,
        fetches: Sequence[Fetched],
    ) -> None:
        """Write the addresses of the chains' state, of the lanes it goes to, and of rows that are kept and fetched."""
        layout, chains, keep = self._layout(planned.rows, planned.every_c), planned.chains, task.keep
        lanes = () if task.lanes is None else task.lanes.tables
        words, rows, count, size = blocks.body_of(launch), planned.rows, len(chains.length), tables.row_bytes
        written = np.array((*lanes, *(() if keep is None else keep.tables)), np.int64)
        bases = tables.bases(self._place, int64s(chains.begin_tables.ravel()), written)
        begins = bases[chains.begin_tables] + chains.begin_rows * size[chains.begin_tables]
        for part, table in enumerate(lanes):
            words[part * rows :][:count] = begins[part]
            words[layout.lanes + part * rows :][:rows][chains.lane_row] = bases[table] + chains.lane * size[table]
        words[layout.length_at :][:count] = blocks.address(launch, layout.length) + 8 * np.arange(count)
        words[layout.length :][:count] = chains.length
        if keep is not None:
            positions = slice(None) if keep.positions is None else keep.positions
            for output, table in enumerate(keep.tables):
                places, column = self._column(words, planned, output, 0)
                column[places[positions]] = bases[table] + keep.rows * size[table]
        for fetch in fetches:
            places, column = self._column(words, planned, fetch.output, 1)
            column[places[fetch.positions]] = fetch.addresses(blocks)

    def recorded(self, planned: PlannedTask) -> Launch:
        """Return the recording of a planned task. When it runs, its block is in turn and its inputs are in `px`."""
        return self._recordings[planned.rows, planned.every_c].launch

    # --- inside ------------------------------------------------------------------------------------------------------

    def _pays(self, count: int, num_steps: int) -> bool:
        """Whether there is a kernel for `count` rows that is expected to be faster for so many steps."""
        at = bisect_left(self._sizes, count)
        kernel = self._kernels[self._sizes[at]] if at < len(self._sizes) else None
        return kernel is not None and kernel.least_steps <= num_steps <= MOST_STEPS

    def _keeps_last(self, chains: Chains, task: RunTask) -> bool:
        """Whether a task keeps and fetches c only of the last steps of its chains."""
        wanted: list[Ints | slice] = [each.positions for each in task.fetches if self._cell.outputs[each.output] == C]
        if task.keep is not None:
            wanted.append(slice(None) if task.keep.positions is None else task.keep.positions)
        return all(map(chains.is_last, wanted))

    def _layout(self, rows: int, every_c: bool) -> _Layout:
        outputs = self._cell.outputs
        return _Layout(rows, len(self._cell.state), outputs.count(H), outputs.count(C), every_c)

    def _column(self, words: Ints, planned: PlannedTask, output: int, kind: int) -> tuple[Ints, Ints]:
        """Return the places of a task's positions in a column of targets, and the column. kind: 0 kept, 1 fetched.

        words: of the block's body.
        """
        layout, part = self._layout(planned.rows, planned.every_c), self._cell.outputs[output]
        column = 2 * self._cell.outputs[:output].count(part) + kind
        if part == H:
            return planned.places, words[layout.h + column * layout.size :][: layout.size]
        places = planned.places if planned.every_c else planned.chains.row
        return places, words[layout.c + column * layout.c_size :][: layout.c_size]

    def _recording(self, rows: int, every_c: bool) -> _TaskRecording | None:
        if (rows, every_c) not in self._recordings:
            try:
                self._recordings[rows, every_c] = self._record(rows, every_c)
            except CannotRecordError as reason:
                self.note = f"tasks of cell {self._name!r} do not run at once: {reason}"
        return self._recordings.get((rows, every_c))

    def _record(self, rows: int, every_c: bool) -> _TaskRecording:
        device, layout, kernel = self._place.device, self._layout(rows, every_c), self._kernels[rows]
        assert kernel is not None
        call, narrowed = self._buffers(layout)
        steps = kernel.prepare(call)
        state = [self._state[part][:rows] for part in self._cell.state]
        c = narrowed[-1][1] if every_c and narrowed else call.c_steps if every_c else self._state[-1][:rows]
        entering, lanes = described(self._place, [*state, call.length]), described(self._place, state)
        h_columns = described(self._place, [call.y] * (2 * layout.num_h))
        c_columns = described(self._place, [c] * (2 * layout.num_c) if c is not None else [])
        where = self._place.where

        def work() -> None:
            device.move_rows(where, HEADER_WORDS, entering, rows, to_addresses=False)
            if narrowed:
                device.compute(lambda: (narrowed[0][0].copy_(narrowed[0][1]),))
            steps()
            if narrowed:
                device.compute(lambda: tuple(narrow.copy_(wide) for wide, narrow in narrowed))
            device.move_rows(where, HEADER_WORDS + layout.h, h_columns, layout.size, to_addresses=True)
            device.move_rows(where, HEADER_WORDS + layout.c, c_columns, layout.c_size, to_addresses=True)
            device.move_rows(where, HEADER_WORDS + layout.lanes, lanes, rows, to_addresses=True)
            device.signal(where)

        self._place.aim_at(device.zeros((HEADER_WORDS + layout.num_words,), torch.int64))
        return _TaskRecording(device.record(work), (entering, lanes, h_columns, c_columns, steps))

    def _buffers(self, layout: _Layout) -> tuple[CallBuffers, list[tuple[Tensor, Tensor]]]:
        """Return the kernel's buffers, and pairs of a float32 buffer and its copy in the cell's dtype.

        The pairs are c, and c of every step if needed. There are none if the cell has no c, or its dtype is float32.
        """
        rows, size = layout.rows, layout.size
        last, every = (None, None) if self._c is None else (self._c[0][:rows], self._c[1][:size])
        call = CallBuffers(
            self.px[:size],
            self._length[:rows],
            self._state[H][:rows],
            last,
            self._h_of_steps[:size],
            every if layout.every_c else None,
        )
        if last is None or last.dtype == self._state[C].dtype:
            return call, []
        narrowed = [(last, self._state[C][:rows])]
        if call.c_steps is not None:
            narrowed.append((call.c_steps, self._c_of_steps[:size]))
        return call, narrowed
