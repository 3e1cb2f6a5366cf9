"""Cells that read memories: sequences of any number of rows, which come as a batch with a room and a number.

A memory is two inputs of the module: its rows [batch, room, *shape], of which the first `number` are the memory's, and
`number` [batch], int64. The room is a power of two, the same for the whole batch. The rows after the memory's are
zeros, and how many there are depends on who shares the batch: so a cell must not look at them, which is tried here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from batchmaker.compile.causes import Reordered
from batchmaker.compile.export import flat_outputs, infer_outputs
from batchmaker.compile.forward_signature import signature_of
from batchmaker.compile.rounding import distance, is_apart, is_rounding
from batchmaker.compile.row_trial import RANDOM, Batch, TrialRows, Tried, try_rows
from batchmaker.errors import RAISED_BY_USERS, ModelError, OptionError, RowsError, ShapeError
from batchmaker.graph.spec import GIVEN, ValueSpec

NUMBER: Final = ValueSpec((), "int64")
"""How many rows a memory has."""
TRIED_ROOM: Final = 4
_TRIED_NUMBERS: Final = (3, 1, 2, 4)
_LARGE: Final = 100.0


def room_for(number: int) -> int:
    """Return the room for so many rows: the next power of two."""
    return 1 << max(number - 1, 0).bit_length()


def with_rooms(inputs: tuple[ValueSpec, ...], num_memories: int, room: int) -> tuple[ValueSpec, ...]:
    """Return the rows of the module's inputs: each memory, the first inputs, as its rows and its number."""
    flat: list[ValueSpec] = []
    for spec in inputs[:num_memories]:
        flat += (ValueSpec((room, *spec.shape), spec.dtype), NUMBER)
    return (*flat, *inputs[num_memories:])


@final
class MemoryModule(Reordered):
    """A module that takes its memories first, each with its number: (rows, number, rows, number, ..., other inputs).

    module: its forward() has the parameters `names` for the rows of memories; the parameter after each is its number.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module, self.num_memories = module, len(names)
        self.places = _places(module, names)

    def forward(self, *inputs: Tensor) -> Any:
        arguments = list(inputs)
        ordered = [arguments[place] for place in self.places if place < len(arguments)]
        return self.module(*ordered)

    @property
    def in_forward(self) -> tuple[int, ...]:
        """The place in forward() of each input of the cell, of which a memory is one: its number is none."""
        flat = 2 * self.num_memories
        return tuple([self.places.index(place) for place in (*range(0, flat, 2), *range(flat, len(self.places)))])


def _places(module: nn.Module, names: Sequence[str]) -> tuple[int, ...]:
    """Return, for each parameter of forward(), its place among inputs that have the memories first."""
    where, signature = type(module).__name__, list(signature_of(module).parameters.values())
    parameters = [one.name for one in signature if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    places: dict[str, int] = {}
    for k, name in enumerate(names):
        if name not in parameters:
            raise OptionError(f"{where}: forward() has no parameter {name!r}, which memory= names")
        at = parameters.index(name) + 1
        if at == len(parameters) or parameters[at] in names:
            raise OptionError(
                f"{where}: the parameter after {name!r} of forward() is the number of its rows [batch]; there is none"
            )
        places[name], places[parameters[at]] = 2 * k, 2 * k + 1
    following = 2 * len(names)
    for name in parameters:
        if name not in places:
            places[name] = following
            following += 1
    return tuple([places[name] for name in parameters])


def in_order(module: nn.Module, names: Sequence[str]) -> tuple[int, ...]:
    """Return the memory that each argument of a call is, GIVEN for another input; numbers are no arguments."""
    parameters = list(signature_of(module).parameters)
    numbers = {parameters[parameters.index(name) + 1] for name in names}
    return tuple([names.index(name) if name in names else GIVEN for name in parameters if name not in numbers])


def try_with_memories(
    module: nn.Module, inputs: tuple[ValueSpec, ...], memories: tuple[int, ...], trial: TrialRows, where: str
) -> tuple[tuple[ValueSpec, ...], Tried]:
    """Return the outputs of a module that takes its memories first, and what it gave in its trial.

    inputs: with one row of each memory. memories: see CellType. Raises ShapeError if a row of an output depends on the
    room, ModelError if an output is not what its own memory takes, RowsError as `try_rows` does and if the module looks
    at rows after those of a memory.
    """
    count = len(memories)
    flat, wider = with_rooms(inputs, count, TRIED_ROOM), with_rooms(inputs, count, 2 * TRIED_ROOM)
    flat_trial, wider_trial = (_with_rooms(trial, inputs, count, room) for room in (TRIED_ROOM, 2 * TRIED_ROOM))
    batches = [flat_trial.batch(flat, num_rows) for num_rows in trial.sizes()]
    outputs = infer_outputs(module, flat, where, batches)
    others = infer_outputs(module, wider, where, [wider_trial.batch(wider, num_rows) for num_rows in trial.sizes()])
    if outputs != others:
        raise ShapeError(
            f"{where}: with room for {TRIED_ROOM} rows of a memory it gave ({', '.join(map(str, outputs))}), for "
            f"{2 * TRIED_ROOM} ({', '.join(map(str, others))}). The shape of an output may not depend on the room."
        )
    for port, output in enumerate(memories):
        if output == GIVEN:
            continue
        if not 0 <= output < len(outputs) or not outputs[output].is_like(inputs[port]):
            made = str(outputs[output]) if 0 <= output < len(outputs) else f"no output {output}"
            raise ModelError(
                f"{where}, memory {port}: its rows are declared as {inputs[port]}, but the output that it keeps of "
                f"each step is {made}"
            )
    limits = {2 * k + 1: TRIED_ROOM + 1 for k in range(count)}
    tried = try_rows(module, flat, flat_trial, where, traced=False, limits=limits)
    if RANDOM not in tried.notes:
        _MemoryTrial(module, inputs, count, trial, where, tried).run()
    return outputs, tried


def _with_rooms(trial: TrialRows, inputs: tuple[ValueSpec, ...], num_memories: int, room: int) -> TrialRows:
    """Return the rows of a trial for the module's inputs. A memory is repetitions of its real row."""
    rows = [trial.rows[port] if port < len(trial.rows) else None for port in range(len(inputs))]
    flat: list[Tensor | None] = []
    for row in rows[:num_memories]:
        flat.append(None if row is None else row[:, None].expand(1, room, *row.shape[1:]))
        flat.append(torch.tensor([_TRIED_NUMBERS[0]]))
    return dataclasses.replace(trial, rows=(*flat, *rows[num_memories:]))


@final
class _MemoryTrial:
    """Runs rows with other rooms, other neighbours, and other rows after those of their memories."""

    def __init__(
        self,
        module: nn.Module,
        inputs: tuple[ValueSpec, ...],
        num_memories: int,
        trial: TrialRows,
        where: str,
        tried: Tried,
    ) -> None:
        self._module, self._inputs, self._count, self._where = module, inputs, num_memories, where
        self._tried, self._largest = tried, trial.batch_sizes[-1]
        generator = self._generator = torch.Generator().manual_seed(0)
        rows = trial.batch(inputs, len(_TRIED_NUMBERS))
        self._memories = []
        for values in rows[:num_memories]:
            shape = (len(values), TRIED_ROOM, *values.shape[1:])
            wide = values[:, None].expand(shape)
            noise = torch.randn(shape, generator=generator)
            self._memories.append(
                (wide + 0.5 * noise.to(wide.dtype) * wide.abs().amax().clamp(min=0.1))
                if wide.is_floating_point()
                else wide.clone()
            )
        self._others = rows[num_memories:]

    def run(self) -> None:
        for kind in range(3):
            try:
                self._compare(kind)
            except RAISED_BY_USERS as error:
                if isinstance(error, RowsError):
                    raise

    def _compare(self, kind: int) -> None:
        """RowsError if a row differs between two rooms, alone or among others. kind: of the rows after the memories."""
        numbers = range(len(_TRIED_NUMBERS))
        alone = [self._made([row], TRIED_ROOM, kind) for row in numbers]
        for row in numbers:
            self._check(alone[row], self._made([row], 2 * TRIED_ROOM, kind), row, 0, kind)
        together = list(numbers)[: self._largest]
        made = self._made(together, 2 * TRIED_ROOM, kind)
        for place, row in enumerate(together):
            self._check(alone[row], made, row, place, kind)

    def _made(self, rows: list[int], room: int, kind: int) -> Batch:
        with torch.no_grad():
            made = flat_outputs(self._module(*self._arguments(rows, room, kind)), self._where)
        return made

    def _arguments(self, rows: list[int], room: int, kind: int) -> list[Tensor]:
        flat: list[Tensor] = []
        for memory in self._memories:
            numbers = torch.tensor([_TRIED_NUMBERS[row] for row in rows])
            values = self._garbage((len(rows), room, *memory.shape[2:]), memory, kind)
            for place, row in enumerate(rows):
                number = _TRIED_NUMBERS[row]
                values[place, :number] = memory[row, :number]
            flat += (values, numbers)
        return [*flat, *[values[rows] for values in self._others]]

    def _garbage(self, shape: tuple[int, ...], like: Tensor, kind: int) -> Tensor:
        """Return values that come after those of a memory: noise, large numbers, or the memory's first."""
        if kind == 2 or not like.dtype.is_floating_point:
            return like[0, :1].expand(shape).clone() if kind else torch.zeros(shape, dtype=like.dtype)
        noise = torch.randn(shape, generator=self._generator)
        return (noise if kind == 0 else _LARGE * noise).to(like.dtype)

    def _check(self, alone: Batch, made: Batch, row: int, place: int, kind: int) -> None:
        for output, (wanted, rows) in enumerate(zip(alone, made, strict=True)):
            mine = rows[place : place + 1]
            if not is_apart(mine, wanted, self._tried.tolerance):
                continue
            again: Callable[[], Batch] = partial(self._made, [row], TRIED_ROOM, kind)
            if is_rounding(distance(mine, wanted), again, output):
                continue
            raise RowsError(
                f"{self._where}, output {output}: it depends on rows after the {_TRIED_NUMBERS[row]} of a memory, or "
                "on their room, which are other ones in every batch. Only the first `number` rows of each memory are "
                "its own: leave the others out, as in scores.masked_fill(torch.arange(rows.shape[1]) >= number[:, "
                "None], -torch.inf), and divide by `number`, not by the room."
            )
