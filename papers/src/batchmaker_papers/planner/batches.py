"""Batches inside a cell: their results and operands, checked before the planning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchmaker.errors import ModelError


@dataclass(frozen=True, slots=True)
class Variable:
    """One value that the layout places.

    size: elements per example. region: variables of one region are stored together.
    """

    size: int = 1
    region: int = 0


@dataclass(frozen=True, slots=True)
class Operand:
    """The operand of a batch: for each position a variable's index, or None for a value that is not placed.

    gather_cost: the cost of a copy, in any unit, the same for all operands; by default its elements per example.
    """

    variables: tuple[int | None, ...]
    gather_cost: float | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """One batched operation. results: for each position, the variable that it computes; operands alike."""

    results: tuple[int, ...]
    operands: tuple[Operand, ...]


def placed_only(variables: Sequence[int | None]) -> tuple[int, ...]:
    """Return the variables, without the positions of values from outside."""
    return tuple(variable for variable in variables if variable is not None)


def check_batches(variables: Sequence[Variable], batches: Sequence[Batch]) -> None:
    """Raise ModelError if the batches cannot be laid out. Cyclic dependencies are not detected."""
    computed: dict[int, int] = {}
    for number, batch in enumerate(batches):
        _check_lengths(number, batch)
        read = [index for operand in batch.operands for index in placed_only(operand.variables)]
        for index in (*batch.results, *read):
            if not 0 <= index < len(variables):
                raise ModelError(
                    f"batch {number} names variable {index}, there are {len(variables)}. Number them from 0."
                )
        for index in batch.results:
            if index in computed:
                raise ModelError(
                    f"variable {index} is computed by batch {computed[index]} and by batch {number}. "
                    "Give each result a variable of its own."
                )
            computed[index] = number
        kinds = {variables[index] for index in batch.results}
        if len(kinds) > 1:
            raise ModelError(
                f"batch {number} computes variables of several sizes or regions: {sorted(map(repr, kinds))}. "
                "Batch only operations of one shape."
            )


def _check_lengths(number: int, batch: Batch) -> None:
    if not batch.results:
        raise ModelError(f"batch {number} computes nothing. Leave it out.")
    for which, operand in enumerate(batch.operands):
        if len(operand.variables) != len(batch.results):
            raise ModelError(
                f"batch {number}, operand {which}: {len(operand.variables)} variables for {len(batch.results)} "
                "results. Give one per result, None for a value that is not placed."
            )
        if operand.gather_cost is not None and not operand.gather_cost >= 0:
            raise ModelError(f"batch {number}, operand {which}: a gather costs {operand.gather_cost}. Give 0 or more.")
