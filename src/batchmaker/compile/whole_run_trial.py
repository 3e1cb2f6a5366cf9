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
from batchmaker.compile.export import flat_outputs
from batchmaker.compile.memories import room_for
from batchmaker.compile.rounding import distance, is_apart, is_rounding, largest, tolerance
from batchmaker.compile.row_trial import Batch, TrialRows
from batchmaker.errors import RAISED_BY_USERS, ModelError, OptionError, ShapeError, said_by
from batchmaker.graph.spec import ValueSpec
from batchmaker.graph.whole_runs import CONCURRENCIES
from batchmaker.kernels.cpu.choice import example_task, least_s
from batchmaker.kernels.cpu.loop import RecurrentLoop

_LENGTHS: Final = (1, 2, 4, 5, 3, 11)
"""Steps of the runs of a trial: one, two, a room, one more than a room, and others."""
_LONG: Final = (33, 130)
"""More of them, for forms that go over a run in blocks. Not tried with more bytes of weights than _LARGE_BYTES."""
_LARGE_BYTES: Final = 64 << 20
_DRAWS: Final = 3
"""A difference counts if each of so many draws shows one: a choice between nearly equal scores is rare."""

_TIMED: Final = (256, 128, 64, 32, 16, 8, 4, 2)
"""Steps of the runs that are timed, until one is not faster."""
_MIXED: Final = 2.0
"""The longest run of a batch is so many times as long as the mean, if their lengths are spread evenly from 0 on."""
_NODE_S: Final = 1.5e-6
_TASK_S: Final = 6e-4
"""What the scheduler and the executor take for the copy of a step's inputs, and for the tasks that a run of steps does
not have."""
_STEPS: Final = 4
_ALL_S: Final = 0.5
"""Timing for one number of requests ends after this; shorter runs are then left to the steps."""
_NEVER: Final = 1 << 62


@final
class WholeRun(nn.Module):
    """A user's whole form in terms of memories.

    It takes as memories all but the last step's inputs, `num_columns` of them, each as rows [batch, room, ...] and
    number [batch]; then the last step's inputs; then the state. module: takes the rows of all steps, one argument for
    each input of a step, their number, and the state. Their room is that of the longest run.
    """

    def __init__(self, module: nn.Module, num_columns: int) -> None:
        super().__init__()
        self.module, self.num_columns = module, num_columns

    def forward(self, *inputs: Tensor) -> Any:
        """Call the module with the rows of all steps, [batch, longest run, ...], zeros after the end of each run."""
        columns, number = self.num_columns, inputs[1]
        entries, longest, whole = torch.arange(len(number)), int(number.max()) + 1, []
        for port in range(columns):
            rows, last = inputs[2 * port], inputs[2 * columns + port]
            made = rows.new_zeros(len(rows), longest, *rows.shape[2:])
            made[:, : rows.shape[1]] = rows[:, :longest]
            made[entries, number] = last
            whole.append(made)
        return self.module(*whole, number + 1, *inputs[3 * columns :])


def check_whole_form(whole: Any, whole_from: Any, *, has_memories: bool) -> None:
    """ModelError or OptionError unless a cell can have this second form for whole runs."""
    if whole is None:
        if whole_from is not None:
            raise OptionError("whole_from= is for a cell with whole=, the form for whole runs")
        return
    if not isinstance(whole, nn.Module):
        raise ModelError(f"whole= takes an nn.Module, got {type(whole).__name__}; wrap a function in forward()")
    if has_memories:
        raise OptionError("whole= is for cells without memory=")
    if whole_from is not None and (isinstance(whole_from, bool) or not isinstance(whole_from, int) or whole_from < 1):
        raise OptionError(f"whole_from must be a whole number of steps, at least 1, got {whole_from!r}")


# --- the same numbers -------------------------------------------------------------------------------------------------


def prove_same(step: nn.Module, whole: WholeRun, inputs: Sequence[ValueSpec], trial: TrialRows, name: str) -> None:
    """Raise unless a cell's whole form gives what the last step of a run gives, for runs of several lengths.

    ModelError for other numbers, ShapeError for other rows.

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
        num_bytes = sum(weight.nbytes for weight in (*step.parameters(), *step.buffers()))
        self._lengths = _LENGTHS if num_bytes > _LARGE_BYTES else (*_LENGTHS, *_LONG)

    def run(self) -> None:
        """Raise the error of the first draw if every draw shows a difference."""
        errors = []
        for seed in range(_DRAWS):
            error = self._difference(seed)
            if error is None:
                return
            errors.append(error)
        raise errors[0]

    def _difference(self, seed: int) -> ModelError | None:
        runs, wanted = self._runs(seed)
        dtypes = {weight.dtype for weight in (*self._step.parameters(), *self._whole.parameters())}
        within = tolerance({*dtypes, *[made.dtype for made in wanted[0]]})
        places, sizes = list(range(len(runs))), self._trial.batch_sizes
        batches = [[place] for place in places]
        if sizes[-1] > 1:
            batches += [places[: sizes[-1]], places[: -sizes[-1] - 1 : -1]]
        for batch in batches:
            made = self._made([runs[place] for place in batch])
            self._check_rows(made, wanted[0], len(batch))
            for at, place in enumerate(batch):
                for output, (mine, others) in enumerate(zip(made, wanted[place], strict=True)):
                    row = mine[at : at + 1]
                    if not is_apart(row, others, within):
                        continue
                    again = partial(self._stepped, runs[place])
                    if not is_rounding(distance(row, others), again, output):
                        return self._error(row, others, output, self._lengths[place], len(batch))
        return None

    def _check_rows(self, made: Batch, wanted: Batch, count: int) -> None:
        """ShapeError unless the whole form returns rows as a step does, one for each run."""
        rows = [(tuple(part.shape[1:]), part.dtype) for part in wanted]
        if [(tuple(part.shape[1:]), part.dtype) for part in made] == rows and {len(part) for part in made} == {count}:
            return
        one, other = (
            ", ".join([f"{str(part.dtype).removeprefix('torch.')}{list(part.shape)}" for part in parts])
            for parts in ([part.expand(count, *part.shape[1:]) for part in wanted], made)
        )
        raise ShapeError(
            f"{self._where}: a step of {count} rows returns ({one}), whole= returns ({other}) for as many runs; it "
            "returns all outputs as the last step of each run returns them"
        )

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

        Near the real rows, with made-up integers, if the steps take these and give numbers; else with the real ones;
        else all is made up, as the request may be wrong.
        """
        refused: BaseException | None = None
        fallback: tuple[list[Batch], list[Batch]] | None = None
        for trial, made_up in ((self._trial, True), (self._trial, False), (TrialRows(), True)):
            runs = list(self._random_runs(trial.batch(self._inputs, 1), seed, made_up=made_up))
            before = torch.get_rng_state()
            try:
                ends = [self._stepped(run) for run in runs]
            except RAISED_BY_USERS as error:
                refused = refused or error
                continue
            if not torch.equal(before, torch.get_rng_state()):
                raise ModelError(
                    f"{self._where}: it draws random numbers, so whole= cannot be compared with its steps; let the "
                    "cell take the numbers as an input"
                )
            fallback = fallback or (runs, ends)
            if all(bool(part.isfinite().all()) for end in ends for part in end if part.is_floating_point()):
                return runs, ends
        if fallback is None:
            said = "" if refused is None else said_by(refused)
            raise ModelError(f"{self._where}: its steps raised in the trial of whole=: {said}") from refused
        return fallback

    def _random_runs(self, real: Batch, seed: int, *, made_up: bool) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        for length in self._lengths:
            run = []
            for port, (spec, row) in enumerate(zip(self._inputs, real, strict=True)):
                shape = (1, length, *spec.shape) if port < self._columns else (1, *spec.shape)
                like = (row[:, None] if port < self._columns else row).expand(shape)
                if row.is_floating_point():
                    noise, scale = torch.randn(shape, generator=generator), largest(row) if row.numel() else 0.0
                    run.append((like + 0.5 * (scale or 1.0) * noise).to(row.dtype))
                elif made_up:
                    most = 2 if row.dtype is torch.bool else spec.num_tokens or 5
                    run.append(torch.randint(0, most, shape, generator=generator).to(row.dtype))
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
        arguments: list[Tensor] = []
        for port in range(self._columns):
            room = room_for(int(number.max()))
            rows = torch.zeros((len(runs), room, *self._inputs[port].shape), dtype=runs[0][port].dtype)
            for place, run in enumerate(runs):
                rows[place, : number[place]] = run[port][0, :-1]
            arguments += (rows, number.clone())
        arguments += [torch.cat([run[port][:, -1] for run in runs]) for port in range(self._columns)]
        arguments += [torch.cat([run[port] for run in runs]) for port in range(self._columns, len(self._inputs))]
        try:
            return flat_outputs(self._whole(*arguments), self._where)
        except RAISED_BY_USERS as error:
            if isinstance(error, ModelError):
                raise
            lengths = ", ".join(map(str, (number + 1).tolist()))
            raise ModelError(
                f"{self._where}: whole= raised {said_by(error)} for runs of {lengths} steps. Its arguments are "
                f"{self._columns} of rows [batch, room, ...], the number of steps [batch], and {self._num_state} of "
                "the state [batch, ...]"
            ) from error


# --- which is faster ------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class WholeLengths:
    """From how many steps on a run is expected to be faster as one node, for each of CONCURRENCIES. said: in words."""

    least: tuple[int, ...]
    said: str


def measured(steps: BoundCell, whole: BoundCell, max_batch: int) -> WholeLengths:
    """Time both forms, and return from which length on runs take the whole form.

    steps: the cell, split. whole: bound as WholeRun. This is the rule: with n requests in flight, a run is one node if
    n runs of its length take less time as one batch of whole runs than as steps of n rows, and so for all longer runs
    that are timed. For n > 1 the whole runs must be faster by _MIXED, since the others in their batch are longer.
    """
    least, said = list[int](), ""
    for concurrency in CONCURRENCIES:
        batch = min(concurrency, max_batch)
        step_s, end_s, least_length = _step_s(steps, batch), time.perf_counter() + _ALL_S, _NEVER
        for length in _TIMED:
            (whole_s,) = least_s([partial(_called, whole, _rows_of(whole, batch, length))])
            whole_s += length * batch * _NODE_S + _TASK_S
            if whole_s * (_MIXED if batch > 1 else 1.0) >= length * step_s:
                if not said and length == _TIMED[0]:
                    said = (
                        f" (measured: {length} steps of {batch} {'runs' if batch > 1 else 'run'} took "
                        f"{1e3 * length * step_s:.2g} ms, as whole runs {1e3 * whole_s:.2g} ms)"
                    )
                break
            least_length = length
            if time.perf_counter() > end_s:
                break
        least.append(least_length)
    return WholeLengths(tuple(least), said_of(least) + said)


def said_of(least: Sequence[int]) -> str:
    """Return in words from which length on runs are one node. least: see WholeLengths."""
    if set(least) == {_NEVER}:
        return "runs are always steps"
    some = [f"with up to {concurrency} requests in flight" for concurrency in CONCURRENCIES[1:-1]]
    named = ("alone", *some, "with more requests")
    lengths = ["as steps" if one == _NEVER else f"from {one} steps on" for one in least]
    if len(set(lengths)) == 1:
        return f"runs are one node {lengths[0]}, if nothing reads their steps"
    each = ", ".join(f"{length} {when}" for length, when in zip(lengths, named, strict=True))
    return f"runs are one node, if nothing reads their steps, by length: {each}"


def _called(cell: BoundCell, inputs: Batch) -> None:
    with torch.no_grad():
        cell.call(inputs)


def _rows_of(whole: BoundCell, batch: int, length: int) -> Batch:
    """Return inputs for runs of one length."""
    rows = list(whole.example(batch))
    for port in range(whole.num_memories):
        like = rows[2 * port][:, :1]
        rows[2 * port] = like.expand(batch, room_for(length - 1), *like.shape[2:]).clone()
        rows[2 * port + 1] = torch.full((batch,), length - 1)
    return tuple(rows)


def _step_s(cell: BoundCell, batch: int) -> float:
    """Return the seconds of one step of so many rows in the form that an engine runs, with its share of `hoist`."""
    count = cell.num_step_inputs
    assert count is not None
    step_inputs = cell.example(batch * _STEPS)[:count]
    with torch.no_grad():
        hoisted = cell.hoist(tuple([rows[:batch] for rows in step_inputs]))
        state = cell.example(batch)[count:]
        loop = cell.loop_for(batch)
        if isinstance(loop, RecurrentLoop):
            task = example_task(loop, batch, _STEPS)
            px = loop.as_stored(np.zeros((batch * _STEPS, loop.width), np.float32))
            none, ways = task.move_at[:0], loop.plan.ways
            compiled = [partial(loop.run_compiled, task, px, none, ways), partial(loop.run_products, task, px, none)]
            *looped, hoist_s = least_s([*compiled, lambda: cell.hoist(step_inputs)])
            return (min(looped) + hoist_s) / _STEPS
        state_loop = cell.state_loop_for(batch)
        if state_loop is not None:
            looped_s, hoist_s = least_s([state_loop.trial((*hoisted, *state), _STEPS), lambda: cell.hoist(step_inputs)])
            return (looped_s + hoist_s) / _STEPS
        stepped_s, hoist_s = least_s([lambda: cell.step(hoisted, state), lambda: cell.hoist(step_inputs)])
        return stepped_s + hoist_s / _STEPS
