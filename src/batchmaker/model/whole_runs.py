"""The second forms of the cells of a registry, for whole runs: bound, proven equal to the steps, and chosen by time."""

from __future__ import annotations

from typing import Protocol, final

from batchmaker.compile.binding import BoundCell
from batchmaker.compile.export import example_rows, flat_module
from batchmaker.compile.row_trial import TrialRows
from batchmaker.compile.whole_run_trial import WholeLengths, WholeRun, measured, prove_same, said_of
from batchmaker.errors import ModelError, RowsError
from batchmaker.graph.spec import CellType, TypeId, ValueSpec
from batchmaker.graph.values import HostValues
from batchmaker.graph.whole_runs import CONCURRENCIES, WholeForm
from batchmaker.model.cell import Cell, copying, whole_run
from batchmaker.model.scope import Arguments


class Binds(Protocol):
    """What binds cells: the registry whose second forms these are."""

    bound: list[BoundCell]
    """By type."""

    def type_of(self, cell: Cell) -> CellType | None: ...

    def learn(
        self, cell: Cell, inputs: tuple[ValueSpec, ...], arguments: Arguments = (), prefix: str = ""
    ) -> CellType: ...

    def trial_rows(self, arguments: Arguments, inputs: tuple[ValueSpec, ...], cell: Cell) -> TrialRows: ...


@final
class WholeRuns:
    """Second forms by the type of the cell's runs. Who calls `make` holds the registry's lock.

    only_steps: why no run takes its cell's whole form; "" if it may.
    """

    def __init__(self, registry: Binds, only_steps: str) -> None:
        self._registry, self.only_steps = registry, only_steps
        self._forms: dict[tuple[Cell, TypeId], WholeForm | ModelError] = {}
        self._notes: dict[TypeId, dict[str, None]] = {}
        self._types: set[TypeId] = set()
        self.depend_on_concurrency = False

    def notes_of(self, type_id: TypeId) -> tuple[str, ...]:
        """Return from which length on runs of this type are one node, or why none is."""
        return tuple(self._notes.get(type_id, ()))

    def is_whole(self, type_id: TypeId) -> bool:
        """Whether the nodes of a type are whole runs."""
        return type_id in self._types

    def form_of(self, cell: Cell, cell_type: CellType) -> WholeForm | None:
        """Return the second form of these runs if it is known. Raises the error of a form that was refused."""
        form = self._forms.get((cell, cell_type.type_id))
        if isinstance(form, ModelError):
            raise form
        return form

    def make(
        self, cell: Cell, cell_type: CellType, arguments: Arguments, columns: int, prefix: str
    ) -> WholeForm | None:
        """Bind, prove and time the second form of these runs; None if none is to be used. See CellTypes.whole_form."""
        if self.only_steps:
            self._note(cell_type, f"whole= is not used: {self.only_steps}")
            return None
        try:
            form = self._forms[cell, cell_type.type_id] = self._made(cell, cell_type, arguments, columns, prefix)
        except ModelError as error:  # the same for every later run
            self._forms[cell, cell_type.type_id] = error
            raise
        return form

    def _made(self, cell: Cell, cell_type: CellType, arguments: Arguments, columns: int, prefix: str) -> WholeForm:
        registry, inputs = self._registry, cell_type.inputs
        steps, state = inputs[:columns], inputs[columns:]
        arguments = (*arguments, *[None] * (len(inputs) - len(arguments)))
        twin = whole_run(cell, columns)
        module = flat_module(twin.module)
        assert isinstance(module, WholeRun)
        trial = registry.trial_rows(arguments, inputs, cell)
        name = prefix + (cell.name or cell_type.name)
        prove_same(flat_module(cell.module_for(inputs)), module, inputs, trial, name)
        try:
            whole = registry.learn(twin, (*steps, *steps, *state), (*arguments[:columns], *arguments), prefix)
        except RowsError as error:
            raise RowsError(
                f"cell {name!r}: what whole= returns depends on rows after the number of a run's steps, or on the "
                "other runs of a batch. Only the first `number` rows of each are its own: leave the others out, as in "
                "torch.where(step < number[:, None], new, old)"
            ) from error
        copies = copying(steps)
        copy = registry.type_of(copies) or registry.learn(copies, steps, arguments[:columns], prefix)
        self._types.add(whole.type_id)
        if cell.whole_from is not None:
            lengths = WholeLengths(
                (cell.whole_from,) * len(CONCURRENCIES), f"as whole_from says, {said_of((cell.whole_from,))}"
            )
        else:
            split = registry.bound[cell_type.type_id].split(columns)
            lengths = measured(split, registry.bound[whole.type_id], cell.max_batch)
        self._note(cell_type, lengths.said)
        self.depend_on_concurrency |= len(set(lengths.least)) > 1
        return WholeForm(copy, whole, lengths.least, tuple(map(_zero, state)))

    def _note(self, cell_type: CellType, said: str) -> None:
        self._notes.setdefault(cell_type.type_id, {})[said] = None


def _zero(spec: ValueSpec) -> HostValues:
    return HostValues(example_rows((spec,), 1)[0], 1, spec)
