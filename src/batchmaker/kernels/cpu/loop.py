"""All steps of a task of recurrent chains in one call."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.compiled import is_compiled
from batchmaker.kernels.cpu import steps
from batchmaker.kernels.cpu.products import Library, Products, bits, library
from batchmaker.kernels.cpu.steps import (
    BLOCK,
    COPY_FIELDS,
    Floats,
    Ints,
    Rows,
    largest_step,
    note_copy,
    run_steps,
)

Array = NDArray[Any]
_Room = tuple[Floats, Floats, Rows, Floats]
"""What run_steps works in: g, a, narrow and t."""

StepKind = Literal["lstm", "gru", "rnn-tanh", "rnn-relu"]

_KINDS: Final = {"lstm": steps.LSTM, "gru": steps.GRU, "rnn-tanh": steps.RNN_TANH, "rnn-relu": steps.RNN_RELU}
_NONE: Final = np.zeros(0, np.int64)


@final
@dataclass(slots=True)
class LoopTask:
    """What to compute: chains in lanes of state tables, step by step. Integers are int64, all arrays contiguous.

    ends: [steps], the positions of step s are ends[s - 1] (0 for the first) to ends[s]. lanes: [positions], the row of
    the state tables in which each position's state lies; different within a step.
    inputs: for each sequence input [positions, *shape], in the order of the positions.
    move_at: [moves] ascending positions whose state is not in their lane yet. move_from: [moves], where it is: >= 0 in
    that lane of the same tables when the step begins; -1: it is zero; -2 - k: in row k of `entering`. Within a step no
    lane is both source and target.
    entering: [k, hidden] for each state input. state: [lanes, hidden] for each, read and written.
    keep_at: [n] ascending positions whose outputs are written to rows keep_rows [n] of keep_tables, [rows, hidden] for
    each output. fetch_at: for each fetched output [n] ascending positions; fetch_of: which output it is; fetched:
    [n, hidden] for each, written.
    Values have the cell's dtype; bfloat16 is given as int16.
    """

    ends: Ints
    lanes: Ints
    inputs: tuple[Array, ...]
    move_at: Ints
    move_from: Ints
    entering: tuple[Rows, ...]
    state: tuple[Rows, ...]
    keep_at: Ints
    keep_rows: Ints
    keep_tables: tuple[Rows, ...]
    fetch_at: tuple[Ints, ...]
    fetch_of: tuple[int, ...]
    fetched: tuple[Rows, ...]


@final
@dataclass(frozen=True, slots=True)
class LoopCell:
    """A cell that is one recurrent step of projected inputs.

    kind: which. weights: [gates * hidden, hidden], float32 or bfloat16 on the CPU, in the order of gates (i, f, o, 2g),
    (r, z, 2n) or one, doubled for tanh: what goes through tanh is scaled by two. bias: [gates * hidden] of the product,
    only for "gru". state, outputs: for each state input and each output, 0 for h and 1 for c.
    table: [tokens, gates * hidden], the projected input of each token, None if the inputs are no tokens; token: which
    sequence input is the token. project: the sequence inputs of n rows -> [n, gates * hidden]; may raise.
    product: states [n, hidden] -> states @ weights.T + bias in their dtype, by PyTorch.
    """

    kind: StepKind
    weights: Tensor
    bias: Tensor | None
    state: tuple[int, ...]
    outputs: tuple[int, ...]
    table: Tensor | None
    token: int
    project: Callable[[tuple[Array, ...]], Tensor]
    product: Callable[[Tensor], Tensor]


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """How tasks are computed.

    ways: how n rows are multiplied in the compiled call, for n up to BLOCK. by_product: for tasks whose largest step
    has n rows whether PyTorch multiplies instead, between two compiled calls for each step; the last for larger ones
    too. product_sizes: the sizes at which it does, ascending; empty if it never does.
    """

    ways: Ints
    by_product: NDArray[np.bool_]
    product_sizes: Sequence[int]


def can_loop(weights: Tensor) -> bool:
    """Whether there is a loop for recurrent weights like these: float32 or bfloat16 on the CPU, and a compiler."""
    return is_compiled(run_steps) and weights.device.type == "cpu" and weights.dtype in (torch.float32, torch.bfloat16)


@final
class RecurrentLoop:
    """Runs tasks of a cell that is one recurrent step. Threads may run tasks at once, on lanes of their own.

    hidden, width: units of the state and of all gates. num_state: parts of the state. products: the weights. plan:
    how to compute what; `choice` finds the fastest.
    """

    def __init__(self, cell: LoopCell, functions: Library | None = None) -> None:
        self._cell = cell
        self._kind = _KINDS[cell.kind]
        self.width, self.hidden = cell.weights.shape
        self.num_state = len(cell.state)
        self.products = Products(cell.weights, library() if functions is None else functions)
        self.plan = Plan(np.full(BLOCK + 1, self.products.ways[-1], np.int64), np.zeros(1, np.bool_), ())
        bias = torch.zeros(self.width) if cell.bias is None else cell.bias.detach().float()
        self._bias: Floats = bias.contiguous().numpy()
        self._no_bias: Floats = np.zeros(self.width, np.float32)
        self._table = None if cell.table is None else bits(cell.table.detach().contiguous())
        self._h, self._c = (cell.state.index(part) if part in cell.state else 0 for part in (0, 1))
        # Threads take a room from here and put it back; both are one operation under the interpreter's lock.
        self._rooms: list[_Room] = []

    def run(self, task: LoopTask) -> bool:
        """Compute all steps of a task. False, with nothing written, if its inputs cannot be projected.

        A token that has no row, for one: who computes step by step finds which it was.
        """
        if self._table is not None:
            tokens = task.inputs[self._cell.token]
            return self.run_projected(
                task, self._table, tokens if tokens.dtype == np.int64 else tokens.astype(np.int64)
            )
        try:
            px = self._cell.project(task.inputs)
        except Exception:  # the cell's own
            return False
        return self.run_projected(task, bits(px))

    def run_projected(self, task: LoopTask, px: Rows, tokens: Ints = _NONE) -> bool:
        """Compute all steps of a task whose inputs have been projected.

        px: [positions or more, gates * hidden], or a row for each token with `tokens` [positions].
        """
        plan = self.plan
        if plan.product_sizes:
            largest = largest_step(task.ends, tokens, len(px))
            if largest < 0:
                return False
            if plan.by_product[min(largest, len(plan.by_product) - 1)]:
                self.run_products(task, px, tokens, largest)
                return True
        return self.run_compiled(task, px, tokens, plan.ways)

    def run_compiled(self, task: LoopTask, px: Rows, tokens: Ints, ways: Ints) -> bool:
        """As run_projected, in one compiled call. ways: how to multiply n rows, for n up to BLOCK."""
        room = self._room()
        arguments = self._arguments(task, px, tokens, ways, self._bias, room)
        move = run_steps(*arguments, steps.ALL, 0, 0, 0, room[2], room[2])
        self._rooms.append(room)
        return move >= 0

    def run_products(self, task: LoopTask, px: Rows, tokens: Ints, largest: int) -> None:
        """As run_projected, with PyTorch's product between two compiled calls for each step; all tokens have rows."""
        room = self._room()
        arguments = self._arguments(task, px, tokens, self.plan.ways, self._no_bias, room)
        states = self.zeros(self._padded(largest))
        given = torch.from_numpy(states)
        if states.dtype == np.int16:
            given = given.view(torch.bfloat16)
        first = move = 0
        for step, last in enumerate(task.ends.tolist()):
            move = run_steps(*arguments, steps.BEGIN, step, first, move, states, states)
            made = bits(self._cell.product(given[: self._padded(last - first)]))
            run_steps(*arguments, steps.END, step, first, move, states, made)
            first = last
        self._rooms.append(room)

    def _arguments(
        self, task: LoopTask, px: Rows, tokens: Ints, ways: Ints, bias: Floats, room: _Room
    ) -> tuple[int, Ints, Ints, Ints, Rows, Rows, Rows, Ints, Ints, Rows, Rows, Ints, Rows, Floats, Ints, Ints,
               Floats, Floats, Rows, Floats]:  # fmt: skip
        """Return the first arguments of run_steps."""
        h, c, products = self._h, self._c, self.products
        return (
            self._kind, task.ends, task.lanes, tokens, px, task.state[h], task.state[c], task.move_at, task.move_from,
            task.entering[h], task.entering[c], self._copies(task), products.w, bias, products.addresses, ways, *room,
        )  # fmt: skip

    def _room(self) -> _Room:
        """Return room for a call, which is given back to _rooms."""
        try:
            return self._rooms.pop()
        except IndexError:
            gates, state = (np.zeros((BLOCK, width), np.float32) for width in (self.width, self.hidden))
            return gates, state, self.zeros(BLOCK), np.empty(self.width, np.float32)

    def _padded(self, count: int) -> int:
        """Return the size at which so many rows are multiplied by PyTorch."""
        sizes = self.plan.product_sizes
        at = bisect_left(sizes, count)
        return sizes[at] if at < len(sizes) else count

    def zeros(self, num_rows: int) -> Rows:
        """Return rows of state [num_rows, hidden]."""
        return np.zeros((num_rows, self.hidden), self.products.w.dtype)

    def as_stored(self, values: Floats) -> Rows:
        """Return values in the cell's dtype."""
        return values if self.products.w.dtype == np.float32 else bits(torch.from_numpy(values).bfloat16())

    def _copies(self, task: LoopTask) -> Ints:
        """Return what run_steps is to copy out; `task` keeps alive what the addresses in it are of."""
        outputs, kept = self._cell.outputs, task.keep_tables if len(task.keep_at) else ()
        copies = np.empty((len(kept) + len(task.fetched), COPY_FIELDS), np.int64)
        for i, table in enumerate(kept):
            note_copy(copies, i, outputs[i], task.keep_at, task.keep_rows, table)
        for i, values in enumerate(task.fetched):
            note_copy(copies, len(kept) + i, outputs[task.fetch_of[i]], task.fetch_at[i], _NONE, values)
        return copies
