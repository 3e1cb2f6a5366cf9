"""Inputs and outputs of cells: specs of values, and cell types. No torch, no time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NewType

from batchmaker.errors import ModelError

MAX_OUTPUTS: Final = 1000
"""The limit of outputs of one cell."""
MAX_FETCHED: Final = 62
"""How many of them, the first ones, can go to the host: the set of those that do is stored as bits of one number."""

GIVEN: Final = -1
"""A memory that the unfold function gives: a sequence of values. See CellType."""

TypeId = NewType("TypeId", int)
"""Number of a cell type inside one model, 0, 1, 2, ..., in order of first use."""


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """Shape and dtype of one value of one node, without the batch dimension.

    shape: per-row shape; () for a scalar such as a token. dtype: a torch dtype's short name ("float32",
    "bfloat16", "int64"). num_tokens: for an integer that indexes an embedding, valid values are
    0 <= token < num_tokens; None where any value is allowed.
    """

    shape: tuple[int, ...]
    dtype: str
    num_tokens: int | None = None

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def row_signature(self) -> tuple[tuple[int, ...], str]:
        """The part of the spec that must be equal for values in the same state table."""
        return (self.shape, self.dtype)

    def is_like(self, other: ValueSpec) -> bool:
        """Whether two values can be held in the same state table."""
        return self is other or (self.shape == other.shape and self.dtype == other.dtype)


_SPECS: Final[dict[ValueSpec, ValueSpec]] = {}


def _as_one(specs: tuple[ValueSpec, ...]) -> tuple[ValueSpec, ...]:
    """Return one shared object for each equal list of specs, so that comparisons take no time."""
    return tuple([_SPECS.setdefault(spec, spec) for spec in specs])


@dataclass(frozen=True, slots=True)
class CellType:
    """One kind of cell, as the scheduler sees it (BatchMaker section 3.1: same graph, weights and shapes).

    batch_sizes: sizes at which the cell may run, ascending; the executor pads a batch in between. priority: larger runs
    first among types that satisfy the same criterion of Algorithm 1. host_outputs: indices of the outputs that travel
    to the host after every step. form_of: the type of the same cell in chains with another number of inputs per step.
    memories: the first len(memories) inputs are memories, sequences of any number of rows of that spec; of each, GIVEN,
    or the output whose earlier steps it is in a run. places: of the inputs in forward(), if it has memories.
    """

    type_id: TypeId
    name: str
    inputs: tuple[ValueSpec, ...]
    outputs: tuple[ValueSpec, ...]
    batch_sizes: tuple[int, ...]
    priority: int = 0
    host_outputs: tuple[int, ...] = ()
    form_of: TypeId | None = None
    memories: tuple[int, ...] = ()
    places: tuple[int, ...] = ()

    def in_form(self, type_id: TypeId, num_step_inputs: int) -> CellType:
        """Return the type of the same cell in chains with so many inputs per step. They run apart from the others."""
        form = {0: "loop", 1: "run"}.get(num_step_inputs, f"run {num_step_inputs}")
        return replace(self, type_id=type_id, name=f"{self.name} {form}", form_of=self.type_id)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", _as_one(self.inputs))
        object.__setattr__(self, "outputs", _as_one(self.outputs))
        if len(self.outputs) > MAX_OUTPUTS:
            raise ModelError(
                f"cell {self.name!r} has {len(self.outputs)} outputs, at most {MAX_OUTPUTS} are possible; "
                "join some of them into one tensor"
            )

    @property
    def max_batch(self) -> int:
        return self.batch_sizes[-1]

    @property
    def min_batch(self) -> int:
        return self.batch_sizes[0]

    def state_inputs(self, num_step_inputs: int) -> range:
        """Indices of the inputs that a chain feeds from its previous step."""
        return range(num_step_inputs, len(self.inputs))
