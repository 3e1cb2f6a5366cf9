"""Cell types of an engine: cells bound at first use, equal cells sharing one type."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

import torch
from torch import nn

from batchmaker.cells.binding import BoundCell, bind
from batchmaker.cells.cell import Cell, CellTypes
from batchmaker.cells.state import zero_state_specs
from batchmaker.errors import ModelError, ShapeError
from batchmaker.graph.spec import CellType, TypeId, ValueSpec

_TRACING = threading.Lock()
"""torch.export puts stand-ins into the module that it traces: one at a time in a process, for models may share one."""


@final
class CellRegistry:
    """Types and bound modules by type id. Grows as cells are used for the first time; nothing is ever removed.

    on_new: called with each new type, before any graph that uses it exists.
    """

    def __init__(self, on_new: Callable[[CellType], None] | None = None, *, fold_bytes: int = 1 << 30) -> None:
        self._types: dict[Cell, CellType] = {}
        self._on_new = on_new
        self._fold_bytes = fold_bytes
        self.types: list[CellType] = []
        self.bound: list[BoundCell] = []
        self.modules: list[nn.Module] = []
        self._cells: list[Cell] = []
        self.num_sequence_inputs: dict[TypeId, int] = {}
        self._apart: dict[TypeId, tuple[str, ...]] = {}

    def known(self, cell: Cell) -> CellType | None:
        """Return the type of a cell that has been used before."""
        return self._types.get(cell)

    @property
    def notes(self) -> dict[str, tuple[str, ...]]:
        """What was done to make each cell fast on the CPU, or why nothing was, by the names of the cell types.

        Cells that are equal share a type, under the name of the first; those kept apart by an option alone say so.
        Cells that were not used yet are missing.
        """
        found = {}
        for cell_type, bound in zip(self.types, self.bound, strict=False):  # both may be growing
            count = self.num_sequence_inputs.get(cell_type.type_id)
            notes = bound.notes if count is None else bound.split(count).notes
            found[cell_type.name] = (*notes, *self._apart.get(cell_type.type_id, ()))
        return found

    def prefixed(self, prefix: str) -> CellTypes:
        """Return this registry for one of several models: the names of its cell types begin with `prefix`."""
        return _Prefixed(self, prefix)

    def learn(self, cell: Cell, inputs: tuple[ValueSpec, ...], prefix: str = "") -> CellType:
        """Bind a cell to its inputs' specs and give it a type, that of an equal cell if there is one.

        A type has one set of batch sizes and one priority, which policies go by, and one set of host outputs, by which
        loops stop. So cells that differ in one of these have types of their own, and do not run in one batch.
        """
        name = prefix + (cell.name or type(cell.module).__name__)
        if cell.declared is not None:
            _check_side(name, "input", inputs, cell.declared.inputs)
        with _TRACING:
            bound = bind(
                cell.program or cell.module, inputs, name=name, fold_bytes=self._fold_bytes, optimize=cell.optimize
            )
        _check_declared(cell, bound)
        for output in cell.host_outputs:
            if not 0 <= output < len(bound.outputs):
                raise ModelError(
                    f"cell {name!r}: host_outputs names output {output}, the cell has {len(bound.outputs)}"
                )
        equal = [t for t, other in zip(self.types, self.bound, strict=True) if other.identity == bound.identity]
        for known in equal:
            if not _differences(known, cell):
                self._types[cell] = known
                return known
        type_id = TypeId(len(self.types))
        if equal:
            self._apart[type_id] = tuple(
                f"not batched with {known.name!r}, which is the same cell but for its {_differences(known, cell)}"
                for known in equal
            )
        cell_type = CellType(
            type_id,
            name,
            bound.inputs,
            bound.outputs,
            cell.batch_sizes,
            cell.priority,
            cell.host_outputs,
        )
        self.types.append(cell_type)
        self.bound.append(bound)
        self.modules.append(cell.module)
        self._cells.append(cell)
        self._types[cell] = cell_type
        if self._on_new is not None:
            self._on_new(cell_type)
        return cell_type

    def bind_on(self, type_id: TypeId, device: torch.device) -> BoundCell:
        """Return a cell type's module bound for another device, with weights of its own there."""
        cell, cell_type = self._cells[type_id], self.types[type_id]
        with _TRACING:
            return bind(
                cell.program or cell.module,
                cell_type.inputs,
                name=cell_type.name,
                fold_bytes=self._fold_bytes,
                device=device,
            )

    def use_in_runs(self, cell: CellType, num_sequence_inputs: int) -> None:
        """Note that chains of this cell take so many inputs per step; ModelError if others take another number."""
        known = self.num_sequence_inputs.get(cell.type_id)
        if known == num_sequence_inputs:
            return
        if known is not None:
            raise ModelError(
                f"cell {cell.name!r} is run with {num_sequence_inputs} inputs per step here and {known} elsewhere; "
                "wrap a copy of the module in a second bm.Cell for the other use"
            )
        self.bound[cell.type_id].split(num_sequence_inputs)
        self.num_sequence_inputs[cell.type_id] = num_sequence_inputs

    def zero_state(self, cell: Cell, sequence: tuple[ValueSpec, ...]) -> tuple[ValueSpec, ...]:
        """Return the specs of a chain's initial state where the unfold function gives none."""
        if cell.declared is not None:
            return cell.declared.inputs[len(sequence) :]
        if cell.state is not None:
            return cell.state
        return zero_state_specs(cell.module, sequence)


@final
class _Prefixed:
    """A registry as the cells of one of several models see it."""

    def __init__(self, registry: CellRegistry, prefix: str) -> None:
        self._registry = registry
        self._prefix = prefix
        self.known = registry.known
        self.use_in_runs = registry.use_in_runs
        self.zero_state = registry.zero_state

    def learn(self, cell: Cell, inputs: tuple[ValueSpec, ...]) -> CellType:
        """As the registry's, with a name of the model's own."""
        return self._registry.learn(cell, inputs, self._prefix)


def _differences(known: CellType, cell: Cell) -> str:
    """Return the options by which an otherwise equal cell is of another type, "" if there are none."""
    options = {
        "batch sizes": (known.batch_sizes, cell.batch_sizes),
        "priority": (known.priority, cell.priority),
        "host outputs": (known.host_outputs, cell.host_outputs),
    }
    return " and ".join(name for name, (one, other) in options.items() if one != other)


def _check_declared(cell: Cell, bound: BoundCell) -> None:
    """ShapeError unless a cell that declares its rows was bound to just these."""
    if cell.declared is None:
        return
    _check_side(bound.name, "output", bound.outputs, cell.declared.outputs)
    for index, (got, wanted) in enumerate(zip(bound.inputs, cell.declared.inputs, strict=True)):
        if wanted.num_tokens not in (None, got.num_tokens):
            raise ShapeError(
                f"cell {bound.name!r}, input {index}: takes {got.num_tokens} tokens, declared for {wanted.num_tokens}"
            )


def _check_side(name: str, kind: str, found: tuple[ValueSpec, ...], declared: tuple[ValueSpec, ...]) -> None:
    """ShapeError unless rows are those that a cell declares."""
    if len(found) != len(declared):
        raise ShapeError(f"cell {name!r}: got {len(found)} {kind}s, expected {len(declared)}, as the cell declares")
    for index, (got, wanted) in enumerate(zip(found, declared, strict=True)):
        if got.row_signature != wanted.row_signature:
            raise ShapeError(
                f"cell {name!r}, {kind} {index}: got rows of {got}, expected {wanted}, as the cell declares. "
                "Match the shape and dtype."
            )
