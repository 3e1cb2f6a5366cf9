"""Random tasks for the loops of the CPU, and what nn.LSTMCell, nn.GRUCell and nn.RNNCell make of them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from batchmaker.compile.projected_steps import GRUStep, LSTMStep, RNNStep, gru_rows, lstm_bias, lstm_rows, rnn_bias
from batchmaker.kernels.cpu.loop import LoopCell, LoopTask, RecurrentLoop, StepKind
from batchmaker.kernels.cpu.products import Library

KINDS: tuple[StepKind, ...] = ("lstm", "gru", "rnn-tanh", "rnn-relu")
NUM_TOKENS, NUM_LANES = 11, 9


@final
@dataclass
class Made:
    """A torch cell of embedded tokens, and the loop of the same."""

    module: nn.Module
    embedding: Tensor
    loop: RecurrentLoop
    dtype: torch.dtype
    outputs: tuple[int, ...]

    @property
    def num_state(self) -> int:
        return 2 if isinstance(self.module, nn.LSTMCell) else 1

    def step(self, token: int, state: list[Tensor]) -> list[Tensor]:
        """Return the state [1, hidden] after a token."""
        x = self.embedding[token : token + 1]
        with torch.no_grad():
            made = self.module(x, tuple(state) if len(state) > 1 else state[0])
        return list(made) if len(state) > 1 else [made]


def made(
    kind: StepKind, dtype: torch.dtype, hidden: int, *, bias: bool = True, functions: Library | None = None
) -> Made:
    """Return a random cell; its outputs are its state, h once more behind it where there is c."""
    torch.manual_seed(0)
    width = 5
    module: Any = {"lstm": nn.LSTMCell, "gru": nn.GRUCell}.get(kind, nn.RNNCell)(width, hidden, bias=bias)
    if kind == "rnn-relu":
        module.nonlinearity = "relu"
    module.to(dtype).eval().requires_grad_(False)
    embedding = torch.randn(NUM_TOKENS, width).to(dtype)
    b_ih, b_hh = (module.bias_ih, module.bias_hh) if bias else (None, None)
    step: Any
    if kind == "lstm":
        step, rows, b = LSTMStep(module.weight_hh), lstm_rows(module.weight_ih), lstm_bias(b_ih, b_hh)
    elif kind == "gru":
        step, rows = GRUStep(module.weight_hh, b_hh), gru_rows(module.weight_ih)
        b = None if b_ih is None else gru_rows(b_ih)
    else:
        step = RNNStep(module.weight_hh, relu=kind == "rnn-relu")
        rows, b = step.scale * module.weight_ih, rnn_bias(b_ih, b_hh, step.scale)
    table = torch.nn.functional.linear(embedding, rows, b)
    weights, state_bias = step.rows
    state, outputs = ((0, 1), (0, 1, 0)) if kind == "lstm" else ((0,), (0,))

    def project(sequence: tuple[NDArray[Any], ...]) -> Tensor:
        return table[torch.from_numpy(sequence[0])]

    def product(h: Tensor) -> Tensor:
        return step.product(h, torch.zeros(len(h), len(weights), dtype=dtype))

    cell = LoopCell(kind, weights, state_bias, state, outputs, table, 0, project, product)
    return Made(module, embedding, RecurrentLoop(cell, functions), dtype, outputs)


def as_rows(values: Tensor) -> NDArray[Any]:
    return (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()


def as_tensor(rows: NDArray[Any]) -> Tensor:
    values = torch.from_numpy(rows)
    return values.view(torch.bfloat16) if values.dtype == torch.int16 else values


@final
@dataclass
class Given:
    """A task, and the memory that it speaks of. tokens: of each position; half of them lie in one table, half in
    another. entering, kept: for each state input and each output."""

    task: LoopTask
    tokens: NDArray[np.int64]
    entering: tuple[NDArray[Any], ...]
    kept: tuple[NDArray[Any], ...]

    def copied(self) -> Given:
        """Return the same with memory of its own."""
        other = copy.deepcopy(self)
        task = other.task
        arrays = (*task.state, *other.entering, *other.kept, other.tokens, other.tokens[1:])
        task.tables = np.array([0, *(array.ctypes.data for array in arrays)])
        return other


def random_task(of: Made, seed: int, *, num_steps: int, num_lanes: int = NUM_LANES) -> Given:
    """Return a task whose chains start, end, change lanes, fork and pause; some outputs are kept, some fetched."""
    random = np.random.default_rng(seed)
    hidden, num_state = of.loop.hidden, of.num_state

    def rows(count: int) -> NDArray[Any]:
        return as_rows(torch.from_numpy(random.standard_normal((count, hidden), np.float32)).to(of.dtype))

    entering = tuple(rows(4) for _ in range(num_state))
    ends, lanes, move_at, move_from = [], [], [], []
    for _ in range(num_steps):
        chosen = random.permutation(num_lanes)[: random.integers(1, num_lanes + 1)]
        moving = [bool(random.integers(0, 2)) for _ in chosen]
        targets = {lane for lane, moves in zip(chosen, moving, strict=True) if moves}
        sources = [
            (0, 0),
            *((2, row) for row in range(4)),
            *((1, lane) for lane in range(num_lanes) if lane not in targets),
        ]
        for lane, moves in zip(chosen, moving, strict=True):
            if moves:
                move_at.append(len(lanes))
                move_from.append(sources[random.integers(len(sources))])
            lanes.append(lane)
        ends.append(len(lanes))
    count = len(lanes)

    def some() -> NDArray[np.int64]:
        return np.flatnonzero(random.integers(0, 2, count)).astype(np.int64)

    keep_at, fetch_at = some(), tuple(some() for _ in range(int(random.integers(0, 3))))
    tokens, kind = random.integers(0, NUM_TOKENS, count), np.array([at for at, _ in move_from], np.int64)
    first_kept, shifted = 1 + 2 * num_state, random.integers(0, 2, count)
    shifted[0] = 0
    by_table = bool(random.integers(0, 2))
    task = LoopTask(
        ends=np.array(ends),
        largest=max(np.diff(ends, prepend=0).tolist()),
        used=np.ones(num_steps, np.bool_),
        lanes=np.array(lanes),
        tables=np.zeros(0, np.int64),
        source_tables=first_kept + len(of.outputs) + shifted if by_table else shifted[:0],
        source_rows=np.arange(count) - shifted if by_table else shifted[:0],
        inputs=() if by_table else (tokens,),
        move_at=np.array(move_at, np.int64),
        move_tables=np.array(
            [np.where(kind == 0, 0, kind + (kind - 1) * (num_state - 1) + p) for p in range(num_state)]
        ),
        move_rows=np.array([[row for _, row in move_from]] * num_state, np.int64),
        state=tuple(rows(num_lanes) for _ in range(num_state)),
        keep_at=keep_at,
        keep_rows=random.permutation(count + 3)[: len(keep_at)],
        keep_tables=first_kept + np.arange(len(of.outputs)),
        fetch_at=fetch_at,
        fetch_of=tuple(int(random.integers(0, len(of.outputs))) for _ in fetch_at),
        fetched=tuple(rows(len(at)) for at in fetch_at),
    )
    return Given(task, tokens, entering, tuple(rows(count + 3) for _ in of.outputs)).copied()


def expected(of: Made, given: Given) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return the state tables, keep tables and fetched values after the task, one position after the other."""
    task = given.task
    state = [as_tensor(rows.copy()) for rows in task.state]
    outputs: list[list[Tensor]] = []
    moves = dict(zip(task.move_at.tolist(), range(len(task.move_at)), strict=True))
    first = 0
    for end in task.ends.tolist():
        before = [values.clone() for values in state]
        for position in range(first, end):
            lane = int(task.lanes[position])
            table, row = 1, lane
            if position in moves:
                table, row = (int(of_h[0][moves[position]]) for of_h in (task.move_tables, task.move_rows))
            if table == 0:
                before_it = [torch.zeros_like(values[:1]) for values in before]
            else:
                tables = before if table == 1 else [as_tensor(rows) for rows in given.entering]
                before_it = [values[row : row + 1] for values in tables]
            new = of.step(int(given.tokens[position]), before_it)
            for values, row in zip(state, new, strict=True):
                values[lane] = row[0]
            outputs.append([new[part][0] for part in of.outputs])
        first = end
    kept = [as_tensor(rows.copy()) for rows in given.kept]
    for position, row in zip(task.keep_at, task.keep_rows, strict=True):
        for table, value in zip(kept, outputs[position], strict=True):
            table[row] = value
    fetched = [
        torch.stack([outputs[position][output] for position in at]) if len(at) else as_tensor(rows)
        for at, output, rows in zip(task.fetch_at, task.fetch_of, task.fetched, strict=True)
    ]
    return state, kept, fetched
