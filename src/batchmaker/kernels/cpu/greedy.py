"""All steps of a task of greedy decoders in one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.arrays import Flags, Float32s, Ints, aligned_zeros
from batchmaker.kernels.cpu.greedy_steps import run_greedy
from batchmaker.kernels.cpu.loop import LoopTask, RecurrentLoop
from batchmaker.kernels.cpu.products import Products, library
from batchmaker.kernels.cpu.steps import BLOCK

TOKEN: Final = 2
"""The part of the state that is the last chosen token; 0 is h, 1 is c."""


class LoopEnds(Protocol):
    """The ends of loops, by node and by test: see `batchmaker.engine.stop_tests.StopTests`. `ended` is written."""

    test_of: Ints
    last: Ints
    ended: Flags
    constants: Ints
    is_constant: Flags
    output_of: Ints


@final
class _NoEnds:
    """No loop ends at a value."""

    test_of = last = output_of = constants = np.zeros(0, np.int64)
    ended = is_constant = np.zeros(0, np.bool_)


@final
@dataclass(frozen=True, slots=True)
class ScoreWeights:
    """The next token is the argmax of h @ weights.T + bias. weights: [tokens, hidden]; bias: [tokens], if any."""

    weights: Tensor
    bias: Tensor | None


@final
class GreedyLoop:
    """Runs tasks of a cell that is a recurrent step of its own last token and the choice of the next token.

    recurrent: the step; its table has a row for each token. state, outputs: for each state input and each output, 0 for
    h, 1 for c and TOKEN. Threads may run tasks at once, on lanes of their own.
    """

    def __init__(
        self, recurrent: RecurrentLoop, scores: ScoreWeights, state: tuple[int, ...], outputs: tuple[int, ...]
    ) -> None:
        assert recurrent.table is not None
        self.recurrent, self._table = recurrent, recurrent.table
        self.num_state = len(state)
        self.outputs = outputs
        self._products = Products(scores.weights, library(), tiles=False)
        bias = torch.zeros(len(scores.weights)) if scores.bias is None else scores.bias.detach()
        self._bias: Float32s = bias.float().contiguous().numpy()
        self._parts: Ints = np.array(outputs, np.int64)
        self._h, self._token = state.index(0), state.index(TOKEN)
        self._c = state.index(1) if 1 in state else self._h
        self._rooms: list[Float32s] = []

    def zeros(self, num_rows: int) -> tuple[NDArray[Any], ...]:
        """Return lanes of all parts of the state, in the order of the inputs."""
        lanes: list[NDArray[Any]] = [self.recurrent.zeros(num_rows) for _ in range(self.num_state)]
        lanes[self._token] = np.zeros(num_rows, np.int64)
        return tuple(lanes)

    def run(self, task: LoopTask, nodes: Ints, ends: LoopEnds | None) -> tuple[Flags, Flags] | None:
        """Compute all steps of a task, except those of loops that have ended.

        nodes: [positions]. ends: of the loops; None if none ends at a value before the task does. Returns the positions
        at which loops have ended, and those that did not run; fetched values of the latter are zero. Returns None, with
        nothing written, if some token, step or stop test cannot be computed here.
        """
        recurrent, products = self.recurrent, self._products
        count = len(task.lanes)
        stopped, skipped = np.zeros((2, count), np.bool_)
        room = recurrent.room()
        copies = room.copies_of(task, self.outputs)
        try:
            scores = self._rooms.pop()
        except IndexError:
            scores = aligned_zeros((BLOCK, len(self._bias)), np.float32)
        of, rows, h, c, token = task.move_tables, task.move_rows, self._h, self._c, self._token
        loops: LoopEnds = _NoEnds() if ends is None else ends
        done = run_greedy(
            recurrent.kind,
            (task.ends, task.used, task.lanes),
            nodes,
            self._table,
            (task.state[h], task.state[c], task.state[token]),
            task.tables,
            (task.move_at, of[h], rows[h], of[c], rows[c]),
            (of[token], rows[token]),
            (task.keep_at, task.keep_rows, task.keep_tables, self._parts),
            copies,
            (recurrent.products.w, recurrent.bias, recurrent.products.addresses, recurrent.plan.ways),
            room.gates,
            (products.w, self._bias, products.addresses, products.ways[-1], scores),
            room.tokens_of(count + 2 * BLOCK),
            (loops.test_of, loops.last, loops.ended, loops.constants, loops.is_constant, loops.output_of),
            (stopped, skipped),
        )
        recurrent.give_back(room)
        self._rooms.append(scores)
        return (stopped, skipped) if done else None
