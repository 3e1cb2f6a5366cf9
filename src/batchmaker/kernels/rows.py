"""The rows of one call of a recurrent layer: checked and sorted, longest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.errors import OptionError, ShapeError

Numbers = Sequence[int] | NDArray[np.integer]

_MOST = 2**31 - 1


@final
@dataclass(frozen=True, slots=True)
class CallRows:
    """The rows of one call, longest first. All arrays are int32 [batch], but for step_offset, [longest].

    Step t of row b reads row px_offset[b] + step_offset[t] of the projected inputs, and writes row y_offset[b] +
    step_offset[t] of the outputs. Its state is row slot[b] of the state tables.
    """

    px_offset: NDArray[np.int32]
    slot: NDArray[np.int32]
    length: NDArray[np.int32]
    y_offset: NDArray[np.int32]
    step_offset: NDArray[np.int32]

    @property
    def longest(self) -> int:
        return int(self.length[0]) if len(self.length) else 0


def call_rows(
    px_offset: Numbers,
    slot: Numbers,
    length: Numbers,
    y_offset: Numbers | None,
    step_offset: Numbers | None,
    *,
    num_inputs: int,
    num_slots: int,
    num_outputs: int | None,
) -> CallRows:
    """Check the rows of a call and return them.

    num_inputs, num_slots, num_outputs: rows of the projected inputs, of the state tables, and of the outputs if there
    are any. y_offset: default: as px_offset. step_offset: default: consecutive steps. Raises ShapeError if the arrays
    do not fit each other, OptionError for a length below zero, a row that does not exist, or a slot that two rows
    share.
    """
    arrays = {"px_row_offset": px_offset, "slot": slot, "length": length}
    arrays["y_offset"] = px_offset if y_offset is None else y_offset
    columns = {name: _numbers(name, values) for name, values in arrays.items()}
    batch = len(columns["slot"])
    for name, values in columns.items():
        if len(values) != batch:
            raise ShapeError(
                f"recurrent call: {name} has {len(values)} rows, slot has {batch}; give one number per row."
            )
    _check_lengths_and_slots(columns["length"], columns["slot"], num_slots)
    longest = int(columns["length"].max(initial=0))
    steps = np.arange(longest) if step_offset is None else _numbers("step_offset", step_offset)
    if len(steps) < longest:
        raise ShapeError(f"recurrent call: step_offset has {len(steps)} steps, the longest row has {longest}.")
    order = np.argsort(-columns["length"], kind="stable")
    _check_reach("px_row_offset", columns["px_row_offset"], steps, columns["length"], num_inputs)
    if num_outputs is not None:
        _check_reach("y_offset", columns["y_offset"], steps, columns["length"], num_outputs)
    px, slots, lengths, y = (values[order].astype(np.int32) for values in columns.values())
    return CallRows(px, slots, lengths, y, steps[:longest].astype(np.int32))


def _numbers(name: str, values: Numbers) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ShapeError(
            f"recurrent call: {name} has shape {array.shape} and type {array.dtype}, wanted whole numbers in one "
            "dimension, on the host."
        )
    return array.astype(np.int64)


def _check_lengths_and_slots(length: NDArray[np.int64], slot: NDArray[np.int64], num_slots: int) -> None:
    if (length < 0).any():
        row = int(np.argmax(length < 0))
        raise OptionError(f"recurrent call: row {row} has length {length[row]}, wanted at least 0.")
    outside = (slot < 0) | (slot >= num_slots)
    if outside.any():
        row = int(np.argmax(outside))
        raise OptionError(f"recurrent call: row {row} has slot {slot[row]}, the state tables have {num_slots} rows.")
    ordered = np.sort(slot)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice):
        raise OptionError(
            f"recurrent call: slot {twice[0]} belongs to two rows, and each row has a state of its own; "
            "run them in two calls."
        )


def _check_reach(
    name: str, offset: NDArray[np.int64], steps: NDArray[np.int64], length: NDArray[np.int64], count: int
) -> None:
    """Raise OptionError if a step of a row lies outside of `count` rows."""
    used = length > 0
    if not used.any():
        return
    last = length[used] - 1
    first_reached = offset[used] + np.minimum.accumulate(steps)[last]
    last_reached = offset[used] + np.maximum.accumulate(steps)[last]
    low, high = int(first_reached.min()), int(last_reached.max())
    if low < 0 or high >= count or high > _MOST:
        raise OptionError(f"recurrent call: {name} and the steps reach rows {low} to {high}, there are {count} rows.")
