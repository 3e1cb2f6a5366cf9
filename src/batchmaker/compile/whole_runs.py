"""The second form of a cell, for whole runs: it is tried against the steps, and timed beside them.

See docs/decisions/0038-whole-runs.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

from batchmaker.compile.binding import BoundCell
from batchmaker.compile.export import flat_outputs, torch_dtype
from batchmaker.compile.memories import room_for
from batchmaker.compile.rounding import distance, is_apart, is_rounding, largest, tolerance
from batchmaker.compile.row_trial import Batch, TrialRows
from batchmaker.errors import RAISED_BY_USERS, ModelError
from batchmaker.graph.spec import ValueSpec
from batchmaker.kernels.cpu.choice import example_task, least_s
from batchmaker.kernels.cpu.loop import RecurrentLoop

_LENGTHS: Final = (1, 2, 4, 5, 3, 11)
"""Steps of the runs of a trial: one, two, a room, one more than a room, and others."""
_DRAWS: Final = 3
"""A difference counts if each of so many draws shows one: a choice between nearly equal scores is rare."""

_ROOMS: Final = (256, 128, 64, 32, 16, 8, 4, 2)
_BATCH: Final = 16
"""Rows of the batch that stands for an engine with many requests."""
_FULL: Final = 2
"""A room is full by half at least; in a batch, the runs are shorter than the longest."""
_NODE_S: Final = 1.5e-6
_TASK_S: Final = 2e-4
"""What the scheduler and the executor take for the copy of a step's inputs, and for the tasks that a run of steps does
not have."""
_STEPS: Final = 4
_ALL_S: Final = 1.0
"""Timing ends after this; shorter rooms are then left to the steps."""


@final
class WholeRun(nn.Module):
    """A user's whole form in terms of memories.

    It takes as memories all but the last step's inputs, `num_columns` of them, each as rows [batch, room, ...] and
    number [batch]; then the last step's inputs; then the state. module: takes the rows of all steps, one argument for
    each input of a step, their number, and the state.
    """

    def __init__(self, module: nn.Module, num_columns: int) -> None:
        super().__init__()
        self.module, self.num_columns = module, num_columns

    def forward(self, *inputs: Tensor) -> Any:
        columns, number = self.num_columns, inputs[1]
        entries, whole = torch.arange(len(number)), []
        for port in range(columns):
            rows, last = inputs[2 * port], inputs[2 * columns + port]
            room = rows.shape[1]
            longest = int(number.max()) + 1
            made = rows.new_zeros(len(rows), room if longest <= room else room_for(longest), *rows.shape[2:])
            made[:, :room] = rows
            made[entries, number] = last
            whole.append(made)
        return self.module(*whole, number + 1, *inputs[3 * columns :])


# --- the same numbers -------------------------------------------------------------------------------------------------


def prove_same(
    step: nn.Module, whole: WholeRun, inputs: Sequence[ValueSpec], trial: TrialRows, name: str
) -> None:
    """ModelError unless a cell's whole form gives what the last step of a run gives, for runs of several lengths.

    step: the cell's module. inputs: its inputs; the first are given at each step, as many as the whole form has
    columns. trial: real rows of them. name: of the cell, for messages.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        _SameTrial(step, whole, inputs, trial, name).run()


@final
class _SameTrial:
    """One comparison; see `prove_same`."""

    def __init__(
        self, step: nn.Module, whole: WholeRun, inputs: Sequence[ValueSpec], trial: TrialRows, name: str
    ) -> None:
        self._step, self._whole, self._inputs, self._trial = step, whole, inputs, trial
        self._where, self._columns = f"cell {name!r}", whole.num_columns
        self._num_state = len(inputs) - whole.num_columns

    def run(self) -> None:
        """Raise the error of the first draw if every draw shows a difference."""
        found = []
        for seed in range(_DRAWS):
            error = self._difference(seed)
            if error is None:
                return
            found.append(error)
        raise found[0]

    def _difference(self, seed: int) -> ModelError | None:
        runs, wanted = self._runs(seed)
        dtypes = {weight.dtype for weight in (*self._step.parameters(), *self._whole.parameters())}
        within = tolerance({*dtypes, *[made.dtype for made in wanted[0]]})
        places, sizes = list(range(len(runs))), self._trial.batch_sizes
        batches = [[place] for place in places]
        if sizes[-1] > 1:
            batches += [group for group in (places[: sizes[-1]], places[: -sizes[-1] - 1 : -1])]
        for batch in batches:
            made = self._made([runs[place] for place in batch])
            for at, place in enumerate(batch):
                for output, (mine, others) in enumerate(zip(made, wanted[place], strict=True)):
                    row = mine[at : at + 1]
                    if not is_apart(row, others, within):
                        continue
                    again = partial(self._stepped, runs[place])
                    if not is_rounding(distance(row, others), again, output):
                        return self._error(row, others, output, _LENGTHS[place], len(batch))
        return None

    def _error(self, made: Tensor, wanted: Tensor, output: int, length: int, batch: int) -> ModelError:
        apart = distance(made, wanted)
        by = f"by {apart:.2g}, numbers are up to {largest(wanted):.2g}" if made.is_floating_point() else "as integers"
        beside = "alone" if batch == 1 else f"in a batch of {batch} with runs of other lengths"
        return ModelError(
            f"{self._where}, output {output}: whole= gives something else than its steps: for a run of {length} "
            f"{beside} they differ {by}. The whole form gets the inputs of all steps as rows [batch, room, ...], of "
            "which the first `number` are the run's, and the state before the first; it returns all outputs as the "
            "last step returns them."
        )

    def _runs(self, seed: int) -> tuple[list[Batch], list[Batch]]:
        """Return the inputs of runs, [1, steps, ...] per column and [1, ...] per part of the state, and their ends.

        Made-up integers that the cell refuses are replaced by real ones.
        """
        refused: BaseException | None = None
        for made_up in (True, False):
            runs = list(self._drawn(seed, made_up=made_up))
            try:
                before = torch.get_rng_state()
                ends = [self._stepped(run) for run in runs]
            except RAISED_BY_USERS as error:
                refused = error
                continue
            if not torch.equal(before, torch.get_rng_state()):
                raise ModelError(
                    f"{self._where}: it draws random numbers, so whole= cannot be compared with its steps; let the "
                    "cell take the numbers as an input"
                )
            return runs, ends
        raise ModelError(f"{self._where}: its steps raised in the trial of whole=: {refused}") from refused

    def _drawn(self, seed: int, *, made_up: bool) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        real = self._trial.batch(self._inputs, 1)
        for length in _LENGTHS:
            run = []
            for port, (spec, row) in enumerate(zip(self._inputs, real, strict=True)):
                shape = (1, length, *spec.shape) if port < self._columns else (1, *spec.shape)
                like = (row[:, None] if port < self._columns else row).expand(shape)
                if row.is_floating_point():
                    noise = torch.randn(shape, generator=generator)
                    scale = float(row.abs().double().nan_to_num(0.0, 0.0, 0.0).amax()) if row.numel() else 0.0
                    run.append((like + 0.5 * (scale or 1.0) * noise).to(row.dtype))
                elif made_up:
                    most = 2 if row.dtype is torch.bool else spec.num_tokens or 5
                    run.append(torch.randint(0, most, shape, generator=generator).to(torch_dtype(spec.dtype)))
                else:
                    run.append(like.clone())
            yield tuple(run)

    def _stepped(self, run: Batch) -> Batch:
        columns, state = run[: self._columns], run[self._columns :]
        made: Batch = ()
        for step in range(columns[0].shape[1]):
            made = flat_outputs(
                self._step(*[rows[:, step].clone() for rows in columns], *[part.clone() for part in state]), self._where
            )
            state = made[len(made) - self._num_state :]
        return made

    def _made(self, runs: Sequence[Batch]) -> Batch:
        """Return what the whole form gives for these runs together."""
        number = torch.tensor([run[0].shape[1] - 1 for run in runs])
        given: list[Tensor] = []
        for port in range(self._columns):
            room = room_for(int(number.max()))
            rows = torch.zeros((len(runs), room, *self._inputs[port].shape), dtype=runs[0][port].dtype)
            for place, run in enumerate(runs):
                rows[place, : number[place]] = run[port][0, :-1]
            given += (rows, number.clone())
        given += [torch.cat([run[port][:, -1] for run in runs]) for port in range(self._columns)]
        given += [torch.cat([run[port] for run in runs]) for port in range(self._columns, len(self._inputs))]
        return flat_outputs(self._whole(*given), self._where)


# --- which is faster ----------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Measured:
    """From how many steps on a run is expected to be faster as one node; None if no length was. said: in words."""

    least: int | None
    said: str


def measured(steps: BoundCell, whole: BoundCell, max_batch: int) -> Measured:
    """Time both forms, alone and in a batch, and return from which length on runs take the whole form.

    steps: the cell, split. whole: bound as WholeRun. A length is for the whole form if this is faster although only
    half of its room is filled, alone and in a batch, and so are all longer ones that are tried.
    """
    batches = sorted({1, min(_BATCH, max_batch)})
    step_s = {batch: _step_s(steps, batch) for batch in batches}
    end_s, least, slower = time.perf_counter() + _ALL_S, None, ""
    for room in _ROOMS:
        if least is not None and time.perf_counter() > end_s:
            break
        lost = ""
        for batch in batches:
            (whole_s,) = least_s([partial(_called, whole, _rows_of(whole, batch, room))])
            whole_s += room * batch * _NODE_S + _TASK_S
            stepped_s = room * step_s[batch]
            if _FULL * whole_s > stepped_s:
                beside = "alone" if batch == 1 else f"in a batch of {batch}"
                lost = f"{room} steps {beside} took {_ms(stepped_s)} in steps, {_ms(whole_s)} whole"
                break
        if lost:
            slower = lost
            break
        least = room // 2 + 1
    if least is None:
        return Measured(None, f"runs are always steps: the whole form was measured to be no faster ({slower})")
    return Measured(least, f"runs of {least} steps or more are one node, if nothing reads their steps")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2g} ms"


def _called(cell: BoundCell, inputs: Batch) -> None:
    with torch.no_grad():
        cell.call(inputs)


def _rows_of(whole: BoundCell, batch: int, room: int) -> Batch:
    """Return inputs for runs that fill a room."""
    rows = list(whole.example(batch))
    for port in range(whole.num_memories):
        like = rows[2 * port][:, :1]
        rows[2 * port] = like.expand(batch, room, *like.shape[2:]).clone()
        rows[2 * port + 1] = torch.full((batch,), room - 1)
    return tuple(rows)


def _step_s(cell: BoundCell, batch: int) -> float:
    """Return the seconds of one step of so many rows in the form that an engine runs, with its share of `hoist`."""
    count = cell.num_sequence_inputs
    assert count is not None
    given = cell.example(batch * _STEPS)[:count]
    with torch.no_grad():
        hoisted = cell.hoist(tuple([rows[:batch] for rows in given]))
        state = cell.example(batch)[count:]
        loop = cell.loop_for(batch)
        if isinstance(loop, RecurrentLoop):
            task = example_task(loop, batch, _STEPS)
            px = loop.as_stored(np.zeros((batch * _STEPS, loop.width), np.float32))
            none, ways = task.move_at[:0], loop.plan.ways
            compiled = [partial(loop.run_compiled, task, px, none, ways), partial(loop.run_products, task, px, none)]
            *looped, hoist_s = least_s([*compiled, lambda: cell.hoist(given)])
            return (min(looped) + hoist_s) / _STEPS
        state_loop = cell.state_loop_for(batch)
        if state_loop is not None:
            looped_s, hoist_s = least_s([state_loop.trial((*hoisted, *state), _STEPS), lambda: cell.hoist(given)])
            return (looped_s + hoist_s) / _STEPS
        stepped_s, hoist_s = least_s([lambda: cell.step(hoisted, state), lambda: cell.hoist(given)])
        return stepped_s + hoist_s / _STEPS
