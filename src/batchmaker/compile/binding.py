"""Bind a module to its inputs: infer its outputs, determine its identity, and prepare three fast ways to run it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from batchmaker.compile.dataflow import CannotRewriteError, TracedCell, copied
from batchmaker.compile.export import ANY_SIZE, export_cell, export_whole, flat_module, infer_outputs
from batchmaker.compile.fold import fold_tokens
from batchmaker.compile.forms import CPU, CellForms, PlainModule
from batchmaker.compile.identity import CellIdentity, canonical
from batchmaker.compile.loops import ChainLoop, chain_loop
from batchmaker.compile.lower import Packer
from batchmaker.compile.memories import MemoryModule, try_with_memories
from batchmaker.compile.node_loop import NodeChoice, NodeLoop
from batchmaker.compile.opaque import Opaque, proved_outputs
from batchmaker.compile.programs import AnyProgram, ReadProgram, module_of, prove_values
from batchmaker.compile.recurrent_cells import Recurrence
from batchmaker.compile.rewrite import cut_recurrent_cells, fold_constants, lift, token_limits
from batchmaker.compile.row_trial import Batch, TrialRows, try_rows
from batchmaker.compile.split import Split
from batchmaker.compile.state_loop import StateChoice, StateLoop
from batchmaker.errors import RAISED_BY_USERS, ModelError, lacks_memory, said_by
from batchmaker.graph.argument_errors import input_of
from batchmaker.graph.spec import ValueSpec
from batchmaker.kernels.cpu.greedy import GreedyLoop
from batchmaker.kernels.cpu.loop import RecurrentLoop

OFTEN: Final = 32
"""Tasks of single nodes after which it is found out whether the cell runs faster in a loop: that takes some 10 ms."""


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
        """Return a function from the number of step inputs to the graph to split instead of this one.

        The function returns None to split this one. cell: the cell as it was planned. fold: folds tokens in place;
        neither graph is folded yet.
        """


Planner = Callable[[TracedCell], Planned]


@torch.random.fork_rng(devices=[])
def bind(
    module: nn.Module | AnyProgram,
    inputs: tuple[ValueSpec, ...],
    *,
    name: str,
    num_step_inputs: int | None = None,
    fold_bytes: int = 1 << 30,
    device: torch.device = CPU,
    planner: Planner | None = None,
    trial: TrialRows | None = None,
    deterministic: bool = False,
    memories: tuple[int, ...] = (),
) -> BoundCell:
    """Check the module against its declared inputs, put it in eval mode and make it fast.

    - num_step_inputs: the first inputs, which are given step by step; the others are state that the last outputs
      feed. None if nothing is state (see BoundCell.split).
    - fold_bytes: most bytes of tables over a vocabulary.
    - device: where the cell runs, on copies of the weights; the module itself is on the CPU.
    - planner: batches the operations inside the cell if this is measured to be faster.
    - trial: real values, and the sizes at which the cell will run.
    - deterministic: a row's bits depend on nothing else in its batch, with the present number of compute threads. There
      are no loops, nothing is hoisted, nothing is chosen by time. For the CPU. ModelError if this cannot be.
    - memories: see CellType. The module takes them first; see `compile.memories`.

    Raises ModelError or ShapeError. A module that cannot be traced is not an error; `notes` says so. Torch's random
    numbers go on afterwards as if nothing had been drawn.
    """
    where, trial = f"cell {name!r}", trial or TrialRows()
    runnable = flat_module(module) if isinstance(module, nn.Module) else module_of(module)
    if memories:
        if deterministic:
            raise ModelError(
                f"{where}: it reads a memory, of which deterministic=True knows no size of batches with the same bits "
                "in every company. Serve this model without deterministic=True."
            )
        return _bound_with_memories(module, runnable, inputs, memories, trial, name, device)
    batches = [trial.batch(inputs, num_rows) for num_rows in trial.sizes()]
    if isinstance(module, ReadProgram):
        outputs = prove_values(module, where, [trial.batch(inputs, num_rows) for num_rows in (2, 3)])
    elif isinstance(runnable, Opaque):
        outputs = proved_outputs(runnable, inputs, where, batches)
    else:
        outputs = infer_outputs(runnable, inputs, where, batches)
    graph, note = None, ""
    try:
        graph = lift(traced(runnable, inputs) if isinstance(module, nn.Module) else module)
    except CannotRewriteError as error:
        note = f"left as it is: {error}"
    limits = {} if graph is None else token_limits(graph)
    tokens = {} if graph is None else {k: limits[n.name] for k, n in enumerate(graph.inputs) if n.name in limits}
    tried = try_rows(runnable, inputs, trial, where, traced=graph is not None, limits=tokens)
    specs = tuple(dataclasses.replace(spec, num_tokens=tokens.get(k, spec.num_tokens)) for k, spec in enumerate(inputs))
    if graph is None:
        itself = module if isinstance(module, nn.Module) else runnable
        known_as = runnable.identity if isinstance(runnable, Opaque) else None
        identity = CellIdentity(known_as or "", (inputs, outputs), module=None if known_as else itself)
    else:
        text, weights = canonical(graph)
        options = ("" if planner is None else "\noptimized") + ("" if trial.independent else "\nrow by row")
        identity = CellIdentity(text + options, (inputs, outputs), weights)
    plain = PlainModule(runnable, where, outputs, device, tried)
    if graph is None or not trial.independent:
        forms = CellForms(plain, None, deterministic=deterministic)
        done: tuple[str, ...] = (note if trial.independent else "runs row by row, as it is: independent_rows=False",)
    else:
        forms, done = _forms_of(
            plain, graph, limits, fold_bytes=fold_bytes, planner=planner, deterministic=deterministic
        )
    bound = BoundCell(name, specs, outputs, identity, (*done, *tried.notes), forms)
    return bound if num_step_inputs is None else bound.split(num_step_inputs)


def _bound_with_memories(
    module: nn.Module | AnyProgram,
    runnable: nn.Module,
    inputs: tuple[ValueSpec, ...],
    memories: tuple[int, ...],
    trial: TrialRows,
    name: str,
    device: torch.device,
) -> BoundCell:
    """As `bind`, for a cell with memories. It runs as it is."""
    where = f"cell {name!r}"
    if device != CPU:
        raise ModelError(f"{where}: it reads a memory, which runs on the CPU only; this engine runs on {device}")
    outputs, tried = try_with_memories(runnable, inputs, memories, trial, where)
    identity = CellIdentity(f"memories {memories}{_order_in(runnable)}", (inputs, outputs), module=_read_by(runnable))
    plain = PlainModule(runnable, where, outputs, device, tried, num_own=2 * len(memories))
    notes = ("runs as it is: it reads a memory", *tried.notes)
    forms, places = CellForms(plain, None), _places_in(runnable)
    return BoundCell(name, inputs, outputs, identity, notes, forms, len(memories), places)


def _order_in(module: nn.Module) -> str:
    return str(module.places) if isinstance(module, MemoryModule) else ""


def _places_in(module: nn.Module) -> tuple[int, ...]:
    return module.in_forward if isinstance(module, MemoryModule) else ()


def _read_by(module: nn.Module) -> nn.Module:
    """Return the user's module, of which each cell makes a MemoryModule of its own."""
    return module.module if isinstance(module, MemoryModule) else module


def _forms_of(
    plain: PlainModule,
    graph: TracedCell,
    limits: dict[str, int],
    *,
    fold_bytes: int,
    planner: Planner | None,
    deterministic: bool,
) -> tuple[CellForms, tuple[str, ...]]:
    """Move a cell's graph to the device and optimise it in place; return its forms and notes on what was done.

    limits: number of tokens by input name. The rest is as for `bind`.
    """
    device = plain.device
    graph.move_to(device)
    with device:
        notes = [f"{kind} cut into input projection and step" for kind in cut_recurrent_cells(graph)]
    fold_constants(graph)
    packer = Packer(fuse=device == CPU, by_time=not deterministic)
    unplanned: Callable[[int], TracedCell | None] | None = None
    if planner is not None and deterministic:
        notes.append("not planned: plans are chosen by measured times, which deterministic=True excludes")
    elif planner is not None and device == CPU:
        plan = planner(graph)
        packer = plan.packer()
        notes.append(plan.note)
        if plan.graph is not graph:
            unplanned = plan.unplanned(graph, partial(_fold, limits=limits, fold_bytes=fold_bytes))
            graph = copied(plan.graph)
    elif planner is not None:
        notes.append(f"not planned: planning is for the CPU, this cell runs on {device}")
    notes += _fold(graph, limits, fold_bytes)
    return CellForms(plain, graph, packer, unplanned, deterministic=deterministic), tuple(notes)


def traced(module: nn.Module, inputs: tuple[ValueSpec, ...]) -> torch.export.ExportedProgram:
    """Return the module as a program with a dynamic batch. CannotRewriteError if it cannot be traced."""
    if isinstance(module, Opaque):
        raise CannotRewriteError(f"{module.kind} is opaque")
    return _traced(module, lambda shared: export_cell(shared, inputs))


def traced_whole(module: nn.Module, inputs: tuple[ValueSpec, ...], columns: int) -> torch.export.ExportedProgram:
    """Return a user's form for whole runs as a program; see `export_whole`. CannotRewriteError as for `traced`."""
    return _traced(module, lambda shared: export_whole(shared, inputs, columns))


def _traced(
    module: nn.Module, export: Callable[[nn.Module], torch.export.ExportedProgram]
) -> torch.export.ExportedProgram:
    try:
        return export(_with_shared_weights(module))
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


def _repeated(rows: Batch, count: int) -> Batch:
    return tuple([row.expand(count, *row.shape[1:]).contiguous() for row in rows])


@final
class BoundCell:
    """A module with known rows, ready to run. Made by `bind`.

    inputs, outputs: row specs; an integer input that indexes an embedding carries its num_tokens. hoisted: row specs of
    the results of `hoist`. ends_by_function: whether loops are known that a compiled call for greedy decoders cannot
    end, so that `warm_up` prepares the other one, too. num_memories: how many of the first inputs are memories, whose
    rows these are; `call` takes them as rows and numbers (see `compile.memories`), and the cell has no other form.
    places: see CellType.

    All calls take and return batches [n, *shape] on the cell's device. They never modify their arguments; an output may
    be an input that is passed through. The weights are those at binding: later changes of the module have no effect.
    """

    __slots__ = (
        "_chain_loop", "_forms", "_node_loop", "_notes", "_num_asked", "_split", "_splits", "_state_loop",
        "ends_by_function", "hoisted", "identity", "inputs", "name", "num_memories", "num_step_inputs", "outputs",
        "places",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        inputs: tuple[ValueSpec, ...],
        outputs: tuple[ValueSpec, ...],
        identity: CellIdentity,
        notes: tuple[str, ...],
        forms: CellForms,
        num_memories: int = 0,
        places: tuple[int, ...] = (),
    ) -> None:
        self.num_memories = num_memories
        self.places = places
        self.name = name
        self.inputs = inputs
        self.outputs = outputs
        self.identity = identity
        self._notes = notes
        self.hoisted: tuple[ValueSpec, ...] = ()
        self.num_step_inputs: int | None = None
        self._forms = forms
        self._split: Split | None = None
        self._chain_loop: ChainLoop | None = None
        self._node_loop: NodeChoice | None = None
        self._num_asked = 0
        self._state_loop: StateChoice | None = None
        self.ends_by_function = False
        self._splits: dict[int, BoundCell] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What was done to make it fast, or why nothing was done."""
        return (*self._notes, *self._forms.notes)

    @property
    def sample(self) -> Batch:
        """One real row of each output, [1, *shape], as the module gave it for the real row of each input."""
        return self._forms.sample

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The sizes at which a row has the same bits, for a deterministic engine; otherwise () for any."""
        return self._forms.batch_sizes

    def example(self, num_rows: int) -> Batch:
        """Return so many copies of the real row of each input, on the cell's device."""
        return _repeated(self._forms.example, num_rows)

    def split(self, num_step_inputs: int) -> BoundCell:
        """Return the same cell with its first inputs given step by step and the others as recurrent state.

        The result shares everything with this cell, and is made once per number. Raises ModelError if the trailing
        outputs do not have the rows of the state.
        """
        if num_step_inputs not in self._splits:
            self._check_state(num_step_inputs)
            split, notes = self._forms.split(self.inputs, num_step_inputs)
            made = BoundCell(
                self.name,
                self.inputs,
                self.outputs,
                self.identity,
                (*self._notes, *notes),
                self._forms,
                self.num_memories,
                self.places,
            )
            made.num_step_inputs, made._split, made.hoisted = num_step_inputs, split, split.hoisted
            step_inputs, state = self.inputs[:num_step_inputs], self.inputs[num_step_inputs:]
            made._chain_loop = chain_loop(split.looped, split.hoist, split.step, step_inputs, split.hoisted, state)
            self._splits[num_step_inputs] = made
        return self._splits[num_step_inputs]

    @property
    def num_hoisted_calls(self) -> int:
        """Number of operations of `hoist`; with none it passes its inputs on."""
        return self._need_split().num_hoisted_calls

    def call(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run one step: inputs [n, *shape] -> outputs [n, *shape]."""
        return self._forms.whole()(*inputs)

    def hoist(self, step_inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Compute the state-independent part for m rows at once: [m, *shape] -> hoisted values [m, ...]."""
        return self._need_split().hoist(*step_inputs)

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

    def node_loop_for(self, batch: int) -> NodeLoop | None:
        """Return the compiled call for tasks of single nodes, if it is faster than `call` for steps of `batch` rows.

        `warm_up` measures this; otherwise a call here does, once the cell has run for a while: most cells of an engine
        that did not warm up run a few times.
        """
        if self._node_loop is None:
            self._num_asked += 1
            if self._num_asked < OFTEN:
                return None
            self._node_loop = self._nodes_in_loop()
        return self._node_loop.fastest(batch)

    def _nodes_in_loop(self) -> NodeChoice:
        loop = self._forms.node_loop(self.inputs, self.outputs)
        return NodeChoice(loop, self._forms.whole(), self.example)

    @property
    def faster_in_loop(self) -> NDArray[np.bool_] | None:
        """[n] whether a compiled loop, of chains if it is split, else of single nodes, is faster for so many rows.

        Empty before this is measured; None if there is no loop.
        """
        choice = self._node_loop if self._split is None else self._chain_loop
        return None if choice is None or choice.loop is None else choice.faster

    @property
    def no_loop(self) -> str:
        """Why the step of a split cell has no compiled loop although it is a recurrent one; "" otherwise."""
        looped = None if self._split is None or self._chain_loop is not None else self._split.looped
        if looped is None:
            return ""
        return (
            f"no compiled loop for recurrent weights of {str(looped.step.weight_hh.dtype).removeprefix('torch.')} here"
        )

    @property
    def is_traced(self) -> bool:
        """Whether it may hold copies of weights; otherwise it runs the module as it is."""
        return self._forms.is_traced

    @property
    def runs_module(self) -> bool:
        """Whether it runs the module as it is, and no program that was made of it."""
        return isinstance(self._forms.whole() if self._split is None else self._split.step, PlainModule)

    @property
    def faster_in_state_loop(self) -> NDArray[np.bool_] | None:
        """[n] whether the compiled call for chains with any state is faster for so many rows.

        Empty before this is measured; None if there is none, or if nothing has asked for it yet.
        """
        return None if self._state_loop is None or self._state_loop.loop is None else self._state_loop.faster

    def state_loop_for(self, batch: int) -> StateLoop | None:
        """Return the compiled call for chains with any state, if it is faster than `step` for steps of `batch` rows.

        `warm_up` measures this; otherwise the first call here does.
        """
        split, count = self._split, self.num_step_inputs
        if split is None or count is None or isinstance(self.loop, RecurrentLoop):
            return None
        if self._state_loop is None:
            loop = self._forms.state_loop(split, self.inputs[count:], self.outputs, count)
            self._state_loop = StateChoice(loop, split.step, self._stepped_rows)
        return self._state_loop.fastest(batch)

    def _stepped_rows(self, num_rows: int) -> Batch:
        """Return so many rows of what `step` takes."""
        rows, count = self.example(1), self.num_step_inputs
        return _repeated((*self.hoist(rows[:count]), *rows[count:]), num_rows)

    def recurrence(self, num_step_inputs: int) -> Recurrence | None:
        """Return the cell as an LSTM or a GRU with so many inputs per step; None if it computes anything else."""
        return self._forms.recurrence(num_step_inputs)

    def _first_run(self, size: int, run: Callable[[Batch], Any]) -> None:
        """Run a batch of this size. ModelError if the cell raises."""
        rows = self.example(size)
        try:
            run(rows)
        except RAISED_BY_USERS as error:
            if lacks_memory(error):
                raise
            raise ModelError(
                f"cell {self.name!r}: its first run with a batch of {size} raised {said_by(error)}. {ANY_SIZE}"
            ) from error

    def warm_up(self, batch_sizes: Sequence[int], hoist_sizes: Sequence[int] = ()) -> None:
        """Run every size once, and measure the loops. No request then waits for oneDNN's preparations for a new size.

        batch_sizes: for `step`, or for `call` if the cell is not split. hoist_sizes: for `hoist`.
        """
        if self.num_memories:
            for size in batch_sizes:
                self._first_run(size, self.call)
            return
        split, count = self._split, self.num_step_inputs
        hoisted = () if split is None else split.hoist(*self.example(1)[:count])
        for size in batch_sizes:
            if count is None:
                self._first_run(size, self.call)
            else:
                self._first_run(size, lambda rows: self.step(_repeated(hoisted, len(rows[0])), rows[count:]))
        for size in hoist_sizes:
            self._first_run(size, lambda rows: self.hoist(rows[:count]))
        if self._chain_loop is not None:
            self._chain_loop.measure(batch_sizes, hoist_sizes)
        if self.num_step_inputs is not None and (self._chain_loop is None or self.ends_by_function):
            self.state_loop_for(batch_sizes[-1])
        if self.num_step_inputs is None:
            self._node_loop = self._nodes_in_loop()
            self._node_loop.measure(batch_sizes)

    def __repr__(self) -> str:
        inputs, outputs = (", ".join(map(str, side)) for side in (self.inputs, self.outputs))
        return f"BoundCell({self.name!r}: ({inputs}) -> ({outputs}))"

    def _need_split(self) -> Split:
        if self._split is None:
            raise ModelError(
                f"cell {self.name!r}: bound without num_step_inputs, so nothing is known to be state. "
                "Use call(), or split(num_step_inputs) first."
            )
        return self._split

    def _check_state(self, num_step_inputs: int) -> None:
        if not 0 <= num_step_inputs <= len(self.inputs):
            raise ModelError(
                f"cell {self.name!r}: got {num_step_inputs} step inputs, expected 0 to "
                f"{len(self.inputs)}, the inputs that it declares."
            )
        state = self.inputs[num_step_inputs:]
        if len(state) > len(self.outputs):
            raise ModelError(
                f"cell {self.name!r}: {len(state)} inputs are state but it returns {len(self.outputs)} "
                "outputs. Return the next state as the last outputs, in the order of the inputs."
            )
        fed = self.outputs[len(self.outputs) - len(state) :]
        for index, (old, new) in enumerate(zip(state, fed, strict=True), start=num_step_inputs):
            if old.row_signature != new.row_signature:
                raise ModelError(
                    f"{input_of(self.name, self.places, index)}: state rows are {old}, but the output that feeds "
                    f"them is {new}. Return the next state as the last outputs, in the order of the inputs."
                )
