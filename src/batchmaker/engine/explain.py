"""What an engine does with each cell, and why with some of them nothing faster. `Engine.explain` makes it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from batchmaker.compile.run_form import RunForm
from batchmaker.engine.cell_driver import CellDriver
from batchmaker.engine.driver import Driver, OnDevice
from batchmaker.executor.base import RunCounts, TellsForms
from batchmaker.graph.spec import CellType
from batchmaker.model.registry import CellRegistry

_WIDTH: Final = 100
_UNKNOWN: Final = RunForm("not told by this executor")


@final
@dataclass(frozen=True, slots=True)
class ExplainedCell:
    """How one cell type runs.

    - cell: its name. used: in chains or loops, as single nodes, or as nodes that are whole runs.
    - form: `compiled loop`, `state loop` and `node loop` (all steps of a task in one call), `optimised program`, `torch
      module as it is`; or what runs on GPUs. why: no faster form, or where it is used; "" if it is the fastest.
    - until: whether loops that end at a value are tested inside the form, and why not; "" without such loops.
    - in_loop, one_by_one: steps since the start that ran in one call for a task, and one by one.
    - notes: what was done to the cell to make it fast, and what else is to know.
    """

    cell: str
    used: str
    form: str
    why: str
    until: str
    in_loop: int
    one_by_one: int
    notes: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class Explanation:
    """The cells of an engine that were used so far, in order of their first use. It prints as a table.

    policy: its name. said: what there is to say where there are no cells; "" otherwise.
    """

    policy: str
    cells: tuple[ExplainedCell, ...]
    said: str = ""

    @property
    def line(self) -> str:
        """All in one line, for a log."""
        summary = "; ".join(_in_short(cell) for cell in self.cells)
        return f"policy {self.policy}, {self.said or summary}"

    def __str__(self) -> str:
        if not self.cells:
            return f"policy {self.policy}: {self.said}"
        rows = [("cell", "used as", "runs as", "steps in one call", "one by one")]
        rows += [(cell.cell, cell.used, cell.form, f"{cell.in_loop:,}", f"{cell.one_by_one:,}") for cell in self.cells]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row, cell in zip(rows, (None, *self.cells), strict=True):
            texts, counts = zip(row[:3], widths, strict=False), zip(row[3:], widths[3:], strict=True)
            padded = [*(text.ljust(width) for text, width in texts), *(text.rjust(width) for text, width in counts)]
            lines.append("  ".join(padded))
            for about in () if cell is None else _about(cell):
                lines += textwrap.wrap(about, _WIDTH, initial_indent="    ", subsequent_indent="      ")
        return "\n".join(lines)

    __repr__ = __str__


def explained(policy: str, registry: CellRegistry, drivers: Sequence[Driver]) -> Explanation:
    """Return how the cells that are known by now run. drivers: of all workers."""
    cell_drivers = [driver for driver in drivers if isinstance(driver, CellDriver)]
    if not cell_drivers:
        return Explanation(policy, (), "it computes whole requests with Model.batched, and no cells")
    types = list(registry.types)
    if not types:
        return Explanation(
            policy, (), "no cell has been used yet: with an example_request in the model, the start uses them all"
        )
    executors = [each.executor for each in cell_drivers if isinstance(each.executor, TellsForms)]
    return Explanation(policy, tuple([_form(cell, registry, executors, cell_drivers[0].on_device) for cell in types]))


def _form(
    cell: CellType, registry: CellRegistry, executors: Sequence[TellsForms], on_device: OnDevice | None
) -> ExplainedCell:
    num_step_inputs = registry.num_step_inputs.get(cell.type_id)
    ends = frozenset(registry.ends.get(cell.type_id, ()))
    form = executors[0].run_form(cell.type_id, num_step_inputs, ends) if executors else _UNKNOWN
    notes = registry.notes_of(cell.type_id)
    if on_device is not None:
        form = on_device.form_of(cell.type_id) or form
        notes = (*notes, *filter(None, [on_device.why_not(cell.type_id)]))
    counts: list[RunCounts] = [executor.counted(cell.type_id) for executor in executors]
    return ExplainedCell(
        cell.name,
        "whole runs" if registry.is_whole(cell.type_id) else _used(num_step_inputs),
        form.form,
        form.why,
        form.until,
        sum([each.in_loop for each in counts]),
        sum([each.one_by_one for each in counts]),
        notes,
    )


def _used(num_step_inputs: int | None) -> str:
    if num_step_inputs is None:
        return "single nodes"
    if num_step_inputs < 2:
        return "run" if num_step_inputs else "loop"
    return f"run, {num_step_inputs} inputs a step"


def _about(cell: ExplainedCell) -> list[str]:
    """Return what stands below a cell's row."""
    said = [] if not cell.why else [cell.why]
    if cell.until:
        said.append(f"until: {cell.until}")
    return said + [note for note in cell.notes if note not in cell.why]


def _in_short(cell: ExplainedCell) -> str:
    reasons = [cell.why, f"until {cell.until}" if cell.until else ""]
    said = "; ".join(filter(None, reasons))
    return f"cell {cell.cell!r}: {cell.form}{f' ({said})' if said else ''}"
