"""Cell types of an engine: cells bound at first use, equal cells sharing one type."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, final

import torch
from torch import Tensor, nn

from batchmaker.compile.binding import BoundCell, Planner, bind
from batchmaker.compile.declaration import Declared
from batchmaker.compile.export import example_rows
from batchmaker.compile.programs import AnyProgram
from batchmaker.compile.row_trial import TrialRows
from batchmaker.errors import ModelError, RowsError, ShapeError
from batchmaker.graph.argument_errors import misfit
from batchmaker.graph.spec import CellType, TypeId, ValueSpec
from batchmaker.graph.values import HostValues, Value, ValueSequence
from batchmaker.graph.whole_runs import WholeForm
from batchmaker.model.cell import Cell
from batchmaker.model.floats import Floats
from batchmaker.model.initial_state import initial_state
from batchmaker.model.scope import Arguments, CellTypes
from batchmaker.model.weights import WatchedWeights
from batchmaker.model.whole_runs import WholeRuns

_BINDING = threading.RLock()
"""One cell is bound at a time: torch.export puts stand-ins into the module that it traces, and models may share
modules. Cells that are bound are found without it."""


def _after_fork() -> None:
    global _BINDING
    _BINDING = threading.RLock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)

_MAX_REFUSED: Final = 64
"""A cell that has refused so many shapes is not tried with others."""


Signature: TypeAlias = tuple[tuple[tuple[int, ...], str], ...]
"""Shapes and dtypes of the rows of all inputs."""


@dataclass(frozen=True, slots=True)
class _Shapes:
    """The types of one cell for later shapes and dtypes of its inputs, and those that it refuses."""

    types: dict[Signature, CellType]
    refused: set[Signature]


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Compute with so many threads; None: with those that there are."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None:
            torch.set_num_threads(before)


def _planner() -> Planner:
    """Return the planner of cells. OptionError if none is installed."""
    from batchmaker.extensions import extension  # few engines need it

    planner: Planner = extension("batchmaker.planners", "cell", "the planner of `bm.Cell(..., optimize=True)`")
    return planner


@final
class CellRegistry:
    """Types and bound modules by type id. Grows as cells are used for the first time; nothing is ever removed.

    Any thread may call its methods. on_new: called with each new type, before any graph that uses it exists.
    deterministic_for: number of compute threads with which a row's bits are to depend on nothing else in its batch;
    None if they may. only_steps: why no run takes its cell's whole form; "" if it may. watches_weights: `weights` are
    kept: cells run here, not on copies of all their weights.
    """

    def __init__(
        self,
        on_new: Callable[[CellType], None] | None = None,
        *,
        fold_bytes: int = 1 << 30,
        deterministic_for: int | None = None,
        only_steps: str = "outside an engine, runs are steps",
        watches_weights: bool = False,
    ) -> None:
        self._types: dict[Cell, CellType] = {}
        self._shapes: dict[Cell, _Shapes] = {}
        self._on_new = on_new
        self._fold_bytes = fold_bytes
        self._deterministic_for = deterministic_for
        self._whole_runs = WholeRuns(self, only_steps)
        self.binding = ""  # the name of the cell that is bound now
        self.types: list[CellType] = []
        self.bound: list[BoundCell] = []
        self.modules: list[nn.Module] = []
        self.weights = WatchedWeights()
        self._watches_weights = watches_weights
        self._cells: list[Cell] = []
        self._trials: list[TrialRows] = []
        self.num_step_inputs: dict[TypeId, int] = {}
        self._forms: dict[tuple[TypeId, int], CellType] = {}
        self.ends: dict[TypeId, dict[str, None]] = {}  # at what its chains end, in words
        self._apart: dict[TypeId, tuple[str, ...]] = {}
        self._mixing: dict[tuple[Cell, tuple[object, ...]], str] = {}  # cells refused for their rows, and why

    def type_of(self, cell: Cell) -> CellType | None:
        """Return the type of a cell that has been used before."""
        return self._types.get(cell)

    @property
    def notes(self) -> dict[str, tuple[str, ...]]:
        """What was done to make each cell fast on the CPU, or why nothing was done, by the names of the cell types.

        Equal cells share a type, under the name of the first. Cells that are separate because of an option alone say
        so. Cells that were not used yet are missing. In which form each runs, `Engine.explain` says.
        """
        return {cell_type.name: self.notes_of(cell_type.type_id) for cell_type in self.types}

    def notes_of(self, type_id: TypeId) -> tuple[str, ...]:
        """Return the notes of one type; see `notes`."""
        bound, count = self.bound[type_id], self.num_step_inputs.get(type_id)
        notes = bound.notes if count is None else bound.split(count).notes
        return (*notes, *self._apart.get(type_id, ()), *self._whole_runs.notes_of(type_id))

    def prefixed(self, prefix: str) -> CellTypes[Cell]:
        """Return this registry for one of several models. The names of its cell types begin with `prefix`."""
        return _Prefixed(self, prefix)

    def learn(self, cell: Cell, inputs: tuple[ValueSpec, ...], arguments: Arguments = (), prefix: str = "") -> CellType:
        """Bind a cell to its inputs' specs and give it a type: the type of an equal cell if there is one.

        arguments: the arguments of the call, with whose values the cell is tried.
        """
        name = prefix + (cell.name or type(cell.module).__name__)
        with _BINDING:
            cell_type = self._types.get(cell)  # another thread may have been faster
            if cell_type is None:
                cell_type = self._types[cell] = self._learned(cell, inputs, arguments, name)
                return cell_type
        for port, (came, wanted) in enumerate(zip(inputs, cell_type.inputs, strict=False)):
            if not came.is_like(wanted):
                return self.other(cell, inputs, misfit(cell_type, port, came), arguments, prefix)
        return cell_type

    def types_of(self, cell: Cell) -> list[CellType]:
        """Return the types of a cell in order, one for each shape of its inputs so far."""
        others = self._shapes[cell].types.values() if cell in self._shapes else ()
        return [self._types[cell], *others] if cell in self._types else []

    def other(
        self, cell: Cell, inputs: tuple[ValueSpec, ...], error: ShapeError, arguments: Arguments = (), prefix: str = ""
    ) -> CellType:
        """Return the type of a cell for other shapes or dtypes than at first. They are bound now if they are new.

        Raises `error` if the cell does not take them, or if numbers of dimensions differ from the first use; a similar
        error beyond the cell's `max_shapes`.
        """
        first = self._types[cell].inputs
        alike = [len(spec.shape) for spec in inputs] == [len(spec.shape) for spec in first]
        if cell.declared is not None or not alike:
            raise error
        shapes = self._shapes.setdefault(cell, _Shapes({}, set()))
        key = tuple([spec.row_signature for spec in inputs])
        cell_type = shapes.types.get(key)
        if cell_type is not None:
            return cell_type
        with _BINDING:
            return (
                shapes.types[key]
                if key in shapes.types
                else self._other(cell, inputs, error, arguments, prefix, shapes)
            )

    def _other(
        self,
        cell: Cell,
        inputs: tuple[ValueSpec, ...],
        error: ShapeError,
        arguments: Arguments,
        prefix: str,
        shapes: _Shapes,
    ) -> CellType:
        first, key = self._types[cell].inputs, tuple([spec.row_signature for spec in inputs])
        if cell.programs is not None and not cell.programs.have(inputs):
            raise type(error)(
                f"{error}; cell {cell.name!r} was saved for {cell.programs}: save it with examples of others"
            )
        if key in shapes.refused or len(shapes.refused) >= _MAX_REFUSED:
            raise error
        name = prefix + (cell.name or type(cell.module).__name__)
        if len(shapes.types) + 1 >= cell.max_shapes:
            sizes = " ".join(str(list(spec.shape)) for spec in first)
            raise type(error)(
                f"{error}; cell {name!r} has been called with {cell.max_shapes} shapes of its inputs, {sizes} at "
                "first, and each is a type of its own, compiled and batched by itself. Pad inputs to a few sizes, "
                "such as the next multiple of 32, or allow more with bm.Cell(..., max_shapes=)"
            )
        try:
            same = [one.dtype == other.dtype for one, other in zip(inputs, first, strict=True)]
            shown = [str(list(spec.shape)) if like else str(spec) for spec, like in zip(inputs, same, strict=True)]
            known_as = f"{name} {' '.join(shown)}"
            cell_type = shapes.types[key] = self._learned(cell, inputs, arguments, known_as)
        except RowsError:
            raise
        except ModelError:
            shapes.refused.add(key)
            raise error from None
        return cell_type

    def _learned(self, cell: Cell, inputs: tuple[ValueSpec, ...], arguments: Arguments, name: str) -> CellType:
        """Bind a cell and return its type, a new one or that of an equal cell.

        A type has one set of batch sizes, one priority, and one set of host outputs. So cells that differ in one of
        these have separate types, and do not run in one batch.
        """
        try:
            source, declared = cell.source(inputs), cell.declared_for(inputs)
        except ShapeError as error:
            raise ShapeError(f"cell {name!r}: {error}") from None
        if declared is not None:
            _check_side(name, "input", inputs, declared.inputs)
        form = cell, tuple([spec.row_signature for spec in inputs])
        if form in self._mixing:
            raise RowsError(self._mixing[form])
        self.binding = name
        try:
            bound, trial = self._bound(cell, source, inputs, arguments, name)
        except RowsError as error:  # its trial takes long, and comes out the same for the next request
            if len(self._mixing) < _MAX_REFUSED:
                self._mixing[form] = str(error)
            raise
        finally:
            self.binding = ""
        if declared is not None:
            _check_declared(declared, bound)
        for output in cell.host_outputs:
            if not 0 <= output < len(bound.outputs):
                raise ModelError(
                    f"cell {name!r}: host_outputs names output {output}, the cell has {len(bound.outputs)}"
                )
        equal = [
            twin
            for twin, other in zip(self.types, self.bound, strict=True)
            if other.identity == bound.identity and twin.form_of is None
        ]
        for twin in equal:
            if not self._differences(twin, cell):
                return twin
        type_id = TypeId(len(self.types))
        if equal:
            self._apart[type_id] = tuple(
                f"not batched with {twin.name!r}, which is the same cell but for its {self._differences(twin, cell)}"
                for twin in equal
            )
        cell_type = CellType(
            type_id,
            name,
            bound.inputs,
            bound.outputs,
            bound.batch_sizes or cell.batch_sizes,
            cell.priority,
            cell.host_outputs,
            memories=cell.memory_outputs,
            places=cell.places,
        )
        self.bound.append(bound)
        self._trials.append(trial)
        self.modules.append(cell.module_for(inputs))
        if self._watches_weights and bound.is_traced:
            self.weights.add(name, self.modules[-1])
        self._cells.append(cell)
        self._add(cell_type)
        return cell_type

    def _add(self, cell_type: CellType) -> None:
        self.types.append(cell_type)  # last: other threads look here for what there is
        if self._on_new is not None:
            self._on_new(cell_type)

    def _differences(self, cell_type: CellType, cell: Cell) -> str:
        """Return the options that separate a cell from an otherwise equal one with a type, "" if there are none."""
        options = {
            "batch sizes": (self._cells[cell_type.type_id].batch_sizes, cell.batch_sizes),
            "priority": (cell_type.priority, cell.priority),
            "host outputs": (cell_type.host_outputs, cell.host_outputs),
        }
        return " and ".join(name for name, (one, other) in options.items() if one != other)

    def _bound(
        self, cell: Cell, source: nn.Module | AnyProgram, inputs: tuple[ValueSpec, ...], arguments: Arguments, name: str
    ) -> tuple[BoundCell, TrialRows]:
        """Bind a cell, and return the rows that it was tried with.

        If it refuses integers, it may want floats. If it refuses the real values, but takes others, they are the fault
        of the request, which fails when it runs. Raises the error of the real values otherwise.
        """
        planner = _planner() if cell.optimize else None
        real, made_up = (self.trial_rows(some, inputs, cell) for some in (arguments, ()))
        ports = [port for port, argument in enumerate(arguments) if isinstance(argument, HostValues)]
        floats = None if cell.memories else Floats(cell.module, cell.float_dtype, real)
        wanted = inputs if floats is None else floats.annotated(inputs, ports)

        def bound(wanted: tuple[ValueSpec, ...], trial: TrialRows) -> tuple[BoundCell, TrialRows]:
            """Bind the cell for these inputs, and try it with these rows. ModelError if it refuses them."""
            with _threads(self._deterministic_for):
                made = bind(
                    source,
                    wanted,
                    name=name,
                    fold_bytes=self._fold_bytes,
                    planner=planner,
                    trial=trial,
                    deterministic=self._deterministic_for is not None,
                    memories=cell.memory_outputs,
                )
            return made, trial

        try:
            return bound(wanted, real)
        except RowsError:
            raise
        except ModelError as error:
            if None in real.rows:
                with suppress(ModelError):  # the module may divide by an integer of which nothing is known
                    return bound(wanted, replace(real, integer=1))
            declared = floats is None or cell.declared_for(inputs) is not None
            floating = None if declared or floats is None else floats.needed(inputs, ports)
            if floating is not None:
                return bound(floating, real)
            try:
                return bound(wanted, made_up)
            except RowsError:
                raise
            except ModelError:
                raise error from error.__cause__

    def bind_on(self, type_id: TypeId, device: torch.device) -> BoundCell:
        """Return a cell type's module bound for another device, with its own copy of the weights."""
        cell, cell_type = self._cells[type_id], self.types[type_id]
        with _BINDING:
            return bind(
                cell.source(cell_type.inputs),
                cell_type.inputs,
                name=cell_type.name,
                fold_bytes=self._fold_bytes,
                device=device,
                trial=self._trials[type_id],
                memories=cell.memory_outputs,
            )

    def _row(self, argument: Value | ValueSequence | HostValues | None, spec: ValueSpec) -> Tensor | None:
        """Return a real value for an input, [1, *shape]; None if nothing is known of it.

        For a value that a cell computes, it is what the cell gave in its own trial.
        """
        if argument is None:
            return example_rows((spec,), 1)[0]
        if isinstance(argument, HostValues):
            return torch.as_tensor(argument.values[:1])
        type_id = argument.of.type_id
        return None if type_id is None else self.bound[type_id].sample[argument.of.index]

    def in_runs(self, cell: CellType, num_step_inputs: int) -> CellType:
        """Return the type for chains of a cell with so many inputs per step: the cell's own for the first such number.

        The others have types of their own, with the same weights. ModelError if the cell does not return the state that
        such a chain feeds it.
        """
        type_id = cell.type_id
        if self.num_step_inputs.get(type_id) == num_step_inputs:
            return cell
        with _BINDING:
            self.bound[type_id].split(num_step_inputs)
            if self.num_step_inputs.setdefault(type_id, num_step_inputs) == num_step_inputs:
                return cell
            form = self._forms.get((type_id, num_step_inputs))
            if form is None:
                form = self._forms[type_id, num_step_inputs] = self._in_form(cell, num_step_inputs)
            return form

    def _in_form(self, cell: CellType, num_step_inputs: int) -> CellType:
        form = cell.in_form(TypeId(len(self.types)), num_step_inputs)
        self.num_step_inputs[form.type_id] = num_step_inputs
        self.bound.append(self.bound[cell.type_id])
        self._trials.append(self._trials[cell.type_id])
        self.modules.append(self.modules[cell.type_id])
        self._cells.append(self._cells[cell.type_id])
        self._add(form)
        return form

    def zero_state(self, cell: Cell, step_inputs: tuple[ValueSpec, ...]) -> tuple[ValueSpec, ...]:
        """Return the specs of a chain's initial state when the unfold function gives none."""
        return initial_state(cell, step_inputs)

    def whole_form(
        self, cell: Cell, cell_type: CellType, arguments: Arguments, num_step_inputs: int, prefix: str = ""
    ) -> WholeForm | None:
        """Return the second form of a cell's runs, if it is to be used. See CellTypes."""
        form = self._whole_runs.form_of(cell, cell_type)
        if form is None:
            with _BINDING:
                form = self._whole_runs.form_of(cell, cell_type)
                form = form or self._whole_runs.make(cell, cell_type, arguments, num_step_inputs, prefix)
        return form

    def trial_rows(self, arguments: Arguments, inputs: tuple[ValueSpec, ...], cell: Cell) -> TrialRows:
        """Return the rows that a cell is tried with: the real ones of these arguments, as far as they are known."""
        rows = tuple([self._row(argument, spec) for argument, spec in zip(arguments, inputs, strict=False)])
        return TrialRows(rows, cell.batch_sizes, cell.independent_rows)

    def keep_steps(self, why: str) -> None:
        """Let no run take its cell's whole form, for this reason."""
        self._whole_runs.only_steps = why

    @property
    def forms_depend_on_concurrency(self) -> bool:
        """Whether the form of some runs depends on how many requests are in flight."""
        return self._whole_runs.depend_on_concurrency

    def is_whole(self, type_id: TypeId) -> bool:
        """Whether the nodes of a type are whole runs."""
        return self._whole_runs.is_whole(type_id)


@final
class _Prefixed:
    """The registry as seen by the cells of one of several models."""

    def __init__(self, registry: CellRegistry, prefix: str) -> None:
        self._registry = registry
        self._prefix = prefix
        self.type_of = registry.type_of
        self.in_runs = registry.in_runs
        self.zero_state = registry.zero_state

    def learn(self, cell: Cell, inputs: tuple[ValueSpec, ...], arguments: Arguments = ()) -> CellType:
        """As in the registry, under a name with the model's prefix."""
        return self._registry.learn(cell, inputs, arguments, self._prefix)

    def other(
        self, cell: Cell, inputs: tuple[ValueSpec, ...], error: ShapeError, arguments: Arguments = ()
    ) -> CellType:
        """As in the registry, under a name with the model's prefix."""
        return self._registry.other(cell, inputs, error, arguments, self._prefix)

    def whole_form(
        self, cell: Cell, cell_type: CellType, arguments: Arguments, num_step_inputs: int
    ) -> WholeForm | None:
        """As in the registry, under a name with the model's prefix."""
        return self._registry.whole_form(cell, cell_type, arguments, num_step_inputs, self._prefix)


def _check_declared(declared: Declared, bound: BoundCell) -> None:
    """ShapeError unless a cell was bound to exactly the rows that it declares."""
    _check_side(bound.name, "output", bound.outputs, declared.outputs)
    for index, (got, wanted) in enumerate(zip(bound.inputs, declared.inputs, strict=True)):
        if wanted.num_tokens not in (None, got.num_tokens):
            raise ShapeError(
                f"cell {bound.name!r}, input {index}: takes {got.num_tokens} tokens, declared for {wanted.num_tokens}"
            )


def _check_side(name: str, kind: str, specs: tuple[ValueSpec, ...], declared: tuple[ValueSpec, ...]) -> None:
    """ShapeError unless the rows are the declared ones."""
    if len(specs) != len(declared):
        raise ShapeError(f"cell {name!r}: got {len(specs)} {kind}s, expected {len(declared)}, as the cell declares")
    for index, (got, wanted) in enumerate(zip(specs, declared, strict=True)):
        if got.row_signature != wanted.row_signature:
            raise ShapeError(
                f"cell {name!r}, {kind} {index}: got rows of {got}, expected {wanted}, as the cell declares. "
                "Match the shape and dtype."
            )
