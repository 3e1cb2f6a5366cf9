"""All steps of a task of recurrent chains in one compiled call."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.arrays import Flags, Float32s, Ints, aligned_zeros
from batchmaker.compiled import is_compiled
from batchmaker.kernels.cpu.products import Library, Products, bits, library
from batchmaker.kernels.cpu.steps import (
    BLOCK,
    COPY_FIELDS,
    GateRoom,
    Keeps,
    LaneState,
    Moves,
    begin_step,
    begin_task,
    end_step,
    note_copy,
    run_steps,
)
from batchmaker.kernels.cpu.tile_steps import GRU, LSTM, RNN_RELU, RNN_TANH, Rows
from batchmaker.kernels.cpu.tiles import LANES

Array = NDArray[Any]
StepKind = Literal["lstm", "gru", "rnn-tanh", "rnn-relu"]

_KINDS: Final = {"lstm": LSTM, "gru": GRU, "rnn-tanh": RNN_TANH, "rnn-relu": RNN_RELU}
_NONE: Final = np.zeros(0, np.int64)


@final
@dataclass(slots=True)
class LoopTask:
    """The work: chains in lanes of state tables, step by step. Integers are int64, all arrays contiguous.

    - ends: [steps]; the positions of step s are ends[s - 1] (0 for the first) to ends[s]. largest: the most positions
      of a step.
    - used: [steps] bool, whether a step's states are in lanes at all.
    - lanes: [positions], the row of the state tables with each position's state; different within a step.
    - tables: [n] addresses of row 0 of the tables; below, tables are given by their number here. All have contiguous
      rows; address 0 stands for zeros.
    - source_tables, source_rows: [positions] the place of each position's token, an int64. Or `inputs`: each step
      input [positions, *shape], in the order of the positions.
    - move_at: [moves] ascending positions whose state is not in their lane yet. move_tables, move_rows: [state inputs,
      moves], its place when their step begins. Within a step no lane is both source and target.
    - state: [lanes, hidden] for each state input, read and written.
    - keep_at: [n] ascending positions whose outputs are written to rows keep_rows [n] of tables keep_tables [outputs],
      or none at all.
    - fetch_at: for each fetched output [n] ascending positions; fetch_of: the output number; fetched: [n, hidden] for
      each, written.

    Values have the cell's dtype; bfloat16 is given as int16.
    """

    ends: Ints
    largest: int
    used: Flags
    lanes: Ints
    tables: Ints
    source_tables: Ints
    source_rows: Ints
    inputs: tuple[Array, ...]
    move_at: Ints
    move_tables: Ints
    move_rows: Ints
    state: tuple[Rows, ...]
    keep_at: Ints
    keep_rows: Ints
    keep_tables: Ints
    fetch_at: tuple[Ints, ...]
    fetch_of: tuple[int, ...]
    fetched: tuple[Rows, ...]


@final
@dataclass(frozen=True, slots=True)
class LoopCell:
    """A cell that is one recurrent step of projected inputs.

    - kind: of the cell.
    - weights: [gates * hidden, hidden], float32 or bfloat16 on the CPU, in the order of gates (i, f, o, 2g), (r, z, 2n)
      or one. Inputs of tanh are scaled by two.
    - bias: [gates * hidden] of the product, only for "gru".
    - state, outputs: for each state input and each output, 0 for h and 1 for c.
    - table: [tokens, gates * hidden], the projected input of each token, None if the inputs are not tokens. token: the
      number of the step input that is the token.
    - project: the step inputs of n rows -> [n, gates * hidden]; may raise.
    - product: states [n, hidden] -> states @ weights.T + bias in their dtype, by PyTorch.
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
class LoopPlan:
    """The way to compute tasks.

    ways: the way to multiply n rows in the compiled call, for n up to BLOCK. by_product: for tasks whose largest step
    has n rows, whether PyTorch multiplies instead, between two compiled calls for each step; the last entry holds for
    larger tasks too. product_sizes: the sizes of these products, ascending; empty if there are none.
    """

    ways: Ints
    by_product: NDArray[np.bool_]
    product_sizes: Sequence[int]


def can_loop(weights: Tensor) -> bool:
    """Whether there is a loop for these recurrent weights: float32 or bfloat16 on the CPU, and a compiler."""
    return is_compiled(run_steps) and weights.device.type == "cpu" and weights.dtype in (torch.float32, torch.bfloat16)


@final
class RecurrentLoop:
    """Runs tasks of a cell that is one recurrent step. Threads may run tasks at once, on lanes of their own.

    kind: a number for the compiled loops. hidden, width: units of the state and of all gates. num_state: parts of the
    state. products: the weights; bias: of the product. table: the projected input of each token, if there is one. plan:
    the way to compute tasks; `choice` finds the fastest.
    """

    def __init__(self, cell: LoopCell, functions: Library | None = None) -> None:
        self._cell = cell
        self.kind = _KINDS[cell.kind]
        self.width, self.hidden = cell.weights.shape
        self.num_state = len(cell.state)
        self.products = Products(cell.weights, library() if functions is None else functions)
        self.plan = LoopPlan(np.full(BLOCK + 1, self.products.ways[-1], np.int64), np.zeros(1, np.bool_), ())
        bias = torch.zeros(self.width) if cell.bias is None else cell.bias.detach()
        self.bias: Float32s = bias.float().contiguous().numpy()
        self._no_bias: Float32s = np.zeros(self.width, np.float32)
        self.table = None if cell.table is None else bits(cell.table.detach().contiguous())
        self._outputs: Ints = np.array(cell.outputs, np.int64)
        self._h, self._c = (cell.state.index(part) if part in cell.state else 0 for part in (0, 1))
        # Threads take a workspace from here and put it back; both are one operation under the interpreter's lock.
        self._rooms: list[Workspace] = []

    @property
    def token(self) -> int | None:
        """The number of the step input with the folded table's token; None without a table.

        With a table it is the only input that is read.
        """
        return None if self.table is None else self._cell.token

    def run(self, task: LoopTask) -> bool:
        """Compute all steps of a task.

        Returns False, with nothing written, if the inputs cannot be projected or a step has no lanes. One cause is a
        token without a row; the step-by-step computation then reports it.
        """
        if self.table is not None:
            tokens = task.inputs[self._cell.token] if task.inputs else None
            return self.run_projected(task, self.table, None if tokens is None else tokens.astype(np.int64, copy=False))
        try:
            with torch.no_grad():
                px = self._cell.project(task.inputs)
        except Exception:  # any exception of the cell
            return False
        return self.run_projected(task, bits(px), _NONE)

    def run_projected(self, task: LoopTask, px: Rows, tokens: Ints | None) -> bool:
        """Compute all steps of a task with projected inputs.

        px: with `tokens` [positions], a row for each token; tokens is None if the task gives their places. Without
        tokens [positions or more, gates * hidden].
        """
        plan = self.plan
        if plan.product_sizes and plan.by_product[min(task.largest, len(plan.by_product) - 1)]:
            return self.run_products(task, px, tokens)
        return self.run_compiled(task, px, tokens, plan.ways)

    def run_compiled(self, task: LoopTask, px: Rows, tokens: Ints | None, ways: Ints) -> bool:
        """As run_projected, in one compiled call. ways: how to multiply n rows, for n up to BLOCK."""
        room, products = self.room(), self.products
        copies = room.copies_of(task, self._cell.outputs)
        if tokens is None:
            tokens = room.tokens_of(len(task.lanes))
        state, moves, keeps = self._parts(task)
        done = run_steps(
            self.kind,
            (task.ends, task.used, task.lanes),
            (tokens, task.source_tables, task.source_rows),
            px,
            state,
            task.tables,
            moves,
            keeps,
            copies,
            (products.w, self.bias, products.addresses, ways),
            room.gates,
        )
        self.give_back(room)
        return done

    def run_products(self, task: LoopTask, px: Rows, tokens: Ints | None) -> bool:
        """As run_projected, with PyTorch's product between two compiled calls for each step."""
        room = self.room()
        copies = room.copies_of(task, self._cell.outputs)
        if tokens is None:
            tokens = room.tokens_of(len(task.lanes))
        state, _, keeps = self._parts(task)
        source = (tokens, task.source_tables, task.source_rows)
        if done := begin_task(task.used, source, len(px), state, task.tables, keeps, copies):
            with torch.no_grad():
                self._run_each(task, px, tokens, copies, room)
        self.give_back(room)
        return done

    def _run_each(self, task: LoopTask, px: Rows, tokens: Ints, copies: Ints, room: Workspace) -> None:
        state, moves, _ = self._parts(task)
        states = self.zeros(self._padded(task.largest))
        tensor = torch.from_numpy(states)
        if states.dtype == np.int16:
            tensor = tensor.view(torch.bfloat16)
        first = move = 0
        for last in task.ends.tolist():
            move = begin_step(self.kind, first, last, move, task.lanes, task.tables, moves, state, states)
            made = bits(self._cell.product(tensor[: self._padded(last - first)]))
            end_step(self.kind, first, last, task.lanes, tokens, px, state, copies, self._no_bias, made, room.gates)
            first = last

    def _parts(self, task: LoopTask) -> tuple[LaneState, Moves, Keeps]:
        """Return what a task says of the state, of its moves, and of the outputs that are kept."""
        tables, rows, h, c = task.move_tables, task.move_rows, self._h, self._c
        return (
            (task.state[h], task.state[c]),
            (task.move_at, tables[h], rows[h], tables[c], rows[c]),
            (task.keep_at, task.keep_rows, task.keep_tables, self._outputs),
        )

    def room(self) -> Workspace:
        """Return a workspace for a call, to be returned after it."""
        try:
            return self._rooms.pop()
        except IndexError:
            return Workspace(self.hidden, self.width, self.products.w.dtype)

    def give_back(self, room: Workspace) -> None:
        """Keep a workspace for the next call."""
        self._rooms.append(room)

    def _padded(self, count: int) -> int:
        """Return the size at which PyTorch multiplies this number of rows."""
        sizes = self.plan.product_sizes
        at = bisect_left(sizes, count)
        return sizes[at] if at < len(sizes) else count

    def zeros(self, num_rows: int) -> Rows:
        """Return rows of state [num_rows, hidden]."""
        return np.zeros((num_rows, self.hidden), self.products.w.dtype)

    def as_stored(self, values: Float32s) -> Rows:
        """Return values in the cell's dtype."""
        return values if self.products.w.dtype == np.float32 else bits(torch.from_numpy(values).bfloat16())


@final
class Workspace:
    """The workspace of a call of run_steps."""

    __slots__ = ("_copies", "_tokens", "gates")

    def __init__(self, hidden: int, width: int, dtype: Any) -> None:
        # Rows of `a` at a distance of a power of two would share few lines of the first cache.
        gates, state = (aligned_zeros((BLOCK, size), np.float32) for size in (width, hidden + LANES))
        narrow, gates_of_one = aligned_zeros((BLOCK, hidden), dtype), aligned_zeros((width,), np.float32)
        self.gates: GateRoom = (gates, state, narrow, gates_of_one)
        self._tokens: Ints = np.empty(1024, np.int64)
        self._copies: Ints = np.empty((8, COPY_FIELDS), np.int64)

    def tokens_of(self, count: int) -> Ints:
        """Return room for `count` tokens."""
        if len(self._tokens) < count:
            self._tokens = np.empty(2 * count, np.int64)
        return self._tokens[:count]

    def copies_of(self, task: LoopTask, outputs: Sequence[int]) -> Ints:
        """Return room for the copies of a task, with its fetches entered. outputs: the part of each output.

        `task` keeps the memory behind the addresses alive.
        """
        num_kept = len(task.keep_tables)
        count = num_kept + len(task.fetched)
        if len(self._copies) < count:
            self._copies = np.empty((2 * count, COPY_FIELDS), np.int64)
        copies = self._copies[:count]
        for i, values in enumerate(task.fetched):
            note_copy(copies, num_kept + i, outputs[task.fetch_of[i]], task.fetch_at[i], values)
        return copies
