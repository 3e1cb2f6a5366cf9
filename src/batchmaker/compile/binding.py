"""Bind a module to its inputs: infer its outputs, determine its identity, and prepare three fast ways to run it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, final

import torch
from torch import Tensor, nn

from batchmaker.compile.dataflow import CannotRewriteError, TracedCell, copied
from batchmaker.compile.export import example_rows, export_cell, flat_module, flat_outputs, infer_outputs
from batchmaker.compile.fold import fold_tokens
from batchmaker.compile.identity import CellIdentity, canonical
from batchmaker.compile.loops import ChainLoop, chain_loop
from batchmaker.compile.lower import Packer
from batchmaker.compile.opaque import Opaque, proved_outputs
from batchmaker.compile.program import Program
from batchmaker.compile.programs import AnyProgram, ReadProgram, module_of, prove_values
from batchmaker.compile.recurrent_cells import Recurrence, find_recurrence
from batchmaker.compile.rewrite import cut_recurrent_cells, fold_constants, lift, token_limits
from batchmaker.compile.split import Split, compile_whole, split_cell
from batchmaker.errors import ModelError, ShapeError
from batchmaker.graph.spec import ValueSpec
from batchmaker.kernels.cpu.greedy import GreedyLoop
from batchmaker.kernels.cpu.loop import RecurrentLoop

CPU = torch.device("cpu")


class Planned(Protocol):
    """A way to run a cell with its operations in batches."""

    @property
    def note(self) -> str:
        """What was done, or why nothing was done."""

    @property
    def graph(self) -> TracedCell:
        """The graph to run: equal to the cell's, or the cell's own if nothing was done."""

    def packer(self) -> Packer:
        """Return the packer for compiling the graph."""

    def unplanned(
        self, cell: TracedCell, fold: Callable[[TracedCell], list[str]]
    ) -> Callable[[int], TracedCell | None]:
        """Return a function from the number of sequence inputs to the graph to split instead of this one.

        The function returns None to split this one. cell: the cell as it was planned. fold: folds tokens in place;
        neither graph is folded yet.
        """


Planner = Callable[[TracedCell], Planned]


def bind(
    module: nn.Module | AnyProgram,
    inputs: tuple[ValueSpec, ...],
    *,
    name: str,
    num_sequence_inputs: int | None = None,
    fold_bytes: int = 1 << 30,
    device: torch.device = CPU,
    planner: Planner | None = None,
) -> BoundCell:
    """Check the module against its declared inputs, put it in eval mode and make it fast.

    - num_sequence_inputs: the first inputs, which are given step by step; the others are state that the last outputs
      feed. None if nothing is state (see BoundCell.split).
    - fold_bytes: most bytes of tables over a vocabulary.
    - device: where the cell runs, on copies of the weights; the module itself is on the CPU.
    - planner: batches the operations inside the cell if this is measured to be faster.

    Raises ModelError or ShapeError. A module that cannot be traced is not an error; `notes` says so.
    """
    where = f"cell {name!r}"
    runnable = flat_module(module) if isinstance(module, nn.Module) else module_of(module)
    if isinstance(module, ReadProgram):
        outputs = prove_values(module, inputs, where)
    elif isinstance(runnable, Opaque):
        outputs = proved_outputs(runnable, inputs, where)
    else:
        outputs = infer_outputs(runnable, inputs, where)
    try:
        graph = lift(traced(runnable, inputs) if isinstance(module, nn.Module) else module)
    except CannotRewriteError as error:
        notes = (f"left as it is: {error}",)
        itself = module if isinstance(module, nn.Module) else runnable
        known_as = runnable.identity if isinstance(runnable, Opaque) else None
        identity = CellIdentity(known_as or "", (inputs, outputs), module=None if known_as else itself)
        core = _Core(_copy_on(runnable, device), None, where, outputs=outputs)
        bound = BoundCell(name, inputs, outputs, identity, notes, core)
    else:
        text, weights = canonical(graph)
        identity = CellIdentity(text if planner is None else f"{text}\noptimized", (inputs, outputs), weights)
        limits = token_limits(graph)
        known = tuple(
            dataclasses.replace(spec, num_tokens=limits.get(node.name, spec.num_tokens))
            for spec, node in zip(inputs, graph.inputs, strict=True)
        )
        core, done = _core_of(runnable, graph, where, limits, fold_bytes=fold_bytes, device=device, planner=planner)
        bound = BoundCell(name, known, outputs, identity, done, core)
    return bound if num_sequence_inputs is None else bound.split(num_sequence_inputs)


def _core_of(
    runnable: nn.Module,
    graph: TracedCell,
    where: str,
    limits: dict[str, int],
    *,
    fold_bytes: int,
    device: torch.device,
    planner: Planner | None,
) -> tuple[_Core, tuple[str, ...]]:
    """Move a cell's graph to the device and optimise it in place; return the core and notes on what was done.

    limits: number of tokens by input name. The rest is as for `bind`.
    """
    graph.move_to(device)
    with device:
        notes = [f"{kind} cut into input projection and step" for kind in cut_recurrent_cells(graph)]
    fold_constants(graph)
    packer = Packer(fuse=device == CPU)
    unplanned: Callable[[int], TracedCell | None] | None = None
    if planner is not None and device == CPU:
        plan = planner(graph)
        packer = plan.packer()
        notes.append(plan.note)
        if plan.graph is not graph:
            unplanned = plan.unplanned(graph, partial(_fold, limits=limits, fold_bytes=fold_bytes))
            graph = copied(plan.graph)
    elif planner is not None:
        notes.append(f"not planned: planning is for the CPU, this cell runs on {device}")
    notes += _fold(graph, limits, fold_bytes)
    return _Core(runnable, graph, where, packer, unplanned), tuple(notes)


def _copy_on(module: nn.Module, device: torch.device) -> nn.Module:
    """Return the module itself if it is on the device, else a copy on the device."""
    return module if device == CPU else copy.deepcopy(module).to(device)


def traced(module: nn.Module, inputs: tuple[ValueSpec, ...]) -> torch.export.ExportedProgram:
    """Return the module as a program with a dynamic batch. CannotRewriteError if it cannot be traced."""
    if isinstance(module, Opaque):
        raise CannotRewriteError(f"{module.kind} is opaque")
    try:
        return export_cell(_with_shared_weights(module), inputs)
    except Exception as error:  # the module's code may raise anything
        if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
            why = "torch.export does not take TorchScript: give the nn.Module that it was made of"
            raise CannotRewriteError(why) from error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CannotRewriteError(f"torch.export failed: {reason}") from error


def _with_shared_weights(module: nn.Module) -> nn.Module:
    """Return a copy that shares the weight tensors.

    Tracing swaps the weights out for a while, and somebody may be running the module.
    """
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, shared)


def _fold(graph: TracedCell, limits: dict[str, int], fold_bytes: int) -> list[str]:
    """Replace values that depend on tokens alone by tables, in place; return what was done."""
    notes = [str(folded) for folded in fold_tokens(graph, limits, fold_bytes)]
    graph.drop_unused_constants()
    return notes


class _Core:
    """The common part of all splits of one cell: its graph, or the module itself without a graph.

    outputs: rows that the module itself must return. unplanned: for a planned cell, a function from the number of
    sequence inputs to the graph to split instead, or None to split this one.
    """

    def __init__(
        self,
        module: nn.Module,
        graph: TracedCell | None,
        where: str,
        packer: Packer | None = None,
        unplanned: Callable[[int], TracedCell | None] | None = None,
        outputs: tuple[ValueSpec, ...] = (),
    ) -> None:
        self._module = module
        self._graph = graph
        self._where = where
        self._packer = packer or Packer()
        self._unplanned = unplanned
        self._outputs = outputs
        self._whole: Program | None = None

    def whole(self) -> Program:
        """Return the whole cell as a program, compiled at first use."""
        if self._whole is None:
            graph = self._graph
            self._whole = self._run_module if graph is None else compile_whole(graph, self._packer)
        return self._whole

    def split(self, inputs: tuple[ValueSpec, ...], num_sequence_inputs: int) -> tuple[Split, tuple[str, ...]]:
        """Return the cell in two parts, and a note on the split."""
        if self._graph is not None:
            try:
                split, notes = self._cut(self._graph, num_sequence_inputs)
            except CannotRewriteError as error:
                return self._all_in_step(inputs[:num_sequence_inputs]), (f"nothing hoisted: {error}",)
            count = split.num_hoisted_calls
            return split, (*notes, *((f"{count} operations hoisted out of the step",) if count else ()))
        return self._all_in_step(inputs[:num_sequence_inputs]), ()

    def _cut(self, graph: TracedCell, num_sequence_inputs: int) -> tuple[Split, tuple[str, ...]]:
        other = None if self._unplanned is None else self._unplanned(num_sequence_inputs)
        if other is None:
            return split_cell(graph, num_sequence_inputs, self._packer), ()
        return split_cell(other, num_sequence_inputs, Packer(fuse=True)), (
            "not planned in runs: its steps were no faster",
        )

    def recurrence(self, num_sequence_inputs: int) -> Recurrence | None:
        return None if self._graph is None else find_recurrence(self._graph, num_sequence_inputs)

    def _all_in_step(self, sequence: tuple[ValueSpec, ...]) -> Split:
        return Split(_hand_on, self.whole(), sequence, 0)

    def _run_module(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return a program that runs the module on copies, because an unknown module may write into its inputs.

        It raises ShapeError if the outputs differ from those at binding: they may depend on the values.
        """
        given = inputs if isinstance(self._module, Opaque) else tuple([value.clone() for value in inputs])
        with torch.no_grad():
            made = flat_outputs(self._module(*given), self._where)
        for index, (output, spec) in enumerate(zip(made, self._outputs, strict=True)):
            if output.shape != (len(inputs[0]), *spec.shape):
                raise ShapeError(
                    f"{self._where}, output {index}: got shape {tuple(output.shape)} for {len(inputs[0])} rows, "
                    f"expected rows of {spec}, as at its first use. The shape of a row may not depend on its values."
                )
        return made


def _hand_on(*inputs: Tensor) -> tuple[Tensor, ...]:
    return inputs


@final
class BoundCell:
    """A module with known rows, ready to run. Made by `bind`.

    inputs, outputs: row specs; an integer input that indexes an embedding carries its num_tokens. hoisted: row specs of
    the results of `hoist`. notes: what was done to make it fast, or why nothing was done.

    All calls take and return batches [n, *shape] on the cell's device. They never modify their arguments; an output may
    be an input that is passed through. The weights are those at binding: later changes of the module have no effect.
    """

    __slots__ = (
        "_chain_loop", "_core", "_split", "_splits", "hoisted", "identity", "inputs", "name", "notes",
        "num_sequence_inputs", "outputs",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        inputs: tuple[ValueSpec, ...],
        outputs: tuple[ValueSpec, ...],
        identity: CellIdentity,
        notes: tuple[str, ...],
        core: _Core,
    ) -> None:
        self.name = name
        self.inputs = inputs
        self.outputs = outputs
        self.identity = identity
        self.notes = notes
        self.hoisted: tuple[ValueSpec, ...] = ()
        self.num_sequence_inputs: int | None = None
        self._core = core
        self._split: Split | None = None
        self._chain_loop: ChainLoop | None = None
        self._splits: dict[int, BoundCell] = {}

    def split(self, num_sequence_inputs: int) -> BoundCell:
        """Return the same cell with its first inputs given step by step and the others as recurrent state.

        The result shares everything with this cell, and is made once per number. Raises ModelError if the trailing
        outputs do not have the rows of the state.
        """
        if num_sequence_inputs not in self._splits:
            self._check_state(num_sequence_inputs)
            split, notes = self._core.split(self.inputs, num_sequence_inputs)
            made = BoundCell(self.name, self.inputs, self.outputs, self.identity, (*self.notes, *notes), self._core)
            made.num_sequence_inputs, made._split, made.hoisted = num_sequence_inputs, split, split.hoisted
            given, state = self.inputs[:num_sequence_inputs], self.inputs[num_sequence_inputs:]
            made._chain_loop = chain_loop(split.looped, split.hoist, split.step, given, split.hoisted, state)
            self._splits[num_sequence_inputs] = made
        return self._splits[num_sequence_inputs]

    @property
    def num_hoisted_calls(self) -> int:
        """Number of operations of `hoist`; with none it passes its inputs on."""
        return self._need_split().num_hoisted_calls

    def call(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run one step: inputs [n, *shape] -> outputs [n, *shape]."""
        return self._core.whole()(*inputs)

    def hoist(self, sequence: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Compute the state-independent part for m rows at once: [m, *shape] -> hoisted values [m, ...]."""
        return self._need_split().hoist(*sequence)

    def step(self, hoisted: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Compute the rest for n rows: returns all outputs of the cell, so call(x, s) = step(hoist(x), s)."""
        return self._need_split().step(*hoisted, *state)

    @property
    def loop(self) -> RecurrentLoop | GreedyLoop | None:
        """The compiled call for all steps of a task: for a recurrent cell or a greedy decoder on the CPU, else None."""
        return None if self._chain_loop is None else self._chain_loop.loop

    def loop_for(self, batch: int) -> RecurrentLoop | GreedyLoop | None:
        """Return `loop` if it is faster than `step` for tasks whose largest step has `batch` rows, else None.

        `warm_up` measures this; otherwise the first call here does.
        """
        return None if self._chain_loop is None else self._chain_loop.fastest(batch)

    def recurrence(self, num_sequence_inputs: int) -> Recurrence | None:
        """Return the cell as an LSTM or a GRU with so many inputs per step; None if it computes anything else."""
        return self._core.recurrence(num_sequence_inputs)

    def warm_up(self, batch_sizes: Sequence[int], hoist_sizes: Sequence[int] = ()) -> None:
        """Run every size once, and measure the loop. No request then waits for oneDNN's preparations for a new size.

        batch_sizes: for `step`, or for `call` if the cell is not split. hoist_sizes: for `hoist`.
        """
        for size in batch_sizes:
            if self.num_sequence_inputs is None:
                self.call(example_rows(self.inputs, size))
            else:
                state = example_rows(self.inputs[self.num_sequence_inputs :], size)
                self.step(example_rows(self.hoisted, size), state)
        for size in hoist_sizes:
            self.hoist(example_rows(self.inputs[: self.num_sequence_inputs], size))
        if self._chain_loop is not None:
            self._chain_loop.measure(batch_sizes, hoist_sizes)

    def __repr__(self) -> str:
        given, made = (", ".join(map(str, side)) for side in (self.inputs, self.outputs))
        return f"BoundCell({self.name!r}: ({given}) -> ({made}))"

    def _need_split(self) -> Split:
        if self._split is None:
            raise ModelError(
                f"cell {self.name!r}: bound without num_sequence_inputs, so nothing is known to be state. "
                "Use call(), or split(num_sequence_inputs) first."
            )
        return self._split

    def _check_state(self, num_sequence_inputs: int) -> None:
        if not 0 <= num_sequence_inputs <= len(self.inputs):
            raise ModelError(
                f"cell {self.name!r}: got {num_sequence_inputs} sequence inputs, expected 0 to "
                f"{len(self.inputs)}, the inputs that it declares."
            )
        state = self.inputs[num_sequence_inputs:]
        if len(state) > len(self.outputs):
            raise ModelError(
                f"cell {self.name!r}: {len(state)} inputs are state but it returns {len(self.outputs)} "
                "outputs. Return the next state as the last outputs, in the order of the inputs."
            )
        fed = self.outputs[len(self.outputs) - len(state) :]
        for index, (old, new) in enumerate(zip(state, fed, strict=True), start=num_sequence_inputs):
            if old.row_signature != new.row_signature:
                raise ModelError(
                    f"cell {self.name!r}, input {index}: state rows are {old}, but the output that feeds "
                    f"them is {new}. Return the next state as the last outputs, in the order of the inputs."
                )
