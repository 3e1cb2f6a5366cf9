"""In which form a bound cell runs on the CPU, in words, and why in no faster one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from batchmaker.compile.binding import BoundCell
from batchmaker.kernels.cpu.greedy import GreedyLoop

LOOP: Final = "compiled loop"
NODE_LOOP: Final = "node loop"
STATE_LOOP: Final = "state loop"
PROGRAM: Final = "optimised program"
MODULE: Final = "torch module as it is"

A_NUMBER: Final = "a whole number"
"""What `until` of a loop is that a compiled loop can test."""
AT_ITS_LENGTH: Final = ""
"""At what chains end whose length is known."""

_NO_STEP: Final = (
    "no compiled loop: a step is not that of one LSTM, GRU or RNN, alone or with a greedy choice of the next token"
)
_NO_NODES: Final = (
    "no node loop: it has other operations than look-ups, linear layers, pointwise operations, and softmax, norms and "
    "reductions over rows of float32, or a layer of more than 4,194,304 weights"
)
_IN_BETWEEN: Final = f"step by step: the {LOOP} of a recurrent layer tests nothing between its steps"


@dataclass(frozen=True, slots=True)
class RunForm:
    """A form, in words.

    form: one of those above, or a device's own. why: no faster one; "" if there is none. until: where stop tests are
    made, and why not inside the form; "" if no loop of the cell ends at a value.
    """

    form: str
    why: str = ""
    until: str = ""


def run_form(cell: BoundCell, ends: frozenset[str] = frozenset()) -> RunForm:
    """Return the form of a cell, which is split if it runs in chains. Measures nothing.

    ends: at what its chains end: AT_ITS_LENGTH, and in words what `until` of its loops is, A_NUMBER for whole numbers.
    """
    ends, fixed = ends - {AT_ITS_LENGTH}, not ends or AT_ITS_LENGTH in ends
    own = MODULE if cell.runs_module else PROGRAM
    as_it_is = [note for note in cell.notes if "as it is" in note] if cell.runs_module else []
    is_chain, faster = cell.num_step_inputs is not None, cell.faster_in_loop
    state = cell.faster_in_state_loop if is_chain else None
    if state is not None and (faster is None or (ends and not isinstance(cell.loop, GreedyLoop))):
        return _in_state_loop(state, own, bool(ends))
    if faster is None:
        why = "; ".join(as_it_is) or (cell.no_loop or _NO_STEP if is_chain else _NO_NODES)
        return RunForm(own, why, "step by step" if ends else "")
    form = LOOP if is_chain else NODE_LOOP
    sizes = faster[1:]
    if len(sizes) and not sizes.any():
        return RunForm(own, f"the {form} was measured to be slower", "step by step" if ends else "")
    why = "not measured yet: at its first use, or at a start with an example request"
    if len(sizes):
        why = "" if sizes.all() else f"where it was measured to be faster: {_ranges(sizes)} rows a step, else the {own}"
    tests = isinstance(cell.loop, GreedyLoop)
    others = sorted(ends - {A_NUMBER})
    until = f"in the {LOOP}" if tests else _IN_BETWEEN
    if tests and others:
        until = f"step by step if it is {' or '.join(others)}: only {A_NUMBER} is tested in the {LOOP}"
    if ends and not fixed and not (tests and A_NUMBER in ends):  # all its tasks run step by step
        return RunForm(own, "", until)
    return RunForm(form, why, until if ends else "")


def _in_state_loop(faster: NDArray[np.bool_], own: str, ends: bool) -> RunForm:
    """Return the form of chains with any state, which have a compiled call for all steps of a task."""
    sizes = faster[1:]
    if len(sizes) and not sizes.any():
        return RunForm(own, f"the {STATE_LOOP} was measured to be slower", "step by step" if ends else "")
    why = "not measured yet: at its first use, or at a start with an example request"
    if len(sizes):
        why = "" if sizes.all() else f"where it was measured to be faster: {_ranges(sizes)} rows a step, else the {own}"
    return RunForm(STATE_LOOP, why, f"in the {STATE_LOOP}" if ends else "")


def _ranges(sizes: NDArray[Any]) -> str:
    """Return where flags [n] for 1, 2, ... are set: "1 to 8, 16 to 40"."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], sizes.astype(np.int8), [0]))))
    pairs = [(first + 1, end) for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)]
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in pairs)
