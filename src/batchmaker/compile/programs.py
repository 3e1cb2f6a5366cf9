"""One module as several exported programs, each for other input shapes: the form of a saved cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from batchmaker.compile.declaration import Declared
from batchmaker.errors import ShapeError
from batchmaker.graph.spec import ValueSpec


@final
@dataclass(frozen=True, slots=True)
class Programs:
    """Exported programs of one module with their row specs: at least one, no two for the same inputs."""

    forms: tuple[tuple[Declared, torch.export.ExportedProgram], ...]

    @property
    def declared(self) -> Declared | None:
        """The declaration of the only program; None if there are several."""
        return self.forms[0][0] if len(self.forms) == 1 else None

    @property
    def first(self) -> torch.export.ExportedProgram:
        return self.forms[0][1]

    def have(self, inputs: Sequence[ValueSpec]) -> bool:
        """Whether there is a program for these inputs."""
        return any(_alike(declared.inputs, inputs) for declared, _ in self.forms)

    def form(self, inputs: Sequence[ValueSpec]) -> tuple[Declared, torch.export.ExportedProgram]:
        """Return the program for these inputs. ShapeError if there is none and there are several others."""
        for declared, program in self.forms:
            if _alike(declared.inputs, inputs):
                return declared, program
        if len(self.forms) == 1:
            return self.forms[0]  # the caller compares its inputs and raises a better error
        raise ShapeError(f"got rows of {_shown(inputs)}; it was saved for {self}")

    def __str__(self) -> str:
        return " or ".join(_shown(declared.inputs) for declared, _ in self.forms)

    def state_after(self, sequence: Sequence[ValueSpec]) -> tuple[ValueSpec, ...]:
        """Return the inputs after these; those of the first program if none begins with these."""
        fitting = [d.inputs for d, _ in self.forms if _alike(d.inputs[: len(sequence)], sequence)]
        return (fitting or [self.forms[0][0].inputs])[0][len(sequence) :]


def _alike(one: Sequence[ValueSpec], other: Sequence[ValueSpec]) -> bool:
    return [spec.row_signature for spec in one] == [spec.row_signature for spec in other]


def _shown(specs: Sequence[ValueSpec]) -> str:
    return f"({', '.join(map(str, specs))})"
