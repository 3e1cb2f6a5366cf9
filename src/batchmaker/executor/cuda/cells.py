"""The cells of one device: bound to it, as the programs that tasks run. Used by CudaExecutor."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from batchmaker.compile.binding import BoundCell
from batchmaker.compile.export import example_rows, row_bytes, torch_dtype
from batchmaker.compile.recurrent_cells import Recurrence
from batchmaker.compile.run_form import RunForm
from batchmaker.executor.cuda.at_once import TaskProgram
from batchmaker.executor.cuda.place import Place
from batchmaker.executor.cuda.program import TARGETS_OF_STEP, DeviceProgram
from batchmaker.executor.task_loop import HOISTED_SIZES, MAX_HOISTED_ROWS
from batchmaker.graph.spec import CellType, TypeId, ValueSpec

Bind = Callable[[TypeId, torch.device], BoundCell]

_KERNEL: Final = "one GPU kernel for all steps of a task"
_RECORDED: Final = "recorded GPU launch"
_IN_STREAM: Final = "GPU launches one by one"

_TARGETS_OF_HOISTED = 1
"""Number of targets of each output of the hoisted part: one buffer."""


@dataclass(slots=True)
class HoistedRows:
    """The hoisted values of one task, kept until the task's steps have read them.

    program: computes them. specs: one for each value. parts: [rows, *shape] for each value. Tasks run one after
    another, so all of them use the same memory.
    """

    program: DeviceProgram
    specs: tuple[ValueSpec, ...]
    parts: tuple[Tensor, ...] = ()

    def reserve(self, place: Place, num_rows: int) -> None:
        """Make room for `num_rows` rows. Steps submitted before still use the old memory, so it is held."""
        if self.parts and len(self.parts[0]) >= num_rows:
            return
        size = max(num_rows, 2 * len(self.parts[0]) if self.parts else 0)
        place.hold(self.parts)
        self.parts = tuple(place.device.zeros((size, *spec.shape), torch_dtype(spec.dtype)) for spec in self.specs)

    def launches(self, num_rows: int) -> list[tuple[DeviceProgram, int]]:
        """Return the program and its number of rows for each launch that computes so many rows."""
        most = MAX_HOISTED_ROWS
        return [(self.program, min(most, num_rows - first)) for first in range(0, num_rows, most)]

    def rows_at(self, part: int) -> tuple[int, int]:
        """Return the address of the first row of hoisted value number `part`, and the bytes of a row."""
        return self.parts[part].data_ptr(), row_bytes(self.specs[part])


@dataclass(frozen=True, slots=True)
class ChainForm:
    """The programs of a cell for chains: the hoisted part and the step.

    hoisted: None if the step reads the step inputs themselves, all of them and in their order.
    """

    hoisted: HoistedRows | None
    step: DeviceProgram


@dataclass(frozen=True, slots=True)
class TaskForm:
    """The programs of an LSTM or GRU cell for whole tasks of chains: the inputs' share of the gates, and all steps."""

    projected: HoistedRows
    program: TaskProgram


@final
class DeviceCells:
    """The programs of each cell type on one device. They are made at first use, or by `prepare`."""

    def __init__(self, place: Place, types: Sequence[CellType], bind: Bind) -> None:
        self._place = place
        self._types = types
        self._bind = bind
        self._bound: dict[TypeId, BoundCell] = {}
        self._nodes: dict[TypeId, DeviceProgram] = {}
        self._chains: dict[TypeId, ChainForm] = {}
        self._tasks: dict[TypeId, TaskForm | None] = {}

    @property
    def notes(self) -> list[str]:
        """For each cell that is not recorded, the reason."""
        chains = [form.step for form in self._chains.values()]
        chains += [form.hoisted.program for form in self._chains.values() if form.hoisted is not None]
        programs = [program.note for program in (*self._nodes.values(), *chains)]
        programs += [form.program.note for form in self._tasks.values() if form is not None]
        return sorted({note for note in programs if note is not None})

    def run_form(self, type_id: TypeId, num_step_inputs: int | None, ends: frozenset[str]) -> RunForm:
        """See TellsForms. Makes no program."""
        until = "on the host, after each step" if ends else ""
        chains = self._chains.get(type_id)
        program = self._nodes.get(type_id) if num_step_inputs is None else None if chains is None else chains.step
        if program is None:
            return RunForm(
                _RECORDED, "not recorded yet: at its first use, or at a start with an example request", until
            )
        form = _RECORDED if program.note is None else _IN_STREAM
        if num_step_inputs is None:
            return RunForm(form, program.note or "", until)
        whole = self._tasks.get(type_id)
        if whole is not None and whole.program.is_used:
            return RunForm(_KERNEL, f"where it is expected to be faster, else a {form} for each step", until)
        why = [program.note, None if whole is None else whole.program.note]
        said = [note for note in why if note is not None]
        return RunForm(
            form, "; ".join(said) or "no kernel for whole tasks: not one LSTM or GRU, or too wide for it", until
        )

    def bound(self, type_id: TypeId) -> BoundCell:
        """Return the cell with its weights on this device."""
        form_of = self._types[type_id].form_of
        if form_of is not None:
            return self.bound(form_of)
        if type_id not in self._bound:
            self._bound[type_id] = self._bind(type_id, self._place.device.torch_device)
        return self._bound[type_id]

    def nodes(self, type_id: TypeId) -> DeviceProgram:
        """Return the cell's program for single nodes."""
        if type_id not in self._nodes:
            cell, sizes = self.bound(type_id), self._types[type_id].batch_sizes
            self._nodes[type_id] = DeviceProgram(
                self._place, cell.name, _called(cell), cell.inputs, cell.outputs, TARGETS_OF_STEP, sizes
            )
        return self._nodes[type_id]

    def chains(self, type_id: TypeId, num_step_inputs: int) -> ChainForm:
        """Return the cell's programs for chains, which run step by step."""
        if type_id not in self._chains:
            cell, sizes = self.bound(type_id).split(num_step_inputs), self._types[type_id].batch_sizes
            hoisted = None
            if not _hands_on(cell, num_step_inputs):
                step_inputs = cell.inputs[:num_step_inputs]
                program = DeviceProgram(
                    self._place,
                    cell.name,
                    _hoisted(cell),
                    step_inputs,
                    cell.hoisted,
                    _TARGETS_OF_HOISTED,
                    HOISTED_SIZES,
                )
                hoisted = HoistedRows(program, cell.hoisted)
            specs = (*cell.hoisted, *cell.inputs[num_step_inputs:])
            step = DeviceProgram(self._place, cell.name, _stepped(cell), specs, cell.outputs, TARGETS_OF_STEP, sizes)
            self._chains[type_id] = ChainForm(hoisted, step)
        return self._chains[type_id]

    def tasks(self, type_id: TypeId, num_step_inputs: int) -> TaskForm | None:
        """Return the cell's programs for whole tasks of chains; None if its steps run one by one."""
        if type_id not in self._tasks:
            cell = self.bound(type_id)
            recurrence = cell.recurrence(num_step_inputs)
            self._tasks[type_id] = (
                None if recurrence is None else self._task_form(type_id, cell, recurrence, num_step_inputs)
            )
        return self._tasks[type_id]

    def _task_form(
        self, type_id: TypeId, cell: BoundCell, recurrence: Recurrence, num_step_inputs: int
    ) -> TaskForm | None:
        most = 2 * self._types[type_id].max_batch  # in a task, new chains may follow chains that end
        sizes = [1]
        while sizes[-1] < most:
            sizes.append(4 * sizes[-1])  # few sizes: each needs a kernel, and unused rows cost little
        program = TaskProgram(self._place, cell.name, recurrence, sizes)
        if not program.is_used:
            return None
        weights = recurrence.weights
        spec = ValueSpec((weights.gates * weights.hidden,), cell.outputs[0].dtype)
        project = DeviceProgram(
            self._place,
            cell.name,
            lambda *inputs: recurrence.project(*inputs),
            cell.inputs[:num_step_inputs],
            (spec,),
            _TARGETS_OF_HOISTED,
            HOISTED_SIZES,
        )
        return TaskForm(HoistedRows(project, (spec,), (program.px,)), program)

    def prepare(self, type_id: TypeId, num_step_inputs: int | None) -> None:
        """Record a cell at every supported size. num_step_inputs: for chains; None for single nodes."""
        sizes = self._types[type_id].batch_sizes
        if num_step_inputs is None:
            self.nodes(type_id).prepare(sizes)
            return
        form = self.chains(type_id, num_step_inputs)
        form.step.prepare(sizes)
        if form.hoisted is not None:
            form.hoisted.program.prepare(HOISTED_SIZES)
        whole = self.tasks(type_id, num_step_inputs)
        if whole is not None:
            whole.program.prepare()
            whole.projected.program.prepare(HOISTED_SIZES)


def _called(cell: BoundCell) -> Callable[..., tuple[Tensor, ...]]:
    return lambda *inputs: cell.call(inputs)


def _hoisted(cell: BoundCell) -> Callable[..., tuple[Tensor, ...]]:
    return lambda *step_inputs: cell.hoist(step_inputs)


def _stepped(cell: BoundCell) -> Callable[..., tuple[Tensor, ...]]:
    size = len(cell.hoisted)
    return lambda *inputs: cell.step(inputs[:size], inputs[size:])


def _hands_on(cell: BoundCell, num_step_inputs: int) -> bool:
    """Whether the step of a split cell reads its step inputs as they are: all of them, in their order."""
    if cell.num_hoisted_calls:
        return False
    examples = example_rows(cell.inputs[:num_step_inputs], 1)
    made = cell.hoist(examples)
    return len(made) == len(examples) and all(map(operator.is_, made, examples))
