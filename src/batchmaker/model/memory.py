"""Memories: sequences of any length that a cell reads as one input, as declared and as given in an unfold function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch
from torch import nn

from batchmaker.compile.declaration import state_specs
from batchmaker.compile.export import torch_dtype
from batchmaker.compile.forward_signature import signature_of
from batchmaker.errors import OptionError
from batchmaker.graph.spec import GIVEN, ValueSpec
from batchmaker.graph.values import HostValues, ValueSequence


@final
@dataclass(frozen=True, slots=True)
class Memory:
    """An input of a cell that is a sequence of any length, as in `bm.Cell(module, memory=bm.Memory("past"))`.

    name: of the parameter of forward() that takes the rows, [batch, room, *row]. The parameter after it takes their
    number, [batch] int64: of each batch entry the first `number` rows are the sequence, the others are zeros that the
    result must not depend on. The room is a power of two, the same for all memories of a call.

    own: it is what earlier steps of the same run or loop returned as output number `output`, in order; nothing at the
    first step. row: the shape of this output without the batch, an int for one dimension, or a ValueSpec; needed only
    for an own memory.
    """

    name: str
    own: bool = False
    output: int = 0
    row: int | tuple[int, ...] | ValueSpec | None = None


def declared_memories(
    memory: str | Memory | Iterable[str | Memory], module: nn.Module, dtype: str
) -> tuple[tuple[Memory, ...], tuple[ValueSpec | None, ...]]:
    """Return a cell's memories in the order of forward()'s parameters, and the row of each that is the run's own.

    dtype: of rows that are given as a shape. OptionError for anything that is no declaration.
    """
    declarations = [memory] if isinstance(memory, str | Memory) else list(memory)
    memories = [Memory(one) if isinstance(one, str) else one for one in declarations]
    for one in memories:
        if not isinstance(one, Memory):
            raise OptionError(f"memory= takes names of parameters of forward() and bm.Memory(...), got {one!r}")
        if one.own != (one.row is not None):
            raise OptionError(
                f"memory {one.name!r}: own=True needs row=, the shape of output {one.output} without the batch"
                if one.own
                else f"memory {one.name!r}: row= is for own=True; that of a given sequence is found"
            )
    names = [one.name for one in memories]
    if len(set(names)) < len(names):
        raise OptionError(f"memory= names a parameter twice: {', '.join(names)}")
    parameters = list(signature_of(module).parameters)
    memories.sort(key=lambda one: parameters.index(one.name) if one.name in parameters else -1)
    rows = tuple([None if one.row is None else state_specs((one.row,), dtype)[0] for one in memories])
    return tuple(memories), rows


def outputs_kept(memories: Sequence[Memory]) -> tuple[int, ...]:
    """Return the memories as a CellType has them."""
    return tuple([one.output if one.own else GIVEN for one in memories])


def in_place_of(row: ValueSpec) -> HostValues:
    """Return an argument that stands for the run's own memory, which is empty at first."""
    return HostValues(torch.zeros((1, *row.shape), dtype=torch_dtype(row.dtype)), 1, row)


def as_range(sequence: ValueSequence, num_kept: int) -> ValueSequence | None:
    """Return a sequence whose nodes are a range of one type; None if they are none, or kept from an earlier request.

    It is another object, since the given one has its nodes as an array once another input reads it. num_kept: how many
    of the first nodes are kept. Numbers below 0 stand for what a segment reads (see `graph.regions`).
    """
    numbers: Any = sequence.numbers
    if type(numbers) is not range:
        if sequence.of.type_id is None:
            return None
        apart = np.diff(numbers)
        step = int(apart[0]) if len(apart) else 1
        if step == 0 or (apart != step).any():
            return None
        first = int(numbers[0]) if len(numbers) else 0
        numbers = range(first, first + step * len(numbers), step)
    if len(numbers) and 0 <= min(numbers[0], numbers[-1]) < num_kept:
        return None
    return ValueSequence(numbers, sequence.of, holds=sequence)


ROWS: Final = "a sequence of values, such as `.steps` of a run, or data [n, *shape]"
