"""The stop tests of loops, applied to all loops of a batch at once."""

from __future__ import annotations

from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.errors import RAISED_BY_USERS, said_by


@final
class StopTests:
    """The loops at one step, by their tests: equal ones meet."""

    __slots__ = ("_groups", "_latest", "_latest_until")

    def __init__(self) -> None:
        # test, positions in the batch, places of their values
        self._groups: dict[Any, tuple[Any, list[int], list[int]]] = {}
        self._latest: tuple[Any, list[int], list[int]] | None = None
        self._latest_until: Any = None

    def add(self, until: Any, position: int, place: int) -> None:
        """A loop is in the batch. until: see Cell.loop. place: of the value that it looks at among those given."""
        if self._latest is None or until is not self._latest_until:
            self._latest = self._group_of(until)
            self._latest_until = until
        self._latest[1].append(position)
        self._latest[2].append(place)

    def _group_of(self, until: Any) -> tuple[Any, list[int], list[int]]:
        """Return the group in which a test meets its equals; it is alone where it cannot be compared."""
        try:
            return self._groups.setdefault(until, (until, [], []))
        except RAISED_BY_USERS:  # its own __hash__ or __eq__
            return self._groups.setdefault(id(until), (until, [], []))

    def apply(self, values: Tensor, batch: int, cell: str) -> tuple[NDArray[np.bool_], tuple[tuple[int, str], ...]]:
        """Return which positions of the batch stop, [batch], and those at which the test raised, with the reason.

        values: [count, *shape]. Equal tests are called once. Where a test raises, it is tried again value by value, so
        that only the loops at fault fail. cell: its name, for messages.
        """
        stopped = np.zeros(batch, np.bool_)
        failed: list[tuple[int, str]] = []
        for until, positions, places in self._groups.values():
            try:
                stopped[positions] = _holds(until, values, places)
            except RAISED_BY_USERS:  # the model's own test; find the values that make it raise
                for position, place in zip(positions, places, strict=True):
                    try:
                        stopped[position : position + 1] = _holds(until, values, [place])
                    except RAISED_BY_USERS as error:
                        reason = f"until of cell {cell!r} raised {said_by(error)}"
                        failed.append((position, reason))
        return stopped, tuple(failed)


def _holds(until: Any, values: Tensor, places: list[int]) -> Any:
    """Apply a test to a copy of the values at these places. Scalars are as wide there as Python's numbers; bfloat16,
    which NumPy lacks, is float32."""
    values = values[places] if len(places) < len(values) else values.clone()
    if values.ndim == 1 and values.dtype != torch.bool:
        values = values.to(torch.float64 if values.is_floating_point() else torch.int64)
    array = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return until(array) if callable(until) else array == until
