"""Recurrent cells whose tasks run in one compiled call on the CPU, if that is measured to be faster."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.compile.export import example_rows
from batchmaker.compile.program import Program
from batchmaker.compile.recurrent_cells import LoopedStep
from batchmaker.graph.spec import ValueSpec
from batchmaker.kernels.cpu.choice import choose, choose_greedy
from batchmaker.kernels.cpu.greedy import TOKEN, GreedyLoop
from batchmaker.kernels.cpu.loop import LoopCell, RecurrentLoop, can_loop


@final
class _Shares:
    """The two shares of a recurrent step's gates. It knows no loop, so that no reference cycle holds the weights.

    hoist_sizes: the sizes at which `hoist` is called; empty for any.
    """

    def __init__(self, looped: LoopedStep, hoist: Program, step_inputs: Sequence[ValueSpec]) -> None:
        self._step_inputs, self._hoist = step_inputs, hoist
        self._projected = looped.projected
        self._recurrent = looped.step
        weights, _ = looped.step.rows
        self._width = len(weights)
        self._zeros = torch.zeros((0, len(weights)), dtype=weights.dtype)
        self.hoist_sizes: Sequence[int] = ()

    def project(self, step_inputs: tuple[NDArray[Any], ...]) -> Tensor:
        """Return the inputs' share of the gates for all positions of a task, and padding rows."""
        count = len(step_inputs[0])
        sizes = self.hoist_sizes
        columns = [self._padded(values, spec) for values, spec in zip(step_inputs, self._step_inputs, strict=True)]
        if not sizes or count <= sizes[-1]:
            projected: Tensor = self._hoist(*columns)[self._projected]
            return projected.contiguous()
        blocks = [
            self._hoist(*(column[at : at + sizes[-1]] for column in columns))[self._projected]
            for at in range(0, len(columns[0]), sizes[-1])
        ]
        return torch.cat(blocks)

    def product(self, h: Tensor) -> Tensor:
        """Return the state's share of the gates, with all biases of the state."""
        zeros = self._zeros
        if len(zeros) < len(h):  # two threads may both make some; each uses its own
            # Pages that nobody writes share one physical page, which stays in the first cache.
            memory = torch.from_numpy(np.zeros(2 * len(h) * self._width * h.itemsize, np.uint8))
            zeros = self._zeros = memory.view(h.dtype).view(-1, self._width)
        return self._recurrent.product(h, zeros[: len(h)])

    def _padded(self, values: NDArray[Any], spec: ValueSpec) -> Tensor:
        """Return values padded with zeros, up to a size at which `hoist` was warmed up, or a multiple."""
        count, sizes = len(values), self.hoist_sizes
        if sizes:
            largest = sizes[-1]
            room = sizes[bisect_left(sizes, count)] if count <= largest else -(-count // largest) * largest
            if room > count:
                values = np.concatenate([values, np.zeros((room - count, *spec.shape), values.dtype)])
        rows = torch.from_numpy(values)
        return rows.view(torch.bfloat16) if spec.dtype == "bfloat16" else rows


@final
class ChainLoop:
    """The loop of a cell that is one recurrent step, and the batch sizes at which it is faster than `step`.

    given: rows of the step inputs. hoisted: rows of the results of `hoist`, the first inputs of `step`; its other
    inputs are of `state`.
    """

    def __init__(
        self,
        looped: LoopedStep,
        hoist: Program,
        step: Program,
        step_inputs: Sequence[ValueSpec],
        hoisted: Sequence[ValueSpec],
        state: Sequence[ValueSpec],
    ) -> None:
        self._hoisted, self._state = hoisted, state
        self._step = step
        self._shares = shares = _Shares(looped, hoist, step_inputs)
        self._faster: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._measuring = threading.RLock()
        weights, bias = looped.step.rows
        parts, outputs = (tuple([p for p in side if p != TOKEN]) for side in (looped.state, looped.outputs))
        self._steps = RecurrentLoop(
            LoopCell(
                looped.kind,
                weights,
                bias,
                parts,
                outputs,
                looped.table,
                looped.projected,
                shares.project,
                shares.product,
            )
        )
        scores = looped.scores
        self.loop: RecurrentLoop | GreedyLoop = (
            self._steps if scores is None else GreedyLoop(self._steps, scores, looped.state, looped.outputs)
        )

    def measure(self, batch_sizes: Sequence[int], hoist_sizes: Sequence[int] = ()) -> None:
        """Find the fastest ways up to the largest size. From now on `hoist` is called at the given sizes."""
        with self._measuring:
            self._shares.hoist_sizes = hoist_sizes

            def stepped(num_rows: int) -> Callable[[], Any]:
                padded = batch_sizes[bisect_left(batch_sizes, num_rows)]
                rows = example_rows((*self._hoisted, *self._state), padded)
                return lambda: self._step(*rows)

            if isinstance(self.loop, GreedyLoop):
                self._faster = choose_greedy(self.loop, stepped, batch_sizes)
            else:
                self._faster = choose(self.loop, stepped, batch_sizes)

    @property
    def faster(self) -> NDArray[np.bool_]:
        """[n] whether it is faster for so many rows; empty before it is measured."""
        return self._faster

    def fastest(self, batch: int) -> RecurrentLoop | GreedyLoop | None:
        """Return the loop if it is faster for tasks whose largest step has `batch` rows. Measured now if not before."""
        faster = self._faster  # no lock for each task: workers share the cell
        if batch >= len(faster):
            with self._measuring:
                if batch >= len(self._faster):
                    self.measure(range(1, (1 << batch.bit_length()) + 1), self._shares.hoist_sizes)
                faster = self._faster
        return self.loop if faster[batch] else None


def chain_loop(
    looped: LoopedStep | None,
    hoist: Program,
    step: Program,
    step_inputs: Sequence[ValueSpec],
    hoisted: Sequence[ValueSpec],
    state: Sequence[ValueSpec],
) -> ChainLoop | None:
    """Return the loop of a split cell; None if its step is not a recurrent one, or not on the CPU."""
    if looped is None or not can_loop(looped.step.weight_hh):
        return None
    if looped.scores is not None and state[looped.state.index(TOKEN)].dtype != "int64":
        return None
    return ChainLoop(looped, hoist, step, step_inputs, hoisted, state)
