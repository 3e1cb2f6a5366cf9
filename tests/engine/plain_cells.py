"""The interface of `bm.Cell` in plain PyTorch: every call runs at once, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from batchmaker.model.structure import replaced


@dataclass(eq=False)
class PlainValue:
    """A value of a call. steps: if it is the last of a chain, those of all its steps."""

    row: Tensor
    steps: PlainSequence = field(default_factory=lambda: PlainSequence([]))


@dataclass(eq=False)
class PlainSequence:
    """The same output of several calls."""

    values: list[PlainValue]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, at: Any) -> Any:
        return PlainSequence(self.values[at]) if isinstance(at, slice) else self.values[at]


class PlainCell:
    """A module as a cell. state: widths of its state at the beginning of a chain, if none is given.

    memory: the place of its memory among its arguments; None if it has none. own: the output whose earlier steps it is.
    Stop tests look at output 0.
    """

    def __init__(
        self, module: nn.Module, state: Sequence[int] = (), *, memory: int | None = None, own: int | None = None
    ) -> None:
        self._module = module
        self._state = state
        self._memory, self._own = memory, own

    def __call__(self, *arguments: Any) -> Any:
        given = list(arguments)
        memory = None if self._memory is None else _rows(given.pop(self._memory))
        outputs = self._outputs([_row(argument) for argument in given], memory)
        return _one_or_all([PlainValue(row) for row in outputs])

    def map(self, *sequences: Any, memory: Any = None) -> Any:
        read = None if memory is None else _rows(memory)
        steps = [self._outputs(list(rows), read) for rows in zip(*map(_rows, sequences), strict=True)]
        return _one_or_all([PlainSequence(list(map(PlainValue, column))) for column in zip(*steps, strict=True)])

    def tree(self, children: Sequence[Sequence[int]], leaves: Any) -> PlainSequence:
        rows = _rows(leaves)
        count = len(rows)
        for pair in children:
            rows += self._outputs([rows[child] for child in pair])
        return PlainSequence(list(map(PlainValue, rows[count:])))

    def run(self, words: Any, init: Sequence[Any] | None = None, *, memory: Any = None) -> Any:
        given = [None] * len(self._state) if init is None else init
        state = [torch.zeros(self._state[k]) if part is None else _row(part) for k, part in enumerate(given)]
        columns = words if isinstance(words, tuple) else (words,)
        return self._chain(list(map(list, zip(*map(_rows, columns), strict=True))), state, None, memory)

    def loop(self, init: Sequence[Any], *, until: Any = None, max_steps: int, memory: Any = None) -> Any:
        return self._chain([[]] * max_steps, [_row(part) for part in init], until, memory)

    def _chain(self, given: Sequence[list[Tensor]], state: list[Tensor], until: Any, memory: Any) -> Any:
        steps: list[list[Tensor]] = []
        read = None if memory is None else _rows(memory)
        for rows in given:
            if self._own is not None:
                read = [step[self._own] for step in steps]
            steps.append(self._outputs([*rows, *state], read))
            state = steps[-1][len(steps[-1]) - len(state) :]
            if until is not None:
                watched = np.array([steps[-1][0].item()])
                if bool(until(watched)[0] if callable(until) else watched[0] == until):
                    break
        sequences = [PlainSequence(list(map(PlainValue, column))) for column in zip(*steps, strict=True)]
        return _one_or_all([PlainValue(sequence.values[-1].row, sequence) for sequence in sequences])

    @torch.no_grad()
    def _outputs(self, rows: list[Tensor], memory: list[Tensor] | None = None) -> list[Tensor]:
        given = [row[None] for row in rows]
        if memory is not None:
            stacked = torch.stack(memory)[None] if memory else torch.zeros(1, 1, self._state[0])
            given[self._memory : self._memory] = [stacked, torch.tensor([len(memory)])]
        made = self._module(*given)
        return [output[0] for output in (made if isinstance(made, tuple) else (made,))]


def _row(data: Any) -> Tensor:
    return data.row if isinstance(data, PlainValue) else torch.as_tensor(data)


def _rows(data: Any) -> list[Tensor]:
    return [value.row for value in data.values] if isinstance(data, PlainSequence) else [_row(one) for one in data]


def _one_or_all(outputs: list[Any]) -> Any:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def resolved(structure: Any) -> Any:
    """What an engine answers for this result: numbers and tensors in place of values and sequences."""

    def change(handle: PlainValue | PlainSequence) -> Any:
        if isinstance(handle, PlainSequence):
            return torch.stack([value.row for value in handle.values])
        return handle.row.item() if handle.row.dim() == 0 else handle.row

    return replaced(structure, (PlainValue, PlainSequence), change)


def same(got: Any, wanted: Any, tolerance: float) -> bool:
    """Whether two answers are alike: integers equal, floats within a tolerance."""
    if isinstance(wanted, Tensor):
        if not isinstance(got, Tensor) or got.shape != wanted.shape or got.dtype != wanted.dtype:
            return False
        close: bool = torch.allclose(got.double(), wanted.double(), atol=tolerance, rtol=tolerance)
        return close if wanted.is_floating_point() else torch.equal(got, wanted)
    if isinstance(wanted, dict):
        return set(got) == set(wanted) and all(same(got[key], wanted[key], tolerance) for key in wanted)
    if isinstance(wanted, list | tuple):
        return len(got) == len(wanted) and all(same(*pair, tolerance) for pair in zip(got, wanted, strict=True))
    if isinstance(wanted, float):
        return abs(got - wanted) <= tolerance
    return type(got) is type(wanted) and bool(got == wanted)
